"""Write the tables of docs/performance.md from benchmarks/results: `python -m docgen`."""

import json
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "performance.md"
TABLE = re.compile(r"(<!-- (\w+): docgen/generate_performance.py -->\n)(?:\|.*\n)*")
CASES = {  # results file -> description
    "low": "`low`",
    "middle": "`middle`",
    "high": "`high`",
    "kl": "`kl`, a reference model",
    "lora": "`lora`, rank 16",
    "sft": "`sft`",
}
STEPS = {
    "train_step": "vocabulary 32,768",
    "train_step_152k": "vocabulary 151,936",
    "train_step_152k_equal": "vocabulary 151,936",
    "train_step_kl": "a reference model, `--kl 0.1`",
    "train_step_checkpointing": "`--checkpointing`",
    "train_step_lora": "`--lora 32`",
    "train_step_async": "with `async`",
}


def performance_page() -> str:
    """Return the page with its tables filled in."""
    tables = {"real_model": real_model, "learning": learning, "train_step": train_step, "packing": packing}
    return TABLE.sub(lambda found: found[1] + tables[found[2]](), PAGE.read_text(encoding="utf-8"))


def results(name: str) -> list[dict[str, Any]]:
    return json.loads((ROOT / f"benchmarks/results/{name}.json").read_text(encoding="utf-8"))["results"]


def real_model() -> str:
    """One row for each case: medians with (minimum, maximum)."""
    names = ("case", "correct", "skipped", "fsdptrain", "nothing skipped", "TRL", "TRL / fsdptrain", "peak memory")
    rows = []
    for case, words in CASES.items():
        sides = {row["side"]: row for row in results(f"real_model_{case}")}
        ours, trl = sides["ours"], sides["trl"]
        correct = f"{ours['reward']:.0%}" if ours["reward"] is not None else ""
        steps = [spread(sides[side]["step_s"], " s") if side in sides else "" for side in ("ours", "ours-all", "trl")]
        memory = f"{ours['peak_gib']:.1f}, TRL {trl['peak_gib']:.1f} GiB"
        rows.append((words, correct, f"{ours['skipped']:.0%}", *steps, f"**{spread(trl['times_ours'])}**", memory))
    return table(names, rows)


def learning() -> str:
    curves = [{one["step"]: one for one in row["curve"]} for row in results("real_model_learn")]
    cells = [[f"{one[step]['s']:,.0f} s, {one[step]['accuracy']:.2f}" for one in curves] for step in (10, 20, 30)]
    return table(("step", "fsdptrain", "TRL"), [(str(10 * i), *row) for i, row in enumerate(cells, 1)])


def train_step() -> str:
    sides = ("packed", "compact", "stock", "async")
    rows = []
    for file, words in STEPS.items():
        for row in results(file):
            size = row["case"].rpartition(" ")[2]
            what = f"{words}, vocabulary {int(size):,}" if file == "train_step_async" else words
            ratios = [spread(row[f"{side}_over_ours_wall"]) if side in row["sides"] else "" for side in sides]
            ours = row["sides"]["ours"]
            shown = f"{ours['wall_s']:.2f} s", f"{ours['peak_mib']:,} MiB"
            rows.append((what, row["case"].partition(",")[0], *shown, *ratios))
    head = ("case", "lengths", "fsdptrain", "peak memory", "without sharing", "`compact`", "`stock`", "`async`")
    return table(head, rows)


def packing() -> str:
    rows = [
        (f"{row['sequences']:,} on {row['ranks']:,}", f"{row['ours']['s']:.2f} s", *fills(row))
        for row in results("packing")
        if row["lengths"] == "lognormal" and row["sequences"] >= 100_000
    ]
    return table(("sequences on ranks", "CPU time", "fill (best possible)", "imbalance"), rows)


def fills(row: dict[str, Any]) -> tuple[str, str]:
    ours = row["ours"]
    return f"{ours['fill']:.2%} ({row['best_fill']:.2%})", f"{ours['imbalance']:.3%}"


def spread(values: dict[str, float], unit: str = "") -> str:
    """Three significant digits: median (minimum, maximum)."""
    median, least, most = (digits(values[name]) for name in ("median", "least", "most"))
    return f"{median}{unit} ({least}, {most})"


def digits(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}"


def table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n".replace("|  |", "| |").replace("|  |", "| |") for line in lines)
