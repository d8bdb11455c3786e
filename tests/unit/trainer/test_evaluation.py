"""Evaluation: the estimators are unbiased, and every sample counts once."""

import itertools
import math

import pytest

from fsdptrain.config import Config
from fsdptrain.trainer.evaluation import Evaluation, eval_sampling, evaluation_metrics, pass_at_k
from fsdptrain.trainer.samples.single_turn import SingleTurn
from fsdptrain.trainer.samples.source import sampling_at
from fsdptrain.types import Prompt, Sample, SamplingParams
from tests.rewards import in_process
from tests.testing import FakeRolloutEngine, tiny_tokenizer

# by prompt and sample; None: could not be scored
REWARDS = [[1.0, 0.0, 0.5, 0.0], [1.0, 1.0 - 1e-9, 1.0, 1.0], [None, 0.0, 0.0, 0.0]]


def samples_of(rewards=REWARDS):
    """The k-th sample of a prompt has k + 1 tokens of the model in two sequences; the last one was cut short."""
    for group, row in enumerate(rewards):
        for k, reward in enumerate(row):
            mask, other = [False, *[True] * k, False], Sample(str(group), [7], [True], [0.0], truncated=k == 3)
            yield Sample(str(group), [7] * len(mask), mask, [0.0] * len(mask), reward=reward, others=(other,))


def run(rewards=REWARDS):
    return evaluation_metrics(list(samples_of(rewards)), num_samples=4, name="held_out")


@pytest.mark.parametrize("num_correct", range(7))
@pytest.mark.parametrize("k", range(1, 7))
def test_pass_at_k_is_the_share_of_subsets_that_hold_a_correct_sample(num_correct, k):
    samples = [i < num_correct for i in range(6)]
    subsets = list(itertools.combinations(samples, k))
    assert pass_at_k(6, num_correct, k) == pytest.approx(sum(map(any, subsets)) / len(subsets), abs=1e-12)


def test_metrics_of_known_rewards():
    metrics = run()
    pass_2 = (1 - math.comb(3, 2) / math.comb(4, 2) + 1 + 0) / 3
    assert metrics == pytest.approx(
        {
            "eval/held_out/accuracy": 5 / 12, "eval/held_out/reward_mean": 5.5 / 12,
            "eval/held_out/length_mean": (1 + 2 + 3 + 4) / 4, "eval/held_out/truncated": 1 / 4,
            "eval/held_out/unscored": 1 / 12, "eval/held_out/pass@1": 5 / 12, "eval/held_out/pass@2": pass_2,
            "eval/held_out/pass@4": 2 / 3,
        }
    )  # fmt: skip


def test_each_reward_of_rows_that_name_theirs_is_a_mean_over_its_samples():
    parts = ({"math": 0.75}, {"code": 0.5}, {"math": 0.25, "mean": 9.0})
    samples = [Sample("a", [7], [True], [0.0], reward=0.5, rewards=own) for own in parts]
    found = evaluation_metrics(samples, num_samples=1, name="a", by_row=True)
    assert [found[f"eval/a/reward_{name}"] for name in ("math", "code", "mean")] == [0.5, 0.5, 0.5]


def test_without_prompts_there_are_no_metrics():
    assert run([]) == {}


def test_every_evaluation_of_a_run_samples_alike_and_unlike_training():
    config = Config(hf_checkpoint="here", n_samples_per_eval_prompt=4, eval_temperature=0.5, rollout_seed=3)
    config = config.with_values(rollout_stop=["</a>"], rollout_stop_token_ids=[7])
    sampling = eval_sampling(config)
    assert sampling == eval_sampling(config)
    assert (sampling.num_samples, sampling.temperature) == (4, 0.5)
    assert (sampling.stop, sampling.stop_token_ids) == (("</a>",), (7,))
    assert sampling.max_tokens == config.rollout.max_response_len
    training = SamplingParams(num_samples=4, max_tokens=1, seed=3)
    assert sampling.seed not in {sampling_at(training, step).seed for step in range(100)}


@pytest.mark.parametrize(("threshold", "accuracy"), [(1.0, 0.25), (0.5, 0.75), (-1.0, 1.0)])
def test_accuracy_counts_responses_from_the_threshold_on(threshold: float, accuracy: float) -> None:
    rewards = {"0": 0.0, "1": 0.5, "2": 0.5 + 1e-9, "3": 1.0}
    engine, reward = FakeRolloutEngine(lambda prompt, index: [5]), in_process(lambda prompt, _: rewards[prompt.id])
    sampler = SingleTurn(engine, reward, tiny_tokenizer())
    prompts = [Prompt(name, [5], "") for name in rewards]
    metrics, _ = Evaluation(Config(hf_checkpoint="x", pass_threshold=threshold), sampler, {"heldout": prompts}).run()
    assert metrics["eval/heldout/accuracy"] == accuracy
