"""`fsdptrain inspect` and `plan` work on a bare config.json, and say what a run would do. Refusals: test_cli.py."""

import json
from pathlib import Path

from tests import configs, zoo
from tests.e2e import command
from tests.testing import save_hub

SMALL = ["--max-tokens-per-gpu", "1024", "--rollout-max-response-len", "256"]


def said(name: str, checkpoint: Path, folder: Path, *flags: str, code: int = 0) -> str:
    result = command.run([name, "--hf-checkpoint", str(checkpoint), *flags], folder)
    assert result.code == code, result.err
    return result.out


def test_what_inspect_says_to_people_fits_into_80_columns(tmp_path: Path):
    zoo.config("qwen3_next").save_pretrained(tmp_path / "model")
    out = said("inspect", tmp_path / "model", tmp_path, "--num-gpus", "2")
    assert max(len(line) for line in out.splitlines()) <= 80
    for words in ("recurrent mixer", "padded instead of packed", "over 2 ranks", "not tied"):
        assert words in out


def test_what_inspect_says_to_machines_is_the_same(tmp_path: Path):
    report = json.loads(said("inspect", configs.CONFIGS / "qwen3-30b-a3b", tmp_path, "--num-gpus", "8", "--json"))
    assert report["parameters"]["total"] == 30_532_122_624
    assert report["parameters"]["per_rank"] == 30_532_122_624 // 8
    assert report["probe"]["layout"] == "packed"
    assert report["probe"]["max_difference"] < report["probe"]["tolerance"]
    assert report["fallbacks"] == []


def test_with_liger_it_says_why_nothing_is_replaced(tmp_path: Path):
    zoo.config("qwen3").save_pretrained(tmp_path / "model")
    report = json.loads(said("inspect", tmp_path / "model", tmp_path, "--liger", "--json", code=2))  # as a run
    assert report["refusal"].startswith("--liger needs ")


def test_strict_ends_a_run_with_a_fallback(tmp_path: Path):
    model = save_hub(zoo.build("qwen3_next"), tmp_path / "model")
    argv = ["--hf-checkpoint", str(model), "--num-rollout", "0", "--output-dir", str(tmp_path / "run"), "--no-bf16"]
    strict = command.run([*argv, "--eval-interval", "0", "--no-export", "--strict"], tmp_path)
    assert strict.code == 2
    assert "--strict allows no fallback" in strict.err


def test_what_plan_says_to_people_fits_into_80_columns_and_ends_in_a_command(tmp_path: Path):
    zoo.config("qwen3").save_pretrained(tmp_path / "m")
    flags = [*SMALL, "--num-gpus", "2", "--gpu-memory-gib=1", "--lr", "1e-5"]
    lines = said("plan", tmp_path / "m", tmp_path, *flags).splitlines()
    assert max(len(line) for line in lines[:-1]) <= 80
    assert lines[-1] == f"  fsdptrain --hf-checkpoint {tmp_path / 'm'} {' '.join(SMALL)} --lr 1e-5"


def test_what_does_not_fit_names_flags_that_help(tmp_path: Path):
    flags = [*SMALL, "--num-gpus", "8", "--gpu-memory-gib", "40", "--json"]
    report = json.loads(said("plan", configs.CONFIGS / "qwen3-30b-a3b", tmp_path, *flags, code=1))
    first, *others = report["estimates"]
    assert not first["fits"]
    assert [x["machine"]["num_ranks"] for x in others] == [16, 32, 64]
    assert any(line.startswith("--fsdp-cpu-offload (") for line in report["flags"])
