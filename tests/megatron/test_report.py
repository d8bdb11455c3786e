"""A model that was built otherwise than config.json says, or whose weights went elsewhere, stops before it trains."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from fsdptrain.config.megatron import MegatronConfig
from fsdptrain.errors import CheckpointError, ConfigError, NumericsError
from fsdptrain.testing import spawn
from tests.megatron import cases

OPTIONS = {"dtype": torch.float32, "has_engine": False, "on_cpu": True}


def parity(built: cases.Built) -> tuple[float, float]:
    from fsdptrain.backends.megatron.parity import check_parity

    device = torch.device("cpu")
    return check_parity(built.stock.config, MegatronConfig(), OPTIONS, spec=None, device=device)


def faults(folder: Path) -> dict[str, str]:
    """What is said of each planted fault, in a process of its own."""
    from fsdptrain.backends.megatron import conversions, table
    from fsdptrain.backends.megatron.report import build_report
    from fsdptrain.backends.megatron.weights import WeightMap, hub_shapes, open_files

    built = cases.build(folder)
    model, config, shapes = built.model, built.stock.config, hub_shapes(built.stock)
    said: dict[str, str] = {"sound": f"{parity(built)[0] < 1e-5}", "lines": "\n".join(report_of(built))}

    def told(name: str, error: type[Exception], act) -> None:
        with pytest.raises(error) as caught:
            act()
        said[name] = str(caught.value)

    original = conversions.QKV.read

    def swapped(self, source, names, rank, size) -> Tensor:
        return original(self, source, [names[0], names[2], names[1]], rank, size)

    conversions.QKV.read = swapped
    told("keys and values swapped", NumericsError, lambda: parity(built))
    conversions.QKV.read = original

    inside = table._inside
    table._inside = lambda name, *rest: shifted(inside(name, *rest))
    told("experts by other numbers", CheckpointError, lambda: WeightMap(model, config, shapes))
    table._inside = inside

    without = {name: shape for name, shape in shapes.items() if ".experts.3." not in name}
    told("an expert that no file has", CheckpointError, lambda: WeightMap(model, config, without))
    more = shapes | {"model.layers.0.mlp.experts.6.up_proj.weight": (1, 1)}
    told("an expert that the model lacks", CheckpointError, lambda: WeightMap(model, config, more))

    def opened() -> None:
        with open_files(folder, more):
            pass

    told("a file without it", CheckpointError, opened)

    frequencies = model.rotary_pos_emb.inv_freq
    model.rotary_pos_emb.inv_freq = 500_000.0 ** (-torch.arange(0, 16, 2) / 16)
    told("rotary base", ConfigError, lambda: build_report(model, built.stock, layout="padded", shims=[]))
    model.rotary_pos_emb.inv_freq = frequencies

    model.decoder.layers[1].input_layernorm.eps = 1e-5
    told("eps", ConfigError, lambda: build_report(model, built.stock, layout="padded", shims=[]))
    model.decoder.layers[1].input_layernorm.eps = config.rms_norm_eps

    config.norm_topk_prob = not config.norm_topk_prob
    told("router", ConfigError, lambda: build_report(model, built.stock, layout="padded", shims=[]))
    return said


def report_of(built: cases.Built) -> list[str]:
    from fsdptrain.backends.megatron.report import build_report

    return list(build_report(built.model, built.stock, layout="padded", shims=["torch.cuda.stream"]).lines)


def shifted(entry):
    return replace(entry, expert=entry.expert + 1) if entry is not None and entry.expert is not None else entry


def test_planted_faults_stop_the_run(tmp_path) -> None:
    (said,) = spawn(1, faults, cases.save("qwen3_moe", tmp_path / "model"))
    assert said["sound"] == "True"
    assert "parameters " in said["lines"]
    assert "1 CPU shims: torch.cuda.stream" in said["lines"]
    assert "computes other logprobs" in said["keys and values swapped"]
    assert "experts.6" in said["experts by other numbers"]
    assert "not in the files" in said["an expert that no file has"]
    assert "have no place" in said["an expert that the model lacks"]
    assert "missing" in said["a file without it"]
    assert "rotary base is 500000.0, not 10000.0" in said["rotary base"]
    assert "eps of norms is 1e-05, not 1e-06" in said["eps"]
    assert "their weights are renormalised: " in said["router"]
