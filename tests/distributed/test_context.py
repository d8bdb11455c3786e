"""Context parallelism: families, what ranks keep, and routes. Gradients of each mesh: test_laws.py."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from fsdptrain.enabled_features import Features
from fsdptrain.features.context_parallel.feature import ContextParallelFeature
from fsdptrain.features.context_parallel.ulysses import UlyssesGroup
from fsdptrain.model.attention.attention import SEGMENTS, register_attention, set_attention
from fsdptrain.model.policy import install_policy_forward, plain_batch, policy_logprobs
from tests import zoo
from tests.exact import Exact, in_float64
from tests.matrix import only
from tests.seam import install_replay, routed_logprobs
from tests.sweep import sweep
from tests.testing import spawn

from .storages import bytes_saved

LENGTHS = (37, 5, 50, 1, 10)  # borders of ranks fall everywhere; 103 is no multiple of 2
SEGMENTS_OF_TOKENS = [[5 + (7 * i + number) % 250 for i in range(length)] for number, length in enumerate(LENGTHS)]


def recorded() -> bool:
    """Whether the routes of a model whose tokens are dealt are those of one whose tokens are not."""
    found = []
    for more in ([], [ContextParallelFeature(UlyssesGroup.of(init_device_mesh("cpu", (2,))))]):
        model = in_float64(zoo.build("qwen3_moe"))
        install_replay(model, chunk_size=7, more=more)
        register_attention()
        set_attention(model, SEGMENTS)
        batch = plain_batch(SEGMENTS_OF_TOKENS, device=torch.device("cpu"))
        with torch.no_grad(), Exact():
            found.append(routed_logprobs(model, batch, layout="packed", with_routes=True).extras["routes"])
    return torch.equal(*found)


def test_routes_are_known_to_all_ranks():
    """Their replay: test_laws.py."""
    assert spawn(2, recorded) == [True, True]


def kept(size: int) -> int:
    """Bytes that the forward pass of a pack of 4096 tokens keeps for its backward on this rank."""
    register_attention()
    model = zoo.build("qwen3", num_key_value_heads=4, max_position_embeddings=4096)
    mesh = init_device_mesh("cpu", (dist.get_world_size() // size, size), mesh_dim_names=("shard", "context"))
    features = [ContextParallelFeature(UlyssesGroup.of(mesh["context"]))] if size > 1 else []
    install_policy_forward(model, chunk_size=256, features=Features(features))
    set_attention(model, SEGMENTS)
    batch = plain_batch([[5] * 4000, [7] * 96], device=torch.device("cpu"))
    return bytes_saved(model, lambda: policy_logprobs(model, batch, layout="packed"))


def all_kept() -> list[int]:
    return [kept(size) for size in (1, 2, 4)]


def test_activations_are_shared_by_the_ranks():
    for whole, half, quarter in spawn(4, all_kept):
        assert 2 * half / whole == pytest.approx(1, abs=0.01)
        assert 4 * quarter / whole == pytest.approx(1, abs=0.03)


FEW = ["gemma3_text", "gpt_oss", "falcon_h1"]  # windows, sinks; a state
MORE = ["gemma2", "deepseek_v3", "gpt2", "laguna", "gemma3n_text"]  # softcap, MLA, learned positions
REFUSED = {  # others: tests/features/context_parallel/test_checks.py
    "rwkv": "is not computed exactly",
    "nemotron": "is not computed exactly",  # it passes no keyword arguments on
    "zaya": "layers of hybrid",
    "falcon_h1": "layers of hybrid",
    "olmo_hybrid": "layers of linear_attention",
}


@pytest.mark.parametrize("few", only([True], [True, False]), ids=["few", "all"])
def test_families_are_exact_or_refused_by_one_line_and_nothing_crashes(tmp_path: Path, few: bool):
    names = FEW if few else [*MORE, *REFUSED]
    for row in sweep(names, tmp_path, mesh="context"):
        assert not row.crash, row.name
        assert "\n" not in row.refusal
        assert REFUSED.get(row.name, "") in row.refusal
        assert bool(row.refusal) is (row.name in REFUSED), row.refusal
        assert row.refusal or (row.exact and row.exported and row.loaded), row
