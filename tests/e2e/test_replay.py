"""What is replayed, and what is refused. That a replay is the recorded run, bit by bit, on ranks: test_train.py."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from fsdptrain import Trainer
from fsdptrain.errors import FsdptrainError
from fsdptrain.trainer.samples.recorded import read_samples, write_samples
from tests.distributed.test_exchange import key, make_samples
from tests.tensors import load_files, same
from tests.testing import tiny_run, tiny_tokenizer

Tensors = dict[str, Tensor]
ROWS = [{"prompt": f"say {i}", "label": ""} for i in range(12)]
OPTIONS = {"n_samples_per_prompt": 4, "reward": "tests.e2e.rewards:variety", "lr": 1e-3, "num_rollout": 3}
OPTIONS |= {"save_interval": 1, "keep_last": 3, "eval_size": 1}


def replay(checkpoint: Path, folder: Path, name: str, rows: list[dict[str, str]] = ROWS, **values: Any) -> Tensors:
    """Return the last checkpoint: weights and optimizer."""
    recorded = {"replay_rollouts": str(folder / "run" / "rollouts"), "rollout_engine": "absent:engine"}
    Trainer(tiny_run(checkpoint, folder / name, **OPTIONS | recorded | values), dataset=rows).fit()
    return load_files(folder / name / "checkpoints" / "step_00000003" / "shards")


@pytest.fixture(scope="module")
def run(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Tensors]:
    folder = tmp_path_factory.mktemp("replay")
    (folder / "run" / "rollouts" / "step_00000009").mkdir(parents=True)  # of before a resume
    return folder, replay(checkpoint, folder, "run", record_rollouts=True, replay_rollouts=None, rollout_engine="hf")


@pytest.mark.parametrize(
    ("values", "line"),
    [
        ({"num_rollout": 4}, "lacks step 4 of --num-rollout 4, has steps 1 to 3"),
        ({"replay_rollouts": "/absent"}, "/absent lacks step 1 .* has none: name the folder rollouts of a run"),
        ({"n_samples_per_prompt": 2}, "step 1 was recorded with --n-samples-per-prompt 4, not 2: replay it with these"),
        ({"rows": ROWS[:-1]}, "step 1 was recorded with other rows of --prompt-data: replay it with these"),
        ({"stop_when": "eval/heldout/accuracy>1"}, "no --replay-rollouts"),
    ],
)
def test_what_cannot_be_replayed_is_one_line(run: tuple[Path, Any], checkpoint: Path, values: dict, line: str) -> None:
    with pytest.raises(FsdptrainError, match=line):
        replay(checkpoint, run[0], "refused", **values)


def test_a_replay_begins_at_a_checkpoint_with_the_samples_of_two_ranks(run: tuple[Path, Any], checkpoint: Path) -> None:
    folder, whole = run
    step = folder / "run" / "rollouts" / "step_00000003"
    resume = str(folder / "run" / "checkpoints" / "step_00000002")
    samples, facts = read_samples(step / "rank_0.parquet").samples, json.loads((step / "rollout.json").read_text())
    (step / "rollout.json").write_text(json.dumps({**facts, "num_ranks": 2}))
    for change in (0.0, 0.25):
        samples[0] = replace(samples[0], reward=samples[0].reward + change)
        for rank in range(2):
            write_samples(step / f"rank_{rank}.parquet", samples[4 * rank : 4 * rank + 4], tiny_tokenizer())
        found = replay(checkpoint, folder, f"changed {change}", resume=resume)
        assert same(found, whole) is (change == 0.0)


def test_files_keep_all_that_training_reads(tmp_path: Path) -> None:
    for rank in range(4):  # one of which has no samples
        samples = [replace(each, advantage=0.0) for each in make_samples(rank, routes=True)]
        episodes = [replace(each, others=tuple(samples[:number])) for number, each in enumerate(samples)]
        write_samples(tmp_path / "rank_0.parquet", episodes, tiny_tokenizer())
        found = read_samples(tmp_path / "rank_0.parquet").samples
        keys = ([[key(replace(x, others=())) for x in each.sequences] for each in made] for made in (episodes, found))
        assert next(keys) == next(keys)
