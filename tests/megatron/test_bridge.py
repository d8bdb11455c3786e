"""Bridges of others move the bits that the table moves; where one cannot be had the table does, and says why."""

import sys
from functools import partial
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from transformers import AutoConfig

from fsdptrain.model.probes.kernels import Kernel
from fsdptrain.testing import spawn
from tests.megatron import cases

LAYOUTS: list[tuple[str, dict[str, int], bool]] = [  # family, split, tied head
    ("qwen3", {}, True),
    ("llama", {}, False),
    ("qwen3_moe", {}, False),
    ("qwen3", {"tensor_parallel": 2}, False),  # whose vocabulary is padded
    ("qwen3", {"pipeline_parallel": 2}, True),
    ("qwen3_moe", {"expert_parallel": 2}, False),
]
has_mbridge = pytest.mark.skipif(
    find_spec("mbridge") is None, reason="mbridge is not installed: pip install --no-deps mbridge==0.15.1"
)


def by_mbridge(folder: Path, layouts: list[tuple[str, dict[str, int], bool]]) -> dict[str, list[str]]:
    """Of each split the tensors that are not as in the files, after a model without weights was loaded."""
    from fsdptrain.megatron.bridge import choose_bridge, load_by_bridge
    from fsdptrain.megatron.groups import stop_groups

    found = {}
    for i, (family, layout, _) in enumerate(layouts):
        path = folder / str(i)
        built = cases.build(path, **layout)
        for parameter in built.model.parameters():
            parameter.data.zero_()
        bridge, kernel = choose_bridge("mbridge", built.model, built.stock.config, path, torch.float32)
        assert bridge is not None, kernel.line
        load_by_bridge(bridge, "mbridge", path, built.weights)
        files, streamed = load_file(path / "model.safetensors"), dict(bridge.stream())
        wrong = [name for name in files if not torch.equal(streamed[name], files[name])]
        found[f"{family} {layout}"] = [*wrong, *(streamed.keys() - files.keys())]
        stop_groups()
    return found


@has_mbridge
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_mbridge_loads_and_gives_back_bitwise(num_ranks: int, tmp_path: Path) -> None:
    layouts = [case for case in LAYOUTS if bool(case[1]) == (num_ranks == 2)]
    for i, (family, _, tied) in enumerate(layouts):
        cases.save(family, tmp_path / str(i), tie_word_embeddings=tied)
    for rank in spawn(num_ranks, by_mbridge, tmp_path, layouts):
        assert rank == {f"{family} {layout}": [] for family, layout, _ in layouts}


def reasons(folder: Path) -> dict[str, Kernel]:
    from fsdptrain.megatron.bridge import choose_bridge

    built = cases.build(folder)

    def line(asked: str, dtype: torch.dtype) -> Kernel:
        bridge, kernel = choose_bridge(asked, built.model, built.stock.config, folder, dtype)
        assert (bridge is None) == (kernel.used != asked)
        return kernel

    found = {
        "auto": line("auto", torch.float32),
        "absent": line("megatron-bridge", torch.float32),
        "rounded": line("megatron-bridge", torch.bfloat16),
    }
    half = AutoConfig.from_pretrained(folder, dtype="bfloat16")
    half.save_pretrained(folder)
    return found | {"widened": line("megatron-bridge", torch.float32)}


@cases.without_megatron_bridge
@pytest.mark.matrix
def test_a_bridge_that_cannot_be_had_is_one_fallback_with_all_reasons(tmp_path: Path) -> None:
    (found,) = spawn(1, reasons, cases.save("qwen3", tmp_path / "model"))
    assert not found["auto"].fell_back
    assert found["absent"].line == ("weights: the table of fsdptrain instead of megatron-bridge (it is not installed)")
    assert found["rounded"].reason.startswith("it is not installed; it rounds what the files hold (float32)")
    assert found["widened"].reason == "it is not installed"


def stand_in(built: cases.Built, *, swapped: bool) -> Any:
    """megatron-bridge's three methods, by the table: it needs Transformer Engine, which is not here."""

    class AutoBridge:
        @classmethod
        def from_hf_pretrained(cls, path: str) -> "AutoBridge":
            return cls()

        def load_hf_weights(self, models: list[Any], path: str) -> None:
            state = load_file(Path(path) / "model.safetensors")
            if swapped:
                names = [f"model.layers.{i}.self_attn.k_proj.weight" for i in (0, 1)]
                state[names[0]], state[names[1]] = state[names[1]], state[names[0]]
            built.weights.load(state.__getitem__)

        def export_hf_weights(self, models: list[Any], *, cpu: bool, show_progress: bool) -> Any:
            yield from built.weights.stream()

    module = ModuleType("megatron.bridge")
    vars(module).update(AutoBridge=AutoBridge, __spec__=ModuleSpec("megatron.bridge", None))
    return module


def contract(folder: Path) -> dict[bool, str]:
    """On two data-parallel ranks, of which only the second has a bridge that swaps."""
    from fsdptrain.megatron.bridge import choose_bridge, load_by_bridge

    built, asked = cases.build(folder), "megatron-bridge"
    said = {}
    for swapped in (False, True):
        sys.modules["megatron.bridge"] = stand_in(built, swapped=swapped and dist.get_rank() == 1)
        bridge, kernel = choose_bridge(asked, built.model, built.stock.config, folder, torch.float32)
        assert bridge is not None, kernel.line
        said[swapped] = cases.refusal(partial(load_by_bridge, bridge, asked, folder, built.weights))
    return said


@pytest.mark.matrix
def test_a_bridge_that_puts_weights_elsewhere_on_one_rank_stops_all(tmp_path: Path) -> None:
    for said in spawn(2, contract, cases.save("qwen3", tmp_path / "model")):
        assert said[False] == ""
        assert said[True].startswith(
            "NumericsError: --megatron-bridge megatron-bridge loads otherwise than the table: model.layers.0.self"
        )
        assert said[True].endswith("(rank 1 of 2)")
