"""Rewards from --reward: names, weights, functions of users."""

from dataclasses import replace
from pathlib import Path

import pytest

from fsdptrain.config import RewardConfig
from fsdptrain.errors import ConfigError
from fsdptrain.rewards.build import WeightedSum, build_reward
from fsdptrain.rewards.functions import math
from fsdptrain.rewards.parallel import compute_rewards
from fsdptrain.types import Episode, Prompt
from tests.rewards import in_process, only

PROMPT = Prompt("p", [1], "", label="4")
GOOD = "<think>2+2</think><answer>4</answer>"


def parts_of(reward: WeightedSum, prompt: Prompt, response: str) -> dict[str, float | None]:
    [result] = compute_rewards(in_process(reward), [prompt], [response]).results
    return {**result.rewards, "reward": result.reward}


def test_several_rewards_are_a_weighted_sum_with_named_parts() -> None:
    reward = build_reward(RewardConfig(reward=["math=0.9", "format=0.1"]), prompt_data="x")
    assert parts_of(reward, PROMPT, "<answer>4</answer>") == {"math": 1.0, "format": 0.0, "reward": 0.9}
    reward = build_reward(RewardConfig(reward=["exact", "format=-0.5"]), prompt_data="x")
    assert parts_of(reward, PROMPT, GOOD) == {"exact": 1.0, "format": 1.0, "reward": 0.5}


def test_auto_is_the_scorer_of_the_data() -> None:
    of_math = build_reward(RewardConfig(), prompt_data="x.jsonl")
    assert parts_of(of_math, PROMPT, GOOD) == {"math": 1.0, "reward": 1.0}
    entry = {"question": "", "answer": "4", "metadata": {}}
    prompt = Prompt("p", [1], "", metadata={"task": "spell_backward", "entry": entry})
    reward = build_reward(RewardConfig(), prompt_data="reasoning_gym:spell_backward")
    assert parts_of(reward, prompt, GOOD) == {"reasoning_gym": 1.0, "reward": 1.0}


def test_auto_is_the_environment_reward_unless_the_data_have_a_scorer() -> None:
    prompt = Prompt("p", [1], "", metadata={"episode": Episode((), {"found": 2.0, "reward": 3.0}, True)})
    reward = build_reward(RewardConfig(), prompt_data="x.jsonl", has_environment=True)
    assert parts_of(reward, prompt, GOOD) == {"environment": 3.0, "found": 2.0, "reward": 3.0}
    both = build_reward(RewardConfig(reward=["environment=0.5", "format"]), prompt_data="x", has_environment=True)
    assert parts_of(both, prompt, GOOD) == {"environment": 3.0, "found": 2.0, "format": 1.0, "reward": 2.5}
    of_the_data = build_reward(RewardConfig(), prompt_data="reasoning_gym:products", has_environment=True)
    readers = [each.reads_environment for each in (reward, both, of_the_data, only(lambda prompt, response: 1.0))]
    assert readers == [True, True, False, True]
    with pytest.raises(ConfigError, match="there is no environment; set --environment"):
        build_reward(RewardConfig(reward=["environment"]), prompt_data="x")


def test_a_reward_function_from_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_rewards.py").write_text(
        "def brevity(prompt, response):\n    return {'short': 1, 'len': len(response)}\n"
    )
    monkeypatch.chdir(tmp_path)
    reward = build_reward(RewardConfig(reward=["my_rewards:brevity=0.5", "math"]), prompt_data="x")
    assert parts_of(reward, PROMPT, "4") == {"short": 1.0, "len": 1.0, "brevity": 2.0, "math": 1.0, "reward": 2.0}


def test_a_detail_of_one_reward_never_hides_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Advantages may be made of each reward by its name."""
    (tmp_path / "detailed.py").write_text("def f(prompt, response):\n    return {'reward': 0.25, 'math': 7, 'f': 9}\n")
    monkeypatch.chdir(tmp_path)
    reward = build_reward(RewardConfig(reward=["math=2", "detailed:f=4"]), prompt_data="x")
    assert parts_of(reward, PROMPT, "4") == {"math": 1.0, "f": 0.25, "reward": 3.0}


def test_functions_with_the_same_name_have_full_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("rm_one", "rm_two"):
        (tmp_path / f"{module}.py").write_text("def compute_score(prompt, response):\n    return 0.5\n")
    monkeypatch.chdir(tmp_path)
    reward = build_reward(RewardConfig(reward=["rm_one:compute_score=2", "rm_two:compute_score"]), prompt_data="x")
    assert [(c.name, c.weight) for c in reward.components] == [
        ("rm_one.compute_score", 2.0),
        ("rm_two.compute_score", 1.0),
    ]


def test_a_column_names_the_rewards_that_score_a_row() -> None:
    reward = build_reward(RewardConfig(reward=["exact=2", "format=0.5"]), prompt_data="x", key="extra.task")
    tasks = ("exact", "format", ["format", "exact"], "math")
    rows = [replace(PROMPT, metadata={"extra": {"task": task}}) for task in tasks]
    assert [parts_of(reward, row, "<answer>4</answer>") for row in rows[:3]] == [
        {"exact": 1.0, "reward": 2.0},
        {"format": 0.0, "reward": 0.0},
        {"exact": 1.0, "format": 0.0, "reward": 2.0},
    ]
    with pytest.raises(ConfigError, match=r"--reward-key extra.task: row p has .math., --reward has exact, format"):
        in_process(reward).check(rows, call=False)


def test_a_reward_that_cannot_score_is_named() -> None:
    reward = build_reward(RewardConfig(reward=["format", "math"]), prompt_data="x")
    results = compute_rewards(in_process(reward), [replace(PROMPT, label=None), PROMPT], [GOOD, GOOD])
    line = math.__code__.co_firstlineno
    assert results.first_error == f"math returned None, which means that it cannot score this (functions.py:{line})"
    assert [score.reward for score in results.results] == [None, 2.0]


@pytest.mark.parametrize("name", ["reward", "mean", "length"])
def test_a_function_with_a_reserved_name_has_its_full_name(name, tmp_path, monkeypatch):
    (tmp_path / f"mine_{name}.py").write_text(f"def {name}(prompt, response):\n    return 0.5\n")
    monkeypatch.chdir(tmp_path)
    reward = build_reward(RewardConfig(reward=[f"mine_{name}:{name}=2", "math"]), prompt_data="x")
    assert parts_of(reward, PROMPT, "4") == {f"mine_{name}.{name}": 0.5, "math": 1.0, "reward": 2.0}


@pytest.mark.parametrize(
    ("specs", "message"),
    [
        (["maths"], "--reward: unknown name 'maths'; did you mean 'math'"),
        (["math=much"], "--reward math=much: the weight after = must be a number"),
        (["math=nan"], "must be a number"),
        (["math", "math=0.5"], "one or more different rewards"),
        (["reasoning_gym"], "--reward reasoning_gym scores reasoning_gym:<task> data only, not --prompt-data x.jsonl"),
    ],
)
def test_an_invalid_reward_is_an_error(specs: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_reward(RewardConfig(reward=specs), prompt_data="x.jsonl")
