"""The load of experts counts the tokens of sequences with a loss."""

import pytest
import torch

from fsdptrain.algo.weights import Totals
from fsdptrain.data.packing.pack import empty_pack, pack
from fsdptrain.features.moe.feature import count_choices, load_metrics, trained_tokens
from fsdptrain.types import NO_ROUTE, Sample

TOTALS = Totals(num_tokens=10, num_sequences=3)


def test_the_load_of_balanced_and_of_skewed_routers():
    tokens = torch.arange(6)
    everyone = torch.ones(6, dtype=torch.bool)
    balanced = torch.stack([tokens, (tokens + 1) % 6], dim=1)[:, None].expand(-1, 3, -1)
    metrics = load_metrics(count_choices(balanced, everyone, 6))
    assert metrics == {"moe/load_max": pytest.approx(1.0), "moe/dead_experts": 0.0}
    one_each = torch.tensor([0, 1])[None, :, None].expand(6, -1, -1)  # each layer has another expert, for all tokens
    assert load_metrics(count_choices(one_each, everyone, 2)) == {"moe/load_max": 2.0, "moe/dead_experts": 0.5}


def test_layers_without_experts_and_tokens_without_routes_do_not_count():
    routes = torch.tensor([[[NO_ROUTE, NO_ROUTE], [0, 1]], [[NO_ROUTE] * 2] * 2, [[NO_ROUTE] * 2, [0, 2]]])
    counts = count_choices(routes.to(torch.int16), torch.tensor([True, True, True]), 3)
    assert counts.tolist() == [[0, 0, 0], [2, 1, 1]]
    assert load_metrics(counts) == {"moe/load_max": 1.5, "moe/dead_experts": 0.0}
    assert load_metrics(counts * 0) == {}


def test_tokens_of_sequences_without_loss_and_of_fillers_do_not_count():
    masks = [[False, True, True], [False, False], [True, True], [True, False]]
    samples = [Sample("g", list(range(1, len(mask) + 1)), mask, [0.0] * len(mask)) for mask in masks]
    batch = pack(samples, aggregation="token_mean", totals=TOTALS, max_response_len=4)
    assert trained_tokens(batch).tolist() == [True] * 3 + [False] * 2 + [True] * 2 + [False] * 2
    assert not trained_tokens(empty_pack(TOTALS)).any()
