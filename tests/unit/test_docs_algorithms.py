"""The page of the algorithms is what the code says, and says it of every one."""

import json
import runpy
from pathlib import Path

import pytest

from fsdptrain.algo.advantages import ADVANTAGES, MULTI_REWARD
from fsdptrain.algo.kl import KL_ESTIMATORS
from fsdptrain.algo.losses import LOSSES
from fsdptrain.algo.shaping import SHAPES
from fsdptrain.algo.weights import AGGREGATIONS
from fsdptrain.config.presets import PRESETS

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "algorithms.md").read_text(encoding="utf-8")


def test_the_page_is_what_the_code_says() -> None:
    made = runpy.run_path(str(DOCS / "generate_algorithms.py"))["algorithms_page"]()
    assert made == PAGE, "run: python docs/generate_algorithms.py"


@pytest.mark.parametrize("table", [LOSSES, AGGREGATIONS, KL_ESTIMATORS, ADVANTAGES, MULTI_REWARD, SHAPES])
def test_every_formula_is_in_its_docstring(table) -> None:
    assert [name for name, function in table.items() if not function.__doc__] == []


def test_every_algorithm_was_seen_to_learn_over_three_seeds() -> None:
    result = json.loads((DOCS.parent / "benchmarks" / "results" / "algorithms.json").read_text(encoding="utf-8"))
    seen = {(run["algorithm"], run["seed"]) for run in result["runs"]}
    assert seen == {(name, seed) for name in PRESETS if name != "sft" for seed in range(3)}
    assert [run for run in result["runs"] if run["after"] < run["before"]] == []
