"""Checkpoints on real ranks: bitwise, whole at any moment, readable on other numbers of ranks, refused when broken."""

import json
import os
import random
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from fsdptrain.checkpoints import newest_checkpoint
from fsdptrain.config import OptimConfig
from fsdptrain.errors import CheckpointError
from fsdptrain.fsdp.checkpoint import load_checkpoint, save_checkpoint
from fsdptrain.fsdp.checkpoint_folder import CheckpointFolder
from fsdptrain.fsdp.optimizer import Optimizer
from fsdptrain.fsdp.optimizer_state import state_tensors
from tests import zoo
from tests.tensors import same
from tests.testing import spawn

from .sharded import full, full_state, load_sharded, sharded_qwen3, train

CONFIG = OptimConfig(lr=1e-2, lr_decay_style="cosine", weight_decay=0.1)


def build(family="", **options):
    model = load_sharded(family) if family else sharded_qwen3(**options)
    return model, Optimizer(model, CONFIG, total_steps=10, fp16=options.get("fp16", False))


def draw():
    """One number of each random stream."""
    numpy = [float(np.random.rand()), float(np.random.randn())]
    return [torch.rand(()).item(), random.random(), random.gauss(0, 1), *numpy]


def seed_all(seed):
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


def everything(model, optimizer):
    return full_state(model) | {f"optimizer.{name}": full(t) for name, t in state_tensors(optimizer).items()}


def save_and_go_on(directory: str, options: dict):
    model, optimizer = build(**options)
    train(model, optimizer, range(3))
    seed_all(100 + dist.get_rank())
    draw()
    written = CheckpointFolder(Path(directory), keep_last=2).write(
        3, lambda folder: save_checkpoint(folder, model, optimizer, step=3)
    )
    saved = everything(model, optimizer)
    draws = [draw() for _ in range(3)]
    norms = train(model, optimizer, range(3, 6))
    return str(written), saved, draws, norms, everything(model, optimizer)


def load_and_go_on(directory: str, options: dict):
    model, optimizer = build(seed=9, **options)
    train(model, optimizer, range(20, 21))  # another past, to be forgotten
    seed_all(7)
    latest = newest_checkpoint(Path(directory))
    assert load_checkpoint(latest, model, optimizer) == 3
    loaded = everything(model, optimizer)
    draws = [draw() for _ in range(3)]
    norms = train(model, optimizer, range(3, 6))
    return str(latest), loaded, draws, norms, everything(model, optimizer)


def test_a_resumed_run_is_bitwise_the_uninterrupted_one_with_its_random_numbers(tmp_path):
    world, options = 2, {"cpu_offload": True}
    before = spawn(world, save_and_go_on, str(tmp_path), options)
    after = spawn(world, load_and_go_on, str(tmp_path), options)
    for one, other in zip(before, after, strict=True):
        assert one[0] == other[0]
        assert same(one[1], other[1])
        assert one[2:4] == other[2:4]
        assert same(one[4], other[4])
    assert len({str(result[2]) for result in before}) == world  # each rank has a random stream of its own


@pytest.mark.parametrize(
    ("num_ranks", "others", "options"),
    [(2, 4, {"num_key_value_heads": 1, "head_dim": 2}), (4, 2, {"family": "qwen3_moe"})],
)
def test_it_loads_on_another_number_of_ranks(tmp_path, num_ranks, others, options):
    """Bitwise. With 4 ranks some own no row of small tensors, and six experts are cut along their last dim."""
    if "family" in options:
        zoo.build(options["family"]).save_pretrained(tmp_path / "model")
        options = {"family": str(tmp_path / "model")}
    before = spawn(num_ranks, save_and_go_on, str(tmp_path), options)
    after = spawn(others, load_and_go_on, str(tmp_path), options)
    assert same(before[0][1], after[0][1])
    assert before[0][3] == pytest.approx(after[0][3], rel=1e-4)


def fail_while_writing(directory: str, failing_rank: int):
    model, optimizer = build()
    folder = CheckpointFolder(Path(directory), keep_last=1)
    folder.write(1, lambda path: save_checkpoint(path, model, optimizer, step=1))

    def save(path):
        save_checkpoint(path, model, optimizer, step=2)
        if dist.get_rank() == failing_rank:
            raise OSError("no space left on device")

    with pytest.raises(CheckpointError) as caught:
        folder.write(2, save)
    latest = newest_checkpoint(folder.directory.parent)
    return str(caught.value), latest.name, load_checkpoint(latest, model, optimizer)


def test_a_failure_on_one_rank_is_an_error_of_all_and_leaves_the_last_one_whole(tmp_path):
    for message, latest, step in spawn(2, fail_while_writing, str(tmp_path), 1):
        assert "--output-dir" in message
        assert "no space left on device" in message
        assert (latest, step) == ("step_00000001", 1)


def interrupt_while_writing(directory: str):
    """Ctrl-C while torch.distributed.checkpoint makes the folder of the shards, which catches every exception."""

    def audit(event, args):
        if event == "os.mkdir" and str(args[0]).endswith("shards"):
            raise KeyboardInterrupt

    model, optimizer = build()
    folder = CheckpointFolder(Path(directory), keep_last=1)
    sys.addaudithook(audit)
    with pytest.raises(KeyboardInterrupt):
        folder.write(1, lambda path: save_checkpoint(path, model, optimizer, step=1))
    return newest_checkpoint(folder.directory.parent)


def test_an_interrupt_while_writing_is_an_interrupt(tmp_path):
    assert spawn(1, interrupt_while_writing, str(tmp_path)) == [None]


def overwrite(path: Path, byte: bytes) -> None:
    """With another content of the same size."""
    path.write_bytes(byte * path.stat().st_size)


def forge_step(folder: Path) -> None:
    path = folder / "trainer.json"
    path.write_text(path.read_text().replace('"step": 3', '"stop": 3'))


def last_shard(folder: Path) -> Path:
    return max((folder / "shards").iterdir())


DAMAGES: dict[str, Callable[[Path], object]] = {
    "cut shard": lambda folder: os.truncate(last_shard(folder), last_shard(folder).stat().st_size - 1),
    "lost shard": lambda folder: last_shard(folder).unlink(),
    "garbled shard": lambda folder: overwrite(last_shard(folder), b"\0"),
    "garbled random state": lambda folder: overwrite(folder / "rng-00001.json", b"\xff"),
    "garbled state": lambda folder: overwrite(folder / "trainer.json", b"{"),
    "forged step": forge_step,
    "lost manifest": lambda folder: (folder / "manifest.json").unlink(),
    "deep manifest": lambda folder: (folder / "manifest.json").write_text("[" * 9000),
    "lost folder": shutil.rmtree,
}


def refusals(folders: list[str], options: dict):
    model, optimizer = build(**options)
    messages = []
    for folder in folders:
        with pytest.raises(CheckpointError) as caught:
            load_checkpoint(Path(folder), model, optimizer)
        messages.append(str(caught.value))
    return messages


def test_a_broken_checkpoint_is_one_line_on_every_rank(tmp_path):
    whole = spawn(2, save_and_go_on, str(tmp_path), {})[0][0]
    folders = []
    for name, damage in DAMAGES.items():
        folder = shutil.copytree(whole, tmp_path / name)
        damage(folder)
        folders.append(str(folder))
    for messages in spawn(2, refusals, folders, {}):
        for folder, message in zip(folders, messages, strict=True):
            assert folder in message
            assert "--resume" in message
            assert "\n" not in message


def test_another_model_is_refused_with_both_names_and_no_file_is_a_pickle(tmp_path):
    folder = spawn(1, save_and_go_on, str(tmp_path), {})[0][0]
    [[message]] = spawn(1, refusals, [folder], {"hidden_size": 32})
    assert "of another model" in message
    assert message.count("Qwen3ForCausalLM") == 2
    files = [path for path in Path(folder).rglob("*") if path.is_file()]
    assert {path.suffix for path in files} == {".json", ".safetensors"}
    assert len(json.loads((Path(folder) / "manifest.json").read_text())) == len(files) - 1
