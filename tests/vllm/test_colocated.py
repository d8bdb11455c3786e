"""The in-process engine answers with exactly the weights of the last update, and every fault of a sync is named."""

import random
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from fsdptrain import Trainer
from fsdptrain.config import Config
from fsdptrain.config.recipe import load_recipe
from fsdptrain.config.shipped import find_recipe
from fsdptrain.errors import ConfigError, RolloutError
from fsdptrain.random_state import preserve_rng_state
from fsdptrain.rollout import engine_factory
from tests.agreement import difference
from tests.e2e.command import metrics_of
from tests.matrix import REAL_MODEL, only
from tests.testing import save_tiny_checkpoint, spawn, tiny_run, write_rows
from tests.vllm import contract, models
from tests.vllm.faults import FaultyTransfer, plant_faults, require_named


@pytest.mark.matrix
@pytest.mark.parametrize(("name", "world_size"), list(product(models.NAMES, (1, 2))))
def test_engine_and_trainer_agree_after_every_update(tmp_path, name, world_size):
    options = contract.colocated(models.save(name, tmp_path))
    for found in spawn(world_size, contract.agreement, options, 3, timeout=300):
        assert max(found) < 1e-4, found


def test_responses_end_at_stop_strings(tmp_path):
    spawn(1, contract.require_stops, tmp_path, contract.colocated(tmp_path), timeout=300)


def letters(prompt: Any, response: str) -> float:
    return sum(map(ord, response)) % 7


def train(run: Config) -> None:
    Trainer(run).fit()


def trained(run: Config, ranks: int) -> list[float]:
    """Train; return the largest difference of a logprob between engine and trainer in each step."""
    spawn(ranks, train, run, timeout=300)
    return [row["mismatch/abs_max"] for row in metrics_of(Path(run.run.output_dir))]


def problems(folder: Path) -> dict[str, Any]:
    """Options of data and reward."""
    rows = [{"prompt": f"What is {i} + {7 - i}? Reply with only the number.", "label": "7"} for i in range(8)]
    data = write_rows(folder / "problems.jsonl", rows)
    return {"prompt_data": str(data), "label_key": "label", "reward": [f"{__name__}:letters"]}


@pytest.mark.matrix
@pytest.mark.usefixtures("real_model")
def test_engine_and_trainer_agree_in_each_step_of_a_real_model(tmp_path):
    options = {"rollout_engine": "vllm", "rollout_kv_cache_gib": 0.5, "rollout_max_response_len": 12}
    options |= {"num_rollout": 5, "n_samples_per_prompt": 8, "lr": 1e-5, "keep_last": 0, "eval_interval": 0}
    options |= problems(tmp_path)
    found = trained(tiny_run(REAL_MODEL, tmp_path / "run", **options), ranks=1)
    assert len(found) == 5
    assert max(found) < 1e-3, found


@pytest.mark.parametrize("engine_ranks", only([2], [1, 2]))
def test_the_recipe_with_split_experts_agrees_with_its_engine_in_each_step(tmp_path, engine_ranks):
    """On two ranks, each of which holds half of the experts; with a learning rate that moves the logprobs."""
    model = {"hf_checkpoint": str(models.save("moe", tmp_path / "model")), "expert_parallel_size": 2, "bf16": False}
    engine = {"rollout_engine_args": {"tensor_parallel_size": engine_ranks}, "rollout_kv_cache_gib": 0.05}
    sizes = {"rollout_batch_size": 4, "n_samples_per_prompt": 4, "global_batch_size": 8, "max_tokens_per_gpu": 128}
    lengths = {"rollout_max_prompt_len": 64, "rollout_max_response_len": 8, "overlong_buffer": 4}
    ends = {"num_rollout": 3, "lr": 1e-2, "lr_warmup_iters": 0, "eval_prompt_data": [], "export": False}
    options = model | engine | sizes | lengths | ends | problems(tmp_path)
    run = load_recipe(
        find_recipe("dapo_math_qwen3_30b_a3b"), **options, reward_workers=0, output_dir=str(tmp_path / "run")
    )
    found = trained(run, ranks=2)
    assert len(found) == 3
    assert max(found) < 1e-4, found


def drawn() -> tuple[float, ...]:
    return random.random(), float(np.random.rand()), float(torch.rand(()))


def failure_of_one_rank(options: dict[str, Any]) -> tuple[str, list[float]]:
    """What this rank says when rank 1 is given a tensor that does not fit, in the middle of a fused layer.

    And the differences of logprobs after good updates before it.
    """
    with preserve_rng_state():
        before = drawn()
    backend, engine = contract.build(options)
    with preserve_rng_state():
        assert before == drawn(), "vLLM has seeded the generators of the trainer"

    found = contract.agreements(backend, engine, 3)

    def weights(wrong: bool) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in backend.hf_weights("hub"):
            yield name, tensor[:, 1:] if wrong and name.endswith("k_proj.weight") else tensor

    engine.wake_up()
    with pytest.raises(RolloutError) as caught:
        engine.update_weights(weights(wrong=dist.get_rank() == 1), 3)
    with pytest.raises(RolloutError, match="vLLM has no weights"):
        engine.generate(contract.PROMPTS, contract.SAMPLING)
    engine.update_weights(weights(wrong=False), 4)
    completions = engine.generate(contract.PROMPTS, contract.SAMPLING)
    found.append(difference(backend, contract.PROMPTS, completions))
    return str(caught.value), found


def test_where_weights_cannot_be_loaded_on_one_rank_all_ranks_say_so(tmp_path):
    """And none waits for it in a gathering. The next sync repairs the engine, which agrees after every good one."""
    (first, found), (second, others) = spawn(
        2, failure_of_one_rank, contract.colocated(models.save("moe", tmp_path)), timeout=300
    )
    assert max(*found, *others) < 1e-4
    assert first == second
    assert first.startswith("--rollout-engine vllm: ")
    assert first.endswith("(rank 1 of 2)")


def refusal(folder: Path) -> str:
    config = Config(hf_checkpoint=str(folder), rollout_engine="vllm", rollout_engine_args={"max_num_seq": 8})
    with pytest.raises(ConfigError) as caught:
        engine_factory("vllm")(config, checkpoint=folder, device=torch.device("cpu"))
    return str(caught.value)


def test_an_option_that_vllm_does_not_have_is_refused_by_name(tmp_path):
    [said] = spawn(1, refusal, save_tiny_checkpoint(tmp_path, head_dim=32), timeout=200)
    assert said == "--rollout-engine-args max_num_seq: vLLM has no such option; did you mean 'max_num_seqs'?"


# name -> (bf16, tries): a hundred of dense models, and a hundred of mixtures; in `make test` each fault twice
FAULTS = [("tied", False, 10)]
FAULTS += [(name, bf16, tries) for name, tries in (("tied", 25), ("untied", 25), ("moe", 50)) for bf16 in (False, True)]


@pytest.mark.parametrize(("name", "bf16", "tries"), only(FAULTS[:1], FAULTS))
def test_each_fault_is_named(tmp_path, name, bf16, tries):
    options = contract.colocated(models.save(name, tmp_path / "model"), bf16=bf16)
    [outcomes] = spawn(1, plant_faults, options, tries, FaultyTransfer(), timeout=500)
    assert len(outcomes) == tries
    require_named(outcomes)
