"""The models of a repository for people: a table of what fits and how fast, one of drafts, and what to do next."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from ggufspec.display import counted, number, of_file
from ggufspec.reports.table import Column, Table
from ggufspec.reports.values import shorter
from ggufspec.schema.ranking import RankedDraft, RankedModel, RankingDocument

MARK = "◆"
_NAMES = 0.4  # of the width, for names


def tables(document: RankingDocument, width: int) -> list[Table]:
    """The models, and the drafts if they are ranked."""
    found = [_models(document, width)] if len(document.rows) > 1 else []
    return [*found, *([_drafts(document, width)] if document.drafts else [])]


def _names(rows: Sequence[RankedModel | RankedDraft], width: int) -> list[str]:
    """What differs in the names of the files; with the repository if there are several."""
    several = len({row.repo for row in rows}) > 1
    full = [f"{row.repo}/{row.file}".rstrip("/") if several else row.file for row in rows]
    short = shorter(full, max(16, int(width * _NAMES)))
    return [short[name] for name in full]


def _models(document: RankingDocument, width: int) -> Table:
    rows: list[tuple[Any, ...]] = []
    failed = {}
    for index, (row, name) in enumerate(zip(document.rows, _names(document.rows, width), strict=True)):
        start = (row.number, MARK if row.pareto else "", name, of_file(row.bytes or None))
        if row.error:
            failed[index] = f"failed: {row.error}"
            rows.append(start)
            continue
        rows.append(
            (
                *start,
                row.bits_per_weight,
                _fits(row, has_card=bool(document.devices)),
                row.target_only_tokens_per_s,
                row.speculative_tokens_per_s,
                row.largest_context,
                row.divergence,
            )
        )
    columns = (
        Column("#"),
        Column("", align="left"),
        Column("Model", align="left"),
        Column("Size"),
        Column("Bits", "{:.2f}".format),
        Column("On the card" if document.devices else "In memory", align="left"),
        Column("Tokens/s", _speed),
        Column("With draft", _speed),
        Column("Context", "{:,}".format),
        Column("KLD", "{:.4f}".format),
    )
    leading = frozenset(index for index, row in enumerate(document.rows) if row.name == document.target)
    return Table("Models", columns, tuple(rows), failed=failed, leading=leading).filled(6)


def _drafts(document: RankingDocument, width: int) -> Table:
    rows: list[tuple[Any, ...]] = []
    failed = {}
    for index, (row, name) in enumerate(zip(document.drafts, _names(document.drafts, width), strict=True)):
        if row.error:
            failed[index] = f"failed: {row.error}"
            rows.append((row.number, name, of_file(row.bytes)))
            continue
        placed = "" if row.gpu_layers is None else f"{row.gpu_layers}/{(row.layers or 0) + 1}"
        rows.append(
            (
                *(row.number, name, of_file(row.bytes), row.bits_per_weight, placed, row.costs_layers),
                *(row.tokens_per_s, row.draft_length, row.break_even_acceptance),
            )
        )
    columns = (
        Column("#"),
        Column("Draft", align="left"),
        Column("Size"),
        Column("Bits", "{:.2f}".format),
        Column("Layers"),
        Column("Costs layers"),
        Column("Tokens/s", _speed),
        Column("Draft length"),
        Column("Break-even", "{:.2f}".format),
    )
    leading = frozenset(index for index, row in enumerate(document.drafts) if row.name == document.draft)
    return Table("Drafts", columns, tuple(rows), failed=failed, leading=leading)


def _speed(tokens_per_s: float) -> str:
    return f"≈ {number(tokens_per_s)}"


def _fits(row: RankedModel, *, has_card: bool) -> str:
    layers = f"{row.gpu_layers}/{(row.layers or 0) + 1}"
    if row.fits == "whole":
        return "whole"
    if row.n_cpu_moe or row.n_cpu_ffn:
        kept = f"{row.n_cpu_moe} experts" if row.n_cpu_moe else f"{row.n_cpu_ffn} FFN"
        layers = f"all but {kept}" if row.gpu_layers == (row.layers or 0) + 1 else f"{layers} but {kept}"
    return layers if row.fits == "partly" else f"no, {layers}" if has_card else "no"


def lines(document: RankingDocument) -> Iterator[tuple[str, str]]:
    """(a sentence, its style): how to read the table, why rows have nothing, and the next command."""
    listed: tuple[RankedModel | RankedDraft, ...] = (*document.rows, *document.drafts)
    for row in listed:
        if row.error:
            hint = f" ({row.hint})" if row.hint else ""
            yield f"{row.number}: {row.error}{hint}", "red"
    for repository in document.repositories:
        if repository.left_out:
            count = counted(len(repository.left_out), "larger model")
            name = f"{repository.repo}:{repository.left_out[0]}"
            yield f"{repository.repo} has {count} more; a name plans one: -hf {name}", "yellow"
        for head in repository.heads:
            yield f"{head} is a head for its models: -hfd {repository.repo}:{head}", "dim"
    if len(document.rows) > 1:
        yield f"{MARK} no other row is as fast and as good: by KLD where both have one, else by bits.", "dim"
    if any(row.divergence for row in document.rows):
        yield f"KLD is the {document.settings['divergence_from']}.", "dim"
    yield (
        f"Context is the longest with all layers on the cards; the rest is at -c {document.settings['ctx_size']}.",
        "dim",
    )
    yield f"Speeds are predictions, {document.speed}. Bytes are estimates; plan of one model confirms them.", "dim"
    for note in document.notes:
        yield f"Note: {note}.", "yellow"
    yield f"next: {document.next}", "bold"
