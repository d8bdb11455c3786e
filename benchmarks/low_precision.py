"""Memory and time of an optimizer step with each optimizer, with frozen weights in 4 and 8 bits, and in 8-bit floats.

    python benchmarks/low_precision.py --json benchmarks/results/low_precision.json    # a minute on two quiet cores
    python benchmarks/low_precision.py --quick                                         # seconds

Each case is a process of its own with one rank and the same random Qwen3 in bf16. A step trains the same pack of
--tokens tokens with the grpo loss; seconds are medians over --steps steps, after two for warm-up. State and frozen
weights are the tensors that the backend holds, [bytes]. On a CPU 8-bit floats are emulated, and steps of 8-bit AdamW
are not compiled: both are slower than the plain ones. On a GPU `peak_bytes` is the peak of a step.
"""

import argparse
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from record import header, spread, table, write

from fsdptrain.algo.losses import LOSSES
from fsdptrain.algo.weights import count_totals, num_loss_tokens
from fsdptrain.config import Config
from fsdptrain.data.packing.pack import pack
from fsdptrain.fsdp.backend import FSDPBackend
from fsdptrain.fsdp.shards import local_shard
from fsdptrain.types import LossConfig, Sample
from tests.testing import save_tiny_checkpoint, spawn

LORA = {"lora_rank": 16}
CASES: dict[str, dict[str, Any]] = {
    "adamw": {},
    "muon": {"optimizer": "muon"},
    "adamw8bit": {"optimizer": "adamw8bit"},
    "sgd, momentum": {"optimizer": "sgd", "sgd_momentum": 0.9},
    "sgd": {"optimizer": "sgd"},
    "LoRA": LORA,
    "LoRA, 8-bit": LORA | {"load_in_8bit": True},
    "LoRA, nf4": LORA | {"load_in_4bit": True},
    "fp8 rowwise": {"fp8": ["training"]},
    "fp8 tensorwise": {"fp8": ["training"], "fp8_recipe": "tensorwise"},
}
WARM_UP = 2


def measure(checkpoint: str, values: dict[str, Any], tokens: int, steps: int) -> dict[str, Any]:
    config = Config(hf_checkpoint=checkpoint, lr=1e-4, prefix_sharing="off", rollout_max_response_len=128, **values)
    backend = FSDPBackend(config, total_steps=100)
    samples = _samples(tokens, backend.hf_config.vocab_size)
    totals = count_totals([num_loss_tokens(sample) for sample in samples])
    batch = pack(samples, aggregation="token_mean", max_response_len=tokens, totals=totals)
    seconds = []
    for _ in range(WARM_UP + steps):
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        began = time.perf_counter()
        metrics = backend.train_step([batch], LOSSES["grpo"], LossConfig())  # waits for the device
        seconds.append(time.perf_counter() - began)
    frozen = [local_shard(p) for p in backend.model.parameters() if not p.requires_grad]
    layers = [p for name, p in backend.model.named_parameters() if ".layers." in name and not p.requires_grad]
    return {
        "trained": sum(p.numel() for p in backend.model.parameters() if p.requires_grad),
        "state_bytes": sum(local_shard(t).nbytes for t in backend._optimizer.tensors().values()),
        "base_bytes": sum(p.nbytes for p in frozen),
        "base_bytes_in_layers": sum(local_shard(p).nbytes for p in layers),
        "seconds": spread(seconds[WARM_UP:]),
        "grad_norm": metrics["optim/grad_norm"],
        "peak_bytes": torch.cuda.max_memory_allocated() if torch.cuda.is_available() else None,
    }


def _samples(tokens: int, vocab_size: int) -> list[Sample]:
    generator = torch.Generator().manual_seed(0)
    found = []
    for number in range(tokens // 128):
        ids = torch.randint(5, vocab_size, (128,), generator=generator).tolist()
        mask = [False] * 32 + [True] * 96
        advantage = 1.0 if number % 2 else -1.0
        found.append(Sample(str(number), ids, mask, [-5.0 if m else 0.0 for m in mask], advantage=advantage))
    return found


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=list(CASES))
    parser.add_argument("--hidden-size", type=int, default=512)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=7)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(argv)
    if options.quick:
        options.hidden_size, options.layers, options.tokens, options.steps = 256, 2, 256, 1
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        sizes = {"hidden_size": options.hidden_size, "intermediate_size": 3 * options.hidden_size, "head_dim": 64}
        heads = {"num_attention_heads": options.hidden_size // 64, "num_key_value_heads": options.hidden_size // 128}
        save_tiny_checkpoint(Path(folder), num_hidden_layers=options.layers, vocab_size=1024, **sizes, **heads)
        for name in options.cases:
            [row] = spawn(1, measure, folder, CASES[name], options.tokens, options.steps)
            rows.append({"case": name, **row})
            print(f"{name:16} {row['seconds']['median']:.3f} s, state {row['state_bytes'] / 1e6:.2f} MB", flush=True)
    print(table([_shown(row) for row in rows]))
    if options.json:
        write(options.json, {**header(), "rows": rows})


def _shown(row: dict[str, Any]) -> dict[str, Any]:
    return {
        "case": row["case"],
        "state, bytes per trained weight": f"{row['state_bytes'] / row['trained']:.2f}",
        "frozen weights, MB": f"{row['base_bytes'] / 1e6:.1f}",
        "step, s": f"{row['seconds']['median']:.3f}",
    }


if __name__ == "__main__":
    main()
