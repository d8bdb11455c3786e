"""Combinations of the options of distillation that do not work. Imports no torch."""

from collections.abc import Iterator
from urllib.parse import urlsplit

from fsdptrain.config import Config
from fsdptrain.config.rules import Problem
from fsdptrain.features.sections import DistillationConfig


def option_problems(options: DistillationConfig, config: Config) -> Iterator[Problem]:
    assert options.teacher is not None
    if options.is_server and "@" in urlsplit(options.teacher).netloc:
        yield "--opd-teacher names a user in its URL: leave it out, and give a key by the variable TEACHER_API_KEY"
    if options.is_server and config.rollout.temperature != 1.0:
        yield (
            f"--opd-teacher {options.teacher} gives logprobs at temperature 1, not at --rollout-temperature "
            f"{config.rollout.temperature:g}: set that to 1, or use a checkpoint"
        )
    if not options.is_server and config.ranks_along("tensor") * config.ranks_along("experts") > 1:
        yield (
            f"--opd-teacher {options.teacher} is not split by --tensor-parallel-size and --expert-parallel-size: "
            "leave these out, or serve the teacher by vLLM and give its URL"
        )
    if options.loss == "token" and config.algorithm.loss == "gspo":
        yield (
            "--opd-loss token gives each token an advantage, and --loss gspo has one ratio per sequence: use "
            "--loss grpo, or --opd-loss jsd"
        )
