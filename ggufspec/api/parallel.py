"""Number of answers that are generated at once, each in a conversation with caches of its own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ggufspec.api.pairs import OpenedPair
from ggufspec.decoding.options import DecoderOptions
from ggufspec.errors import GgufspecError, UsageError
from ggufspec.planning.memory import HOST, ByDevice, resident, total
from ggufspec.planning.plan import PlanMachine
from ggufspec.schema.text import of_memory

DEFAULT_PARALLEL = 4
_SHARE = 0.25  # maximum share of the memory left on each device that the other conversations take by default


def default_parallel(
    opened: OpenedPair, options: DecoderOptions, machine: PlanMachine, planned: Mapping[str, int] = {}
) -> int:
    """Return the default for a server: as many answers as need little of the memory that one answer leaves free.

    ``options`` have the placements for one answer, and ``planned`` the bytes that it uses by device, if known. Without
    shared batches more answers gain nothing, so it is 1.
    """
    try:
        header = opened.target.header
    except GgufspecError:  # llama.cpp, which loads the file, may be able to read it, or else says why not
        return 1
    if any(header.recurrent) or header.sliding_window or not header.regular:
        return 1
    if not replace(options, parallel=DEFAULT_PARALLEL).shares_batches:
        return 1
    one, room = _resident(opened, options, 1, machine), _room(machine)
    for name, used in planned.items():  # includes compute buffers and the driver's overhead
        room[name] -= max(0, used - one[name].total)
    original = header.metadata.get(f"{header.architecture}.rope.scaling.original_context_length")
    for count in range(DEFAULT_PARALLEL, 1, -1):
        context = replace(options, parallel=count).context(with_draft=opened.draft is not None)
        if isinstance(original, int) and not context.keeps_rope_factors(original):
            continue
        needed = _resident(opened, options, count, machine)
        if all(needed[name].total - one[name].total <= _SHARE * (room[name] - one[name].total) for name in room):
            return count
    return 1


def check_parallel(opened: OpenedPair, options: DecoderOptions, machine: PlanMachine) -> None:
    """Raise UsageError if the caches of ``options.parallel`` conversations do not fit; its hint says how many would."""
    room = _room(machine)

    def too_large(count: int) -> tuple[str, int]:
        """Return the first device whose memory is too small, and the bytes needed there; an empty name if all fit."""
        for name, used in _resident(opened, options, count, machine).items():
            needed = used.total - used.weights if name == HOST else used.total  # weights in RAM are mapped files
            if needed > room[name]:
                return name, needed
        return "", 0

    device, needed = too_large(options.parallel)
    if not device:
        return
    fit = next((count for count in range(options.parallel - 1, 0, -1) if not too_large(count)[0]), 0)
    raise UsageError(
        f"{options.parallel} conversations of {_ctx_size(opened, options):,} tokens need {of_memory(needed)} of "
        f"{'RAM' if device == HOST else device}, and {of_memory(room[device])} are free",
        f"--parallel {fit} fits" if fit else "a lower -c needs less",
    )


def _room(machine: PlanMachine) -> dict[str, int]:
    return {HOST: machine.memory_bytes} | {card.name: machine.budget_bytes(card) for card in machine.cards}


def _ctx_size(opened: OpenedPair, options: DecoderOptions) -> int:
    return options.ctx_size or opened.target.header.context_length


def _resident(opened: OpenedPair, options: DecoderOptions, count: int, machine: PlanMachine) -> ByDevice:
    """Return the memory of both models' weights and of the caches of ``count`` conversations, by device."""
    options = replace(options, parallel=count, ctx_size=_ctx_size(opened, options))
    context = options.context(with_draft=opened.draft is not None)
    found = [resident(opened.target.header, options.target, context, machine.card_names)]
    if opened.draft is not None and not options.head:
        draft = options.draft_context()
        found.append(resident(opened.draft.header, options.draft_placement, draft, machine.card_names))
    return total(found)
