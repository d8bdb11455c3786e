"""A replay of recorded rollouts is the run that recorded them, bit by bit, without its engine."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
import torch
import torch.distributed as dist

from fsdptrain import Trainer
from fsdptrain.errors import FsdptrainError
from fsdptrain.trainer.samples.recorded import read_samples, write_samples
from fsdptrain.types import Sample
from tests.e2e.command import trained
from tests.e2e.test_train import LABELS, learned
from tests.testing import spawn, tiny_run, tiny_tokenizer

ROWS = [{"prompt": f"say {i}", "label": label} for i, label in enumerate(LABELS)]
OPTIONS = {"algorithm": "dapo", "reward": "tests.e2e.rewards:by_label", "global_batch_size": 8, "epochs_per_rollout": 2}
OPTIONS |= {"rollout_batch_size": 4, "n_samples_per_prompt": 4, "rollout_max_response_len": 8, "num_rollout": 3}
OPTIONS |= {"lr": 1e-3, "save_interval": 1, "keep_last": 3, "eval_size": 1}


def replay(checkpoint: Path, folder: Path, name: str, rows: list[dict[str, str]] = ROWS, **values: Any) -> None:
    recorded = {"replay_rollouts": str(folder / "run" / "rollouts"), "rollout_engine": "absent:engine"}
    Trainer(tiny_run(checkpoint, folder / name, **OPTIONS | recorded | values), dataset=rows).fit()


def record_and_replay(checkpoint: Path, folder: Path) -> None:
    replay(checkpoint, folder, "run", record_rollouts=True, replay_rollouts=None, rollout_engine="hf")
    replay(checkpoint, folder, "replay", num_rollout=2)
    replay(checkpoint, folder, "replay")  # goes on with step 3
    if dist.get_rank() == 0:
        file = folder / "run" / "rollouts" / "step_00000003" / "rank_0.parquet"
        table = pyarrow.parquet.read_table(file)
        rows = table.to_pylist()
        rows[0]["reward"] += 0.25
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows, table.schema), file)
    replay(checkpoint, folder, "changed", resume=str(folder / "replay" / "checkpoints" / "step_00000002"))


@pytest.fixture(scope="module")
def folder(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("replay")
    (folder / "run" / "rollouts" / "step_00000009").mkdir(parents=True)  # of a run that was resumed before it
    spawn(2, record_and_replay, checkpoint, folder)
    return folder


def test_weights_optimizer_and_metrics_of_a_replay_are_those_of_the_run(folder: Path, checkpoint: Path) -> None:
    steps = [folder / name / "checkpoints" / "step_00000003" / "shards" for name in ("run", "replay", "changed")]
    run, again, changed = ({path.name: path.read_bytes() for path in step.iterdir()} for step in steps)
    assert run == again != changed
    assert learned(folder / "replay") == trained(learned(folder / "run"))
    assert sorted(path.name[-1] for path in (folder / "run" / "rollouts").iterdir()) == ["1", "2", "3"]
    replay(checkpoint, folder, "alone", num_rollout=1)  # on one rank
    alone, whole = learned(folder / "alone")[0], learned(folder / "replay")[0]
    assert [alone[name] for name in whole] == pytest.approx([*whole.values()], rel=1e-3, abs=1e-6)


@pytest.mark.parametrize(
    ("values", "line"),
    [
        ({"num_rollout": 4}, "lacks step 4 of num_rollout 4, has steps 1 to 3"),
        ({"replay_rollouts": "/absent"}, "/absent lacks step 1 .* has none: name the folder rollouts of a run"),
        ({"n_samples_per_prompt": 2}, "step 1 was recorded with n_samples_per_prompt 4, not 2: replay it with these"),
        ({"rows": ROWS[:-1]}, "step 1 was recorded with rows of prompt_data [0-9a-f]+, not"),
        ({"stop_when": "eval/heldout/accuracy>1"}, "no replay_rollouts"),
    ],
)
def test_what_cannot_be_replayed_is_one_line(folder: Path, checkpoint: Path, values: dict, line: str) -> None:
    with pytest.raises(FsdptrainError, match=line):
        replay(checkpoint, folder, "refused", **values)


def test_files_keep_every_field_that_training_reads(tmp_path: Path) -> None:
    routes = torch.arange(12, dtype=torch.int16).view(3, 2, 2) - 1
    part = Sample("g", [70, 71, 72], [False, True, True], [0.0, -0.1, -1e-9], policy_version=3, versions=[3, 3, 4])
    whole = replace(part, reward=0.1, rewards={"a": 0.1}, truncated=True, routes=routes, others=(part, part))
    blank = vars(Sample("", [], [], []))
    assert {name for name, value in vars(whole).items() if repr(value) == repr(blank[name])} == {"advantage", "error"}
    for samples in ([], [whole, Sample("h", [70], [True], [-2.0])]):
        write_samples(tmp_path / "rank_0.parquet", samples, tiny_tokenizer())
        found = read_samples(tmp_path / "rank_0.parquet").samples
        assert found == samples
    assert torch.equal(found[0].routes, routes)
