"""Options of vLLM that follow from model, platform and configuration; the same in the process and for servers."""

import base64
import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoConfig, PreTrainedConfig

from fsdptrain.config import Config
from fsdptrain.errors import ConfigError

_HOPPER = (9, 0)
OTHER_NUMBERS = frozenset({"quantization", "kv_cache_dtype"})  # with these it computes others than the trainer


def derived_options(config: Config, checkpoint: Path, device_type: str) -> dict[str, Any]:
    """What vLLM needs whatever users give by --rollout-engine-args. It holds what they give of the same options."""
    options = routes_options(config.router.replay, device_type)
    if device_type == "cuda":
        model_config = AutoConfig.from_pretrained(checkpoint, trust_remote_code=config.model.trust_remote_code)
        options |= gdn_options(model_config, torch.cuda.get_device_capability(), config.rollout.engine_args)
    return options


def gdn_options(
    model_config: PreTrainedConfig, capability: tuple[int, int], given: Mapping[str, Any]
) -> dict[str, Any]:
    """Gated delta nets (Qwen3-Next, Qwen3.5) on Hopper: Triton's kernels, where vLLM would take FlashInfer's.

    By `additional_config`, which vLLM's own flag writes too: a version that does not know the key leaves it alone.
    """
    is_gdn = getattr(model_config.get_text_config(), "linear_key_head_dim", None) is not None
    if not is_gdn or capability != _HOPPER or "gdn_prefill_backend" in given:
        return {}
    return {"additional_config": {"gdn_prefill_backend": "triton", **given.get("additional_config", {})}}


def routes_options(replay: str, device_type: str) -> dict[str, Any]:
    """ConfigError where vLLM cannot tell the experts that it took."""
    if replay != "rollout":
        return {}
    if device_type != "cuda":
        raise ConfigError(
            "--router-replay rollout: vLLM does not tell its experts without a GPU (its model runner 2, which can, "
            "needs Triton): use --router-replay scoring, or --rollout-engine hf"
        )
    return {"enable_return_routed_experts": True}


def routes_of(experts: "np.ndarray | str | None") -> Tensor | None:
    """[tokens, layers, k] int16 of all tokens but the last, from vLLM's array, or from the text of it in an answer."""
    if experts is None:
        return None
    if isinstance(experts, str):
        experts = np.load(io.BytesIO(base64.b64decode(experts)), allow_pickle=False)
    return torch.from_numpy(np.asarray(experts).astype(np.int16))
