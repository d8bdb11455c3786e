"""The load-balancing loss and router replay do not depend on ranks and packs."""

import dataclasses
from collections.abc import Sequence
from contextlib import nullcontext

import pytest
import torch
from transformers import AutoModelForCausalLM

from fsdptrain.algo.losses import LOSSES
from fsdptrain.config.rules import NoEffectError
from fsdptrain.fsdp.backend import FSDPBackend
from fsdptrain.types import NO_ROUTE, LossConfig, Sample
from tests import zoo
from tests.exact import Exact, backends_in_float64
from tests.tensors import relative
from tests.testing import save_tiny_checkpoint, spawn

from .test_fsdp_backend import config, keep_gradients, packs_of_this_rank, samples

EXPERTS, TOP_K, LAYERS = 6, 2, 2
COEF = 0.3
OF_ROUNDING = 5.0  # times the error of float32 on one rank: what another order of summation may make of it
VARIANTS = {"own": {}, "replayed": {"router_replay": "rollout"}}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> str:
    return saved(tmp_path_factory, num_experts=EXPERTS)


def saved(tmp_path_factory, **changes) -> str:
    folder = tmp_path_factory.mktemp("qwen3_moe")
    zoo.build("qwen3_moe", **changes).save_pretrained(folder)
    return str(folder)


def with_routes(items: Sequence[Sample]) -> list[Sample]:
    """Experts that the model would not choose, and for some tokens none."""
    made = []
    for number, sample in enumerate(items):
        generator = torch.Generator().manual_seed(number)
        orders = torch.rand(len(sample.token_ids), LAYERS, EXPERTS, generator=generator).argsort(-1)
        routes = orders[..., :TOP_K].to(torch.int16)
        routes[-1] = NO_ROUTE
        made.append(dataclasses.replace(sample, routes=routes))
    return made


def step(checkpoint: str, max_tokens: int, values: dict, count: int = 10, mode: type = nullcontext) -> dict:
    """Gradients and metrics of one optimizer step under `mode`, with the model's own routes and with others."""
    found = {}
    for variant, options in VARIANTS.items():
        backend = FSDPBackend(config(checkpoint, router_aux_loss_coef=COEF, **options, **values), total_steps=10)
        gradients = keep_gradients(backend._optimizer)
        items = samples(count) if variant == "own" else with_routes(samples(count))
        packs = packs_of_this_rank(items, max_tokens, values.get("context_parallel_size", 1))
        with mode():
            metrics = backend.train_step(packs, LOSSES["grpo"], LossConfig())
        found[variant] = (dict(gradients), metrics)
    return found


def step_in_float64(checkpoint: str, count: int) -> dict:
    backends_in_float64()
    return step(checkpoint, 4096, {}, count, Exact)


def step_alone(checkpoint: str, count: int = 10) -> tuple[dict, dict[str, float]]:
    """On one rank, in one pack: the step in float64, and for each variant how far float32 may be from it."""
    [exact] = spawn(1, step_in_float64, checkpoint, count)
    [rounded] = spawn(1, step, checkpoint, 4096, {}, count)
    return exact, {name: OF_ROUNDING * relative(rounded[name][0], exact[name][0]) for name in VARIANTS}


@pytest.fixture(scope="module")
def alone(checkpoint):
    return step_alone(checkpoint)


CUTS = {
    "1 rank, small packs": (1, 64, {}),
    "2 ranks, small packs, gradient checkpointing": (2, 64, {"gradient_checkpointing": True}),
    "2 ranks, experts split": (2, 64, {"expert_parallel_size": 2}),
    "2 ranks, tokens dealt": (2, 64, {"context_parallel_size": 2, "expert_parallel_size": 2}),
    "2 ranks, padded, cpu offload": (2, 128, {"layout": "padded", "fsdp_cpu_offload": True}),
}


@pytest.mark.parametrize("cut", CUTS)
def test_the_gradient_with_router_loss_and_replay_does_not_depend_on_how_the_work_is_cut(checkpoint, alone, cut):
    world, max_tokens, values = CUTS[cut]
    exact, bounds = alone
    for result in spawn(world, step, checkpoint, max_tokens, values):
        for variant, (gradients, metrics) in result.items():
            wanted, expected = exact[variant]
            assert relative(gradients, wanted) < bounds[variant], variant
            assert {n: metrics[n] for n in expected} == pytest.approx(expected, rel=1e-4, abs=1e-6)
            assert metrics["moe/aux_loss"] == pytest.approx(expected["moe/aux_loss"], rel=1e-5)
            assert metrics["moe/load_max"] == pytest.approx(expected["moe/load_max"], rel=1e-6)


def test_replay_and_router_loss_do_something(checkpoint, alone):
    own, replayed = alone[0]["own"], alone[0]["replayed"]
    assert relative(replayed[0], own[0]) > 0.1
    assert own[1]["loss/total"] == pytest.approx(
        own[1]["loss/policy"] + own[1]["loss/entropy"] + own[1]["loss/router"], rel=1e-5
    )
    assert own[1]["loss/router"] == pytest.approx(COEF * own[1]["moe/aux_loss"], rel=1e-5)
    assert own[1]["moe/load_max"] > 1 > own[1]["moe/dead_experts"]


def test_a_rank_without_work_counts_nothing(checkpoint):
    one, bounds = step_alone(checkpoint, count=1)
    for result in spawn(2, step, checkpoint, 4096, {}, 1):
        for variant, (gradients, metrics) in result.items():
            assert relative(gradients, one[variant][0]) < bounds[variant]
            assert metrics["moe/aux_loss"] == pytest.approx(one[variant][1]["moe/aux_loss"], rel=1e-5)


def router_loss_alone(checkpoint: str, tokens: list[int]) -> tuple[float, dict]:
    """moe/aux_loss of one sequence, and the gradient of a loss that is nothing else."""
    backend = FSDPBackend(config(checkpoint, router_aux_loss_coef="config"), total_steps=10)
    gradients = keep_gradients(backend._optimizer)
    sample = Sample("g", tokens, [False] + [True] * (len(tokens) - 1), [0.0] * len(tokens), advantage=0.0)
    metrics = backend.train_step(packs_of_this_rank([sample], 4096), LOSSES["reinforce"], LossConfig())
    return metrics["moe/aux_loss"], dict(gradients)


def test_on_one_sequence_and_one_layer_it_is_the_loss_of_transformers_with_the_configs_coefficient(tmp_path_factory):
    folder = saved(tmp_path_factory, num_hidden_layers=1, router_aux_loss_coef=0.02)
    tokens = torch.randint(5, zoo.VOCAB_SIZE, (40,), generator=torch.Generator().manual_seed(0))
    model = AutoModelForCausalLM.from_pretrained(folder)
    stock = model(input_ids=tokens[None], output_router_logits=True).aux_loss
    (0.02 * stock).backward()
    [(found, gradients)] = spawn(1, router_loss_alone, folder, tokens.tolist())
    assert found == pytest.approx(stock.item(), rel=1e-6)
    for name, parameter in model.named_parameters():
        wanted = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        torch.testing.assert_close(gradients.get(name, torch.zeros_like(parameter)), wanted, rtol=1e-4, atol=1e-8)


def scoring(checkpoint: str) -> tuple[float, bool, bool]:
    """A step with the routes of scoring against one without; whether later ones keep them, the reference its own."""
    options = {"router_replay": "scoring", "global_batch_size": 64, "kl_loss_coef": 0.1}
    backend = FSDPBackend(config(checkpoint, **options), total_steps=10)
    gradients = keep_gradients(backend._optimizer)
    packs = packs_of_this_rank(samples(), 64)
    scores = backend.compute_logprobs(packs, "policy")
    routes = [score.extras["routes"] for score in scores]
    others = [dataclasses.replace(p, routes=r.roll(1, 0)) for p, r in zip(packs, routes, strict=True)]
    references = backend.compute_logprobs(others, "reference")
    own_reference = all(torch.equal(r.values, s.values) for r, s in zip(references, scores, strict=True))
    recorded = [dataclasses.replace(pack, routes=r) for pack, r in zip(packs, routes, strict=True)]
    backend.train_step(packs, LOSSES["grpo"], LossConfig())
    plain = dict(gradients)
    fresh = FSDPBackend(config(checkpoint, **options), total_steps=10)
    gradients = keep_gradients(fresh._optimizer)
    fresh.train_step(recorded, LOSSES["grpo"], LossConfig())
    difference = relative(dict(gradients), plain)
    taken = fresh.compute_logprobs(recorded, "policy")
    kept = all(torch.equal(t.extras["routes"], r.routes) for t, r in zip(taken, recorded, strict=True))
    return difference, kept, own_reference


def test_routes_of_scoring_change_nothing_at_once_and_hold_while_the_weights_move(checkpoint):
    for difference, kept, own_reference in spawn(2, scoring, checkpoint):
        assert difference == 0.0
        assert kept
        assert own_reference


def refusals(checkpoint: str) -> list[str]:
    messages = []
    for options in ({"router_replay": "rollout"}, {"router_aux_loss_coef": "config"}):
        with pytest.raises(NoEffectError) as caught:
            FSDPBackend(config(checkpoint, **options), total_steps=10)
        messages.append(str(caught.value))
    return messages


def test_a_dense_model_is_refused_on_all_ranks(tmp_path):
    for messages in spawn(2, refusals, str(save_tiny_checkpoint(tmp_path))):
        for message in messages:
            assert "has no effect on qwen3, which has no experts: remove it" in message
