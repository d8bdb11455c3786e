"""Cost of more ranks: bytes and seconds measured on gloo ranks, and a model of 8 to 4,096 GPUs.

    python benchmarks/scaling.py --json benchmarks/results/scaling.json         # minutes; draws a picture next to it
    python benchmarks/scaling.py --model-only --shape Qwen3-4B --json ...       # no ranks
    python benchmarks/scaling.py --quick                                        # seconds

Measured: the train step of the backend on 1, 2 and 4 gloo ranks in float32, with one pack per rank, so that the work
per rank is constant; with 4 ranks also as two replicas of two shards. The numbers of ranks alternate, and each round
uses new processes. All collectives of one additional step are counted and compared with the planner: the bytes must be
equal, or the benchmark fails (except for all-reduces of norms and metrics). Gloo's rates for gathers and reductions are
measured in the same processes on tensors of the size of a layer. `predicted` is the time of one rank, times ranks per
core if there are fewer cores than ranks, plus the bytes divided by these rates.

Model: the same bytes over links, a latency per hop of a ring, and FLOPs over a fraction of the peak
(benchmarks/scale.py). The constants are arguments. Defaults: 989 TFLOP/s, 450 GB/s within a node and 50 GB/s between
nodes are from data sheets of H100, NVLink and 400 Gbit/s; 40 % of the peak is close to what torchtitan publishes for
Llama 3.1 8B with compile (33 to 39 %); 3 us per hop is a guess. Weak scaling: each GPU has --packs packs. Strong
scaling: a step has --all-tokens, and packs shrink if there are more GPUs than full packs. `overlap` hides gathers and
reductions behind computation, `no overlap` does not.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from random_checkpoint import SHAPES, shape, write_random
from record import header, spread, table, write

from benchmarks.scale import Cluster, Estimate, estimate
from benchmarks.traffic import Pack, step_traffic
from fsdptrain.algo.losses import LOSSES
from fsdptrain.config import Config
from fsdptrain.fsdp.backend import FSDPBackend
from fsdptrain.memory.demand import GIB
from fsdptrain.memory.grid import Grid
from fsdptrain.memory.pieces import Pieces
from fsdptrain.model.architecture import model_from_config
from fsdptrain.model.structure import decoder_layers
from fsdptrain.tools.plan.plan import Machine, Planner
from fsdptrain.trainer.batches import PackingRules, make_batches
from fsdptrain.types import LossConfig, Sample
from tests.distributed.collectives import Collectives
from tests.testing import spawn

GPUS = tuple(2**n for n in range(3, 13))
METRICS = 4096  # maximum bytes of all-reduces for norms and metrics per step
SEGMENTS = 4  # per pack


def measure(folder: str, replicas: int, args: argparse.Namespace) -> dict[str, Any]:
    """Measure on one rank: seconds per step, counted and planned bytes by kind, and gloo's rates."""
    config = Config(
        hf_checkpoint=folder,
        bf16=False,
        fsdp_replicate_size=replicas,
        max_tokens_per_gpu=args.tokens,
        rollout_max_response_len=args.tokens // 2,
        seed=args.seed,
    )
    backend = FSDPBackend(config, total_steps=100)
    rules = PackingRules.of(config, layout=backend.layout_probe.layout)
    batches = make_batches(own_samples(args, backend.hf_config.vocab_size), rules, rollout=0)
    [step] = batches
    seconds = []
    for _ in range(args.steps + 1):
        dist.barrier()
        start = time.perf_counter()
        backend.train_step(step.packs, LOSSES["grpo"], LossConfig())
        dist.barrier()
        seconds.append(time.perf_counter() - start)
    with Collectives() as seen:
        backend.train_step(step.packs, LOSSES["grpo"], LossConfig())
    counted: Counter[str] = Counter()
    for (kind, _), size in seen.bytes.items():
        counted[kind] += size
    grid = Grid.of(config, dist.get_world_size())
    sizes = [Pack(pack.num_tokens, pack.loss_positions.numel()) for pack in step.packs]
    planned: Counter[str] = Counter()
    for found in step_traffic(backend.model, config, Pieces(backend.model, grid), sizes):
        planned[found.kind] += found.size
    return {
        "s": [round(s, 4) for s in seconds[1:]],
        "bytes": dict(counted),
        "planned": dict(planned),
        "calls": sum(seen.calls.values()),
        "rates": rates(sum(p.numel() for p in decoder_layers(backend.model)[0].parameters())),
    }


def rates(numel: int) -> dict[str, float]:
    """Measure bytes of the full tensor per second, by collective, over all ranks. Empty for a single rank."""
    size = dist.get_world_size()
    if size == 1:
        return {}
    part, whole = torch.ones(-(-numel // size)), torch.ones(-(-numel // size) * size)
    calls = {
        "all-gather": lambda: dist.all_gather_into_tensor(whole, part),
        "reduce-scatter": lambda: dist.reduce_scatter_tensor(part, whole),
        "all-reduce": lambda: dist.all_reduce(whole),
    }
    found = {}
    for name, call in calls.items():
        seconds = []
        for _ in range(4):
            dist.barrier()
            start = time.perf_counter()
            call()
            seconds.append(time.perf_counter() - start)
        found[name] = whole.nbytes / statistics.median(seconds[1:])
    return found


def own_samples(args: argparse.Namespace, vocab: int) -> list[Sample]:
    """Create samples that fill a pack; half of each sequence is prompt."""
    generator = torch.Generator().manual_seed(args.seed + dist.get_rank())
    length = args.tokens // SEGMENTS
    mask = [False] * (length // 2) + [True] * (length - length // 2)
    ids = torch.randint(0, vocab, (SEGMENTS, length), generator=generator).tolist()
    name = str(dist.get_rank())
    return [Sample(name, ids[i], mask, [0.0] * length, advantage=1.0 - 2 * (i % 2)) for i in range(SEGMENTS)]


def measured(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure a row for each number of ranks."""
    meshes = [(ranks, replicas) for ranks in args.ranks for replicas in (1, 2) if ranks == 4 or replicas == 1]
    runs: dict[tuple[int, int], list[list[dict[str, Any]]]] = {mesh: [] for mesh in meshes}
    with tempfile.TemporaryDirectory() as folder:
        sizes = {"hidden_size": args.hidden, "intermediate_size": 3 * args.hidden, "num_hidden_layers": args.layers}
        heads = {"vocab_size": args.vocab, "head_dim": args.hidden // 8, "num_attention_heads": 8}
        config = shape("tiny", **sizes, **heads)
        write_random(Path(folder), config, seed=args.seed)
        for number in range(args.rounds):
            for mesh in meshes if number % 2 else reversed(meshes):
                runs[mesh].append(spawn(mesh[0], measure, folder, mesh[1], args, timeout=1200.0))
                print(f"  {mesh}: {runs[mesh][-1][0]['s']}", file=sys.stderr)
    rows = []
    for (ranks, replicas), found in runs.items():
        for of_rank in (rank for run in found for rank in run):
            require_planned(of_rank)
        firsts = [run[0] for run in found]
        of_rank = firsts[0]
        times = [statistics.median(run["s"]) for run in firsts]
        alone = [statistics.median(run[0]["s"]) for run in runs[meshes[0]]]
        sending = [
            sum(size / run["rates"][kind] for kind, size in run["planned"].items()) if run["rates"] else 0.0
            for run in firsts
        ]
        crowd = max(1.0, ranks / (os.cpu_count() or 1))
        rows.append(
            {
                "ranks": ranks,
                "replicas": replicas,
                "s": spread(times),
                "over_one_rank": spread(a / b for a, b in zip(times, alone, strict=True)),
                "sending_s": spread(sending),
                "predicted_over_measured": spread(
                    (one * crowd + sent) / whole for one, sent, whole in zip(alone, sending, times, strict=True)
                ),
                "gathered_mb": round(of_rank["bytes"].get("all-gather", 0) / 1e6, 3),
                "reduced_mb": round(of_rank["bytes"].get("reduce-scatter", 0) / 1e6, 3),
                "all_reduced_mb": round(of_rank["bytes"].get("all-reduce", 0) / 1e6, 3),
                "planned": of_rank["planned"],
                "runs": found,
            }
        )
    return rows


def require_planned(run: dict[str, Any]) -> None:
    """Exit if the counted bytes of a rank differ from the planned ones."""
    for kind in run["bytes"].keys() | run["planned"].keys():
        difference = abs(run["bytes"].get(kind, 0) - run["planned"].get(kind, 0))
        if difference > (METRICS if kind == "all-reduce" else 0) and run["rates"]:
            sys.exit(f"counted and planned bytes differ for {kind}: {run['bytes']} and {run['planned']}")


def modelled(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Model a row for each number of GPUs, mesh and kind of scaling."""
    with torch.device("meta"):
        model = model_from_config(shape(args.shape), dtype=torch.float32)
    planner, rows = Planner(model, Machine(GPUS[0], 80 * GIB)), []
    for num_gpus in GPUS:
        cluster = Cluster(
            num_gpus,
            80 * GIB,
            inside=args.inside,
            outside=args.outside,
            peak=args.peak,
            reached=args.reached,
            hop=args.hop,
        )
        own = planner.on(Machine(num_gpus, 80 * GIB))
        smaller = [shards for shards in (8, 64) if shards < num_gpus]
        for shards in (num_gpus, *smaller):
            for kind, tokens, num_packs in (
                ("weak", args.pack_tokens, args.packs * num_gpus),
                ("strong", min(args.pack_tokens, args.all_tokens // num_gpus), None),
            ):
                config = Config(
                    hf_checkpoint=args.shape,
                    gradient_checkpointing=True,
                    fsdp_replicate_size=num_gpus // shards,
                    max_tokens_per_gpu=tokens,
                    rollout_max_response_len=max(1, tokens // 2),
                )
                found = estimate(model, config, own, cluster, num_packs=num_packs or args.all_tokens // tokens)
                assert found is not None, "the mesh has shards and replicas only"
                name = "FSDP" if shards == num_gpus else f"HSDP, {shards} shards"
                rows.append({"gpus": num_gpus, "mesh": name, "scaling": kind, "tokens": tokens, **_numbers(found)})
    return rows


def _numbers(found: Estimate) -> dict[str, float]:
    """Return times, and the fraction of the time spent computing."""
    whole = found.compute_s + found.hidden_s
    return {
        "compute_s": round(found.compute_s, 4),
        "sending_s": round(found.hidden_s, 4),
        "overlap": round(found.compute_s / found.step_s, 4),
        "no overlap": round(found.compute_s / whole, 4),
        "gib": round(found.memory / GIB, 1),
        "sent_gb": round(found.sent("shard", "replicate") / 1e9, 2),
    }


def draw(rows: list[dict[str, Any]], model: list[dict[str, Any]], target: Path, args: argparse.Namespace) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 3 if rows else 2, figsize=(13 if rows else 9, 3.8), layout="constrained")
    if rows:
        names = [f"{r['ranks']}" if r["replicas"] == 1 else f"{r['ranks']}\n2 x 2" for r in rows]
        bottom = [0.0] * len(rows)
        for key, label in (("gathered_mb", "gathered"), ("reduced_mb", "reduced"), ("all_reduced_mb", "all-reduced")):
            values = [row[key] for row in rows]
            axes[0].bar(names, values, bottom=bottom, label=label)
            bottom = [a + b for a, b in zip(bottom, values, strict=True)]
        for place, row in enumerate(rows):
            axes[0].annotate(
                f"{row['s']['median']:.2f} s", (place, bottom[place]), ha="center", va="bottom", fontsize=8
            )
        axes[0].set(title="measured: gloo ranks, one pack each", xlabel="ranks", ylabel="MB of whole tensors in a step")
        axes[0].margins(y=0.12)
        axes[0].legend(frameon=False, fontsize=8, loc="upper left")
    titles = {
        "weak": f"model: {args.packs} packs of {args.pack_tokens} tokens for each GPU",
        "strong": f"model: {args.all_tokens / 1e6:.1f} M tokens in a step of all GPUs",
    }
    for (kind, title), place in zip(titles.items(), axes[-2:], strict=True):
        for number, mesh in enumerate(dict.fromkeys(row["mesh"] for row in model)):
            found = [row for row in model if (row["mesh"], row["scaling"]) == (mesh, kind)]
            gpus = [row["gpus"] for row in found]
            place.plot(gpus, [r["overlap"] for r in found], "o-", color=f"C{number}", label=mesh, markersize=3)
            place.plot(gpus, [r["no overlap"] for r in found], ":", color=f"C{number}")
        place.set(title=title, xlabel="GPUs", ylim=(0, 1.05))
        place.set_xscale("log", base=2)
        place.set_xticks(GPUS[::3], [f"{n:,}" for n in GPUS[::3]])
    axes[-2].set_ylabel(f"share of time computing, {args.shape}")
    axes[-2].plot([], [], ":", color="0.4", label="without overlap")
    axes[-2].legend(frameon=False, fontsize=8, loc="lower left")
    for place in axes:
        place.spines[["top", "right"]].set_visible(False)
    figure.savefig(target, dpi=120)
    pyplot.close(figure)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--quick", action="store_true", help="1 and 2 ranks, a tiny model, one round, and the scaling model")
    add("--json", type=Path, help="path of the report, and of a picture next to it")
    add("--model-only", action="store_true", help="only the scaling model, without running ranks")
    add("--ranks", type=int, nargs="+", default=[1, 2, 4])
    add("--hidden", type=int, default=512, help="hidden size of the model that the ranks run")
    add("--layers", type=int, default=6)
    add("--vocab", type=int, default=8192)
    add("--tokens", type=int, default=1024, help="tokens per pack of a rank")
    add("--steps", type=int, default=3, help="steps per round, after one warm-up step")
    add("--rounds", type=int, default=5)
    add("--seed", type=int, default=0)
    add("--shape", choices=SHAPES, default="Llama-3.1-8B", help="shape in the scaling model")
    add("--pack-tokens", type=int, default=8192)
    add("--packs", type=int, default=4, help="packs per GPU, weak scaling")
    add("--all-tokens", type=int, default=4_194_304, help="tokens per step on all GPUs, strong scaling")
    add("--inside", type=float, default=450e9, help="bandwidth to GPUs of the same node [bytes/s]")
    add("--outside", type=float, default=50e9, help="bandwidth of a GPU to other nodes [bytes/s]")
    add("--peak", type=float, default=989e12, help="peak of a GPU [FLOP/s]")
    add("--reached", type=float, default=0.4, help="fraction of the peak reached without waiting")
    add("--hop", type=float, default=3e-6, help="latency per hop of a ring [s]")
    args = parser.parse_args()
    if args.quick:
        args.ranks, args.hidden, args.layers, args.vocab, args.tokens = [1, 2], 64, 2, 256, 128
        args.steps, args.rounds, args.shape = 1, 1, "Qwen3-0.6B"
    return args


def main() -> None:
    args = arguments()
    begin = header()
    rows = [] if args.model_only else measured(args)
    model = modelled(args)
    constants = {name: getattr(args, name) for name in ("inside", "outside", "peak", "reached", "hop")}
    write(args.json, {**begin, "constants": constants, "measured": rows, "model": model})
    if args.json:
        draw(rows, model, args.json.with_suffix(".png"), args)
    if rows:
        print(table([{k: v for k, v in row.items() if k not in ("runs", "planned")} for row in rows]))
    print(table(model))
    print(json.dumps({"measured": len(rows), "model": len(model)}))


if __name__ == "__main__":
    main()
