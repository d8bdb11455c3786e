"""During an export to an engine no rank holds a whole layer of experts."""

from functools import partial

import torch

from fsdptrain.fsdp.stream import stream_weights
from tests import zoo
from tests.tensors import load_files
from tests.testing import spawn

from .sharded import load_sharded
from .storages import Storages

EXPERTS, WIDTH, INSIDE = 32, 256, 128
LAYER = 3 * EXPERTS * WIDTH * INSIDE * 4  # bytes of float32: gate, up and down of one layer
WHOLE = 1 << 40


def streamed(source: str, slice_bytes: int) -> tuple[int, bool]:
    """(most bytes that tensors held beside the shards, while nobody keeps what comes; all is as in the files)"""
    model, expected = load_sharded(source), load_files(source)
    stream = partial(stream_weights, model, dtype=torch.float32, naming="hub", slice_bytes=slice_bytes)
    with Storages() as storages:
        for _ in stream():
            pass
    found = {name: torch.equal(tensor, expected[name]) for name, tensor in stream()}
    return storages.peak, all(found.values()) and found.keys() == expected.keys()


def both(source: str) -> list[tuple[int, bool]]:
    return [streamed(source, size) for size in (LAYER // EXPERTS, WHOLE)]


def test_experts_are_gathered_and_taken_apart_some_at_a_time(tmp_path):
    changes = {"hidden_size": WIDTH, "moe_intermediate_size": INSIDE, "num_experts": EXPERTS, "num_hidden_layers": 2}
    zoo.build("qwen3_moe", **changes).save_pretrained(tmp_path)
    for (some, is_right), (whole, too) in spawn(2, both, str(tmp_path)):
        assert (is_right, too) == (True, True)
        assert whole > LAYER, "the instrument sees a layer"
        assert some < LAYER / 4
