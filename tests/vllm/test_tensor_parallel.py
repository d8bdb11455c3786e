"""An engine over two ranks answers like an engine on one rank, and its weights are verified."""

from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fsdptrain.errors import RolloutError
from fsdptrain.types import Completion
from tests.matrix import only
from tests.testing import spawn
from tests.vllm import contract, models
from tests.vllm.faults import FaultyTransfer, sync

NORM = "model.norm.weight"  # not split: each rank holds a copy
VICTIMS = {
    "untied": ["model.layers.1.self_attn.k_proj.weight", "model.layers.0.mlp.down_proj.weight", "lm_head.weight"],
    "moe": ["model.layers.1.mlp.experts.3.up_proj.weight", "model.layers.0.mlp.experts.5.down_proj.weight"],
}
TWO_RANKS = {"tensor_parallel_size": 2}
Fault = tuple[int | None, str, str]  # rank (None: all), kind, tensor


def errors_of(options: dict[str, Any], faults: list[Fault]) -> tuple[list[str], timedelta]:
    """What the verification reports for each fault; and how long the ranks of the engine wait for each other."""
    backend, engine, verifier = contract.build_verified(options)
    transfer, errors = FaultyTransfer(), []
    for version in range(2):
        sync(backend, engine, verifier, version, transfer)
    for version, (rank, fault, victim) in enumerate(faults, 2):
        here = rank is None or rank == dist.get_rank()
        with pytest.raises(RolloutError) as caught:
            sync(backend, engine, verifier, version, transfer, fault, victim if here else "")
        errors.append(str(caught.value))
    sync(backend, engine, verifier, 99, transfer)
    waits = engine._ranks._get_backend(torch.device("cpu")).options._timeout
    engine.close()
    return errors, waits


def answers(options: dict[str, Any]) -> list[Completion]:
    """Of each rank, to prompts of which one is also the other's, and to prompts of one rank alone."""
    backend, engine, verifier = contract.build_verified(options)
    transfer, made = FaultyTransfer(), []
    mine = contract.PROMPTS[dist.get_rank() :][:2]
    for version, prompts in enumerate([mine, mine if dist.get_rank() else []]):
        sync(backend, engine, verifier, version, transfer)
        made += engine.generate(prompts, contract.SAMPLING)
    engine.close()
    return made


@pytest.mark.matrix
@pytest.mark.parametrize("name", VICTIMS)
def test_it_answers_like_engines_of_one_rank(tmp_path, name):
    options = contract.colocated(models.save(name, tmp_path))
    together = spawn(2, answers, {**options, "rollout_engine_args": TWO_RANKS}, timeout=300)
    for made, expected in zip(together, spawn(2, answers, options, timeout=300), strict=True):
        assert [(c.prompt_id, c.token_ids) for c in made] == [(c.prompt_id, c.token_ids) for c in expected]
        for one, other in zip(made, expected, strict=True):
            assert one.logprobs == pytest.approx(other.logprobs, abs=1e-5)


@pytest.mark.parametrize("name", only(["moe"], VICTIMS))
def test_faults_in_its_parts_are_named(tmp_path, name):
    options = contract.colocated(models.save(name, tmp_path), rollout_engine_args=TWO_RANKS, dist_timeout=700)
    faults: list[Fault] = [*((None, "permuted", victim) for victim in VICTIMS[name]), (1, "stale", NORM)]
    for errors, waits in spawn(2, errors_of, options, faults, timeout=300):
        for (_, _, victim), error in zip(faults, errors, strict=True):
            assert f"does not hold {victim} of version" in error
        assert waits == timedelta(seconds=700)
