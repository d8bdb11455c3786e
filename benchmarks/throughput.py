"""Tokens per second of every engine, for weight sync plus rollout.

    python benchmarks/throughput.py --vllm-python .venv-vllm/bin/python                # hf, vllm, vllm-server
    python benchmarks/throughput.py --quick --engines hf                               # seconds

Each engine runs in a separate process with the same random float32 model and the same prompts, at temperature 1 and
with logprobs. Engines alternate, one round each, with one warm-up round; idle engines sleep. The result is the median
over rounds of the ratio to `hf` in the same round. Responses end at a token with a probability of about 1 in 264, or at
the length limit.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from record import ROOT, header, spread, write

ENGINES = ("hf", "vllm", "vllm-server")
VOCAB = 264
SIZES = {
    "0.1M": {"head_dim": 32},
    "2M": {
        "hidden_size": 192,
        "num_hidden_layers": 4,
        "intermediate_size": 512,
        "num_attention_heads": 3,
        "num_key_value_heads": 3,
        "head_dim": 64,
    },
}
Round = dict[str, float]  # tokens, seconds of the weight sync and of generation


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--engines", nargs="+", default=list(ENGINES), choices=ENGINES)
    parser.add_argument("--sizes", nargs="+", default=list(SIZES), choices=SIZES)
    parser.add_argument(
        "--vllm-python", type=os.path.abspath, help="Python of an environment with vLLM and fsdptrain's dependencies"
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--num-prompts", type=int, default=16)
    parser.add_argument("--num-samples", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--compile", action="store_true", help="let vLLM compile; default on a CPU: eager")
    parser.add_argument("--quick", action="store_true", help="a small model and rollout: checks that it runs")
    parser.add_argument("--json", type=Path, help="path of the report")
    parser.add_argument("--side", help=argparse.SUPPRESS)  # internal: passed to the processes that this script starts
    parser.add_argument("--model", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.quick:
        args.sizes, args.rounds, args.num_prompts, args.num_samples, args.max_tokens = ["0.1M"], 2, 4, 2, 16
    if args.side is not None:
        run_side(args)
        return
    if args.vllm_python is None and any(engine != "hf" for engine in args.engines):
        parser.error("--vllm-python is missing: without vLLM use --engines hf")
    begin = header()
    rows = [row for size in args.sizes for row in compare(size, args)]
    write(args.json, {**begin, "results": rows})


def compare(size: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    from tests.testing import save_tiny_checkpoint

    sides = args.engines
    with tempfile.TemporaryDirectory() as folder:
        model = save_tiny_checkpoint(
            Path(folder) / "model", **SIZES[size], tie_word_embeddings=False, max_position_embeddings=1024
        )
        processes = {side: start(side, model, args) for side in sides}
        try:
            rounds: dict[str, list[Round]] = {side: [] for side in sides}
            for number in range(args.rounds + 1):
                for side in sides if number % 2 else reversed(sides):
                    found = ask(processes[side])
                    if number:  # the first round is a warm-up
                        rounds[side].append(found)
        finally:
            for process in processes.values():
                process.communicate()  # ends the process by closing its input
    rows = [summary(size, side, rounds) for side in sides]
    for row in rows:
        print(json.dumps(row), flush=True)
    return rows


def start(side: str, model: Path, args: argparse.Namespace) -> "subprocess.Popen[str]":
    """Start the process of a side. It waits for input."""
    python = args.vllm_python if side == "vllm" else sys.executable
    own = ["--side", side, "--model", str(model), "--vllm-python", str(args.vllm_python)]
    own += ["--compile"] * args.compile + [
        "--num-prompts",
        str(args.num_prompts),
        "--num-samples",
        str(args.num_samples),
    ]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TOKENIZERS_PARALLELISM": "false"}
    command = [str(python), str(Path(__file__).resolve()), *own, "--max-tokens", str(args.max_tokens)]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, env=environment, cwd=model.parent, stdin=pipe, stdout=pipe, text=True)


def ask(process: "subprocess.Popen[str]") -> Round:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write("go\n")
    process.stdin.flush()
    for line in process.stdout:  # engines also print other lines
        if line.startswith("{"):
            return json.loads(line)
    sys.exit(f"{process.args[1:4]} ended")  # pyright: ignore[reportIndexIssue] - a list, see `start`


def run_side(args: argparse.Namespace) -> None:
    """Run one round per input line."""
    from fsdptrain.platform import process_group

    with process_group(600), engine_side(args) as make:
        for _ in sys.stdin:
            print(json.dumps(make()), flush=True)


def prompts(args: argparse.Namespace) -> list[list[int]]:
    import torch

    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(8, 80, (args.num_prompts,), generator=generator).tolist()
    return [torch.randint(10, VOCAB, (n,), generator=generator).tolist() for n in lengths]


@contextmanager
def engine_side(args: argparse.Namespace) -> Iterator[Callable[[], Round]]:
    import torch
    from transformers import AutoModelForCausalLM

    from fsdptrain import Config
    from fsdptrain.platform import local_device
    from fsdptrain.rollout import engine_factory
    from fsdptrain.types import Prompt, SamplingParams

    options: dict[str, Any] = {"hf_checkpoint": str(args.model), "bf16": False, "rollout_engine": args.side}
    options |= {"rollout_max_response_len": args.max_tokens, "rollout_max_prompt_len": 80, "output_dir": "run"}
    if args.side != "hf":
        options |= {
            "rollout_kv_cache_gib": 0.25,
            "rollout_engine_args": {"max_num_seqs": 256, "enforce_eager": not args.compile},
        }
    if args.side == "vllm-server":
        options |= {"rollout_num_servers": 1, "rollout_server_python": str(args.vllm_python)}
    device = local_device()
    make_engine = engine_factory(args.side)
    engine = make_engine(Config(**options), checkpoint=args.model, device=device)
    weights = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).to(device).state_dict()
    asked = [Prompt(str(i), ids, "") for i, ids in enumerate(prompts(args))]
    version = 0

    def make() -> Round:
        nonlocal version
        version += 1
        for tensor in weights.values():
            tensor.mul_(1.0 + 1e-4)  # change all weights, so that all are sent
        begin = time.perf_counter()
        engine.wake_up()
        engine.update_weights(weights.items(), version)
        pushed = time.perf_counter()
        sampling = SamplingParams(num_samples=args.num_samples, max_tokens=args.max_tokens, seed=version)
        tokens = sum(len(made.token_ids) for made in engine.generate(asked, sampling))
        end = time.perf_counter()
        engine.sleep()
        return {"tokens": tokens, "hand_over": pushed - begin, "generate": end - pushed}

    try:
        yield make
    finally:
        engine.close()


def summary(size: str, side: str, rounds: dict[str, list[Round]]) -> dict[str, Any]:
    """Summarize one side. Ratios compare the same round of this side and `hf`."""
    own = rounds[side]

    def whole(found: Round) -> float:
        return found["tokens"] / (found["hand_over"] + found["generate"])

    def generation(found: Round) -> float:
        return found["tokens"] / found["generate"]

    def to_hf(speed: Callable[[Round], float]) -> dict[str, float] | None:
        pairs = zip(own, rounds.get("hf", []), strict=False)
        ratios = [speed(own) / speed(other) for own, other in pairs]
        return spread(ratios) if ratios else None

    return {
        "model": size,
        "engine": side,
        "tokens_per_s": round(statistics.median(map(whole, own))),
        "to_hf": to_hf(whole),
        "generate_only_tokens_per_s": round(statistics.median(map(generation, own))),
        "generate_only_to_hf": to_hf(generation),
        "hand_over_s": round(statistics.median(found["hand_over"] for found in own), 3),
        "runs": own,
        "load_average": round(os.getloadavg()[0], 1),
    }


if __name__ == "__main__":
    main()
