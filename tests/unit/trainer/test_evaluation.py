"""Evaluations use --pass-threshold."""

import pytest

from fsdptrain.config import Config
from fsdptrain.trainer.evaluation import Evaluation
from fsdptrain.trainer.samples.single_turn import SingleTurn
from fsdptrain.types import Prompt
from tests.rewards import in_process
from tests.testing import FakeRolloutEngine, tiny_tokenizer


@pytest.mark.parametrize(("threshold", "accuracy"), [(1.0, 0.25), (0.5, 0.75), (-1.0, 1.0)])
def test_accuracy_counts_responses_from_the_threshold_on(threshold: float, accuracy: float) -> None:
    rewards = {"0": 0.0, "1": 0.5, "2": 0.5 + 1e-9, "3": 1.0}
    metrics, _ = Evaluation(
        Config(hf_checkpoint="x", pass_threshold=threshold),
        SingleTurn(
            FakeRolloutEngine(lambda prompt, index: [5]),
            in_process(lambda prompt, response: rewards[prompt.id]),
            tiny_tokenizer(),
        ),
        [Prompt(name, [5], "") for name in rewards],
    ).run()
    assert metrics["eval/heldout/accuracy"] == accuracy
