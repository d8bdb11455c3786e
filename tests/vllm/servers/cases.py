"""What the tests of servers ask, and how they are configured."""

from pathlib import Path
from typing import Any

from fsdptrain.types import Prompt, SamplingParams

KEY = "a key of the tests"
LONG = Prompt("long", [5 + i % 200 for i in range(300)], "")  # more than two blocks of the prefix cache
PROMPTS = [Prompt("a", [9, 8, 7], ""), Prompt("b", [20] * 17, ""), LONG]
SAMPLING = SamplingParams(num_samples=2, max_tokens=16, temperature=0.7, seed=3)
GREEDY = SamplingParams(num_samples=1, max_tokens=24, temperature=0.0)


def options(model: Path, **more: Any) -> dict[str, Any]:
    """Of a small run in float32."""
    return {
        "hf_checkpoint": str(model),
        "bf16": False,
        "rollout_engine": "vllm-server",
        "rollout_num_servers": 1,
        "rollout_temperature": 0.7,
        "rollout_kv_cache_gib": 0.05,
        "rollout_max_response_len": 64,
        "max_tokens_per_gpu": 512,
        **more,
    }


def attached(model: Path, *urls: str, **more: Any) -> dict[str, Any]:
    """The same with servers that run."""
    found = options(model, rollout_urls=list(urls), rollout_api_key_env="ROLLOUT_KEY", **more)
    return {name: value for name, value in found.items() if name not in ("rollout_num_servers", "rollout_kv_cache_gib")}
