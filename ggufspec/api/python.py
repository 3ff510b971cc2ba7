r"""Functions for Python that plan a pair or load it into a decoder.

>>> from ggufspec import load_pair
>>> with load_pair("demo", threads=1) as decoder:
...     answer = list(decoder.generate("import os\n\ndef ", max_tokens=24))
>>> {emitted.source for emitted in answer} <= {"draft", "lookup", "target", "bonus"}
True

Keyword arguments are the options marked ``python`` in :data:`ggufspec.settings.table.OPTIONS`. Given values override
the profile, the profile overrides the plan, and the plan overrides the defaults. Nothing is printed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ggufspec.api.pairs import OnEvent, check_drafter, open_pair, spec_of, with_files
from ggufspec.api.plan import make_plan
from ggufspec.api.resolve import resolve
from ggufspec.decoding.decoder import SpeculativeDecoder
from ggufspec.files.cache import cache_folder
from ggufspec.llamacpp import devices
from ggufspec.llamacpp.library import min_batch_from_environment
from ggufspec.llamacpp.options import OP_OFFLOAD_MIN_BATCH
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
    """Plan a pair: what fits, where each layer goes, how fast it will be, and whether the draft is worth its memory.

    Models need not be downloaded, because only a few MB of headers per model are read from the hub and cached. By
    default, the plan is for this machine's GPUs; with ``gpu`` or ``vram``, it is for GPUs that need not be installed.

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
        settings: options that override the profile's, with static types.
        gpu: names of GPUs that need not be installed, such as ``RTX 4090``.
        vram: memory of GPUs that need not be installed, in bytes or as text, such as ``24GiB``.
        ram: free RAM to plan for; default: this machine's, or unlimited for GPUs that are not installed.
        ram_bandwidth: data-sheet bandwidth of that RAM, in GB/s.
        cpu: cores and vector instructions of the CPU, such as ``8xavx2``, or ``8xavx512`` with VNNI.
        link: link to the GPUs, such as ``pcie4x16``.
        acceptance: expected acceptance probability per token, 0 to 1; default: as measured before, or the profile's.
        allow_kv: additional types that the plan may choose for the target's KV cache.
        sweep: True to predict tokens/s also for several numbers of target layers on the GPUs.
        on_event: called with progress events: ``{"event": "reading", "file": …, "bytes": …}``.
        verbose: True to send llama.cpp's log of the dry runs to standard error.
        options: options by keyword, such as ``ctx_size`` or ``gpu_layers``, which override ``settings``.

    Returns:
        The document of ``ggufspec plan --json``: bytes by device, tokens/s with and without the draft, the choice and
        the reason. :func:`ggufspec.schema.base.to_json` converts it to JSON.

    Raises:
        UsageError: a name, an option or a size is invalid.
        GgufspecError: a header cannot be read, the draft is incompatible, or nothing fits.
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
    opened = open_pair(spec_of(pair), given, on_event=on_event, loads=True)
    return make_plan(opened, on_event=on_event, verbose=verbose).document(sweep=sweep, contexts=True)


def load_pair(
    pair: str | Path | Profile | Pair = "demo",
    settings: Settings | None = None,
    *,
    download: bool = False,
    on_event: OnEvent | None = None,
    **options: Any,
) -> SpeculativeDecoder:
    r"""Load a pair into a decoder, with layers placed by a plan for this machine.

    >>> from ggufspec import Sampling, load_pair
    >>> with load_pair("demo", threads=1, ctx_size=512) as decoder:
    ...     for emitted in decoder.generate("class ", max_tokens=8, sampling=Sampling(temperature=0.8, seed=7)):
    ...         assert emitted.source in ("draft", "lookup", "target", "bonus")
    >>> decoder.statistics.tokens
    8

    Leaving the ``with`` block, or ``close()``, frees both models and their caches.

    Args:
        pair: name or path of a profile, the profile, or a :class:`~ggufspec.models.profile.Pair` of files.
        settings: options that override the profile's, with static types.
        download: True to download missing files from the hub, which may be many GB; otherwise, they are an error.
        on_event: called with progress, perhaps from another thread but never twice at once: ``{"event": "fetching",
            "file": …, "bytes": …, "total": …}`` and ``{"event": "reading", "file": …, "bytes": …}``.
        options: options by keyword, such as ``drafter`` or ``ctx_size``, which override ``settings``.

    Raises:
        UsageError: a name or an option is invalid, or a drafter needs a draft model but none is given.
        ModelError: a file is missing or damaged, or the draft's vocabulary differs.
        GgufspecError: nothing fits, or the hub cannot be reached.
    """
    given = of_keywords(options, settings)
    if given.op_offload_min_batch is None:  # this value must be fixed before llama.cpp reads headers in this process
        given = replace(given, op_offload_min_batch=min_batch_from_environment() or OP_OFFLOAD_MIN_BATCH)
    files = with_files(pair, download=download, on_event=on_event)
    check_drafter(files, given)
    resolved = resolve(open_pair(files, given, on_event=on_event), on_event=on_event)
    devices.add_rpc_workers(given.rpc or ())
    return SpeculativeDecoder(files.target, files.draft, resolved.pair, cache=cache_folder())
