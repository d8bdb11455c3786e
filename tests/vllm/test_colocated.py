"""The colocated engine answers with exactly the weights that it was given last, on one rank and on two."""

from pathlib import Path

import pytest
import torch

from fsdptrain.config import Config
from fsdptrain.errors import ConfigError
from fsdptrain.rollout import engine_factory
from fsdptrain.testing import save_tiny_checkpoint, spawn
from tests.vllm import contract, models


@pytest.mark.parametrize("name", models.NAMES)
@pytest.mark.parametrize("world_size", [1, 2])
def test_engine_and_trainer_agree_after_every_update(tmp_path, name, world_size):
    options = contract.colocated(models.save(name, tmp_path))
    for found in spawn(world_size, contract.agreement, options, 3, timeout=300):
        assert max(found) < 1e-4, found


def refusal(folder: Path) -> str:
    config = Config(hf_checkpoint=str(folder), rollout_engine="vllm", rollout_engine_args={"max_num_seq": 8})
    with pytest.raises(ConfigError) as caught:
        engine_factory("vllm", device_type="cpu")(config, checkpoint=folder, device=torch.device("cpu"))
    return str(caught.value)


def test_an_option_that_vllm_does_not_have_is_refused_by_name(tmp_path):
    [said] = spawn(1, refusal, save_tiny_checkpoint(tmp_path, head_dim=32), timeout=200)
    assert said == "--rollout-engine-args max_num_seq: vLLM has no such option; did you mean 'max_num_seqs'?"
