"""Weights reach files and buckets as they are, and everything is read to its end."""

import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from fsdptrain.vllm.server.client import ServerGoneError
from fsdptrain.vllm.server.push import Deadline, GroupPush
from fsdptrain.vllm.server.weight_files import WeightFolder, folder_name
from fsdptrain.vllm.worker.weight_group import bucket_size, pack_bucket, spec_of, unpack_bucket
from tests.unit.rollout.scripted_server import ScriptedServer

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int8)
shapes = st.lists(st.integers(0, 5), max_size=3)
tensors = st.lists(st.tuples(shapes, st.sampled_from(DTYPES)), min_size=1, max_size=8)


def make(kinds: list) -> dict[str, torch.Tensor]:
    return {f"t{i}": (torch.rand(shape) * 100 - 50).to(dtype) for i, (shape, dtype) in enumerate(kinds)}


@given(tensors)
def test_a_bucket_brings_every_tensor_bit_by_bit(kinds):
    weights = make(kinds)
    weights |= {f"{name}.t": tensor.mT for name, tensor in weights.items() if tensor.ndim > 1}  # not contiguous
    specs = [spec_of(name, tensor) for name, tensor in weights.items()]
    bucket = pack_bucket(list(weights.values()), torch.device("cpu"))
    assert bucket.nbytes == bucket_size(specs)
    found = dict(unpack_bucket(bucket, specs))
    assert list(found) == list(weights)
    assert all(
        torch.equal(found[name], tensor) and found[name].dtype == tensor.dtype for name, tensor in weights.items()
    )


@given(tensors, st.integers(1, 400))
def test_files_hold_every_tensor_once_and_are_no_larger_than_asked(tmp_path_factory, kinds, limit):
    weights, folder = make(kinds), tmp_path_factory.mktemp("weights") / "here"
    files = WeightFolder(folder, max_file_bytes=limit).write(weights.items())
    parts = [load_file(path) for path in files]
    assert sorted(name for part in parts for name in part) == sorted(weights)
    for part in parts:
        assert all(torch.equal(tensor, weights[name]) for name, tensor in part.items())
        assert len(part) == 1 or sum(tensor.nbytes for tensor in part.values()) <= limit
    shutil.rmtree(folder)


def test_a_new_version_takes_the_place_of_the_one_before(tmp_path):
    folder = WeightFolder(tmp_path / "here", max_file_bytes=100)
    [first] = folder.write({"a": torch.ones(2)}.items())
    [second] = folder.write({"a": torch.zeros(2)}.items())
    assert not first.exists()
    assert load_file(second)["a"].eq(0).all()
    folder.delete()
    assert not (tmp_path / "here").exists()


def test_a_full_disk_is_told_after_everything_was_gathered(tmp_path):
    """Other ranks are gathering with this one: it must not leave them alone."""
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


def test_a_server_that_dies_on_its_way_to_the_group_is_not_waited_for():
    server = ScriptedServer()
    server.breaks_off.add("/init_weight_transfer_engine")
    start = time.monotonic()
    with pytest.raises(ServerGoneError, match="broke off POST /init_weight_transfer_engine"):
        GroupPush("gloo", 60.0).send(server.client, [], Deadline(60.0))
    assert time.monotonic() - start < 20


def test_runs_have_folders_of_their_own():
    assert folder_name(Path("runs/a")) == folder_name(Path("runs/../runs/a"))
    assert folder_name(Path("runs/a")) != folder_name(Path("runs/b"))
