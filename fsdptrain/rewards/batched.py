"""Rewards of lists: what they return, and the arguments of those of TRL. No torch: workers import it."""

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from fsdptrain.rewards.calls import reason
from fsdptrain.rewards.values import WRONG
from fsdptrain.types import Prompt


def values_of(value: Any, num_samples: int, *, place: str) -> list[Any] | str:
    """Return the values of the samples, or why there are none. place: of the function."""
    try:
        values = list(value) if isinstance(value, Iterable) and not isinstance(value, str | bytes | Mapping) else None
    except Exception as error:  # noqa: BLE001  # a generator of the user
        return reason(error)
    if values is None or len(values) != num_samples:
        what = f"{value!r:.80}" if values is None else f"{len(values)} values"
        return f"the reward returned {what}{WRONG}list with one value for each of {num_samples} samples ({place})"
    return values


def columns(function: Callable[..., Any], prompts: Sequence[Prompt], responses: Sequence[str]) -> dict[str, Any]:
    """Return the keyword arguments of TRL: messages if the prompts in the data are messages, else texts."""
    originals = [prompt.source or prompt.text for prompt in prompts]
    names = dict.fromkeys(name for prompt in prompts for name in prompt.metadata if name != "prompt")
    found = {
        **{name: [prompt.metadata.get(name) for prompt in prompts] for name in names},
        "prompts": originals,
        "completions": [
            text if isinstance(original, str) else [{"role": "assistant", "content": text}]
            for original, text in zip(originals, responses, strict=True)
        ],
    }
    parameters = inspect.signature(function).parameters
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    return found if takes_all else {name: found[name] for name in parameters if name in found}
