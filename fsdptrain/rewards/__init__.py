"""Verifiable rewards, computed by code."""

from fsdptrain.rewards.answers import extract_answer
from fsdptrain.rewards.build import WeightedSum, build_reward, reads_environment
from fsdptrain.rewards.scoring import Score, Scores, check_unscored, score_completions
from fsdptrain.rewards.verifiers import REWARDS

__all__ = [
    "REWARDS",
    "Score",
    "Scores",
    "WeightedSum",
    "build_reward",
    "check_unscored",
    "extract_answer",
    "reads_environment",
    "score_completions",
]
