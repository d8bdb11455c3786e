"""Weights reach servers by a file bit by bit."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fsdptrain import platform
from fsdptrain.vllm import weight_file
from fsdptrain.vllm.weight_file import WeightFile, folder_name, read

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int8)
shapes = st.lists(st.integers(0, 5), max_size=3)
tensors = st.lists(st.tuples(shapes, st.sampled_from(DTYPES)), min_size=1, max_size=8)


@given(tensors, st.integers(8, 400))
def test_the_file_has_every_tensor_of_the_newest_version(tmp_path_factory, kinds, buffer_bytes):
    path = tmp_path_factory.mktemp("weights") / "here"
    file = WeightFile(path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(weight_file, "_BUFFER_BYTES", buffer_bytes)
        old = dict(read(**file.write({"old": torch.ones(50)}.items())))
        weights = {f"t{i}": (torch.rand(shape) * 100 - 50).to(dtype) for i, (shape, dtype) in enumerate(kinds)}
        found = dict(read(**json.loads(json.dumps(file.write(weights.items())))))
    assert found.keys() == weights.keys()
    assert all(torch.equal(found[name], t) and found[name].dtype == t.dtype for name, t in weights.items())
    assert torch.equal(old["old"], torch.ones(50)), "a server that still reads the old file reads the old weights"
    file.delete()
    assert not path.exists()


@pytest.mark.gpu
@pytest.mark.skipif(not platform.has_accelerator(), reason="needs a GPU")
def test_weights_on_a_device_are_written_with_one_wait_per_buffer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = {f"t{i}": torch.rand(1000, device=platform.local_device()) for i in range(10)}
    wait, waits = torch.accelerator.synchronize, []
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda: waits.append(1) or wait())
    monkeypatch.setattr(weight_file, "_BUFFER_BYTES", 8000)
    found = dict(read(**WeightFile(tmp_path / "here").write(weights.items())))
    assert len(waits) == 5
    assert all(torch.equal(found[name], tensor.cpu()) for name, tensor in weights.items())


def test_a_full_disk_is_reported_after_all_weights_were_gathered(tmp_path):
    """Iterating is collective: the other ranks must not wait for this one."""
    gathered = []

    def weights() -> Iterator[tuple[str, torch.Tensor]]:
        for i in range(5):
            gathered.append(i)
            yield f"t{i}", torch.ones(100)

    file = WeightFile(tmp_path / "here")
    shutil.rmtree(tmp_path / "here")
    with pytest.raises(OSError, match="here"):
        file.write(weights())
    assert gathered == [0, 1, 2, 3, 4]


def test_runs_have_folders_of_their_own():
    assert folder_name(Path("runs/a")) == folder_name(Path("runs/../runs/a"))
    assert folder_name(Path("runs/a")) != folder_name(Path("runs/b"))
