"""`fsdptrain plan` works on a bare config.json, and its command line trains."""

import json
from pathlib import Path

import pytest

from tests import configs, zoo
from tests.e2e import command

SMALL = ["--max-tokens-per-gpu", "1024", "--rollout-max-response-len", "256"]


def plan(checkpoint: Path, folder: Path, *flags: str) -> command.Result:
    return command.run(["plan", str(checkpoint), *flags], folder)


def test_the_report_for_people_fits_into_80_columns_and_ends_in_a_command(tmp_path: Path):
    zoo.config("qwen3").save_pretrained(tmp_path / "m")
    result = plan(tmp_path / "m", tmp_path, *SMALL, "--num-gpus", "2", "--gpu-memory-gib=1", "--lr", "1e-5")
    assert result.code == 0, result.err
    lines = result.out.splitlines()
    assert max(len(line) for line in lines[:-1]) <= 80
    assert lines[-1] == f"  fsdptrain --hf-checkpoint {tmp_path / 'm'} {' '.join(SMALL)} --lr 1e-5"


def test_what_does_not_fit_names_flags_that_help(tmp_path: Path):
    flags = ["--num-gpus", "8", "--gpu-memory-gib", "40", "--json"]
    result = plan(configs.CONFIGS / "qwen3-30b-a3b", tmp_path, *SMALL, *flags)
    assert result.code == 1, result.err
    report = json.loads(result.out)
    first, *others = report["estimates"]
    assert not first["fits"]
    assert [x["machine"]["num_ranks"] for x in others] == [16, 32, 64]
    assert any(line.startswith("--fsdp-cpu-offload (") for line in report["flags"])


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--gpu-memory-gib", "-1"], "--gpu-memory-gib must be above 0"),
        (["--num-gpus", "6", "--fsdp-replicate-size", "4"], "--fsdp-replicate-size 4 must divide"),
    ],
)
def test_bad_input_is_one_line(flags: list[str], words: str, tmp_path: Path):
    result = plan(configs.CONFIGS / "qwen3-4b", tmp_path, *flags)
    assert result.code == 2
    assert words in result.err
    assert result.err.count("\n") == 1
