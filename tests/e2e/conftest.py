from dataclasses import dataclass
from pathlib import Path

import pytest

from tests import zoo
from tests.e2e import command
from tests.testing import save_hub


@pytest.fixture(scope="session")
def moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random tiny Qwen3-MoE with its tokenizer, as a hub folder."""
    return save_hub(zoo.build("qwen3_moe"), tmp_path_factory.mktemp("hub") / "moe")


@dataclass(frozen=True)
class Finished:
    argv: list[str]  # without --output-dir
    folder: Path
    err: str


@pytest.fixture(scope="session")
def finished(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """A run of two rollouts with most of what a run can report. Tests that write into its folder copy it."""
    folder = tmp_path_factory.mktemp("finished")
    argv = ["--hf-checkpoint", str(checkpoint), *command.TINY_RUN, "--kl-loss-coef", "0.1", "--entropy-coef", "0.01"]
    argv += ["--global-batch-size", "8", "--n-samples-per-eval-prompt", "2", "--eval-greedy", "--profile-steps", "2"]
    argv += ["--rollout-max-response-len", "24", "--overlong-penalty", "1", "--overlong-buffer", "16"]
    result = command.run([*argv, "--output-dir", str(folder / "run")], folder)
    assert result.code == 0, result.err
    return Finished(argv, folder / "run", result.err)
