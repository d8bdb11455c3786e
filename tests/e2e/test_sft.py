"""Supervised runs on the command line: rows that are skipped, the loss of held-out rows, packs and ranks."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from fsdptrain.config import Config, DataConfig
from fsdptrain.config.data import SftConfig
from fsdptrain.data.sft import SampleBuilder, untokenized
from fsdptrain.data.tables import as_rows
from fsdptrain.errors import DataError
from fsdptrain.trainer.data import build_data, require_same_data
from tests.e2e import command
from tests.e2e.command import metrics_of, trained
from tests.matrix import only
from tests.testing import spawn, tiny_tokenizer, write_rows

CHATS = [
    [{"role": ("user", "assistant")[k % 2], "content": text} for k, text in enumerate(texts)]
    for texts in ((f"say {i}", str(i) * (1 + i), "again", str(i)) for i in range(10))
]
WEIGHTED = [
    {"messages": [chat[0], {**chat[1], "weight": 0.25}, *chat[2:]], "weight": 1 + i % 3} for i, chat in enumerate(CHATS)
]
NO_ANSWER = {"messages": CHATS[0][:1]}
CALLS = {"messages": [*CHATS[0][:1], {"role": "assistant", "content": "", "tool_calls": [{"name": "f"}]}]}


def flags(checkpoint: Path, folder: Path, rows: list[dict[str, Any]], **values: Any) -> list[str]:
    options = {
        "hf_checkpoint": checkpoint, "algorithm": "sft", "prompt_data": write_rows(folder / "rows.jsonl", rows),
        "rollout_batch_size": 4, "num_rollout": 2, "max_tokens_per_gpu": 256, "keep_last": 0,
        "output_dir": folder / "run", **values,
    }  # fmt: skip
    pairs = [(f"--{name.replace('_', '-')}", str(value)) for name, value in options.items()]
    return ["--no-bf16", "--no-export", "--log-to", "console", *(word for pair in pairs for word in pair)]


def stock_loss(checkpoint: Path, values: list[dict[str, Any]], loss_on: str) -> float:
    """Return sum(w * nll) / sum(w) over the tokens of the rows, computed by transformers, a row at a time."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float64)
    data = DataConfig(prompt_data="x")
    builder = SampleBuilder(tiny_tokenizer(), data, loss_on, max_prompt_len=10**6)  # type: ignore[arg-type]
    rows = as_rows(values, data, sft=SftConfig())
    total = count = 0.0
    for index in range(len(rows)):
        sample = builder.build(untokenized(rows[index]))
        ids = torch.tensor([sample.token_ids])
        weights = torch.tensor((sample.token_weights or sample.loss_mask)[1:], dtype=torch.float64)
        with torch.no_grad():
            logprobs = model(ids).logits[0, :-1].log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0]
        total, count = total - (weights * logprobs).sum().item(), count + weights.sum().item()
    return total / count


@pytest.mark.parametrize(("num_ranks", "loss_on"), only([(2, "last")], [(1, "assistant"), (2, "last")]))
def test_losses_are_weighted_means_over_the_tokens_of_all_ranks(num_ranks, loss_on, checkpoint, tmp_path) -> None:
    """Of held-out rows before training and after it, without an engine; and of a step of several packs."""
    held_out = write_rows(tmp_path / "held_out.jsonl", WEIGHTED)
    ask = [{"role": "user", "content": f"speak {i}"} for i in range(len(WEIGHTED))]
    rows = [{**row, "messages": [ask[i], *row["messages"][1:]]} for i, row in enumerate(WEIGHTED)]
    options = {
        "sft_loss_on": loss_on,
        "lr": "1e-2",
        "eval_interval": 2,
        "keep_last": 1,
        "rollout_batch_size": len(rows),
    }
    argv = [*flags(checkpoint, tmp_path, rows, **options), "--eval-prompt-data", f"heldout={held_out}", f"b={held_out}"]
    result = command.run(argv, tmp_path / "out", num_ranks=num_ranks)
    assert result.code == 0, result.err
    found = [row for row in metrics_of(tmp_path / "run") if "eval/loss" in row]
    assert [row["step"] for row in found] == [0, 2]
    assert found[0]["eval/loss"] == pytest.approx(stock_loss(checkpoint, WEIGHTED, loss_on), rel=1e-5)
    first = trained(metrics_of(tmp_path / "run"))[0]["loss/total"]
    assert first == pytest.approx(stock_loss(checkpoint, rows, loss_on), rel=1e-5)
    assert found[1]["eval/loss"] < found[0]["eval/loss"]
    assert [row["eval/b/loss"] for row in found] == [row["eval/loss"] for row in found]
    assert [row["eval/perplexity"] for row in found] == [math.exp(row["eval/loss"]) for row in found]
    assert "messages in the column messages" in result.err

    step = tmp_path / "run" / "checkpoints" / "step_00000002"
    result = command.run(["eval", "--checkpoint", str(step), "--output-dir", str(tmp_path / "eval")], tmp_path / "out")
    assert result.code == 0, result.err
    assert metrics_of(tmp_path / "eval")[0]["eval/loss"] == pytest.approx(found[1]["eval/loss"], rel=1e-6)
    assert "perplexity" in result.out


def test_unusable_rows_are_skipped_and_counted_and_a_step_has_all_its_samples(checkpoint, tmp_path) -> None:
    rows = [{"messages": chat} for chat in CHATS[:8]]
    rows = [*rows[:5], NO_ANSWER, CALLS, *rows[5:]]
    argv = flags(checkpoint, tmp_path, rows, eval_interval=0, rollout_batch_size=8, num_rollout=1)
    result = command.run(argv, tmp_path / "out", num_ranks=2)
    assert result.code == 0, result.err
    [row] = trained(metrics_of(tmp_path / "run"))
    assert row["progress/samples"] == 8
    assert row["progress/unusable_rows"] > 0
    assert "skipping unusable rows, for example: row rows.jsonl:" in result.err
    assert "2 of the first 10 rows cannot be trained on, 1: row rows.jsonl:" in result.err


def test_a_run_whose_rows_are_all_unusable_ends_before_the_model_is_loaded(tmp_path, checkpoint) -> None:
    rows = [NO_ANSWER] * 6 + [CALLS] * 2
    result = command.run(flags(checkpoint, tmp_path, rows, eval_interval=0), tmp_path / "out")
    assert result.code == 2
    last = result.err.strip().splitlines()[-1]
    assert "none of 8 rows can be trained on, 6: row rows.jsonl:" in last
    assert "no message is of the assistant; 2: row" in last
    assert "parameters" not in result.err


def refusal_on_this_rank(counts: list[int], folder: Path) -> str:
    rank = dist.get_rank()
    (folder / f"{rank}").mkdir()
    rows = ({"prompt": f"say {i}", "label": f"{i}"} for i in range(counts[rank]))
    path = write_rows(folder / f"{rank}" / "rows.jsonl", rows)
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
