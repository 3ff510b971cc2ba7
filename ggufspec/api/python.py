r"""For people who write Python: three lines from an installed package to tokens that name their source.

>>> from ggufspec import load_pair
>>> with load_pair("demo", threads=1) as decoder:
...     answer = list(decoder.generate("import os\n\ndef ", max_tokens=24))
>>> {emitted.source for emitted in answer} <= {"draft", "lookup", "target", "bonus"}
True

Keywords are the rows of :data:`ggufspec.settings.table.OPTIONS` that Python has. What is given goes over the profile,
the profile over the plan, the plan over the defaults. Nothing is printed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ggufspec.api.pairs import OnEvent, check_drafter, files_of, open_pair, spec_of
from ggufspec.api.plan import make_plan
from ggufspec.api.resolve import resolve
from ggufspec.decoding.decoder import SpeculativeDecoder
from ggufspec.files.cache import cache_folder
from ggufspec.llamacpp import devices
from ggufspec.llamacpp.library import streams_from
from ggufspec.llamacpp.options import STREAM_WIDTH
from ggufspec.models.profile import Pair, Profile
from ggufspec.schema.plan import PlanDocument
from ggufspec.settings.table import Settings, of_keywords


def plan_pair(
    pair: str | Path | Profile | Pair = "demo",
    settings: Settings | None = None,
    *,
    gpu: str | Sequence[str] = (),
    vram: int | str | Sequence[int | str] = (),
    ram: int | str | None = None,
    ram_bandwidth: float | None = None,
    cpu: str | None = None,
    link: str | None = None,
    acceptance: float | None = None,
    allow_kv: Sequence[str] = (),
    sweep: bool = False,
    on_event: OnEvent | None = None,
    verbose: bool = False,
    **options: Any,
) -> PlanDocument:
    """What fits, where each layer goes, how fast it will be, and whether the draft is worth its memory.

    Needs no download: headers are read from the hub by range, a few MB a model, and kept. Needs no card: ``gpu`` or
    ``vram`` names one; without them this machine's are planned for.

    >>> from ggufspec import plan_pair
    >>> plan = plan_pair("demo", vram="24GiB", ctx_size=512)
    >>> (plan.target.gpu_layers, plan.target.layers)  # the output layer is one more than the blocks
    (9, 8)
    >>> plan.predicted["target_only_tokens_per_s"] > 0
    True
    >>> [device.name for device in plan.devices]
    ['GPU0', 'CPU']

    Args:
        pair: name or path of a profile, the profile, or a :class:`~ggufspec.models.profile.Pair` of files.
        settings: options that go over the profile's, checked by type checkers, too.
        gpu: names of cards that are not here: ``RTX 4090``.
        vram: memory of cards that are not here: bytes, or ``24GiB``.
        ram: free memory next to the cards; next to those that are not here there is enough without it.
        ram_bandwidth: of that memory by its data sheet, in GB/s.
        cpu: its cores and their vector instructions: ``8xavx2``, or ``8xavx512`` with VNNI.
        link: to the cards: ``pcie4x16``.
        acceptance: the acceptance rate to expect, 0 to 1; otherwise what was measured before, or the profile's.
        allow_kv: types of the target's cache that the plan may choose besides the ones given.
        sweep: predict tokens/s over the target's layers too.
        on_event: gets progress: ``{"event": "reading", "file": …, "bytes": …}``.
        verbose: let llama.cpp's log of the dry runs through to standard error.
        options: the same by keyword, which go over ``settings``: ``ctx_size``, ``gpu_layers``, …

    Returns:
        The document of ``ggufspec plan --json``: bytes by device, tokens/s of both ways, the choice and why;
        :func:`ggufspec.schema.base.to_json` makes JSON of it.

    Raises:
        UsageError: a name, an option or a size is not valid.
        GgufspecError: a header cannot be read, the draft cannot serve the target, or nothing fits.
    """
    simulated = {
        "gpu": gpu or None,
        "vram": vram or None,
        "ram": ram,
        "ram_bandwidth": ram_bandwidth,
        "cpu": cpu,
        "link": link,
        "acceptance": acceptance,
        "allow_kv": tuple(allow_kv) or None,
    }
    given = of_keywords(options, settings, **simulated)
    opened = open_pair(spec_of(pair), given, on_event=on_event)
    return make_plan(opened, on_event=on_event, verbose=verbose).document(sweep=sweep, contexts=True)


def load_pair(
    pair: str | Path | Profile | Pair = "demo",
    settings: Settings | None = None,
    *,
    download: bool = False,
    on_event: OnEvent | None = None,
    **options: Any,
) -> SpeculativeDecoder:
    r"""A decoder of a pair, loaded where the plan for this machine puts its layers.

    >>> from ggufspec import Sampling, load_pair
    >>> with load_pair("demo", threads=1, ctx_size=512) as decoder:
    ...     for emitted in decoder.generate("class ", max_tokens=8, sampling=Sampling(temperature=0.8, seed=7)):
    ...         assert emitted.source in ("draft", "lookup", "target", "bonus")
    >>> decoder.statistics.tokens
    8

    Leaving the ``with`` block, or ``close()``, frees both models and their caches.

    Args:
        pair: name or path of a profile, the profile, or a :class:`~ggufspec.models.profile.Pair` of files.
        settings: options that go over the profile's, checked by type checkers, too.
        download: fetch what is on the hub and not here, which may be many GB; without it such a pair is an error.
        on_event: gets progress: ``{"event": "fetching", "file": …, "bytes": …, "total": …}`` from threads, one at a
            time, and ``{"event": "reading", "file": …, "bytes": …}``.
        options: the same by keyword, which go over ``settings``: ``drafter``, ``ctx_size``, …

    Raises:
        UsageError: a name or an option is not valid, or a drafter needs a draft and there is none.
        ModelError: a file is not here or damaged, or the draft's vocabulary is another.
        GgufspecError: nothing fits, or the hub cannot be reached.
    """
    given = of_keywords(options, settings)
    if given.op_offload_min_batch is None:  # of this process, in which llama.cpp reads headers before it is told
        given = replace(given, op_offload_min_batch=streams_from() or STREAM_WIDTH)
    files = files_of(pair, download=download, on_event=on_event)
    check_drafter(files, given)
    resolved = resolve(open_pair(files, given, on_event=on_event), on_event=on_event)
    devices.add_rpc_workers(given.rpc or ())
    return SpeculativeDecoder(files.target, files.draft, resolved.pair, cache=cache_folder())
