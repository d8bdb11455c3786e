"""--gradient-checkpointing under --backend megatron: layers are computed again, and nothing else changes."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fsdptrain.algo.losses import LOSSES
from fsdptrain.config import Config
from fsdptrain.models.policy import plain_batch
from fsdptrain.testing import spawn
from fsdptrain.types import LossConfig
from tests.megatron import cases


def step(folder: Path, recompute: bool) -> tuple[int, int, float]:
    """Passes of the first layer while scoring and while training one pack, and the norm of its gradient."""
    from fsdptrain.backends.megatron.backend import MegatronBackend

    options = {"bf16": False, "backend": "megatron", "gradient_checkpointing": recompute}
    backend = MegatronBackend(Config(hf_checkpoint=str(folder), **options), total_steps=2)
    passes: list[int] = []
    backend._model.decoder.layers[0].register_forward_pre_hook(lambda *_: passes.append(1))
    batch = plain_batch([cases.tokens(1, n, seed=n)[0].tolist() for n in (7, 12)], device=torch.device("cpu"))
    batch = replace(batch, advantages=torch.arange(19).sin())
    backend.score([batch], "policy")
    scored = len(passes)
    norm = backend.train_step([batch], LOSSES["grpo"], LossConfig())["optim/grad_norm"]
    return scored, len(passes) - scored, norm


def test_layers_are_computed_again_in_the_backward_pass_and_only_there(tmp_path: Path) -> None:
    folder = cases.save("qwen3", tmp_path / "model")
    [kept], [again] = spawn(1, step, folder, False), spawn(1, step, folder, True)
    assert kept[:2] == (1, 1)
    assert again[:2] == (1, 2)
    assert again[2] == pytest.approx(kept[2], rel=1e-6)
