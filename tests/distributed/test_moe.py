"""Router replay."""

import dataclasses
from collections.abc import Sequence

import pytest
import torch

from fsdptrain.algo.losses import LOSSES
from fsdptrain.fsdp.backend import FSDPBackend
from fsdptrain.types import NO_ROUTE, LossConfig, Sample
from tests import zoo
from tests.tensors import relative
from tests.testing import save_hub, spawn

from .test_fsdp_backend import config, keep_gradients, packs_of_this_rank, samples

EXPERTS, TOP_K, LAYERS = 6, 2, 2


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> str:
    return str(save_hub(zoo.build("qwen3_moe", num_experts=EXPERTS), tmp_path_factory.mktemp("qwen3_moe")))


def with_routes(items: Sequence[Sample], num_experts: int = EXPERTS) -> list[Sample]:
    """Experts that the model would not choose, and for some tokens none."""
    made = []
    for number, sample in enumerate(items):
        generator = torch.Generator().manual_seed(number)
        orders = torch.rand(len(sample.token_ids), LAYERS, num_experts, generator=generator).argsort(-1)
        routes = orders[..., :TOP_K].to(torch.int16)
        routes[-1] = NO_ROUTE
        made.append(dataclasses.replace(sample, routes=routes))
    return made


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
