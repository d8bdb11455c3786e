"""safetensors reads the files that are planned from shapes and written in pieces."""

import json
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from fsdptrain.fsdp.hub_files import INDEX, HubWriter, plan_files, share_out, write_index

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool]
SHAPES = st.lists(st.integers(0, 7), max_size=3).map(tuple)
UNITS = st.lists(st.lists(st.tuples(SHAPES, st.sampled_from(DTYPES)), min_size=1, max_size=4), min_size=1, max_size=6)


@settings(max_examples=60, deadline=None)
@given(units=UNITS, num_writers=st.integers(1, 4), max_bytes=st.integers(1, 2000))
def test_what_several_writers_write_is_read_back_bitwise(units, num_writers, max_bytes):
    generator = torch.Generator().manual_seed(0)
    made = [
        {f"{i}.{k}": (255 * torch.rand(shape, generator=generator)).to(dtype) for k, (shape, dtype) in enumerate(unit)}
        for i, unit in enumerate(units)
    ]
    writers = share_out(made, num_writers)
    assert writers == sorted(writers)
    assert set(writers) <= set(range(num_writers))
    files = plan_files([{n: t.to("meta") for n, t in unit.items()} for unit in made], writers, max_bytes=max_bytes)
    for file in files:
        assert len(file.tensors) == 1 or file.num_bytes <= max_bytes
        for name, offset in file.offsets.items():
            assert (len(file.header) + offset) % file.tensors[name].element_size() == 0
    with TemporaryDirectory() as folder:
        for rank in range(num_writers):
            writer = HubWriter(Path(folder), [file for file in files if file.writer == rank])
            for unit in (unit for unit, owner in zip(made, writers, strict=True) if owner == rank):
                writer.write(unit)
            writer.finish()
        write_index(Path(folder), files)
        found = {}
        for file in files:
            with safe_open(Path(folder) / file.name, framework="pt") as opened:
                found |= {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 - not a mapping
        whole = {name: tensor for unit in made for name, tensor in unit.items()}
        assert found.keys() == whole.keys()
        assert all(found[name].dtype == t.dtype and torch.equal(found[name], t) for name, t in whole.items())
        if len(files) > 1:
            index = json.loads((Path(folder) / INDEX).read_text())
            assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in whole.values())
            assert index["weight_map"] == {name: file.name for file in files for name in sorted(file.tensors)}
