"""Routes of samples: each token has those of the first turn that read it."""

import pytest
import torch

from fsdptrain.algo.weights import Totals
from fsdptrain.data.packing.pack import pack
from fsdptrain.data.routes import check_routes, join_routes, sample_routes
from fsdptrain.errors import RolloutError
from fsdptrain.types import NO_ROUTE, Sample

LAYERS, TOP_K = 3, 2


def routes(count: int, start: int = 0) -> torch.Tensor:
    """Token t of layer l took experts that name both."""
    tokens = torch.arange(start, start + count)[:, None, None]
    return (100 * tokens + 10 * torch.arange(LAYERS)[:, None] + torch.arange(TOP_K)).to(torch.int16)


def make_sample(length: int, known: int | None) -> Sample:
    reported = None if known is None else routes(known)
    return Sample("g", list(range(length)), [True] * length, [0.0] * length, routes=sample_routes([reported], length))


def test_the_last_token_has_no_route():
    found = sample_routes([routes(5)], 6)
    assert torch.equal(found[:5], routes(5))
    assert (found[5:] == NO_ROUTE).all()
    assert found.dtype == torch.int16


def test_a_later_turn_adds_the_routes_of_new_tokens():
    later = routes(9) + 1  # it read the first tokens again, and took others
    found = sample_routes([routes(4), later], 12)
    assert torch.equal(found[:4], routes(4))
    assert torch.equal(found[4:9], later[4:])
    assert (found[9:] == NO_ROUTE).all()


def test_a_turn_without_routes_gives_a_sample_without_routes():
    assert sample_routes([routes(4), None], 12) is None
    assert sample_routes([], 3) is None
    with pytest.raises(RolloutError, match="no routes for 1 of 2 samples; use --rollout-engine hf"):
        check_routes([make_sample(3, 2), make_sample(3, None)])
    check_routes([make_sample(3, 2)])


def test_a_pack_has_the_routes_of_its_tokens():
    samples = [make_sample(3, 2), make_sample(2, None), make_sample(4, 4)]
    totals = Totals(num_tokens=6, num_sequences=3)
    batch = pack(samples, aggregation="token_mean", totals=totals, max_response_len=4)
    expected = torch.cat([samples[0].routes, torch.full((2, LAYERS, TOP_K), NO_ROUTE), routes(4)])
    assert torch.equal(batch.routes, expected)
    assert batch.routes.dtype == torch.int16
    assert batch.input_ids.tolist() == [0, 1, 2, 0, 1, 0, 1, 2, 3]
    assert join_routes([make_sample(2, None)]) is None
    assert torch.equal(batch.to(torch.device("cpu")).routes, expected)
