"""The clients of OpenAI and curl get from the endpoint what they get from OpenAI."""

import asyncio
import json
import logging
import subprocess
from typing import Any

import pytest
from openai import AsyncOpenAI, BadRequestError, InternalServerError, OpenAI

from fsdptrain.agents.endpoint import Endpoint
from tests.agents.agents import says
from tests.agents.scripted import KEY, ScriptedEpisodes

HELLO = says("hello")
TOOL: Any = {
    "type": "function",
    "function": {"name": "weather", "description": "of a city", "parameters": {"type": "object"}, "strict": True},
}


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
    assert [chat.model] == [model.id for model in client.models.list()] == ["org/tiny"]
    call = episodes.calls[0]
    assert (call.num_choices, call.max_tokens, list(call.stop)) == (2, 8, ["l"])
    assert call.sampling == {"temperature": 0.5, "top_p": 0.9}
    cut = client.chat.completions.create(model="any", messages=HELLO, max_tokens=3)
    assert (cut.choices[0].message.content, cut.choices[0].finish_reason) == ("hel", "length")


def test_token_ids_are_those_of_the_answer(client: OpenAI) -> None:
    chat = client.chat.completions.create(model="", messages=HELLO, extra_body={"return_token_ids": True}).to_dict()
    assert chat["prompt_token_ids"] == [ord(letter) for letter in "user: hello"]
    assert chat["choices"][0]["token_ids"] == [ord(letter) for letter in "hello"]  # type: ignore[index]
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


def test_errors_of_a_call_reach_the_client_and_unexpected_ones_the_log(
    client: OpenAI, caplog: pytest.LogCaptureFixture
) -> None:
    for stream in (False, True):
        with pytest.raises(BadRequestError, match="too long") as refused:
            client.chat.completions.create(model="", messages=says("refuse"), stream=stream)
        assert (refused.value.param, refused.value.code) == ("messages", "context_length_exceeded")
    with pytest.raises(InternalServerError, match=r"ZeroDivisionError: the engine \(scripted.py:\d+\)") as failed:
        client.chat.completions.create(model="", messages=says("fail"))
    assert (failed.value.status_code, failed.value.type) == (500, "server_error")
    assert [record.exc_info is not None for record in caplog.records if record.levelno >= logging.ERROR] == [True]


def curl(endpoint: Endpoint, path: str, body: str, *options: str) -> str:
    command = ["curl", "--silent", "--no-buffer", f"{endpoint.url}{path}", "-H", f"Authorization: Bearer {KEY}"]
    return subprocess.run([*command, *options, "-d", body], check=True, text=True, capture_output=True).stdout


def test_curl_gets_answers_streams_and_rewards(endpoint: Endpoint, episodes: ScriptedEpisodes) -> None:
    answer = json.loads(curl(endpoint, "/chat/completions", json.dumps({"messages": HELLO})))
    assert answer["choices"][0]["message"] == {"role": "assistant", "content": "hello", "refusal": None}
    stream = curl(endpoint, "/chat/completions", json.dumps({"messages": HELLO, "stream": True}))
    assert stream.endswith("data: [DONE]\n\n")
    for reward in ("0.5", '{"reward": 1, "solved": true}'):
        assert json.loads(curl(endpoint, "/reward", reward)) == {"status": "ok"}
    assert episodes.rewards == [(KEY, 0.5), (KEY, {"reward": 1, "solved": True})]
