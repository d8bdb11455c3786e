"""The clients of OpenAI and curl get from the endpoint what they get from OpenAI."""

import asyncio
import json
import subprocess
from typing import Any

import pytest
from openai import APIError, AsyncOpenAI, BadRequestError, InternalServerError, NotFoundError, OpenAI

from fsdptrain.agents import endpoint as endpoint_module
from fsdptrain.agents.endpoint import Endpoint
from tests.agents.scripted import KEY, ScriptedEpisodes

HELLO: Any = [{"role": "user", "content": "hello"}]
TOOL: Any = {
    "type": "function",
    "function": {"name": "weather", "description": "of a city", "parameters": {"type": "object"}, "strict": True},
}
FLAT_TOOL: Any = {"type": "function", **TOOL["function"]}


def test_a_chat_completion_is_the_answer_with_usage_choices_and_logprobs(
    client: OpenAI, episodes: ScriptedEpisodes
) -> None:
    chat = client.chat.completions.create(
        model="any", messages=HELLO, n=2, stop="l", temperature=0.5, top_p=0.9, max_completion_tokens=8, logprobs=True
    )
    assert [choice.message.content for choice in chat.choices] == ["he", "he"]
    assert [choice.index for choice in chat.choices] == [0, 1]
    assert chat.choices[0].finish_reason == "stop"
    logprobs = chat.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert [(one.token, one.bytes, one.logprob) for one in logprobs.content] == [("h", [104], 0.0), ("e", [101], -0.5)]
    assert chat.usage is not None
    assert (chat.usage.prompt_tokens, chat.usage.completion_tokens, chat.usage.total_tokens) == (11, 4, 15)
    assert chat.model == "org/tiny"
    call = episodes.calls[0]
    assert (call.num_choices, call.max_tokens, list(call.stop)) == (2, 8, ["l"])
    assert call.sampling == {"temperature": 0.5, "top_p": 0.9}
    cut = client.chat.completions.create(model="any", messages=HELLO, max_tokens=3)
    assert (cut.choices[0].message.content, cut.choices[0].finish_reason) == ("hel", "length")


def test_token_ids_are_those_of_the_answer(client: OpenAI) -> None:
    chat = client.chat.completions.create(model="", messages=HELLO, extra_body={"return_token_ids": True}).to_dict()
    assert chat["prompt_token_ids"] == [ord(letter) for letter in "user: hello"]
    assert chat["choices"][0]["token_ids"] == [ord(letter) for letter in "hello"]  # type: ignore[index]
    text = client.completions.create(model="", prompt="hello", extra_body={"return_token_ids": True}).to_dict()
    choice = text["choices"][0]  # type: ignore[index]
    assert choice["token_ids"] == choice["prompt_token_ids"] == text["prompt_token_ids"] == list(b"hello")
    assert "prompt_token_ids" not in client.chat.completions.create(model="", messages=HELLO).to_dict()


def test_messages_reach_the_template_in_its_form(client: OpenAI, episodes: ScriptedEpisodes) -> None:
    def called(id_: str, arguments: str) -> Any:
        return {"id": id_, "type": "function", "function": {"name": "weather", "arguments": arguments}}

    messages: Any = [
        {"role": "developer", "content": [{"type": "text", "text": "be "}, {"type": "text", "text": "brief"}]},
        {"role": "user", "content": "Rome"},
        {"role": "assistant", "content": None, "tool_calls": [called("a", '{"city": "Rome"}'), called("b", "{Rome")]},
        {"role": "tool", "tool_call_id": "a", "content": "sunny"},
    ]
    client.chat.completions.create(model="", messages=messages, tools=[TOOL])
    client.chat.completions.create(model="", messages=messages, tools=[TOOL], tool_choice="none")
    expected = called("a", "")
    expected["function"]["arguments"] = {"city": "Rome"}
    assert episodes.calls[0].messages == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "Rome"},
        {"role": "assistant", "content": "", "tool_calls": [expected, called("b", "{Rome")]},
        {"role": "tool", "tool_call_id": "a", "content": "sunny"},
    ]
    function = {"name": "weather", "description": "of a city", "parameters": {"type": "object"}}
    assert list(episodes.calls[0].tools) == [{"type": "function", "function": function}]
    assert not episodes.calls[1].tools


def test_a_streamed_chat_is_the_one_that_is_not_streamed(client: OpenAI) -> None:
    for options in ({}, {"tools": [TOOL]}, {"n": 3}):
        arguments: Any = {"model": "", "messages": [{"role": "user", "content": "Rome Oslo"}], "logprobs": True}
        arguments |= options
        whole = client.chat.completions.create(**arguments)
        with client.chat.completions.stream(**arguments, stream_options={"include_usage": True}) as stream:
            final = stream.get_final_completion()
        for one, other in zip(final.choices, whole.choices, strict=True):
            assert (one.index, one.finish_reason) == (other.index, other.finish_reason)
            assert (one.message.content or None) == (other.message.content or None)
            assert one.logprobs is not None
            assert one.logprobs == other.logprobs
            calls = [call.function.model_dump(include={"name", "arguments"}) for call in one.message.tool_calls or ()]
            assert calls == [call.function.model_dump() for call in other.message.tool_calls or ()]  # type: ignore[union-attr]
        assert final.usage == whole.usage


def test_the_async_client_streams_chunks_that_start_with_the_role(endpoint: Endpoint) -> None:
    async def chunks() -> list[Any]:
        async with AsyncOpenAI(base_url=endpoint.url, api_key=KEY) as client:
            stream = await client.chat.completions.create(
                model="", messages=HELLO, stream=True, extra_body={"return_token_ids": True}
            )
            return [chunk.to_dict() async for chunk in stream]

    role, content, end = asyncio.run(chunks())
    assert role["choices"][0]["delta"]["role"] == "assistant"
    assert role["prompt_token_ids"] == list(b"user: hello")
    assert content["choices"][0]["token_ids"] == list(b"hello")
    assert end["choices"] == [{"index": 0, "delta": {}, "finish_reason": "stop"}]


def test_completions_continue_a_text_or_token_ids(client: OpenAI, episodes: ScriptedEpisodes) -> None:
    for prompt in ("hello", ["hello"], list(b"hello"), [list(b"hello")]):
        completion = client.completions.create(model="", prompt=prompt, logprobs=1, max_tokens=2)
        choice = completion.choices[0]
        assert (choice.text, choice.finish_reason) == ("he", "length")
        assert choice.logprobs is not None
        assert choice.logprobs.to_dict() == {
            "tokens": ["h", "e"],
            "token_logprobs": [0.0, -0.5],
            "top_logprobs": None,
            "text_offset": [0, 1],
        }
        usage: Any = {"include_usage": True}
        chunks = list(client.completions.create(model="", prompt=prompt, n=2, stream=True, stream_options=usage))
        assert [[choice.text for choice in chunk.choices] for chunk in chunks] == [["hello"], ["hello"], []]
        assert chunks[-1].usage is not None
        assert chunks[-1].usage.completion_tokens == 10
    assert [call.text for call in episodes.calls[::2]] == ["hello", "hello", None, None]
    assert [call.token_ids for call in episodes.calls[::2]] == [None, None, list(b"hello"), list(b"hello")]


def test_a_response_goes_on_from_the_previous_one(client: OpenAI, episodes: ScriptedEpisodes) -> None:
    first = client.responses.create(model="", input="Rome Oslo", instructions="be brief", tools=[FLAT_TOOL])
    assert [(item.type, item.arguments) for item in first.output] == [  # type: ignore[union-attr]
        ("function_call", '{"city": "Rome"}'),
        ("function_call", '{"city": "Oslo"}'),
    ]
    results: Any = [
        {"type": "function_call_output", "call_id": item.call_id, "output": f"sunny in {index}"}  # type: ignore[union-attr]
        for index, item in enumerate(first.output)
    ]
    second = client.responses.create(model="", input=results, previous_response_id=first.id)
    assert second.output_text == "sunny in 1"
    assert second.usage is not None
    assert second.usage.output_tokens == 10
    replayed = [{"role": "user", "content": "Rome Oslo"}, *(item.to_dict() for item in first.output), *results]
    assert client.responses.create(model="", input=replayed).output_text == second.output_text
    assert episodes.calls[1].messages == episodes.calls[2].messages
    assert [message["role"] for message in episodes.calls[2].messages or ()] == ["user", "assistant", "tool", "tool"]
    with pytest.raises(BadRequestError, match="no such response"):
        client.responses.create(model="", input="hello", previous_response_id="resp_other")


def test_responses_of_an_episode_are_unknown_to_others_and_freed_with_it(
    endpoint: Endpoint, client: OpenAI, episodes: ScriptedEpisodes
) -> None:
    first = client.responses.create(model="", input="hello")
    episodes.keys = {KEY, "other"}
    with pytest.raises(BadRequestError, match="no such response"):
        client.with_options(api_key="other").responses.create(model="", input="hello", previous_response_id=first.id)
    episodes.keys = {"third"}
    client.with_options(api_key="third").responses.create(model="", input="hello")
    assert list(endpoint._conversations) == ["third"]


def test_a_streamed_response_is_the_one_that_is_not_streamed(client: OpenAI) -> None:
    for tools in ([], [FLAT_TOOL]):
        whole = client.responses.create(model="", input="Rome Oslo", tools=tools)
        with client.responses.stream(model="", input="Rome Oslo", tools=tools) as stream:
            events = list(stream)
            final = stream.get_final_response()
        assert [event.sequence_number for event in events] == list(range(len(events)))
        assert final.output_text == whole.output_text
        assert [item.type for item in final.output] == [item.type for item in whole.output]
        assert final.usage == whole.usage
    kinds = [event.type for event in client.responses.create(model="", input="hello", max_output_tokens=2, stream=True)]
    assert kinds == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.incomplete",
    ]


def test_a_stream_waits_with_comments_and_ends_with_an_error_event(
    client: OpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(endpoint_module, "_KEEP_ALIVE_S", 0.02)
    for text, message in (("refuse", "the prompt is too long"), ("fail", "the engine")):
        messages: Any = [{"role": "user", "content": text}]
        with pytest.raises(APIError, match=message):
            list(client.chat.completions.create(model="", messages=messages, stream=True))
        with pytest.raises(APIError, match=message):
            list(client.completions.create(model="", prompt=text, stream=True))
        with pytest.raises(APIError, match=message), client.responses.stream(model="", input=text) as stream:
            stream.until_done()
    with client.completions.with_streaming_response.create(model="", prompt="wait", stream=True) as response:
        lines = response.iter_lines()
        assert [next(lines) for _ in range(3)] == [": waiting", "", ": waiting"]


def test_errors_of_a_call_reach_the_client(client: OpenAI) -> None:
    with pytest.raises(BadRequestError, match="too long") as refused:
        client.completions.create(model="", prompt="refuse")
    assert (refused.value.param, refused.value.code) == ("messages", "context_length_exceeded")
    with pytest.raises(InternalServerError, match=r"ZeroDivisionError: the engine \(scripted.py:\d+\)"):
        client.completions.create(model="", prompt="fail")


def test_models_are_listed_by_name(client: OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["org/tiny"]
    assert client.models.retrieve("org/tiny").id == "org/tiny"
    with pytest.raises(NotFoundError, match="does not exist"):
        client.models.retrieve("org/other")


def curl(endpoint: Endpoint, path: str, body: str, *options: str) -> str:
    command = ["curl", "--silent", "--no-buffer", f"{endpoint.url}{path}", "-H", f"Authorization: Bearer {KEY}"]
    return subprocess.run([*command, *options, "-d", body], check=True, text=True, capture_output=True).stdout


def test_curl_gets_answers_streams_and_rewards(endpoint: Endpoint, episodes: ScriptedEpisodes) -> None:
    answer = json.loads(curl(endpoint, "/chat/completions", json.dumps({"messages": HELLO})))
    assert answer["choices"][0]["message"] == {"role": "assistant", "content": "hello", "refusal": None}
    stream = curl(endpoint, "/completions", json.dumps({"prompt": "hello", "stream": True}))
    assert stream.endswith("data: [DONE]\n\n")
    for reward in ("0.5", '{"reward": 1, "solved": true}'):
        assert json.loads(curl(endpoint, "/reward", reward)) == {"status": "ok"}
    assert episodes.rewards == [(KEY, 0.5), (KEY, {"reward": 1, "solved": True})]
