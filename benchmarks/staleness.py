"""Effect of sample staleness on GRPO: held-out accuracy and time saved, for every engine.

    python benchmarks/staleness.py --vllm-python .venv-vllm/bin/python      # 3 engines x 3 ages x 3 seeds: 27 runs
    python benchmarks/staleness.py --engines hf --correction tis            # the same with another correction
    python benchmarks/staleness.py --engines hf --seeds 0                   # without vLLM
    python benchmarks/staleness.py --quick --engines hf --seeds 0           # seconds; writes no file

The task, model and warm-up are those of the quickstart (`make demo`): spelling words backward, 0.1 M parameters. The
warm-up runs once; seeds are those of GRPO, for sampling and prompt order. Each run is the quickstart's second half, 16
rollouts of two optimizer steps, with --max-staleness 0, 1 and 4; above 0 with --mismatch-correction icepop or the given
one. Runs are sequential; those of vllm-server share one server. Seconds are sums over the rollouts of a run, except the
first, in which engines warm up. Results are written after each run, and existing runs are not repeated; --fresh starts
over.
"""

import argparse
import asyncio
import json
import os
import secrets
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import record
import torch
from algorithms import second_half, warm_start
from record import ROOT

from fsdptrain import Config
from fsdptrain.algo.corrections import CORRECTIONS
from fsdptrain.config import to_yaml
from fsdptrain.tools.report.report import read_metrics, read_series
from fsdptrain.vllm.server.build import server_arguments
from fsdptrain.vllm.server.client import VLLMClient
from fsdptrain.vllm.server.process import ServerProcess

RESULTS = ROOT / "benchmarks" / "results" / "staleness.json"
ENGINES = ("hf", "vllm", "vllm-server")
NUM_ROLLOUTS = 16
KEY = "STALENESS_KEY"  # environment variable
STAGES = ("step", "generate", "reward", "logprobs", "train", "sync", "idle")
IDLE = ("generate", "reward", "train", "sync")


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--engines", nargs="+", default=list(ENGINES), choices=ENGINES)
    parser.add_argument("--staleness", type=int, nargs="+", default=[0, 1, 4], metavar="K")
    parser.add_argument("--correction", default="icepop", choices=CORRECTIONS, help="correction for K > 0")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument(
        "--vllm-python", type=Path, help="Python of an environment with vLLM and fsdptrain's dependencies"
    )
    parser.add_argument("--folder", type=Path, default=Path("runs/staleness"), help="folder of the runs")
    parser.add_argument("--fresh", action="store_true", help="delete existing results")
    parser.add_argument("--quick", action="store_true", help="two rollouts after a short warm-up; writes no file")
    args, begin = parser.parse_args(argv), record.header()
    if args.vllm_python is None and any(engine != "hf" for engine in args.engines):
        parser.error("--vllm-python is missing: without vLLM use --engines hf")
    folder = (args.folder / ("quick" if args.quick else "full")).resolve()
    start = warm_start(0, folder / "warm-up", quick=args.quick)
    rows = [] if args.fresh or args.quick else record.kept_rows(RESULTS, begin)
    os.environ[KEY] = secrets.token_hex(8)
    with server(start, folder, args) as url:
        for seed in args.seeds:
            for engine in args.engines:
                for age in args.staleness:
                    wanted = (engine, age, correction_of(age, args), seed)
                    if not any((*cell_of(row), row["seed"]) == wanted for row in rows):
                        rows.append(measure(engine, age, seed, start, folder, url, args))
                        print(json.dumps(rows[-1]), flush=True)
                        if not args.quick:
                            write(begin, rows)


@contextmanager
def server(start: Path, folder: Path, args: argparse.Namespace) -> Iterator[str | None]:
    """Start one server for all runs of vllm-server. It takes minutes to start on a busy machine."""
    if "vllm-server" not in args.engines:
        yield None
        return
    config = Config(**recipe("vllm-server", 0, 0, start, folder, None, quick=args.quick))
    folder.mkdir(parents=True, exist_ok=True)
    arguments = server_arguments(config, start, on_gpu=torch.cuda.is_available())
    process = ServerProcess(str(args.vllm_python), arguments, folder / "server0.log", api_key=os.environ[KEY])
    process.start()
    try:
        client = VLLMClient(process.url, os.environ[KEY])
        while not asyncio.run(client.is_healthy(timeout=1.0)):
            assert not process.has_ended, process.last_words()
            time.sleep(0.5)
        yield process.url
    finally:
        process.close()


def measure(
    engine: str, age: int, seed: int, start: Path, folder: Path, url: str | None, args: argparse.Namespace
) -> dict[str, Any]:
    """Run once. Returns the accuracy at both ends and the time by stage."""
    correction = correction_of(age, args)
    run = folder / f"{engine}-K{age}-{correction}-seed{seed}"
    shutil.rmtree(run, ignore_errors=True)  # remains of an interrupted run
    values = recipe(engine, age, seed, start, run, url, quick=args.quick)
    values["algorithm"]["mismatch_correction"] = correction
    config = Config(**values)
    written = folder / f"{run.name}.yaml"
    written.write_text(to_yaml(config))
    python = args.vllm_python if engine == "vllm" else sys.executable
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "TOKENIZERS_PARALLELISM": "false"}
    begin = time.monotonic()
    subprocess.run([str(python), "-m", "fsdptrain", "--recipe", str(written)], check=True, env=environment)
    seconds = time.monotonic() - begin
    accuracy, greedy = (read_series(run, f"eval/{name}/accuracy")[1] for name in ("heldout", "heldout_greedy"))
    steps = [row for row in read_metrics(run) if "perf/step_s" in row]
    mismatch = [row["mismatch/abs_mean"] for row in steps if "mismatch/abs_mean" in row]  # none without an advantage
    return {
        "engine": engine,
        "max_staleness": age,
        "mismatch_correction": correction,
        "seed": seed,
        "before": round(accuracy[0], 4),
        "after": round(accuracy[-1], 4),
        "greedy_before": round(greedy[0], 4),
        "greedy_after": round(greedy[-1], 4),
        "reward_last_4": round(statistics.fmean(row["reward/mean"] for row in steps[-4:]), 4),
        "staleness_mean": round(statistics.fmean(row.get("staleness/mean", 0.0) for row in steps), 3),
        "staleness_max": max(row.get("staleness/max", 0.0) for row in steps),
        "mismatch_abs_mean": round(statistics.fmean(mismatch), 5) if mismatch else None,
        "tokens_per_s": round(sum(row["progress/tokens"] for row in steps[1:]) / total(steps, "step"), 1)
        if len(steps) > 1
        else None,
        "seconds": {name: round(total(steps, name), 2) for name in STAGES},
        "idle_seconds": {name: round(total(steps, f"{name}_idle"), 2) for name in IDLE},
        "whole_run_seconds": round(seconds, 1),
        "load_average": round(os.getloadavg()[0], 1),
    }


def total(steps: Sequence[dict[str, float]], name: str) -> float:
    """Sum a time over the rollouts, except the first."""
    return sum(row.get(f"perf/{name}_s", 0.0) for row in steps[1:])


def recipe(engine: str, age: int, seed: int, start: Path, run: Path, url: str | None, *, quick: bool) -> dict[str, Any]:
    """Return the quickstart's second half with an engine and a staleness."""
    values = second_half(start, run, seed=seed, num_rollouts=2 if quick else NUM_ROLLOUTS, quick=quick)
    values["rollout"] |= {"engine": engine, "max_prompt_len": 80}  # the model has 128 positions
    if age:
        values["sync"] = {"max_staleness": age}
    if engine == "vllm":
        values["rollout"] |= {"kv_cache_gib": 0.25, "engine_args": {"max_num_seqs": 256}}
    if engine == "vllm-server" and url is not None:
        values["rollout"] |= {"urls": [url], "api_key_env": KEY}
    elif engine == "vllm-server":  # options for starting the server
        values["rollout"] |= {"num_servers": 1, "kv_cache_gib": 0.25, "engine_args": {"max_num_seqs": 256}}
    return values


def write(begin: Mapping[str, Any], rows: Sequence[dict[str, Any]]) -> None:
    """Write staleness.json, with a summary over seeds per engine and staleness, and staleness.png next to it."""
    cells = sorted({cell_of(row) for row in rows})
    result = {
        **begin,
        "rollouts": NUM_ROLLOUTS,
        "summary": [summary(cell, rows) for cell in cells],
        "runs": rows,
    }
    record.write(RESULTS, result)
    plot(rows, RESULTS.with_suffix(".png"))


def plot(rows: Sequence[dict[str, Any]], target: Path) -> None:
    """Draw accuracies: a row per staleness and correction, a color per engine, a dot per seed, a line at the mean."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    cells = sorted({cell_of(row)[1:] for row in rows}, reverse=True)
    figure, axes = pyplot.subplots(figsize=(7, 0.6 * len(cells) + 1.2), layout="constrained")
    for engine, color, offset in zip(ENGINES, ("tab:blue", "tab:orange", "tab:green"), (0.25, 0.0, -0.25), strict=True):
        for place, cell in enumerate(cells):
            after = [row["after"] for row in rows if cell_of(row) == (engine, *cell)]
            if after:
                mean, height = statistics.fmean(after), place + offset
                label = engine if cell == cells[-1] else None
                axes.plot(after, [height] * len(after), "o", color=color, markersize=5, alpha=0.6, label=label)
                axes.plot([mean, mean], [height - 0.1, height + 0.1], color=color, linewidth=2.4)
    names = [f"K = {age}" + (f", {correction}" if age else "") for age, correction in cells]
    axes.set_yticks(range(len(cells)), names)
    axes.set_xlabel(f"held-out accuracy after {NUM_ROLLOUTS} rollouts")
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(target, dpi=120)
    pyplot.close(figure)


def correction_of(age: int, args: argparse.Namespace) -> str:
    """Return the correction of a run. Without staleness there is none."""
    return args.correction if age else "none"


def cell_of(row: Mapping[str, Any]) -> tuple[str, int, str]:
    return row["engine"], row["max_staleness"], row["mismatch_correction"]


def summary(cell: tuple[str, int, str], rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    engine, age, correction = cell
    own = [row for row in rows if cell_of(row) == cell]
    after = [row["after"] for row in own]
    return {
        "engine": engine,
        "max_staleness": age,
        "mismatch_correction": correction,
        "seeds": len(own),
        "before_mean": round(statistics.fmean(row["before"] for row in own), 4),
        "after_mean": round(statistics.fmean(after), 4),
        "after_min": min(after),
        "after_max": max(after),
        "step_seconds_median": statistics.median(row["seconds"]["step"] for row in own),
    }


if __name__ == "__main__":
    main()
