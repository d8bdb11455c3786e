"""The memory plan is monotone, and every fix that it names works."""

import re
from dataclasses import replace

from hypothesis import assume, given
from hypothesis import strategies as st

from fsdptrain.errors import MemoryPlanError
from fsdptrain.memory.demand import MemoryDemand, MemorySupply, check_load_memory, load_memory_need
from fsdptrain.memory.remedies import with_adapter
from fsdptrain.model.structure import ParameterCounts

FLAGS = {
    "--load-strategy shard": {"load_strategy": "shard"},
    "--fsdp-reshard-after-forward": {"reshard_after_forward": True},
    "--offload-optimizer": {"offload_optimizer": True},
    "--fsdp-cpu-offload": {"cpu_offload": True},
    "--no-fsdp-cpu-offload": {"cpu_offload": False},
    "--rollout-engine vllm": {"embedded_engine": False},
    "--kl-loss-coef 0": {"reference": False},
}


@st.composite
def demands(draw: st.DrawFn) -> MemoryDemand:
    layer, outside = draw(st.integers(1, 10**9)), draw(st.integers(1, 10**9))
    total = layer * draw(st.integers(1, 100)) + outside
    return MemoryDemand(
        counts=ParameterCounts(total, layer, outside),
        num_shards=draw(st.integers(1, 64)),
        compute_bytes=draw(st.sampled_from([2, 4])),
        **draw(st.sampled_from([{}, {"offload_optimizer": True}, {"cpu_offload": True}])),
        reshard_after_forward=draw(st.booleans()),
        embedded_engine=draw(st.booleans()),
        reference=draw(st.booleans()),
        load_strategy=draw(st.sampled_from(["shard", "rank0"])),
    )


@st.composite
def supplies(draw: st.DrawFn) -> MemorySupply:
    device, host = draw(st.integers(10**6, 10**11)), draw(st.integers(10**6, 10**12))
    return MemorySupply(device, host, draw(st.integers(1, 8)), draw(st.booleans()))


@given(demand=demands(), supply=supplies())
def test_more_shards_never_need_more(demand: MemoryDemand, supply: MemorySupply):
    fewer, more = (load_memory_need(replace(demand, num_shards=n), supply) for n in (demand.num_shards, 65))
    assert more.device <= fewer.device
    assert more.host <= fewer.host


@given(demand=demands(), supply=supplies())
def test_offload_moves_bytes_and_makes_none(demand: MemoryDemand, supply: MemorySupply):
    ranks = supply.ranks_per_node
    on, off = (load_memory_need(replace(demand, cpu_offload=offload), supply) for offload in (True, False))
    totals = [ranks * sum(need.device_parts.values()) + sum(need.host_parts.values()) for need in (on, off)]
    assert totals[0] == totals[1]
    assert on.device <= off.device


@given(demand=demands(), supply=supplies())
def test_each_flag_that_is_named_makes_it_fit(demand: MemoryDemand, supply: MemorySupply):
    try:
        check_load_memory(demand, supply)
        assume(False)
    except MemoryPlanError as error:
        way_out = str(error).rsplit("are free: ", 1)[1].split("; ")
    for remedy in way_out:
        if remedy in FLAGS:
            check_load_memory(replace(demand, **FLAGS[remedy]), supply)
        elif remedy == "--lora-rank 32":
            check_load_memory(replace(demand, counts=with_adapter(demand.counts), reference=False), supply)
        elif shards := re.match(r"(\d+) shards", remedy):
            check_load_memory(replace(demand, num_shards=int(shards[1])), supply)
        else:
            assert remedy.startswith("use a smaller --hf-checkpoint")
