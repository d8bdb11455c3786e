r"""Tokens per second, MFU and peak memory on one GPU, by model shape, pack length and kind of step.

    python benchmarks/mfu.py --json benchmarks/results/mfu.json                    # everything: hours
    python benchmarks/mfu.py --shapes Qwen3-4B --tokens 16384 --minutes 5          # what fits in five minutes
    python benchmarks/mfu.py --shapes Qwen3-4B --tokens 131072 --kinds sft --adapters full \
        --variants A "activations on host" "all on host"                           # does one such sequence fit?
    python benchmarks/mfu.py --quick                                               # a tiny shape on the CPU, seconds

Uses random weights of the shape and the backend of a real run, with one full pack per step: forward, loss, backward,
clipping and AdamW. The kinds of step are

    sft    one sequence as long as the pack, every token trained on: the usual setup of published figures
    grpo   a group of eight with a prompt of --prompt tokens, completions of equal length that fill the pack

Variant A recomputes every layer (--gradient-checkpointing) in bfloat16. B to I are combinations whose speed was
predicted before the first run on a GPU; the others change one thing of A. Each case runs in a new process, so that its
kernels and compilers do not affect the next. After --warm-up steps, --steps steps are measured: median, minimum and
maximum. Cases that do not fit the device are reported as such. Cases that --json already holds are not measured again.

FLOPs are model FLOPs, without recomputation; `mfu` counts all pairs of tokens of a sequence, `mfu_causal` only those
that attention uses (trainer/speed.py). On another device it is a share of 1 TFLOPS. --profile traces one
more step and adds its parts and the longest device operations to the report.

PEERS has figures published by other projects, per GPU of their machines, with sources.
"""

import argparse
import json
import multiprocessing
import sys
import tempfile
import time
from contextlib import nullcontext
from dataclasses import asdict, astuple, dataclass, fields
from multiprocessing.connection import Connection
from pathlib import Path
from random import Random
from typing import Any

import torch
from random_checkpoint import SHAPES, shape, write_random
from record import header, kept_rows, peak_mib, spread, start_peak, table, wait_for_device, write
from traced import longest, parts

from fsdptrain.errors import describe
from fsdptrain.types import Sample

BASE: dict[str, Any] = {"gradient_checkpointing": True}
_C = {"compile": True}
_E = {**_C, "logprob_chunk_size": 2**20}  # the whole pack at once
_G = {**_E, "gradient_checkpointing": False}
_H = {**_G, "attn_implementation": "flash_attention_3"}
VARIANTS: dict[str, dict[str, Any]] = {
    "A": {},
    "C": _C,
    "E": _E,
    "F": {"liger": True, "logprob_chunk_size": 2**20},
    "G": _G,
    "H": _H,
    "I": {**_H, "fsdp_reshard_after_forward": False},
    "liger": {"liger": True},
    "nothing recomputed": {"gradient_checkpointing": False},
    "sdpa by segment": {"attn_implementation": "sdpa"},
    "flash-attn 2": {"attn_implementation": "flash_attention_2"},
    "activations on host": {"offload_activations": True},
    "optimizer on host": {"offload_optimizer": True},
    "all on host": {"fsdp_cpu_offload": True},
}
ADAPTERS = {"full": {}, "lora": {"lora_rank": 32, "lora_alpha": 32}}
_PRIME_RL = "https://github.com/PrimeIntellect-ai/prime-rl/tree/main/benchmarks/baselines"  # one file per case
_TORCHTITAN = "https://github.com/pytorch/torchtitan/blob/main/benchmarks/llama3_h100_202412_torchtitan.md"  # table 1
PEERS = [
    {"who": "prime-rl, 8 GPUs", "shape": "Qwen3-4B", "step": "sft", "tokens": 16_384, "device": "H200",
     "tokens_per_s": 6643, "mfu": 0.284, "source": _PRIME_RL},
    {"who": "prime-rl, 8 GPUs", "shape": "Qwen3-4B", "step": "grpo", "tokens": 16_384, "device": "H200",
     "tokens_per_s": 3430, "mfu": 0.147, "source": _PRIME_RL},
    {"who": "prime-rl, 1 GPU", "shape": "Qwen3-0.6B", "step": "sft", "tokens": 16_384, "device": "H100", "mfu": 0.237,
     "source": _PRIME_RL},
    {"who": "torchtitan, compile, 8 GPUs", "shape": "Llama-3.1-8B", "step": "sft", "tokens": 8192, "device": "H100",
     "tokens_per_s": 6667, "mfu": 0.39, "source": _TORCHTITAN},
]  # fmt: skip
GROUP = 8


@dataclass(frozen=True)
class Case:
    """One case: a row of the report."""

    shape: str
    tokens: int  # of the pack
    step: str  # sft or grpo
    adapter: str  # full or lora
    variant: str

    @property
    def name(self) -> str:
        return f"{self.shape} {self.tokens} {self.step} {self.adapter} {self.variant}"


def make_samples(case: Case, *, vocab: int, prompt: int, seed: int) -> list[Sample]:
    """Create samples that fill a pack."""
    draw = Random(seed)
    num_segments = 1 if case.step == "sft" else GROUP
    length = case.tokens // num_segments
    shared = [draw.randrange(vocab) for _ in range(0 if case.step == "sft" else min(prompt, length // 2))]
    samples = []
    for number in range(num_segments):
        own = [draw.randrange(vocab) for _ in range(length - len(shared))]
        mask = [False] * len(shared) + [True] * len(own)
        samples.append(Sample("0", [*shared, *own], mask, [0.0] * length, advantage=1.0 if number % 2 else -1.0))
    return samples


def run_case(case: Case, folder: str, options: argparse.Namespace, pipe: Connection) -> None:
    """Measure a case in a new process and send its row."""
    try:
        pipe.send(measure(case, folder, options))
    except torch.OutOfMemoryError:
        pipe.send({"failed": "does not fit the device"})
    except Exception as error:  # noqa: BLE001 - report any failure as a row
        pipe.send({"failed": describe(error)[:160]})


def measure(case: Case, folder: str, options: argparse.Namespace) -> dict[str, Any]:
    from fsdptrain import Config
    from fsdptrain.algo.losses import LOSSES
    from fsdptrain.fsdp.backend import FSDPBackend
    from fsdptrain.platform import process_group
    from fsdptrain.trainer.batches import PackingRules, make_batches
    from fsdptrain.trainer.speed import Speed, model_flops, peak_tflops
    from fsdptrain.types import LossConfig

    config = Config(
        hf_checkpoint=folder,
        bf16=torch.cuda.is_available(),
        max_tokens_per_gpu=case.tokens,
        rollout_max_response_len=max(1, case.tokens // 2),
        lr=1e-6,
        kl_loss_coef=0.0,
        seed=options.seed,
        **BASE | VARIANTS[case.variant] | ADAPTERS[case.adapter],
    )
    loss = LOSSES[case.step]
    begin = time.perf_counter()
    with process_group(600):
        backend = FSDPBackend(config, total_steps=10**6)
        speed = Speed(model_flops(backend.model), peak_tflops(backend.device) or 1.0)
        samples = make_samples(case, vocab=backend.hf_config.vocab_size, prompt=options.prompt, seed=options.seed)
        rules = PackingRules.of(config, layout=backend.layout_probe.layout)
        ready = time.perf_counter() - begin
        steps, pack_s, rows = [], [], []
        tracer: Any = nullcontext()
        start_peak()
        for number in range(options.warm_up + options.steps):
            last = number == options.warm_up + options.steps - 1
            if options.profile and last:
                tracer = torch.profiler.profile()
            wait_for_device()
            start = time.perf_counter()
            batches = make_batches(samples, rules, rollout=0)
            pack_s.append(time.perf_counter() - start)
            with tracer:
                metrics = backend.train_step(batches[0].packs, loss, LossConfig())
                wait_for_device()
            steps.append(time.perf_counter() - start)
            rows.append(speed.utilization(batches, train_s=steps[-1]))
        counted = slice(options.warm_up, None if not options.profile else -1)
        found = {
            "layout": backend.layout_probe.line,
            "loss": metrics["loss/total"],
            "start_s": round(ready, 2),
            "step_s": spread(steps[counted]),
            "pack_s": spread(pack_s[counted]),
            "tokens_per_s": spread(case.tokens / s for s in steps[counted]),
            "mfu": spread(row["perf/mfu"] for row in rows[counted]),
            "mfu_causal": spread(row["perf/mfu_causal"] for row in rows[counted]),
            "peak_gib": round(peak_mib() / 1024, 2),
            "runs": [round(s, 4) for s in steps],
        }
        if options.profile:
            found |= {"parts": parts(tracer), "profile": longest(tracer)}
        return found


def cases(options: argparse.Namespace) -> list[Case]:
    """Return the cases, one shape after the other, and within a shape those of the first variant first."""
    return [
        Case(name, tokens, step, adapter, variant)
        for name in options.shapes
        for variant in options.variants
        for tokens in options.tokens
        for step in options.kinds
        for adapter in options.adapters
    ]


def sweep(options: argparse.Namespace) -> tuple[list[dict[str, Any]], int]:
    """Measure the cases that the report does not have yet. Returns the rows, and the number of cases left out."""
    context = multiprocessing.get_context("spawn")
    deadline = time.monotonic() + 60 * options.minutes
    rows = [] if options.fresh or not options.json else kept_rows(options.json, options.begin, name="results")
    known = {tuple(row[field.name] for field in fields(Case)) for row in rows}
    wanted = [case for case in cases(options) if astuple(case) not in known]
    left_out = 0
    with nullcontext(options.folder) if options.folder else tempfile.TemporaryDirectory() as folder:
        for case in wanted:
            if time.monotonic() > deadline:
                left_out += 1
                continue
            checkpoint = Path(folder) / case.shape
            if not (checkpoint / "complete").exists():
                # in a process of its own: with a GPU it leaves a context of 1.5 GiB there
                writer = context.Process(target=write_checkpoint, args=(checkpoint, case.shape, options.seed))
                writer.start()
                writer.join()
            ours, theirs = context.Pipe(duplex=False)
            worker = context.Process(target=run_case, args=(case, str(checkpoint), options, theirs))
            worker.start()
            theirs.close()
            left = max(10.0, min(deadline - time.monotonic() + 30, 60 * options.case_minutes))
            found = receive(ours, left)
            worker.kill()
            worker.join()
            rows.append({**asdict(case), **found})
            print(f"  {case.name}: {found.get('failed') or found['mfu']}", file=sys.stderr, flush=True)
            write(options.json, report(options, rows))  # write after each row, so that results survive a failure
    return rows, left_out


def write_checkpoint(folder: Path, name: str, seed: int) -> None:
    write_random(folder, shape(name), seed=seed)
    (folder / "complete").touch()


def receive(pipe: Connection, seconds: float) -> dict[str, Any]:
    if not pipe.poll(seconds):
        return {"failed": f"not done after {seconds:.0f} s"}
    try:
        return pipe.recv()
    except EOFError:
        return {"failed": "its process died without a word: out of host memory?"}


def report(options: argparse.Namespace, rows: list[dict[str, Any]]) -> dict[str, Any]:
    return {**options.begin, "peers": PEERS, "variants": VARIANTS, "base": BASE, "results": rows}


def _cells(row: dict[str, Any]) -> dict[str, Any]:
    peer = next((p for p in PEERS if all(p[key] == row[key] for key in ("shape", "step", "tokens"))), None)
    said = peer and f"{peer['who']}, {peer['device']}: {peer['mfu']:.1%} {peer.get('tokens_per_s', '')}"
    numbers: dict[str, Any] = {"tokens/s": row.get("failed", ""), "MFU": "", "MFU causal": "", "GiB": ""}
    if "failed" not in row:
        shares = {name: f"{row[key]['median']:.1%}" for name, key in (("MFU", "mfu"), ("MFU causal", "mfu_causal"))}
        numbers = {"tokens/s": round(row["tokens_per_s"]["median"]), **shares, "GiB": row["peak_gib"]}
    return {**{key: row[key] for key in ("shape", "tokens", "step", "adapter", "variant")}, **numbers, "peer": said}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--quick", action="store_true", help="a tiny shape on the CPU: checks that it runs")
    add("--json", type=Path, help="path of the report, written after each row")
    add("--shapes", nargs="+", choices=SHAPES, default=["Qwen3-0.6B", "Qwen3-4B", "Qwen3-8B", "Llama-3.1-8B"])
    add("--tokens", nargs="+", type=int, default=[8192, 16_384, 32_768, 65_536], help="sizes of the pack [tokens]")
    add("--kinds", nargs="+", choices=("sft", "grpo"), default=["grpo", "sft"])
    add("--adapters", nargs="+", choices=list(ADAPTERS), default=list(ADAPTERS))
    add("--variants", nargs="+", choices=list(VARIANTS), default=list(VARIANTS))
    add("--prompt", type=int, default=512, help="prompt length of a group, at most half of each sequence [tokens]")
    add("--warm-up", type=int, default=2, help="steps before the measurement")
    add("--steps", type=int, default=5)
    add("--minutes", type=float, default=600.0, help="start no case after this time")
    add("--case-minutes", type=float, default=10.0, help="stop a case after this time")
    add("--profile", action="store_true", help="trace one more step per row")
    add("--seed", type=int, default=0)
    add("--folder", type=Path, help="folder where weights stay for the next call, up to 16 GB; default: temporary")
    add("--fresh", action="store_true", help="measure everything again, instead of only what --json does not hold")
    options = parser.parse_args()
    if options.quick:
        options.shapes, options.tokens = ["tiny"], [256]
        options.warm_up, options.steps = 1, 2
    elif not torch.cuda.is_available():
        sys.exit("this machine has no GPU, and MFU is about one: run it where there is one, or --quick here")
    options.steps += options.profile
    options.begin = header()
    return options


def main() -> None:
    options = arguments()
    rows, left_out = sweep(options)
    if not torch.cuda.is_available():
        print("No GPU here: these rows say that the code runs, nothing of speed.")
    print(table([_cells(row) for row in rows]) if rows else "No case had time to begin.")
    failed = [row for row in rows if "failed" in row]
    print(json.dumps({"rows": len(rows), "failed": len(failed), "left_out": left_out}))
    sys.exit(1 if left_out or len(failed) == len(rows) else 0)


if __name__ == "__main__":
    main()
