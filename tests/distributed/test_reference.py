"""The reference is swapped in and out once for a rollout."""

from pathlib import Path

import torch

from fsdptrain import Trainer
from fsdptrain.fsdp.reference import ReferenceBank
from fsdptrain.trainer.batches import StepBatches
from fsdptrain.trainer.loop import TrainingLoop
from tests.testing import spawn, tiny_run


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
    values = {"num_rollout": 2, "global_batch_size": 8, "epochs_per_rollout": 2, "keep_last": 0, "kl_loss_coef": 0.1}
    sizes = {"rollout_batch_size": 4, "rollout_max_response_len": 16, "max_tokens_per_gpu": 64, "eval_interval": 0}
    values |= {"n_samples_per_prompt": 4, "reward": "tests.e2e.rewards:variety"}
    run = tiny_run(checkpoint, directory, **values, **sizes)
    Trainer(run, dataset=[{"prompt": f"say {i}", "label": ""} for i in range(16)]).fit()
    return [*swaps, counted[0]]


def test_a_rollout_of_several_steps_and_packs_swaps_the_reference_in_and_out_once(
    checkpoint: str, tmp_path: Path
) -> None:
    assert spawn(2, train_counted, checkpoint, str(tmp_path)) == [[2, 4, 4]] * 2
