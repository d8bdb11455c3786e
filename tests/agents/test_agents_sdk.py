"""The Agents SDK of OpenAI runs unchanged against the endpoint."""

import asyncio

import pytest
from agents import Agent, ModelSettings, OpenAIChatCompletionsModel, RunConfig, Runner, function_tool
from openai import AsyncOpenAI

from fsdptrain.agents.endpoint import Endpoint
from tests.agents.scripted import KEY, ScriptedEpisodes


@function_tool
def weather(city: str) -> str:
    """Return the weather of a city."""
    return f"sunny in {city}"


@pytest.mark.parametrize("streamed", [False, True])
def test_an_agent_calls_its_tool_and_answers(endpoint: Endpoint, episodes: ScriptedEpisodes, streamed: bool) -> None:
    async def run() -> str:
        async with AsyncOpenAI(base_url=endpoint.url, api_key=KEY, max_retries=0) as client:
            settings = ModelSettings(temperature=0.7, parallel_tool_calls=True, include_usage=True, store=False)
            model = OpenAIChatCompletionsModel("tiny", client)
            agent = Agent("clerk", instructions="be brief", model=model, tools=[weather], model_settings=settings)
            config = RunConfig(tracing_disabled=True)
            if not streamed:
                return (await Runner.run(agent, "Rome Oslo", run_config=config)).final_output
            result = Runner.run_streamed(agent, "Rome Oslo", run_config=config)
            types = {event.type async for event in result.stream_events()}
            assert types >= {"raw_response_event", "run_item_stream_event"}
            assert result.context_wrapper.usage.output_tokens == 45
            return result.final_output

    assert asyncio.run(run()) == "sunny in Oslo"
    first, second = episodes.calls
    assert first.sampling == {"temperature": 0.7}
    assert first.tools[0]["function"]["name"] == "weather"
    assert second.tools == first.tools
    calls = [
        {"id": f"call_{index}", "type": "function", "function": {"name": "weather", "arguments": {"city": city}}}
        for index, city in enumerate(("Rome", "Oslo"))
    ]
    assert second.messages == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "Rome Oslo"},
        {"role": "assistant", "content": "", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "call_0", "content": "sunny in Rome"},
        {"role": "tool", "tool_call_id": "call_1", "content": "sunny in Oslo"},
    ]
