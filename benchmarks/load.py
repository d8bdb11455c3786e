"""Time and host memory to load a model into shards on all ranks and to export it, against other ways to load.

    python benchmarks/load.py --json benchmarks/results/load.json          # Qwen3-0.6B, 1 to 8 ranks
    python benchmarks/load.py --shape Qwen3-1.7B --ranks 4 --folder /scratch --json ...
    python benchmarks/load.py --quick                                      # seconds

Random bfloat16 weights of the shape, in several files, are loaded as float32 shards in host memory. The ways alternate:

    shard            fsdptrain (--load-strategy shard): each rank reads its slices
    rank0            fsdptrain (--load-strategy rank0): rank 0 reads everything and broadcasts tensor by tensor
    slime            as slime's former FSDP backend: rank 0 loads the whole model, torch's set_model_state_dict sends it
    from_pretrained  every rank loads the whole model, then shards it
    bytes            no model: each rank reads its share of the bytes of the files
    float32          no model: also keeps the bytes, as float32

The files are in the page cache. Seconds are those of the slowest rank. Memory is the anonymous memory of the whole
process (RssAnon in /proc, every millisecond), interpreter and libraries included. Ways that would not fit are skipped
and listed. At the end, the model with the largest number of ranks is exported and compared bit by bit.

The exit code checks these requirements: no rank loads by `shard` with more than its shard + 400 MB; no rank exports
with more than its shard + the largest layer (or the embedding, if larger) in the export dtype + 400 MB; the exported
files hold the same bits.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from random_checkpoint import SHAPES, shape, write_random
from record import PeakMemory, anonymous_memory, header, spread, table, write
from safetensors import safe_open
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from transformers import AutoModelForCausalLM, PreTrainedModel

from fsdptrain.fsdp.export import export_hf
from fsdptrain.fsdp.mesh import build_mesh
from fsdptrain.fsdp.shards import local_shard, model_tensors
from fsdptrain.fsdp.wrap import shard_model
from fsdptrain.model.loading.meta import build_meta_model, load_weights
from fsdptrain.model.structure import decoder_layers
from fsdptrain.platform import host_memory
from tests.testing import spawn

MB = 1_000_000
ALLOWED = 400 * MB  # in addition to what must be held
PIECE = 16 * 2**20  # bytes per read


def sharded(model: PreTrainedModel) -> PreTrainedModel:
    options = {"cpu_offload": False, "reshard_after_forward": True, "prefetch": True}
    shard_model(model, build_mesh(1), compute_dtype=torch.bfloat16, **options)
    return model


def on_meta(source: Path) -> PreTrainedModel:
    return build_meta_model(source, trust_remote_code=False, attn_implementation="sdpa")


def by_shard(source: Path, strategy: str = "shard") -> PreTrainedModel:
    model = sharded(on_meta(source))
    load_weights(model, source, strategy=strategy)
    return model


def by_rank0(source: Path) -> PreTrainedModel:
    return by_shard(source, "rank0")


def by_slime(source: Path) -> PreTrainedModel:
    weights = {}
    if dist.get_rank() == 0:
        weights = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).state_dict()
    model = sharded(on_meta(source)).to_empty(device="cpu")
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, cpu_offload=True)
    set_model_state_dict(model, weights, options=options)
    model.tie_weights()
    return model


def by_from_pretrained(source: Path) -> PreTrainedModel:
    return sharded(AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32))


def by_bytes(source: Path) -> None:
    for _ in own_pieces(source):
        pass


def by_float32(source: Path) -> list[torch.Tensor]:
    return [torch.frombuffer(piece, dtype=torch.bfloat16).float() for piece in own_pieces(source)]


def own_pieces(source: Path) -> Iterator[memoryview]:
    """Read this rank's share of the bytes of every file, piece by piece, into one buffer."""
    buffer = bytearray(PIECE)
    for file in sorted(source.glob("*.safetensors")):
        share = file.stat().st_size // dist.get_world_size() // 2 * 2
        with file.open("rb", buffering=0) as opened:
            opened.seek(share * dist.get_rank())
            left = share
            while left:
                got = opened.readinto(memoryview(buffer)[: min(left, PIECE)])
                left -= got
                yield memoryview(buffer)[:got]


WAYS: dict[str, Callable[[Path], Any]] = {
    "shard": by_shard,
    "rank0": by_rank0,
    "slime": by_slime,
    "from_pretrained": by_from_pretrained,
    "bytes": by_bytes,
    "float32": by_float32,
}
WHOLE_MODELS = {"rank0": 1, "slime": 2, "from_pretrained": 0}  # copies held at once on this machine; 0: one per rank


def load(way: str, source: Path, target: Path | None) -> dict[str, Any]:
    """Load on one rank. Returns bytes and seconds. Also exports the model if `target` is given."""
    transformers.utils.logging.disable_progress_bar()
    before = anonymous_memory()
    dist.barrier()
    with PeakMemory() as loading:
        made = WAYS[way](source)
        dist.barrier()
    found = {"rank": dist.get_rank(), "before": before, "peak": loading.peak, "s": round(loading.seconds, 3)}
    if isinstance(made, PreTrainedModel):
        found["shard"] = sum(local_shard(tensor).nbytes for tensor in model_tensors(made).values())
        found["allowed"] = found["shard"] + ALLOWED
    if target is not None:
        with PeakMemory() as exporting:
            export_hf(made, source, target, dtype=torch.bfloat16)
        found |= {"export_peak": exporting.peak, "export_s": round(exporting.seconds, 3)}
        found["export_allowed"] = found["allowed"] + largest_layer(made)
    return found


def largest_layer(model: PreTrainedModel) -> int:
    """Return the size in bfloat16 of the largest decoder layer, or of the largest other parameter. [bytes]"""
    layers = decoder_layers(model)
    inside = {id(p) for layer in layers for p in layer.parameters()}
    outside = [p.numel() for p in model.parameters() if id(p) not in inside]
    return 2 * max(*outside, *(sum(p.numel() for p in layer.parameters()) for layer in layers))


def same_bits(source: Path, target: Path) -> bool:
    names, where = [], []
    for folder in (source, target):
        found = {}
        for file in sorted(folder.glob("*.safetensors")):
            with safe_open(file, framework="pt") as opened:
                found |= dict.fromkeys(opened.keys(), file)
        names.append(found.keys())
        where.append(found)
    return names[0] == names[1] and all(read(where[0][n], n).equal(read(where[1][n], n)) for n in names[0])


def read(file: Path, name: str) -> torch.Tensor:
    with safe_open(file, framework="pt") as opened:
        return opened.get_tensor(name)


def measure(source: Path, report: dict[str, Any], args: argparse.Namespace) -> None:
    """Add to `report` a row for each number of ranks and way, with the raw rounds, and the skipped ways."""
    rows, left_out, num_bytes = report["results"], report["left_out"], report["checkpoint_bytes"]
    for num_ranks in args.ranks:
        ways = []
        for way in args.ways:
            wholes = (WHOLE_MODELS.get(way, 0) or (num_ranks if way in WHOLE_MODELS else 0)) + 1
            need = wholes * 2 * num_bytes + num_ranks * ALLOWED
            if need > host_memory()[0]:
                left_out.append(f"{way} on {num_ranks} ranks: needs about {need / 2**30:.0f} GiB")
                continue
            ways.append(way)
        runs: dict[str, list[list[dict[str, Any]]]] = {way: [] for way in ways}
        for number in range(args.rounds):
            for way in ways if number % 2 else reversed(ways):
                runs[way].append(spawn(num_ranks, load, way, source, None, timeout=3600.0))
        for way in ways:
            rows.append({"ranks": num_ranks, "way": way, **summary(runs, way), "runs": runs[way]})
            print(json.dumps({key: value for key, value in rows[-1].items() if key != "runs"}), flush=True)
        write(args.json, report)  # write after each number of ranks, so that results survive a failure


def summary(runs: dict[str, list[list[dict[str, Any]]]], way: str) -> dict[str, Any]:
    seconds = {name: [max(rank["s"] for rank in ranks) for ranks in found] for name, found in runs.items()}
    found: dict[str, Any] = {"s": spread(seconds[way]), "peak": max(r["peak"] for ranks in runs[way] for r in ranks)}
    found["peak_of_last_rank"] = max(ranks[-1]["peak"] for ranks in runs[way])
    for other in ("shard", "bytes", "float32"):
        if other in seconds and other != way:
            found[f"over_{other}"] = spread(a / b for a, b in zip(seconds[way], seconds[other], strict=True))
    return found


def laws_of(rows: list[dict[str, Any]], exported: list[dict[str, Any]], exact: bool) -> dict[str, bool]:
    ours = [rank for row in rows if row["way"] == "shard" for ranks in row["runs"] for rank in ranks] + exported
    return {
        "every rank loads with at most its shard + 400 MB": all(r["peak"] <= r["allowed"] for r in ours),
        "every rank exports with at most shard + largest layer + 400 MB": all(
            r["export_peak"] <= r["export_allowed"] for r in exported
        ),
        "the exported files hold the same bits": exact,
    }


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--quick", action="store_true", help="a tiny model, 1 and 2 ranks, one round")
    add("--json", type=Path, help="path of the report")
    add("--shape", choices=SHAPES, default="Qwen3-0.6B")
    add("--layers", type=int, help="number of layers; default: that of the shape")
    add("--ranks", type=int, nargs="+", default=[1, 2, 4, 8])
    add("--ways", nargs="+", choices=list(WAYS), default=list(WAYS))
    add("--rounds", type=int, default=3)
    add("--seed", type=int, default=0)
    add("--folder", type=Path, help="folder of the model; default: a temporary one")
    args = parser.parse_args()
    if args.quick:
        args.shape, args.ranks, args.rounds = "tiny", [1, 2], 1
    return args


def main() -> int:
    args = arguments()
    begin = header()
    config = shape(args.shape, **({"num_hidden_layers": args.layers} if args.layers else {}))
    report: dict[str, Any] = {
        **begin,
        "shape": args.shape,
        "unit": "bytes, s",
        "laws": {},
        "results": [],
        "left_out": [],
    }
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        source, target = Path(folder) / "source", Path(folder) / "exported"
        report["checkpoint_bytes"] = write_random(source, config, seed=args.seed)
        measure(source, report, args)
        report["export"] = spawn(max(args.ranks), load, "shard", source, target, timeout=3600.0)
        exact = same_bits(source, target)
    laws = report["laws"] = laws_of(report["results"], report["export"], exact)
    write(args.json, report)
    print(table([_cells(row) for row in report["results"]]))
    print(json.dumps({"laws": laws, "left_out": report["left_out"]}))
    return 0 if all(laws.values()) else 1


def _cells(row: dict[str, Any]) -> dict[str, Any]:
    times = {
        f"times {other}": over and f"{over['median']:.2f} ({over['least']:.2f} to {over['most']:.2f})"
        for other in ("bytes", "float32")
        for over in [row.get(f"over_{other}")]
    }
    return {
        "ranks": row["ranks"],
        "way": row["way"],
        "s": row["s"]["median"],
        "least to most": f"{row['s']['least']} to {row['s']['most']}",
        **times,
        "peak MB, any rank": round(row["peak"] / MB),
        "peak MB, last rank": round(row["peak_of_last_rank"] / MB),
    }


if __name__ == "__main__":
    sys.exit(main())
