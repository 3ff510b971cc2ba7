"""Report of a plan, with memory bars by device and tables of options, draft lengths, contexts and layers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ggufspec.llamacpp.options import HOST, OP_OFFLOAD_MIN_BATCH
from ggufspec.reports import table
from ggufspec.reports.table import ReportTable
from ggufspec.schema.plan import PlanDocument, PlannedDevice, PlannedModel, PlannedOption
from ggufspec.schema.text import counted, memory_of, number, of_memory

if TYPE_CHECKING:
    from rich.text import Text

# Uses of memory as (word, mark, colour, parts). Marks differ, so that a bar can be read without colour.
PARTS = (
    ("target", "█", "blue", ("target weights",)),
    ("draft", "▓", "magenta", ("draft weights",)),
    ("KV", "▒", "cyan", ("target kv", "draft kv")),
    ("compute", "░", "yellow", ("target compute", "draft compute")),
    ("mmproj", "▪", "green", ("mmproj",)),
    ("overhead", "•", "red", ("overhead",)),
    ("free", "·", "dim", ()),
)
_SHORT = 24  # maximum terminal columns for -ot patterns; if they are longer, only their number is shown


def bytes_by_part(option: PlannedOption, device: PlannedDevice) -> dict[str, int]:
    """Return a device's bytes by part, named as in comparisons: ``target weights``, ``draft kv``, …, ``overhead``."""
    found = {"overhead": device.overhead_bytes, "mmproj": device.mmproj_bytes}
    for role, model in (("target", option.target), ("draft", option.draft)):
        for kind, size in (model.bytes.get(device.name, {}) if model else {}).items():
            key = kind if kind == "overhead" else f"{role} {kind}"
            found[key] = found.get(key, 0) + size
    return found


def cells(sizes: dict[str, int], width: int) -> dict[str, int]:
    """Return the columns of each part in a bar ``width`` columns wide; every nonempty part gets at least one."""
    total = sum(sizes.values()) or 1
    found = {word: max(1, round(size * width / total)) if size else 0 for word, size in sizes.items()}
    left = width - sum(found.values())
    for _ in range(abs(left)):
        widest = max(found, key=lambda word: (found[word], word == "free"))
        found[widest] += 1 if left > 0 else -1
    return found


def placed(document: PlanDocument) -> dict[str, PlannedOption]:
    """Return the options by display name, without ``default``, which has the same placement as the pair."""
    options = {name: option for name, option in document.options.items() if name != "default"}
    return {name.replace("_", "-"): option for name, option in options.items() if option is not None}


def bars(document: PlanDocument, width: int, *, everything: bool = True) -> list[Text]:
    """Return a title, a bar and a legend per option and device: the chosen option first, the others only on GPUs.

    Without ``everything``, return only those for the chosen option on the GPUs, or on the host if there is no GPU.
    """
    from rich.text import Text

    options = sorted(placed(document).items(), key=lambda item: item[0] != document.choice)
    lines = []
    for name, option in options if everything else options[:1]:
        for device in document.devices:
            is_host = device is document.devices[-1]
            again = option is not options[0][1]
            if is_host and (again or (not everything and len(document.devices) > 1)):
                continue
            by_part = bytes_by_part(option, device)
            used = sum(by_part.values())
            sizes = {word: sum(by_part.get(part, 0) for part in parts) for word, _, _, parts in PARTS}
            sizes["free"] = max(0, device.budget_bytes - used)
            about = f"  {device.description}" if device.description else ""
            use = f"  {name}: {memory_of(used, device.free_bytes)}"
            if headroom := device.free_bytes - device.budget_bytes:
                use += f", {of_memory(headroom)} of it headroom"
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


def options(document: PlanDocument) -> ReportTable:
    """Return a table of options with the choice in bold; predicted speeds, which have no spread, are marked ``≈``."""
    shown = placed(document)
    if tuned := document.tuned:
        shown["tuned here"] = PlannedOption(document.target, document.draft, tuned["tokens_per_s"], 0)
    elif default := document.options.get("default"):
        shown["default"] = default
    rows = []
    for name, option in shown.items():
        length = str(option.draft_length) if name == "speculative" else "adaptive" if name == "default" else ""
        draft = (_layers(document, option.draft), length) if option.draft else ("", "")
        speed = f"{'' if name == 'tuned here' else '≈ '}{number(option.tokens_per_s)}"
        rows.append((name, _layers(document, option.target) + _copied(option.target), *draft, speed))
    on_gpu = " on GPU" * (len(document.devices) > 1)
    columns = table.columns("Option", table.words(f"Target{on_gpu}"), "Draft", "Draft length", "Tokens/s")
    best = "tuned here" if tuned else document.choice
    best = "default" if best == "speculative" and "default" in shown else best
    return ReportTable("Options", columns, rows, leading=[n for n, name in enumerate(shown) if name == best])


def explanations(document: PlanDocument) -> list[str]:
    """Return sentences that explain the terms of :func:`options`."""
    lines = []
    if document.options.get("default") and not document.tuned:
        lookup = document.settings.get("lookup", "")
        more = f" and the n-gram lookup ({lookup})" if lookup else ""
        lines.append(f"default is what run does: it drafts only as far as that pays, with the draft{more}.")
    if seen := document.settings.get("accepted_here"):
        lines.append(f"Runs here accepted {seen}, at the draft lengths they chose.")
    copied = [option for option in placed(document).values() if _copied(option.target)]
    if copied:
        least = max(option.target.op_offload_min_batch for option in copied)
        lines.append(
            f"copied over per batch: for batches of {counted(least, 'token')} or more the GPU computes with copies of "
            "the weights in RAM, which is faster than the CPU."
        )
    return lines


def draft_lengths(document: PlanDocument) -> ReportTable:
    """Return a table of break-even acceptance (as a share, as in logs, and per token) by draft length, best in bold."""
    option = document.options["speculative"]
    rows, leading = [], []
    for index, row in enumerate(document.draft_lengths):
        shares = (row.break_even_accepted_share, row.break_even_acceptance)
        even = ["never" if share is None else f"{share:.0%}" for share in shares]
        rows.append((str(row.draft_length), f"≈ {number(row.tokens_per_s)}", f"{row.accepted_share:.0%}", *even))
        if option and row.draft_length == option.draft_length:
            leading.append(index)
    columns = table.columns("Draft length", "Tokens/s", "Accepted", "Pays above", "Chance per token")
    return ReportTable("Acceptance needed by draft length", columns, rows, leading=leading)


def context(document: PlanDocument) -> str:
    """State the plan's context, its origin, and the depth at which speeds are predicted."""
    settings, depth = document.settings, document.predicted["depth"]
    tokens, kept = counted(settings["ctx_size"], "token"), settings.get("sequences", 1)
    of = f" for each of {kept} conversations" if kept > 1 else ""
    given = f"{tokens} of context{of} ({settings['context_from']})"
    return f"{given}; speeds are predicted with {depth:,.0f} of them in the cache"


def contexts(document: PlanDocument) -> ReportTable:
    """Return a table of the faster option at several contexts, with the plan's own context in bold."""
    drafts = any(row.draft_layers is not None for row in document.contexts)
    leading = [n for n, row in enumerate(document.contexts) if row.ctx_size == document.settings["ctx_size"]]
    rows = []
    for row in document.contexts:
        speeds = (row.empty_tokens_per_s, row.full_tokens_per_s)
        fits = "yes" if row.fits else "no" if row.host_bytes is None else f"no: {of_memory(row.host_bytes)} RAM"
        layers = "–" if row.target_layers is None else _offloaded(document, row.target_layers, document.target.layers)
        for count, what in ((row.n_cpu_moe, "MoE"), (row.n_cpu_ffn, "FFN")):
            layers += f", {count} {what} on CPU" if count else ""
        on_gpu = "" if row.draft_layers is None else _offloaded(document, row.draft_layers, 0).partition("/")[0]
        draft = [on_gpu] if drafts else []
        types = "/".join(dict.fromkeys(filter(None, (row.cache_type_k, row.cache_type_v))))
        rows.append((f"{row.ctx_size:,}", fits, layers, *draft, types, *map(predicted, speeds)))
    columns = table.columns(
        "Context", table.word("Fits"), "Target", *["Draft"] * drafts, "KV", "Tokens/s empty", "Tokens/s full"
    )
    return ReportTable("Other contexts", columns, rows, leading=leading)


def predicted(tokens_per_s: float | None) -> str:
    """Format a predicted speed, or return a dash if the placement does not fit."""
    return "–" if tokens_per_s is None else number(tokens_per_s)


def _offloaded(document: PlanDocument, gpu_layers: int, layers: int) -> str:
    """Return the offloaded layers out of all, or "CPU" without a GPU, because 0/29 would suggest that nothing fits."""
    return "CPU" if document.devices[0].name == HOST else f"{gpu_layers}/{layers + 1}"


def _layers(document: PlanDocument, model: PlannedModel) -> str:
    text = _offloaded(document, model.gpu_layers, model.layers)
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


def _copied(model: PlannedModel) -> str:
    """Return a note if a GPU computes with copies of CPU weights with a non-default minimum batch; else ""."""
    is_split = model.gpu_layers <= model.layers or model.n_cpu_moe or model.n_cpu_ffn or model.override_tensor
    copies = model.op_offload and is_split and model.op_offload_min_batch != OP_OFFLOAD_MIN_BATCH
    rest = "rest " * (model.gpu_layers <= model.layers)
    return f", {rest}copied over per batch" if copies else ""


def sweep(document: PlanDocument) -> ReportTable:
    """Return a table of predicted tokens/s by number of target layers, with planned placements marked."""
    rows, leading = [], set()
    for index, row in enumerate(document.sweep):
        options = placed(document).items()
        planned = [name for name, option in options if option.target.gpu_layers == row.gpu_layers]
        if document.choice in planned:
            leading.add(index)
        speeds = map(predicted, (row.target_only_tokens_per_s, row.speculative_tokens_per_s))
        mark = "both" if len(planned) > 1 else "".join(planned)
        rows.append((f"{row.gpu_layers}/{document.target.layers + 1}", *speeds, mark))
    columns = table.columns("Target layers", "Target-only tokens/s", "Speculative tokens/s", table.word("Planned"))
    return ReportTable("Tokens/s over target layers", columns, rows, leading=leading)
