"""A plan for people: each device's memory as a bar with its parts, both options as a table, a sweep over layers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ggufspec.llamacpp.options import STREAM_WIDTH
from ggufspec.reports import table
from ggufspec.reports.table import Table
from ggufspec.schema.plan import PlanDocument, PlannedDevice, PlannedModel, PlannedOption
from ggufspec.schema.text import counted, number, of_memory

if TYPE_CHECKING:
    from rich.text import Text

# What memory is for: (word, mark, colour, parts). Marks differ, so that a bar can be read without colour.
PARTS = (
    ("target", "█", "blue", ("target weights",)),
    ("draft", "▓", "magenta", ("draft weights",)),
    ("KV", "▒", "cyan", ("target kv", "draft kv")),
    ("compute", "░", "yellow", ("target compute", "draft compute")),
    ("mmproj", "▪", "green", ("mmproj",)),
    ("overhead", "•", "red", ("overhead",)),
    ("free", "·", "dim", ()),
)
_SHORT = 24  # columns for patterns of -ot


def bytes_by_part(option: PlannedOption, device: PlannedDevice) -> dict[str, int]:
    """One device's, as a comparison has them: ``target weights``, ``draft kv``, …, ``overhead``."""
    found = {"overhead": device.overhead_bytes, "mmproj": device.mmproj_bytes}
    for role, model in (("target", option.target), ("draft", option.draft)):
        for kind, size in (model.bytes.get(device.name, {}) if model else {}).items():
            key = kind if kind == "overhead" else f"{role} {kind}"
            found[key] = found.get(key, 0) + size
    return found


def cells(sizes: dict[str, int], width: int) -> dict[str, int]:
    """Columns of a bar by part: they add up to ``width``, and what is there has one at least."""
    total = sum(sizes.values()) or 1
    found = {word: max(1, round(size * width / total)) if size else 0 for word, size in sizes.items()}
    left = width - sum(found.values())
    for _ in range(abs(left)):
        widest = max(found, key=lambda word: (found[word], word == "free"))
        found[widest] += 1 if left > 0 else -1
    return found


def bars(document: PlanDocument, width: int, *, everything: bool = True) -> list[Text]:
    """Per device a title, a bar, and what its parts are: the chosen option, then the other one on the cards.

    Without ``everything`` it is the chosen option on the cards; without any, on the host.
    """
    from rich.text import Text

    options = sorted(document.options.items(), key=lambda item: item[0].replace("_", "-") != document.choice)
    lines = []
    for name, option in options if everything else options[:1]:
        for device in document.devices:
            is_host = device is document.devices[-1]
            again = option is not options[0][1]
            if option is None or (is_host and (again or (not everything and len(document.devices) > 1))):
                continue
            by_part = bytes_by_part(option, device)
            used = sum(by_part.values())
            sizes = {word: sum(by_part.get(part, 0) for part in parts) for word, _, _, parts in PARTS}
            sizes["free"] = max(0, device.budget_bytes - used)
            about = f"  {device.description}" if device.description else ""
            use = f"  {name.replace('_', '-')}: {of_memory(used)} of {of_memory(device.budget_bytes)}"
            lines += [Text.assemble((device.name, "bold"), about, (use, "dim")), *_bar(sizes, width)]
    return lines


def _bar(sizes: dict[str, int], width: int) -> list[Text]:
    from rich.text import Text

    bar, legend = Text(), [Text()]
    columns = cells(sizes, width)
    for word, mark, style, _ in PARTS:
        bar.append(mark * columns[word], style=style)
        if sizes[word] >= 2**19:
            item = Text.assemble((mark, style), f" {word} {of_memory(sizes[word])}")
            if legend[-1] and len(legend[-1]) + 2 + len(item) > width:
                legend.append(Text())
            legend[-1] += Text("  " if legend[-1] else "") + item
    return [bar, *legend]


def options(document: PlanDocument) -> Table:
    """Both options; the choice is bold. A predicted speed has no spread, hence the sign."""
    shown = {name.replace("_", "-"): option for name, option in document.options.items() if option is not None}
    rows = []
    for name, option in shown.items():
        draft = (_layers(option.draft), str(option.draft_length)) if option.draft else ("", "")
        rows.append(
            (name, _layers(option.target) + _streams(option.target), *draft, f"≈ {number(option.tokens_per_s)}")
        )
    columns = table.columns("Option", table.Column("Target", wraps=True), "Draft", "Draft length", "Tokens/s")
    return Table("Both options", columns, rows, leading=[n for n, name in enumerate(shown) if name == document.choice])


def draft_lengths(document: PlanDocument) -> Table:
    """What each draft length needs, in the terms of a program's log and as the chance of a token; the best is bold."""
    option = document.options["speculative"]
    rows, leading = [], []
    for index, row in enumerate(document.draft_lengths):
        shares = (row.break_even_accepted_share, row.break_even_acceptance)
        even = ["never" if share is None else f"{share:.0%}" for share in shares]
        rows.append((str(row.draft_length), f"≈ {number(row.tokens_per_s)}", f"{row.accepted_share:.0%}", *even))
        if option and row.draft_length == option.draft_length:
            leading.append(index)
    columns = table.columns("Draft length", "Tokens/s", "Accepted ÷ drafted", "Break-even", "Break-even per token")
    return Table("Acceptance needed by draft length", columns, rows, leading=leading)


def context(document: PlanDocument) -> str:
    """The plan's context, where that is from, and how much of it is filled where a speed is predicted."""
    settings, depth = document.settings, document.predicted["depth"]
    tokens, kept = counted(settings["ctx_size"], "token"), settings.get("sequences", 1)
    of = f" for each of {kept} conversations" if kept > 1 else ""
    given = f"{tokens} of context{of} ({settings['context_from']})"
    return f"{given}; its speeds are with {depth:,.0f} of them in the cache"


def contexts(document: PlanDocument) -> Table:
    """The faster option at several contexts; the plan's own is bold."""
    drafts = any(row.draft_layers is not None for row in document.contexts)
    leading = [n for n, row in enumerate(document.contexts) if row.ctx_size == document.settings["ctx_size"]]
    rows = []
    for row in document.contexts:
        speeds = (row.empty_tokens_per_s, row.full_tokens_per_s)
        fits = "yes" if row.fits else "no" if row.host_bytes is None else f"no: {of_memory(row.host_bytes)} RAM"
        layers = "–" if row.target_layers is None else f"{row.target_layers}/{document.target.layers + 1}"
        for count, what in ((row.n_cpu_moe, "MoE"), (row.n_cpu_ffn, "FFN")):
            layers += f", {count} {what} on CPU" if count else ""
        draft = [] if not drafts else ["" if row.draft_layers is None else str(row.draft_layers)]
        types = "/".join(dict.fromkeys(filter(None, (row.cache_type_k, row.cache_type_v))))
        rows.append((f"{row.ctx_size:,}", fits, layers, *draft, types, *map(predicted, speeds)))
    columns = table.columns("Context", table.word("Fits"), "Target", *["Draft"] * drafts, "KV", "t/s empty", "t/s full")
    return Table("Other contexts", columns, rows, leading=leading)


def predicted(tokens_per_s: float | None) -> str:
    """A dash if it does not fit."""
    return "–" if tokens_per_s is None else number(tokens_per_s)


def _layers(model: PlannedModel) -> str:
    text = f"{model.gpu_layers}/{model.layers + 1}"
    if model.n_cpu_moe:
        text += f", experts of {model.n_cpu_moe} on CPU"
    if model.n_cpu_ffn:
        text += f", feed-forward of {model.n_cpu_ffn} on CPU"
    if model.override_tensor:
        patterns = " ".join(model.override_tensor)
        text += f", -ot {patterns}" if len(patterns) <= _SHORT else f", {len(model.override_tensor)} of -ot"
    if model.no_host:
        text += ", repacked"
    types = dict.fromkeys((model.cache_type_k, model.cache_type_v))
    return text if [*types] == ["f16"] else f"{text}, KV {'/'.join(types)}"


def _streams(model: PlannedModel) -> str:
    """From how many tokens on a card computes with what stays on the host of a target, if something does."""
    is_split = model.gpu_layers <= model.layers or model.n_cpu_moe or model.n_cpu_ffn or model.override_tensor
    if not (model.op_offload and is_split and model.op_offload_min_batch != STREAM_WIDTH):
        return ""
    return f", streamed from {counted(model.op_offload_min_batch, 'token')} on"


def sweep(document: PlanDocument) -> Table:
    """Tokens/s over target layers; the placements that were chosen for both options are marked."""
    rows, leading = [], set()
    for index, row in enumerate(document.sweep):
        planned = [
            name.replace("_", "-")
            for name, option in document.options.items()
            if option is not None and option.target.gpu_layers == row.gpu_layers
        ]
        if document.choice in planned:
            leading.add(index)
        speeds = map(predicted, (row.target_only_tokens_per_s, row.speculative_tokens_per_s))
        mark = "both" if len(planned) > 1 else "".join(planned)
        rows.append((f"{row.gpu_layers}/{document.target.layers + 1}", *speeds, mark))
    columns = table.columns("Target layers", "Target-only t/s", "Speculative t/s", table.word("Planned"))
    return Table("Tokens/s over target layers", columns, rows, leading=leading)
