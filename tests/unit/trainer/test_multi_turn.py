"""Episodes with a scripted engine: completions stay as sampled, and a failing environment costs its episode only."""

import itertools
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fsdptrain.config import DataConfig
from fsdptrain.data.chat import TurnRenderer
from fsdptrain.errors import ConfigError
from fsdptrain.rewards.functions import environment as environment_reward
from fsdptrain.rewards.functions import exact
from fsdptrain.threads import StepThreads
from fsdptrain.trainer.phases import Stopwatch
from fsdptrain.trainer.samples.environment import LoadedEnvironment, Mixture, _SingleTurn
from fsdptrain.trainer.samples.multi_turn import MultiTurn, prompt_seed
from fsdptrain.trainer.samples.single_turn import GenerationRound, SingleTurn
from fsdptrain.types import NO_ROUTE, Completion, Prompt, SamplingParams, Turn
from tests.rewards import in_process
from tests.testing import FakeRolloutEngine, tiny_tokenizer

TOKENIZER = tiny_tokenizer()
END = TOKENIZER.eos_token_id
PROMPTS = [Prompt(f"p{i}", [*TOKENIZER(f"<|user|>{i}<|end|><|assistant|>")["input_ids"]], "", "yes") for i in range(2)]
ENDS = (END,)


class Recording(FakeRolloutEngine):
    """Records its calls. Every token that it reads is routed to the expert with the number of the turn."""

    def __init__(self, respond: Callable[[Prompt, int], Sequence[int]]) -> None:
        super().__init__(respond)
        self.asked: list[tuple[list[Prompt], SamplingParams]] = []

    def generate(self, prompts, sampling):
        self.asked.append((list(prompts), sampling))
        asked = [prompt for prompt in prompts for _ in range(sampling.num_samples)]
        made = zip(asked, super().generate(prompts, sampling), strict=True)
        return [replace(completion, routes=routes_of(prompt, completion)) for prompt, completion in made]


def routes_of(prompt: Prompt, completion: Completion) -> torch.Tensor:
    num_read = len(prompt.token_ids) + len(completion.token_ids) - 1
    return torch.full((num_read, 1, 1), int(prompt.id.partition("@")[2] or 0), dtype=torch.int16)


class Scripted:
    """Answers by a function of the number of the turn; remembers episodes."""

    def __init__(self, answer: Callable[[int, str], Any]) -> None:
        self.answer = answer
        self.seeds: list[tuple[str, int]] = []

    def reset(self, prompt: Prompt, seed: int) -> Any:
        self.seeds.append((prompt.id, seed))
        return itertools.count(1)

    def step(self, state: Any, response: str) -> Any:
        return self.answer(next(state), response)


def words(text: str) -> list[int]:
    return [*TOKENIZER(text)["input_ids"], END]


def play(
    environment: Any,
    respond: Callable[[Prompt, int], Sequence[int]] = lambda prompt, index: words("yes"),
    *,
    engine: Recording | None = None,
    reward: Any = environment_reward,
    finish: Callable[[Any], Any] | None = None,
    prompts: Sequence[Prompt] = PROMPTS,
    max_tokens: int = 200,
    max_turns: int = 5,
    timeout: float = 60.0,
    stop: tuple[str, ...] = (),
) -> tuple[GenerationRound, Recording]:
    """Two samples of each prompt. A function as `environment` answers by the number of the turn."""
    engine = engine or Recording(respond)
    environment = Scripted(environment) if callable(environment) else environment
    sampler = MultiTurn(
        engine=engine,
        environment=LoadedEnvironment(environment, finish, None, None, ()),
        reward=in_process(reward),
        renderer=TurnRenderer(TOKENIZER, data=DataConfig(), max_observation_len=50),
        threads=StepThreads(num_threads=4, timeout=timeout),
        tokenizer=TOKENIZER,
        max_turns=max_turns,
    )
    sampling = SamplingParams(num_samples=2, max_tokens=max_tokens, stop_token_ids=ENDS, stop=stop, seed=7)
    return sampler.sample(prompts, sampling, Stopwatch()), engine


def two_turns(turn: int, response: str) -> Turn:
    return Turn(f"turn {turn}", done=turn == 2, reward=0.5)


def test_a_turn_ends_with_the_stop_string_that_the_environment_reads_with_any_engine():
    made, _ = play(
        lambda turn, response: Turn(response, done=turn == 2, reward=1.0),
        lambda prompt, index: words("let <x>1</x> be"),
        prompts=PROMPTS[:1],
        stop=("</y>", "</x>"),
    )
    turn = "let <x>1</x>"
    for sample in made.samples:
        text = TOKENIZER.decode(sample.token_ids[len(PROMPTS[0].token_ids) :])
        assert text == f"{turn}<|end|><|user|>{turn}<|end|><|assistant|>{turn}"
        assert (sample.num_generated, sample.truncated) == (2 * len(turn), False)


@settings(deadline=None, max_examples=40)
@given(
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=6),
    observations=st.lists(st.text(max_size=20), min_size=6, max_size=6),
    max_tokens=st.integers(1, 120),
    max_turns=st.integers(1, 6),
)
def test_each_prompt_is_a_prefix_of_the_next_and_of_the_sample(lengths, observations, max_tokens, max_turns):
    """The mask is True exactly on sampled tokens. They have the logprobs of the engine, others 0."""
    sampled: dict[str, list[list[int]]] = {}

    def respond(prompt: Prompt, index: int) -> list[int]:
        base = prompt.id.partition("#")[0]
        name = prompt.id.rpartition("@")[0] if "#" in prompt.id else f"{base}#{index}"
        turn = len(sampled.setdefault(name, []))
        limit = min(max_tokens, prompt.max_tokens or max_tokens)
        ids = [*([200 + turn] * lengths[turn % len(lengths)]), END][:limit]
        sampled[name].append(ids)
        return ids

    made, engine = play(
        lambda turn, _: Turn(observations[turn % 6], reward=0.0), respond, max_tokens=max_tokens, max_turns=max_turns
    )
    samples = {f"{s.group_id}#{i % 2}": s for i, s in enumerate(made.samples)}
    before: dict[str, list[int]] = {f"{p.id}#{k}": p.token_ids for p in PROMPTS for k in range(2)}
    for prompts, sampling in engine.asked[1:]:
        assert sampling.num_samples == 1
        for prompt in prompts:
            name = prompt.id.rpartition("@")[0]
            assert prompt.token_ids[: len(before[name])] == before[name]
            before[name] = prompt.token_ids
    for name, sample in samples.items():
        assert sample.token_ids[: len(before[name])] == before[name]
        prompt = next(p for p in PROMPTS if p.id == sample.group_id)
        assert len(sample.token_ids) - len(prompt.token_ids) <= max_tokens
        runs = itertools.groupby(zip(sample.loss_mask, sample.token_ids, strict=True), lambda pair: pair[0])
        generated = [[token for _, token in run] for is_model, run in runs if is_model]
        assert generated == sampled[name]
        assert sample.rollout_logprobs == [-1.0 if mask else 0.0 for mask in sample.loss_mask]
        assert len(sampled[name]) <= max_turns
        assert sample.loss_mask[-1]  # no observation at the end
        assert sample.truncated  # by tokens or by turns: this environment is never done


def test_texts_and_rewards_get_the_conversation():
    seen = []

    def reward(prompt: Prompt, response: str) -> float:
        seen.append((prompt.metadata["episode"], response))
        return 1.0

    made, _ = play(two_turns, reward=reward)
    assert made.texts == ["yes<|end|><|user|>turn 1<|end|><|assistant|>yes<|end|>"] * 4
    assert [prompt.id for prompt in made.prompts] == ["p0", "p0", "p1", "p1"]
    episode, response = seen[0]
    assert response == "yes"
    assert [(m["role"], m["content"]) for m in episode.messages] == [
        ("assistant", "yes"), ("user", "turn 1"), ("assistant", "yes"),
    ]  # fmt: skip
    assert episode.done
    assert episode.reward == {"reward": 1.0}
    assert [s.reward for s in made.samples] == [1.0] * 4
    assert not any(s.truncated for s in made.samples)


def test_prompt_ids_name_sample_and_turn_and_a_group_has_one_seed():
    environment = Scripted(lambda turn, _: Turn("more", done=turn == 3, reward=0.0))
    _, engine = play(environment)
    assert [[p.id for p in prompts] for prompts, _ in engine.asked] == [
        ["p0", "p1"],
        ["p0#0@1", "p0#1@1", "p1#0@1", "p1#1@1"],
        ["p0#0@2", "p0#1@2", "p1#0@2", "p1#1@2"],
    ]
    assert {sampling.seed for _, sampling in engine.asked} == {7}
    assert sorted(environment.seeds) == sorted((p.id, prompt_seed(7, p.id)) for p in PROMPTS for _ in range(2))
    assert prompt_seed(7, "p0") != prompt_seed(7, "p1") != prompt_seed(8, "p1")


def test_an_episode_without_any_reward_is_unscored():
    made, _ = play(lambda turn, _: Turn(done=True))
    assert [sample.reward for sample in made.samples] == [None] * 4
    assert made.results.first_error.startswith("the environment gave no reward in this episode: score ")


def test_unread_rewards_of_an_environment_are_an_error():
    with pytest.raises(ConfigError, match="--environment gives rewards, and --reward uses none of them"):
        play(two_turns, reward=exact)
    made, _ = play(lambda turn, _: Turn(done=True), reward=exact)
    assert [sample.reward for sample in made.samples] == [1.0] * 4


class Wild:
    """In every other episode something goes wrong."""

    def __init__(self, wrong: Callable[[], Any]) -> None:
        self.wrong = wrong
        self.count = itertools.count()
        self.finished: list[Any] = []

    def reset(self, prompt: Prompt, seed: int) -> int:
        return next(self.count)

    def step(self, state: int, response: str) -> Any:
        return self.wrong() if state % 2 else Turn(done=True, reward=1.0)


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        (lambda: 1 / 0, "--environment: ZeroDivisionError: division by zero"),
        (lambda: "text", "--environment: TypeError: step returned 'text', it must return a fsdptrain.types.Turn"),
        (lambda: Turn(3), "--environment: TypeError"),
        (lambda: Turn([{"role": "assistant", "content": "x"}]), "--environment: TypeError: an observation is a text"),
        (lambda: Turn([{"role": "user", "content": None}]), "--environment: TypeError: an observation is a text or"),
        (lambda: Turn(reward="high"), "--environment: TypeError: the reward returned 'high', which is not a number"),
        (lambda: Turn(reward=float("nan")), "--environment: ValueError: the reward returned nan"),
        pytest.param(
            lambda: time.sleep(600),
            "--environment: DeadlineError: no answer within --environment-timeout 2 s",
            marks=pytest.mark.slow,
        ),
        pytest.param(lambda: threading.Event().wait(), "--environment: DeadlineError", marks=pytest.mark.slow),
    ],
)
def test_a_failing_episode_is_unscored_and_others_are_scored(wrong: Callable[[], Any], error: str) -> None:
    environment = Wild(wrong)
    made, _ = play(environment, finish=environment.finished.append, timeout=2.0 if "Deadline" in error else 60.0)
    rewards = [sample.reward for sample in made.samples]
    assert sorted(rewards, key=str) == [1.0, 1.0, None, None]
    assert made.results.num_unscored == 2
    assert (made.results.first_error or "").startswith(error)
    assert [(sample.error or "").startswith(error) for sample in made.samples].count(True) == 2
    for sample in made.samples:
        assert sample.loss_mask.count(True) == len(words("yes"))
    assert sorted(environment.finished) == [0, 1, 2, 3]


def test_a_long_observation_is_cut_and_ends_the_episode_if_no_room_is_left():
    made, _ = play(lambda turn, _: Turn("y" * 10**6, done=turn == 2, reward=0.0))
    assert not made.samples[0].truncated
    assert " ...<|end|>" in made.texts[0]
    made, _ = play(lambda turn, _: Turn("y" * 10**6, reward=0.0), max_tokens=40)
    assert made.samples[0].truncated
    assert made.texts[0] == "yes<|end|>"


def test_each_token_has_the_routes_of_the_first_turn_that_read_it():
    made, _ = play(two_turns)
    for sample in made.samples:
        routes = sample.routes[:, 0, 0].tolist()
        first_turn = sample.loss_mask.index(True) + len(words("yes")) - 1
        assert routes == [0] * first_turn + [1] * (len(routes) - first_turn - 1) + [NO_ROUTE]
        assert len(routes) == len(sample.token_ids)


def test_a_rank_without_prompts_calls_the_engine_and_returns_nothing():
    made, engine = play(two_turns, prompts=[])
    assert (made.samples, made.texts, made.results.results) == ([], [], [])
    assert len(engine.asked) == 1  # collective
    single = SingleTurn(engine, in_process(exact), TOKENIZER).sample([], SamplingParams(2, 9), Stopwatch())
    assert (single.samples, single.texts) == ([], [])


def test_a_row_is_played_in_its_environment_or_is_a_single_turn() -> None:
    two, ended = Scripted(lambda turn, _: Turn("more", done=turn == 2)), list[Any]()
    mixture = Mixture("env", {"": LoadedEnvironment(_SingleTurn()), "Two": LoadedEnvironment(two, ended.append)})
    prompts = [replace(prompt, metadata={"env": name}) for prompt, name in zip(PROMPTS, ("Two", None), strict=True)]
    made, engine = play(mixture, prompts=prompts, reward=exact)
    sampling = SamplingParams(num_samples=2, max_tokens=200, stop_token_ids=ENDS, seed=7)
    alone = SingleTurn(engine, in_process(exact), TOKENIZER).sample(prompts[1:], sampling, Stopwatch())
    assert made.samples[2:] == [replace(s, rewards={"environment/single_turn": 1.0}) for s in alone.samples]
    assert [sample.rewards for sample in made.samples[:2]] == [{"environment/Two": 1.0}] * 2
    assert (made.samples[0].num_generated, len(ended)) == (2 * made.samples[2].num_generated, 2)
