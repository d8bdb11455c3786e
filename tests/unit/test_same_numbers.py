"""benchmarks/same_numbers.py accepts recordings with the same numbers only."""

import json
from argparse import Namespace
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"
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
def test_a_recording_passes_if_its_numbers_are_the_same(monkeypatch, tmp_path, change, code):
    monkeypatch.syspath_prepend(str(FOLDER))
    from same_numbers_compare import compare

    changed = deepcopy(RUN)
    change[1](changed)
    for name, run in (("old", RUN), ("new", changed)):
        (tmp_path / name).write_text(json.dumps({"checkout": "", "models": {}, "runs": {"dense": run}}))
    options = Namespace(old=tmp_path / "old", new=tmp_path / "new", only=[], rename=[], ignore=[], tolerance=1e-6)
    assert compare(options) == code, change[0]
