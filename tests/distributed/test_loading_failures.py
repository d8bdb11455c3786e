"""A checkpoint that cannot be loaded is one error, the same on all ranks, also where only one of them finds it."""

import json
import os
import shutil
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from fsdptrain.errors import CheckpointError, FsdptrainError
from fsdptrain.model.loading import hub
from fsdptrain.model.loading.files import resolve_checkpoint
from fsdptrain.model.loading.meta import build_meta_model, load_weights
from tests import zoo
from tests.testing import save_tiny_checkpoint, spawn

from .sharded import load_sharded

INDEX = "model.safetensors.index.json"


def _corrupt(path: Path) -> None:
    first = min(path.glob("*.safetensors"))
    first.write_bytes(first.read_bytes()[:1000])


def _point_outside(path: Path) -> None:
    weights = next(path.glob("*.safetensors")).rename(path.parent / "outside.safetensors")
    (path / INDEX).write_text(json.dumps({"weight_map": {"a": f"../{weights.name}"}}))


def _edited(edit: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], None]:
    """Writes all weights of a folder into one file, after `edit`."""

    def change(path: Path) -> None:
        weights = {}
        for file in path.glob("*.safetensors"):
            weights |= load_file(file)
            file.unlink()
        (path / INDEX).unlink()
        edit(weights)
        save_file(weights, path / "model.safetensors", metadata={"format": "pt"})

    return change


HEAD, NORM = {"lm_head.weight": torch.ones(zoo.VOCAB_SIZE, zoo.HIDDEN)}, {"model.norm.weight": torch.ones(3)}
BREAKAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "corrupt": (_corrupt, "model-00001-of-00002.safetensors is broken"),
    "lost file": (lambda path: min(path.glob("*.safetensors")).unlink(), "lacks model-00001-of-"),
    "broken index": (lambda path: (path / INDEX).write_text("{"), "model.safetensors.index.json is broken"),
    "index that names a file outside": (_point_outside, "names ../outside.safetensors, outside this folder"),
    "lost weight": (_edited(lambda w: w.pop("model.norm.weight")), "lack model.norm.weight"),
    "one weight too many": (_edited(lambda w: w.update(stowaway=torch.ones(3))), "hold stowaway"),
    "two tied weights that differ": (_edited(lambda w: w.update(HEAD)), "ties lm_head.weight to model.embed_tokens"),
    "another shape": (_edited(lambda w: w.update(NORM)), "of another shape than config"),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("broken")
    zoo.build("qwen2").save_pretrained(root / "good", max_shard_size="200KB")
    for name, (breakage, _) in BREAKAGES.items():
        shutil.copytree(root / "good", root / name)
        breakage(root / name)
    return root


@pytest.mark.parametrize("whole", [False, True])
def test_every_rank_gets_the_same_error(whole: bool, folders: Path):
    first, second = spawn(2, _errors, folders, list(BREAKAGES), whole)
    assert first == second
    for name, (_, words) in BREAKAGES.items():
        kind, message = first[name]
        assert (kind, words in message, "\n" in message) == ("CheckpointError", True, False), message
        assert "--hf-checkpoint" in message


def test_one_rank_with_a_broken_disk_stops_all(folders: Path):
    """Rank 1 alone reads the broken folder. The last load, of the good one, shows that the ranks are still in step."""
    names = ["corrupt", "lost file", "lost weight"]
    first, second = spawn(2, _errors, folders, [*names, "good"], False, 1)
    assert first == second
    assert [first[name][0] for name in names] == ["CheckpointError"] * len(names)
    assert "(rank 1 of 2)" in first["corrupt"][1]
    assert "good" not in first


def test_buffers_in_another_order_or_dtype_stop_all_ranks_together(folders: Path):
    """A defect of slime's backend: a broadcast in the order of each rank's own buffers deadlocks, or mixes them up."""
    for messages in spawn(2, _errors_of_changed_buffers, folders / "good"):
        assert all("is not the same on all ranks" in message for message in messages), messages


def test_code_of_a_checkpoint_runs_only_when_asked_for(folders: Path, tmp_path: Path):
    shutil.copytree(folders / "good", tmp_path / "custom")
    ran = tmp_path / "ran"
    (tmp_path / "custom" / "own.py").write_text(f"open({str(ran)!r}, 'w')\nclass Own: pass\n")
    _edit_config(tmp_path / "custom", model_type="own", auto_map={"AutoConfig": "own.Own"})
    with pytest.raises(CheckpointError, match="--trust-remote-code"):
        build_meta_model(tmp_path / "custom", trust_remote_code=False, attn_implementation="eager")
    assert not ran.exists()
    _edit_config(tmp_path / "custom", model_type="qwen2")  # transformers has its own code for it
    build_meta_model(tmp_path / "custom", trust_remote_code=False, attn_implementation="eager")
    assert not ran.exists()


def _errors(root: Path, names: list[str], whole: bool, broken: int | None = None) -> dict[str, tuple[str, str]]:
    """`broken`: the rank that reads the folder; the others read the good one."""
    errors = {}
    for name in names:
        read = name if broken in (None, dist.get_rank()) else "good"
        try:
            load_sharded(root / "good", weights=root / read, whole=whole)
        except FsdptrainError as error:
            errors[name] = (type(error).__name__, str(error))
    return errors


def _errors_of_changed_buffers(path: Path) -> list[str]:
    found = []
    for change in (lambda items: dict(reversed(items)), lambda items: {name: x.half() for name, x in items}):
        model = build_meta_model(path, trust_remote_code=False, attn_implementation="eager")
        owner = model.model.rotary_emb
        buffers = change(owner._buffers.items())
        assert len(buffers) > 1
        if dist.get_rank() == 1:
            owner._buffers.clear()
            owner._buffers.update(buffers)
        try:
            load_weights(model, path)
            found.append("")
        except FsdptrainError as error:
            found.append(str(error))
    return found


def _edit_config(path: Path, **changes: object) -> None:
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | changes))


def _slow_hub(folder: Path, store: Path, fails: bool) -> str:
    """Download with a rank, in 4 s, where no rank may wait longer than 2 s for another."""

    def download(*_: object, local_files_only: bool, **__: object) -> str:
        if not local_files_only:
            time.sleep(4.0)
            if fails:
                raise OSError("no such thing")
        return str(folder)

    dist.destroy_process_group()
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    method = f"file://{store}"
    dist.init_process_group("gloo", method, timedelta(seconds=2), rank=rank, world_size=world_size)
    hub.snapshot_download = download
    try:
        return str(resolve_checkpoint("mine/model"))
    except CheckpointError as error:
        return str(error)


@pytest.mark.slow
@pytest.mark.parametrize("fails", [False, True])
def test_a_download_may_take_longer_than_ranks_wait_for_each_other(tmp_path: Path, fails: bool) -> None:
    folder = save_tiny_checkpoint(tmp_path / "model")
    [first, second] = spawn(2, _slow_hub, folder, tmp_path / "store", fails)
    assert first == second
    wanted = "cannot be downloaded from the hub: OSError: no such thing (rank 0 of 2)" if fails else str(folder)
    assert wanted in first if fails else first == wanted
