"""Checks of the benchmarks: agreement of both sides, bounds, and results of an interrupted run."""

import importlib
import json
import math
from argparse import Namespace
from collections.abc import Callable
from copy import deepcopy
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "benchmarks"
Import = Callable[[str], ModuleType]
pytestmark = pytest.mark.matrix


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Import:
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module


@pytest.mark.parametrize("other", [{"loss": 1.001}, {"loss": math.nan}, {"grad_norm": 2.001}, {"grad_norm": math.inf}])
@pytest.mark.parametrize("place", ["first", "last"])
def test_sides_that_do_not_agree_end_the_benchmark(module: Import, other: dict[str, float], place: str) -> None:
    agree = partial(module("record").require_agreement, tolerance=1e-4, case="dense")
    same = {"loss": 1.0, "grad_norm": 2.0}
    agree({"ours": same, "stock": {"loss": 1.00001, "grad_norm": 2.0}})
    sides = {"ours": same, "stock": same | other}
    with pytest.raises(SystemExit, match="dense: the sides do not agree"):
        agree(sides if place == "last" else dict(reversed(sides.items())))


def test_rows_that_other_code_has_made_are_not_added_to(module: Import, tmp_path: Path) -> None:
    """A file has one header."""
    kept, path = module("record").kept_rows, tmp_path / "some.json"
    begin = {"commit": "abc", "versions": {"torch": "2"}}
    assert kept(path, begin) == []
    path.write_text(json.dumps({**begin, "runs": [{"seed": 0}]}))
    assert kept(path, begin) == [{"seed": 0}]
    for other in ({"commit": "abd"}, {"versions": {"torch": "3"}}):
        with pytest.raises(SystemExit, match="--fresh"):
            kept(path, begin | other)


ROW = {"step": 1, "loss/policy": 1e-8, "optim/grad_norm": 0.5, "sync/probe_abs_mean": 1e-7, "kl/coef": None}
TENSOR = {"kind": "torch.float32 [2]", "sha256": "a", "norm": 2.0, "signs": [1.0, -2.0]}
RUN = {"metrics": [ROW], "tensors": {"head": TENSOR}, "samples": {"1 train": "a"}}
Change = Callable[[dict[str, Any]], object]


def row(run: dict[str, Any]) -> dict[str, Any]:
    return run["metrics"][0]


def tensor(run: dict[str, Any]) -> dict[str, Any]:
    return run["tensors"]["head"]


SAME: dict[str, Change] = {
    "nothing changed": lambda run: None,
    "a renamed metric": lambda run: row(run).update(
        {"weight_sync/logprob_abs_diff": row(run).pop("sync/probe_abs_mean")}
    ),
    "an added metric": lambda run: row(run).update({"new": 1.0}),
    "rounding of a loss that cancels": lambda run: row(run).update({"loss/policy": -3e-7}),
    "rounding of a tensor": lambda run: tensor(run).update(sha256="b", signs=[1.0 + 1e-6, -2.0 - 1e-6]),
}
DIFFERENT: dict[str, Change] = {
    "a metric": lambda run: row(run).update({"optim/grad_norm": 0.5 + 1e-6}),
    "a metric that is no longer NaN": lambda run: row(run).update({"kl/coef": 1.0}),
    "a lost metric": lambda run: row(run).pop("optim/grad_norm"),
    "a lost row": lambda run: run["metrics"].pop(),
    "a tensor": lambda run: tensor(run).update(sha256="b", signs=[1.0, -2.0001]),
    "the dtype of a tensor": lambda run: tensor(run).update(kind="torch.bfloat16 [2]"),
    "a lost tensor": lambda run: run["tensors"].clear(),
    "a sampled text": lambda run: run["samples"].update({"1 train": "b"}),
    "a run that failed": lambda run: run.update(error="failed"),
}


@pytest.mark.parametrize(("change", "code"), [*((c, 0) for c in SAME.items()), *((c, 1) for c in DIFFERENT.items())])
def test_a_recording_passes_if_its_numbers_are_the_same(module, tmp_path, change, code):
    compare = module("same_numbers_compare").compare

    changed = deepcopy(RUN)
    change[1](changed)
    for name, run in (("old", RUN), ("new", changed)):
        (tmp_path / name).write_text(json.dumps({"checkout": "", "models": {}, "runs": {"dense": run}}))
    options = Namespace(old=tmp_path / "old", new=tmp_path / "new", only=[], rename=[], ignore=[], tolerance=1e-6)
    assert compare(options) == code, change[0]
