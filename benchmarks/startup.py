"""Seconds from the command to the first optimizer step, by part.

    python benchmarks/startup.py --json benchmarks/results/startup.json
    python benchmarks/startup.py --shape Qwen3-0.6B --layers 4 --rounds 3
    python benchmarks/startup.py --quick                              # one round, no table of imports

Each round starts a new process that runs the `fsdptrain` command on a random model until the first step is done. Each
part is timed in wall and CPU time (timed_run.py); nested parts are not counted twice. Import times are summed by
package, from `python -X importtime` in a separate process, which slows imports down. Also draws a picture next to the
report.

`--against DIR`: another checkout of this repository; rounds of both checkouts alternate.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from random_checkpoint import SHAPES, shape, write_random
from record import ROOT, header, spread, table, write

RUN = [
    *("--prompt-data", "reasoning_gym:spell_backward?max_word_len=6", "--system-prompt", ""),
    *("--rollout-batch-size", "4", "--n-samples-per-prompt", "4", "--rollout-max-response-len", "16"),
    *("--max-tokens-per-gpu", "512", "--num-rollout", "1", "--no-bf16", "--log-to"),
]
Run = dict[str, dict[str, float]]
_IMPORTS = "import fsdptrain.cli, fsdptrain.launch.ranks, fsdptrain.trainer"


def one_round(root: Path, model: Path, folder: Path, args: argparse.Namespace) -> Run:
    """Return the seconds by clock and part."""
    report = folder / "parts.json"
    flags = ["--hf-checkpoint", str(model), *RUN, *args.flags, "--output-dir", str(folder / "run")]
    flags += ["--resume", "never", "--seed", str(args.seed), "--data-size", str(args.data_size)]
    subprocess.run(["rm", "-rf", str(folder / "run")], check=True)
    argv = [sys.executable, str(ROOT / "benchmarks" / "timed_run.py"), str(report), repr(time.monotonic()), *flags]
    subprocess.run(argv, check=True, timeout=600, env=_environment(root), stdout=subprocess.DEVNULL)
    return json.loads(report.read_text())


def imports(root: Path) -> dict[str, float]:
    """Return the import seconds by top-level package, slowest first, excluding imports of other packages."""
    argv = [sys.executable, "-X", "importtime", "-c", _IMPORTS]
    lines = subprocess.run(argv, check=True, capture_output=True, text=True, env=_environment(root)).stderr.splitlines()
    own: Counter[str] = Counter()
    for line in lines:
        if line.startswith("import time:") and "self [us]" not in line:
            microseconds, _, name = line.removeprefix("import time:").split("|")
            own[name.strip().split(".")[0]] += int(microseconds)
    return {name: round(value / 1e6, 3) for name, value in own.most_common(12)}


def _environment(root: Path) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(root), "TRANSFORMERS_VERBOSITY": "error"}


def summary(runs: list[Run]) -> dict[str, dict[str, dict[str, float]]]:
    """Compute the spread of each part over the rounds, by clock."""
    return {c: {name: spread(run[c].get(name, 0.0) for run in runs) for name in runs[0][c]} for c in ("wall", "cpu")}


def draw(parts: dict[str, dict[str, float]], target: Path, clock: str) -> None:
    """Draw a bar for each part of at least 1 % of the total, in chronological order."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    total = parts["total"]["median"]
    shown = {n: v for n, v in parts.items() if n not in ("total", "rest") and v["median"] >= total / 100}
    small = total - sum(v["median"] for v in shown.values())
    figure, axes = pyplot.subplots(figsize=(7.5, 0.36 * len(shown) + 1.4), layout="constrained")
    left = 0.0
    for place, (name, value) in enumerate([*shown.items(), ("all else", {"median": small})]):
        color = "tab:orange" if name.startswith("import") else "tab:blue"
        axes.barh(place, value["median"], left=left, color=color)
        axes.text(
            left + value["median"] + total / 100, place, f"{name}  {value['median']:.2f}", va="center", fontsize=8
        )
        left += value["median"]
    axes.set(
        yticks=[], xlim=(0, 1.45 * total), xlabel=f"seconds of {clock} time until the first optimizer step: {total:.1f}"
    )
    axes.invert_yaxis()
    axes.spines[["top", "right", "left"]].set_visible(False)
    figure.savefig(target, dpi=120)
    pyplot.close(figure)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--quick", action="store_true", help="one round, no table of imports")
    add("--json", type=Path, help="path of the report, and of a picture next to it")
    add("--shape", choices=SHAPES, default="tiny")
    add("--layers", type=int, help="number of layers; default: that of the shape")
    add("--data-size", type=int, default=1000, help="rows of the data set [prompts]")
    add("--rounds", type=int, default=5)
    add("--clock", choices=("wall", "cpu"), default="wall", help="clock of the picture; use cpu on a shared machine")
    add("--seed", type=int, default=0)
    add("--against", type=Path, help="another checkout to compare with")
    add("--folder", type=Path, help="folder of the model and the runs; default: a temporary one")
    add("flags", nargs="*", help="flags for fsdptrain, after --")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    begin = header()
    sides = {"this": ROOT} | ({"other": args.against.resolve()} if args.against else {})
    runs: dict[str, list[Run]] = {side: [] for side in sides}
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        model, scratch = Path(folder) / "model", Path(folder) / "scratch"
        scratch.mkdir()
        write_random(
            model, shape(args.shape, **({"num_hidden_layers": args.layers} if args.layers else {})), seed=args.seed
        )
        for number in range(1 if args.quick else args.rounds + 1):
            for side in sides if number % 2 else reversed(sides):
                found = one_round(sides[side], model, scratch, args)
                print(f"  {side}: {found['wall']['total']:.2f} s, CPU {found['cpu']['total']:.2f} s", file=sys.stderr)
                if number or args.quick:  # the first round fills the page cache
                    runs[side].append(found)
    parts = {side: summary(found) for side, found in runs.items()}
    report: dict[str, Any] = {**begin, "unit": "s", "results": parts, "runs": runs}
    if args.against:
        pairs = zip(runs["other"], runs["this"], strict=True)
        report["other_minus_this_cpu"] = spread(other["cpu"]["total"] - this["cpu"]["total"] for other, this in pairs)
        print(json.dumps({"other_minus_this_cpu": report["other_minus_this_cpu"]}))
    if not args.quick:
        report["imports"] = imports(ROOT)
        print(table([{"package": name, "s": value} for name, value in report["imports"].items()]))
    write(args.json, report)
    if args.json:
        draw(parts["this"][args.clock], args.json.with_suffix(".png"), args.clock)
    wall, cpu = parts["this"]["wall"], parts["this"]["cpu"]
    rows = [{"part": n, "wall": round(wall[n]["median"], 2), "CPU": round(cpu[n]["median"], 2)} for n in wall]
    print(table(rows))


if __name__ == "__main__":
    main()
