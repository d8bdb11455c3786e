"""`fsdptrain inspect` works on a bare config.json, and says what a run would do."""

import json
from pathlib import Path

from tests import configs, zoo
from tests.e2e import command
from tests.testing import save_tiny_checkpoint


def inspect(checkpoint: Path, folder: Path, *flags: str) -> command.Result:
    return command.run(["inspect", "--hf-checkpoint", str(checkpoint), *flags], folder)


def test_the_report_for_people_fits_into_80_columns(tmp_path: Path):
    zoo.config("qwen3_next").save_pretrained(tmp_path / "model")
    result = inspect(tmp_path / "model", tmp_path, "--num-gpus", "2")
    assert result.code == 0, result.err
    assert max(len(line) for line in result.out.splitlines()) <= 80
    for words in ("Qwen3NextDecoderLayer", "recurrent mixer", "padded instead of packed", "over 2 ranks", "not tied"):
        assert words in result.out


def test_the_report_for_machines_holds_the_same(tmp_path: Path):
    result = inspect(configs.CONFIGS / "qwen3-30b-a3b", tmp_path, "--num-gpus", "8", "--json")
    assert result.code == 0, result.err
    report = json.loads(result.out)
    assert report["parameters"]["total"] == 30_532_122_624
    assert report["parameters"]["per_rank"] == 30_532_122_624 // 8
    assert report["probe"]["layout"] == "packed"
    assert report["probe"]["max_difference"] < report["probe"]["tolerance"]
    assert report["fallbacks"] == []


def test_with_liger_it_says_what_is_replaced_or_why_nothing_is(tmp_path: Path):
    zoo.config("qwen3").save_pretrained(tmp_path / "model")
    result = inspect(tmp_path / "model", tmp_path, "--liger", "--json")
    report = json.loads(result.out)
    assert "norms, MLPs: transformers instead of liger (--liger needs " in report["fallbacks"][-1]
    assert report["refusal"].startswith("--liger needs ")
    assert result.code == 2, "as a run"
    assert report["refusal"] in result.err


def test_strict_is_an_error_where_something_fell_back(tmp_path: Path):
    zoo.config("qwen3_next").save_pretrained(tmp_path / "model")
    result = inspect(tmp_path / "model", tmp_path, "--strict")
    assert result.code == 2
    assert "--strict allows no fallback: layout: padded instead of packed" in result.err


def test_strict_ends_a_run_with_a_fallback(tmp_path: Path):
    model = tmp_path / "model"
    save_tiny_checkpoint(model)  # its tokenizer
    for path in model.glob("*.safetensors*"):
        path.unlink()
    zoo.build("qwen3_next").save_pretrained(model)
    argv = ["--hf-checkpoint", str(model), "--num-rollout", "0", "--output-dir", str(tmp_path / "run"), "--no-bf16"]
    strict = command.run([*argv, "--eval-interval", "0", "--no-export", "--strict"], tmp_path)
    assert strict.code == 2
    assert "--strict allows no fallback" in strict.err


def test_without_a_config_it_is_one_line(tmp_path: Path):
    (tmp_path / "model").mkdir()
    result = inspect(tmp_path / "model", tmp_path)
    assert result.code == 2
    assert "has no config.json" in result.err
    assert result.err.count("\n") == 1
