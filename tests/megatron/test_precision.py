"""Training in bfloat16: float32 masters that are dealt over ranks, keep what bfloat16 would lose, travel bitwise.

And layers that are computed again with --gradient-checkpointing, which changes nothing else.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.megatron import cases, training
from tests.megatron.training import backend_of, masters, pack, state, steps, weights, whole_gradient
from tests.tensors import load_files
from tests.testing import spawn


def resume(folder: Path, checkpoint: Path) -> dict[str, Tensor]:
    backend = backend_of(folder, bf16=True, lr=training.SMALL)
    assert backend.load(checkpoint / "checkpoints" / "step_00000003") == 3
    rounded = weights(backend)
    assert all(torch.equal(tensor.bfloat16(), rounded[name]) for name, tensor in masters(backend).items())
    return state(backend)


def gradients(folder: Path) -> list[tuple[float, Tensor]]:
    """The norm and all numbers of the gradient of the first step: in bfloat16, and in float32."""
    found = []
    for bf16 in (True, False):
        backend = backend_of(folder, bf16=bf16, **training.flags_of({"expert_parallel": 2}))
        (norm,) = steps(backend, 1)
        backend._masters.take_gradients()  # the step has let go of them; they are in the buffers still
        parts = backend.weights.stream(of=whole_gradient(backend._masters), dtype=torch.float32, only_parameters=True)
        found.append((norm, torch.cat([tensor.flatten() for _, tensor in parts])))
    return found


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return cases.save("qwen3_moe", tmp_path_factory.mktemp("hub") / "moe")


@pytest.fixture(scope="module")
def trained(model: Path) -> list[dict[str, Any]]:
    return spawn(2, training.train, model, model.parent / "run", {"expert_parallel": 2}, timeout=300.0)


def test_masters_are_the_files_at_first_and_keep_steps_that_the_rounded_model_cannot_show(trained) -> None:
    for rank in trained:
        assert rank["files"]
        assert rank["dtypes"] == {"torch.bfloat16"}
        assert rank["rounded"]
    assert trained[0]["moved"] > 0.9
    assert trained[0]["shown"] < 0.1


def test_each_rank_owns_its_part_of_masters_and_moments(trained) -> None:
    """Half of what both have; an expert belongs to one of them."""
    owned, held = (sum(rank[kind] for rank in trained) for kind in ("owned", "held"))
    experts = sum(t.numel() for name, t in trained[0]["state"].items() if ".experts." in name and name[:3] != "exp")
    assert owned == (held + experts) // 2


def test_masters_and_moments_travel_bitwise_to_another_split(trained, model: Path) -> None:
    (found,) = spawn(1, resume, model, model.parent / "run", timeout=300.0)
    wanted = trained[0]["state"]
    assert found.keys() == wanted.keys()
    assert [name for name in wanted if not torch.equal(found[name], wanted[name])] == []


@pytest.mark.matrix
def test_gradients_are_those_of_float32_but_for_rounding(model: Path) -> None:
    """Of the same weights: a router may choose other experts for a token, and steps go apart from there."""
    (half, rounded), (single, exact) = spawn(2, gradients, model, timeout=300.0)[0]
    assert torch.cosine_similarity(rounded, exact, dim=0) > 0.99
    assert half == pytest.approx(single, rel=3e-2)
    assert half != pytest.approx(single, rel=1e-5)


def begun(folder: Path) -> dict[str, Tensor]:
    return weights(backend_of(folder, bf16=True))


def test_what_is_never_trained_keeps_its_digits_in_whole_layers(tmp_path: Path) -> None:
    folder = cases.save("ernie4_5_moe", tmp_path / "model")
    ((found,), files) = spawn(1, begun, folder), load_files(folder)
    exact = {name for name in found if torch.equal(found[name], files[name])}
    assert exact == {"model.layers.1.mlp.moe_statics.e_score_correction_bias"}


def step(folder: Path, recompute: bool) -> tuple[int, int, float]:
    """Passes of the first layer while scoring and while training one pack, and the norm of its gradient."""
    backend = backend_of(folder, gradient_checkpointing=recompute)
    passes: list[int] = []
    backend._model[0].decoder.layers[0].register_forward_pre_hook(lambda *_: passes.append(1))
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
