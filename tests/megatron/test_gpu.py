"""What needs a GPU: layers of Transformer Engine where it imports, packed rows, and the dealt optimizer over NCCL.

Written on machines without one, from the sources of megatron-core 0.16 and Transformer Engine 2: not run yet.
"""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from fsdptrain.model.policy import plain_batch
from fsdptrain.platform import device_count, has_accelerator
from tests.megatron import cases
from tests.megatron.training import backend_of, masters, steps, train
from tests.testing import spawn

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not has_accelerator(), reason="needs a GPU"),
    pytest.mark.skipif(find_spec("megatron") is None, reason="megatron-core comes with the megatron extra"),
]
two_gpus = pytest.mark.skipif(device_count() < 2, reason="needs two GPUs")
with_engine = pytest.mark.skipif(find_spec("transformer_engine") is None, reason="needs Transformer Engine")


def built(folder: Path, bf16: bool) -> dict[str, Any]:
    """The backend holds a small copy against transformers before it is built: this ends with an error, or is right."""
    from fsdptrain.megatron.model import has_transformer_engine

    backend = backend_of(folder, bf16=bf16, lr=1e-3)
    files = load_file(folder / "model.safetensors")
    streamed = {name: tensor.cpu() for name, tensor in masters(backend).items()}
    return {
        "lines": backend.lines,
        "engine": has_transformer_engine(),
        "changed": [name for name in files if not torch.equal(streamed[name], files[name])],
        "norms": steps(backend, 2),
    }


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe", "deepseek_v3", "qwen3_next"])
def test_a_model_is_built_and_weights_come_out_bitwise(family: str, tmp_path: Path) -> None:
    folder = cases.save(family, tmp_path / "model")
    (half,), (single,) = (spawn(1, built, folder, bf16, timeout=300.0) for bf16 in (True, False))
    for found in (half, single):
        assert found["changed"] == []
        assert ("Transformer Engine layers" in found["lines"][0]) == found["engine"]
    assert half["norms"] == pytest.approx(single["norms"], rel=5e-2)


@two_gpus
@pytest.mark.parametrize("layout", [{"expert_parallel": 2}, {"pipeline_parallel": 2}, {"tensor_parallel": 2}], ids=str)
def test_steps_on_two_gpus_are_those_on_one(layout: dict[str, int], tmp_path: Path) -> None:
    folder = cases.save("qwen3_moe", tmp_path / "model")
    found = spawn(2, train, folder, tmp_path / "two", layout, timeout=300.0)
    (alone,) = spawn(1, train, folder, tmp_path / "one", {}, timeout=300.0)
    for rank in found:
        assert rank["files"]
        assert rank["rounded"]
    if "expert_parallel" not in layout:  # whose ranks have a pack each
        assert found[0]["norms"] == pytest.approx(alone["norms"], rel=3e-2)


def looked_at(folder: Path, bf16: bool) -> dict[str, Any]:
    """What the layers are called and made of, and how far the logprobs of a pack are from those of its segments."""
    from fsdptrain.megatron.table import stored_tensors

    backend = backend_of(folder, bf16=bf16, lr=1e-3)
    segments = [cases.tokens(1, n, seed=n)[0].tolist() for n in (7, 12, 30)]
    together, *apart = backend.compute_logprobs(
        [plain_batch(rows, device=torch.device("cpu")) for rows in (segments, *([row] for row in segments))], "policy"
    )
    return {
        "names": set(stored_tensors(backend._model[0])),
        "classes": {type(module).__name__ for module in backend._model.modules()},
        "layout": backend.layout_probe.layout,
        "difference": (together.values - torch.cat([one.values for one in apart])).abs().mean().item(),
    }


@with_engine
@pytest.mark.parametrize("bf16", [True, False])
def test_layers_of_transformer_engine_are_named_and_packed_as_the_table_thinks(bf16: bool, tmp_path: Path) -> None:
    """Norms in the matrices behind them, grouped experts; packs as one row in half precision, as rows in float32."""
    (found,) = spawn(1, looked_at, cases.save("qwen3_moe", tmp_path / "model"), bf16, timeout=300.0)
    layer = "decoder.layers.1."
    assert {
        f"{layer}self_attention.linear_qkv.layer_norm_weight",
        f"{layer}self_attention.q_layernorm.weight",
        f"{layer}pre_mlp_layernorm.weight",
        *(f"{layer}mlp.experts.linear_fc1.weight{i}" for i in range(6)),
    } <= found["names"]
    assert {"TEGroupedMLP", "TEDotProductAttention", "TELayerNormColumnParallelLinear"} <= found["classes"]
    assert found["layout"] == ("packed" if bf16 else "padded")
    assert found["difference"] < (2e-2 if bf16 else 1e-5)


def repeated(folder: Path) -> list[float]:
    from fsdptrain import platform

    platform.set_deterministic(True)
    return steps(backend_of(folder, bf16=True, deterministic_mode=True), 3)


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_deterministic_kernels_repeat_themselves(family: str, tmp_path: Path) -> None:
    """Transformer Engine's attention is told to, by a variable that megatron-core asks for."""
    folder = cases.save(family, tmp_path / "model")
    assert spawn(1, repeated, folder, timeout=300.0) == spawn(1, repeated, folder, timeout=300.0)
