"""What the dialects of the endpoint share: checked bodies, errors and server-sent events."""

import json
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from fsdptrain.agents.calls import Answer, CallError

Messages = Sequence[Mapping[str, Any]]
Conversations = dict[str, Messages]  # the messages up to each response of an episode, by the id of the response

_TEXT_PARTS = ("text", "input_text", "output_text")


class Body(BaseModel):
    """A JSON object of a request. A field that is not declared, and not known to be without effect, is an error.

    `ignored` are fields that may have any value, `neutral` values of other fields that ask for nothing.
    """

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
    without_effect: ClassVar[Mapping[str, Sequence[Any] | None]] = {}

    def __init_subclass__(cls, ignored: str = "", neutral: Mapping[str, Sequence[Any]] | None = None) -> None:
        cls.without_effect = {**cls.without_effect, **dict.fromkeys(ignored.split()), **(neutral or {})}

    @model_validator(mode="before")
    @classmethod
    def _drop_what_has_no_effect(cls, body: Any) -> Any:
        if not isinstance(body, dict):
            return body

        def has_effect(name: str, value: Any) -> bool:
            values = cls.without_effect.get(name, ())
            is_known = name in cls.without_effect or name in cls.model_fields
            return values is not None and value not in values and not (value is None and is_known)

        return {name: value for name, value in body.items() if has_effect(name, value)}


B = TypeVar("B", bound=Body)


def parse(model: type[B], body: bytes) -> B:
    """Return the checked body of a request. Raises CallError 400, which names the first wrong field."""
    try:
        return model.model_validate_json(body)
    except ValidationError as error:
        raise refusal(error) from None


def refusal(error: ValidationError, within: str = "") -> CallError:
    errors = error.errors(include_url=False, include_context=False)
    first = min(errors, key=lambda one: one["loc"][-1:] != ("type",))  # a wrong type explains the other errors
    path = within + "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in first["loc"])
    path = path.lstrip(".")[:200]
    if first["type"] == "extra_forbidden":
        message = f"{path}={json.dumps(first['input'])[:80]} is unknown or not supported"
        return CallError(400, message, param=path, code="unsupported_parameter")
    message = first["msg"].removeprefix("Value error, ")
    return CallError(400, f"{path}: {message}" if path else message, param=path or None, code="invalid_value")


def _join_text(content: Any) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ValueError("must be a text or a list of content parts")
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else type(part).__name__
        if kind not in _TEXT_PARTS or not isinstance(part.get("text"), str):
            raise ValueError(f"a content part of type {kind!r} is not supported, or has no text")
    return "".join(part["text"] for part in content)


Text = Annotated[str, BeforeValidator(_join_text)]
Texts = Annotated[Sequence[str], BeforeValidator(lambda value: [value] if isinstance(value, str) else value)]


class Function(Body, ignored="strict"):  # generation is not constrained
    name: str = Field(min_length=1)
    description: str | None = None
    parameters: dict[str, Any] | None = None

    def for_template(self) -> dict[str, Any]:
        return {"type": "function", "function": self.model_dump(exclude_unset=True, exclude={"type"})}


def template_call(id_: str, name: str, arguments: str) -> dict[str, Any]:
    """Return a call of a tool as chat templates expect it, with its arguments as a mapping if they are one."""
    try:
        parsed = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        parsed = None
    function = {"name": name, "arguments": parsed if isinstance(parsed, dict) else arguments}
    return {"id": id_, "type": "function", "function": function}


class ModelRequest(Body):
    """The fields that all dialects have."""

    model: str = ""  # any name is served by the model in training
    stream: bool = False
    temperature: float | None = Field(None, ge=0)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1)
    min_p: float | None = Field(None, ge=0, le=1)

    @property
    def sampling(self) -> dict[str, float]:
        return self.model_dump(include={"temperature", "top_p", "top_k", "min_p"}, exclude_none=True)


class StreamOptions(Body, ignored="include_obfuscation"):
    include_usage: bool = False


class ChoicesRequest(
    ModelRequest,
    ignored="user seed",
    neutral={"presence_penalty": (0,), "frequency_penalty": (0,), "logit_bias": ({},)},
):
    """The fields that chat completions and completions have."""

    max_tokens: int | None = Field(None, ge=1)
    n: int = Field(1, ge=1, le=1024)
    stop: Texts = Field((), max_length=64)
    stream_options: StreamOptions = StreamOptions()
    return_token_ids: bool = False  # of vLLM

    def body(self, kind: str, answer: Answer, model: str, choices: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        head = {"id": f"{kind}-{uuid.uuid4().hex}", "object": kind, "created": int(time.time()), "model": model}
        if not self.return_token_ids:
            return {**head, "choices": choices, "usage": usage(answer)}
        choices = [
            {**body, "token_ids": list(choice.token_ids)} for body, choice in zip(choices, answer.choices, strict=True)
        ]
        prompt = list(answer.prompt_token_ids)
        return {**head, "choices": choices, "usage": usage(answer), "prompt_token_ids": prompt}

    def last_events(self, chunk: Mapping[str, Any], body: Mapping[str, Any]) -> Iterator[str]:
        if self.stream_options.include_usage:
            yield event({**chunk, "choices": [], "usage": body["usage"]})
        yield "data: [DONE]\n\n"


def usage(answer: Answer) -> dict[str, int]:
    prompt, completion = len(answer.prompt_token_ids), sum(len(choice.token_ids) for choice in answer.choices)
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def event(data: Mapping[str, Any], kind: str | None = None) -> str:
    return ("" if kind is None else f"event: {kind}\n") + f"data: {json.dumps(data)}\n\n"


def error_object(error: CallError) -> dict[str, Any]:
    """Return the body of a refused call, as OpenAI formats it."""
    kind = "server_error" if error.status >= 500 else "invalid_request_error"
    return {"error": {"message": str(error)[:1000], "type": kind, "param": error.param, "code": error.code}}


def error_event(error: CallError) -> str:
    """Return the event of an error after the headers. Clients of all dialects raise on its `error`."""
    body = error_object(error)
    details = {name: body["error"][name] for name in ("message", "param", "code")}
    return event({"type": "error", "sequence_number": 0, **details, **body}, "error")
