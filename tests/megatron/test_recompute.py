"""--gradient-checkpointing under --backend megatron: layers are computed again, and nothing else changes."""

from pathlib import Path

import pytest

from tests.megatron import cases
from tests.megatron.training import backend_of, pack, steps
from tests.testing import spawn


def step(folder: Path, recompute: bool) -> tuple[int, int, float]:
    """Passes of the first layer while scoring and while training one pack, and the norm of its gradient."""
    backend = backend_of(folder, gradient_checkpointing=recompute)
    passes: list[int] = []
    backend._model.decoder.layers[0].register_forward_pre_hook(lambda *_: passes.append(1))
    backend.compute_logprobs([pack(0)], "policy")
    scored = len(passes)
    (norm,) = steps(backend, 1)
    return scored, len(passes) - scored, norm


def both(folder: Path) -> list[tuple[int, int, float]]:
    return [step(folder, recompute) for recompute in (False, True)]


def test_layers_are_computed_again_in_the_backward_pass_and_only_there(tmp_path: Path) -> None:
    ((kept, again),) = spawn(1, both, cases.save("qwen3", tmp_path / "model"))
    assert kept[:2] == (1, 1)
    assert again[:2] == (1, 2)
    assert again[2] == pytest.approx(kept[2], rel=1e-6)
