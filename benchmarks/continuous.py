"""Continuous rollouts against whole ones, where one in 20 responses is 10 times as long as the others.

    python benchmarks/continuous.py --vllm-python .venv-vllm/bin/python             # vLLM in process, 3 rounds
    python benchmarks/continuous.py --vllm-python .venv-vllm/bin/python --quick     # one short round; writes no file

A Qwen3 of 12 narrow layers with random weights is trained by `fsdptrain` with vLLM on a CPU. It has so many layers that
the time of a decoding step hardly depends on the number of sequences, as on a GPU. Responses have no end: each has 80
tokens, or 800 where a hash of prompt and sample says so, the same in all runs. The sides, in turn: `whole`, where one
rollout is generated at a time and a step waits for all its samples (--max-staleness 0); `whole, ahead`, where two are
generated together and a step waits for the older one (--no-partial-rollout); and `continuous`.

With `--engines vllm-server` server and trainer need more than two cores: a vLLM worker and its scheduler keep one each
busy while they wait for each other.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from zlib import crc32

import record
from record import ROOT

from fsdptrain.tools.report.report import read_metrics
from fsdptrain.types import Prompt, SamplingParams

RESULTS = ROOT / "benchmarks" / "results" / "continuous.json"
SHORT, LONG, ONE_IN = 80, 800, 20  # response lengths [tokens]; share of long ones
WARM_UP = 3  # first steps that are not counted: no group has gone on for long yet, and vLLM warms up
DRAIN = 2  # last steps that are not counted: they wait for the groups that are left
COMMON = [
    *("--prompt-data", "reasoning_gym:spell_backward?max_word_len=4&size=2000", "--system-prompt", ""),
    *("--reward", "benchmarks.continuous:variety", "--rollout-batch-size", "4", "--n-samples-per-prompt", "4"),
    *("--rollout-max-prompt-len", "100", "--rollout-max-response-len", str(LONG), "--max-tokens-per-gpu", "2048"),
    *("--lr", "1e-4", "--no-bf16", "--eval-interval", "0", "--keep-last", "0", "--no-export", "--log-to"),
    *("--rollout-kv-cache-gib", "0.25", "--rollout-engine-args", "max_num_seqs=128"),
]
SIDES: Mapping[str, Mapping[str, Sequence[str]]] = {
    "vllm": {
        "whole": ["--max-staleness", "0"],
        "whole, ahead": ["--max-staleness", "1", "--no-partial-rollout", "--mismatch-correction", "icepop"],
        "continuous": ["--max-staleness", "1", "--mismatch-correction", "icepop"],
    },
    "vllm-server": {
        "whole": ["--max-staleness", "1", "--no-partial-rollout", "--mismatch-correction", "icepop"],
        "continuous": ["--max-staleness", "1", "--mismatch-correction", "icepop"],
    },
}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--vllm-python", type=Path, required=True, help="Python of an environment with vLLM")
    parser.add_argument("--engines", nargs="+", default=["vllm"], choices=list(SIDES))
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--folder", type=Path, default=Path("runs/continuous"), help="folder of the runs")
    parser.add_argument("--quick", action="store_true", help="one pair of few steps; writes no file")
    args, begin = parser.parse_args(argv), record.header()
    folder = args.folder.resolve()
    shutil.rmtree(folder, ignore_errors=True)
    steps, pairs = (WARM_UP + DRAIN + 2, 1) if args.quick else (args.steps, args.pairs)
    checkpoint, rows = save_model(folder / "model"), []
    for pair in range(pairs):
        for engine in args.engines:
            for side in SIDES[engine]:
                rows.append(measure(engine, side, pair, steps, checkpoint, folder, args.vllm_python))
                print(json.dumps(rows[-1]), flush=True)
    summaries = [summary(engine, rows) for engine in args.engines]
    for found in summaries:
        print(json.dumps(found), flush=True)
    if not args.quick:
        record.write(RESULTS, {**begin, "steps": steps - WARM_UP - DRAIN, "summary": summaries, "runs": rows})


def save_model(folder: Path) -> Path:
    from tests.testing import save_tiny_checkpoint

    return save_tiny_checkpoint(folder, head_dim=32, num_hidden_layers=12)


def measure(
    engine: str, side: str, pair: int, steps: int, checkpoint: Path, folder: Path, vllm_python: Path
) -> dict[str, Any]:
    run = folder / f"{engine}-{side.replace(', ', '-')}-{pair}"
    argv = ["--hf-checkpoint", str(checkpoint), *COMMON, "--rollout-engine", engine, *SIDES[engine][side]]
    argv += ["--num-rollout", str(steps), "--output-dir", str(run), "--rollout-seed", str(pair)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "TOKENIZERS_PARALLELISM": "false"}
    if engine == "vllm-server":
        argv += ["--rollout-num-servers", "1", "--rollout-server-python", str(vllm_python.absolute())]
        environment["VLLM_CPU_OMP_THREADS_BIND"] = "0"  # one core for the server, the others for the trainer
    python = str(vllm_python) if engine == "vllm" else sys.executable
    subprocess.run([python, __file__, "run", *argv], check=True, env=environment)
    rows = [row for row in read_metrics(run) if "perf/step_s" in row][WARM_UP:-DRAIN]
    seconds = sum(row["perf/step_s"] for row in rows)
    tokens = sum(16 * row["completion/length_mean"] * (1 - row.get("staleness/masked_fraction", 0.0)) for row in rows)

    def mean(name: str) -> float | None:
        found = [row[name] for row in rows if name in row]
        return round(statistics.fmean(found), 3) if found else None

    return {
        "engine": engine,
        "side": side,
        "pair": pair,
        "trained_tokens_per_s": round(tokens / seconds, 1),
        "seconds_per_step": round(seconds / len(rows), 3),
        "trainer_idle": round(sum(row["perf/idle_s"] for row in rows) / seconds, 3),
        "engine_idle": round(sum(row["perf/generate_idle_s"] for row in rows) / seconds, 3),
        "slot_occupancy": mean("rollout/slot_occupancy"),
        "unfinished_groups": mean("rollout/unfinished_groups"),
        "staleness_mean": mean("staleness/mean"),
        "masked_fraction": mean("staleness/masked_fraction"),
        "length_mean": mean("completion/length_mean"),
        "load_average": round(os.getloadavg()[0], 1),
    }


def summary(engine: str, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the ratios of `continuous` to each other side, pair by pair."""
    speed = {(row["side"], row["pair"]): row["trained_tokens_per_s"] for row in rows if row["engine"] == engine}
    pairs = sorted({pair for _, pair in speed})
    ratios = {
        side: [round(speed["continuous", pair] / speed[side, pair], 2) for pair in pairs]
        for side in SIDES[engine]
        if side != "continuous"
    }
    return {"engine": engine, "continuous_times_as_fast_as": ratios}


def variety(prompt: Prompt, response: str) -> float:
    return len(set(response)) / 40


def with_long_tail(options: Any) -> Any:
    """Change `sampling_options`: no stop tokens, and a length that a hash of prompt and sample decides."""

    def changed(prompt: Prompt, index: int, sampling: SamplingParams, stop_token_ids: Sequence[int]) -> dict[str, Any]:
        found = options(prompt, index, sampling, ())
        is_long = crc32(f"{prompt.id}#{index}".encode()) % ONE_IN == 0
        return found | {"max_tokens": min(found["max_tokens"], LONG if is_long else SHORT)}

    return changed


def run_with_long_tail(argv: Sequence[str]) -> int:
    """Run `fsdptrain *argv` in this process, with both kinds of vLLM engines changed."""
    from fsdptrain import cli
    from fsdptrain.vllm import in_process
    from fsdptrain.vllm.server import engine

    for module in (in_process, engine):
        module.sampling_options = with_long_tail(module.sampling_options)
    return cli.run(argv)


if __name__ == "__main__":
    if sys.argv[1:2] == ["run"]:
        sys.exit(run_with_long_tail(sys.argv[2:]))
    main()
