"""Checked bodies, errors and server-sent events of the endpoint."""

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError, model_validator

from fsdptrain.agents.calls import Answer, CallError


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
        raise _refusal(error) from None


def _refusal(error: ValidationError) -> CallError:
    errors = error.errors(include_url=False, include_context=False)
    first = min(errors, key=lambda one: one["loc"][-1:] != ("type",))  # a wrong type explains the other errors
    path = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in first["loc"])
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
        if kind != "text" or not isinstance(part.get("text"), str):
            raise ValueError(f"a content part of type {kind!r} is not supported, or has no text")
    return "".join(part["text"] for part in content)


Text = Annotated[str, BeforeValidator(_join_text)]
Texts = Annotated[Sequence[str], BeforeValidator(lambda value: [value] if isinstance(value, str) else value)]


def template_call(id_: str, name: str, arguments: str) -> dict[str, Any]:
    """Return a call of a tool as chat templates expect it, with its arguments as a mapping if they are one."""
    try:
        parsed = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        parsed = None
    function = {"name": name, "arguments": parsed if isinstance(parsed, dict) else arguments}
    return {"id": id_, "type": "function", "function": function}


def usage(answer: Answer) -> dict[str, int]:
    prompt, completion = len(answer.prompt_token_ids), sum(len(choice.token_ids) for choice in answer.choices)
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def event(data: Mapping[str, Any]) -> str:
    return f"data: {json.dumps(data)}\n\n"
