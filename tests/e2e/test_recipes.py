"""Each recipe is a valid configuration, and its reward reads the answers of its data set.

Data sets of the hub are replaced by rows with the columns of their cards.
"""

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import datasets
import pytest
import yaml

from fsdptrain import cli
from fsdptrain.config import Config, load_recipe
from fsdptrain.data.sources import load_rows
from fsdptrain.features.vision.config import VisionConfig
from fsdptrain.rewards.code import code
from fsdptrain.rewards.maths import math
from fsdptrain.types import Prompt
from tests import configs, vision_zoo
from tests.recipe_headers import RECIPES

MESSAGE = "Solve the following math problem step by step.\n\n{}\n\nRemember to put your answer on its own line."


def gsm8k(i: int) -> dict[str, Any]:
    return {"question": f"Ann has {i} apples and gets 2. How many?", "answer": f"She has <<{i}+2>>.\n#### {i + 2}"}


def math_lighteval(i: int) -> dict[str, Any]:
    solution = f"It is $\\boxed{{{2 * i}}}$."
    return {"problem": f"What is $2 \\cdot {i}$?", "level": "Level 1", "type": "Algebra", "solution": solution}


def math_500(i: int) -> dict[str, Any]:
    own = {"answer": str(2 * i), "subject": "Algebra", "level": 1, "unique_id": f"test/algebra/{i}.json"}
    return {"problem": f"What is $2 \\cdot {i}$?", "solution": f"It is $\\boxed{{{2 * i}}}$.", **own}


def dapo_math(i: int) -> dict[str, Any]:
    return {
        "data_source": "math_dapo",
        "prompt": [{"role": "user", "content": MESSAGE.format(f"What is {i} + 1?")}],
        "ability": "MATH",
        "reward_model": {"ground_truth": str(i + 1), "style": "rule-lighteval/MATH_v2"},
        "extra_info": {"index": f"id-{i}"},
    }


def coding_problem(i: int) -> dict[str, Any]:
    case = {"fn_name": None, "input": f"{i}\n", "output": f"{i + 1}\n", "type": "stdin_stdout"}
    return {
        "problem_id": f"vcp_{i}",
        "problem": f"Read a number from stdin and print it plus {i}.",
        "gold_standard_solution": "print(int(input()) + 1)",
        "verification_info": {"language": "python", "test_cases": [case]},
    }


def geometry(i: int) -> dict[str, Any]:
    return {"images": [vision_zoo.picture((i, 0, 0))], "problem": "<image>Find x.", "answer": str(i)}


PLUS_ONE = "```python\nprint(int(input()) + 1)\n```"
RIGHT: Mapping[str, Callable[[int], str]] = {  # a correct response to row i, by the name of the data set
    "openai/gsm8k": lambda i: rf"There are \boxed{{{i + 2}}}.",
    "DigitalLearningGmbH/MATH-lighteval": lambda i: rf"So \boxed{{{2 * i}}}.",
    "HuggingFaceH4/MATH-500": lambda i: rf"So \boxed{{{2 * i}}}.",
    "BytedTsinghua-SIA/DAPO-Math-17k": lambda i: f"It is one more.\n\nAnswer: {i + 1}",
    "BytedTsinghua-SIA/AIME-2024": lambda i: f"Answer: ${i + 1}$",
    "open-r1/verifiable-coding-problems-python": lambda i: PLUS_ONE,
    "hiyouga/geometry3k": lambda i: rf"x = \boxed{{{i}}}",
}
REWARDS = {"code": code, "math": math}
DATA: Mapping[str, Callable[[int], dict[str, Any]]] = {  # by the name of the data set
    "openai/gsm8k": gsm8k,
    "DigitalLearningGmbH/MATH-lighteval": math_lighteval,
    "HuggingFaceH4/MATH-500": math_500,
    "BytedTsinghua-SIA/DAPO-Math-17k": dapo_math,
    "BytedTsinghua-SIA/AIME-2024": dapo_math,
    "open-r1/verifiable-coding-problems-python": coding_problem,
    "hiyouga/geometry3k": geometry,
}


def write_rows(name: str, folder: Path, first: int) -> str:
    """Write 8 rows of the data set `name`, without its options after the ?, which files do not have."""
    make = DATA[name.partition("?")[0]]
    table = datasets.Dataset.from_list([make(first + i) for i in range(8)])
    if make is geometry:
        table = table.cast_column("images", datasets.List(datasets.Image()))
    path = folder / f"{first}.parquet"
    table.to_parquet(path)
    return str(path)


def _names(path: Path) -> list[str]:
    """Return the data sets of the hub that the recipe names."""
    data = load_recipe(path).data
    names = [*data.prompt_data, *filter(None, [data.eval_prompt_data])]
    return [name.partition("?")[0] for name in names if name.partition("?")[0] in RIGHT]


def _value(result: Any) -> float:
    return result["reward"] if isinstance(result, Mapping) else result


@pytest.mark.parametrize("path", [path for path in RECIPES if _names(path)], ids=lambda path: path.stem)
def test_the_reward_reads_the_answer_of_each_data_set(path: Path, tmp_path: Path) -> None:
    config = load_recipe(path)
    (reward,) = (REWARDS[name] for name in config.reward.reward)
    for first, name in enumerate(_names(path)):
        file = write_rows(name, tmp_path, first)
        data = config.data.model_copy(update={"prompt_data": [file]})
        rows = load_rows(data, seed=0, image_key=config.section(VisionConfig).image_key)
        for number in range(2):
            right, prompt = RIGHT[name], Prompt("p", [1], "", label=rows[number].label)
            assert _value(reward(prompt, right(first + number))) == 1.0
            assert _value(reward(prompt, right(first + number + 1).replace("+ 1", "+ 2"))) == 0.0


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_every_recipe_can_be_dry_run_by_its_name(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    make_files_of(load_recipe(path), tmp_path)
    assert cli.run(["--recipe", path.stem, "--dry-run"]) == 0
    shown = capsys.readouterr()
    assert shown.err == ""
    assert Config(**yaml.safe_load(shown.out)) == load_recipe(path)


def make_files_of(config: Config, folder: Path) -> None:
    """Make the files that a recipe names and its user has to write: the demo's model, prompts, a rubric."""
    if config.model.hf_checkpoint.startswith("runs/"):
        model = folder / config.model.hf_checkpoint
        model.mkdir(parents=True)
        shutil.copy(configs.CONFIGS / "qwen3-4b" / "config.json", model)
    columns = [config.value(flat) for flat in config.columns if config.value(flat)]
    for spec, _ in config.data.sources.values():
        path = folder / spec.partition("?")[0]
        if path.suffix == ".jsonl":
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(dict.fromkeys(columns, "1")) + "\n")
