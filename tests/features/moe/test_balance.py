"""The load-balancing loss is that of transformers per layer, and does not depend on packs."""

from dataclasses import replace

import pytest
import torch
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from fsdptrain.algo.weights import Totals
from fsdptrain.data.packing.pack import empty_pack, pack
from fsdptrain.features.moe.balance import ExpertLoad, add_router_loss, balance_loss, count_choices, trained_tokens
from fsdptrain.types import NO_ROUTE, LossOutput, Sample
from tests.exact import Exact

LAYERS, EXPERTS, TOP_K = 3, 6, 2
TOTALS = Totals(num_tokens=10, num_sequences=3)


def make_logits(num_tokens: int, seed: int = 0) -> torch.Tensor:
    """[tokens, layers, experts] of unbalanced routers."""
    generator = torch.Generator().manual_seed(seed)
    bias = torch.linspace(0, 2, EXPERTS, dtype=torch.float64)
    return torch.randn(num_tokens, LAYERS, EXPERTS, generator=generator, dtype=torch.float64) + bias


def load_of(logits: torch.Tensor, counted: torch.Tensor) -> ExpertLoad:
    counts = count_choices(logits.topk(TOP_K).indices, counted, EXPERTS)
    load = ExpertLoad.of(counts, num_tokens=int(counted.sum()), top_k=TOP_K)
    assert load is not None
    return load


def test_loss_and_gradient_are_those_of_transformers_per_layer():
    logits = make_logits(40).requires_grad_()
    everyone = torch.ones(40, dtype=torch.bool)
    with Exact():
        ours = balance_loss(logits.unbind(1), everyone, load_of(logits, everyone))
        theirs = torch.stack([load_balancing_loss_func((x,), EXPERTS, TOP_K) for x in logits.unbind(1)]).mean()
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=0)
    [found], [wanted] = torch.autograd.grad(ours, [logits]), torch.autograd.grad(theirs, [logits])
    torch.testing.assert_close(found, wanted, rtol=1e-11, atol=1e-14)


def test_layers_are_balanced_one_by_one():
    """Two layers, each with all its tokens on one expert: transformers' mean over layers first calls that balanced."""
    logits = torch.full((8, 2, 2), -10.0)
    logits[:, 0, 0] = logits[:, 1, 1] = 10.0
    everyone = torch.ones(8, dtype=torch.bool)
    load = ExpertLoad.of(count_choices(logits.topk(1).indices, everyone, 2), num_tokens=8, top_k=1)
    assert load_balancing_loss_func(tuple(logits.unbind(1)), 2, 1).item() == pytest.approx(1.0)
    assert balance_loss(logits.unbind(1), everyone, load).item() == pytest.approx(2.0)
    assert load.metrics() == {"moe/load_max": 2.0, "moe/dead_experts": 0.5}


@pytest.mark.parametrize("cuts", [[40], [13, 27], [1] * 40])
def test_losses_of_packs_add_up(cuts):
    whole = make_logits(40).requires_grad_()
    counted = torch.arange(40) % 5 != 0
    load = load_of(whole, counted)
    packs = list(zip(whole.split(cuts), counted.split(cuts), strict=True))
    parts = [balance_loss(logits.unbind(1), mask, load) for logits, mask in packs]
    counts = sum(count_choices(logits.topk(TOP_K).indices, mask, EXPERTS) for logits, mask in packs)
    assert torch.equal(ExpertLoad.of(counts, num_tokens=32, top_k=TOP_K).choices, load.choices)
    one = balance_loss(whole[counted].unbind(1), counted[counted], load)
    torch.testing.assert_close(torch.stack(parts).sum(), one)
    [gradient] = torch.autograd.grad(torch.stack(parts).sum(), [whole])
    assert (gradient[~counted] == 0).all()


def test_the_loss_of_a_balanced_router_is_k_and_the_minimum():
    balanced = torch.zeros(EXPERTS, LAYERS, EXPERTS)
    everyone = torch.ones(EXPERTS, dtype=torch.bool)
    tokens = torch.arange(EXPERTS)
    routes = torch.stack([tokens, (tokens + 1) % EXPERTS], dim=1)[:, None].expand(-1, LAYERS, -1)
    load = ExpertLoad.of(count_choices(routes, everyone, EXPERTS), num_tokens=EXPERTS, top_k=TOP_K)
    assert balance_loss(balanced.unbind(1), everyone, load).item() == pytest.approx(TOP_K)
    assert load.metrics() == {"moe/load_max": pytest.approx(1.0), "moe/dead_experts": 0.0}
    skewed = make_logits(200)
    every = torch.ones(200, dtype=torch.bool)
    assert balance_loss(skewed.unbind(1), every, load_of(skewed, every)) > TOP_K


def test_layers_without_experts_and_tokens_without_routes_do_not_count():
    routes = torch.tensor([[[NO_ROUTE, NO_ROUTE], [0, 1]], [[NO_ROUTE] * 2] * 2, [[NO_ROUTE] * 2, [0, 2]]])
    counts = count_choices(routes.to(torch.int16), torch.tensor([True, True, True]), 3)
    assert counts.tolist() == [[0, 0, 0], [2, 1, 1]]
    load = ExpertLoad.of(counts, num_tokens=3, top_k=2)
    assert load.choices.tolist() == [[1.0, 0.5, 0.5]]
    assert ExpertLoad.of(counts * 0, num_tokens=0, top_k=2) is None


def test_tokens_of_sequences_without_loss_and_of_fillers_do_not_count():
    def sample(length, mask):
        return Sample("g", list(range(1, length + 1)), mask, [0.0] * length)

    samples = [
        sample(3, [False, True, True]),
        sample(2, [False, False]),
        sample(2, [True, True]),
        sample(2, [True, False]),
    ]
    batch = pack(samples, aggregation="token_mean", totals=TOTALS, max_response_len=4)
    assert trained_tokens(batch).tolist() == [True] * 3 + [False] * 2 + [True] * 2 + [False] * 2
    assert not trained_tokens(empty_pack(TOTALS)).any()


def test_the_router_loss_has_metrics_and_is_part_of_loss_total():
    output = LossOutput(torch.tensor(1.0), {"loss/total": torch.tensor(1.0)})
    added = add_router_loss(output, torch.tensor(2.0), 0.1)
    assert added.loss.item() == pytest.approx(1.2)
    assert {name: value.item() for name, value in added.metrics.items()} == pytest.approx(
        {"loss/total": 1.2, "loss/router": 0.2, "moe/aux_loss": 2.0}
    )
    assert "loss/total" not in add_router_loss(replace(output, metrics={}), torch.tensor(2.0), 0.1).metrics
