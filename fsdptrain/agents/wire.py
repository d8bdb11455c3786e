"""Checked bodies, errors and server-sent events of the endpoint."""

import json
import logging
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError, model_validator

from fsdptrain.agents.calls import Answer, CallError

log = logging.getLogger(__name__)


class Body(BaseModel):
    """A JSON object of a request. A field that is null counts as absent, and one that is not declared is ignored."""

    model_config = ConfigDict(extra="ignore", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _without_null(cls, body: Any) -> Any:
        return {k: value for k, value in body.items() if value is not None} if isinstance(body, dict) else body


B = TypeVar("B", bound=Body)


def parse(model: type[B], body: bytes) -> B:
    """Return the checked body of a request. Warns of ignored fields. Raises CallError 400 for the first wrong field."""
    try:
        found = model.model_validate_json(body)
    except ValidationError as error:
        raise _refusal(error) from None
    for name in found.model_extra or ():
        _tell_ignored(name[:80])
    return found


@cache
def _tell_ignored(name: str) -> None:
    log.warning("agents request %r, which has no effect here", name)


def _refusal(error: ValidationError) -> CallError:
    errors = error.errors(include_url=False, include_context=False)
    first = min(errors, key=lambda one: one["loc"][-1:] != ("type",))  # a wrong type explains the other errors
    path = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in first["loc"])
    path = path.lstrip(".")[:200]
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
