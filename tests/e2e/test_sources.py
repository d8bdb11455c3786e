"""Runs on several sources and on streams: the same prompts on all ranks and after a restart, metrics by source."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from fsdptrain.config import Config
from fsdptrain.errors import DataError
from fsdptrain.trainer.data import build_data, require_same_data
from tests.e2e import command
from tests.e2e.command import TINY_RUN, metrics_of, trained
from tests.testing import spawn, tiny_tokenizer


def write(folder: Path) -> list[str]:
    """Write two sources of different forms, and return --prompt-data."""
    folder.mkdir(exist_ok=True)
    texts = [{"text": f"text {i}"} for i in range(12)]
    pairs = [{"prompt": f"say {i}", "completion": str(i)} for i in range(30)]
    for name, rows in (("texts", texts), ("pairs", pairs)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [f"{folder}/texts.jsonl=0.25", f"{folder}/pairs.jsonl=0.75"]


def refusal_on_this_rank(counts: list[int], folder: Path) -> str:
    rank = dist.get_rank()
    path = folder / f"{rank}" / "rows.jsonl"
    path.parent.mkdir()
    path.write_text("".join(f'{{"prompt": "say {i}", "label": "{i}"}}\n' for i in range(counts[rank])))
    config = Config(hf_checkpoint="x", algorithm="sft", prompt_data=str(path), eval_size=2)
    try:
        require_same_data(build_data(config, tiny_tokenizer(), None, None).stream)
    except DataError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("counts", [[20, 20], [20, 13]])
def test_ranks_must_read_the_same_rows(counts: list[int], tmp_path: Path) -> None:
    first, second = spawn(2, refusal_on_this_rank, counts, tmp_path)
    assert first == second
    assert ("ranks read different rows" in first) == (counts[0] != counts[1])


@pytest.mark.parametrize("streaming", [False, True], ids=["indexed", "streamed"])
def test_a_resumed_run_on_two_sources_equals_an_uninterrupted_one(streaming, checkpoint, tmp_path) -> None:
    argv = ["--hf-checkpoint", str(checkpoint), "--algorithm", "sft", "--prompt-data", *write(tmp_path / "data")]
    argv += ["--rollout-batch-size", "6", "--no-bf16", "--no-export", "--eval-size", "4", "--eval-interval", "2"]
    argv += ["--max-tokens-per-gpu", "128", "--lr", "1e-3", "--log-to"]
    argv += ["--prompt-data-streaming", "--prompt-data-buffer", "4"] * streaming

    def run(name: str, steps: int) -> list[dict[str, Any]]:
        options = ["--output-dir", str(tmp_path / name), "--num-rollout", str(steps), "--save-interval", "2"]
        result = command.run([*argv, *options], tmp_path / "out")
        assert result.code == 0, result.err
        return metrics_of(tmp_path / name)

    whole = run("whole", 4)
    run("parts", 2)
    parts = run("parts", 4)
    assert [row["loss/total"] for row in trained(parts)] == [row["loss/total"] for row in trained(whole)]
    for kind in ("samples", "tokens"):
        counts = [row[f"source/{name}/{kind}"] for row in trained(whole) for name in ("texts", "pairs")]
        assert sum(counts) == trained(whole)[-1][f"progress/{kind}"]
    evaluated = [row for row in whole if "eval/loss" in row]
    for row in evaluated:
        low, high = sorted((row["eval/texts/loss"], row["eval/pairs/loss"]))
        assert low < row["eval/loss"] < high


def test_rewards_are_reported_by_source(checkpoint: Path, tmp_path: Path) -> None:
    sources = ["reasoning_gym:spell_backward?max_word_len=4=0.5", "reasoning_gym:letter_counting?max_words=5=0.5"]
    argv = [
        "--hf-checkpoint",
        str(checkpoint),
        *TINY_RUN,
        "--prompt-data",
        *sources,
        "--output-dir",
        str(tmp_path / "run"),
    ]
    result = command.run(
        [*argv, "--num-rollout", "1", "--rollout-batch-size", "8", "--keep-last", "0"], tmp_path / "out"
    )
    assert result.code == 0, result.err
    rows = metrics_of(tmp_path / "run")
    [row] = trained(rows)
    counts = [row[f"source/{name}/samples"] for name in ("spell_backward", "letter_counting")]
    rewards = [row[f"source/{name}/reward_mean"] for name in ("spell_backward", "letter_counting")]
    assert sum(counts) == row["progress/samples"]
    assert sum(c * r for c, r in zip(counts, rewards, strict=True)) / sum(counts) == pytest.approx(row["reward/mean"])
    assert "eval/heldout_spell_backward/accuracy" in rows[0]
