"""The trace counts the activations of the real model, without weights and without allocating any."""

from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_leaves
from transformers import DynamicCache

from fsdptrain.model.attention.attention import SEGMENTS, register_attention
from fsdptrain.tools.plan.trace import MemoryTracker, TraceSpec, cache_bytes, interleave, trace
from tests import zoo
from tests.matrix import only

register_attention()


def spec(*seqlens: int, layout: str = "packed", dtype: torch.dtype = torch.float32, **options: Any):
    return TraceSpec(seqlens, layout, SEGMENTS, dtype, chunk_size=64, **{"checkpointing": None, **options})  # pyright: ignore


def test_the_tracker_counts_live_bytes():
    with MemoryTracker() as tracker:
        kept = torch.zeros(1000)
        more = torch.ones(500) + 1.0
        view = more[:10]
        assert tracker.live == 4 * 1500
        del more
        assert tracker.live == 4 * 1500  # the view holds it
        del view
        assert tracker.live == kept.nbytes
        assert tracker.take_peak() == 4 * 2000
        assert tracker.take_peak() == kept.nbytes


@pytest.mark.parametrize("name", only(["gemma2"], ["llama", "gemma2", "gpt_oss", "deepseek_v3", "gpt2"]))
def test_saved_bytes_are_linear_in_the_number_of_sequences(name: str):
    one, two, four = (trace(zoo.config(name), spec(*[32] * count)) for count in (1, 2, 4))
    for few, twice, most in zip(one.layers, two.layers, four.layers, strict=True):
        # Up to what does not depend on the length: offsets of experts, scalars.
        assert most.saved - twice.saved == pytest.approx(2 * (twice.saved - few.saved), rel=0.02)
        assert most.saved > twice.saved > few.saved > 0


@pytest.mark.parametrize("name", only(["qwen3", "qwen3_next"], ["qwen3", "gpt_oss", "qwen3_next", "deepseek_v3"]))
def test_a_checkpointed_layer_saves_its_input_only(name: str):
    layout = "padded" if name == "qwen3_next" else "packed"
    kept = trace(zoo.config(name), spec(64, 64, checkpointing="full", layout=layout))
    whole = trace(zoo.config(name), spec(64, 64, layout=layout))
    for few, most in zip(kept.layers, whole.layers, strict=True):
        assert few.saved == few.input_bytes == 4 * 128 * zoo.HIDDEN
        assert few.saved < most.saved
        assert few.backward_peak > most.backward_peak


@pytest.mark.parametrize("name", only(["qwen3"], ["qwen3", "gemma3", "deepseek_v3", "qwen3_moe"]))
def test_offloaded_activations_are_on_the_host_only(name: str):
    config = zoo.config(name)
    full, moved = (trace(config, spec(64, 64, checkpointing="full", offload=on)) for on in (False, True))
    for layer, away in zip(full.layers, moved.layers, strict=True):
        assert (layer.on_host, away.on_host) == (0, layer.input_bytes)
        assert away.saved == layer.saved - layer.input_bytes == 0
    assert moved.before == full.before
    kept, all_moved = (trace(config, spec(64, 64, offload=on)) for on in (False, True))
    for layer, away in zip(kept.layers, all_moved.layers, strict=True):
        assert away.saved + away.on_host == pytest.approx(layer.saved, rel=0.05)
        assert away.on_host > 0.9 * layer.saved


@pytest.mark.parametrize("name", only(["qwen3_moe"], ["qwen3", "qwen3_moe", "deepseek_v3"]))
def test_selective_checkpointing_saves_more_than_full_and_less_than_none(name: str):
    kinds = (None, "selective", "full")
    most, some, few = (trace(zoo.config(name), spec(64, 64, checkpointing=kind)) for kind in kinds)
    for all_of_it, dear, inputs in zip(most.layers, some.layers, few.layers, strict=True):
        assert inputs.saved < dear.saved < all_of_it.saved


def test_every_second_layer_is_recomputed():
    full, plain = (trace(zoo.config("gemma3"), spec(32, checkpointing=kind)) for kind in ("full", None))
    found = interleave(full, plain, every=2)
    first, second = full.layers[0], plain.layers[0]
    assert [layer.count for layer in plain.layers] == [2, 1]
    assert [layer.saved for layer in found.layers] == [first.saved, second.saved, full.layers[1].saved]


def test_half_precision_halves_the_saved_matrix_products():
    full, half = (trace(zoo.config("llama"), spec(64, dtype=d)) for d in (torch.float32, torch.bfloat16))
    assert 0.5 <= half.layers[0].saved / full.layers[0].saved < 0.8  # norms compute in float32


@pytest.mark.parametrize(
    "name", only(["gemma3", "deepseek_v3", "qwen3_next"], ["qwen3", "gemma3", "gpt_oss", "deepseek_v3", "qwen3_next"])
)
def test_the_cache_is_that_of_the_real_model(name: str):
    model = zoo.build(name)
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(input_ids=torch.ones((1, 40), dtype=torch.int64), past_key_values=cache, use_cache=True)
    tensors = [x for layer in cache.layers for x in tree_leaves(list(vars(layer).values())) if torch.is_tensor(x)]
    held = sum(tensor.nbytes for tensor in {id(tensor): tensor for tensor in tensors}.values())
    assert cache_bytes(zoo.config(name), num_tokens=40, dtype=torch.float32) == held
