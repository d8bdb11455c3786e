"""The engine receives weights only if it will generate with them."""

from pathlib import Path

import pytest
import torch

from fsdptrain import Trainer
from fsdptrain.errors import RolloutError
from tests.e2e import command
from tests.testing import save_tiny_checkpoint, tiny_run

ROWS = [{"prompt": f"say {i}", "label": str(i)} for i in range(16)]


def test_a_tensor_that_is_wrong_after_a_later_sync_is_named_at_the_next_one(checkpoint: Path, tmp_path: Path) -> None:
    options = {"rollout_engine": "tests.e2e.engines:corrupting", "n_samples_per_prompt": 4, "eval_interval": 0}
    options |= {"num_rollout": 5, "rollout_max_response_len": 8, "reward": "tests.e2e.rewards:variety", "keep_last": 0}
    run = Trainer(tiny_run(checkpoint, tmp_path, **options), dataset=ROWS)
    with pytest.raises(
        RolloutError, match=r"does not hold model.layers.1.mlp.down_proj.weight of version 3, the first"
    ):
        run.fit()


@pytest.mark.matrix
def test_a_rank_that_hangs_in_its_engine_ends_the_run_and_leaves_the_stacks_of_all_ranks(
    checkpoint: Path, tmp_path: Path
) -> None:
    argv = ["--hf-checkpoint", str(checkpoint), *command.UNEVALUATED, "--rollout-engine", "tests.e2e.engines:hanging"]
    argv += ["--dist-timeout", "40", "--output-dir", str(tmp_path / "run")]
    result = command.run([*argv, "--nproc-per-node", "2"], tmp_path / "log", timeout=200)
    assert result.code == 1
    assert "in collect" in result.err
    assert "in wait_in_vain" in result.err


def test_offload_train_changes_no_bit(tmp_path: Path) -> None:
    """On two ranks, with a reference, evaluations, and checkpoints between the rollouts."""
    checkpoint = save_tiny_checkpoint(tmp_path / "model", dtype=torch.bfloat16)  # no storage is a file's
    written = {}
    for name, more in {"stays": [], "leaves": ["--offload-train"]}.items():
        argv = [*command.TINY_RUN, "--save-interval", "1", "--eval-interval", "1", "--kl-loss-coef", "0.1", *more]
        rows = command.train(checkpoint, tmp_path / name, *argv, "--keep-last", "1", num_ranks=2)
        run = tmp_path / name / "run"
        written[name] = [(run / "samples.jsonl").read_text()]
        written[name] += [path.read_bytes() for path in sorted((run / "hf").glob("*.safetensors"))]
        assert any("perf/offload_s" in row for row in rows) == bool(more)
    assert written["stays"] == written["leaves"]
