"""Prompts of several sources: ratios, resume, and one source alone."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from fsdptrain.config import Config, DataConfig, RolloutConfig
from fsdptrain.data.mixture import MixedPrompts
from fsdptrain.data.prompts import PromptStream
from fsdptrain.data.rows import Row
from fsdptrain.data.sft import SampleBuilder
from fsdptrain.errors import ConfigError, DataError
from fsdptrain.trainer.data import build_data
from fsdptrain.trainer.samples.build import sample_builders
from fsdptrain.trainer.samples.sft import build_samples
from tests.testing import tiny_tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return tiny_tokenizer()


def stream(tokenizer: Any, name: str, count: int = 20) -> PromptStream:
    rows = [Row(f"{name}:{i}", f"{name} {i}") for i in range(count)]
    return PromptStream(rows, tokenizer, data=DataConfig(prompt_data=name), rollout=RolloutConfig())


def mixture(tokenizer: Any, seed: int = 0, **weights: float) -> MixedPrompts:
    return MixedPrompts({name: stream(tokenizer, name) for name in weights}, list(weights.values()), seed=seed)


@pytest.mark.parametrize("weights", [{"a": 0.7, "b": 0.3}, {"a": 2.0, "b": 1.0, "c": 5.0}, {"a": 0.001, "b": 1.0}])
def test_sources_are_drawn_in_the_ratio_of_their_weights(tokenizer: Any, weights: dict[str, float]) -> None:
    """Counts of 20,000 draws lie within five standard deviations of the binomial distribution."""
    mixed, draws = mixture(tokenizer, **weights), 20_000
    names = [mixed.source_of_draw(number) for number in range(draws)]
    for name, weight in weights.items():
        p = weight / sum(weights.values())
        assert abs(names.count(name) - draws * p) < 5 * math.sqrt(draws * p * (1 - p))


def test_choices_depend_on_the_seed_and_are_not_periodic(tokenizer: Any) -> None:
    def choices(seed: int) -> list[str]:
        mixed = mixture(tokenizer, seed, a=1.0, b=1.0)
        return [mixed.source_of_draw(number) for number in range(200)]

    assert choices(0) == choices(0) != choices(1)
    repeats = sum(x == y for x, y in zip(choices(0), choices(0)[1:], strict=False))
    assert abs(repeats - 99.5) < 5 * math.sqrt(199 / 4)


def test_a_mixture_of_one_source_is_that_source(tokenizer: Any) -> None:
    one = MixedPrompts({"": stream(tokenizer, "a")}, [1.0], seed=0)
    assert one.next(50) == stream(tokenizer, "a").next(50)


def test_each_source_keeps_its_own_order_and_epochs(tokenizer: Any) -> None:
    prompts = mixture(tokenizer, a=0.7, b=0.3).next(60)
    for name in "ab":
        own = [prompt.id.removeprefix(f"{name}/") for prompt in prompts if prompt.id.startswith(f"{name}/")]
        assert own == [prompt.id for prompt in stream(tokenizer, name).next(len(own))]
    assert len({prompt.id for prompt in prompts}) == 60


@pytest.mark.parametrize("stop", [0, 1, 7, 33])
@pytest.mark.parametrize("done", [0, 3])
def test_a_resumed_mixture_equals_an_uninterrupted_one(tokenizer: Any, stop: int, done: int) -> None:
    """Prompts that were pending at the checkpoint come first, in their order."""
    whole = mixture(tokenizer, a=0.7, b=0.3).next(80)
    first = mixture(tokenizer, a=0.7, b=0.3)
    drawn = first.next(stop)
    for prompt in drawn[:done]:
        first.record(prompt)
    second = mixture(tokenizer, seed=9, a=0.7, b=0.3)  # the state brings the seed
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert second.next(40) == whole[min(done, stop) :][:40]
    for prompt in drawn[done:]:
        first.record(prompt)


def test_another_set_of_sources_is_refused_on_resume(tokenizer: Any) -> None:
    state = mixture(tokenizer, a=1.0, b=1.0).state_dict()
    with pytest.raises(DataError, match="has the sources a, c, the checkpoint a, b: resume with the same"):
        mixture(tokenizer, a=1.0, c=1.0).load_state_dict(state)
    with pytest.raises(DataError, match="the checkpoint one: "):
        mixture(tokenizer, a=1.0, c=1.0).load_state_dict(stream(tokenizer, "a").state_dict())


@pytest.mark.parametrize(
    ("specs", "names"),
    [
        (["x/a.jsonl"], [""]),
        (["x/a.jsonl=0.7", "openai/gsm8k?name=main=1"], ["a", "gsm8k"]),
        (["a.jsonl=1", "y/a.csv=1", "reasoning_gym:sort?min=1=2"], ["a", "a_2", "sort"]),
    ],
)
def test_sources_have_short_names(specs: list[str], names: list[str]) -> None:
    assert list(Config(hf_checkpoint="x", prompt_data=specs).data.sources) == names


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"prompt_data": ["a", "b"]}, "--prompt-data a: each of several sources needs a weight above 0"),
        ({"prompt_data": ["a=1", "b=0"]}, "--prompt-data b=0: each of several sources needs a weight above 0"),
        ({"prompt_data": ["a=1", "b=-1"]}, "--prompt-data b=-1: each of several"),
        (
            {"prompt_data": ["a.jsonl=0.7"]},
            "--prompt-data a.jsonl=0.7: a weight has no effect on one source: remove =0.7",
        ),
        ({"prompt_data": ["a=1", "environment=1"], "environment": "x:y"}, "--prompt-data environment cannot be mixed"),
    ],
)
def test_weights_and_options_that_do_not_fit_are_one_line(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        Config(hf_checkpoint="x", **values)
    assert "\n" not in str(error.value)


def test_rows_are_held_out_by_source_and_excluded_from_all(tokenizer: Any, tmp_path: Any) -> None:
    for name, texts in (("a", range(40)), ("b", range(20, 60))):
        (tmp_path / f"{name}.jsonl").write_text("".join(f'{{"text": "{i}"}}\n' for i in texts))
    specs = [f"{tmp_path}/a.jsonl=0.75", f"{tmp_path}/b.jsonl=0.25"]
    config = Config(hf_checkpoint="x", algorithm="sft", prompt_data=specs, eval_size=8)
    data = build_data(config, tokenizer, None, None)
    assert {name: len(prompts) for name, prompts in data.supervised.items()} == {"a": 6, "b": 2}
    held_out = {prompt.source for prompts in data.supervised.values() for prompt in prompts}
    assert not held_out & {prompt.source for prompt in data.stream.next(200)}


@pytest.mark.parametrize("names", [["train_2", "train"], ["train", "train", "train_2"], ["a", "a", "a"]])
def test_no_source_replaces_another_by_its_name(names: list[str]) -> None:
    sources = DataConfig(prompt_data=[f"{i}/{name}.jsonl=0.5" for i, name in enumerate(names)]).sources
    assert [spec for spec, _ in sources.values()] == [f"{i}/{name}.jsonl" for i, name in enumerate(names)]


def test_the_system_prompt_is_that_of_the_source(tokenizer: Any, tmp_path: Path) -> None:
    """--system-prompt auto has an instruction for reasoning_gym data only."""
    (tmp_path / "chats.jsonl").write_text("".join(f'{{"prompt": "{i}", "label": "x"}}\n' for i in range(20)))
    files, gym = f"{tmp_path}/chats.jsonl=0.5", "reasoning_gym:spell_backward?size=20=0.5"
    values: dict[str, Any] = {"hf_checkpoint": "x", "eval_size": 4, "max_tokens_per_gpu": 4096}
    data = build_data(Config(**values, reward="exact", prompt_data=[gym, files]), tokenizer, None, None)
    for prompt in [*data.prompts, *data.stream.next(20)]:
        assert ("<answer>" in prompt.text) == prompt.id.startswith("spell_backward/")
    alone = Config(
        **values, reward="exact", prompt_data=gym.removesuffix("=0.5"), eval_prompt_data=files.removesuffix("=0.5")
    )
    evaluated = build_data(alone, tokenizer, None, None).prompts  # with the prompt that is trained
    assert evaluated
    assert all("<answer>" in prompt.text for prompt in evaluated)

    config = Config(**values, algorithm="sft", prompt_data=[gym, files])
    data = build_data(config, tokenizer, None, None)
    builders = sample_builders(config, tokenizer, data)
    prompts = data.stream.next(20)
    samples, _ = build_samples(builders, prompts)
    for name, own in data.supervised.items():
        samples += build_samples({"": SampleBuilder.of(config, data.held_out[name], tokenizer)}, own)[0]
    assert len(samples) > 20
    for sample in samples:
        name = sample.group_id.rpartition("/")[2]
        assert ("<answer>" in tokenizer.decode(sample.token_ids)) == name.startswith("spell_backward")


@pytest.mark.parametrize("weight", ["0.5", "1.", "1e-1", ".5", "2"])
def test_the_weight_follows_the_last_equals_sign(weight: str, tmp_path: Path) -> None:
    path = f"{tmp_path}/year=2024/rows.parquet"
    data = Config(hf_checkpoint="x", reward="exact", prompt_data=[f"{path}={weight}", f"a.jsonl={weight}"]).data
    assert data.sources == {"rows": (path, float(weight)), "a": ("a.jsonl", float(weight))}


def test_a_path_with_an_equals_sign_is_one_source(tmp_path: Path) -> None:
    folder = tmp_path / "year=2024"
    with pytest.raises(ConfigError, match="a weight has no effect on one source: remove =2024"):
        Config(hf_checkpoint="x", reward="exact", prompt_data=[str(folder)])
    folder.mkdir()
    assert Config(hf_checkpoint="x", reward="exact", prompt_data=[str(folder)]).data.sources == {"": (str(folder), 1.0)}
