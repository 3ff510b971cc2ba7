"""Plans on a worker with a budget: what they place is loaded for real, within the budget; one layer more is not."""

from __future__ import annotations

import random
import re
from dataclasses import replace

import pytest

from ggufspec.api.plan import plan_request
from ggufspec.decoding.options import DecoderOptions
from ggufspec.errors import GgufspecError
from ggufspec.llamacpp import dryrun, gguf
from ggufspec.models.header import interpret
from ggufspec.planning.dry_runs import DryRuns
from ggufspec.planning.memory import HOST, MemoryRequest, f16_scratch_bytes, fused_bytes, layer_devices
from ggufspec.planning.plan import OffloadDevice, PlanMachine
from ggufspec.planning.search import search_plan
from ggufspec.planning.speed import DeviceProfile, MachineProfile
from tests.support import shapes

TINY = [name for name in shapes.SHAPES if name.startswith("tiny-")]
SPEED = MachineProfile({HOST: DeviceProfile(1e9, 1e11), "RPC0": DeviceProfile(5e10, 1e13)}, 1e-5, 1e-5, 1e10, "made up")
MIB = 2**20


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """(header, metadata_only, file) by name."""
    folder = tmp_path_factory.mktemp("tiny")
    made = {}
    for name in TINY:
        path = shapes.write(folder / f"{name}.gguf", shapes.SHAPES[name])
        metadata_only = folder / f"{name}-metadata-only.gguf"
        data = path.read_bytes()[: 4 << 20]
        gguf.write_metadata_only([data], metadata_only)
        made[name] = interpret(path.name, [gguf.parse_header(data)], path.stat().st_size), metadata_only, path
    return made


def cases():
    """Random pairs, budgets and contexts; the seed is fixed."""
    chance = random.Random(20261121)
    for _ in range(24):
        budget = int(MIB * 2 ** chance.uniform(1, 6.5))
        options = DecoderOptions(
            ctx_size=chance.choice([256, 1000, 4096]),
            threads=1,
            flash_attn=chance.choice(["auto", "on", "off"]),
            cache_type_k=chance.choice(["f16", "q8_0"]),
        )
        yield chance.choice(TINY), chance.choice([None, *TINY]), budget, options, chance.uniform(0.3, 0.95)


def test_every_plan_loads_within_its_budget(tiny, tmp_path):
    """One child process loads them all for real, with the decoder's own placements and contexts."""
    runs, wanted, refused, hidden = [], [], [], []
    dry_runs = DryRuns({"RPC0": "a worker"}, simulated=True, rpc=(), folder=tmp_path)
    for target, draft, budget, options, acceptance in cases():
        here = PlanMachine((OffloadDevice("RPC0", "", budget, budget),), 8 << 30, 0, SPEED)
        asked = plan_request(tiny[target][:2], tiny[draft][:2] if draft else None, options, acceptance)
        try:
            plan = search_plan(asked, here, dry_runs)
        except GgufspecError as error:  # not even an empty placement's buffers fit, or llama.cpp refuses the KV types
            refused.append(error.message)
            continue
        for option in filter(None, (plan.target_only, plan.pair)):
            parts = [(tiny[target][2], option.target, option.context)]
            if option.draft is not None:
                parts.append((tiny[draft][2], option.draft, asked.draft.context))
            runs += [dryrun.PlacedModel(*part) for part in parts]
            wanted.append((option, budget, len(parts)))
            # what a driver would take besides, and a worker on the CPU does not
            subjects = [(asked.target.header, option.target, option.context)]
            if option.draft is not None:
                subjects.append((asked.draft.header, option.draft, asked.draft.context))
            hidden.append(
                sum(
                    bound(header, layer_devices(header.blocks, placement, 1), context, 2)[1]
                    for header, placement, context in subjects
                    for bound in (f16_scratch_bytes, fused_bytes)
                )
            )
            more = replace(option.target, gpu_layers=option.target.gpu_layers + 1)
            if more.gpu_layers <= asked.target.header.layers:
                subject = asked.target if option.draft else asked.target_only
                (larger,) = dry_runs([MemoryRequest(subject.header, subject.metadata_only, more, option.context)])
                beside = option.draft_bytes["RPC0"].total if option.draft else 0
                assert larger["RPC0"].total + beside > budget
    dry_runs.close()
    assert len(wanted) > 20
    assert all(re.search("[MG]iB of RPC0, but the budget|different K", message) for message in refused)
    assert len({option.target.gpu_layers for option, *_ in wanted}) > 4

    answers = iter(dryrun.ask(dryrun.DryRunJob(simulated_devices=1, real=True), runs))
    for (option, budget, parts), more in zip(wanted, hidden, strict=True):
        loaded = [next(answers) for _ in range(parts)]
        assert not any(answer.error for answer in loaded)
        used = [answer.devices["RPC0"] for answer in loaded]
        assert sum(one.weights + one.kv + one.compute for one in used) == option.used("RPC0").total - more <= budget
