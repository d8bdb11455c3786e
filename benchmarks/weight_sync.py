"""Time and bytes of a weight sync to vLLM on a CPU, in the trainer's process and to a server: docs/weight_sync.md.

    .venv-vllm/bin/python benchmarks/weight_sync.py

Random mixtures in float32, whose experts have three tensors each. Median of the syncs after the first one.
"""

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from record import header
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from fsdptrain.config import Config
from fsdptrain.rollout import engine_factory
from tests.testing import save_hub, spawn

# layers, experts, hidden size, size of an expert: 0.9 GB each, but for the smallest
SHAPES = {200: (4, 16, 64, 32), 2_000: (16, 40, 384, 304), 20_000: (50, 130, 128, 96)}


def measure(num_tensors: int, engine: str, rounds: int) -> dict[str, Any]:
    layers, experts, hidden, inner = SHAPES[num_tensors]
    config = Qwen3MoeConfig(
        num_hidden_layers=layers, num_experts=experts, hidden_size=hidden, moe_intermediate_size=inner, head_dim=64,
        num_experts_per_tok=2, num_attention_heads=2, num_key_value_heads=2, vocab_size=1024,
        max_position_embeddings=1024,
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        model = save_hub(AutoModelForCausalLM.from_config(config, dtype=torch.float32), Path(folder) / "model")
        weights = dict(sorted(load_file(model / "model.safetensors").items()))  # layer by layer
        options: dict[str, Any] = {"rollout_engine": engine, "rollout_kv_cache_gib": 0.5, "bf16": False}
        options |= {"rollout_num_servers": 1} if engine == "vllm-server" else {}
        run = Config(**options, hf_checkpoint=str(model), output_dir=f"{folder}/run")
        target = engine_factory(engine)(run, checkpoint=model, device=torch.device("cpu"))
        seconds = []
        for version in range(rounds + 1):
            begin = time.perf_counter()
            target.update_weights(weights.items(), version)
            seconds.append(round(time.perf_counter() - begin, 2))
        target.close()
    found = {"engine": engine, "tensors": len(weights), "bytes": sum(tensor.nbytes for tensor in weights.values())}
    return {**found, "seconds": statistics.median(seconds[1:]), "all": seconds}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tensors", type=int, nargs="+", default=[2_000, 20_000], choices=SHAPES)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    for n in args.tensors:
        results = [spawn(1, measure, n, engine, args.rounds)[0] for engine in ("vllm", "vllm-server")]
        print(json.dumps({**header(), "results": results}, indent=1))
