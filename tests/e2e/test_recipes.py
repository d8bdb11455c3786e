"""Each recipe is a valid configuration, and trains a step of a tiny model of its family with its own settings.

Replaced is only what cannot be here: the checkpoint, data sets of the hub (by rows with the columns of their cards),
vLLM (by the embedded engine), GPUs (by two ranks, where the recipe splits the model), and sizes.
"""

import json
import os
import shutil
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import datasets
import pytest
import yaml

from examples.judge.judge import serve
from fsdptrain import cli
from fsdptrain.config import Config, load_recipe, read_recipe
from fsdptrain.data.sources import load_rows
from fsdptrain.features.vision.config import VisionConfig
from fsdptrain.rewards.code import code
from fsdptrain.rewards.judge import API_KEY
from fsdptrain.rewards.maths import math
from fsdptrain.types import Prompt
from tests import configs, vision_zoo, zoo
from tests.e2e import command
from tests.e2e.command import metrics_of, trained
from tests.recipe_headers import RECIPES
from tests.testing import save_tiny_checkpoint, tiny_tokenizer

ELSEWHERE = {
    "mixture_qwen3_4b",
    "spell_backward_demo",
    "spell_backward_sft_demo",
    "sft_qwen2.5_7b",
}  # trained by other tests
TRAINED = [path for path in RECIPES if path.stem not in ELSEWHERE]

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


def own_prompts(i: int) -> dict[str, Any]:
    return {"prompt": f"Ask Ann for salt number {i}.", "label": "please"}


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
    "my_prompts.jsonl": own_prompts,
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


def save_model(name: str, folder: Path) -> str:
    if "-VL-" in name:
        vision_zoo.save(folder, "qwen3_vl")
    elif "A3B" in name:
        zoo.build("qwen3_moe", num_experts=8, max_position_embeddings=2048).save_pretrained(folder)
        tiny_tokenizer().save_pretrained(folder)
    else:
        save_tiny_checkpoint(folder, max_position_embeddings=2048)
    return str(folder)


def shrink(recipe: dict[str, Any], config: Config, folder: Path) -> int:
    """Replace in `recipe` what cannot be here. Returns the number of ranks."""
    recipe["model"]["hf_checkpoint"] = save_model(config.model.hf_checkpoint, folder / "model")
    if "distillation" in recipe:
        recipe["distillation"]["teacher"] = str(
            save_tiny_checkpoint(folder / "teacher", 1, max_position_embeddings=2048)
        )
    recipe.pop("vllm", None)
    recipe.pop("launch", None)
    data, rollout, batch = recipe["data"], recipe["rollout"], recipe["batch"]
    for first, key in ((0, "prompt_data"), (100, "eval_prompt_data")):
        if not data.get(key, "reasoning_gym:").startswith("reasoning_gym:"):
            data[key] = write_rows(data[key], folder, first)
    if "eval_prompt_data" not in data:
        data["eval_size"] = 2
    if data["prompt_data"].startswith("reasoning_gym:"):
        data["data_size"] = 64
    rollout |= {"engine": "hf", "batch_size": 4, "max_prompt_len": 960, "max_response_len": 8, "max_batch_tokens": 8192}
    batch["max_tokens_per_gpu"] = 1024
    recipe["algorithm"]["n_samples_per_prompt"] = 4
    if "global_batch_size" in batch:
        batch["global_batch_size"] = 8  # two optimizer steps
    if "shaping" in recipe:
        recipe["shaping"]["overlong_buffer"] = 4
    if "reward" in recipe:
        recipe["reward"]["reward"] = [*recipe["reward"]["reward"], "tests.e2e.rewards:variety"]  # random texts get 0
    recipe["run"] |= {"output_dir": str(folder / "run"), "num_rollout": 1}
    experts = [recipe.get("model_parallel", {}), recipe.get("megatron", {})]
    for section in experts:
        for key in section:
            section[key] = 2
    return 2 if any(experts) else 1


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


@pytest.mark.matrix
@pytest.mark.parametrize("path", TRAINED, ids=lambda path: path.stem)
def test_a_tiny_model_trains_a_step_of_the_recipe(path: Path, tmp_path: Path) -> None:
    recipe, config = read_recipe(path), load_recipe(path)
    num_ranks, variables = shrink(recipe, config, tmp_path), {}
    with ExitStack() as stack:
        if config.reward.judge_url is not None:
            url, model, variables[API_KEY] = stack.enter_context(serve())
            recipe["reward"] |= {"judge_url": url, "judge_model": model}
        (tmp_path / "recipe.yaml").write_text(json.dumps(recipe))
        argv = ["--recipe", str(tmp_path / "recipe.yaml")]
        result = command.run(argv, tmp_path / "out", num_ranks=num_ranks, variables=variables)
    assert result.code == 0, result.err
    rows = metrics_of(tmp_path / "run")
    (row,) = trained(rows)
    assert row["optim/grad_norm"] > 0, row
    assert any(key.startswith("eval/") for row in rows for key in row)
    assert os.listdir(tmp_path / "run" / "hf")
