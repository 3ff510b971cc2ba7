"""Evidence for people: a folder's summary, and the index of all folders, as Markdown from the JSON files alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from ggufspec.schema.base import Spread
from lab.evidence_documents import (
    PARTS,
    SUMMARY_FILE,
    BytesFound,
    CalibrationFound,
    ChecksFound,
    ClassesFound,
    LargestFound,
    Part,
    Row,
    Run,
    SpeedFound,
    Way,
    WidthsFound,
    folders,
    read_part,
)

_WIDTHS_SHOWN = (2, 3, 4, 5, 6, 8, 12, 16, 32, 64, 128, 256)
_WORST_SHOWN = 5

Table = tuple[Sequence[str], Iterable[Sequence[str]]]


# ---- one folder ------------------------------------------------------------------------------------------------------


def summary(run: Run, parts: Sequence[Part[Any]]) -> str:
    """Summarise a folder.

    Args:
        run: origin of the figures.
        parts: its documents.
    """
    lines = [f"# {run.card.description}, {run.date}", "", *_heading(run)]
    for part in parts:
        lines += ["", f"## {part.part}. {part.title[0].upper()}{part.title[1:]}", ""]
        lines += [*_SECTIONS[part.part](part)]
        lines += [line for note in part.notes for line in ("", f"Note: {note}.")]
        lines += [*_missing(part)]
    return "\n".join(lines).rstrip() + "\n"


def _heading(run: Run) -> Iterator[str]:
    card, machine, settings = run.card, run.machine, run.settings
    ceiling = f", at most {_gib(card.ceiling_bytes)} of them used" if card.ceiling_bytes else ""
    threads = settings.get("threads")
    driver = f", driver {card.driver}" if card.driver else ""
    yield f"Device `{card.name}`, {_gib(card.total_bytes)}{ceiling}{driver}; {machine.get('cpu')}, "
    yield f"{threads} thread{'s' * (threads != 1)}; ggufspec {machine.get('ggufspec')}, llama-cpp-python "
    yield f"{machine.get('llama_cpp_python')}. {str(settings.get('shapes')).capitalize()} shapes: the pair that ships, "
    yield "expanded; the text and the acceptance are the small pair's as far as the weight types allow."
    for note in run.notes:
        yield f"Note: {note}."
    seconds = sum(one.seconds for one in run.sittings)
    yield ""
    yield f"`{run.sittings[-1].command}`; {len(run.sittings)} sitting{'s' * (len(run.sittings) > 1)}, {seconds:.0f} s."


def _missing(part: Part[Any]) -> Iterator[str]:
    """List failed rows, and rows not run."""
    for row in part.rows:
        if row.state == "failed":
            yield f"- failed: {row.name}: {row.error}"
    left = [row for row in part.rows if row.state == "not run"]
    if not left:
        return
    reasons: dict[str, list[str]] = {}
    for row in left:
        reasons.setdefault(row.error, []).append(row.name)
    for reason, names in reasons.items():
        took = sum(row.expected_s for row in left if row.error == reason)
        why = reason or f"about {took:.0f} s"
        yield ""
        yield f"Not run yet, {len(names)} ({why}): {'; '.join(names)}."


def _done(part: Part[Any], kind: type) -> list[tuple[Row[Any], Any]]:
    """Return rows whose results have this type, with the results."""
    return [(row, row.found) for row in part.rows if isinstance(row.found, kind)]


def _bytes(part: Part[Any]) -> Iterator[str]:
    found: list[tuple[Row[Any], BytesFound]] = _done(part, BytesFound)
    if not found:
        return
    rows = []
    for row, one in found:
        counted, overhead = one.device_bytes, "–"
        if counted is not None and one.allocated.total:
            overhead = _mib(counted - one.allocated.total)
        rows.append(
            (
                row.name,
                ", ".join(f"{model.gpu_layers}/{model.layers}" for model in one.models),
                _mib(one.estimate.total),
                _mib(one.dry.total),
                _mib(one.allocated.total),
                "–" if counted is None else _mib(counted),
                _share(one.planned_bytes, counted) if one.allocated.total else "–",
                overhead,
            )
        )
    heads = ("row", "layers", "estimate", "dry run", "allocated", "device", "planned ÷ device", "beyond the allocated")
    yield from _table((heads, rows))
    yield ""
    yield (
        "MiB. The dry run is what the planner goes by; the planned bytes have what was known of the driver's own share "
        "before that row. What the device counts beyond the allocated is the driver's: of one model for a process, of "
        "a pair also for the second model and its context."
    )
    wrong = [one for _, one in found if one.dry != one.allocated]
    equal = len(found) - len(wrong)
    yield f"llama.cpp allocated to the byte what its dry run said in {equal} of {len(found)} rows."


def _largest(part: Part[Any]) -> Iterator[str]:
    found: list[tuple[Row[Any], LargestFound]] = _done(part, LargestFound)
    if not found:
        return
    rows = [
        (
            row.name,
            _gib(one.ceiling_bytes),
            f"{one.planned}/{one.target.layers}",
            f"{one.largest}/{one.target.layers}",
            "; ".join(f"{tried.gpu_layers}: {'fits' if tried.fits else tried.why}" for tried in one.tried),
        )
        for row, one in found
    ]
    yield from _table((("target", "ceiling", "planned", "largest that loads", "tried"), rows))


def _widths(part: Part[Any]) -> Iterator[str]:
    found: list[tuple[Row[Any], WidthsFound]] = _done(part, WidthsFound)
    if not found:
        return
    measured = {width for _, one in found for width in one.relative}
    shown = [width for width in _WIDTHS_SHOWN if width in measured]
    rows = [
        (
            row.name,
            f"{1000 * median(one.seconds[1]):.2f}",
            *(f"{one.relative[width]:.2f}" if width in one.relative else "–" for width in shown),
        )
        for row, one in found
    ]
    yield from _table((("weights", "T(1), ms", *(f"T({width}) ÷ T(1)" for width in shown)), rows))


def _ways(part: Part[Any]) -> Iterator[str]:
    if not part.ways:
        return
    has_peer = any(way.over_peer for way in part.ways)
    for pair in dict.fromkeys(way.pair for way in part.ways):
        rows = [
            (
                way.name,
                f"{way.gpu_layers}/{way.layers}" + _draft(way),
                _spread(way.tokens_per_s),
                "–" if way.acceptance_rate is None else f"{way.acceptance_rate:.0%}",
                "–" if way.tokens_per_round is None else f"{way.tokens_per_round:.2f}",
                _ratio(way.over_target_only),
                *((_ratio(way.over_peer),) if has_peer else ()),
            )
            for way in part.ways
            if way.pair == pair
        ]
        heads = ["way of running", "layers", "tokens/s", "accepted", "tokens a round", "÷ target-only"]
        yield f"{pair}:"
        yield ""
        yield from _table(((*heads, *(("÷ llama.cpp's at its best length",) if has_peer else ())), rows))
        yield ""
    few = min(len(way.tokens_per_s.samples) for way in part.ways)
    yield "Medians with their 95 % intervals; ratios are of the same repetition." + (
        f" With {few} repetition{'s' * (few > 1)} an interval means little." if few < 3 else ""
    )


def _draft(way: Way) -> str:
    return "" if way.gpu_layers_draft is None else f" + {way.gpu_layers_draft}"


def _speed(part: Part[Any]) -> Iterator[str]:
    found: list[tuple[Row[Any], SpeedFound]] = _done(part, SpeedFound)
    if not found:
        yield "Nothing to compare yet." if _done(part, CalibrationFound) else "The machine is not calibrated yet."
        return
    off = sorted(found, key=lambda pair: -abs(pair[1].predicted / pair[1].measured - 1))
    errors = [abs(one.predicted / one.measured - 1) for _, one in off]
    yield (
        f"{len(found)} placements and ways of running: the median error is {median(errors):.0%}, "
        f"{sum(error <= 0.1 for error in errors)} are within 10 %. The furthest off:"
    )
    yield ""
    rows = [
        (
            row.name,
            " + ".join(f"{model.gpu_layers}/{model.layers}" for model in one.models),
            f"{one.measured:.1f}",
            f"{one.predicted:.1f}",
            f"{one.predicted / one.measured - 1:+.0%}",
        )
        for row, one in off[:_WORST_SHOWN]
    ]
    yield from _table((("what", "layers", "measured t/s", "predicted t/s", "off"), rows))


def _exactness(part: Part[Any]) -> Iterator[str]:
    classes: list[tuple[Row[Any], ClassesFound]] = _done(part, ClassesFound)
    if classes:
        rows = [
            (
                row.name.removeprefix("classes: "),
                "; ".join(_widths_in_words(one.widths) for one in found.classes),
                _widths_in_words(found.strict) if found.strict else f"refused: {found.refusal}",
            )
            for row, found in classes
        ]
        heads = ("weights", "widths that agree to the bit", "strict mode takes")
        yield from _table((heads, rows))
        yield ""
    checks: list[tuple[Row[Any], ChecksFound]] = _done(part, ChecksFound)
    for row, found in checks:
        yield f"{row.name[0].upper()}{row.name[1:]}: {found.text}"
        yield ""
        lines = []
        for check in found.checks:
            margins = [one for one in check.differences if one.margin is not None]
            worst = max(margins, key=lambda one: one.margin or 0.0, default=None)
            said = check.reason
            if worst is not None:
                said = f"largest margin {worst.margin:.2g}, noise {worst.noise:.2g} logits"
            lines.append(
                (
                    *(check.section, check.drafter, check.rule, check.status),
                    *(f"{check.answers}", f"{check.tokens}", f"{len(check.differences)}", said),
                )
            )
        columns = ("section", "drafter", "rule", "status", "answers", "tokens", "that differ", "why")
        yield from _table((columns, lines))
        yield ""


def _widths_in_words(widths: Sequence[int]) -> str:
    """Format as ``1–3, 8``."""
    runs: list[list[int]] = []
    for width in sorted(widths):
        if runs and width == runs[-1][-1] + 1:
            runs[-1].append(width)
        else:
            runs.append([width])
    return ", ".join(f"{run[0]}–{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs)


_SECTIONS: dict[str, Callable[[Part[Any]], Iterator[str]]] = {
    "a": _bytes,
    "b": _largest,
    "c": _widths,
    "d": _ways,
    "e": _ways,
    "f": _ways,
    "g": _speed,
    "h": _exactness,
}


# ---- all folders -----------------------------------------------------------------------------------------------------


def index(root: Path) -> str:
    """Return the index of what is measured on which GPU and what is missing, from the folders under ``root``.

    Raises:
        GgufspecError: a file is damaged.
    """
    found = [(folder, run, {letter: read_part(folder, letter) for letter in PARTS}) for folder, run in folders(root)]
    lines = []
    if found:
        rows = [
            (
                f"[{run.card.description}]({folder.name}/{SUMMARY_FILE})",
                run.date,
                "–" if run.card.ceiling_bytes is None else _gib(run.card.ceiling_bytes),
                str(run.settings.get("shapes")),
                *(_state(part) for part in parts.values()),
            )
            for folder, run, parts in found
        ]
        lines += _table((("device", "date", "ceiling", "shapes", *PARTS), rows))
        lines += [
            "",
            "✓ all rows, n/m rows that were measured, – none. "
            + "; ".join(f"{letter}: {about.title}" for letter, about in PARTS.items())
            + ".",
        ]
    on_cards = [parts for _, run, parts in found if run.card.kind != "rpc"]
    missing = [letter for letter in PARTS if not any(_measured(parts[letter]) for parts in on_cards)]
    lines += [""] if found else []
    if not on_cards:
        lines.append("No GPU has run `scripts/gpu_evidence` yet.")
    elif missing:
        lines.append(
            "Missing on every GPU: " + "; ".join(f"{letter}: {PARTS[letter].title}" for letter in missing) + "."
        )
    else:
        lines.append("Every part was measured on at least one GPU.")
    return "\n".join(lines) + "\n"


def _state(part: Part[Any] | None) -> str:
    measured = _measured(part)
    if part is None or not measured:
        return "–"
    return "✓" if measured == len(part.rows) else f"{measured}/{len(part.rows)}"


def _measured(part: Part[Any] | None) -> int:
    return sum(row.state == "done" for row in part.rows) if part else 0


# ---- words -----------------------------------------------------------------------------------------------------------


def _table(table: Table) -> list[str]:
    heads, rows = table
    lines = ["| " + " | ".join(heads) + " |", "|" + " --- |" * len(heads)]
    return lines + ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]


def _spread(spread: Spread) -> str:
    low, high = spread.ci95
    return f"{spread.median:.3g}" + (f" ({low:.3g} … {high:.3g})" if len(spread.samples) > 1 else "")


def _ratio(spread: Spread | None) -> str:
    return "–" if spread is None else _spread(spread) + "×"


def _share(part: int, whole: int | None) -> str:
    return "–" if not whole else f"{part / whole:.3f}"


def _mib(size_bytes: int) -> str:
    return f"{size_bytes / 2**20:,.1f}"


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / 2**30:.2f} GiB"
