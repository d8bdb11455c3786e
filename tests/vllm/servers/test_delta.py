"""Servers that are given only what has changed hold, bit by bit, what a full push would have left."""

import signal
from collections.abc import Mapping

import pytest
import torch
from torch import Tensor

from fsdptrain.rollout.weight_sync.checksum import checksum
from fsdptrain.vllm.server.engine import VLLMServerEngine
from tests.matrix import only
from tests.vllm import contract
from tests.vllm.servers import cases
from tests.vllm.servers.conftest import wait_for_both, weights_of
from tests.vllm.servers.processes import send
from tests.vllm.servers.test_push import build

CHANGES = ("layers.1.self_attn.k_proj", "embed_tokens", "nothing", "layers.0.mlp.", "norm")


def changed(weights: Mapping[str, Tensor], part: str) -> dict[str, Tensor]:
    return {name: tensor * 1.5 if part in name else tensor for name, tensor in weights.items()}


def require_held(engine: VLLMServerEngine, weights: Mapping[str, Tensor]) -> None:
    """By every server, all of it."""
    expected = {name: checksum(tensor) for name, tensor in weights.items()}
    for copy in engine.copies():
        assert copy.checksums(weights) == expected


@pytest.mark.parametrize(
    ("name", "push"),
    only([("tied", "gloo")], [("tied", "file"), ("untied", "file"), ("tied", "gloo"), ("moe", "file")]),
)
def test_a_delta_leaves_what_a_full_push_leaves(models, urls, alone, tmp_path, name, push):
    options = cases.attached(models[name].first, urls[name], weight_push=push, update_weight_buffer_size=100_000)
    ours, other = (build({**options, "output_dir": str(tmp_path / run)}) for run in ("ours", "other"))
    try:
        weights, pushed = weights_of(models[name].other), []
        total = sum(tensor.nbytes for tensor in weights.values())
        ours.update_weights(weights.items(), 0)
        assert ours.metrics() == {"sync/pushed_bytes": total, "sync/saved_bytes": 0.0}
        for version, part in enumerate(CHANGES, 1):
            weights = changed(weights, part)
            ours.update_weights(weights.items(), version)
            require_held(ours, weights)
            found = ours.metrics()
            assert found["sync/pushed_bytes"] + found["sync/saved_bytes"] == total
            pushed.append(found["sync/pushed_bytes"])
        assert pushed[CHANGES.index("nothing")] == 0
        assert all(0 < some < total for some in pushed if some)
        assert pushed[0] < total / 3  # the attention of one layer

        said = ours.generate(contract.PROMPTS, cases.GREEDY)
        other.update_weights(weights.items(), 0)  # the server has had another run's: it gets everything
        again = other.generate(contract.PROMPTS, cases.GREEDY)
        assert [[c.token_ids, c.logprobs] for c in said] == [[c.token_ids, c.logprobs] for c in again]

        ours.update_weights(changed(weights, "norm").items(), 9)  # now the other run was there in between
        require_held(ours, changed(weights, "norm"))
    finally:
        ours.close()
        other.close()


@pytest.mark.matrix
def test_one_that_was_started_again_in_between_gets_everything(pair, models):
    weights = weights_of(models["tied"].other)
    wait_for_both(pair)
    pair.update_weights(weights.items(), 200)
    weights = changed(weights, "layers.0.mlp")
    pair.update_weights(weights.items(), 201)
    send(pair.clients[0].url, signal.SIGKILL)
    wait_for_both(pair)  # by the files of 200 and 201
    require_held(pair, weights)
    weights = changed(weights, "layers.1.mlp")
    pair.update_weights(weights.items(), 202)
    assert pair.metrics()["sync/saved_bytes"] > pair.metrics()["sync/pushed_bytes"]
    require_held(pair, weights)
    assert torch.equal(weights["model.norm.weight"], weights_of(models["tied"].other)["model.norm.weight"])
