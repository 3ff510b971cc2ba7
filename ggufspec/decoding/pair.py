r"""Pairs for people who write Python: planned, and loaded where the plan puts them.

Three lines from an installed package to tokens that say where they come from:

>>> from ggufspec import load_pair
>>> with load_pair("demo", threads=1) as decoder:
...     answer = list(decoder.generate("import os\n\ndef ", max_tokens=24))
>>> {emitted.source for emitted in answer} <= {"draft", "lookup", "target", "bonus"}
True

What is given goes over the profile, the profile over the plan, the plan over the defaults. Nothing is printed;
``on_event`` hears of what takes long. What cannot be done is a :class:`ggufspec.errors.GgufspecError`, whose ``hint``
is the next thing to try, in the command line's words.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict, Unpack

from ggufspec.decoding.planned import (
    Asked,
    Chosen,
    OnEvent,
    Placed,
    asked,
    decoder_options,
    make,
    of_pair,
    of_profile,
    place,
)
from ggufspec.errors import UsageError

if TYPE_CHECKING:
    from ggufspec.decoding.decoder import SpeculativeDecoder
    from ggufspec.decoding.options import DecoderOptions
    from ggufspec.models.profile import Pair, Profile
    from ggufspec.schema.plan import PlanDocument

_OF_THE_PLACEMENT = ("gpu_layers", "gpu_layers_draft", "split", "n_cpu_moe", "headroom", "rpc")


class PlanOptions(TypedDict, total=False):
    """What a caller fixes of a placement. None is the same as left out.

    Args:
        ctx_size: tokens of context, prompt and answer together.
        gpu_layers: layers of the target on the cards, the output layer included, or more for all; ``all``; ``auto``.
        gpu_layers_draft: the same of the draft.
        split: shares of the target's layers for each card.
        n_cpu_moe: the experts of the target's first so many blocks stay on the CPU.
        threads: CPU threads; 0 means the physical cores.
        cache_type_k: type of the target's key cache, ``q8_0`` say.
        cache_type_v: type of its value cache.
        flash_attn: ``auto``, ``on`` or ``off``.
        ubatch_size: tokens of a prompt that are computed at once, 512 by default; fewer take less memory.
        draft_max: the longest draft of a round, in tokens.
        headroom: what to leave free on each card: bytes, or ``512MiB``.
        rpc: endpoints (``host:port``) of llama.cpp's RPC workers, as further cards.
    """

    ctx_size: int | None
    gpu_layers: int | str | None
    gpu_layers_draft: int | str | None
    split: Sequence[float] | None
    n_cpu_moe: int | None
    threads: int | None
    cache_type_k: str | None
    cache_type_v: str | None
    flash_attn: str | None
    ubatch_size: int | None
    draft_max: int | None
    headroom: int | str | None
    rpc: Sequence[str] | None


class PairOptions(PlanOptions, total=False):
    """What a caller fixes of how a pair runs: a placement, and who drafts.

    Args:
        drafter: ``draft`` (the model), ``lookup`` (n-grams of the text), ``both`` or ``none``.
        draft_policy: ``adaptive`` (as far as it pays, which may be not at all) or ``fixed``.
        lookup_corpus: a text file whose n-grams the lookup knows too.
        accept: the acceptance rule: ``exact``, ``residual``, ``top-k:N`` or ``typical:EPS``; the last two are lossy.
        strict: the same text to the bit with and without draft; may be slower.
    """

    drafter: str | None
    draft_policy: str | None
    lookup_corpus: str | Path | None
    accept: str | None
    strict: bool | None


def plan_pair(
    pair: str | Path | Profile | Pair = "demo",
    *,
    gpu: str | Sequence[str] = (),
    vram: int | str | Sequence[int | str] = (),
    acceptance: float | None = None,
    kv_types: Sequence[tuple[str, str]] = (),
    sweep: bool = False,
    on_event: OnEvent | None = None,
    verbose: bool = False,
    **options: Unpack[PlanOptions],
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
        gpu: names of cards that are not here: ``RTX 4090``.
        vram: memory of cards that are not here: bytes, or ``24GiB``.
        acceptance: the share of drafted tokens to expect, 0 to 1; otherwise what was measured before, or the profile's.
        kv_types: (cache_type_k, cache_type_v) of the target's cache that the plan may choose besides the one asked for.
        sweep: predict tokens/s over the target's layers too.
        on_event: told of progress: ``{"event": "reading", "file": …, "bytes": …}``.
        verbose: let llama.cpp's log of the dry runs through to standard error.
        options: :class:`PlanOptions`.

    Returns:
        The document of ``ggufspec plan --json``: bytes by device, tokens/s of both ways, the choice and why;
        :func:`ggufspec.schema.base.to_json` makes JSON of it.

    Raises:
        UsageError: a name, an option or a size is none.
        GgufspecError: a header cannot be read, the draft cannot serve the target, or nothing fits.
    """
    from ggufspec.planning.describe import document

    given = _given(options, PlanOptions.__annotations__)
    chosen = _chosen(pair)
    fixed = replace(
        _asked(chosen, given), gpu=_texts(gpu), vram=_texts(vram), kv_types=tuple(kv_types), acceptance=acceptance
    )
    made = make(chosen, _decoder(chosen, given), fixed, on_event=on_event, verbose=verbose)
    return document(made.plan, chosen.describe(), made.acceptance_from, made.sweep() if sweep else ())


def load_pair(
    pair: str | Path | Profile | Pair = "demo",
    *,
    download: bool = False,
    on_event: OnEvent | None = None,
    **options: Unpack[PairOptions],
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
        download: fetch what is on the hub and not here, which may be many GB; without it such a pair is an error.
        on_event: told of progress: ``{"event": "fetching", "file": …, "bytes": …, "total": …}`` from threads, one at a
            time, and ``{"event": "reading", "file": …, "bytes": …}``.
        options: :class:`PairOptions`.

    Raises:
        UsageError: a name or an option is none, or a drafter needs a draft and there is none.
        ModelError: a file is not here or damaged, or the draft's vocabulary is another.
        GgufspecError: nothing fits, or the hub cannot be reached.
    """
    from ggufspec.cache import cache_folder
    from ggufspec.decoding.decoder import SpeculativeDecoder
    from ggufspec.llamacpp import devices

    files = at_hand(pair, download=download, on_event=on_event)
    places = settle(files, options, on_event=on_event)
    for endpoint in options.get("rpc") or ():
        devices.add_rpc_worker(endpoint)
    return SpeculativeDecoder(files.target, files.draft, places.pair, cache=cache_folder())


def at_hand(pair: str | Path | Profile | Pair, *, download: bool = False, on_event: OnEvent | None = None) -> Pair:
    """The pair with its files here and checked; with ``download`` they are fetched from the hub first.

    Raises:
        UsageError: there is no such profile.
        ModelError: a file is not here, or is no GGUF file; the hint is the command that fetches it.
        GgufspecError: the hub cannot be reached, or the disk is too small.
    """
    from ggufspec.llamacpp.model import check_gguf
    from ggufspec.models.profile import Pair, Profile, load_profile, resolve

    if isinstance(pair, Pair):
        files = replace(pair, target=Path(pair.target), draft=Path(pair.draft) if pair.draft else None)
    else:
        profile = pair if isinstance(pair, Profile) else load_profile(pair)
        if download:
            _fetch(profile, on_event)
        files = resolve(profile, on_event)
    for file in (files.target, files.draft):
        if file is not None:
            check_gguf(file)
    return files


def _fetch(profile: Profile, on_event: OnEvent | None) -> None:
    from ggufspec.models.download import fetch, here, look
    from ggufspec.models.profile import on_hub

    models = [source for model in (profile.target, profile.draft) if model and (source := on_hub(model))]
    if missing := [source for source in models if here(source) is None]:
        fetch(look(missing), on_event)


def settle(
    pair: Pair,
    options: PairOptions,
    *,
    rival: bool = False,
    on_event: OnEvent | None = None,
    verbose: bool = False,
) -> Placed:
    """How a pair whose files are here runs: :func:`ggufspec.decoding.planned.place` with a caller's options.

    Raises:
        UsageError: an option is none, or a drafter needs a draft and there is none.
        GgufspecError: nothing fits.
    """
    given = _given(options, PairOptions.__annotations__)
    if pair.draft is None and given.get("drafter") in ("draft", "both"):
        raise UsageError(f"the drafter {given['drafter']!r} needs a draft model, and none is given", "drafter='lookup'")
    chosen = of_pair(pair)
    return place(
        chosen, _decoder(chosen, given), _asked(chosen, given), rival=rival, on_event=on_event, verbose=verbose
    )


# ---- a caller's options ----------------------------------------------------------------------------------------------


def _given(options: Mapping[str, Any], known: Collection[str]) -> dict[str, Any]:
    """The options that are not None.

    Raises:
        UsageError: one is not known; names the nearest.
    """
    for name in options:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else "known options: " + ", ".join(known)
            raise UsageError(f"there is no option {name!r}", hint)
    return {name: value for name, value in options.items() if value is not None}


def _asked(chosen: Chosen, given: Mapping[str, Any]) -> Asked:
    of_it = {name: given[name] for name in (*_OF_THE_PLACEMENT, "draft_max") if name in given}
    if "headroom" in of_it:
        of_it["headroom"] = str(of_it["headroom"])
    return asked(chosen, **of_it)


def _decoder(chosen: Chosen, given: Mapping[str, Any]) -> DecoderOptions:
    of_it = {name: value for name, value in given.items() if name not in _OF_THE_PLACEMENT}
    if "lookup_corpus" in of_it:
        of_it["lookup_corpus"] = Path(of_it["lookup_corpus"])
    return decoder_options(chosen.settings, **of_it)


def _chosen(pair: str | Path | Profile | Pair) -> Chosen:
    from ggufspec.models.profile import Pair, Profile, load_profile

    if isinstance(pair, Pair):
        return of_pair(pair)
    return of_profile(pair if isinstance(pair, Profile) else load_profile(pair))


def _texts(given: int | str | Sequence[int | str]) -> tuple[str, ...]:
    return tuple(map(str, (given,) if isinstance(given, int | str) else given))
