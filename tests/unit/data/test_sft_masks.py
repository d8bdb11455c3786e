"""Tokens and masks of supervised rows: exact, or an error."""

import json
from dataclasses import replace
from itertools import groupby
from typing import Any

import pytest

from fsdptrain.config import DataConfig, RolloutConfig
from fsdptrain.config.data import SftConfig
from fsdptrain.data.prompts import PromptStream
from fsdptrain.data.sft import SampleBuilder, untokenized
from fsdptrain.data.sft_forms import UnusableRowError, warn_once
from fsdptrain.data.sft_masks import ConversationEncoder
from fsdptrain.data.tables import as_rows
from fsdptrain.errors import ConfigError, DataError
from fsdptrain.trainer.samples.sft import check_first_rows
from fsdptrain.types import Sample
from tests.testing import CHAT_TEMPLATE, merging_tokenizer, tiny_tokenizer

TAGS = (
    "{% for m in messages %}<|{{ m['role'] }}|>{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }}"
    "<|end|>{% endgeneration %}{% else %}{{ m['content'] }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
THOUGHTS = (  # shows thoughts in the last turn only, as Qwen3's
    "{% for m in messages %}<|{{ m['role'] }}|>"
    "{% if loop.last and m['role'] == 'assistant' %}[thought]{% endif %}{{ m['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
FORGETFUL = CHAT_TEMPLATE.replace("m['content']", "m['content'].split('</think>')[-1]")  # as DeepSeek-R1's
_TOOLS = "{% if tools %}<|system|>{{ tools | tojson }}<|end|>{% endif %}"
_CALLS = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}"
    "{% for call in m['tool_calls'] or [] %}[{{ call.function.name }} ARGUMENTS]{% endfor %}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
WITH_TOOLS = _TOOLS + _CALLS.replace("ARGUMENTS", "{{ call.function.arguments | tojson }}")
AS_TEXT = _TOOLS + _CALLS.replace("ARGUMENTS", "{{ call.function.arguments }}")  # expects JSON text
JOINED = _TOOLS + _CALLS.replace("ARGUMENTS", "{{ '' + call.function.arguments }}")  # raises for a mapping
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 2}}}
TOOL = {"type": "function", "function": {"name": "add"}}


def say(role: str, content: str, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


CHAT = [say("system", "S"), say("user", "q"), say("assistant", "one"), say("user", "r"), say("assistant", "two")]
CALLS = [say("user", "2+2?"), say("assistant", "", tool_calls=[CALL]), say("tool", "4"), say("assistant", "four")]
EPISODE = {"prompt": "2+2?", "label": [say("assistant", "ask"), say("tool", "4"), say("assistant", "four")]}


def shown(sample: Sample) -> str:
    """Return the text, with brackets around the trained parts."""
    text, last = "", False
    for token, trained in zip(sample.token_ids, sample.loss_mask, strict=True):
        text += "«" * (trained and not last) + "»" * (last and not trained) + tiny_tokenizer().decode(token)
        last = trained
    return text + "»" * last


def sample_of(
    values: dict[str, Any], template: str = CHAT_TEMPLATE, *, limits: dict[str, Any] | None = None, **options: Any
) -> Sample:
    sft = SftConfig(**{name: options.pop(name) for name in ("loss_on",) if name in options})
    data, tokenizer = DataConfig(**{"prompt_data": "x", **options}), tiny_tokenizer()
    tokenizer.chat_template = template
    builder = SampleBuilder(tokenizer, data, sft.loss_on, **{"max_prompt_len": 10**6, **(limits or {})})
    return builder.build(untokenized(as_rows([values], data, sft=sft)[0]))


@pytest.mark.parametrize("template", [CHAT_TEMPLATE, TAGS], ids=["prefixes", "tags"])
@pytest.mark.parametrize(
    ("loss_on", "text"),
    [
        (
            "assistant",
            "<|system|>S<|end|><|user|>q<|end|><|assistant|>«one<|end|>»<|user|>r<|end|><|assistant|>«two<|end|>»",
        ),
        ("last", "<|system|>S<|end|><|user|>q<|end|><|assistant|>one<|end|><|user|>r<|end|><|assistant|>«two<|end|>»"),
        ("all", "«<|system|>S<|end|><|user|>q<|end|><|assistant|>one<|end|><|user|>r<|end|><|assistant|>two<|end|>»"),
    ],
)
def test_the_loss_of_a_conversation_is_on_the_chosen_turns(template: str, loss_on: str, text: str) -> None:
    assert shown(sample_of({"messages": CHAT}, template, loss_on=loss_on)) == text


@pytest.mark.parametrize(
    ("values", "options", "text"),
    [
        ({"text": "abc"}, {}, "«abc<|end|>»"),
        ({"text": "abc<|end|>"}, {}, "«abc<|end|>»"),
        ({"prompt": "2+2?", "completion": "4"}, {}, "<|user|>2+2?<|end|><|assistant|>«4<|end|>»"),
        ({"prompt": "2+2?", "label": 4}, {}, "<|user|>2+2?<|end|><|assistant|>«4<|end|>»"),
        ({"prompt": "2+2?", "label": "4<|end|>"}, {}, "<|user|>2+2?<|end|><|assistant|>«4<|end|>»"),
        ({"prompt": "?", "label": json.dumps(CHAT[2:3])}, {}, "<|user|>?<|end|><|assistant|>«one<|end|>»"),
        ({"prompt": "2+2=", "completion": "4"}, {"apply_chat_template": False}, "2+2=«4<|end|>»"),
        ({"prompt": "2+2=", "completion": "4"}, {"apply_chat_template": False, "loss_on": "all"}, "«2+2=4<|end|>»"),
        (
            {"prompt": CHAT[:4], "completion": CHAT[4:]},
            {},
            "<|system|>S<|end|><|user|>q<|end|><|assistant|>one<|end|><|user|>r<|end|><|assistant|>«two<|end|>»",
        ),
        (EPISODE, {}, "<|user|>2+2?<|end|><|assistant|>«ask<|end|>»<|tool|>4<|end|><|assistant|>«four<|end|>»"),
        (
            EPISODE,
            {"loss_on": "last"},
            "<|user|>2+2?<|end|><|assistant|>ask<|end|><|tool|>4<|end|><|assistant|>«four<|end|>»",
        ),
        (
            {"messages": CHAT[1:3]},
            {"system_prompt": "P"},
            "<|system|>P<|end|><|user|>q<|end|><|assistant|>«one<|end|>»",
        ),
        ({"messages": CHAT[:3]}, {"system_prompt": "P"}, "<|system|>S<|end|><|user|>q<|end|><|assistant|>«one<|end|>»"),
    ],
)
def test_text_and_mask_of_the_other_forms(values, options, text) -> None:
    assert shown(sample_of(values, **options)) == text


def test_a_response_ends_as_the_template_ends_turns_whatever_eos_is() -> None:
    template = CHAT_TEMPLATE.replace("<|end|>", "<|system|>")
    whole, parts = (
        sample_of(values, template) for values in ({"messages": CHAT[1:]}, {"prompt": "q", "label": CHAT[2:]})
    )
    assert (parts.token_ids, parts.loss_mask) == (whole.token_ids, whole.loss_mask)


BY_NAME = {"default": TAGS, "tool_use": WITH_TOOLS}


@pytest.mark.parametrize("template", [WITH_TOOLS, AS_TEXT, JOINED, BY_NAME], ids=["mapping", "text", "joined", "named"])
def test_a_turn_with_tool_calls_trains_the_calls(template: Any) -> None:
    """Not an empty turn and its end, whatever form of the arguments the template expects."""
    text = shown(sample_of({"messages": CALLS, "tools": [TOOL]}, template))
    assert text.endswith(
        '<|user|>2+2?<|end|><|assistant|>«[add {"a": 2}]<|end|>»<|tool|>4<|end|><|assistant|>«four<|end|>»'
    )
    assert text.startswith("<|system|>[{")


MULTI_TURN = CHAT[1:]


@pytest.mark.parametrize(
    ("values", "template", "kind", "message"),
    [
        ({"messages": [CHAT[1], say("assistant", "x</think>1")]}, FORGETFUL, "inexact mask", "often its thoughts"),
        ({"messages": CALLS}, CHAT_TEMPLATE, "tools", "does not show tool_calls"),
        ({"messages": [CHAT[1], say("assistant", "1", reasoning="x")]}, CHAT_TEMPLATE, "reasoning", "show reasoning"),
        ({"messages": CHAT, "tools": [TOOL]}, CHAT_TEMPLATE, "tools", "does not show tools"),
        ({"messages": CALLS}, WITH_TOOLS.replace("{{ m['content'] }}", ""), "tools", "role tool: use the template"),
        (
            {"messages": MULTI_TURN},
            THOUGHTS,
            "inexact mask",
            "renders message 1 otherwise .* --sft-loss-on last or all",
        ),
        ({"messages": CHAT[:2]}, TAGS, "no assistant turn", "row dataset:0: no message is of the assistant"),
        ({"messages": CHAT}, "{{ raise_exception('no') }}", "template", "the chat template cannot render it: no"),
        ({"messages": CHAT[2:3]}, CHAT_TEMPLATE, "inexact mask", "begins with the assistant"),
        ({"text": "\ud83d"}, TAGS, "template", "row dataset:0: a text has half of a surrogate pair"),
        ({"messages": "hello"}, TAGS, "no messages", "row dataset:0: the column messages holds 'hello'"),
        ({"prompt": "a", "label": ""}, TAGS, "no response", "row dataset:0 has no response"),
        ({"prompt": "a", "label": None}, TAGS, "no response", "row dataset:0 has no response"),
        ({"prompt": "a", "label": True}, TAGS, "no response", "the response of row dataset:0 is True, not text"),
        ({"prompt": "a", "label": {"b": 1}}, TAGS, "no response", "row dataset:0 is {'b': 1}, not text"),
        (
            {"prompt": "a", "label": [say("tool", "x")]},
            TAGS,
            "not an episode",
            "the response of row dataset:0 is a list",
        ),
        ({"messages": [CHAT[1], say("assistant", "x", weight=-1)]}, TAGS, "weight", "row dataset:0: weight is -1, not"),
        ({"messages": [say("user", "q", weight=0.5), CHAT[2]]}, TAGS, "weight", "a message of user has the weight 0.5"),
        ({"prompt": "a", "label": "b", "train": "yes"}, TAGS, "weight", "row dataset:0: train is 'yes', not a weight"),
        ({"text": "a", "weight": float("nan")}, TAGS, "weight", "weight is nan, not a weight"),
        ({"text": "a", "train": False}, TAGS, "no trained token", "row dataset:0 has no token to train on"),
    ],
)
def test_a_row_without_an_exact_mask_is_an_error(values, template, kind, message) -> None:
    with pytest.raises(UnusableRowError, match=message) as error:
        sample_of(values, template)
    assert error.value.kind == kind
    assert "\n" not in str(error.value)


def test_keys_that_the_template_omits_are_named_once(caplog: pytest.LogCaptureFixture) -> None:
    warn_once.cache_clear()
    chat = [{**CHAT[1], "name": "ann", "thinking": ""}, {**CHAT[2], "mask": 0, "weight": 1}]
    for _ in range(2):
        assert sample_of({"messages": chat}) == sample_of({"messages": CHAT[1:3]})
    assert caplog.text.count("does not show") == 1
    assert "the chat template does not show name, mask: write them into content, or remove them" in caplog.text
    sample_of({"messages": chat}, CHAT_TEMPLATE.replace("m['content']", "m['content'] ~ m['name']"))
    assert "the chat template does not show mask: write" in caplog.text
    sample_of({"prompt": "?", "label": [say("assistant", "a", mask=0, weight=1)]})
    assert "--label-key: no message shows its mask: write" in caplog.text


@pytest.mark.parametrize(("column", "values"), [("messages", {"messages": CHAT}), ("label", EPISODE)])
@pytest.mark.parametrize("template", [CHAT_TEMPLATE, TAGS])
def test_turns_and_rows_have_weights_and_0_is_a_mask(template: str, column: str, values: dict[str, Any]) -> None:
    first, chat = next(i for i, m in enumerate(values[column]) if m["role"] == "assistant"), values[column]
    half, masked = (
        {**values, column: [*chat[:first], {**chat[first], "weight": w}, *chat[first + 1 :]]} for w in (0.5, 0)
    )
    sample = sample_of({**half, "weight": 3}, template)
    assert sample.token_weights
    assert [weight for weight, _ in groupby(sample.token_weights)] == [0.0, 1.5, 0.0, 3.0]
    assert sample.loss_mask == sample_of(values, template).loss_mask == [weight > 0 for weight in sample.token_weights]
    for other in (template, THOUGHTS):
        assert sample_of(masked, other) == sample_of(values, other, loss_on="last")
    for key in ("train", "loss", "trainable", "loss_mask", "step_loss_mask"):
        by_name = {**values, column: [*chat[:first], {**chat[first], key: False}, *chat[first + 1 :]]}
        assert sample_of(by_name, template) == sample_of(masked, template)
    with pytest.raises(UnusableRowError, match="has the weight 0, and --sft-loss-on all does not weight it"):
        sample_of(masked, template, loss_on="all")
    with pytest.raises(ConfigError, match=r"^--loss-aggregation sequence_mean: row .* which need token_mean"):
        sample_of(half, template, limits={"aggregation": "sequence_mean"})
    with pytest.raises(UnusableRowError, match="is not finite"):
        sample_of({**values, "weight": 1e308}, template)


def test_truncation_is_a_row_cut_by_hand_and_tokens_are_the_row_that_was_tokenized() -> None:
    whole = sample_of({"messages": CHAT})
    assert (whole.reward, whole.advantage, whole.rollout_logprobs) == (None, 1.0, [0.0] * len(whole.token_ids))
    labels = [token if trained else -100 for token, trained in zip(whole.token_ids, whole.loss_mask, strict=True)]
    first = whole.loss_mask.index(True)
    for limit in (first + 2, len(labels)):
        cut = sample_of({"messages": CHAT}, limits={"max_tokens": limit, "overlong": "truncate"})
        by_hand = sample_of({"input_ids": whole.token_ids[:limit], "labels": labels[:limit]})
        assert cut == replace(by_hand, truncated=limit < len(labels))
    for overlong, limit in (("truncate", first), ("drop", len(labels) - 1)):
        with pytest.raises(UnusableRowError, match=f"--overlong-samples {overlong} leaves out row dataset:0"):
            sample_of({"messages": CHAT}, limits={"max_tokens": limit, "overlong": overlong})


@pytest.mark.parametrize("long", [50, 10])
def test_a_run_with_inexact_masks_of_most_rows_ends_at_start(long: int) -> None:
    """One turn is exact, and several are not, in a template that shows thoughts in the last turn only."""
    data, tokenizer = DataConfig(prompt_data="x"), tiny_tokenizer()
    tokenizer.chat_template = THOUGHTS
    values = [{"messages": MULTI_TURN if i < long else MULTI_TURN[:2]} for i in range(60)]
    rows = as_rows(values, data, sft=SftConfig())
    stream = PromptStream(rows, tokenizer, data=data, rollout=RolloutConfig(), make=untokenized)
    builder = SampleBuilder(tokenizer, data, "assistant", max_prompt_len=10**6)
    if long == 10:
        check_first_rows(stream, builder)
        return
    with pytest.raises(
        DataError, match=r"50 of the first 60 rows have no exact mask .* set --sft-loss-on last, or use"
    ):
        check_first_rows(stream, builder)


@pytest.mark.parametrize("text", ["Hello there", " Hello  there\n\nHi", "é漢字🙂🙂 x", "a\u0301b"])
def test_bounds_by_offsets_lie_between_tokens(text: str) -> None:
    encoder = ConversationEncoder(merging_tokenizer(), DataConfig(prompt_data="x"), "assistant")
    ids, offsets = encoder._tokenize(text)

    def before(places: list[tuple[int, int]], place: int) -> int | None:
        try:
            return encoder._tokens_before(text, ids, places, place)
        except UnusableRowError:
            return None

    for place in range(1, len(text) + 1):
        found, by_prefix = before(offsets, place), before([], place)
        assert found == by_prefix or by_prefix is None
        assert found is None or encoder.tokenizer.decode(ids[:found]) == text[:place]


def test_a_row_with_a_token_that_the_model_lacks_is_named() -> None:
    row = {"prompt": "2+2?", "completion": "four"}
    largest = max(sample_of(row).token_ids)
    assert sample_of(row, limits={"num_tokens": largest + 1}) == sample_of(row)
    with pytest.raises(DataError, match=f"row dataset:0 has token {largest}, and the model has {largest} tokens"):
        sample_of(row, limits={"num_tokens": largest})
