"""A whole run by the real command line, with vLLM in the trainer's process."""

import json

from fsdptrain.testing import save_tiny_checkpoint
from tests.e2e import command


def test_a_run_with_vllm_trains_on_what_the_trainer_itself_would_have_said(tmp_path):
    folder = save_tiny_checkpoint(tmp_path / "model", head_dim=32)
    argv = ["--hf-checkpoint", str(folder), *command.TINY_RUN, "--rollout-engine", "vllm", "--nproc-per-node", "2"]
    argv += ["--rollout-kv-cache-gib", "0.05", "--rollout-engine-args", '{"max_num_seqs": 8}']
    result = command.run([*argv, "--output-dir", str(tmp_path / "run")], tmp_path / "log", timeout=400)
    assert result.code == 0, result.err
    assert "Traceback" not in result.err
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    mismatch = [row["mismatch/abs_max"] for row in rows if "mismatch/abs_max" in row]
    assert len(mismatch) == 2
    assert max(mismatch) < 1e-4
