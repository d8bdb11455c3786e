"""DeepSeek's latent attention: yarn as in transformers, matrices that are whole."""

from typing import Any

import pytest
import torch
from torch import nn

from tests import zoo
from tests.megatron import cases
from tests.testing import spawn

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


def said() -> dict[str, Any]:
    from fsdptrain.megatron.parity import small_models
    from fsdptrain.megatron.report import build_report

    one, yarn = cases.start(), zoo.config("deepseek_v3", rope_parameters=YARN)
    stock, model = small_models(yarn, one, cases.OPTIONS, device=torch.device("cpu"))
    lines = build_report(model, stock, layout="padded").lines
    return {
        "lines": lines,
        "whole on each rank": marks(),
        "yarn": cases.parity(yarn, one),
    }


class TELinear(nn.Linear):
    """Stands in for megatron-core's, which needs Transformer Engine: that marks all its matrices as split."""

    def __init__(self) -> None:
        super().__init__(2, 2, bias=False)
        vars(self.weight)["tensor_model_parallel"] = True


class TEColumnParallelLinear(TELinear):
    """Which each rank has a part of."""


def marks() -> list[bool]:
    from fsdptrain.megatron.model import _mark_split

    model: Any = nn.ModuleList([TELinear(), TEColumnParallelLinear()])
    _mark_split(model)
    return [vars(parameter)["tensor_model_parallel"] for parameter in model.parameters()]


@pytest.mark.matrix
def test_yarn_is_that_of_transformers() -> None:
    (found,) = spawn(1, said)
    assert found["whole on each rank"] == [False, True]
    assert found["yarn"] < 1e-5
    assert "multi_latent_attention.HAVE_TE" in found["lines"][-1]
