"""Prompts of rows, and the stream of prompts over epochs."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from fsdptrain.config import DataConfig, RolloutConfig
from fsdptrain.data.held_out import split_rows
from fsdptrain.data.prompts import PromptStream, check_template, make_prompt
from fsdptrain.data.rows import Row, content_hash
from fsdptrain.data.sources import load_rows
from fsdptrain.data.tables import as_rows
from fsdptrain.errors import ConfigError, DataError
from fsdptrain.types import Prompt
from tests.testing import tiny_tokenizer

NO_SYSTEM_ROLE = (  # as gemma's: it raises
    "{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}[model]{% endif %}"
)
DROPS_SYSTEM = (
    "{% for m in messages %}{% if m['role'] != 'system' %}[{{ m['role'] }}]{{ m['content'] }}{% endif %}{% endfor %}"
)


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return tiny_tokenizer()


def with_template(template: str | None, **special_tokens: str) -> PreTrainedTokenizerFast:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template
    for name, token in special_tokens.items():
        setattr(tokenizer, name, token)
    return tokenizer


def rows(n: int = 10) -> list[Row]:
    return [Row(f"r:{i}", f"question {i}", label=i) for i in range(n)]


def stream(tokenizer: Any, data_rows: Any = None, **values: Any) -> PromptStream:
    options = {name: values.pop(name) for name in ("exclude", "max_prompt_len") if name in values}
    data, rollout = DataConfig(prompt_data="x"), RolloutConfig(**values)
    return PromptStream(rows() if data_rows is None else data_rows, tokenizer, data=data, rollout=rollout, **options)


def text_of(tokenizer: Any, prompt: Any, **values: Any) -> str:
    return make_prompt(Row("r", prompt), tokenizer, data=DataConfig(**{"prompt_data": "x", **values})).text


def test_special_tokens_of_the_template_are_single_tokens(tokenizer: Any) -> None:
    prompt = make_prompt(Row("r", "a"), tokenizer, data=DataConfig(prompt_data="x"))
    expected = ["<|user|>", "a", "<|end|>", "<|assistant|>"]
    assert tokenizer.convert_ids_to_tokens(prompt.token_ids) == expected


@pytest.mark.parametrize(
    ("template", "text"), [(None, "a"), (None, "<|user|>a"), ("{{ bos_token }}{{ messages[0]['content'] }}", "a")]
)
def test_a_prompt_has_one_bos_from_the_tokenizer_the_template_or_the_text(template: str | None, text: str) -> None:
    tokenizer = with_template(template, bos_token="<|user|>")
    bos = ("<|user|>", tokenizer.convert_tokens_to_ids("<|user|>"))
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<|user|> $A", special_tokens=[bos])
    assert text_of(tokenizer, text, apply_chat_template=template is not None) == "<|user|>a"


@pytest.mark.parametrize("template", [NO_SYSTEM_ROLE, DROPS_SYSTEM], ids=["raises", "drops"])
def test_a_system_prompt_without_a_system_role_precedes_the_user_message(template: str) -> None:
    text = text_of(with_template(template), "2+2?", system_prompt="Be brief.")
    assert text.startswith("[user]Be brief.\n\n2+2?")


@pytest.mark.parametrize("template", ["{{ 1 / 0 }}", "{{ f() }}", "{{ messages[9].role.x }}", "{{ 'x' * 10**18 }}"])
@pytest.mark.parametrize("system_prompt", ["", "Be brief."])
def test_a_template_may_raise_anything(template: str, system_prompt: str) -> None:
    with pytest.raises(DataError, match="the chat template of --hf-checkpoint cannot render row r: ") as caught:
        text_of(with_template(template), "x", system_prompt=system_prompt)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("arguments", [{"a": 2, "b": None}, '{"a": 2}'])
@pytest.mark.parametrize(
    "shown", ["{{ call.arguments | tojson }}", "{{ call.arguments }}", "{{ '' + call.arguments }}"]
)
def test_earlier_tool_calls_have_the_form_that_the_template_renders(arguments: Any, shown: str) -> None:
    template = (
        "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% for call in m.tool_calls or [] %}"
        f"{{{{ call.name }}}}({shown}){{% endfor %}}{{% endfor %}}"
    )
    call = {"name": "add", "arguments": arguments}
    chat = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": None, "tool_calls": [call]}]
    [row] = as_rows([{"prompt": [*chat, {"role": "tool", "content": "4"}], "label": 4}], DataConfig(prompt_data="x"))
    text = make_prompt(row, with_template(template), data=DataConfig(prompt_data="x")).text
    assert text == '[user]2+2?[assistant]add({"a": 2})[tool]4'
    with pytest.raises(DataError, match="row dataset:0: the chat template does not show tool_calls"):
        make_prompt(row, with_template(template.replace("m.tool_calls", "()")), data=DataConfig(prompt_data="x"))


def test_a_message_without_content_is_empty() -> None:
    tokenizer, chat = with_template(NO_SYSTEM_ROLE), [{"role": "user"}, {"role": "tool"}]
    assert text_of(tokenizer, chat) == "[user][tool][model]"
    assert text_of(tokenizer, chat, system_prompt="S") == "[user]S\n\n[tool][model]"
    assert content_hash(Row("a", chat)) == content_hash(Row("b", chat))


def test_a_missing_template_is_an_error_with_the_flag(tokenizer: Any) -> None:
    with pytest.raises(ConfigError, match="--no-apply-chat-template"):
        stream(with_template(None))
    with pytest.raises(DataError, match="row r is a list of chat messages, which need --apply-chat-template"):
        text_of(tokenizer, [{"role": "user", "content": "y"}], apply_chat_template=False)
    with pytest.raises(DataError, match="row r is an empty prompt"):
        text_of(tokenizer, "", apply_chat_template=False)


def test_each_epoch_has_every_row_once_in_an_order_of_the_seed(tokenizer: Any) -> None:
    prompts = stream(tokenizer).next(30)
    epochs = [[p.label for p in prompts[start : start + 10]] for start in (0, 10, 20)]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert len({p.id for p in prompts}) == 30
    first, same, other = (stream(tokenizer, seed=seed).next(10) for seed in (1, 1, 2))
    assert first == same != other
    assert [p.label for p in stream(tokenizer, shuffle=False).next(13)] == [*range(10), 0, 1, 2]
    assert {p.id for p in prompts[10:20]} == {f"r:{i}@1" for i in range(10)}


def done(prompts: PromptStream, count: int) -> list[Prompt]:
    """Draw `count` prompts and record them."""
    taken = prompts.next(count)
    for prompt in taken:
        prompts.record(prompt)
    return taken


@settings(max_examples=50, deadline=None)
@given(steps=st.lists(st.tuples(st.integers(0, 7), st.integers(0, 7)), max_size=8), resumes=st.sets(st.integers(0, 7)))
def test_pending_prompts_of_a_checkpoint_are_drawn_again_and_none_is_done_twice(tokenizer, steps, resumes):
    """Draws and completes prompts, sometimes with a restart from the state."""
    prompts, under_way, finished = stream(tokenizer), [], []
    for number, (asked, ended) in enumerate(steps):
        under_way += prompts.next(asked)
        for prompt in under_way[:ended]:
            prompts.record(prompt)
        finished += under_way[:ended]
        del under_way[:ended]
        if number in resumes:
            state = json.loads(json.dumps(prompts.state_dict()))
            prompts, lost = stream(tokenizer), under_way
            prompts.load_state_dict(state)
            under_way = prompts.next(len(lost) // 2)  # the next checkpoint may come before the rest
            assert under_way == lost[: len(under_way)]
    finished += under_way + prompts.next(40)
    assert finished == stream(tokenizer).next(len(finished))


@pytest.mark.parametrize("stop", [0, 1, 9, 10, 11, 25])
def test_a_resumed_stream_equals_an_uninterrupted_one(tokenizer: Any, stop: int) -> None:
    exclude = {content_hash(rows()[4])}

    def make(**values: Any) -> PromptStream:
        mixed = [*rows(), Row("long", "a" * 90)]
        return stream(tokenizer, mixed, exclude=exclude, max_prompt_len=40, **values)

    whole = make()
    expected = [done(whole, 1)[0] for _ in range(40)]
    first = make()
    begun = done(first, stop)
    second = make(seed=99)  # the state brings the seed
    second.load_state_dict(first.state_dict())
    assert begun + done(second, 40 - stop) == expected
    assert second.state_dict() == whole.state_dict()
    assert second.progress == whole.progress


def test_long_prompts_are_left_out_and_the_only_short_one_is_in_each_epoch(tokenizer: Any) -> None:
    mixed = [Row("short", "a"), *(Row(f"long:{i}", "a" * 50) for i in range(9))]
    prompts = stream(tokenizer, mixed, max_prompt_len=20)
    assert [p.id for p in prompts.next(30)] == ["short", *(f"short@{epoch}" for epoch in range(1, 30))]
    assert 9 * 29 <= prompts.num_too_long <= 9 * 30


def test_data_without_a_usable_row_is_an_error(tokenizer: Any) -> None:
    with pytest.raises(DataError, match="none of 10 rows can be trained on, 10 are longer than 3 tokens"):
        stream(tokenizer, max_prompt_len=3).next(1)
    with pytest.raises(DataError, match="none of 10 rows can be trained on, 10 equal a prompt"):
        stream(tokenizer, exclude={content_hash(row) for row in rows()}).next(1)


def test_training_has_no_row_with_the_content_of_an_evaluation_row(tokenizer: Any) -> None:
    """Also if the data repeat themselves."""
    data = DataConfig(prompt_data="reasoning_gym:spell_backward?max_word_len=3&size=1500")
    train, held_out = split_rows(load_rows(data, seed=0), 32, seed=0)
    hashes = {content_hash(row) for row in held_out}
    repeated = sum(content_hash(train[i]) in hashes for i in range(len(train)))
    assert repeated > 0
    prompts = PromptStream(train, tokenizer, data=data, rollout=RolloutConfig(), exclude=hashes)
    stream, prompts = prompts, prompts.next(len(train) - repeated + 1)  # the last is of the next epoch
    assert stream.num_held_out >= repeated
    evaluated = {row.prompt for row in held_out}
    assert not any(p.metadata["entry"]["question"] in evaluated for p in prompts)
    assert len({p.id for p in prompts}) == len(prompts)


def test_a_stream_reads_only_the_rows_it_needs(tokenizer: Any) -> None:
    looked_at: list[int] = []

    class Counted(list[Row]):
        def __getitem__(self, index: Any) -> Any:
            looked_at.append(index)
            return super().__getitem__(index)

    prompts = stream(tokenizer, Counted(rows(100_000)))
    assert looked_at == []
    prompts.next(5)
    assert len(looked_at) == 5


def test_a_template_argument_that_the_template_does_not_read_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"enable_thinkin: .* does not read it; did you mean 'enable_thinking'"):
        check_template(
            with_template("{{ enable_thinking }}"), DataConfig(chat_template_kwargs={"enable_thinkin": False})
        )
    check_template(with_template("{{ enable_thinking }}"), DataConfig(chat_template_kwargs={"enable_thinking": False}))
