"""A whole run by the real command line, with vLLM in the trainer's process."""

import pytest

from tests.e2e import command
from tests.matrix import only
from tests.testing import save_tiny_checkpoint


@pytest.mark.parametrize("num_ranks", only([1], [1, 2]))
def test_a_run_with_vllm_trains_on_logprobs_that_the_trainer_agrees_with(tmp_path, num_ranks):
    folder = save_tiny_checkpoint(tmp_path / "model", head_dim=32)
    argv = ["--hf-checkpoint", str(folder), *command.TINY_RUN, "--rollout-engine", "vllm"]
    argv += ["--rollout-kv-cache-gib", "0.05", "--rollout-engine-args", '{"max_num_seqs": 8}']
    result = command.run(
        [*argv, "--output-dir", str(tmp_path / "run")], tmp_path / "log", timeout=400, num_ranks=num_ranks
    )
    assert result.code == 0, result.err
    assert "Traceback" not in result.err
    mismatch = [row["mismatch/abs_max"] for row in command.metrics_of(tmp_path / "run") if "mismatch/abs_max" in row]
    assert len(mismatch) == 2
    assert max(mismatch) < 1e-4
