"""The in-process engine answers with exactly the weights of the last update, on one rank and on two."""

import random
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from fsdptrain.config import Config
from fsdptrain.errors import ConfigError, RolloutError
from fsdptrain.random_state import preserve_rng_state
from fsdptrain.rollout import engine_factory
from tests.agreement import difference
from tests.matrix import only
from tests.testing import save_tiny_checkpoint, spawn
from tests.vllm import contract, models


@pytest.mark.parametrize(("name", "world_size"), only([("moe", 2)], product(models.NAMES, (1, 2))))
def test_engine_and_trainer_agree_after_every_update(tmp_path, name, world_size):
    options = contract.colocated(models.save(name, tmp_path))
    for found in spawn(world_size, contract.agreement, options, 3, timeout=300):
        assert max(found) < 1e-4, found


def drawn() -> tuple[float, ...]:
    return random.random(), float(np.random.rand()), float(torch.rand(()))


def failure_of_one_rank(options: dict[str, Any]) -> str:
    """What this rank says when rank 1 is given a tensor that does not fit, in the middle of a fused layer."""
    with preserve_rng_state():
        before = drawn()
    backend, engine = contract.build(options)
    with preserve_rng_state():
        assert before == drawn(), "vLLM has seeded the generators of the trainer"

    def weights(wrong: bool) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in backend.hf_weights("hub"):
            yield name, tensor[:, 1:] if wrong and name.endswith("k_proj.weight") else tensor

    engine.update_weights(weights(wrong=False), 0)
    with pytest.raises(RolloutError) as caught:
        engine.update_weights(weights(wrong=dist.get_rank() == 1), 1)
    with pytest.raises(RolloutError, match="vLLM has no weights"):
        engine.generate(contract.PROMPTS, contract.SAMPLING)
    engine.update_weights(weights(wrong=False), 2)
    completions = engine.generate(contract.PROMPTS, contract.SAMPLING)
    assert difference(backend, contract.PROMPTS, completions) < 1e-4
    return str(caught.value)


def test_where_weights_cannot_be_loaded_on_one_rank_all_ranks_say_so(tmp_path):
    """And none waits for it in a gathering. The next sync repairs the engine."""
    said = spawn(2, failure_of_one_rank, contract.colocated(models.save("untied", tmp_path)), timeout=300)
    assert said[0] == said[1]
    assert said[0].startswith("--rollout-engine vllm: ")
    assert said[0].endswith("(rank 1 of 2)")


def refusal(folder: Path) -> str:
    config = Config(hf_checkpoint=str(folder), rollout_engine="vllm", rollout_engine_args={"max_num_seq": 8})
    with pytest.raises(ConfigError) as caught:
        engine_factory("vllm")(config, checkpoint=folder, device=torch.device("cpu"))
    return str(caught.value)


def test_an_option_that_vllm_does_not_have_is_refused_by_name(tmp_path):
    [said] = spawn(1, refusal, save_tiny_checkpoint(tmp_path, head_dim=32), timeout=200)
    assert said == "--rollout-engine-args max_num_seq: vLLM has no such option; did you mean 'max_num_seqs'?"
