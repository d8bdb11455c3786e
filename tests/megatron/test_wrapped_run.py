"""A run with wrapped mixers on the real command line: its metrics are those of --backend fsdp, however it is split."""

from pathlib import Path

import pytest

from tests.e2e import command
from tests.megatron import cases, runs

SPLITS = {
    "experts": ("--megatron-expert-parallel", "2"),
    "tensor": (
        *("--megatron-tensor-parallel", "2"),
        "--gradient-checkpointing",  # the gather runs again in the backward pass
    ),
    "stages": ("--megatron-pipeline-parallel", "2"),
}
CLOSER = ("optim/grad_norm", "policy/entropy", "policy/ratio_mean", "reward/mean", "progress/tokens")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return cases.save("qwen3_next", tmp_path_factory.mktemp("hub") / "model")


@pytest.fixture(scope="module")
def expected(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, float]]:
    return metrics(checkpoint, tmp_path_factory.mktemp("fsdp"))


def metrics(checkpoint: Path, folder: Path, *flags: str) -> list[dict[str, float]]:
    """Of two updates on two processes, the later after the weights came back from the engine's samples."""
    line = ["--hf-checkpoint", str(checkpoint), *command.TINY_RUN, "console", *flags]
    found = runs.metrics(line, folder, num_ranks=2)
    said = (folder / "err").read_text()
    assert ("4 HFMixer" in said or "2 HFMixer" in said) == bool(flags)
    return found


@pytest.mark.matrix
@pytest.mark.parametrize("split", SPLITS)
def test_metrics_are_those_of_fsdp(split: str, checkpoint: Path, expected: list[dict[str, float]], tmp_path: Path):
    found = metrics(checkpoint, tmp_path, "--backend", "megatron", *SPLITS[split])
    assert len(found) == 2
    runs.assert_same(found, expected)
    for ours, theirs in zip(found, expected, strict=True):
        assert {name: ours[name] for name in CLOSER} == pytest.approx({name: theirs[name] for name in CLOSER}, rel=1e-5)
