"""The plan is monotone, and every fix that it proposes works."""

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest

from fsdptrain import platform
from fsdptrain.config import Config
from fsdptrain.config.checks import check
from fsdptrain.errors import MemoryPlanError
from fsdptrain.features.activation_memory.config import ActivationMemoryConfig
from fsdptrain.features.lora.adapters import add_adapters
from fsdptrain.features.lora.config import LoraConfig
from fsdptrain.memory.demand import GIB, MemorySupply, memory_need
from fsdptrain.model.structure import count_parameters, freeze_vision, tower_layers
from fsdptrain.tools.inspect import inspection
from fsdptrain.tools.plan import plan as plan_module
from fsdptrain.tools.plan import remedies
from fsdptrain.tools.plan.activations import MemoryPeak
from fsdptrain.tools.plan.fit import fastest_fit
from fsdptrain.tools.plan.plan import Machine, Planner, cache_rows, make_plan, seqlens, with_margin
from fsdptrain.trainer import memory as run_memory
from tests import configs
from tests.matrix import only

pytestmark = pytest.mark.slow

MODEL = configs.meta_model("llama-3.1-8b")
PLANNER = Planner(MODEL, Machine(8, 80 * GIB))  # keeps its traces over these tests
WITH_VLLM = Planner(MODEL, Machine(8, 80 * GIB), auto_engine="vllm")
SMALL: dict[str, Any] = {"max_tokens_per_gpu": 1024, "rollout_max_response_len": 512}


def config(**options: Any) -> Config:
    return Config(**{"hf_checkpoint": "a model", **SMALL, **options})


def peak(num_gpus: int = 8, **options: Any) -> int:
    return PLANNER.on(Machine(num_gpus, 80 * GIB)).training(config(**options)).total


def state(peak: MemoryPeak) -> int:
    return sum(peak.parts[name] for name in ("weights", "optimizer state", "gradients"))


def test_state_is_16_bytes_per_parameter_of_a_shard():
    assert state(PLANNER.training(config())) == 16 * count_parameters(MODEL).total // 8


def test_an_unused_tower_is_never_gathered():
    model = configs.meta_model("qwen3.5-9b")
    freeze_vision(model)
    tower = sum(p.numel() for layer in tower_layers(model) for p in layer.parameters())
    outside = Planner(model, Machine(8, 80 * GIB)).sharding(config()).outside
    assert tower > 400_000_000
    assert outside == count_parameters(model).outside_layers
    assert outside < sum(p.numel() for p in model.parameters()) - tower


def test_more_gpus_need_less():
    assert peak(1) > peak(2) > peak(8) > peak(64)


def test_each_remedy_needs_less():
    assert peak(gradient_checkpointing=True) < peak()
    assert peak(fsdp_cpu_offload=True) < peak(offload_optimizer=True) < peak()
    assert peak(offload_activations=True) < peak()
    long: dict[str, Any] = {"gradient_checkpointing": True, "max_tokens_per_gpu": 8192}
    selective, second = (
        peak(gradient_checkpointing_kind="selective", **long),
        peak(gradient_checkpointing_every=2, **long),
    )
    assert peak(offload_activations=True, **long) < peak(**long) < min(selective, second)
    assert max(selective, second) < peak(max_tokens_per_gpu=8192)
    assert peak(max_tokens_per_gpu=2048) > peak()
    assert peak(fsdp_reshard_after_forward=False) > peak()


@pytest.mark.parametrize("free", [20, 24, 30, 60])
def test_a_run_that_does_not_fit_gets_the_fastest_options_that_make_it_fit(free: float):
    given = config(max_tokens_per_gpu=8192, lr=1e-5)
    found = fastest_fit(PLANNER, given, free=int(free * GIB), given=["lr"])
    planner = PLANNER.on(Machine(8, int(free * GIB)))
    assert (found is None) == (planner.fits(given) is not None)
    if found is not None:
        assert planner.fits(found.config) is not None
        assert found.flags
        assert run_memory.fit_memory(None, given) == given  # on a CPU


def test_memory_that_only_the_embedded_engine_needs_is_not_made_for_vllm():
    given = config(rollout_batch_size=512)
    training, generation = (with_margin(peak) for peak in (PLANNER.training(given), PLANNER.generation(given)))
    between = (training + generation) // 2
    assert training < between < generation
    assert fastest_fit(PLANNER, given, free=between, given=[]) is not None
    assert fastest_fit(WITH_VLLM, given, free=between, given=[]) is None


def test_what_auto_means_is_planned_as_if_it_were_given():
    given = config(rollout_kv_cache_gib=4)
    for planner, name in ((PLANNER, "hf"), (WITH_VLLM, "vllm")):
        assert planner.generation(given) == PLANNER.generation(given.with_values(rollout_engine=name))
    assert PLANNER.generation(given) != WITH_VLLM.generation(given)
    assert WITH_VLLM.generation(config(rollout_engine="vllm-server", rollout_num_servers=1)) is None


@pytest.mark.filterwarnings("ignore")  # of torch, which traces compiled layers for --speed fast
@pytest.mark.parametrize("auto_engine", ["hf", "vllm"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"algorithm": "sft", "eval_interval": 0},
        {"rollout_max_batch_tokens": 131072},
        {"rollout_kv_cache_gib": 4},
        {"image_key": "image"},
        {"speed": "fast"},
    ],
)
def test_options_are_chosen_for_every_kind_of_run(auto_engine: str, options: dict[str, Any], monkeypatch):
    """Whatever engine --rollout-engine auto means, and whatever options are set beside."""
    planner = PLANNER if auto_engine == "hf" else WITH_VLLM
    given = Config(hf_checkpoint="a model", max_tokens_per_gpu=8192, **options)
    free = with_margin(planner.training(given)) - GIB
    monkeypatch.setattr(run_memory, "gather", lambda value: [value])
    monkeypatch.setattr(run_memory, "raise_on_all_ranks", lambda *_: nullcontext())
    monkeypatch.setattr(platform, "device_memory", lambda: (free, 80 * GIB))
    chosen = run_memory.fit_memory(planner, given)
    assert planner.on(Machine(8, free)).fits(chosen) is not None
    assert {flat: chosen.value(flat) for flat in options} == options
    assert chosen.batch.max_tokens_per_gpu == 8192


def test_a_run_whose_options_are_chosen_is_not_refused_when_it_loads():
    """Also with vLLM in the trainer's process, whose weights are beside the optimizer state while it generates."""
    planner, free = WITH_VLLM.on(Machine(4, 80 * GIB)), 40 * GIB
    given = Config(
        hf_checkpoint="a model", gradient_checkpointing=True, max_tokens_per_gpu=4096, rollout_max_response_len=1024
    )
    found = fastest_fit(planner, given, free=free, given=given.given_values)
    assert found is not None
    supply = MemorySupply(free, 1 << 50, 4, has_accelerator=True)
    assert not memory_need(given, planner.shard(given), supply).fits(supply)
    assert memory_need(found.config, planner.shard(found.config), supply).fits(supply)


def test_an_engine_over_two_ranks_holds_half_of_its_weights_on_each():
    engine = "the engine's weights"
    options: dict[str, Any] = {"rollout_engine": "vllm"}
    whole, half = (
        PLANNER.generation(config(**options, rollout_engine_args={"tensor_parallel_size": ranks})) for ranks in (1, 2)
    )
    assert whole is not None
    assert half is not None
    assert whole.parts[engine] == 2 * half.parts[engine]
    embedded = PLANNER.generation(config(rollout_engine_args={"tensor_parallel_size": 2}))
    assert embedded is not None
    assert embedded.parts[engine] == whole.parts[engine]
    for wrong in ("auto", None, 0, "2"):  # vLLM's options are checked when the engine is built
        found = PLANNER.generation(config(**options, rollout_engine_args={"tensor_parallel_size": wrong}))
        assert found == whole


@pytest.mark.parametrize(
    ("options", "may_shrink"),
    [
        ({"rollout_max_response_len": 512}, False),
        ({"algorithm": "sft"}, False),
        ({"rollout_max_response_len": 512, "rollout_max_prompt_len": 512}, True),
    ],
)
def test_packs_get_smaller_only_if_they_hold_the_same_data(options: dict[str, Any], may_shrink: bool):
    given = Config(hf_checkpoint="a model", max_tokens_per_gpu=8192, **options)
    found = fastest_fit(PLANNER, given, free=24 * GIB, given=[])
    assert found is not None
    assert (found.config.batch.max_tokens_per_gpu < 8192) == may_shrink
    assert found.config.longest_sequence == given.longest_sequence


def test_an_option_that_is_set_is_never_changed():
    free, given = 24 * GIB, config(max_tokens_per_gpu=8192, rollout_max_prompt_len=512)
    free_choice = fastest_fit(PLANNER, given, free=free, given=[])
    assert free_choice is not None
    assert free_choice.config.batch.max_tokens_per_gpu < 8192
    bound = fastest_fit(PLANNER, given, free=free, given=["max_tokens_per_gpu"])
    assert bound is not None
    assert bound.config.batch.max_tokens_per_gpu == 8192
    with pytest.raises(MemoryPlanError, match="no memory option that is free to choose"):
        fastest_fit(PLANNER, given, free=GIB, given=[])


@pytest.mark.parametrize("free", [20, 27.65, 28, 37, 45])
def test_auto_chooses_the_largest_sizes_that_the_plan_of_the_run_fits(free: float):
    long: dict[str, Any] = {"max_tokens_per_gpu": 8192, "gradient_checkpointing": True}
    given = config(**long, fsdp_reshard_after_forward="auto")
    chosen = PLANNER.choose_sizes(given, int(free * GIB))
    needs = {
        (chunk, reshard): with_margin(
            PLANNER.training(config(**long, logprob_chunk_size=chunk, fsdp_reshard_after_forward=reshard))
        )
        for chunk in (512, 1024, 2048, 4096, 8192)
        for reshard in (True, False)
    }
    fitting = [sizes for sizes, need in needs.items() if need <= 0.9 * free * GIB]
    chunk = max((chunk for chunk, reshard in fitting if reshard), default=512)
    assert chosen.model.logprob_chunk_size == chunk
    assert chosen.fsdp.reshard_after_forward == ((chunk, False) not in fitting)


def test_sizes_that_are_given_stay():
    given = config(logprob_chunk_size=100, fsdp_reshard_after_forward=True)
    assert PLANNER.choose_sizes(given, 80 * GIB) == given
    assert PLANNER.choose_sizes(config(fsdp_reshard_after_forward=False), GIB) == config(
        logprob_chunk_size=512, fsdp_reshard_after_forward=False
    )


def test_the_chunk_is_the_smallest_where_its_logits_are_copied_whole(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(plan_module, "is_replaced", lambda: True)
    assert PLANNER.choose_sizes(config(), 80 * GIB).model.logprob_chunk_size == 512
    monkeypatch.undo()
    assert PLANNER.choose_sizes(config(), 80 * GIB).model.logprob_chunk_size == 1024
    split = config(tensor_parallel_size=2, fsdp_reshard_after_forward="auto")
    chosen = PLANNER.choose_sizes(split, 80 * GIB)
    assert (chosen.model.logprob_chunk_size, chosen.fsdp.reshard_after_forward) == (512, False)


def test_in_deterministic_mode_the_sizes_do_not_depend_on_free_memory():
    given = config(deterministic_mode=True, fsdp_reshard_after_forward="auto")
    chosen = PLANNER.choose_sizes(given, 80 * GIB)
    assert (chosen.model.logprob_chunk_size, chosen.fsdp.reshard_after_forward) == (512, True)


AUTO = config(fsdp_reshard_after_forward="auto")


def choose_on(rank: int, choices: list[Any], monkeypatch: pytest.MonkeyPatch, free: tuple[int, int]) -> Config:
    """The result of `rank` of two. `choices` are exchanged after the free memory."""
    answers = iter([list(free), choices])

    def gather(value: Any) -> list[Any]:
        values = next(answers)
        assert values[rank] == value, "this rank's own"
        return values

    monkeypatch.setattr(run_memory, "gather", gather)
    monkeypatch.setattr(run_memory.platform, "device_memory", lambda: (free[rank], 80 * GIB))
    return run_memory.choose_sizes(PLANNER, AUTO)


def test_ranks_choose_by_the_least_free_memory(monkeypatch: pytest.MonkeyPatch):
    wanted = PLANNER.choose_sizes(AUTO, 30 * GIB)
    choice = {flat: wanted.value(flat) for flat in ("logprob_chunk_size", "fsdp_reshard_after_forward")}
    for rank in range(2):
        assert choose_on(rank, [choice, choice], monkeypatch, (80 * GIB, 30 * GIB)) == wanted
    assert wanted != PLANNER.choose_sizes(AUTO, 80 * GIB)
    assert run_memory.choose_sizes(None, AUTO) is AUTO  # on a CPU
    assert (AUTO.model.chunk_size, bool(AUTO.fsdp.reshard_after_forward)) == (512, True)


@pytest.mark.parametrize("failing", [0, 1])
def test_all_ranks_use_the_choice_of_rank_0_if_a_rank_cannot_plan(failing: int, monkeypatch: pytest.MonkeyPatch):
    choice = {"logprob_chunk_size": 1024, "fsdp_reshard_after_forward": False}
    choices: list[Any] = [choice, choice]
    choices[failing] = {}
    for rank in range(2):
        monkeypatch.setattr(run_memory, "_choice", lambda *_, rank=rank: choices[rank])
        found = choose_on(rank, choices, monkeypatch, (80 * GIB, 80 * GIB))
        assert found == (AUTO.with_values(**choice) if failing else AUTO)


def test_inspect_says_what_auto_means_on_this_machine(monkeypatch: pytest.MonkeyPatch):
    given = config(fsdp_reshard_after_forward="auto")
    on_cpu = inspection._sizes(given, MODEL, 8)
    monkeypatch.setattr(inspection.platform, "has_accelerator", lambda: True)
    monkeypatch.setattr(inspection.platform, "device_memory", lambda: (80 * GIB, 80 * GIB))
    assert on_cpu.used == "logprobs of 512 tokens; layers freed after the forward pass"
    assert inspection._sizes(given, MODEL, 8).used == "logprobs of 1024 tokens; layers kept after the forward pass"


def test_replicas_need_as_much_as_fewer_gpus():
    assert peak(8, fsdp_replicate_size=4) == peak(2)


def test_the_cache_has_the_size_of_its_rows():
    generation = PLANNER.generation(config())
    assert generation is not None
    width, rows = cache_rows(config(), 8)
    assert generation.parts[f"key-value cache of {rows} rows"] == rows * width * 131072  # 2 x 32 x 8 x 128 bfloat16
    few = PLANNER.generation(config(rollout_max_batch_tokens=2 * width))
    assert few is not None
    assert "key-value cache of 2 rows" in few.parts


def test_supervised_training_without_evaluation_generates_nothing():
    assert PLANNER.generation(Config(hf_checkpoint="a model", algorithm="sft", eval_interval=0)) is None


def test_a_pack_is_full_of_the_longest_sequences():
    assert seqlens(config()) == (1024,)
    assert seqlens(config(rollout_max_prompt_len=128, rollout_max_response_len=256)) == (384, 384, 256)
    assert seqlens(config(context_parallel_size=4)) == (1024,)  # of one process


def test_a_plan_that_fits_has_no_proposals():
    plan = make_plan(MODEL, config(), Machine(8, 80 * GIB))
    assert plan.fits
    assert plan.proposals == ()
    assert plan.choices["as given"] == with_margin(plan.training)


@pytest.mark.parametrize("memory", only([20], [20, 28]))
def test_each_proposal_makes_it_fit(memory: int):
    plan = make_plan(MODEL, config(max_tokens_per_gpu=2048), Machine(8, memory * GIB))
    assert not plan.fits
    assert plan.proposals
    for proposal in plan.proposals:
        options: dict[str, Any] = {"max_tokens_per_gpu": 2048}
        for flag in proposal.flags:
            name, _, value = flag.removeprefix("--").partition(" ")
            options[name.replace("-", "_")] = (int(value) if value.isdigit() else value) or True
        planner = PLANNER.on(Machine(proposal.num_gpus, memory * GIB))
        assert planner.fits(config(**options)) == proposal.device
        assert proposal.device <= memory * GIB


def test_a_gpu_that_is_too_small_has_no_proposals():
    plan = make_plan(MODEL, config(), Machine(1, GIB))
    assert not plan.fits
    assert plan.proposals == ()


def test_host_memory_limits_an_offloaded_run():
    offloaded = config(fsdp_cpu_offload=True)
    roomy = Machine(8, 80 * GIB, 256 * GIB)
    assert make_plan(MODEL, offloaded, roomy).fits
    assert not make_plan(MODEL, offloaded, replace(roomy, host_memory=100 * GIB)).fits


def test_offloaded_state_is_on_the_host():
    count, inputs = count_parameters(MODEL).total, 32 * 1024 * 4096 * 2  # layers, tokens, width, bfloat16
    parts, total = PLANNER.host(config(offload_optimizer=True, gradient_checkpointing=True, offload_activations=True))
    assert parts == {"optimizer state": 8 * count, "activations": 8 * inputs}
    assert total > sum(parts.values())


def test_remedies_are_ordered_by_cost_and_keep_the_given_options():
    found = [changed.flags for changed in remedies.remedies(config(), packs=[], caches=[])]
    assert found[0] == ()
    assert found[1] == ("--offload-optimizer",)
    assert found[2] == ("--gradient-checkpointing", "--gradient-checkpointing-kind selective")
    assert found[-1] == ("--fsdp-cpu-offload", "--gradient-checkpointing", "--offload-activations")
    given = config(gradient_checkpointing=True, gradient_checkpointing_every=3, offload_optimizer=True)
    for changed in remedies.remedies(given, packs=[768], caches=[]):
        check(changed.config)
        assert changed.config.optim.offload_optimizer or changed.config.fsdp.cpu_offload
        assert changed.config.section(ActivationMemoryConfig).gradient_checkpointing
    offloaded = config(fsdp_cpu_offload=True, offload_activations=True)
    flags = {flag for changed in remedies.remedies(offloaded, packs=[], caches=[]) for flag in changed.flags}
    assert flags == {"--gradient-checkpointing", "--gradient-checkpointing-every 2"}
    sharded = config(context_parallel_size=2)
    for changed in [*remedies.choices(offloaded), *remedies.choices(config()), *remedies.choices(sharded)]:
        check(changed.config)


def test_a_model_that_reads_values_is_refused():
    model = configs.meta_model("qwen3-30b-a3b")
    model.set_experts_implementation("eager")
    with pytest.raises(MemoryPlanError, match="activations of Qwen3MoeForCausalLM cannot be planned"):
        Planner(model, Machine(8, GIB)).training(config())


def test_only_an_adapter_has_gradients_and_moments():
    chosen = config(lora_rank=8, lora_targets=["attention"])
    model = configs.meta_model("llama-3.1-8b")
    add_adapters(model, chosen.section(LoraConfig))
    adapter, frozen = 32 * 8 * (4 * 4096 + 2 * 4096 + 2 * 1024 + 4096), count_parameters(MODEL).total
    adapter -= 32 * 8 * 4096  # q: 4096 in, 4096 out; k, v: 4096 in, 1024 out; o: 4096 in, 4096 out
    planner = Planner(model, Machine(8, 80 * GIB))
    assert planner.counts.total - planner.counts.frozen == adapter
    assert state(planner.training(chosen)) == (16 * adapter + 2 * frozen) // 8
    assert planner.training(chosen).total < peak()
    generation, full = planner.generation(chosen), PLANNER.generation(config())
    assert generation is not None
    assert full is not None
    assert generation.parts["the engine's weights"] == full.parts["the engine's weights"]
    host = sum(planner.host(config(lora_rank=8, fsdp_cpu_offload=True))[0].values())
    assert host == 16 * adapter + 2 * frozen


def test_a_memory_budget_is_a_remedy_of_compiled_layers_and_gives_way_to_checkpointing():
    found = [changed.flags for changed in remedies.choices(config(compile=True))]
    assert ("--activation-memory-budget 0.5",) in found
    given = remedies.remedies(config(compile=True, activation_memory_budget=0.5), packs=[], caches=[])
    flags = [changed.flags for changed in given]
    assert ("--gradient-checkpointing", "--activation-memory-budget 1.0") in flags
    assert not any("budget" in flag for changed in remedies.choices(config()) for flag in changed.flags)
