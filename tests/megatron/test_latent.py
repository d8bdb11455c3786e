"""DeepSeek's latent attention: yarn as in transformers, and one line for what megatron-core has not."""

from typing import Any

import torch
from torch import nn

from fsdptrain.config.megatron import MegatronConfig
from fsdptrain.errors import ConfigError
from fsdptrain.testing import spawn
from tests import zoo

YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 40.0,
    "original_max_position_embeddings": 32,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
OPTIONS: dict[str, Any] = {"dtype": torch.float32, "has_engine": False, "on_cpu": True}
SPLIT = MegatronConfig(tensor_parallel=2, sequence_parallel=True)


def said() -> dict[str, Any]:
    from fsdptrain.backends.megatron.cpu_shims import install_cpu_shims
    from fsdptrain.backends.megatron.groups import start_groups
    from fsdptrain.backends.megatron.parity import check_parity, small_models
    from fsdptrain.backends.megatron.report import build_report
    from fsdptrain.backends.megatron.transformer_config import transformer_config

    install_cpu_shims()
    one, device = MegatronConfig(), torch.device("cpu")
    start_groups(one, timeout_s=60)

    def refusal(split: MegatronConfig, **changes: Any) -> str:
        try:
            transformer_config(zoo.config("deepseek_v3", **changes), split, **OPTIONS)
        except ConfigError as error:
            return str(error)
        return ""

    yarn = zoo.config("deepseek_v3", rope_parameters=YARN)
    stock, model = small_models(yarn, one, OPTIONS, spec=None, device=device)
    build_report(model, stock, layout="padded", shims=[])
    table = model.decoder.layers[0].self_attention.rotary_pos_emb
    table.inv_freq_inter = 2 * table.inv_freq_inter
    try:
        build_report(model, stock, layout="padded", shims=[])
    except ConfigError as error:
        other = str(error)
    else:
        other = ""
    return {
        "whole on each rank": marks(),
        "yarn": check_parity(yarn, one, OPTIONS, spec=None, device=device),
        "other frequencies": other,
        "tensor": refusal(SPLIT),
        "eps": refusal(one, rms_norm_eps=1e-5),
        "halves": refusal(one, rope_interleave=False),
    }


class TELinear(nn.Linear):
    """Stands in for megatron-core's, which needs Transformer Engine: that marks all its matrices as split."""

    def __init__(self) -> None:
        super().__init__(2, 2, bias=False)
        vars(self.weight)["tensor_model_parallel"] = True


class TEColumnParallelLinear(TELinear):
    """Which each rank has a part of."""


def marks() -> list[bool]:
    from fsdptrain.backends.megatron.model import _mark_split

    model: Any = nn.ModuleList([TELinear(), TEColumnParallelLinear()])
    _mark_split(model)
    return [vars(parameter)["tensor_model_parallel"] for parameter in model.parameters()]


def test_yarn_is_that_of_transformers_and_the_rest_is_refused_in_a_line() -> None:
    (found,) = spawn(1, said)
    assert found["whole on each rank"] == [False, True]
    assert found["yarn"][0] < 1e-5
    assert "rotary frequencies agree: no" in found["other frequencies"]
    assert found["tensor"].startswith("--megatron-tensor-parallel: megatron-core's plain latent attention loses")
    assert "rms_norm_eps 1e-05 has norms of two kinds" in found["eps"]
    assert "rope_interleave False" in found["halves"]
