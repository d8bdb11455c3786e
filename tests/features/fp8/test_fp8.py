"""Training in 8-bit floats, emulated on a CPU, against torchao's own conversion of the plain model."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torchao.float8 import Float8LinearConfig, convert_to_float8_training
from torchao.float8.float8_linear import Float8Linear
from transformers import AutoModelForCausalLM

from fsdptrain import platform
from fsdptrain.config import Config
from fsdptrain.errors import ConfigError
from fsdptrain.features.fp8.feature import Fp8Feature, _convert, float8_layers
from fsdptrain.fsdp.backend import FSDPBackend
from fsdptrain.types import LossConfig
from tests import zoo
from tests.distributed import lora_cases
from tests.distributed import test_laws as laws
from tests.distributed.test_fsdp_backend import config, keep_gradients, packs_of_this_rank, samples
from tests.tensors import load_files, same
from tests.testing import spawn

Gradients = dict[str, torch.Tensor]


def converted(model: torch.nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if isinstance(module, Float8Linear)]


def gradients_of_one_sample(checkpoint: Path) -> tuple[Gradients, list[str]]:
    backend = FSDPBackend(config(checkpoint, rollout_temperature=1.0, fp8=True), total_steps=10)
    found = keep_gradients(backend._optimizer)
    backend.train_step(packs_of_this_rank(samples(1), 128), lora_cases.objective, LossConfig())
    return found, converted(backend.model)


def plain_gradients(checkpoint: Path, recipe: str | None = "rowwise") -> tuple[Gradients, list[str]]:
    model: Any = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32, attn_implementation="eager")
    if recipe is not None:
        options = replace(Float8LinearConfig.from_recipe_name(recipe), emulate=True)
        convert_to_float8_training(model.model.layers, config=options)
    return lora_cases.plain_gradients(model, samples(1))[1], converted(model)


def test_gradients_are_those_of_torchao(checkpoint: Path) -> None:
    [(found, layers)] = spawn(1, gradients_of_one_sample, checkpoint)
    torchao, of_torchao = plain_gradients(checkpoint)
    stock, _ = plain_gradients(checkpoint, None)
    assert layers == of_torchao
    assert "lm_head" not in layers
    assert len(layers) == 14
    assert found.keys() == torchao.keys() == stock.keys()
    for name in stock:
        of_fp8 = (torchao[name] - stock[name]).norm()
        assert of_fp8 > 0.003 * stock[name].norm(), name
        assert (found[name] - torchao[name]).norm() < 0.3 * of_fp8, name  # another sum may cross a rounding


def broken(hub: Path, folder: Path) -> list[str]:
    """What differs: a resumed run, the export before training and the checkpoint, a later export and the stream."""
    case = laws.Case("dense", values={"fp8": True, "gradient_checkpointing": True}, is_exact=False)
    backend = laws.build(case, hub, {})
    backend.export(folder / "before")
    found = [] if same(load_files(folder / "before"), load_files(hub / "dense")) else ["the export before training"]
    laws.steps(backend, case, range(laws.NUM_STEPS), laws.SMALL_PACKS)
    found += laws.broken_on_resume(backend, case, hub, folder, laws.state(backend))
    return found + laws.broken_exports(backend, folder / "after")


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")
@pytest.mark.slow
def test_a_run_resumes_bitwise_and_exports_stock_weights(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "dense").symlink_to(checkpoint)
    assert spawn(2, broken, tmp_path, tmp_path / "run") == [[], []]


def test_layers_of_odd_sizes_stay() -> None:
    assert len(float8_layers(zoo.meta("qwen3", hidden_size=64, intermediate_size=120))) == 8


def test_a_gpu_without_products_of_8_bit_floats_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "device_type", lambda: "cuda")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 6))
    with pytest.raises(ConfigError, match=r"--fp8 needs a GPU of compute capability 8.9 .* has 8.6"):
        Fp8Feature.create(Config(hf_checkpoint="x", fp8=True), Path())


def test_the_kernels_of_a_gpu_take_packs_of_any_number_of_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """On meta tensors torch checks the sizes that its CUDA kernels take."""
    monkeypatch.setattr(platform, "device_type", lambda: "cuda")
    layer = nn.Linear(64, 32, bias=False, device="meta", dtype=torch.bfloat16)
    _convert(layer)
    layer(torch.randn(63, 64, device="meta", dtype=torch.bfloat16, requires_grad=True)).sum().backward()
    assert layer.weight.grad is not None
    assert layer.weight.grad.shape == (32, 64)


@pytest.mark.parametrize("family", zoo.MOE)
def test_no_router_of_any_family_is_changed(family: str) -> None:
    """A router has an output per expert, 48 here, and no other layer has as many."""
    model = zoo.meta(family, **{key: 48 for key in ("num_experts", "num_local_experts", "n_routed_experts")})
    found = float8_layers(model)
    assert found
    assert not [layer for layer in found if layer.out_features == 48]
