"""Compare two recordings of same_numbers.py: one row per run, and the names that only one of them has."""

import argparse
import fnmatch
import json
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

RENAMED_METRICS = {  # old name, or a group ending with a slash -> new name
    "staleness/samples_of_several_versions": "staleness/mixed_version_samples",
    "sync/": "weight_sync/",
}
CANCELLING = ("loss/", "policy/", "mismatch/", "kl/", "weight_sync/")  # sums near 0 of terms near 1


class Difference(NamedTuple):
    size: float  # relative; 0: bitwise equal
    where: str = ""

    def __str__(self) -> str:
        return f"{self.size:.1e} {self.where}" if self.size else "bitwise"


def compare(args: argparse.Namespace) -> int:
    """Print the comparison. Returns 1 if numbers differ, or if the new recording lacks runs or metrics of the old."""
    old, new = (json.loads(path.read_text()) for path in (args.old, args.new))
    print(f"old: {old['checkout']}\nnew: {new['checkout']}")
    if old["models"] != new["models"]:
        print("The models differ: were the recordings made with other versions of torch or transformers?")
    renames = RENAMED_METRICS | dict(pair.split("=", 1) for pair in args.rename)
    before, after = (_chosen(side["runs"], args.only, renames) for side in (old, new))
    print(f"{'run':30} {'metrics':48} {'tensors':56} samples")
    differing = []
    for name in [name for name in before if name in after]:
        cells = _compare_run(before[name], after[name])
        differs = max(cell.size for cell in cells) > args.tolerance
        differing += [name] if differs else []
        print(f"{name:30} {cells[0]!s:48} {cells[1]!s:56} {cells[2]}{'  DIFFERENT' if differs else ''}")
    lost = [name for name in before if name not in after]
    lost += [metric for metric in _unshared(before, after) if not any(fnmatch.fnmatch(metric, p) for p in args.ignore)]
    added = [*(name for name in after if name not in before), *_unshared(after, before)]
    print(f"only in old: {' '.join(lost) or 'nothing'}\nonly in new: {' '.join(added) or 'nothing'}")
    print(f"{len(before)} runs, {len(differing)} differ by more than {args.tolerance:g}, {len(lost)} names are lost")
    return int(bool(differing or lost))


def _chosen(runs: dict[str, Any], patterns: list[str], renames: Mapping[str, str]) -> dict[str, Any]:
    """Return the matching runs, with renamed metrics."""
    chosen = {name: run for name, run in runs.items() if any(fnmatch.fnmatch(name, p) for p in patterns or ["*"])}
    for run in chosen.values():
        run["metrics"] = [{_rename(n, renames): v for n, v in row.items()} for row in run.get("metrics", [])]
    return chosen


def _rename(name: str, renames: Mapping[str, str]) -> str:
    groups = [(old, new) for old, new in renames.items() if old.endswith("/") and name.startswith(old)]
    return renames.get(name) or next((new + name.removeprefix(old) for old, new in groups), name)


def _unshared(runs: Mapping[str, Any], others: Mapping[str, Any]) -> list[str]:
    """Return the metrics that a row of `runs` has and the same row of `others` lacks."""
    pairs = [(run["metrics"], others[name]["metrics"]) for name, run in runs.items() if name in others]
    return sorted(
        {n for rows, other in pairs for row, same in zip(rows, other, strict=False) for n in row.keys() - same}
    )


def _compare_run(old: dict[str, Any], new: dict[str, Any]) -> tuple[Difference, Difference, Difference]:
    errors = [f"{which}: {side['error']}" for which, side in (("old", old), ("new", new)) if "error" in side]
    if errors:
        return Difference(math.inf, "; ".join(errors)), Difference(0.0), Difference(0.0)
    return (
        _metric_difference(old["metrics"], new["metrics"]),
        _tensor_difference(old["tensors"], new["tensors"]),
        _sample_difference(old["samples"], new["samples"]),
    )


def _metric_difference(old: list[dict[str, Any]], new: list[dict[str, Any]]) -> Difference:
    """Return the largest difference over rows and names. `None` in metrics.jsonl stands for NaN and infinity."""
    if len(old) != len(new):
        return Difference(math.inf, f"{len(old)} and {len(new)} rows")
    found = [Difference(0.0)]
    for before, after in zip(old, new, strict=True):
        for name in [name for name in before if name in after and before[name] != after[name]]:
            a, b = before[name], after[name]
            floor = 1.0 if name.startswith(CANCELLING) else 0.0
            size = math.inf if a is None or b is None else abs(a - b) / max(abs(a), abs(b), floor)
            found.append(Difference(size, f"{name}, step {after['step']}"))
    return max(found)


def _tensor_difference(old: dict[str, Any], new: dict[str, Any]) -> Difference:
    """Estimate the largest |a - b| / |a| over tensors, from the root mean square of the differences of `signs`."""
    found = [Difference(0.0)]
    for name in old | new:
        kinds = [side[name]["kind"] for side in (old, new) if name in side]
        if len(kinds) < 2 or kinds[0] != kinds[1]:
            found.append(Difference(math.inf, f"{name}: {' and '.join(kinds)}"))
        elif old[name]["sha256"] != new[name]["sha256"]:
            squares = [(a - b) ** 2 for a, b in zip(old[name]["signs"], new[name]["signs"], strict=True)]
            distance = math.sqrt(sum(squares) / len(squares)) / max(old[name]["norm"], 1e-30)
            found.append(Difference(max(distance, 1e-16), name))
    return max(found)


def _sample_difference(old: dict[str, str], new: dict[str, str]) -> Difference:
    other = [key for key in old | new if old.get(key) != new.get(key)]
    return Difference(math.inf, f"from step {other[0]}") if other else Difference(0.0)
