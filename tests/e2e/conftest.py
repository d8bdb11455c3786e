from pathlib import Path

import pytest
from transformers import Qwen3MoeForCausalLM

from tests import zoo
from tests.testing import save_tiny_checkpoint, tiny_tokenizer


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random tiny Qwen3 with its tokenizer, as a hub folder."""
    return save_tiny_checkpoint(tmp_path_factory.mktemp("hub") / "tiny")


@pytest.fixture(scope="session")
def moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random tiny Qwen3-MoE with its tokenizer, as a hub folder."""
    folder = tmp_path_factory.mktemp("hub") / "moe"
    model = zoo.build("qwen3_moe", router_aux_loss_coef=0.02)
    assert isinstance(model, Qwen3MoeForCausalLM)
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder
