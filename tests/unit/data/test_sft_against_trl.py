"""Tokens, masks and loss of supervised data equal those of TRL's SFTTrainer on the same rows and the same model."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

from fsdptrain.algo.losses import LOSSES
from fsdptrain.algo.weights import count_totals, num_loss_tokens
from fsdptrain.config import DataConfig
from fsdptrain.config.sft import LossOn, SftConfig
from fsdptrain.data.packing.pack import pack
from fsdptrain.data.sft import SampleBuilder, untokenized
from fsdptrain.data.tables import as_rows
from fsdptrain.model.attention.attention import SEGMENTS, register_attention
from fsdptrain.model.policy import install_policy_forward, policy_logprobs
from fsdptrain.types import LossConfig, Sample
from tests.testing import merging_tokenizer, no_checkpointing, tiny_qwen3

trl = pytest.importorskip("trl", reason="trl comes with the dev extra")

TEMPLATES = Path(trl.__file__).parent / "chat_templates"
TOOLS = [{"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object"}}}]
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 2, "b": [3]}}}


def say(role: str, content: str, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


CHATS = [
    [say("system", "Be brief."), say("user", "What is 2+2?"), say("assistant", "It is four.")],
    [say("user", "Hello there"), say("assistant", "Hi!"), say("user", "And 2+2?"), say("assistant", "four, I think")],
    [say("user", "   spaces "), say("assistant", "  and more   ")],
]
MESSAGES = [{"messages": chat} for chat in CHATS]
TOOL_ROWS = [
    {
        "messages": [
            say("user", "2+3?"),
            say("assistant", "I add.", tool_calls=[CALL]),
            say("tool", "5"),
            say("assistant", "It is 5."),
        ],
        "tools": TOOLS,
    }
]
PAIRS = [{"prompt": chat[:-1], "completion": chat[-1:]} for chat in CHATS]
STRINGS = [{"prompt": "What is 2+2?", "completion": " It is four."}, {"prompt": "Hello\n", "completion": "Hi there!"}]
TEXTS = [{"text": "The cat sat on the mat."}, {"text": "Hello there, and more."}, {"text": "ends itself<|im_end|>"}]
SHAREGPT = [
    {"conversations": [{"from": "user", "value": "Hello there"}, {"from": "assistant", "value": "Hi!"}]},
    {"conversations": [{"from": "user", "value": "2+2?"}, {"from": "assistant", "value": "four"}]},
]


@dataclass(frozen=True)
class Case:
    rows: Sequence[Mapping[str, Any]]
    template: str  # of TRL's folder
    loss_on: LossOn = "assistant"
    data: Mapping[str, Any] = field(default_factory=dict)
    theirs: Mapping[str, Any] = field(default_factory=dict)
    their_template: str | None = None  # None: the same


NO_TAGS = "qwen3_training without tags"
TURNS = {"assistant_only_loss": True}
CASES = {
    "messages, tags": Case(MESSAGES, "qwen3_training", theirs=TURNS),
    "messages, no tags": Case(MESSAGES, NO_TAGS, theirs=TURNS, their_template="qwen3_training"),
    "messages, all tokens": Case(MESSAGES, "qwen3", "all"),
    "tool calls, tags": Case(TOOL_ROWS, "qwen3_training", theirs=TURNS),
    "tool calls, no tags": Case(TOOL_ROWS, NO_TAGS, theirs=TURNS, their_template="qwen3_training"),
    "sharegpt": Case(SHAREGPT, "qwen2_5", "all"),
    "prompt and completion": Case(PAIRS, "qwen2_5"),
    "prompt and completion, thoughts": Case(PAIRS[:1], "qwen3"),
    "prompt and completion, all tokens": Case(PAIRS, "qwen2_5", "all", theirs={"completion_only_loss": False}),
    "strings": Case(STRINGS, "qwen2_5", data={"apply_chat_template": False}),
    "text": Case(TEXTS, "qwen2_5"),
}


def tokenizer_with(template: str) -> PreTrainedTokenizerFast:
    tokenizer = merging_tokenizer()
    name, _, without_tags = template.partition(" ")
    text = (TEMPLATES / f"{name}.jinja").read_text()
    if without_tags:
        text = re.sub(r"(?<=\{%- )generation(?= %\})", "if true", text).replace("endgeneration %}", "endif %}")
    tokenizer.chat_template = text
    return tokenizer


def model() -> Qwen3ForCausalLM:
    return tiny_qwen3(vocab_size=384, eos_token_id=2).double()


def ours(case: Case) -> list[Sample]:
    data = DataConfig(**{"prompt_data": "x", **case.data})
    tokenizer = tokenizer_with(case.template)
    rows = as_rows(case.rows, data, sft=SftConfig(loss_on=case.loss_on))
    builder = SampleBuilder(tokenizer, data, case.loss_on, max_prompt_len=10**6)
    return [builder.build(untokenized(rows[index])) for index in range(len(rows))]


def their_trainer(case: Case, folder: Path) -> Any:
    quiet = {"use_cpu": True, "bf16": False, "report_to": "none", **no_checkpointing()}
    return trl.SFTTrainer(
        model=model(),
        args=trl.SFTConfig(output_dir=str(folder), max_length=None, shuffle_dataset=False, **quiet, **case.theirs),
        train_dataset=Dataset.from_list([dict(row) for row in case.rows]),
        processing_class=tokenizer_with(case.their_template or case.template),
    )


def our_loss(samples: Sequence[Sample]) -> float:
    policy = model()
    register_attention()
    policy.set_attn_implementation(SEGMENTS)
    install_policy_forward(policy, chunk_size=16)
    totals = count_totals([num_loss_tokens(sample) for sample in samples])
    batch = pack(samples, aggregation="token_mean", totals=totals, max_response_len=1)
    logprobs = policy_logprobs(policy.eval(), batch, layout="packed", temperature=1.0, with_entropy=False)
    return LOSSES["sft"](batch, logprobs, LossConfig()).loss.item()


@pytest.mark.parametrize("template", ["llama3_1", "llama3_2", "gptoss"])
def test_templates_that_write_tool_results_as_json_show_them(template: str) -> None:
    [row] = TOOL_ROWS
    messages = [say("tool", 'He said "5"\n') if m["role"] == "tool" else m for m in row["messages"]]
    [sample] = ours(Case([{**row, "messages": messages}], template, "all"))
    text = merging_tokenizer().decode(sample.token_ids)
    assert 'He said \\"5\\"\\n' in text
    assert True in sample.loss_mask


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("name", CASES)
def test_tokens_masks_and_loss_are_those_of_trl(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    trainer = their_trainer(case, tmp_path)
    rows, samples = list(trainer.train_dataset), ours(case)

    assert [sample.token_ids for sample in samples] == [row["input_ids"] for row in rows]
    masks = [[label != -100 for label in row["labels"]] for row in rows]
    assert [sample.loss_mask[1:] for sample in samples] == [mask[1:] for mask in masks]  # nothing predicts the first

    batch = trainer.data_collator(rows)
    count = (batch["labels"][:, 1:] != -100).sum()
    with torch.no_grad():
        wanted = trainer.compute_loss(trainer.model.eval(), dict(batch), num_items_in_batch=count).item()
    assert our_loss(samples) == pytest.approx(wanted, rel=1e-5)
