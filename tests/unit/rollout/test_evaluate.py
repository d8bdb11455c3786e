"""Evaluation: the estimators are unbiased, and every sample counts once."""

import itertools
import math

import pytest

from fsdptrain.config import Config
from fsdptrain.rollout.evaluate import eval_sampling, evaluate, pass_at_k
from fsdptrain.testing import FakeRolloutEngine
from fsdptrain.trainer.experience import sampling_at
from fsdptrain.types import Prompt, SamplingParams

PROMPTS = [Prompt(str(i), [1], "") for i in range(3)]
SAMPLING = SamplingParams(num_samples=4, max_tokens=6, stop_token_ids=(0,))
# by prompt and sample; None: could not be scored
REWARDS = [[1.0, 0.0, 0.5, 0.0], [1.0, 1.0 - 1e-9, 1.0, 1.0], [None, 0.0, 0.0, 0.0]]


def run(prompts=PROMPTS):
    engine = FakeRolloutEngine(lambda prompt, index: [int(prompt.id) + 5] * index + [0])

    def score(asked, responses):
        assert responses == [chr(97 + int(prompt.id)) * k + "." for prompt, k in pairs]
        return [REWARDS[int(prompt.id)][k] for prompt, k in pairs]

    def decode(ids):
        return "".join("." if token == 0 else chr(92 + token) for token in ids)

    pairs = list(itertools.product(prompts, range(4)))
    return evaluate(engine, prompts, score, decode, sampling=SAMPLING, name="held_out")


@pytest.mark.parametrize("num_correct", range(7))
@pytest.mark.parametrize("k", range(1, 7))
def test_pass_at_k_is_the_share_of_subsets_that_hold_a_correct_sample(num_correct, k):
    samples = [i < num_correct for i in range(6)]
    subsets = list(itertools.combinations(samples, k))
    assert pass_at_k(6, num_correct, k) == pytest.approx(sum(map(any, subsets)) / len(subsets), abs=1e-12)


def test_metrics_of_known_rewards():
    metrics = run().metrics
    pass_2 = (1 - math.comb(3, 2) / math.comb(4, 2) + 1 + 0) / 3
    assert metrics == pytest.approx(
        {
            "eval/held_out/accuracy": 5 / 12,
            "eval/held_out/reward_mean": 5.5 / 12,
            "eval/held_out/length_mean": (1 + 2 + 3 + 4) / 4,
            "eval/held_out/truncated": 0.0,
            "eval/held_out/unscored": 1 / 12,
            "eval/held_out/pass@1": 5 / 12,
            "eval/held_out/pass@2": pass_2,
            "eval/held_out/pass@4": 2 / 3,
        }
    )


def test_responses_and_rewards_are_handed_on_in_order():
    evaluation = run()
    assert evaluation.responses[:4] == [".", "a.", "aa.", "aaa."]
    assert evaluation.rewards == [reward for group in REWARDS for reward in group]
    assert [completion.prompt_id for completion in evaluation.completions] == [p.id for p in PROMPTS for _ in range(4)]


def test_without_prompts_there_are_no_metrics():
    assert run([]).metrics == {}


def test_every_evaluation_of_a_run_samples_alike_and_unlike_training():
    config = Config(hf_checkpoint="here", n_samples_per_eval_prompt=4, eval_temperature=0.5, rollout_seed=3)
    sampling = eval_sampling(config)
    assert sampling == eval_sampling(config)
    assert (sampling.num_samples, sampling.temperature) == (4, 0.5)
    assert sampling.max_tokens == config.rollout.max_response_len
    training = SamplingParams(num_samples=4, max_tokens=1, seed=3)
    assert sampling.seed not in {sampling_at(training, step).seed for step in range(100)}
