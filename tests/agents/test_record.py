"""Calls of an episode become sequences: every sampled token is trained once, and no token is tokenized twice."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsdptrain.agents.calls import CallError, ModelCall
from fsdptrain.agents.prompts import CallRenderer, assistant_message
from fsdptrain.agents.record import AnsweredCall, Record, conversation_of, samples_of
from fsdptrain.config import DataConfig
from fsdptrain.data.text import response_text
from fsdptrain.types import Completion, Prompt
from tests.testing import tiny_tokenizer

TOKENIZER = tiny_tokenizer()
END = TOKENIZER.eos_token_id
PROMPT = Prompt("p", [7, 8], "")


def user(text: str) -> dict:
    return {"role": "user", "content": text}


class Agent:
    """Answers calls with given tokens, as the endpoint records them."""

    def __init__(self, **data) -> None:
        self.renderer = CallRenderer(TOKENIZER, DataConfig(**data))
        self.record = Record()
        self.num_sampled = 0

    def call(self, messages, tokens=(65, END), **fields):
        call = ModelCall(messages=messages, **fields)
        ids, parent, conversation = self.renderer.prompt_of(call, self.record)
        text = response_text(tokens, self.renderer.tokenizer, stopped=tokens[-1] == END)
        number = (len(self.record.calls), 0)
        content, tools = self.renderer.tool_calls_of(text, tokens, call, ids, number=number)
        message = assistant_message(content, tools)
        logprobs = [-1.0 - self.num_sampled - i for i in range(len(tokens))]  # all different: they name the tokens
        self.num_sampled += len(tokens)
        completion = Completion("c", list(tokens), logprobs, "stop", 0)
        start = parent.end if parent else 0
        assert parent is None or parent.token_ids == ids[:start]
        self.record.add(
            AnsweredCall(parent, number, start, ids[start:], completion, truncated=False),
            (*conversation, *conversation_of([message], ())[1:]),
        )
        return message, ids

    def samples(self):
        return samples_of(PROMPT, self.record)


def trained(sample) -> list[int]:
    return [token for token, own in zip(sample.token_ids, sample.loss_mask, strict=True) if own]


def test_a_call_that_extends_the_conversation_continues_the_tokens():
    agent = Agent()
    odd = [200, 201, END]  # bytes that no text gives back: a second tokenization would change them
    first, ids = agent.call([user("a")], odd)
    _, longer = agent.call([user("a"), first, user("b")], [66, END])
    assert longer[: len(ids) + 3] == [*ids, *odd]
    assert TOKENIZER.decode(longer[len(ids) + 3 :]) == "<|user|>b<|end|><|assistant|>"
    [sample] = agent.samples()
    assert trained(sample) == [*odd, 66, END]
    assert [x for x, own in zip(sample.rollout_logprobs, sample.loss_mask, strict=True) if own] == [-1, -2, -3, -4, -5]
    assert sum(sample.rollout_logprobs) == -15.0  # 0 elsewhere


def test_a_response_without_its_end_gets_it_once():
    agent = Agent()
    for tokens in ([65], [65, END]):
        first, ids = agent.call([user("x"), user(str(tokens))], tokens)
        _, longer = agent.call([user("x"), user(str(tokens)), first, user("b")])
        assert longer == [*ids, 65, END, *longer[len(ids) + 2 :]]
        assert TOKENIZER.decode(longer[len(ids) + 2 :]) == "<|user|>b<|end|><|assistant|>"


@pytest.mark.parametrize(
    "messages",
    [
        [user("a")],  # the same call again: a parallel one
        [user("other"), {"role": "assistant", "content": "A"}, user("b")],  # an earlier message was changed
        [user("a"), {"role": "assistant", "content": "summary"}, user("b")],  # the response was replaced
    ],
)
def test_a_call_that_rewrites_the_history_begins_a_new_sequence(messages):
    agent = Agent()
    first, _ = agent.call([user("a")])
    agent.call([user("a"), first, user("b")], [66, END])
    agent.call(messages, [67, END])
    one, two = agent.samples()
    assert trained(one) == [65, END, 66, END]
    assert trained(two) == [67, END]


def test_a_fork_trains_the_common_part_once():
    agent = Agent()
    first, _ = agent.call([user("a")])
    for text, token in (("b", 66), ("c", 67)):
        agent.call([user("a"), first, user(text)], [token, END])
    one, two = agent.samples()
    assert trained(one) == [65, END, 66, END]
    assert trained(two) == [67, END]
    assert two.token_ids[: two.loss_mask.index(True)][:6] == one.token_ids[:6]


def test_other_spellings_of_the_same_message_continue_it():
    agent, tools = Agent(), [{"type": "function", "function": {"name": "add", "parameters": {}}}]
    with pytest.raises(CallError, match="the chat template does not read tools"):
        agent.call([user("a")], tools=tools)
    agent.renderer.tokenizer = tiny_tokenizer()
    agent.renderer.tokenizer.chat_template = "{{ tools or '' }}" + TOKENIZER.chat_template
    text = ' <tool_call>{"name": "add", "arguments": {"b": 2, "a": 1}}</tool_call> '
    message, _ = agent.call([user("a")], [*TOKENIZER(text)["input_ids"], END], tools=tools)
    [call] = message["tool_calls"]
    assert call["function"] == {"name": "add", "arguments": {"a": 1, "b": 2}}
    returned = {"role": "assistant", "content": "", "tool_calls": [{**call, "id": "other"}]}
    answer = {"role": "tool", "content": "3", "tool_call_id": "other"}
    agent.call([user("a"), returned, answer], tools=tools)
    assert len(agent.samples()) == 1
    agent.call([user("a"), returned, answer])  # without the tools it is another prompt
    assert len(agent.samples()) == 2


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 3), st.binary(min_size=1, max_size=3)), max_size=12))
def test_every_sampled_token_is_trained_once_with_its_logprob_whatever_the_calls_continue(calls):
    agent, known = Agent(), [[]]
    sampled: list[tuple[int, float]] = []
    for which, text, data in calls:
        messages = [*known[which % len(known)], user(str(text))]
        tokens = [5 + byte for byte in data]
        sampled += [(token, -1.0 - agent.num_sampled - i) for i, token in enumerate(tokens)]
        message, _ = agent.call(messages, tokens)
        known.append([*messages, message])
    found = [
        (token, logprob)
        for sample in agent.samples()
        for token, logprob, own in zip(sample.token_ids, sample.rollout_logprobs, sample.loss_mask, strict=True)
        if own
    ]
    assert sorted(found) == sorted(sampled)


def test_a_response_is_cut_at_a_stop_text_after_the_token_that_completes_it():
    renderer = CallRenderer(TOKENIZER, DataConfig())
    ids = TOKENIZER("one. two")["input_ids"]
    assert renderer.until_stop(ids, [". t", "x"], stopped=False) == (len("one. t"), "one", True)
    assert renderer.until_stop(ids, ["x"], [". t"], stopped=False) == (len("one. t"), "one. t", True)
    assert renderer.until_stop(ids, ["three"], stopped=False) == (len(ids), "one. two", False)
    assert renderer.until_stop(ids, [], stopped=False) == (len(ids), "one. two", False)


def test_an_episode_without_calls_has_nothing_to_train():
    [sample] = samples_of(PROMPT, Record())
    assert (sample.token_ids, sample.loss_mask) == ([7, 8], [False, False])


def test_the_order_of_sequences_is_that_of_the_calls_not_of_their_answers():
    def call(number: int, token: int) -> AnsweredCall:
        return AnsweredCall(None, (number, 0), 0, [1], Completion("c", [token], [-1.0], "stop", 0), truncated=False)

    record = Record()
    for number, token in ((1, 66), (0, 65)):
        record.add(call(number, token), (number,))
    assert [sample.token_ids for sample in samples_of(PROMPT, record)] == [[1, 65], [1, 66]]
