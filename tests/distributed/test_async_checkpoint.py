"""A checkpoint written in the background equals one written at once, or does not exist."""

import json
import os
import sys
import threading
from concurrent.futures import Future
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from fsdptrain.checkpoints import newest_checkpoint
from fsdptrain.errors import CheckpointError
from fsdptrain.fsdp.checkpoint import load_checkpoint, save_checkpoint
from fsdptrain.fsdp.checkpoint_folder import CheckpointFolder
from fsdptrain.fsdp.shard_files import HostStager
from fsdptrain.fsdp.shards import local_shard
from tests.testing import spawn, wait_until

from .sharded import train
from .test_fsdp_checkpoint import build

FIRST_SHARDS = "shards/shard-"


class Watch:
    """What the background thread of this rank does to files; it can be held, made to fail, or killed there."""

    def __init__(self, at: str = "\0") -> None:
        self.may_go_on = threading.Event()
        self.was_there = threading.Event()
        self._at = at
        self.act = lambda: None
        sys.addaudithook(self._audit)

    def _audit(self, event: str, args: tuple) -> None:
        if (
            threading.current_thread().name.startswith("AsyncCheckpoint")
            and event == "open"
            and self._at in str(args[0])
        ):
            self.was_there.set()
            self.act()

    def hold(self) -> None:
        assert self.may_go_on.wait(60)


def saver(model, optimizer, step, stager=None):
    """What a backend does for `CheckpointFolder.write`."""
    return partial(save_checkpoint, model=model, optimizer=optimizer, step=step, stager=stager)


def write_both_ways(directory: str):
    """At once, and in a thread that is held until three more steps have changed all that it writes."""
    model, optimizer = build()
    stager = HostStager(60)
    at_once, later = (CheckpointFolder(Path(directory) / name, keep_last=2) for name in ("at-once", "later"))
    watch = Watch(FIRST_SHARDS)
    found = []
    for step in (3, 6):  # the second time into the same host memory
        train(model, optimizer, range(step - 3, step))
        at_once.write(step, saver(model, optimizer, step))
        watch.may_go_on.clear()
        watch.was_there.clear()
        watch.act = watch.hold
        later.write(step, saver(model, optimizer, step, stager))
        assert watch.was_there.wait(60)
        before = [local_shard(p).clone() for p in model.parameters()]
        train(model, optimizer, range(step, step + 3))
        changed = any(not torch.equal(a, local_shard(b)) for a, b in zip(before, model.parameters(), strict=True))
        later.check()
        newest = newest_checkpoint(later.directory.parent)
        watch.may_go_on.set()
        wait_until(lambda step=step: (later.directory / f"step_{step:08d}").exists())  # while a step is computed
        later.wait()
        found.append((changed, newest.name if newest else None, newest_checkpoint(later.directory.parent).name))
    return found


def test_its_bytes_are_those_of_one_that_is_written_at_once(tmp_path):
    for found in spawn(2, write_both_ways, str(tmp_path)):
        assert found == [(True, None, "step_00000003"), (True, "step_00000003", "step_00000006")]
    at_once, later = (files_of(tmp_path / name / "checkpoints") for name in ("at-once", "later"))
    assert at_once.keys() == later.keys()
    assert {name for name in at_once if at_once[name] != later[name]} == set()


def files_of(folder: Path) -> dict[str, object]:
    return {str(path.relative_to(folder)): content(path) for path in folder.rglob("*") if path.is_file()}


def content(path: Path) -> object:
    """Its bytes; of safetensors the header as JSON, since the order of the metadata there is another each time."""
    found = path.read_bytes()
    if path.suffix != ".safetensors":
        return found
    end = 8 + int.from_bytes(found[:8], "little")
    return json.loads(found[8:end]), found[end:]


def train_on(model, optimizer, folder, save, steps):
    with folder:
        folder.write(2, save)
        for seed in range(1000):
            steps.append(train(model, optimizer, [seed]))
            folder.check()


def fail_in_the_background(directory: str, failing_rank: int):
    model, optimizer = build()
    folder, stager = CheckpointFolder(Path(directory), keep_last=1), HostStager(60)
    folder.write(1, saver(model, optimizer, 1, stager=stager))
    folder.wait()
    if dist.get_rank() == failing_rank:
        watch = Watch(FIRST_SHARDS)

        def fail():
            raise OSError(28, "No space left on device")

        watch.act = fail
    with pytest.raises(CheckpointError) as caught:
        train_on(model, optimizer, folder, saver(model, optimizer, 2, stager=stager), steps := [])
    newest = newest_checkpoint(folder.directory.parent)
    return len(steps), str(caught.value), newest.name, load_checkpoint(newest, model, optimizer)


@pytest.mark.parametrize("failing_rank", [0, 1])
def test_a_failure_in_the_background_stops_all_ranks_at_the_same_step(tmp_path, failing_rank):
    first, second = spawn(2, fail_in_the_background, str(tmp_path), failing_rank)
    assert first == second
    step, message, latest, loaded = first
    assert step < 1000
    assert "--output-dir" in message
    assert "No space left on device" in message
    assert "\n" not in message
    assert (latest, loaded) == ("step_00000001", 1)


def fail_in_the_loop(directory: str):
    model, optimizer = build()
    folder, stager = CheckpointFolder(Path(directory), keep_last=2), HostStager(60)
    with pytest.raises(ValueError, match="of the loop"), folder:
        folder.write(1, saver(model, optimizer, 1, stager=stager))
        raise ValueError("of the loop")
    dist.barrier()
    return os.listdir(folder.directory)


def test_an_error_of_the_loop_waits_for_what_is_being_written(tmp_path):
    assert spawn(2, fail_in_the_loop, str(tmp_path)) == [["step_00000001"]] * 2


def never_ready(directory: str):
    folder = CheckpointFolder(Path(directory), keep_last=2, timeout_s=0.2)
    folder.write(1, lambda _: Future())
    with pytest.raises(CheckpointError) as caught:
        folder.wait()
    return str(caught.value)


def test_waiting_has_a_deadline(tmp_path):
    for message in spawn(2, never_ready, str(tmp_path)):
        assert "--async-save" in message
        assert "--dist-timeout" in message
