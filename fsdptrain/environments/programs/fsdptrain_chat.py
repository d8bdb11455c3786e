"""A harness of verifiers: a chat with the tools of the task, in the process of the environment.

verifiers' own chat harness starts a program for each turn, in an environment that uv builds.
"""
# pyright: reportMissingImports=false

import json
from contextlib import AsyncExitStack
from typing import Any

import verifiers.v1 as vf
from openai import AsyncOpenAI, BadRequestError
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.harnesses.utils.mcp import call_mcp, connect_mcp

__all__ = ["ChatHarness"]


class ChatHarness(vf.Harness[vf.HarnessConfig]):
    """Chat until a response has no tool call, or the conversation does not fit."""

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_MCP = True
    SUPPORTS_RESUME = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: vf.ModelContext,
        trace: vf.Trace,
        runtime: vf.Runtime,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: vf.TaskData,
    ) -> vf.ProgramResult:
        system, prompt = self.resolve_prompt(data)
        messages: list[Any] = [{"role": "system", "content": system}] if system else []
        if isinstance(prompt, str):
            messages.append({"role": "user", "content": prompt})
        else:
            messages += [message_to_wire(message) for message in prompt or ()]
        servers = {name: {"url": url, "timeout": self.config.tool_timeout} for name, url in mcp_urls.items()}
        async with AsyncExitStack() as stack:
            client = AsyncOpenAI(base_url=endpoint, api_key=secret, max_retries=0, timeout=None)  # the trainer cancels
            await stack.enter_async_context(client)
            tools, dispatch, connections = await connect_mcp({"mcpServers": servers}, stack)
            options: dict[str, Any] = {"model": ctx.model, **({"tools": tools} if tools else {})}
            while True:
                try:
                    reply = await client.chat.completions.create(messages=messages, **options)
                except BadRequestError as error:
                    if "context_length_exceeded" not in str(error):
                        raise
                    break
                message = reply.choices[0].message
                messages.append(message.model_dump(exclude_none=True))
                if not message.tool_calls:
                    break
                for call in message.tool_calls:
                    content = await _call_tool(connections, dispatch, call.function)
                    messages.append({"role": "tool", "tool_call_id": call.id, "content": content})
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")


async def _call_tool(connections: dict[str, Any], dispatch: dict[str, Any], function: Any) -> Any:
    """Return the result of the tool, or what was wrong with the call."""
    if function.name not in dispatch:
        return f"error: there is no tool {function.name!r}"
    try:
        arguments = json.loads(function.arguments or "{}")
    except ValueError as error:
        return f"error: the arguments are not JSON: {error}"
    if not isinstance(arguments, dict):
        return "error: the arguments are not a JSON object"
    return await call_mcp(connections, dispatch, function.name, arguments)
