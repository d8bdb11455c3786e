"""The engine receives weights only if it will generate with them."""

from pathlib import Path
from typing import Any

import pytest
import torch

from fsdptrain import Config, Trainer
from fsdptrain.errors import RolloutError
from tests.e2e import command
from tests.e2e.engines import CALLS
from tests.testing import save_tiny_checkpoint

ROWS = [{"prompt": f"say {i}", "label": str(i)} for i in range(16)]


def calls(checkpoint: Path, folder: Path, **values: Any) -> list[str]:
    CALLS.clear()
    config = Config(
        **{
            "hf_checkpoint": str(checkpoint),
            "output_dir": str(folder),
            "num_rollout": 3,
            "rollout_batch_size": 2,
            "rollout_max_response_len": 4,
            "rollout_engine": "tests.e2e.engines:recording",
            "bf16": False,
            "reward": "exact",
            "log_to": [],
            "export": False,
            "keep_last": 0,
            **values,
        }
    )
    Trainer(config, dataset=ROWS).fit()
    return list(CALLS)


def test_a_tensor_that_is_wrong_after_a_later_sync_is_named_at_the_next_one(checkpoint: Path, tmp_path: Path) -> None:
    more = {"n_samples_per_prompt": 4, "eval_interval": 0, "num_rollout": 5, "rollout_max_response_len": 8}
    more |= {"reward": "tests.e2e.rewards:variety", "reward_workers": 0}
    with pytest.raises(
        RolloutError, match=r"does not hold model.layers.1.mlp.down_proj.weight of version 3, the first"
    ):
        calls(checkpoint, tmp_path, rollout_engine="tests.e2e.engines:corrupting", **more)


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
        argv = ["--hf-checkpoint", str(checkpoint), *command.TINY_RUN, "--num-rollout", "3"]
        argv += ["--save-interval", "1", "--eval-interval", "1", "--kl-loss-coef", "0.1", *more]
        argv += ["--keep-last", "1", "--output-dir", str(tmp_path / name)]
        result = command.run(argv, tmp_path / f"{name}.log", num_ranks=2)
        assert result.code == 0, result.err
        written[name] = [(tmp_path / name / "samples.jsonl").read_text()]
        written[name] += [path.read_bytes() for path in sorted((tmp_path / name / "hf").glob("*.safetensors"))]
        rows = command.metrics_of(tmp_path / name)
        assert any("perf/offload_s" in row for row in rows) == bool(more)
    assert written["stays"] == written["leaves"]
