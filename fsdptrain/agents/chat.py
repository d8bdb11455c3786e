"""Chat completions of the OpenAI API, with the token ids of vLLM."""

from collections.abc import Iterator, Sequence
from typing import Any, Literal

from pydantic import Field

from fsdptrain.agents.calls import Answer, Choice, ModelCall
from fsdptrain.agents.wire import Body, ChoicesRequest, Conversations, Function, Text, event, template_call


class CalledFunction(Body):
    name: str
    arguments: str = ""


class EarlierCall(Body, ignored="index"):
    id: str = ""
    type: Literal["function"] = "function"
    function: CalledFunction


class Message(Body, ignored="name refusal annotations", neutral={"audio": (), "function_call": ()}):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Text = ""
    tool_calls: Sequence[EarlierCall] = ()
    tool_call_id: str | None = None

    def for_template(self) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "system" if self.role == "developer" else self.role, "content": self.content}
        if self.tool_calls:
            message["tool_calls"] = [
                template_call(call.id, call.function.name, call.function.arguments) for call in self.tool_calls
            ]
        if self.tool_call_id is not None:
            message["tool_call_id"] = self.tool_call_id
        return message


class Tool(Body):
    type: Literal["function"]
    function: Function


class ChatRequest(
    ChoicesRequest,
    ignored="metadata parallel_tool_calls prompt_cache_key prompt_cache_options prompt_cache_retention "
    "reasoning_effort safety_identifier service_tier store verbosity",
    neutral={
        "function_call": ("auto", "none"),
        "functions": ([],),
        "modalities": (["text"],),
        "response_format": ({"type": "text"},),
        "top_logprobs": (0,),
    },
):
    messages: Sequence[Message] = Field(min_length=1)
    tools: Sequence[Tool] = ()
    tool_choice: Literal["auto", "none"] = "auto"
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool = False

    def to_call(self, conversations: Conversations) -> ModelCall:
        return ModelCall(
            messages=[message.for_template() for message in self.messages],
            tools=[] if self.tool_choice == "none" else [tool.function.for_template() for tool in self.tools],
            num_choices=self.n,
            max_tokens=self.max_completion_tokens or self.max_tokens,
            stop=self.stop,
            sampling=self.sampling,
        )

    def to_body(self, answer: Answer, model: str, conversations: Conversations) -> dict[str, Any]:
        choices = [self._choice(index, choice) for index, choice in enumerate(answer.choices)]
        return self.body("chat.completion", answer, model, choices)

    def _choice(self, index: int, choice: Choice) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": choice.content, "refusal": None}
        if choice.tool_calls:
            message["content"] = choice.content or None
            message["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in choice.tool_calls
            ]
        logprobs = {"content": _logprobs(choice), "refusal": None} if self.logprobs else None
        return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": choice.finish_reason}

    def to_events(self, body: dict[str, Any]) -> Iterator[str]:
        """Yield chunks: for each choice its role, its content, each call, and how it ended."""
        chunk = {name: body[name] for name in ("id", "created", "model")} | {"object": "chat.completion.chunk"}
        first = {name: body[name] for name in ("prompt_token_ids",) if name in body}
        for choice in body["choices"]:
            message = choice["message"]
            deltas: list[dict[str, Any]] = [{"content": message["content"]}] if message["content"] else []
            deltas += [{"tool_calls": [{"index": i, **call}]} for i, call in enumerate(message.get("tool_calls", ()))]
            chunks = [
                {"delta": delta, "finish_reason": None} for delta in [{"role": "assistant", "content": ""}, *deltas]
            ]
            chunks.append({"delta": {}, "finish_reason": choice["finish_reason"]})
            chunks[1] |= {name: choice[name] for name in ("logprobs", "token_ids") if name in choice}
            for part in chunks:
                yield event({**chunk, **first, "choices": [{"index": choice["index"], **part}]})
                first = {}
        yield from self.last_events(chunk, body)


def _logprobs(choice: Choice) -> list[dict[str, Any]]:
    return [
        {"token": token, "bytes": list(token.encode()), "logprob": logprob, "top_logprobs": []}
        for token, logprob in zip(choice.tokens, choice.logprobs, strict=True)
    ]
