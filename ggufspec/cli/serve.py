"""Command ``ggufspec serve``: serve a pair at an OpenAI-compatible HTTP endpoint."""

from __future__ import annotations

import contextlib
import json
import os
import stat
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from ggufspec.cli import inputs, models, ui
from ggufspec.cli.command import OWN, RARE
from ggufspec.cli.parameters import command, command_option, takes
from ggufspec.cli.plan import show_plan
from ggufspec.cli.run import prepare_pair
from ggufspec.errors import ChildError, ModelError, StopError, UsageError
from ggufspec.files import untrusted
from ggufspec.files.write import as_file_name
from ggufspec.models.profile import find_profile, load_profile
from ggufspec.reports.words import share
from ggufspec.serve import http, vocabulary
from ggufspec.serve.app import LOCAL, AccessRules, Endpoint
from ggufspec.serve.engine import ServerProcess
from ggufspec.serve.session import ChatJob, ChatReady, ServeReply
from ggufspec.settings.table import Settings

SCHEMA = "ggufspec/serve@1"
_MOST_KEYS_BYTES = 1 << 16
_MOST_TEMPLATE_BYTES = 1 << 20


@command(
    "ggufspec serve -m TARGET.gguf -md DRAFT.gguf --parallel 2 --port 8080",
    "ggufspec serve qwen3-14b --host 0.0.0.0 --api-key-file keys.txt",
    confirms=True,
)
def serve(
    *,
    host: Annotated[
        str, typer.Option("--host", metavar="ADDRESS", help="Address to serve on. 0.0.0.0 lets the whole network in.")
    ] = "127.0.0.1",
    port: Annotated[
        int, typer.Option("--port", metavar="N", min=0, max=2**16 - 1, help="Port to serve on. 0 picks a free one.")
    ] = 8080,
    api_key: Annotated[
        list[str] | None,
        typer.Option(
            "--api-key",
            metavar="KEY",
            help="Key that clients must send (repeatable).",
            envvar="GGUFSPEC_API_KEY",
            show_envvar=False,
        ),
    ] = None,
    api_key_file: Annotated[
        Path | None,
        typer.Option(
            "--api-key-file",
            metavar="FILE",
            help="Read keys from this file, one per line. It must be readable only by you.",
        ),
    ] = None,
    no_api_key: Annotated[
        bool,
        typer.Option(
            "--no-api-key",
            help="Allow access from the network without a key. Needed only if --host is not local.",
            rich_help_panel=OWN + RARE,
        ),
    ] = False,
    cors: Annotated[
        list[str] | None,
        typer.Option(
            "--cors",
            metavar="ORIGIN",
            help="Allow browser requests from this origin. Repeatable; `*` for any.",
            rich_help_panel=OWN + RARE,
        ),
    ] = None,
    queue: Annotated[
        int,
        typer.Option(
            "--queue", metavar="N", min=1, max=10_000, help="Maximum waiting requests.", rich_help_panel=OWN + RARE
        ),
    ] = 64,
    grace: Annotated[
        float,
        typer.Option(
            "--grace",
            metavar="SECONDS",
            min=0,
            max=3600,
            help="On shutdown, wait this long for the answer in progress.",
            rich_help_panel=OWN + RARE,
        ),
    ] = 5.0,
    chat_template: Annotated[
        Path | None,
        command_option("--chat-template FILE", "Use this Jinja chat template instead of the target's.", rare=True),
    ] = None,
    alias: Annotated[
        str | None,
        typer.Option(
            "-a",
            "--alias",
            metavar="NAME",
            help="Model names for clients. Separate several with commas.  [the pair's]",
        ),
    ] = None,
    tags: Annotated[
        str,
        typer.Option(
            "--tags",
            metavar="TAG",
            help="Tags of the model in /v1/models. Separate several with commas.",
            rich_help_panel=OWN + RARE,
        ),
    ] = "",
    log_requests: Annotated[
        Path | None,
        typer.Option(
            "--log-requests",
            metavar="FILE",
            help="Append every request to this file. `bench --prompts` reads it; it contains what users wrote.",
            rich_help_panel=OWN + RARE,
        ),
    ] = None,
    profile_from_tune: Annotated[
        bool,
        typer.Option("--profile-from-tune", help="Serve the profile that `tune` saved, or fail."),
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the plan and exit.")] = False,
    given: Annotated[
        Settings,
        takes(
            *("profile", "files", "hub", "target-only", "placement", "devices", "drafting", "context", "parallel"),
            "reasoning",
            parallel={"rare": False, "shown": "4 if memory allows"},
            pair={"shown": "a list"},
        ),
    ],
) -> int:
    """Serve a pair to editors and agents over OpenAI's HTTP API.

    Up to four answers are generated at once (--parallel N). The page at / shows what the server does. A profile that
    `tune` saved is served as it was tuned.
    """
    if models.is_missing(given):
        raise models.no_model_error("serve")
    if profile_from_tune:
        given = _tuned(given)
    if dry_run:
        return _plan(given)
    keys = _keys(api_key or [], api_key_file)
    if no_api_key and keys:
        raise UsageError("both --no-api-key and a key are given", "give one of them")
    template = untrusted.read_text(chat_template, _MOST_TEMPLATE_BYTES, failure=UsageError) if chat_template else ""
    verbose = ui.flags().verbose
    with http.listen(host, port) as bound, _log(log_requests) as on_request:  # before loading, so typos fail at once
        is_local = http.is_loopback(bound)
        if not (is_local or keys or no_api_key):
            raise UsageError(
                f"anyone who can reach {host} could use the model, so a key is required",
                "--api-key-file FILE, or --no-api-key on a network that you trust",
            )
        pair, resolved = prepare_pair(given, serves=True)
        spec = ChatJob(pair.target, pair.draft, resolved.pair, given.rpc or (), template, resolved.target_s)
        with (
            contextlib.closing(vocabulary.TokenizerProcess(vocabulary.TokenizerJob(pair.target, template))) as desk,
            contextlib.closing(ServerProcess(spec, most_waiting=queue, verbose=verbose)) as engine,
        ):
            if chat_template:
                _try(chat_template, desk)
            engine.on_restart.append(lambda why: ui.note(f"the model's process ended and is being restarted: {why}"))
            name = models.called(pair)
            drafts = resolved.pair.drafts(with_draft=pair.draft is not None)
            ready = _loaded(engine, name)
            rules = AccessRules(keys, tuple(cors or ()), (*LOCAL, http.name(bound), host.lower()) if is_local else ())
            endpoint = Endpoint(
                engine,
                desk,
                sorted(_words(alias or "")) or [name],  # sorted as in llama-server
                tags=_words(tags),
                thinks={"on": True, "off": False}.get(given.reasoning or ""),
                rules=rules,
                verbose=verbose,
                on_answer=_access,
                on_request=on_request,
            )
            try:
                ended_by = http.serve_http(
                    endpoint.app(),
                    engine,
                    bound,
                    grace_s=grace,
                    on_started=lambda: _announce(
                        name, http.endpoint_url(bound), ready, drafts=drafts, needs_key=bool(keys)
                    ),
                    verbose=verbose,
                )
            except KeyboardInterrupt:
                return 130
    return 128 + ended_by if ended_by else 0


def _words(text: str) -> list[str]:
    return [*dict.fromkeys(word for part in text.split(",") if (word := part.strip()))]


def _try(file: Path, desk: vocabulary.TokenizerProcess) -> None:
    """Render a prompt before any weights are loaded, in case the template is invalid or malicious."""
    try:
        desk.answer(vocabulary.TokenizerRequest(messages=({"role": "user", "content": "Hello"},)))
    except (ModelError, ChildError) as error:
        if "refuses this conversation" not in error.message:  # the template may accept others
            raise UsageError(
                f"{file} cannot be used: {error.message}", "fix it, or leave --chat-template out"
            ) from None


def _loaded(engine: ServerProcess, name: str) -> ChatReady:
    try:
        with ui.busy(f"loading {name}"):
            ready = engine.start()
    except KeyboardInterrupt:
        raise StopError("interrupted before the pair was loaded") from None
    for note in ready.notes:
        ui.note(note)
    return ready


def _plan(given: Settings) -> int:
    spec = inputs.pair_spec(given)
    if (given.parallel or 1) > 1:
        inputs.resolve_shown(spec, given)  # refuses more conversations than fit
    document = inputs.make_plan_shown(inputs.open_here(spec, given)).document()
    ui.result(document, lambda: show_plan(document))
    return 0


def _tuned(given: Settings) -> Settings:
    """Return ``given`` with the profile that ``tune`` saved for the pair or, by the target's name, for these files."""
    name = given.pair or as_file_name(Path(str(given.model or given.hf_repo)).stem)
    ask = f"ggufspec tune {given.pair}" if given.pair else "ggufspec tune -m TARGET.gguf -md DRAFT.gguf"
    try:
        profile = load_profile(find_profile(name))
    except UsageError:
        raise UsageError(f"no profile was tuned as {name}", ask) from None
    if profile.tuned is None:
        raise UsageError(f"{name} was not tuned", ask)
    return replace(given, pair=name, model=None, model_draft=None, hf_repo=None, hf_repo_draft=None)


def _keys(given: list[str], file: Path | None) -> tuple[str, ...]:
    keys = [*given]
    if file is not None:
        text = untrusted.read_text(file, _MOST_KEYS_BYTES, failure=UsageError)
        if file.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO):
            raise UsageError(f"other users can read {file}", f"chmod 600 {file}")
        keys += [line.strip() for line in text.splitlines() if line.strip()]
        if not keys:
            raise UsageError(f"{file} has no key", "write one per line")
    if any(not key.isascii() or not key.isprintable() or not key.strip() for key in keys):
        raise UsageError("an API key is empty, or not all printable ASCII", "--api-key $(openssl rand -hex 24)")
    return tuple(keys)


@contextlib.contextmanager
def _log(file: Path | None) -> Iterator[Callable[[str], None]]:
    """Yield a function that logs requests to a file readable only by its owner; a full disk does not end an answer."""
    if file is None:
        yield lambda _: None
        return
    try:
        descriptor = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    except OSError as error:
        raise UsageError(f"{file} cannot be written: {error.strerror}", f"ls -ld {file.parent}") from None
    with os.fdopen(descriptor, "a", encoding="utf-8") as log:

        def append(line: str) -> None:
            try:
                print(line, file=log, flush=True)
            except OSError as error:
                ui.note(f"a request was not logged to {file}: {error.strerror}")

        yield append


def _announce(name: str, url: str, ready: ChatReady, *, drafts: bool, needs_key: bool) -> None:
    if ui.flags().json:
        document = {"schema": SCHEMA, "endpoint": url, "pair": name, "ctx_size": ready.ctx_size}
        ui.data(json.dumps(document | {"parallel": ready.parallel, "needs_key": needs_key}))
        return
    err = ui.err()
    idle = "" if drafts else " (target-only: nothing is drafted)"
    err.say(f"serving {name}{idle} at {url}; Ctrl-C ends it")
    key = " -H 'Authorization: Bearer KEY'" if needs_key else ""
    path, body = ("chat/completions", '{"messages": [{"role": "user", "content": "Hello"}]}')
    if not ready.chat_template:
        path, body = "completions", '{"prompt": "def main(", "max_tokens": 32}'
        ui.note("the model has no chat template: only completions are answered (--chat-template FILE gives one)")
    json_type = " -H 'Content-Type: application/json'"
    err.whole("  try: ", (f"curl {url}/v1/{path}{key}{json_type} -d '{body}'", "bold"))
    ui.note(f"  base URL for editors and agents: {url}/v1\n  page: {url}/")


def _access(reply: ServeReply, seconds: float) -> None:
    if not (ui.is_live() or ui.flags().verbose):
        return
    took = reply.statistics
    parts = [f"{took.prompt_tokens} + {took.tokens} tokens"]
    if reply.cached:
        parts.append(f"{reply.cached} cached")
    if took.tokens_per_s:
        parts.append(f"{took.tokens_per_s:.1f} tokens/s")
    if took.drafted:
        parts += [f"{share(took.accepted, took.drafted)} accepted", f"{took.tokens_per_round:.2f} tokens/round"]
    if reply.target_only_s and took.decode_s and took.drafted:
        parts.append(f"{reply.target_only_s / took.decode_s:.2f}× target-only")
    parts.append(f"{seconds:.1f} s{'' if took.stop_reason else ', cut'}")
    ui.note(", ".join(parts))
    for note in reply.notes:
        ui.note(note)
