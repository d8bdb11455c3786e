"""Check that every algorithm learns: held-out accuracy before and after a short run, over several seeds.

    python benchmarks/algorithms.py                        # 15 algorithms, 3 seeds: about 15 minutes on two quiet cores
    python benchmarks/algorithms.py --algorithms gspo --seeds 0 1
    python benchmarks/algorithms.py --quick --algorithms grpo --seeds 0     # seconds; writes no file

The task, model and warm-up are those of the quickstart (`make demo`): spelling words backward, 0.1 M parameters. The
warm-up runs once per seed. Every algorithm then runs with its preset for 16 rollouts of two optimizer steps. All use
the learning rate of the quickstart, which was not tuned for any of them: the table shows that each algorithm learns,
not which one is best. Results are written after each run, and existing runs are not repeated; --fresh starts over.
"""

import argparse
import json
import multiprocessing
import os
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # set before importing torch: a model this small is faster on one thread
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import record
import yaml
from record import ROOT

from fsdptrain import Config, Trainer, load_recipe
from fsdptrain.config.presets import PRESETS
from fsdptrain.tools.report.report import read_series

RESULTS = ROOT / "benchmarks" / "results" / "algorithms.json"
NAMES = [name for name in PRESETS if name != "sft"]
NUM_ROLLOUTS = 16
TINY = {"demonstrations": 200, "sft_steps": 2, "rollouts": 1}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--algorithms", nargs="+", default=NAMES, choices=NAMES, metavar="NAME")
    parser.add_argument("--folder", type=Path, default=Path("runs/algorithms"), help="folder of the runs")
    parser.add_argument("--fresh", action="store_true", help="delete existing results")
    parser.add_argument("--quick", action="store_true", help="one rollout after two warm-up steps; writes no file")
    args, begin = parser.parse_args(argv), record.header()
    folder = args.folder / ("quick" if args.quick else "full")
    rows = [] if args.fresh or args.quick else record.kept_rows(RESULTS, begin)
    for seed in args.seeds:
        for name in args.algorithms:
            if not any((row["algorithm"], row["seed"]) == (name, seed) for row in rows):
                row = measure(name, seed, folder, quick=args.quick)
                print(json.dumps(row), flush=True)
                rows.append(row)
                if not args.quick:
                    write(begin, rows)
    fallen = [f"{row['algorithm']} (seed {row['seed']})" for row in rows if row["after"] < row["before"]]
    if fallen and not args.quick:
        sys.exit(f"accuracy fell with {', '.join(fallen)}")


def measure(name: str, seed: int, folder: Path, *, quick: bool) -> dict[str, Any]:
    """Run one algorithm. Returns the accuracy at both ends, sampled at temperature 1 and greedy."""
    start = warm_start(seed, folder / f"seed{seed}", quick=quick)
    run = folder / f"seed{seed}" / name
    begin = time.monotonic()
    shutil.rmtree(run, ignore_errors=True)  # remains of an interrupted run
    in_process(train, algorithm_config(name, seed, start, run, quick=quick))
    _, sampled = read_series(run, "eval/heldout/accuracy")
    _, greedy = read_series(run, "eval/heldout_greedy/accuracy")
    _, reward = read_series(run, "reward/mean")
    return {
        "algorithm": name,
        "seed": seed,
        "before": round(sampled[0], 4),
        "after": round(sampled[-1], 4),
        "greedy_before": round(greedy[0], 4),
        "greedy_after": round(greedy[-1], 4),
        "reward": [round(value, 4) for value in reward],
        "seconds": round(time.monotonic() - begin, 1),
    }


def warm_start(seed: int, folder: Path, *, quick: bool) -> Path:
    """Return the quickstart's model after its supervised half. Creates it if missing."""
    made = folder / "sft" / "hf"
    if not (made / "config.json").exists():
        shutil.rmtree(folder, ignore_errors=True)
        in_process(prepare, seed, folder, TINY["demonstrations"] if quick else 20_000)
        values = yaml.safe_load((ROOT / "recipes" / "spell_backward_sft_demo.yaml").read_text())
        values["model"]["hf_checkpoint"] = str(folder / "start")
        values["data"]["prompt_data"] = str(folder / "demonstrations.jsonl")
        values["run"] |= {"seed": seed, "output_dir": str(folder / "sft"), "resume": "never"}
        values["rollout"]["seed"] = seed
        values["log"] = {"to": []}
        if quick:
            values["run"]["num_rollout"] = TINY["sft_steps"]
            values["optim"] = {"lr": 4e-3}
        in_process(train, values)
    return made


def prepare(seed: int, folder: Path, count: int) -> None:
    """Create the untrained model and the demonstrations as `fsdptrain demo` does."""
    from fsdptrain.tools.demo.corpus import write_demonstrations
    from fsdptrain.tools.demo.model import save_start

    save_start(folder / "start", seed=seed)
    size = {} if count > 1000 else {"data_size": 500, "eval_size": 16}
    config = load_recipe(ROOT / "recipes" / "spell_backward_demo.yaml", seed=seed, rollout_seed=seed, **size)
    write_demonstrations(folder / "demonstrations.jsonl", config, count=count)


def algorithm_config(name: str, seed: int, start: Path, run: Path, *, quick: bool) -> dict[str, Any]:
    """Return the quickstart's second half with another algorithm's preset, without the clip bounds of the recipe."""
    values = second_half(start, run, seed=seed, num_rollouts=TINY["rollouts"] if quick else NUM_ROLLOUTS, quick=quick)
    values["algorithm"] = {
        "algorithm": name,
        "n_samples_per_prompt": values["algorithm"]["n_samples_per_prompt"],
    }
    return values


def second_half(start: Path, run: Path, *, seed: int, num_rollouts: int, quick: bool) -> dict[str, Any]:
    """Return the quickstart's recipe starting from `start`, evaluated at both ends."""
    values = yaml.safe_load((ROOT / "recipes" / "spell_backward_demo.yaml").read_text())
    values["model"]["hf_checkpoint"] = str(start)
    values["run"] = {
        "seed": seed,
        "output_dir": str(run),
        "resume": "never",
        "num_rollout": num_rollouts,
        "eval_interval": num_rollouts,
        "n_samples_per_eval_prompt": 2,
        "eval_greedy": True,
        "keep_last": 0,
        "export": False,
    }
    values["rollout"]["seed"] = seed
    values["log"] = {"to": [], "num_samples": 0}
    if quick:
        values["data"] |= {"data_size": 500, "eval_size": 16}
    return values


def train(values: dict[str, Any]) -> None:
    Trainer(Config(**values)).fit()


def in_process(function: Any, *args: Any) -> None:
    """Run `function(*args)` in a forked process, in which torch is already imported."""
    context = multiprocessing.get_context("fork")
    process = context.Process(target=function, args=args)
    process.start()
    process.join()
    if process.exitcode:
        sys.exit(f"{function.__name__}{args} ended with {process.exitcode}")


def write(begin: Mapping[str, Any], rows: Sequence[dict[str, Any]]) -> None:
    """Write algorithms.json, and algorithms.png next to it."""
    record.write(RESULTS, {**begin, "rollouts": NUM_ROLLOUTS, "runs": rows})
    plot(rows, RESULTS.with_suffix(".png"))


def plot(rows: Sequence[dict[str, Any]], target: Path) -> None:
    """Draw accuracy before and after: a line per algorithm, a dot per seed."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    names = [name for name in NAMES if any(row["algorithm"] == name for row in rows)]
    figure, axes = pyplot.subplots(figsize=(7, 0.32 * len(names) + 1.2), layout="constrained")
    for place, name in enumerate(names):
        own = [row for row in rows if row["algorithm"] == name]
        for key, color in (("before", "0.6"), ("after", "tab:blue")):
            label = key if place == 0 else None
            axes.scatter([row[key] for row in own], [place] * len(own), s=22, color=color, label=label, zorder=2)
            mean = sum(row[key] for row in own) / len(own)
            axes.plot([mean, mean], [place - 0.3, place + 0.3], color=color, linewidth=2)
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.set_xlabel("held-out accuracy, sampled at temperature 1 (dots: seeds, bar: mean)")
    axes.legend(frameon=False, loc="upper center")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(target, dpi=120)
    pyplot.close(figure)


if __name__ == "__main__":
    main()
