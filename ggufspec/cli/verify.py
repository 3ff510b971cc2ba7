"""Command ``ggufspec verify``: certify that speculation changed nothing."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any

from rich.text import Text

from ggufspec.api.options import sampling
from ggufspec.bench.prompts import PROMPTS
from ggufspec.child import Interrupted
from ggufspec.cli import inputs, ui
from ggufspec.cli.parameters import FIXED_LENGTH, command, command_option, takes
from ggufspec.cli.results import check_exports, finish
from ggufspec.errors import StopError, UsageError
from ggufspec.models.profile import Pair
from ggufspec.reports import table
from ggufspec.reports import verify as report
from ggufspec.reports.words import penalties
from ggufspec.schema.text import counted, of_file
from ggufspec.schema.verify import VerifyDocument
from ggufspec.settings.registry import DRAFTERS, check_rule, drafter_text, parse_drafters, with_head
from ggufspec.settings.table import OPTIONS, Settings
from ggufspec.verify.certificate import EVERY_POLICY, LOSSLESS, TWO_POLICIES, CertificateJob
from ggufspec.verify.document import Files, certified_files, verify_document
from ggufspec.verify.run import VerifyResult, measure_exactness

_TOKENS, _SEEDS = 48, 2
_QUICK_PROMPTS, _QUICK_TOKENS, _QUICK_SEEDS = 2, 16, 1
_DRAFTERS = (*DRAFTERS, "both")


@command(
    "ggufspec verify demo",
    "ggufspec verify -m TARGET.gguf -md DRAFT.gguf --quick --export-json c.json",
    confirms=True,
)
def verify(
    *,
    prompt_count: Annotated[
        int | None, command_option("--prompt-count N", "Use this many of the bundled prompts.  [8, all]", min=1)
    ] = None,
    prompts: Annotated[int | None, command_option("--prompts N", "As --prompt-count.", min=1, hidden=True)] = None,
    seeds: Annotated[
        int | None, command_option("--seeds N", f"Answers per prompt at --temp.  [{_SEEDS}]", min=1)
    ] = None,
    quick: Annotated[
        bool,
        command_option(
            "--quick",
            f"Run a smoke test. It has {_QUICK_PROMPTS} prompts, {_QUICK_TOKENS} tokens, {_QUICK_SEEDS} seed and "
            "fewer draft lengths.",
        ),
    ] = False,
    drafter: Annotated[
        list[str] | None,
        command_option(f"--drafter {'|'.join(_DRAFTERS)}", "Check only this drafter (repeatable).  [all]"),
    ] = None,
    accept: Annotated[
        str | None, command_option("--accept RULE", "Check only this rule.  [exact and residual]")
    ] = None,
    no_hash: Annotated[
        bool, command_option("--no-hash", "Skip the files' SHA-256. The certificate then has none.")
    ] = False,
    given: Annotated[
        Settings,
        takes(
            *("profile", "files", "hub", "predict", "placement", "devices", "context", "sampling", "export_json"),
            predict={**FIXED_LENGTH, "shown": str(_TOKENS)},
            temp={"default": 0.8, "shown": "0.8", "help": "Temperature of sampled answers; above 0."},
        ),
    ],
) -> int:
    """Certify that speculation changed nothing. Compares every drafter with target-only, on the same prompts and seeds.

    Strict mode must give exactly the same tokens; so must default mode, except at near ties within rounding; samples of
    the residual rule must follow the target's own distribution. The exit code is 0 only if all of this holds.

    It generates about 25,000 tokens: a minute or two for the bundled pair on two cores, hours for a model that does 2
    tokens/s. --quick generates about 1,000; use -n, --prompt-count and --seeds for anything in between.
    """
    rules = _rules(accept)
    if given.value("temp") <= 0:
        raise UsageError(f"--temp {given.temp} is greedy; greedy answers are checked anyway", "--temp 0.8 is usual")
    check_exports(given)
    pair = inputs.pair(given)
    checked = _drafters(drafter, pair)
    own_head = any(parse_drafters(name)[:1] == ("mtp",) for name in checked) and pair.draft is None
    longest = max(policy.draft_max for policy in EVERY_POLICY)
    widest = "both" if pair.draft else "mtp+lookup" if own_head else "lookup"
    # Place the pair for the most demanding check.
    resolved = inputs.resolve_shown(pair, replace(given, drafter=widest, draft_max=longest, strict=True))
    prompt_count = prompt_count or prompts
    if prompt_count is not None and prompt_count > len(PROMPTS):
        message = f"--prompt-count {prompt_count}: there are {len(PROMPTS)} bundled prompts"
        raise UsageError(message, "--seeds gives more answers")
    named = (drafter_text(with_head(parse_drafters(name), resolved.pair.head)) for name in checked)
    count = prompt_count or (_QUICK_PROMPTS if quick else len(PROMPTS))
    spec = CertificateJob(
        target=pair.target,
        draft=pair.draft,
        options=replace(resolved.pair, strict=False),
        drafters=tuple(dict.fromkeys(named)),
        rules=rules,
        prompts=tuple(prompt.text for prompt in PROMPTS[:count]),
        max_tokens=given.predict or (_QUICK_TOKENS if quick else _TOKENS),
        sampling=sampling(inputs.with_seed(given)),
        seeds=seeds or (_QUICK_SEEDS if quick else _SEEDS),
        policies=TWO_POLICIES if quick else EVERY_POLICY,
        rpc=given.rpc or (),
    )
    result, read = _measure(spec, no_hash=no_hash)
    document = verify_document(pair, spec, result, read)
    return finish(document, lambda: _show(document), given, hint="") or (0 if document.passed else 1)


def _rules(accept: str | None) -> tuple[str, ...]:
    if accept is None:
        return LOSSLESS
    check_rule(accept)
    if accept not in LOSSLESS:
        hint = "omit --accept to certify both lossless rules, exact and residual"
        raise UsageError(f"--accept {accept} is lossy: there is nothing to certify", hint)
    return (accept,)


def _drafters(given: list[str] | None, pair: Pair) -> tuple[str, ...]:
    """Return the given drafters; by default all that the pair has (without a draft model, only n-gram lookup)."""
    if "none" in (given or ()):
        raise UsageError("--drafter none leaves nothing to check", "one of " + ", ".join(_DRAFTERS))
    chosen = tuple(dict.fromkeys(OPTIONS["drafter"].check(name) for name in given or ()))
    if pair.draft is None:
        if any(DRAFTERS[name].needs_file for one in chosen for name in parse_drafters(one)):
            raise UsageError("the pair has no draft, but a drafter needs one", "give a draft with -md or -hfd")
        return chosen or ("lookup",)
    return chosen or ("draft", "lookup", "both")


def _measure(spec: CertificateJob, *, no_hash: bool) -> tuple[VerifyResult, Files]:
    """Hash the models' files and run the checks; after Ctrl-C, return the completed checks."""
    try:
        with ui.progress() as progress:
            files = certified_files(spec, progress, no_hash=no_hash)

            def on_event(event: dict[str, Any]) -> None:
                if event["event"] == "progress":
                    progress(event["done"], event["total"], event["what"])

            return measure_exactness(spec, on_event=on_event, verbose=ui.flags().verbose), files
    except Interrupted as stop:
        if not stop.partial.checks:
            raise StopError("interrupted before anything was checked") from None
        return stop.partial, files
    except KeyboardInterrupt:
        raise StopError("interrupted before anything was checked") from None


def _show(document: VerifyDocument) -> None:
    out = ui.out()
    for role in ("target", "draft"):
        described = document.models[role]
        for file in described["files"] if described else ():
            out.print(Text.assemble((f"{role:<6} ", "bold"), f"{file['name']}  ", (_size(described, file), "dim")))
            if file["sha256"]:
                out.print(f"       SHA-256 {file['sha256']}", style="dim")
    settings = document.settings
    parts = (
        f"{counted(settings['prompts'], 'prompt')} × {counted(settings['max_tokens'], 'token')}",
        f"greedy and temperature {settings['temperature']:g}",
        penalties(settings),
        counted(settings["seeds"], "seed"),
        counted(settings["threads"], "thread"),
    )
    out.print(", ".join(filter(None, parts)), style="dim")
    for name, title in report.TITLES.items():
        checks = [check for check in document.checks if check.section == name]
        if checks:
            out.print(f"\n{title}", style="bold")
            out.print(table.terminal(report.check_rows(checks)))
            for check in checks:
                for line in report.details(check):
                    out.print(line, style="red" if check.status == "failed" else "dim")
    out.print(document.verdict, style="bold green" if document.passed else "bold red")
    for note in document.notes:
        out.print(note, style="dim")


def _size(described: dict[str, Any], file: dict[str, Any]) -> str:
    parts = [described["description"]] if "description" in described else []
    return f"({', '.join([*parts, of_file(file['size_bytes'])])})"
