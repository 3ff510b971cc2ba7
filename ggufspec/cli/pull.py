"""Command ``ggufspec pull``: download, resume and verify a pair's files; also for commands that need them."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated

from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.table import Column

from ggufspec.child import Emit, Event
from ggufspec.cli import ui
from ggufspec.cli.parameters import command, command_option, takes
from ggufspec.errors import GgufspecError, ModelError, StopError, UsageError
from ggufspec.models.heads import sidecar
from ggufspec.models.hub import client, download
from ggufspec.models.hub.choice import HubName, hub_file, parse_name
from ggufspec.models.hub.client import HubFile
from ggufspec.models.hub.download import DownloadOrder, check_disk
from ggufspec.models.hub.repository import last_read
from ggufspec.models.profile import load_profile, on_hub
from ggufspec.reports import table
from ggufspec.reports.words import shortened
from ggufspec.schema.pull import PullDocument, PulledFile
from ggufspec.schema.text import counted, of_download
from ggufspec.settings.table import Settings


@command(
    "ggufspec pull llama3-70b --dry-run",
    "ggufspec pull -hf USER/REPO:Q4_K_M -hfd USER/SMALL-REPO:Q8_0 -y",
    "ggufspec pull -hf USER/REPO --row 3",
    confirms=True,
)
def pull(
    *,
    dry_run: Annotated[bool, command_option("--dry-run", "Show files, sizes and free disk; download nothing.")] = False,
    row: Annotated[
        int | None, command_option("--row N", "Target, by its row number in the table that plan -hf USER/REPO prints.")
    ] = None,
    given: Annotated[Settings, takes("profile", "hub")],
) -> int:
    """Download a pair's files into the Hugging Face cache. All of them are verified.

    Interrupted downloads resume. Existing files are verified too.
    """
    if row is not None:
        given = replace(given, hf_repo=_of_row(given.hf_repo, row))
        ui.note(f"row {row} is {given.hf_repo}")
    sources = _sources(given.pair, given.hf_repo, given.hf_repo_draft)
    again = command_line(given.pair, given.hf_repo, given.hf_repo_draft)
    order = download.look_up(sources)
    if not dry_run:
        _ask(order, again)
        order = _fetch(order, again)
    document = _document(order, dry_run, _heads(given.hf_repo, order))
    if sources or ui.flags().json:
        ui.result(document, lambda: _show(document))
    else:
        ui.note(f"{given.pair or 'demo'} is here: its profile names local files")
    for file in document.heads if given.hf_repo and not ui.flags().json else ():
        ui.note(_offered(parse_name(str(given.hf_repo)), file))
    return 0


def _of_row(repo: str | None, row: int) -> str:
    if repo is None or (name := parse_name(repo)).model:
        raise UsageError("--row needs a repository without a QUANT", "ggufspec pull -hf USER/REPO --row 3")
    found = last_read(name.repo, name.revision)
    if found is None:
        hint = f"ggufspec plan -hf {repo} prints one if it has several models"
        raise UsageError(f"no table of {repo} was printed here", hint)
    if not 1 <= row <= len(found.models):
        raise UsageError(f"the table of {repo} has {counted(len(found.models), 'row')}", f"ggufspec plan -hf {repo}")
    return str(replace(name, model=found.models[row - 1].file))


def _heads(repo: str | None, order: DownloadOrder) -> tuple[str, ...]:
    """Return the heads in the target's repository that were not requested."""
    if repo is None:
        return ()
    name, named = parse_name(repo), {item.source.file for item in order.items}
    heads = client.choose_names(name.repo, name.revision, lambda files: filter(sidecar, files))
    return tuple(sorted(file for file in heads if file.endswith(".gguf") and file not in named))


def _offered(target: HubName, file: str) -> str:
    kind = sidecar(file)
    assert kind is not None
    fetch = f"-hfd {replace(target, model=file)} fetches it too" if kind.drafter else "ggufspec cannot run it"
    return f"{target.repo} has {kind.what} for it, {file}: {fetch}"


def have(sources: Sequence[HubFile], name: str, again: str) -> tuple[Path, ...]:
    """Return local files of models that a command is about to run; download missing ones first, after asking.

    A source may be any part of a split model. Messages contain ``name`` and ``again``, the download command.
    """
    missing = [source for source in sources if download.cached_model(source) is None]
    if missing:
        if not ui.flags().yes and not ui.can_ask():
            files = " and ".join(f"{source.repo}/{source.file}" for source in missing)
            verb = "is" if len(missing) == 1 else "are"
            raise ModelError(f"{files} of {name} {verb} not on this machine", again)
        order = download.look_up(missing)
        _ask(order, again)
        _fetch(order, again)
    paths = [download.cached_model(source) for source in sources]
    return tuple(path for path in paths if path is not None)


def command_line(name: str | None, repo: str | None, draft_repo: str | None) -> str:
    flags = (("-hf", repo), ("-hfd", draft_repo))
    words = [name] if name else []
    return shlex.join(["ggufspec", "pull", *words, *(word for flag in flags if flag[1] for word in flag if word)])


def _sources(name: str | None, repo: str | None, draft_repo: str | None) -> tuple[HubFile, ...]:
    if name is not None and repo is not None:
        raise UsageError("both a PAIR and -hf are given", "give one of them")
    found: list[HubFile] = []
    if repo is not None:
        found.append(hub_file(repo))
    elif name is not None or draft_repo is None:
        profile = load_profile(name or "demo")
        both = profile.target, None if draft_repo else profile.draft
        found = [source for model in both if model and (source := on_hub(model))]
    if draft_repo is not None:
        found.append(hub_file(draft_repo, draft=True))
    return tuple(dict.fromkeys(found))


def _ask(order: DownloadOrder, again: str) -> None:
    """Ask whether to download missing files; raise an error if the user refuses or the disk is too full."""
    missing = [item for item in order.items if item.path is None]
    if not missing:
        return
    check_disk(order)
    if ui.flags().yes:
        return
    what = f"{counted(len(missing), 'file')}, {of_download(order.missing_bytes)}"
    if not ui.can_ask():
        raise GgufspecError(f"{what}, would be downloaded, but there is no terminal to ask on", f"{again} -y")
    for item in missing:
        ui.note(f"{item.source}: {of_download(item.missing_bytes)} of {of_download(item.size_bytes)} are missing")
    question = f"Fetch {what}, to {order.folder} ({of_download(order.free_bytes)} free)?"
    if not ui.confirmed(question, default=True):
        raise GgufspecError("nothing was downloaded", f"{again} -y")


def _fetch(order: DownloadOrder, again: str) -> DownloadOrder:
    try:
        with _bars() as show:
            return download.fetch(order, show)
    except KeyboardInterrupt:
        raise StopError("interrupted; what was downloaded is kept", f"{again}, which resumes") from None


def _note_pause(event: Event) -> None:
    if event["event"] == "waiting":
        ui.show_pause(None, str(event["why"]), event["seconds"])


@contextmanager
def _bars() -> Iterator[Emit]:
    """Show a bar with bytes, rate and time left for the current file if stderr is interactive."""
    err = ui.err()
    if not ui.is_live():
        yield _note_pause
        return
    room = max(12, err.width - 48)  # columns left for the name and the bar
    columns = (
        TextColumn("{task.description}", markup=False, table_column=Column(no_wrap=True, overflow="ellipsis")),
        BarColumn(bar_width=10 + min(30, max(0, room - 60))),
        DownloadColumn(table_column=Column(no_wrap=True)),
        TransferSpeedColumn(table_column=Column(no_wrap=True)),
        TimeRemainingColumn(compact=True, table_column=Column(no_wrap=True)),
    )
    with Progress(*columns, console=err, transient=True) as bars, ui.above(err):
        task, before = bars.add_task("", total=None), ("", "")

        def show(event: Event) -> None:
            nonlocal before
            file, phase, done = str(event["file"]), str(event["event"]), int(event["bytes"])
            name = file.partition("@")[0].rsplit("/", 1)[-1]
            pause_s = max(1, round(event.get("seconds", 0)))
            state = {"waiting": f"again in {pause_s} s: ", "checking": "checking "}.get(phase, "")
            text = shortened(state + name, min(room, 60))
            if (file, phase) != before:
                bars.reset(task, total=event["total"], completed=done, description=text)  # this restarts the rate
                before = file, phase
            else:
                bars.update(task, completed=done, description=text)

        yield show


def _document(order: DownloadOrder, dry_run: bool, heads: tuple[str, ...]) -> PullDocument:
    files = tuple(
        PulledFile(
            repo=item.source.repo,
            file=item.source.file,
            revision=item.source.revision,
            commit=item.commit,
            bytes=item.size_bytes,
            sha256=item.sha256,
            verified=item.verified,
            path=str(item.path) if item.path else None,
            downloaded_bytes=item.downloaded_bytes,
            present_bytes=item.present_bytes,
        )
        for item in order.items
    )
    return PullDocument(files, order.free_bytes, order.missing_bytes, str(order.folder), dry_run, heads)


def _show(document: PullDocument) -> None:
    numbers = ("Size", "Here", "To fetch") if document.dry_run else ("Size", "Fetched")
    verified = [] if document.dry_run else [table.word("Verified")]
    columns = table.columns(table.words("File"), *numbers, table.word("Commit"), *verified)
    rows = []
    for file in document.files:
        here = [file.present_bytes, file.bytes - file.present_bytes] if document.dry_run else [file.downloaded_bytes]
        checked = () if document.dry_run else ("yes" if file.verified else "the hub has no digest",)
        name, commit = f"{file.repo}/{file.file}", file.commit[:9]
        rows.append((name, *map(of_download, (file.bytes, *here)), commit, *checked))
    out = ui.out()
    out.print(table.terminal(table.ReportTable("", columns, tuple(rows))))
    needed = f"{of_download(document.needed_bytes)} to fetch, " if document.dry_run else ""
    out.print(f"{needed}{of_download(document.free_bytes)} free for {document.folder}", style="dim", soft_wrap=True)
