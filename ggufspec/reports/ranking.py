"""Report on a repository's models: which fit, how fast they are, which drafts pay off, and the next command."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

from ggufspec.reports.table import ReportColumn, ReportTable
from ggufspec.reports.words import shorter
from ggufspec.schema.ranking import RankedDraft, RankedModel, RankingDocument
from ggufspec.schema.text import counted, number, of_file

MARK = "◆"
_LEAST_NAME, _OTHERS = 16, 62  # minimum terminal columns for a name, and terminal columns for all other cells


def tables(document: RankingDocument, width: int) -> list[ReportTable]:
    found = [_models(document, width)] if len(document.rows) > 1 or not document.drafts else []
    return [*found, *([_drafts(document, width)] if document.drafts else [])]


def _names(rows: Sequence[RankedModel | RankedDraft], width: int) -> list[str]:
    """Return a short name per row: the file (else the repository) without the prefix shared in its repository."""
    names: list[str] = []
    for repo, some in groupby(rows, key=lambda row: row.repo):
        files = [row.file or repo for row in some]
        short = shorter(files, max(_LEAST_NAME, width - _OTHERS))
        names += [short[file] for file in files]
    return names


def _models(document: RankingDocument, width: int) -> ReportTable:
    rows: list[tuple[Any, ...]] = []
    for row, name in zip(document.rows, _names(document.rows, width), strict=True):
        start = (row.number, MARK if row.pareto else "", name, of_file(row.bytes or None))
        speeds = (row.target_only_tokens_per_s, row.speculative_tokens_per_s)
        about = (row.bits_per_weight, row.divergence, _fits(row, has_card=bool(document.devices)), *speeds)
        rows.append(start if row.error else (*start, *about, row.largest_context))
    columns = (
        ReportColumn("#"),
        ReportColumn("", align="left"),
        ReportColumn("Model", align="left"),
        ReportColumn("Size"),
        ReportColumn("Bits", "{:.2f}".format),
        ReportColumn("KLD", "{:.3f}".format),
        ReportColumn("On the card" if document.devices else "In memory", align="left"),
        ReportColumn("Tokens/s", number),
        ReportColumn("With draft", number),
        ReportColumn("Context", "{:,}".format),
    )
    leading = [index for index, row in enumerate(document.rows) if row.name == document.target]
    groups = [n for n, row in enumerate(document.rows) if n and row.repo != document.rows[n - 1].repo]
    return ReportTable("Models", columns, rows, _failed(document.rows), leading, groups).filled(4)


def _drafts(document: RankingDocument, width: int) -> ReportTable:
    rows: list[tuple[Any, ...]] = []
    for row, name in zip(document.drafts, _names(document.drafts, width), strict=True):
        start = (row.number, name, of_file(row.bytes))
        placed = "" if row.gpu_layers is None else f"{row.gpu_layers}/{(row.layers or 0) + 1}"
        about = (row.bits_per_weight, placed, row.costs_layers, row.tokens_per_s)
        rows.append(start if row.error else (*start, *about, row.break_even_accepted_share, row.draft_length))
    columns = (
        ReportColumn("#"),
        ReportColumn("Draft", align="left"),
        ReportColumn("Size"),
        ReportColumn("Bits", "{:.2f}".format),
        ReportColumn("Layers"),
        ReportColumn("Costs layers"),
        ReportColumn("Tokens/s", number),
        ReportColumn("Pays above", "{:.0%}".format),
        ReportColumn("Length"),
    )
    leading = [index for index, row in enumerate(document.drafts) if row.name == document.draft]
    return ReportTable("Drafts", columns, rows, _failed(document.drafts), leading)


def _failed(rows: Sequence[RankedModel | RankedDraft]) -> dict[int, str]:
    return {index: f"failed: {row.error}" for index, row in enumerate(rows) if row.error}


def _fits(row: RankedModel, *, has_card: bool) -> str:
    layers = f"{row.gpu_layers}/{(row.layers or 0) + 1}"
    if row.fits == "whole":
        return "whole"
    if row.n_cpu_moe or row.n_cpu_ffn:
        kept = f"{row.n_cpu_moe} experts" if row.n_cpu_moe else f"{row.n_cpu_ffn} FFN"
        layers = f"all but {kept}" if row.gpu_layers == (row.layers or 0) + 1 else f"{layers} but {kept}"
    return layers if row.fits == "partly" else f"no, {layers}" if has_card else "no"


def lines(document: RankingDocument) -> Iterator[tuple[str, str]]:
    """Yield (sentence, style) for failed rows, for how to read the tables, and for the next command."""
    listed: tuple[RankedModel | RankedDraft, ...] = (*document.rows, *document.drafts)
    for row in listed:
        if row.error:
            hint = f" ({row.hint})" if row.hint else ""
            yield f"{row.number}: {row.error}{hint}", "red"
    repos = dict.fromkeys(row.repo for row in document.rows)
    for repo in repos if len(repos) > 1 else ():
        numbers = [row.number for row in document.rows if row.repo == repo]
        yield f"{numbers[0]}{f' to {numbers[-1]}' if numbers[1:] else ''}: {repo}", "dim"
    for repository in document.repositories:
        at = f"@{repository.revision}" if repository.revision else ""
        if repository.left_out:
            count = counted(len(repository.left_out), "larger model")
            name = f"{repository.repo}:{repository.left_out[0]}{at}"
            yield f"{repository.repo}: {count} not listed; to plan one, name it: -hf {name}", "yellow"
        for head in repository.heads:
            yield f"{head} is a head for the repository's models: -hfd {repository.repo}:{head}{at}", "dim"
    if len(document.rows) > 1:
        of_it = " of its repository" if len(repos) > 1 else ""
        yield f"{MARK} no other row{of_it} is as fast and as good (by KLD if both have one, else by bits).", "dim"
    if len(document.rows) > 1 and any(row.divergence for row in document.rows):
        yield f"KLD is the {document.settings['divergence_from']}.", "dim"
    if any(row.fits != "whole" and (row.n_cpu_moe or row.n_cpu_ffn) for row in document.rows):
        yield "all but N: N blocks keep their experts or feed-forward weights (FFN) in RAM.", "dim"
    if len(document.rows) > 1 and any(row.largest_context for row in document.rows):
        context = document.settings["ctx_size"] or "max"
        yield f"Context is the longest with all layers on the GPUs; the other columns are for -c {context}.", "dim"
    if any(row.break_even_accepted_share is not None for row in document.drafts):
        yield "Pays above: accepted ÷ drafted tokens above which a run with the draft is faster.", "dim"
    yield f"Speeds are predictions, {document.speed}. Bytes are estimates; planning one model confirms them.", "dim"
    for note in document.notes:
        yield f"Note: {note}.", "yellow"
    yield f"next: {document.next}", "bold"
