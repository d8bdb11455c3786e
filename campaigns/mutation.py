"""Mutation testing: at least 95 % of small changes to the code that must be exact make a test fail.

    python -m campaigns.mutation                          # every group, every mutant: hours
    python -m campaigns.mutation algo packing --endings 37    # a fifth: mutants whose number ends with 3 or 7
    python -m campaigns.mutation algo --again    # the survivors of the last run, after adding tests

mutmut makes the mutants of one group in a copy of the repository and runs the tests of the group that call the mutated
function. Mutants that survive for a reason, because they compute the same or change only the words of a message, are
listed with it in campaigns/survivors.yaml; any other survivor is a failure.
"""

import argparse
import fnmatch
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import yaml

from campaigns.report import RESULTS, Report

ROOT = Path(__file__).parents[1]
REASONS = Path(__file__).with_name("survivors.yaml")
LEAST_KILLED = 0.95
LAW = "at least 95 % of the mutants make a test fail; each survivor has a reason"
RANK_TESTS_SECONDS = 300
SELECTED = "not matrix and not gpu"
SURVIVED, UNTESTED, TIMEOUTS = (0,), (33, 5), (36, 24, 152, 255)  # mutmut's exit codes; any other: killed


@dataclass(frozen=True)
class Target:
    """A group. `rank_tests` start processes that mutmut does not see: they run on mutants that `tests` left alive."""

    files: tuple[str, ...]
    tests: tuple[str, ...]
    rank_tests: tuple[str, ...] = ()


TARGETS = {
    "algo": Target(
        ("fsdptrain/algo/*.py",),
        (
            "tests/unit/algo",
            "tests/unit/trainer/test_logprobs.py",
            *(f"tests/properties/test_{name}.py" for name in ("losses", "loss_formulas", "advantages")),
        ),
    ),
    "packing": Target(
        ("fsdptrain/data/packing/*.py",),
        (
            *(f"tests/properties/test_{name}.py" for name in ("packing", "prefixes", "losses")),
            *("tests/unit/trainer/test_batches.py", "tests/unit/data/test_routes.py"),
        ),
        ("tests/distributed/test_exchange.py",),
    ),
    "logprobs": Target(
        ("fsdptrain/model/logprobs.py", "fsdptrain/model/logit_passes.py"),
        (
            *("tests/unit/model/test_logprobs.py", "tests/properties/test_logprobs.py"),
            *("tests/unit/model/test_policy.py", "tests/unit/trainer/test_logprobs.py"),
        ),
        ("tests/distributed/test_split_logprobs.py", "tests/features/fused_logprobs"),
    ),
    "weights": Target(
        ("fsdptrain/model/loading/*.py",),
        ("tests/unit/model/test_files.py", "tests/unit/model/test_shard_reader.py"),
        (
            *(f"tests/distributed/test_{name}.py" for name in ("loading", "formats", "loading_failures")),
            "tests/e2e/test_inspect.py",
        ),
    ),
    "weight_sync": Target(
        ("fsdptrain/rollout/weight_sync/*.py",),
        (
            *("tests/unit/rollout", "tests/unit/vllm/test_checks.py", "tests/unit/vllm/test_fleet.py"),
            "tests/unit/vllm/test_replica.py",
        ),
        ("tests/distributed/test_weight_sync.py",),
    ),
    "checkpoint": Target(
        ("fsdptrain/fsdp/checkpoint.py", "fsdptrain/fsdp/checkpoint_folder.py"),
        ("tests/unit/fsdp",),
        tuple(
            f"tests/distributed/test_{name}.py"
            for name in ("fsdp_checkpoint", "async_checkpoint", "lora_run", "reference_update")
        ),
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("groups", nargs="*", default=list(TARGETS), help=f"of {', '.join(TARGETS)}")
    parser.add_argument("--endings", default="0123456789", help="last digits of the numbers of the mutants to run")
    parser.add_argument("--again", action="store_true", help="run only the survivors of the results file")
    parser.add_argument("--jobs", type=int, default=2)
    args = parser.parse_args()
    reasons = yaml.safe_load(REASONS.read_text()) or {}
    codes = []
    for group in args.groups:
        names, before = [f"*__mutmut_*{digit}" for digit in args.endings], Counter[str]()
        if args.again:
            earlier = json.loads((RESULTS / f"mutation_{group}.json").read_text())
            require_unchanged(TARGETS[group].files, earlier["commit"])
            before = Counter({name: earlier["mutants"].get(name, 0) for name in ("killed", "timeout", "equal")})
            survivors = [row for row in earlier["rows"] if row["failure"] and "mutant" in row]
            left = [row for row in survivors if row["change"] not in reasons.get(group, {})]
            before["equal"] += len(survivors) - len(left)
            names = [f"fsdptrain.{row['mutant']}" for row in left]
            if not names:
                continue
        report = Report(f"mutation_{group}", LAW, module="mutation")
        with tempfile.TemporaryDirectory() as folder:
            copy = copy_repository(Path(folder) / "copy", TARGETS[group])
            mutmut = [sys.executable, "-m", "mutmut"]
            subprocess.run([*mutmut, "run", "--max-children", str(args.jobs), *names], cwd=copy, env=environment())
            drawn = {
                mutant: code
                for mutant, code in results(copy / "mutants")
                if code is not None and any(fnmatch.fnmatch(mutant, name) for name in names)
            }
            if TARGETS[group].rank_tests:
                drawn |= run_rank_tests(group, copy / "mutants", drawn, args.jobs)
            report.write(mutants=judge(report, group, copy, drawn, reasons.get(group, {}), before), again=args.again)
            codes.append(report.finish())
    sys.exit(max(codes, default=0))


def require_unchanged(files: tuple[str, ...], commit: str) -> None:
    """Mutants are numbered: after a change of the code, a number is another mutant."""
    command = ["git", "diff", "--quiet", commit.rstrip("+"), "--", *files]
    if subprocess.run(command, cwd=ROOT, capture_output=True).returncode:
        raise SystemExit(f"{', '.join(files)} may have changed since {commit}: run the group without --again")


def environment(**more: str) -> dict[str, str]:
    variables = os.environ | {"OMP_NUM_THREADS": "1"} | more
    variables.pop("PYTHONPATH", None)  # the package of the copy is tested
    return variables


def run_rank_tests(group: str, mutants: Path, drawn: dict[str, int], jobs: int) -> dict[str, int]:
    """Run the rank tests of a group on each mutant that is alive, and return their exit codes."""
    tests = [
        sys.executable,
        "-m",
        "pytest",
        "-qx",
        "-p",
        "no:cacheprovider",
        "-m",
        SELECTED,
        *TARGETS[group].rank_tests,
    ]

    def run(mutant: str) -> int:
        variables = environment(MUTANT_UNDER_TEST=mutant)
        try:
            code = subprocess.run(tests, cwd=mutants, env=variables, capture_output=True, timeout=RANK_TESTS_SECONDS)
        except subprocess.TimeoutExpired:
            return TIMEOUTS[0]
        return code.returncode

    if run(""):
        raise SystemExit(f"the rank tests of {group} fail without a mutant: run them in {mutants}")
    alive = [mutant for mutant, code in drawn.items() if code in SURVIVED + UNTESTED]
    print(f"{group}: {len(alive)} of {len(drawn)} mutants are left to the tests over several ranks", flush=True)
    with ThreadPoolExecutor(jobs) as pool:
        return dict(zip(alive, pool.map(run, alive), strict=True))


def copy_repository(copy: Path, target: Target) -> Path:
    """Copy the files that git knows, and configure mutmut in the copy's pyproject.toml."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    for name in listed.splitlines():
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, copy / name)
    tops = sorted({name.partition("/")[0] for name in listed.splitlines()} - {"pyproject.toml"})
    settings = {
        "source_paths": ["fsdptrain"],
        "only_mutate": list(target.files),
        "also_copy": tops,
        "pytest_add_cli_args": ["-p", "no:cacheprovider"],
        "pytest_add_cli_args_test_selection": [*target.tests, "-m", SELECTED],
        "process_isolation": "forkserver",
    }
    lines = [f"{name} = {json.dumps(value)}\n" for name, value in settings.items()]
    with (copy / "pyproject.toml").open("a") as file:
        file.writelines(["\n[tool.mutmut]\n", *lines])
    return copy


def judge(
    report: Report, group: str, copy: Path, drawn: dict[str, int], reasons: dict[str, str], before: Counter[str]
) -> dict[str, float]:
    """Add a row for each mutant that no test killed, and return the counts of the group with those of `before`."""
    counts = Counter(before)
    for mutant, code in drawn.items():
        if code not in SURVIVED + UNTESTED:
            counts["timeout" if code in TIMEOUTS else "killed"] += 1
            continue
        old, new = changed_lines(copy, mutant)
        change = f"{old} -> {new}"
        reason = reasons.get(change) or ("only words of a message differ" if is_text(old, new) else None)
        counts["equal" if reason else "survived"] += 1
        failure = None if reason else "no test runs it" if code in UNTESTED else "survived"
        report.add(group, failure, mutant=mutant.removeprefix("fsdptrain."), change=change, reason=reason)
    tested = counts["killed"] + counts["timeout"] + counts["survived"]
    share = (counts["killed"] + counts["timeout"]) / max(tested, 1)
    if share < LEAST_KILLED:
        report.add(group, f"{share:.1%} of the mutants were killed, {LEAST_KILLED:.0%} must be")
    return {**counts, "killed_share": round(share, 3)}


def results(mutants: Path) -> Iterator[tuple[str, int | None]]:
    """Yield each mutant and mutmut's exit code for it; None: it was not run."""
    for path in sorted(mutants.glob("fsdptrain/**/*.meta")):
        yield from json.loads(path.read_text())["exit_code_by_key"].items()


def changed_lines(copy: Path, mutant: str) -> tuple[str, str]:
    shown = [sys.executable, "-m", "mutmut", "show", mutant]
    lines = subprocess.run(shown, cwd=copy, check=True, capture_output=True, text=True).stdout.splitlines()
    parts = ([line[1:].strip() for line in lines if line[:1] == sign and line[:3] != 3 * sign] for sign in "-+")
    old, new = map(" ".join, parts)
    return old, new


def is_text(old: str, new: str) -> bool:
    """Whether the change only marks words of a message ("XX...XX") or their case."""
    message = re.search(r"raise |log\.|Error\(|^assert |^f?\"", old)
    return message is not None and old.casefold() == new.replace("XX", "").casefold()


if __name__ == "__main__":
    main()
