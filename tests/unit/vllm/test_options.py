"""vLLM's options are derived from model and platform, and users can override them; a missed expert is named."""

import base64
import io

import numpy as np
import pytest
import torch

from fsdptrain.config import Config
from fsdptrain.data.routes import sample_routes
from fsdptrain.errors import ConfigError
from fsdptrain.vllm.in_process import build_vllm_engine
from fsdptrain.vllm.options import memory_utilization, routes_of, routes_options
from fsdptrain.vllm.worker.experts import missing_experts
from tests.configs import CONFIGS
from tests.testing import spawn


def test_routes_are_requested_on_a_gpu_and_refused_elsewhere():
    assert routes_options("off", "cpu") == routes_options("scoring", "cpu") == {}
    assert routes_options("rollout", "cuda") == {"enable_return_routed_experts": True}
    with pytest.raises(ConfigError, match="--router-replay rollout: vLLM reports its experts only on a GPU"):
        routes_options("rollout", "cpu")


def test_an_engine_beside_the_trainer_uses_what_is_free():
    assert memory_utilization(80, 80) == 0.92
    assert memory_utilization(35, 80) * 80 < 35


def refusals(given: list[dict[str, int]]) -> list[str]:
    said = []
    for args in given:
        config = Config(hf_checkpoint="x", rollout_engine="vllm", rollout_engine_args=args)
        with pytest.raises(ConfigError) as caught:
            build_vllm_engine(config, checkpoint=CONFIGS / "qwen3-4b", device=torch.device("cpu"))
        said.append(str(caught.value))
    return said


@pytest.mark.slow
def test_an_engine_in_the_process_supports_tensor_parallelism_over_the_ranks():
    [said] = spawn(1, refusals, [{"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}])
    assert "tensor_parallel_size=2: an engine spans this number of ranks, and there are 1: use a divisor" in said[0]
    assert "pipeline_parallel_size: --rollout-engine sets it; remove it" in said[1]


@pytest.mark.parametrize("dtype", ["uint8", "uint16"])
def test_routes_are_arrays_or_text(dtype):
    experts = np.arange(6 * 2 * 4).reshape(6, 2, 4).astype(dtype)  # of 7 tokens: the last was never read
    file = io.BytesIO()
    np.save(file, experts)
    for given in (experts, base64.b64encode(file.getvalue()).decode()):
        routes = sample_routes([routes_of(given)], 7)
        assert routes is not None
        assert routes.dtype == torch.int16
        assert routes[:6].tolist() == experts.tolist()
        assert (routes[6] == -1).all()
    assert routes_of(None) is None


NAMES = [f"model.layers.{i}.mlp.experts.{k}.w{part}.weight" for i in (1, 2) for k in range(3) for part in (1, 2, 3)]
NAMES.append("model.norm.weight")


def test_complete_and_absent_layers_have_no_missing_experts():
    assert missing_experts(NAMES) == []
    assert missing_experts(name for name in NAMES if "layers.2" not in name) == []


EXPERTS = [name for name in NAMES if "experts" in name]


@pytest.mark.parametrize("missing", [[name] for name in EXPERTS] + [EXPERTS[i : i + 3] for i in (0, 3, 6)])
def test_missing_tensors_and_experts_are_named(missing: list[str]):
    assert missing_experts(name for name in NAMES if name not in missing) == missing
