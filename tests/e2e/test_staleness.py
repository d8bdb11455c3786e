"""--max-staleness: which weights make which rollout, with an engine that waits for its turn and with one that does not.

In flight: the embedded engine in threads of its own (tests/e2e/engines.py). What real servers do with requests that are
under way when new weights come is tested in tests/vllm/servers/test_in_flight.py.
"""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from fsdptrain import Trainer
from tests.e2e import command
from tests.e2e.command import TINY_RUN, rows_of
from tests.e2e.engines import CALLS
from tests.tensors import load_files, same
from tests.testing import tiny_run, wait_until

ENGINES = {"queue": "tests.e2e.engines:recording", "in flight": "tests.e2e.engines:in_flight"}
ROWS = [{"prompt": f"say {i}", "label": str(i)} for i in range(64)]


def train(checkpoint: Path, folder: Path, kind: str, age: int, **values: Any) -> list[dict[str, Any]]:
    """The metrics of four rollouts."""
    CALLS.clear()
    options = {"rollout_engine": ENGINES[kind], "max_staleness": age, "mismatch_correction": "tis", "num_rollout": 4}
    options |= {"n_samples_per_prompt": 4, "rollout_max_response_len": 6, "reward": "tests.e2e.rewards:variety"}
    options |= {"lr": 1e-3, "log_num_samples": 8, "export": True, "keep_last": 0, "eval_interval": 0}
    Trainer(tiny_run(checkpoint, folder, **options | values), dataset=ROWS).fit()
    return rows_of(folder / "metrics.jsonl")


def test_without_staleness_an_engine_that_could_run_ahead_trains_bit_by_bit_as_one_that_cannot(
    checkpoint: Path, tmp_path: Path
) -> None:
    for kind in ENGINES:
        rows = train(checkpoint, tmp_path / kind, kind, 0)
        assert [call for step in range(4) for call in (f"weights {step}", "generate")] == CALLS
        assert not any("staleness/mean" in row for row in rows)
    assert same(load_files(tmp_path / "queue" / "hf"), load_files(tmp_path / "in flight" / "hf"))


def test_old_tokens_of_a_late_group_are_trained_and_replayed(checkpoint: Path, tmp_path: Path) -> None:
    """Prompt "say 0" is sampled with version 0, and its group is finished when the engine has version 3."""
    options = {"num_rollout": 5, "n_samples_per_prompt": 2, "rollout_shuffle": False, "rollout_batch_size": 2}
    late, run = {"rollout_engine": "tests.e2e.engines:late", "record_rollouts": True}, tmp_path / "run"
    rows = train(checkpoint, run, "in flight", 1, **options | late)
    assert max(row["staleness/max"] for row in rows) >= 3
    again = train(checkpoint, tmp_path / "again", "in flight", 1, **options, replay_rollouts=str(run / "rollouts"))
    assert [row["staleness/mean"] for row in again] == [row["staleness/mean"] for row in rows]
    assert same(load_files(tmp_path / "again" / "hf"), load_files(run / "hf"))


def test_ranks_run_ahead_together(checkpoint: Path, tmp_path: Path) -> None:
    argv = [*TINY_RUN, "--rollout-engine", ENGINES["in flight"], "--max-staleness", "2", "--num-rollout", "6"]
    argv += ["--mismatch-correction", "tis"]
    argv += ["--environment", "examples.calculator.calculator:Calculator", "--max-turns", "2"]
    rows = [row for row in command.train(checkpoint, tmp_path, *argv, num_ranks=2) if "staleness/max" in row]
    assert len(rows) == 6
    assert all(row["staleness/max"] <= row["step"] - 1 for row in rows)
    assert rows[-1]["progress/samples"] == 6 * 16


@pytest.mark.matrix
def test_a_killed_run_goes_on_without_losing_a_prompt_or_training_on_one_twice(
    checkpoint: Path, tmp_path: Path
) -> None:
    argv = ["--hf-checkpoint", str(checkpoint), *TINY_RUN, "--rollout-engine", ENGINES["in flight"]]
    argv += ["--log-num-samples", "16", "--save-interval", "1", "--num-rollout", "9"]
    argv += ["--max-staleness", "2", "--mismatch-correction", "tis", "--output-dir", str(tmp_path / "run")]
    killed = command.start(argv, tmp_path / "killed")
    steps = tmp_path / "run" / "checkpoints"
    wait_until(lambda: list(steps.glob("step_*3")), 120, alive=killed.is_alive)
    killed.kill()
    killed.join()

    result = command.run(argv, tmp_path / "resumed")

    assert result.code == 0, result.err
    asked = [row["prompt"] for row in rows_of(tmp_path / "run" / "samples.jsonl") if row["set"] == "train"]
    whole = command.run([*argv, "--output-dir", str(tmp_path / "whole")], tmp_path / "log")
    assert whole.code == 0, whole.err
    rows = rows_of(tmp_path / "whole" / "samples.jsonl")
    assert Counter(asked) == Counter(row["prompt"] for row in rows if row["set"] == "train")
    assert len(asked) == 9 * 16
