"""Time of a weight sync and of its verification, against a copy of the same bytes.

    python benchmarks/weight_sync.py --json benchmarks/results/weight_sync.json    # 2,000 and 20,000 tensors
    python benchmarks/weight_sync.py --quick                                       # seconds

A mixture with random float32 weights is sharded, and streamed by the names of a checkpoint, in which each expert has
three tensors. The stages alternate in every round, and are timed one by one:

    copy        the bytes of the model, from one buffer to another
    hf          stream the weights by the names of the model and copy them into the embedded engine's replica
    checksums   of all tensors of the stream; --verify-weight-sync computes them twice, in the trainer and in the engine
    files       stream the weights by the names of a checkpoint and write the files that vLLM servers load
    deltas      compare these files with the previous ones, of which 1 % of the elements differed
    apply       these deltas, as a worker of a server does

vLLM's own loader, HTTP, the network and the probe are not included. Times are CPU seconds of one process with one
thread, because other programs may run on the machine.
"""

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from record import header, rounded, spread, write
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from fsdptrain.fsdp.mesh import build_mesh
from fsdptrain.fsdp.shards import local_shard
from fsdptrain.fsdp.stream import stream_weights
from fsdptrain.fsdp.wrap import shard_model
from fsdptrain.rollout.embedded.replica import copy_weights
from fsdptrain.rollout.weight_sync.checksum import finish_checksums, start_checksum
from fsdptrain.vllm.server.weight_files import WeightFolder, read
from fsdptrain.vllm.worker.sparse_delta import apply_sparse_delta, sparse_delta
from tests.testing import spawn

# layers, experts, hidden size, size of an expert: about 0.9 GB each, but for the smallest
SHAPES = {200: (4, 16, 32, 32), 2_000: (16, 40, 384, 304), 20_000: (50, 130, 128, 96)}
STAGES = ("copy", "hf", "checksums", "files", "deltas", "apply")
CHANGED = 0.01  # of the elements


def model_of(num_tensors: int) -> Any:
    layers, experts, hidden, inner = SHAPES[num_tensors]
    config = Qwen3MoeConfig(
        num_hidden_layers=layers, num_experts=experts, hidden_size=hidden, moe_intermediate_size=inner,
        num_experts_per_tok=2, num_attention_heads=2, num_key_value_heads=2, head_dim=64, vocab_size=1000,
    )  # fmt: skip
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def measure(num_tensors: int, rounds: int) -> dict[str, Any]:
    torch.set_num_threads(1)
    replica, model = model_of(num_tensors), model_of(num_tensors)
    options = {"cpu_offload": False, "reshard_after_forward": True, "prefetch": True}
    shard_model(model, build_mesh(1), compute_dtype=torch.float32, **options)

    def stream(naming: Any) -> Any:
        return stream_weights(model, dtype=torch.float32, naming=naming)

    nbytes = sum(tensor.nbytes for tensor in model.parameters())
    source, target = torch.ones(nbytes // 4), torch.zeros(nbytes // 4)
    seconds: dict[str, list[float]] = {stage: [] for stage in STAGES}
    sent = 0
    with tempfile.TemporaryDirectory(dir="/dev/shm") as place:
        folder = WeightFolder(Path(place) / "weights", max_file_bytes=512 * 2**20)
        held = [np.fromfile(path, np.uint8) for path in folder.write(stream("hub"), "first")]
        for number in range(rounds + 1):
            change(model, seed=number)
            clock = Clock()
            target.copy_(source)
            clock.stop("copy")
            copy_weights(replica, stream("module"))
            clock.stop("hf")
            finish_checksums({name: start_checksum(tensor) for name, tensor in stream("hub")})
            clock.stop("checksums")
            files = folder.write(stream("hub"), str(number))
            clock.stop("files")
            deltas = [sparse_delta(old, read(path)) for old, path in zip(held, files, strict=True)]
            clock.stop("deltas")
            for file, delta in zip(held, deltas, strict=True):
                assert delta is not None
                apply_sparse_delta(file, delta)
            clock.stop("apply")
            assert all(np.array_equal(old, read(path)) for old, path in zip(held, files, strict=True))
            sent = sum(len(delta) for delta in deltas if delta is not None)
            for stage in STAGES if number else ():  # the first round allocates memory
                seconds[stage].append(clock.seconds[stage])
    ratios = {stage: [a / b for a, b in zip(found, seconds["copy"], strict=True)] for stage, found in seconds.items()}
    return {
        "tensors": sum(1 for _ in stream("hub")),
        "bytes": nbytes,
        "bytes of deltas": sent,
        "seconds": {stage: spread(found) for stage, found in seconds.items()},
        "copies": {stage: rounded(statistics.median(found)) for stage, found in ratios.items()},
    }


class Clock:
    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._start = time.process_time()

    def stop(self, stage: str) -> None:
        self.seconds[stage] = time.process_time() - self._start
        self._start = time.process_time()


def change(model: Any, seed: int) -> None:
    """Negate some elements of every shard."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        shard = local_shard(parameter.detach()).view(-1)
        shard[torch.randint(len(shard), (int(CHANGED * len(shard)),), generator=generator)] *= -1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tensors", type=int, nargs="+", default=[2_000, 20_000], choices=SHAPES)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--quick", action="store_true", help="a small model")
    args = parser.parse_args()
    begin, rows = header(), []
    for count in [200] if args.quick else args.tensors:
        rows += spawn(1, measure, count, args.rounds)
        print(json.dumps(rows[-1]), flush=True)
    write(args.json, {**begin, "results": rows})


if __name__ == "__main__":
    main()
