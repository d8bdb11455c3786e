"""Weights reach files and workers bit by bit, and a group of workers without waiting for dead ones."""

import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from fsdptrain.vllm.server.client import Deadline, ServerGoneError, ServerRefusedError
from fsdptrain.vllm.server.push import send_files
from fsdptrain.vllm.server.weight_files import WeightFolder, folder_name
from fsdptrain.vllm.worker.weight_group import tensors_of
from tests.event_loop import run_in_loop
from tests.unit.vllm.scripted_server import ScriptedServer

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int8)
shapes = st.lists(st.integers(0, 5), max_size=3)
tensors = st.lists(st.tuples(shapes, st.sampled_from(DTYPES)), min_size=1, max_size=8)


def make(kinds: list) -> dict[str, torch.Tensor]:
    return {f"t{i}": (torch.rand(shape) * 100 - 50).to(dtype) for i, (shape, dtype) in enumerate(kinds)}


@given(tensors)
def test_the_bytes_of_a_file_hold_every_tensor(tmp_path_factory, kinds):
    weights, path = make(kinds), tmp_path_factory.mktemp("weights") / "file"
    save_file(weights, path, metadata={"format": "pt"})
    found = dict(tensors_of(torch.from_numpy(np.fromfile(path, np.uint8))))
    assert found.keys() == weights.keys()
    assert all(torch.equal(found[name], t) and found[name].dtype == t.dtype for name, t in weights.items())


@given(tensors, st.integers(1, 400))
def test_files_have_every_tensor_of_the_newest_version_once(tmp_path_factory, kinds, limit):
    path = tmp_path_factory.mktemp("weights") / "here"
    folder = WeightFolder(path, max_file_bytes=limit)
    folder.write({"old": torch.ones(50)}.items())
    weights = make(kinds)
    files = folder.write(weights.items())
    assert sorted(path.iterdir()) == files
    parts = [load_file(file) for file in files]
    assert sorted(name for part in parts for name in part) == sorted(weights)
    for part in parts:
        assert all(torch.equal(tensor, weights[name]) for name, tensor in part.items())
        assert len(part) == 1 or sum(tensor.nbytes for tensor in part.values()) <= limit
    folder.delete()
    assert not path.exists()


def test_a_full_disk_is_reported_after_all_weights_were_gathered(tmp_path):
    """Iterating is collective: the other ranks must not wait for this one."""
    read = []

    def weights() -> Iterator[tuple[str, torch.Tensor]]:
        for i in range(5):
            read.append(i)
            yield f"t{i}", torch.ones(100)

    folder = WeightFolder(tmp_path / "here", max_file_bytes=400)
    shutil.rmtree(tmp_path / "here")
    with pytest.raises(OSError, match="here"):
        folder.write(weights())
    assert read == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("fault", ["dies", "refuses"])
def test_a_server_that_does_not_join_the_group_is_not_waited_for(fault):
    server, path = ScriptedServer(), "/collective_rpc"
    if fault == "dies":
        server.breaks_off.add(path)
    else:
        server.refuses[path] = "no such engine"
    start = time.monotonic()
    with pytest.raises(ServerGoneError if fault == "dies" else ServerRefusedError, match=f"POST {path}"):
        run_in_loop(send_files(server.client, [], Deadline(60.0), "gloo"))
    assert time.monotonic() - start < 20


def test_runs_have_folders_of_their_own():
    assert folder_name(Path("runs/a")) == folder_name(Path("runs/../runs/a"))
    assert folder_name(Path("runs/a")) != folder_name(Path("runs/b"))
