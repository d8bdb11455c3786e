"""Episodes with a real model do not depend on the number of ranks, and the trainer agrees with their logprobs."""

from pathlib import Path
from random import Random

import pytest

from fsdptrain.config import Config
from fsdptrain.data.chat import TurnRenderer
from fsdptrain.errors import FsdptrainError
from fsdptrain.rewards.functions import environment as environment_reward
from fsdptrain.threads import StepThreads
from fsdptrain.trainer.phases import Stopwatch
from fsdptrain.trainer.samples.environment import LoadedEnvironment
from fsdptrain.trainer.samples.multi_turn import MultiTurn
from fsdptrain.trainer.samples.single_turn import GenerationRound
from fsdptrain.trainer.samples.source import own_share
from fsdptrain.types import Prompt, SamplingParams, Turn
from tests import agreement
from tests.exact import Exact, backends_in_float64
from tests.rewards import in_process
from tests.testing import save_tiny_checkpoint, spawn, tiny_tokenizer

PROMPTS = [Prompt(f"p{i}", [5 + i] * (1 + 7 * (i % 4)), "") for i in range(5)]
# each token ends a turn with a chance of about one in six
SAMPLING = SamplingParams(num_samples=3, max_tokens=90, seed=1, stop_token_ids=tuple(range(5, 50)))


class Dice:
    """Throws until it has heard enough; what it says and how long it goes on hang on the seed alone."""

    def reset(self, prompt: Prompt, seed: int) -> Random:
        return Random(seed)

    def step(self, state: Random, response: str) -> Turn:
        thrown = state.randint(1, 6)
        return Turn(f"You threw {'*' * thrown}.", done=thrown == 6, reward=float(len(response) % 7))


class Fails(Dice):
    def step(self, state: Random, response: str) -> Turn:
        exit("the environment ends the process")


def play(folder: Path, prompts: list[Prompt], environment: Dice) -> tuple[GenerationRound, float]:
    """Episodes, and the largest difference between the engine's logprobs and the sharded trainer's."""
    config = Config(hf_checkpoint=str(folder), rollout_engine="hf", bf16=False)
    backend, engine = agreement.build(config)
    engine.update_weights(backend.hf_weights(engine.weight_naming), 3)
    tokenizer = tiny_tokenizer()
    sampler = MultiTurn(
        engine=engine,
        environment=LoadedEnvironment(environment, None, None, None, ()),
        reward=in_process(environment_reward),
        renderer=TurnRenderer(tokenizer, data=config.data),
        threads=StepThreads(num_threads=4, timeout=20.0),
        tokenizer=tokenizer,
        max_turns=4,
    )
    with Exact():
        made = sampler.sample(own_share(prompts), SAMPLING, Stopwatch())
        return made, agreement.difference_of_samples(backend, made.samples)


def play_all(folder: Path) -> list[tuple[GenerationRound, float]]:
    """All prompts; one, so that a second rank has none; and a subset in another order."""
    backends_in_float64()
    return [play(folder, prompts, Dice()) for prompts in (PROMPTS, PROMPTS[:1], PROMPTS[:2:-1])]


def fails(folder: Path) -> str:
    """An environment that fails on every rank is no error of the round; a prompt that cannot be generated is."""
    backends_in_float64()
    made, _ = play(folder, PROMPTS[:2], Fails())
    assert made.results.num_unscored == len(made.samples)
    with pytest.raises(FsdptrainError) as caught:
        play(folder, [Prompt("long", [5] * 2000, ""), PROMPTS[0]], Dice())
    return str(caught.value)


def content(rounds: list[GenerationRound]) -> dict[str, list[tuple]]:
    """Group -> what its samples are, but for logprobs."""
    found: dict[str, list[tuple]] = {}
    for sample in (sample for made in rounds for sample in made.samples):
        kept = (sample.token_ids, sample.loss_mask, sample.reward, sample.truncated, sample.policy_version)
        found.setdefault(sample.group_id, []).append(kept)
    return found


def test_episodes_do_not_depend_on_ranks_or_company_and_the_trainer_scores_them_as_sampled(tmp_path):
    save_tiny_checkpoint(tmp_path)
    [alone] = spawn(1, play_all, tmp_path)
    halves = spawn(2, play_all, tmp_path)
    whole = content([alone[0][0]])
    assert {group: len(samples) for group, samples in whole.items()} == {p.id: 3 for p in PROMPTS}
    for which, groups in enumerate(([p.id for p in PROMPTS], ["p0"], ["p4", "p3"])):
        one, two = content([alone[which][0]]), content([half[which][0] for half in halves])
        assert one == two
        assert one == {group: whole[group] for group in groups}
    assert len(halves[1][1][0].samples) + len(halves[0][1][0].samples) == 3

    for made, difference in [*alone, *halves[0], *halves[1]]:
        assert difference < 1e-12
        assert all(sample.policy_version == 3 for sample in made.samples)
    samples = alone[0][0].samples
    turns = [sum(b and not a for a, b in zip(s.loss_mask, s.loss_mask[1:], strict=False)) for s in samples]
    assert max(turns) == 4
    assert min(turns) < 4
    assert {sample.truncated for sample in samples} == {True, False}


def test_a_rank_that_fails_takes_all_with_it_and_hangs_none(tmp_path):
    save_tiny_checkpoint(tmp_path)
    for message in spawn(2, fails, tmp_path):
        assert "prompt 'long' of 2000 tokens" in message
