"""The colocated engine answers with exactly the weights that it was given last, on one rank and on two."""

import pytest

from fsdptrain.testing import save_tiny_checkpoint, spawn
from tests.vllm import contract


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_engine_and_trainer_agree_after_every_update(tmp_path, tied, world_size):
    folder = save_tiny_checkpoint(tmp_path, head_dim=32, tie_word_embeddings=tied)
    options = {**contract.OPTIONS, "hf_checkpoint": str(folder), "rollout_engine": "vllm", "rollout_kv_cache_gib": 0.05}
    for found in spawn(world_size, contract.agreement, options, 3, timeout=300):
        assert max(found) < 1e-4, found
