"""Time of a weight sync and of its verification, against a copy of the same bytes.

    python benchmarks/weight_sync.py --json benchmarks/results/weight_sync.json    # mixtures of 2,000 and 20,000 tensors
    python benchmarks/weight_sync.py --quick                                       # seconds

A mixture with random float32 weights is sharded over the ranks. The sides alternate in every round:

    copy      the bytes of the model, from one buffer to another
    hf        stream the weights by the trainer's names, and copy them into the replica of the embedded engine
    files     stream them by the names of a checkpoint, where each expert has three tensors, and write the files that
              vLLM servers load (--weight-transfer file)
    sparse    like files, when the servers hold the previous weights: also compare, and write a sparse delta (1 % of the
              elements have changed)

`+ checksums` adds both sides' checksums of --verify-weight-sync: of every tensor in the stream, and again of the replica
or the files. vLLM's own loader, HTTP and the probe are not included. Seconds are those of rank 0.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from record import header, spread, table, write
from safetensors import safe_open
from torch import Tensor
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from fsdptrain.fsdp.mesh import build_mesh
from fsdptrain.fsdp.stream import stream_weights
from fsdptrain.fsdp.wrap import shard_model
from fsdptrain.rollout.embedded.replica import copy_weights
from fsdptrain.rollout.weight_sync.checksum import finish_checksums, start_checksum
from fsdptrain.vllm.server.weight_files import WeightFolder
from tests.testing import spawn

# layers, experts, hidden, inner size of an expert: about 0.9 GB
SHAPES = {2_000: (16, 40, 384, 304), 20_000: (50, 130, 128, 96), 200: (4, 16, 32, 32)}


def model_of(num_tensors: int) -> Any:
    layers, experts, hidden, inner = SHAPES[num_tensors]
    config = Qwen3MoeConfig(
        num_hidden_layers=layers, num_experts=experts, hidden_size=hidden, moe_intermediate_size=inner,
        num_experts_per_tok=2, num_attention_heads=2, num_key_value_heads=2, head_dim=64, vocab_size=1000,
    )  # fmt: skip
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


class Checksums:
    """Those of the trainer and of the engine."""

    def __init__(self, on: bool) -> None:
        self._on = on
        self._started: dict[str, Any] = {}

    def record(self, weights: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in weights:
            if self._on:
                self._started[name] = start_checksum(tensor)
            yield name, tensor

    def compare(self, held: Callable[[], Iterator[tuple[str, Tensor]]]) -> None:
        if self._on:
            sent = finish_checksums(self._started)
            assert sent == finish_checksums({name: start_checksum(tensor) for name, tensor in held()})


def measure(num_tensors: int, rounds: int) -> dict[str, Any]:
    torch.set_num_threads(1)
    replica, model = model_of(num_tensors), model_of(num_tensors)
    shard_model(
        model, build_mesh(1), compute_dtype=torch.float32, cpu_offload=False, reshard_after_forward=True, prefetch=True
    )
    stream = lambda naming: stream_weights(model, dtype=torch.float32, naming=naming)  # noqa: E731
    nbytes = sum(tensor.nbytes for tensor in model.parameters())
    source, target = torch.zeros(nbytes // 4), torch.zeros(nbytes // 4)
    names = set(replica.state_dict())
    with tempfile.TemporaryDirectory(dir="/dev/shm") as place:
        folder = WeightFolder(Path(place) / "weights", max_file_bytes=512 * 2**20)

        def hf(on: bool) -> None:
            checksums = Checksums(on)
            copy_weights(replica, checksums.record(stream("module")))
            checksums.compare(lambda: ((k, v) for k, v in replica.state_dict().items() if k in names))

        def files(on: bool) -> None:
            checksums = Checksums(on)
            paths = folder.write(checksums.record(stream("hub")))
            checksums.compare(lambda: tensors_in(paths))

        sides: dict[str, Callable[[], object]] = {
            "copy": lambda: target.copy_(source),
            "hf": lambda: hf(False),
            "hf + checksums": lambda: hf(True),
            "files": lambda: files(False),
            "files + checksums": lambda: files(True),
        }
        seconds: dict[str, list[float]] = {side: [] for side in sides}
        for number in range(rounds + 1):
            for side, run in sides.items():
                start = time.perf_counter()
                run()
                if number:
                    seconds[side].append(time.perf_counter() - start)
    return {
        "tensors": sum(1 for _ in stream("hub")),
        "bytes": nbytes,
        "seconds": {side: spread(found) for side, found in seconds.items()},
        "ratio to copy": {
            side: spread(a / b for a, b in zip(found, seconds["copy"], strict=True)) for side, found in seconds.items()
        },
    }


def tensors_in(paths: list[Path]) -> Iterator[tuple[str, Tensor]]:
    for path in paths:
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118
                yield name, file.get_tensor(name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--quick", action="store_true", help="a small model")
    parser.add_argument("--tensors", type=int, nargs="+", default=[2000, 20000])
    args = parser.parse_args()
    begin = header()
    rows = []
    for count in [200] if args.quick else args.tensors:
        found = spawn(args.ranks, measure, count, args.rounds)[0]
        print(json.dumps(found, indent=1), flush=True)
        rows.append(found)
    write(args.json, {**begin, "results": rows})


if __name__ == "__main__":
    main()
