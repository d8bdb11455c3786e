"""A model that was built otherwise than config.json says, or whose weights went elsewhere, stops before it trains."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedConfig

from fsdptrain.megatron.config import MegatronConfig
from tests import zoo
from tests.megatron import cases
from tests.testing import spawn


def faults(folder: Path) -> dict[str, str]:
    """What is said of each planted fault, in a process of its own."""
    from megatron.core.models.gpt import gpt_layer_specs

    from fsdptrain.megatron import conversions, table
    from fsdptrain.megatron.hub_names import hub_state, shapes_of
    from fsdptrain.megatron.model import has_transformer_engine
    from fsdptrain.megatron.weights import WeightMap, open_files

    built = cases.build(folder)
    model, stock, config, shapes = built.model, built.stock, built.stock.config, shapes_of(hub_state(built.stock))
    said: dict[str, str] = {"sound": f"{parity(config) < 1e-5}"}
    rare = zoo.config("qwen3", vocab_size=600, pad_token_id=599)  # beyond the vocabulary of the copy
    said["a pad token at the end"] = f"{parity(rare) < 1e-5}"

    original = conversions.Interleaved.read

    def swapped(self, source, names, rank, size) -> Tensor:
        return original(self, source, [names[0], *reversed(names[1:])], rank, size)

    conversions.Interleaved.read = swapped
    for dtype in (torch.float32, torch.bfloat16):
        said[f"keys and values swapped, {dtype}"] = cases.refusal(partial(parity, config, dtype=dtype))
    conversions.Interleaved.read = original

    inside = table._inside
    table._inside = lambda name, *rest: shifted(inside(name, *rest))
    said["experts by other numbers"] = cases.refusal(partial(WeightMap, model, stock))
    table._inside = inside

    without = {name: shape for name, shape in shapes.items() if ".experts.3." not in name}
    said["an expert that no file has"] = cases.refusal(partial(WeightMap, model, stock, shapes=without))
    more = shapes | {"model.layers.0.mlp.experts.6.up_proj.weight": (1, 1)}
    said["an expert that the model lacks"] = cases.refusal(partial(WeightMap, model, stock, shapes=more))

    def opened() -> None:
        with open_files(folder, more):
            pass

    said["a file without it"] = cases.refusal(opened)

    gpt_layer_specs.HAVE_TE = True
    said["engine"] = str(has_transformer_engine())
    return said


def parity(config: PreTrainedConfig, **options: Any) -> float:
    return cases.parity(config, MegatronConfig(), **options)


def shifted(entry):
    return replace(entry, expert=entry.expert + 1) if entry is not None and entry.expert is not None else entry


@pytest.mark.matrix
def test_planted_faults_stop_the_run(tmp_path) -> None:
    (said,) = spawn(1, faults, cases.save("qwen3_moe", tmp_path / "model"))
    assert said["sound"] == "True"
    assert said["a pad token at the end"] == "True"
    for dtype in ("float32", "bfloat16"):  # which hides nothing: the comparison is one of float32
        fault = said[f"keys and values swapped, torch.{dtype}"]
        assert fault.startswith("NumericsError: ")
        assert "computes other logprobs" in fault
        assert "(tolerance 0.0001, torch.float32)" in fault
    assert "experts.6" in said["experts by other numbers"]
    assert "not in the files" in said["an expert that no file has"]
    assert "have no place" in said["an expert that the model lacks"]
    assert "lack" in said["a file without it"]
    assert said["engine"] == "False"  # which would not compute here, though it is installed
