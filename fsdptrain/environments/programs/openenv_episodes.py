"""Episodes of an OpenEnv server, with the Python that has openenv. Started by environments/openenv.py."""
# pyright: reportMissingImports=false

import asyncio
import importlib
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from episode_server import Rows, RunEpisode, main

_SEEDS = 1000  # rows of an environment without tasks
_SHUTDOWN_S = 5  # for requests that run
_FULL_S = 0.2  # between attempts to get one of the sessions of a server
_TOOL_ACTIONS = ("Action", "CallToolAction", "ListToolsAction")  # schemas of environments whose actions are MCP tools
_OWN = ("done", "reward", "metadata")  # fields of each action or observation that are not for the model


@asynccontextmanager
async def open_environment(options: dict[str, Any]) -> AsyncIterator[tuple[Rows, RunEpisode]]:
    """options: those of environments.openenv.OpenEnv, without python"""
    import httpx

    async with _served(options["app"]) if options["app"] else _running(options["url"]) as url:
        async with httpx.AsyncClient(base_url=url, timeout=60) as http:
            schema = (await _get(http, "/schema"))["action"]
            resets = await _resets(http, options["split"], options["num_tasks"])
            about = await _get(http, "/metadata")
        instruction = options["instruction"] or _instruction(about, schema)
        player = Player(url, schema, instruction, options["max_turns"], options["max_tokens"])
        yield [{"prompt": instruction, "label": "", "metadata": {"reset": reset}} for reset in resets], player.run


@asynccontextmanager
async def _running(url: str) -> AsyncIterator[str]:
    yield url.rstrip("/")


@asynccontextmanager
async def _served(app: str) -> AsyncIterator[str]:
    """Serve `package.module:app` on a free port of loopback."""
    import uvicorn

    module, _, name = app.partition(":")
    if not name:
        raise ValueError(f"app={app}: write package.module:app")
    application = getattr(importlib.import_module(module), name)
    config = uvicorn.Config(
        application, host="127.0.0.1", port=0, log_level="warning", timeout_graceful_shutdown=_SHUTDOWN_S
    )
    server = uvicorn.Server(config)
    task = asyncio.create_task(server.serve())
    while not server.started:
        if task.done():
            raise RuntimeError(f"the server of {app} does not start") from task.exception()
        await asyncio.sleep(0.05)
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        await task


async def _get(http: Any, path: str) -> Any:
    return (await http.get(path)).raise_for_status().json()


async def _resets(http: Any, split: str, num_tasks: int | None) -> list[dict[str, Any]]:
    """Return the arguments of `reset`: tasks of a split, or seeds."""
    if not split:
        return [{"seed": seed} for seed in range(num_tasks or _SEEDS)]
    [name] = await _get(http, "/list_environments")
    reply = (await http.post(f"/{name}/num_tasks", json={"split": split})).raise_for_status().json()
    count = reply["num_tasks"] if num_tasks is None else min(reply["num_tasks"], num_tasks)
    return [{"split": split, "index": index} for index in range(count)]


def _instruction(about: dict[str, Any], schema: dict[str, Any]) -> str:
    head = about.get("description") or about.get("name") or "Act in an environment."
    if schema.get("title") in _TOOL_ACTIONS:
        return head
    field = _only_field(schema)
    if field is not None:
        hint = schema["properties"][field].get("description", "")
        return f"{head}\nAnswer each observation with the {field}{f' ({hint})' if hint else ''} and nothing else."
    fields = {name: value for name, value in schema.get("properties", {}).items() if name not in _OWN}
    return f"{head}\nAnswer each observation with one JSON object with these fields: {json.dumps(fields)}"


def _only_field(schema: dict[str, Any]) -> str | None:
    """Return the field of an action that is one text."""
    names = [name for name in schema.get("properties", {}) if name not in _OWN]
    return names[0] if len(names) == 1 and schema["properties"][names[0]].get("type") == "string" else None


class InvalidActionError(ValueError):
    """A response that is no action."""


@dataclass(frozen=True)
class Player:
    """Plays episodes: an observation is a user message or the result of a tool, a response is an action."""

    url: str
    schema: dict[str, Any]  # of actions
    instruction: str
    max_turns: int
    max_tokens: int | None  # of an action

    async def run(self, request: dict[str, Any]) -> dict[str, float]:
        """Return the sum of the rewards, and whether the episode ended with a response that is no action."""
        from openai import AsyncOpenAI, BadRequestError
        from openenv.core import GenericEnvClient

        model = AsyncOpenAI(base_url=request["url"], api_key=request["key"], max_retries=0, timeout=None)
        environment = GenericEnvClient(base_url=self.url, message_timeout_s=3600)
        total, invalid = 0.0, 0.0
        async with model, environment:
            result = await _reset(environment, request["metadata"]["reset"])
            tools = await self._tools(environment)
            options = {"model": request["model"], **({"tools": tools} if tools else {})}
            options |= {"max_tokens": self.max_tokens} if self.max_tokens else {}
            messages: list[Any] = [{"role": "system", "content": self.instruction}, _message(result)]
            try:
                num_actions = 0
                while not result.done and num_actions < self.max_turns:
                    reply = await model.chat.completions.create(messages=messages, **options)
                    message = reply.choices[0].message
                    messages.append(message.model_dump(exclude_none=True))
                    actions = self._actions(message, tools=bool(tools))
                    for call, action in actions[: self.max_turns - num_actions]:
                        result, num_actions = await _step(environment, action), num_actions + 1
                        total += float(result.reward or 0)
                        messages.append(_message(result, **call))
                        if result.done:
                            break
                    if not actions:
                        break
            except InvalidActionError:
                invalid = 1.0
            except BadRequestError as error:
                if error.code != "context_length_exceeded":
                    raise
        return {"reward": total, "invalid_action": invalid}

    async def _tools(self, environment: Any) -> list[dict[str, Any]]:
        if self.schema.get("title") not in _TOOL_ACTIONS:
            return []
        found = (await environment.step({"type": "list_tools"})).observation["tools"]
        return [
            {
                "type": "function",
                "function": {
                    "name": tool["name"],
                    "description": tool.get("description") or "",
                    "parameters": tool.get("input_schema") or {"type": "object"},
                },
            }
            for tool in found
        ]

    def _actions(self, message: Any, *, tools: bool) -> list[tuple[dict[str, Any], dict[str, Any]]]:
        """Return the actions of a response, each with the fields of the message that answers it."""
        if tools:
            calls = message.tool_calls or ()
            return [({"role": "tool", "tool_call_id": call.id}, _tool_action(call.function)) for call in calls]
        text = message.content or ""
        if (field := _only_field(self.schema)) is not None:
            return [({}, {field: text.strip()})]
        return [({}, _json_object(text[text.find("{") : text.rfind("}") + 1]))]


async def _reset(environment: Any, arguments: dict[str, Any]) -> Any:
    """Reset, and wait as long as the server has no free session."""
    while True:
        try:
            return await environment.reset(**arguments)
        except RuntimeError as error:
            if "CAPACITY_REACHED" not in str(error):
                raise
        await environment.close()
        await asyncio.sleep(_FULL_S)
        await environment.connect()


async def _step(environment: Any, action: dict[str, Any]) -> Any:
    try:
        return await environment.step(action)
    except RuntimeError as error:
        if "VALIDATION_ERROR" in str(error):
            raise InvalidActionError(str(error)) from error
        raise


def _tool_action(function: Any) -> dict[str, Any]:
    return {"type": "call_tool", "tool_name": function.name, "arguments": _json_object(function.arguments or "{}")}


def _json_object(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError as error:
        raise InvalidActionError(str(error)) from error
    if not isinstance(found, dict):
        raise InvalidActionError("an action is a JSON object")
    return found


def _message(result: Any, **fields: Any) -> dict[str, Any]:
    """Return an observation as a message of the user, or with other `fields`."""
    return {"role": "user", "content": _text(result.observation), **fields}


def _text(observation: dict[str, Any]) -> str:
    """Return what a tool has returned, the only text, or everything as JSON."""
    shown = {name: value for name, value in observation.items() if name not in _OWN}
    if "tool_name" in shown:
        if shown["error"]:
            return f"error: {shown['error']['message']}"
        if isinstance(shown["result"], dict) and isinstance(shown["result"].get("content"), list):
            return "\n".join(part.get("text") or json.dumps(part) for part in shown["result"]["content"])
    values = list(shown.values())
    return values[0] if len(values) == 1 and isinstance(values[0], str) else json.dumps(shown)


if __name__ == "__main__":
    main(open_environment)
