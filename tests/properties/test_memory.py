"""The memory plan is monotone, and every fix that it names works."""

from typing import Any

from hypothesis import assume, given
from hypothesis import strategies as st

from fsdptrain.config import Config
from fsdptrain.config.checks import check
from fsdptrain.config.flags import config_options, parse
from fsdptrain.errors import MemoryPlanError
from fsdptrain.memory.demand import MemorySupply, Shard, check_load_memory, memory_need
from fsdptrain.memory.remedies import spread, with_adapter
from fsdptrain.model.structure import ParameterCounts


@st.composite
def shards(draw: st.DrawFn) -> Shard:
    layer, outside = draw(st.integers(1, 10**9)), draw(st.integers(1, 10**9))
    total = layer * draw(st.integers(1, 100)) + outside
    return Shard.of(ParameterCounts(total, layer, outside), draw(st.integers(1, 64)))


@st.composite
def options(draw: st.DrawFn) -> dict[str, Any]:
    servers = {"rollout_engine": "vllm-server", "rollout_num_servers": 1}
    return {
        "bf16": draw(st.booleans()),
        **draw(st.sampled_from([{}, {"offload_optimizer": True}, {"fsdp_cpu_offload": True}, {"offload_train": True}])),
        "fsdp_reshard_after_forward": draw(st.booleans()),
        "kl_loss_coef": draw(st.sampled_from([0.0, 0.1])),
        "kl_reward_coef": draw(st.sampled_from([0.0, 0.1])),
        "load_strategy": draw(st.sampled_from(["shard", "rank0"])),
        "async_save": draw(st.booleans()),
        **draw(st.sampled_from([{}, {"algorithm": "sft", "eval_interval": 0}, servers])),
    }


@st.composite
def configs(draw: st.DrawFn) -> Config:
    values = draw(options())
    if values.get("algorithm") == "sft" or "rollout_engine" in values:
        values.pop("offload_train", None)
    if values.get("algorithm") == "sft":
        values |= {"kl_loss_coef": 0.0, "kl_reward_coef": 0.0}
    return Config(hf_checkpoint="a model", **values)


@st.composite
def supplies(draw: st.DrawFn) -> MemorySupply:
    device, host = draw(st.integers(10**6, 10**11)), draw(st.integers(10**6, 10**12))
    return MemorySupply(device, host, draw(st.integers(1, 8)), draw(st.booleans()))


@given(config=configs(), shard=shards(), supply=supplies())
def test_more_shards_never_need_more(config: Config, shard: Shard, supply: MemorySupply):
    fewer, more = (memory_need(config, sizes, supply) for sizes in (shard, Shard.of(shard.counts, 65)))
    assert more.device <= fewer.device
    assert more.host <= fewer.host


@given(config=configs(), shard=shards(), supply=supplies())
def test_offload_moves_bytes_and_makes_none(config: Config, shard: Shard, supply: MemorySupply):
    sft = Config(hf_checkpoint="a model", algorithm="sft", eval_interval=0, bf16=config.model.bf16)
    needs = [memory_need(sft.with_values(fsdp_cpu_offload=on), shard, supply) for on in (True, False)]
    totals = [supply.ranks_per_node * sum(need.device_parts.values()) + sum(need.host_parts.values()) for need in needs]
    assert totals[0] == totals[1]
    assert needs[0].device <= needs[1].device


@given(config=configs(), shard=shards(), supply=supplies())
def test_each_flag_that_is_named_makes_it_fit(config: Config, shard: Shard, supply: MemorySupply):
    try:
        check_load_memory(config, shard, supply)
        assume(False)
    except MemoryPlanError as error:
        way_out = str(error).rsplit("are free: ", 1)[1].split("; ")
    for remedy in way_out:
        if remedy.startswith("--"):
            changed = parse(remedy.split(), config_options())
            adapted = with_adapter(shard) if "lora_rank" in changed else shard
            check(config.with_values(**changed))
            check_load_memory(config.with_values(**changed), adapted, supply)
        elif "shards (" in remedy:
            factor = int(remedy.split()[0]) // shard.num_shards
            check_load_memory(config, spread(shard, factor), supply)
        else:
            assert remedy.startswith("use a smaller --hf-checkpoint")
