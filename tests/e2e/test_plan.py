"""`fsdptrain plan` works on a bare config.json, and its command line trains."""

import json
from pathlib import Path

import pytest

from tests import configs, zoo
from tests.e2e import command

SMALL = ["--max-tokens-per-gpu", "1024", "--rollout-max-response-len", "256"]

QLORA = ["--lora-rank", "4", "--load-in-4bit"]


def plan(checkpoint: Path, folder: Path, *flags: str) -> command.Result:
    return command.run(["plan", "--hf-checkpoint", str(checkpoint), *flags], folder)


def test_the_report_for_people_fits_into_80_columns_and_ends_in_a_command(tmp_path: Path):
    zoo.config("qwen3").save_pretrained(tmp_path / "m")
    result = plan(tmp_path / "m", tmp_path, *SMALL, "--num-gpus", "2", "--gpu-memory-gib=1", "--lr", "1e-5")
    assert result.code == 0, result.err
    lines = result.out.splitlines()
    assert max(len(line) for line in lines[:-1]) <= 80
    assert lines[-1] == f"  fsdptrain --hf-checkpoint {tmp_path / 'm'} {' '.join(SMALL)} --lr 1e-5"


@pytest.mark.matrix
def test_an_adapter_fits_where_the_whole_model_does_not(tmp_path: Path):
    flags = [*SMALL, "--rollout-max-batch-tokens", "32768", "--num-gpus", "1", "--gpu-memory-gib", "40", "--json"]
    whole, adapter = (
        plan(configs.CONFIGS / "qwen3-4b", tmp_path, *flags, *extra) for extra in ([], ["--lora-rank", "16"])
    )
    assert (whole.code, adapter.code) == (1, 0), adapter.err
    parts = json.loads(adapter.out)["training"]["parts"]
    state = sum(parts[name] for name in ("weights", "optimizer state", "gradients"))
    assert 2 * 4_022_468_096 < state < 2.2 * 4_022_468_096


@pytest.mark.matrix
@pytest.mark.parametrize(("name", "memory"), [("qwen3-30b-a3b", 70), ("gemma-3-12b", 40)])
def test_what_does_not_fit_has_ways_out_that_do(name: str, memory: int, tmp_path: Path):
    flags = ["--num-gpus", "8", "--gpu-memory-gib", str(memory), "--json"]
    result = plan(configs.CONFIGS / name, tmp_path, *SMALL, *flags)
    assert result.code == 1, result.err
    report = json.loads(result.out)
    assert not report["fits"]
    assert report["training"]["total"] == sum(report["training"]["parts"].values())
    way_out = report["proposals"][0]
    assert way_out["device"] <= memory * 1024**3 < report["device"]
    argv = way_out["command"].split()[1:]
    again = command.run(["plan", *argv, *flags], tmp_path)
    assert again.code == 0, again.out
    assert json.loads(again.out)["device"] == way_out["device"]


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


def test_weights_that_a_run_cannot_quantize_are_refused(tmp_path: Path):
    zoo.config("qwen3_moe").save_pretrained(tmp_path / "m")
    result = plan(tmp_path / "m", tmp_path, *SMALL, "--num-gpus", "1", "--gpu-memory-gib", "1", *QLORA)
    assert result.code == 2
    assert "the stacked experts of Qwen3MoeForCausalLM" in result.err
    assert result.err.count("\n") == 1
