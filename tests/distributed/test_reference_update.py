"""An updated reference equals the policy at its update bitwise, also after a resume."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fsdptrain import Config, Trainer
from fsdptrain.algo.losses import LOSSES
from fsdptrain.errors import CheckpointError
from fsdptrain.fsdp.backend import FSDPBackend
from fsdptrain.fsdp.checkpoint_folder import CheckpointFolder
from fsdptrain.fsdp.reference import ReferenceBank
from fsdptrain.trainer.batches import StepBatches
from fsdptrain.trainer.loop import TrainingLoop
from tests.exact import Exact, backends_in_float64
from tests.testing import spawn

from .test_fsdp_backend import GRPO, config, packs_of_this_rank, samples


def scores(backend: FSDPBackend, role: str) -> torch.Tensor:
    packs = packs_of_this_rank(samples(), 128)
    return torch.cat([found.values for found in backend.compute_logprobs(packs, role)])  # type: ignore[arg-type]


def train(backend: FSDPBackend) -> None:
    backend.train_step(packs_of_this_rank(samples(), 128), LOSSES["grpo"], GRPO)


def write(backend: FSDPBackend, directory: str, step: int) -> Path:
    folder = CheckpointFolder(Path(directory), keep_last=9).write(step, lambda temporary: backend.save(temporary, step))
    assert folder is not None
    return folder


def has_reference(folder: Path) -> bool:
    return json.loads((folder / "trainer.json").read_text())["has_reference"]


def update_and_save(checkpoint: str, directory: str, values: dict) -> tuple[torch.Tensor, ...]:
    """Scores at the update, by both roles; of the reference after one more step; and whether checkpoints hold it."""
    backend = FSDPBackend(config(checkpoint, kl_loss_coef=0.1, **values), total_steps=10)
    train(backend)
    before = write(backend, directory, 1)
    backend.update_reference()
    policy, reference = scores(backend, "policy"), scores(backend, "reference")
    train(backend)
    trained = scores(backend, "policy")
    after = write(backend, directory, 2)
    held = torch.tensor([has_reference(before), has_reference(after)])
    return policy, reference, trained, scores(backend, "reference"), scores(backend, "policy"), held


def load(checkpoint: str, directory: str, values: dict) -> tuple[torch.Tensor, torch.Tensor, bool]:
    """Scores of both roles after a resume, and whether the next checkpoint holds the reference again."""
    backend = FSDPBackend(config(checkpoint, **{"kl_loss_coef": 0.1, **values}), total_steps=10)
    latest = CheckpointFolder(Path(directory), keep_last=9).latest()
    assert latest is not None
    assert backend.load(latest) == 2
    policy = scores(backend, "policy")
    if backend._reference is None:
        return policy, policy, False
    return policy, scores(backend, "reference"), has_reference(write(backend, directory, 3))


def in_float64(function: Callable[..., Any], *arguments: Any) -> Any:
    backends_in_float64()
    with Exact():
        return function(*arguments)


@pytest.mark.parametrize("values", [{"fsdp_cpu_offload": True}])
def test_the_reference_is_the_policy_of_the_update_and_is_resumed_bitwise(
    checkpoint: str, tmp_path: Path, values: dict
) -> None:
    saved = spawn(2, update_and_save, checkpoint, str(tmp_path), values)
    for policy, reference, trained, later, still, held in saved:
        assert torch.equal(policy, reference)
        assert torch.equal(reference, later)
        assert torch.equal(trained, still)  # saving the reference did not change the policy
        assert not torch.equal(trained, later)
        assert held.tolist() == [False, True]  # the initial model, which a checkpoint does not store
    for (policy, reference, held), (*_, later, still, _) in zip(
        spawn(2, load, checkpoint, str(tmp_path), values), saved, strict=True
    ):
        assert torch.equal(policy, still)
        assert torch.equal(reference, later)
        assert held


def test_another_number_of_ranks_resumes_the_reference_and_a_run_without_kl_ignores_it(
    checkpoint: str, tmp_path: Path
) -> None:
    [(*_, later, still, _)] = spawn(1, in_float64, update_and_save, checkpoint, str(tmp_path), {})
    found = [
        member
        for _, reference, _ in spawn(2, in_float64, load, checkpoint, str(tmp_path), {})
        for member in reference.tolist()
    ]
    wanted = later.tolist()
    assert sorted(x for x in found if x) == pytest.approx(sorted(x for x in wanted if x), abs=1e-12)
    (tmp_path / "checkpoints" / "step_00000003").rename(tmp_path / "checkpoints" / ".old")
    [(policy, _, held)] = spawn(1, in_float64, load, checkpoint, str(tmp_path), {"kl_loss_coef": 0.0})
    assert torch.equal(policy, still)
    assert not held


def train_counted(checkpoint: str, directory: str) -> list[int]:
    """The swaps after each of two rollouts, of several optimizer steps and packs."""
    swaps: list[int] = []
    swap, optimize = ReferenceBank._swap, TrainingLoop._optimize
    counted = [0]

    def counting(bank: ReferenceBank, model: torch.nn.Module) -> None:
        counted[0] += 1
        swap(bank, model)

    def noting(loop: TrainingLoop, steps: list[StepBatches], *shown: object) -> list[dict[str, float]]:
        assert len(steps) == 4
        assert sum(len(step.packs) for step in steps) > 4
        swaps.append(counted[0])
        return optimize(loop, steps, *shown)

    ReferenceBank._swap, TrainingLoop._optimize = counting, noting  # type: ignore[method-assign]
    values = {"num_rollout": 2, "steps_per_rollout": 4, "epochs_per_rollout": 2, "keep_last": 0, "export": False}
    sizes = {"rollout_batch_size": 8, "rollout_max_response_len": 16, "max_tokens_per_gpu": 64, "eval_interval": 0}
    run = Config(
        hf_checkpoint=str(checkpoint), output_dir=directory, reward="tests.e2e.rewards:variety", log_to=[], bf16=False,
        kl_loss_coef=0.1, **values, **sizes,
    )  # fmt: skip
    Trainer(run, dataset=[{"prompt": f"say {i}", "label": ""} for i in range(16)]).fit()
    return [*swaps, counted[0]]


def test_a_rollout_of_several_steps_and_packs_swaps_the_reference_in_and_out_once(
    checkpoint: str, tmp_path: Path
) -> None:
    assert spawn(2, train_counted, checkpoint, str(tmp_path)) == [[2, 4, 4]] * 2


def save_with_an_obstacle(checkpoint: str, directory: str) -> str:
    """On rank 1 a folder lies where the random states would be written."""
    backend = FSDPBackend(config(checkpoint, kl_loss_coef=0.1), total_steps=10)
    backend.update_reference()

    def save(temporary: Path) -> None:
        if dist.get_rank() == 1:
            (temporary / "rng-00001.json").mkdir()
        backend.save(temporary, 1)

    with pytest.raises(CheckpointError) as caught:
        CheckpointFolder(Path(directory), keep_last=9).write(1, save)
    return str(caught.value)


def test_what_fails_on_one_rank_does_not_leave_the_others_at_the_reference(checkpoint: str, tmp_path: Path) -> None:
    first, second = spawn(2, save_with_an_obstacle, checkpoint, str(tmp_path))
    assert first == second
    assert "Is a directory" in first
    assert "(rank 1 of 2)" in first
