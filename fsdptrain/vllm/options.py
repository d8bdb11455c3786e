"""vLLM's options and sampling parameters that follow from the configuration, in the process and for servers."""

import base64
import hashlib
import io
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fsdptrain import platform
from fsdptrain.config import Config
from fsdptrain.config.eval_sets import eval_sets
from fsdptrain.errors import ConfigError, RolloutError
from fsdptrain.model.loading.meta import model_config
from fsdptrain.rollout.stop_tokens import stop_tokens
from fsdptrain.types import Completion, Prompt, SamplingParams
from fsdptrain.vllm.config import VllmConfig

_RESERVED = frozenset({"model", "dtype", "load_format", "logprobs_mode", "enable_lora", "data_parallel_size"})
_DRAFTS = ("ngram", "suffix")  # methods of speculative decoding without weights
# No telemetry; threads sleep while they wait: spinning ones made generation on shared cores 7 to 9 times slower.
ENVIRONMENT = {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "OMP_WAIT_POLICY": "PASSIVE"}


def request_batch_invariance(config: Config, *, on_gpu: bool) -> None:
    """With --deterministic-mode on a GPU, let vLLM use its batch-invariant kernels. Call it before importing vLLM."""
    if config.model.deterministic_mode and on_gpu:
        os.environ["VLLM_BATCH_INVARIANT"] = "1"  # servers inherit it


def engine_options(config: Config, checkpoint: Path, *, reserved: frozenset[str], on_gpu: bool) -> dict[str, Any]:
    """Options for the model in `checkpoint`.

    --rollout-engine-args may override them, except some and those that are `reserved`: ConfigError.
    """
    vllm = config.section(VllmConfig)
    for name in vllm.engine_args:
        if name in reserved | _RESERVED:
            raise ConfigError(f"--rollout-engine-args {name}: --rollout-engine sets it; remove it")
    draft = vllm.engine_args.get("speculative_config")
    if draft and not on_gpu:
        raise ConfigError(
            "--rollout-engine-args speculative_config: on a CPU vLLM 0.32 samples wrong tokens with it: remove it"
        )
    if isinstance(draft, Mapping) and draft.get("method") not in _DRAFTS:
        raise ConfigError(
            f"--rollout-engine-args speculative_config: method {draft.get('method')!r} drafts with weights that no "
            f"weight sync updates: use {' or '.join(_DRAFTS)}"
        )
    longest = longest_request(config)
    text = model_config(checkpoint, trust_remote_code=config.model.trust_remote_code).get_text_config(decoder=True)
    if "factor" not in (getattr(text, "rope_parameters", None) or {}):  # vLLM does not start beyond these positions
        longest = min(longest, getattr(text, "max_position_embeddings", None) or longest)
    options: dict[str, Any] = {"model": str(checkpoint), "dtype": config.compute_dtype_name, "max_model_len": longest}
    options |= {"trust_remote_code": config.model.trust_remote_code, "seed": config.rollout.seed % 2**31}
    options |= {"load_format": "dummy", "logprobs_mode": "processed_logprobs", "disable_log_stats": True}
    if not on_gpu:
        options["enforce_eager"] = True
        # vLLM 0.32 dies of a seeded request whose prompt is read in chunks: "CPU Generator does not use offset"
        options["enable_chunked_prefill"] = False
    if vllm.kv_cache_gib is not None or not on_gpu:
        options["kv_cache_memory_bytes"] = int((vllm.kv_cache_gib or 1.0) * platform.GIB)
    return options


def stop_token_ids(config: Config, checkpoint: Path) -> list[int]:
    """Return the tokens that end a response."""
    trust = config.model.trust_remote_code
    model = model_config(checkpoint, trust_remote_code=trust)
    return sorted(stop_tokens(checkpoint, model, trust_remote_code=trust, data=config.data))


def longest_request(config: Config) -> int:
    """Return the tokens of the longest prompt and response, also of an evaluation."""
    return config.prompt_budget + max(x.rollout.max_response_len for x in (config, *eval_sets(config).values()))


def memory_utilization(free: int, total: int) -> float:
    """Return the fraction of the device that vLLM may use beside the trainer: 92 % of what is free, vLLM's own default.

    vLLM refuses to start if less is free than this fraction, also if the size of its cache is given.
    """
    return round(0.92 * free / total, 3)


def routes_options(replay: str, device_type: str) -> dict[str, Any]:
    """ConfigError if vLLM cannot report the experts that it chose."""
    if replay != "rollout":
        return {}
    if device_type != "cuda":
        raise ConfigError(
            "--router-replay rollout: vLLM reports its experts only on a GPU (its model runner 2, which can, needs "
            "Triton): use --router-replay scoring, or --rollout-engine hf"
        )
    return {"enable_return_routed_experts": True}


def sampling_options(
    prompt: Prompt, index: int, sampling: SamplingParams, stop_token_ids: Sequence[int]
) -> dict[str, Any]:
    """vLLM's sampling parameters for sample `index` of `prompt`."""
    return {
        "max_tokens": sampling.limit_of(prompt),
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": max(sampling.top_k, 0),  # vLLM: 0 is off
        "min_p": sampling.min_p,
        "stop_token_ids": sorted({*stop_token_ids, *sampling.stop_token_ids}),
        "ignore_eos": True,  # `stop_token_ids` alone end a response
        "logprobs": 0,  # of the sampled token only
        "seed": _seed_of(sampling.seed, prompt.id, index),
        "stop": list(sampling.stop),  # found later if its last token ends within a character: callers cut
        "include_stop_str_in_output": True,
        "skip_special_tokens": False,
        "detokenize": bool(sampling.stop),
    }


def completion_of(
    prompt: Prompt,
    token_ids: list[int],
    logprobs: list[float],
    finish_reason: Any,
    versions: list[int],
    experts: "np.ndarray | str | None",
    *,
    source: str,
) -> Completion:
    """RolloutError if `source` ended it for another reason than the length or a stop."""
    if finish_reason not in ("stop", "length"):
        raise RolloutError(f"{source} ended the completion of prompt {prompt.id!r} with {finish_reason!r}")
    mixed = versions if versions[0] != versions[-1] else None
    routes = routes_of(experts)
    return Completion(prompt.id, token_ids, logprobs, finish_reason, versions[0], routes=routes, versions=mixed)


def routes_of(experts: "np.ndarray | str | None") -> Tensor | None:
    """[tokens - 1, layers, k] i16 from vLLM's array, or from its base64 text in an answer."""
    if experts is None:
        return None
    if isinstance(experts, str):
        experts = np.load(io.BytesIO(base64.b64decode(experts)), allow_pickle=False)
    return torch.from_numpy(np.asarray(experts).astype(np.int16))


def _seed_of(seed: int, prompt_id: str, index: int) -> int:
    """The seed of one request, independent of the other requests. 63 bits."""
    digest = hashlib.blake2b(f"{seed}/{index}/{prompt_id}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
