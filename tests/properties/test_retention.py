"""Which checkpoints stay, against a model that deletes nothing; also if writes are interrupted anywhere."""

import json
import math
import sys
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsdptrain import platform
from fsdptrain.checkpoints import list_checkpoints, step_of
from fsdptrain.config import Config
from fsdptrain.fsdp.checkpoint_folder import CheckpointFolder, check_manifest
from fsdptrain.trainer.best import Evaluations

METRIC = "eval/heldout/truncated"  # lower is better
Step = tuple[float, bool]  # value, NaN if it is not evaluated; whether --save-interval saves it
_until_crash = [0]  # file operations; 0: none


class CrashError(BaseException):
    """Ends a write between two file operations, as a kill does."""


def _audit(event: str, args: tuple) -> None:
    counts = event in ("open", "os.rename", "os.mkdir", "shutil.rmtree") and "checkpoints" in str(args[0])
    if _until_crash[0] and counts:
        _until_crash[0] -= 1
        if not _until_crash[0]:
            raise CrashError


sys.addaudithook(_audit)


def expected(steps: Sequence[Step], keep_last: int, keep_best: int, keep_every: int) -> set[int]:
    best, written = list[int](), list[int]()
    for step, (value, saves) in enumerate(steps, 1):
        if not math.isnan(value):
            best = sorted([*best, step], key=lambda each: (steps[each - 1][0], each))[:keep_best]
        if saves or step == len(steps) or step in best:
            written.append(step)
    return {*written[-keep_last:], *best, *(step for step in written if keep_every and step % keep_every == 0)}


def kept(run: Path) -> list[int]:
    for path in list_checkpoints(run):
        check_manifest(path)
    return [0, *map(step_of, list_checkpoints(run))]


def train(run: Path, steps: Sequence[Step], written: list[int], *, background: bool = False, **keep: int) -> None:
    """Go on from the newest checkpoint to the end of `steps`. Appends the steps of checkpoints to `written`."""
    newest, config = kept(run)[-1], Config(hf_checkpoint="x", eval_metric=METRIC, save_interval=1, **keep)
    rows = json.loads((list_checkpoints(run)[-1] / "progress.json").read_text()) if newest else []
    evaluations, folder = Evaluations(config, rows), CheckpointFolder(run, **keep)

    def save(at: Path) -> Future[Any] | None:
        (at / "progress.json").write_text(json.dumps(evaluations.rows))
        done = Future[Any]()
        done.set_result(None)
        return done if background else None

    for step, (value, saves) in [*enumerate(steps, 1)][newest:]:
        if saves or not math.isnan(value):
            evaluations.observe({METRIC: value}, step, {})
        if saves or step == len(steps) or evaluations.is_kept(step):
            folder.write(step, save, ranked=evaluations.ranked)
            folder.wait()
            written.append(step)
            assert kept(run)[-1] == step


@given(
    steps=st.lists(st.tuples(st.sampled_from([0.0, 0.5, 1.0, math.nan]), st.booleans()), min_size=1, max_size=9),
    last=st.integers(1, 3),
    best=st.integers(0, 3),
    every=st.sampled_from([0, 2, 3]),
    crashes=st.lists(st.integers(1, 60), max_size=3),
)
def test_what_remains_depends_on_what_was_written_and_not_on_crashes(steps, last, best, every, crashes) -> None:
    keep, cleaned = {"keep_last": last, "keep_best": best, "keep_every": every}, True
    with TemporaryDirectory() as name, platform.process_group(60):
        run, written = Path(name), [0]
        for crash in crashes:
            _until_crash[0] = crash
            try:
                train(run, steps, written, **keep)
            except CrashError:
                assert kept(run)[-1] >= written[-1]
                cleaned = kept(run)[-1] < len(steps)  # the end of a run deletes nothing any more
            _until_crash[0] = 0
        train(run, steps, written, **keep)
        found = {*kept(run)[1:]}
        CheckpointFolder(run, **keep).write(1, lambda at: None)  # the run was taken back to its start
        assert kept(run) == [0, 1]
    assert expected(steps, **keep) <= found
    assert not cleaned or expected(steps, **keep) == found


@pytest.mark.parametrize("background", [False, True])
def test_a_crash_at_any_file_operation_loses_no_checkpoint(background: bool) -> None:
    steps, keep = [(0.0, True)] * 3, {"keep_last": 1, "keep_best": 0, "keep_every": 0}
    with platform.process_group(60):
        for count in range(1, 1000):
            written, _until_crash[0] = [0], count
            with TemporaryDirectory() as name:
                try:
                    train(Path(name), steps, written, background=background, **keep)
                except CrashError:
                    assert kept(Path(name))[-1] >= written[-1], f"after {count} operations"
                    continue
                finally:
                    _until_crash[0] = 0
            break
    assert 20 < count < 999
