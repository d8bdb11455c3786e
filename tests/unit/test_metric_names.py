"""docs/metrics.md has a row for every metric that the code can log, and no other."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from fsdptrain.agents.sampler import COUNTS
from fsdptrain.trainer.reporting import _TIMED
from tests.e2e.test_train import EMITTED

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
ROWS = [[cell.strip() for cell in line.split("|")[1:-1]] for line in PAGE.splitlines() if line.startswith("| `")]
GROUPS = {row[0].strip("`").partition("/")[0] for row in ROWS}
NAMES = [row[0].strip("`") for row in ROWS]
FORM = re.compile(r"([a-z_]+|<>)/(\w|<>)[\w/@<>]*")

# What the code joins from parts that are no literals in the same expression.
JOINED = {
    "perf/<>_s": {f"perf/{name}_s" for name in (*_TIMED, "offload")},
    "agent/<>": {f"agent/{name}" for name in COUNTS},
    "eval/<>/<>": {
        f"eval/<>/{name}"
        for name in ("accuracy", "reward_mean", "length_mean", "truncated", "unscored", "pass@<>", "reward_<>")
    },
    "eval/<>loss": {"eval/loss", "eval/<>/loss"},
    "eval/<>perplexity": {"eval/perplexity", "eval/<>/perplexity"},
}
NO_METRICS = {"mismatch/_w_mean": "replaced by mismatch/ess", "mismatch/_w2_mean": "replaced by mismatch/ess"}


def test_every_metric_has_a_row_and_every_row_is_a_metric() -> None:
    found = {name for file in sources() for name in metric_names(file)}
    assert set(NO_METRICS) - found == set(), "no longer in the code: remove it above"
    names = {metric for name in found - set(NO_METRICS) for metric in JOINED.get(name, {name})}
    documented = {re.sub(r"<\w+>", "<>", name) for name in NAMES}

    assert names - documented == set()
    assert documented - names == set()


def test_rows_are_complete_and_names_occur_once() -> None:
    assert len(NAMES) == len(set(NAMES))
    assert not [row for row in ROWS if len(row) != 5 or not row[2]]


def test_the_names_of_a_run_match_rows() -> None:
    """Of the run in tests/e2e/test_train.py."""
    patterns = [re.sub(r"<\w+>", r"\\w+", name) for name in NAMES]
    assert not [name for name in EMITTED.split() if not any(re.fullmatch(pattern, name) for pattern in patterns)]


def sources() -> list[Path]:
    """Files that may emit metrics: not those that only show them."""
    readers = ("tools", "loggers", "config", "launch")
    files = sorted((ROOT / "fsdptrain").rglob("*.py"))
    return [file for file in files if file.relative_to(ROOT / "fsdptrain").parts[0] not in readers]


def metric_names(file: Path) -> Iterator[str]:
    """Strings in the form of a name: all of known groups, others where they are keys. `<>` stands for an expression."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        keys = node.keys if isinstance(node, ast.Dict) else [node.key] if isinstance(node, ast.DictComp) else []
        if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store):
            keys = [node.slice]
        yield from (name for name in map(_text, keys) if FORM.fullmatch(name))
        if FORM.fullmatch(name := _text(node)) and name.partition("/")[0] in GROUPS:
            yield name


def _text(node: ast.AST | None) -> str:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(part.value if isinstance(part, ast.Constant) else "<>" for part in node.values)
    return ""
