"""Requests and configurations of the server tests."""

from pathlib import Path
from typing import Any

from fsdptrain.types import SamplingParams
from tests.vllm.contract import OPTIONS

KEY = "a key of the tests"
GREEDY = SamplingParams(num_samples=1, max_tokens=24, temperature=0.0)


def options(model: Path, **more: Any) -> dict[str, Any]:
    """Of a small run in float32."""
    return {
        **OPTIONS, "hf_checkpoint": str(model), "rollout_engine": "vllm-server", "rollout_num_servers": 1,
        "rollout_kv_cache_gib": 0.05, **more,
    }  # fmt: skip


def attached(model: Path, *urls: str, **more: Any) -> dict[str, Any]:
    """The same with servers that run."""
    found = options(model, rollout_urls=list(urls), **more)
    return {name: value for name, value in found.items() if name not in ("rollout_num_servers", "rollout_kv_cache_gib")}


def is_bf16(name: str) -> bool:
    """Of one of `conftest.Servers`."""
    return name.endswith(" bf16")
