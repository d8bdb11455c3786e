"""Quantized frozen weights on real ranks against plain peft on a model with the dequantized weights."""

import gc
from pathlib import Path
from typing import Any

import bitsandbytes.functional as bnb
import pytest
import torch
from torch import Tensor

from fsdptrain.features.quantized_base import linear
from fsdptrain.features.quantized_base.linear import QuantizedLinear, dequantize, quantize
from fsdptrain.fsdp.shards import local_shard
from fsdptrain.types import LossConfig
from tests.distributed.lora_cases import backend_of, fill, objective, plain_gradients, plain_peft
from tests.distributed.sharded import full
from tests.distributed.test_fsdp_backend import keep_gradients, packs_of_this_rank, samples
from tests.exact import Exact, backends_in_float64
from tests.matrix import only
from tests.tensors import load_files, same
from tests.testing import save_tiny_checkpoint, spawn

pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")  # peft asks for it

ROUNDED = 4 * torch.finfo(torch.float32).eps  # gradients of adapters are float32


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    return save_tiny_checkpoint(tmp_path_factory.mktemp("qwen3"), intermediate_size=192)


def quantized(model: torch.nn.Module) -> dict[str, QuantizedLinear]:
    return {name: module for name, module in model.named_modules() if isinstance(module, QuantizedLinear)}


def outside_of_exact(*args: Any) -> Tensor:
    """Dequantize in the dtypes of bitsandbytes, whose C code gets buffers of them."""
    with torch._C.DisableTorchFunction():
        return dequantize(*args)


def count_weights_at_once() -> list[int]:
    """How many tensors of the shape of a weight exist in full precision whenever one is quantized."""
    found: list[int] = []
    taken = QuantizedLinear._taken

    def count(layer: QuantizedLinear, weight: Tensor) -> torch.nn.Parameter:
        shape = local_shard(weight).shape
        live = [x for x in gc.get_objects() if type(x) is Tensor and x.shape == shape and x.is_floating_point()]
        found.append(sum(not x.is_meta and _storage(x) > 8 for x in live))
        return taken(layer, weight)

    QuantizedLinear._taken = count
    return found


def train(checkpoint: str, values: dict[str, Any], target: str) -> dict[str, Any]:
    """The base exported without a trained adapter; logprobs and gradients of a filled adapter, and its exports."""
    backends_in_float64()
    linear.dequantize = outside_of_exact
    at_once = count_weights_at_once()
    backend = backend_of("", "dense", checkpoint, lora_export="merged", load_in_4bit=True, **values)
    layers = quantized(backend.model)
    found: dict[str, Any] = {
        "bytes": sum(p.nbytes for layer in layers.values() for p in (layer.codes, layer.scales))
        / sum(layer.in_features * layer.out_features for layer in layers.values()),
        "unloaded": [p for layer in layers.values() for p in layer._aside.values() if _storage(p) > 8],
        "at once": max(at_once),
        "codes": {name: full(layer.codes) for name, layer in layers.items()},
    }
    backend.export(Path(target) / "base")
    fill(backend)
    gradients = keep_gradients(backend._optimizer)
    with Exact():
        packs = packs_of_this_rank(samples(), 128)
        scores = backend.compute_logprobs(packs, "policy")
        found["logprobs"] = [s.values[p.loss_mask] for p, s in zip(packs, scores, strict=True)]
    backend.export(Path(target) / "merged")
    with Exact():
        backend.train_step(packs, objective, LossConfig())
    return found | {"gradients": gradients}


def _storage(tensor: Tensor) -> int:
    return local_shard(tensor).untyped_storage().nbytes()


WAYS = {"1 rank": (1, {}), "2 ranks": (2, {}), "4 ranks, HSDP": (4, {"fsdp_replicate_size": 2})}


@pytest.mark.skipif(torch.__version__ < "2.13", reason="FSDP2 of torch 2.11 rejects parameters of whole numbers")
@pytest.mark.slow
@pytest.mark.parametrize("way", only(["2 ranks"], WAYS))
def test_gradients_and_exports_are_those_of_plain_peft_on_the_dequantized_weights(checkpoint, tmp_path, way):
    world, values = WAYS[way]
    ranks = spawn(world, train, str(checkpoint), values, str(tmp_path))
    stock, base = load_files(checkpoint), load_files(tmp_path / "base")
    for name, weight in stock.items():
        if name.endswith("_proj.weight"):
            assert torch.equal(base[name], dequantize(*quantize(weight), torch.float32)), name
        else:
            assert torch.equal(base[name], weight), name
    for file in ("config.json", "tokenizer.json"):
        assert (tmp_path / "base" / file).exists()
    model = plain_peft(tmp_path / "base", "dense")
    with Exact():
        logprobs, gradients = plain_gradients(model.eval(), samples())
    for rank in ranks:
        assert rank["gradients"].keys() == gradients.keys()
        for name, wanted in gradients.items():
            assert ((rank["gradients"][name] - wanted).norm() / wanted.norm()).item() < ROUNDED, name
        assert rank["bytes"] <= 0.6
        assert rank["unloaded"] == []
        assert rank["at once"] <= 3
        assert same(rank["codes"], ranks[0]["codes"])
    found = torch.cat([x for rank in ranks for x in rank["logprobs"]]).sort().values
    assert torch.allclose(found, torch.cat(logprobs).sort().values, rtol=0, atol=1e-11)
    merged = model.merge_and_unload().state_dict()
    for name, weight in load_files(tmp_path / "merged").items():
        assert torch.allclose(weight.double(), merged[name].double(), rtol=0, atol=1e-6), name


def test_quantization_is_that_of_bitsandbytes_and_of_each_row_alone() -> None:
    weight = torch.randn(7, 192, generator=torch.Generator().manual_seed(0))
    theirs = bnb.dequantize_4bit(*bnb.quantize_4bit(weight, blocksize=64, quant_type="nf4"))
    assert torch.equal(dequantize(*quantize(weight), torch.float32), theirs)
    rows = [torch.cat(parts) for parts in zip(*(quantize(part) for part in weight.split([3, 0, 4])), strict=True)]
    assert all(torch.equal(a, b) for a, b in zip(rows, quantize(weight), strict=True))
