"""Router replay: recorded routes change no bit, other routes are used with the weights of the family."""

import dataclasses
from itertools import product

import pytest
import torch

from fsdptrain.config.rules import NoEffectError
from fsdptrain.errors import ConfigError
from fsdptrain.features.activation_memory.feature import enable_gradient_checkpointing
from fsdptrain.features.moe.checks import check_replay, replay_refusal
from fsdptrain.model.policy import policy_logprobs
from fsdptrain.model.probes.random_copy import random_copy
from fsdptrain.model.sizes import expert_choice
from fsdptrain.types import NO_ROUTE
from tests import families, zoo
from tests.exact import Exact, in_float64
from tests.seam import gradients as gradients_of
from tests.seam import install_replay, random_pack, routed_logprobs

LENGTHS = [7, 1, 12, 3]


def replaying(name: str, *, recomputed: bool = False, **changes):
    """A small model whose forward scores packs, with its replay."""
    model = zoo.build(name, **changes)
    if recomputed:
        enable_gradient_checkpointing(model)
    return model, install_replay(model)


def run(replaying, batch, layout: str, *, with_routes: bool = False):
    """Logprobs, all gradients, routes."""
    model, _ = replaying
    found = routed_logprobs(model, batch, layout=layout, with_routes=with_routes)
    loss = (found.values * (batch.position_ids + 1).sin()).sum()
    return found.values.detach(), gradients_of(model, loss), found.extras.get("routes")


def foreign(routes: torch.Tensor, num_experts: int) -> torch.Tensor:
    """For each token and layer with experts, others than it chose, in some order."""
    generator = torch.Generator().manual_seed(9)
    orders = torch.rand(*routes.shape[:2], num_experts, generator=generator).argsort(-1)[..., : routes.shape[2]]
    return torch.where(routes == NO_ROUTE, NO_ROUTE, orders).to(torch.int16)


UNPACKABLE = {("qwen3_next", "packed")}  # its convolution knows no packs


@pytest.mark.parametrize(("name", "layout"), sorted({*product(zoo.MOE, ["packed", "padded"])} - UNPACKABLE))
def test_recorded_routes_change_no_bit_and_other_routes_are_used(name, layout):
    model, batch = replaying(name), random_pack(LENGTHS)
    plain, gradients, _ = run(model, batch, layout)
    recorded, _, routes = run(model, batch, layout, with_routes=True)
    num_experts, top_k = expert_choice(model[0].config)
    dense = 1 if name == "deepseek_v3" else 0  # first_k_dense_replace
    assert routes.shape == (sum(LENGTHS), model[0].config.num_hidden_layers, top_k)
    assert (routes[:, :dense] == NO_ROUTE).all()
    assert 0 <= routes[:, dense:].min() <= routes.max() < num_experts
    assert torch.equal(recorded, plain)

    again, same, _ = run(model, dataclasses.replace(batch, routes=routes), layout)
    assert torch.equal(again, plain)
    assert all(torch.equal(same[key], gradients[key]) for key in gradients)

    others = foreign(routes, num_experts)
    values, moved, taken = run(model, dataclasses.replace(batch, routes=others), layout, with_routes=True)
    assert torch.equal(taken, others)
    assert (values - plain).abs().max() > 1e-3
    routers = [key for key in gradients if key.endswith(("gate.weight", "router.weight"))]
    assert routers
    assert all(moved[key].abs().max() > 0 for key in routers)
    in_float64(model[0])
    with Exact():
        orders = [dataclasses.replace(batch, routes=routes) for routes in (others, others.flip(-1))]
        values, flipped = (run(model, order, layout)[0] for order in orders)
    torch.testing.assert_close(flipped, values, rtol=0, atol=1e-11)


def test_a_token_without_a_route_uses_the_router():
    model, batch = replaying("qwen3_moe"), random_pack(LENGTHS)
    plain, _, routes = run(model, batch, "packed", with_routes=True)
    others = foreign(routes, 6)
    others[:20] = NO_ROUTE  # the first three segments
    values, _, taken = run(model, dataclasses.replace(batch, routes=others), "packed", with_routes=True)
    assert torch.equal(taken[:20], routes[:20])
    assert torch.equal(taken[20:], others[20:])
    assert torch.equal(values[:20], plain[:20])
    assert not torch.equal(values[20:], plain[20:])


@pytest.mark.parametrize("layout", ["packed", "padded"])
def test_gradient_checkpointing_recomputes_the_same_experts(layout):
    """Also when other packs are scored between a forward pass and its backward pass."""
    plain, checkpointed = replaying("qwen3_moe"), replaying("qwen3_moe", recomputed=True)
    batch = random_pack(LENGTHS)
    _, _, routes = run(plain, batch, layout, with_routes=True)
    given = dataclasses.replace(batch, routes=foreign(routes, 6))
    wanted, gradients, _ = run(plain, given, layout)
    checkpointed, _ = checkpointed
    found = policy_logprobs(checkpointed, given, layout=layout).values
    with torch.no_grad():
        routed_logprobs(checkpointed, random_pack(LENGTHS, seed=1), layout=layout, with_routes=True)
    (found * (batch.position_ids + 1).sin()).sum().backward()
    assert torch.equal(found, wanted)
    for name, parameter in checkpointed.named_parameters():
        assert torch.equal(parameter.grad, gradients[name]), name


@pytest.mark.parametrize("name", zoo.MOE)
def test_the_check_accepts_exact_models(name):
    assert replay_refusal(random_copy(zoo.config(name))) == ""


def test_models_that_cannot_be_replayed_are_refused_with_the_reason():
    with pytest.raises(ConfigError, match="scoring does not work with phimoe: it chooses experts in another way"):
        check_replay(families.config("phimoe"), "scoring")
    groups = {"n_routed_experts": 8, "n_group": 4, "topk_group": 1, "topk_method": "group_limited_greedy"}
    limited = families.config("deepseek_v2", **groups)
    with pytest.raises(ConfigError, match="an expert that it would not choose gets no weight"):
        check_replay(limited, "rollout")
    with pytest.raises(NoEffectError, match="--router-replay has no effect on qwen3, which has no experts") as caught:
        check_replay(zoo.config("qwen3"), "rollout")
    assert caught.value.key == "router_replay"
    broken = zoo.build("qwen3_moe", num_experts=4, num_experts_per_tok=4)
    assert replay_refusal(broken) == "it always takes all experts"


def test_the_check_restores_the_random_state():
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    check_replay(zoo.config("qwen3_moe"), "rollout")
    assert torch.equal(torch.rand(4), expected)
