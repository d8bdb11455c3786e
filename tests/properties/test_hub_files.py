"""safetensors and transformers read the files that are written tensor by tensor."""

import json
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from fsdptrain.fsdp.hub_files import INDEX, HubWriter

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool]
SHAPES = st.lists(st.integers(0, 7), max_size=3).map(tuple)
TENSORS = st.lists(st.tuples(SHAPES, st.sampled_from(DTYPES), st.booleans()), min_size=1, max_size=12)


@settings(max_examples=60, deadline=None)
@given(tensors=TENSORS, max_bytes=st.integers(1, 2000))
def test_what_is_written_is_read_back_bitwise(tensors, max_bytes):
    generator = torch.Generator().manual_seed(0)
    whole = {}
    for i, (shape, dtype, is_view) in enumerate(tensors):
        made = (255 * torch.rand(shape, generator=generator)).to(dtype)
        whole[f"t.{i}"] = made.T if is_view and made.dim() == 2 else made
    with TemporaryDirectory() as name:
        folder = Path(name)
        writer = HubWriter(folder, max_bytes=max_bytes)
        for key, tensor in whole.items():
            writer.add(key, tensor)
        writer.finish()
        files = {path.name: load_file(path) for path in folder.glob("*.safetensors")}
        for held in files.values():
            assert len(held) == 1 or sum(tensor.nbytes for tensor in held.values()) <= max_bytes
        found = {key: tensor for held in files.values() for key, tensor in held.items()}
        assert found.keys() == whole.keys()
        assert all(found[key].dtype == t.dtype and torch.equal(found[key], t) for key, t in whole.items())
        assert not list(folder.glob(".*"))
        if len(files) == 1:
            assert list(files) == ["model.safetensors"]
            return
        index = json.loads((folder / INDEX).read_text())
        assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in whole.values())
        assert index["weight_map"] == {key: file for file, held in files.items() for key in held}
