"""Completions of a text or of token ids, as in the OpenAI API, with the token ids of vLLM."""

import itertools
import time
import uuid
from collections.abc import Iterator
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from fsdptrain.agents.calls import Answer, Choice, ModelCall
from fsdptrain.agents.wire import ChoicesRequest, Conversations, event, usage


def _one_prompt(prompt: Any) -> Any:
    """Return a prompt as token ids, or as a list with one text."""
    if isinstance(prompt, str):
        return [prompt]
    if isinstance(prompt, list) and prompt:
        if isinstance(prompt[0], list):
            return prompt[0] if len(prompt) == 1 else _refuse_prompts()
        if all(type(token) is int and token >= 0 for token in prompt):
            return prompt
        if all(isinstance(text, str) for text in prompt):
            return prompt if len(prompt) == 1 else _refuse_prompts()
    raise ValueError("must be a text or a list of token ids")


def _refuse_prompts() -> Any:
    raise ValueError("several prompts in one request are not supported")


class CompletionRequest(ChoicesRequest):
    neutral = {**ChoicesRequest.neutral, "echo": (False,), "suffix": ("",), "best_of": (1,)}
    prompt: Annotated[list[int] | list[str], BeforeValidator(_one_prompt)]
    logprobs: int | None = Field(None, ge=0, le=1)  # only those of the sampled tokens are returned

    def to_call(self, conversations: Conversations) -> ModelCall:
        return ModelCall(
            text=self.prompt[0] if isinstance(self.prompt[0], str) else None,
            token_ids=None if isinstance(self.prompt[0], str) else [int(token) for token in self.prompt],
            num_choices=self.n,
            max_tokens=self.max_tokens,
            stop=self.stop,
            sampling=self.sampling,
        )

    def to_body(self, answer: Answer, model: str, conversations: Conversations) -> dict[str, Any]:
        prompt = {"prompt_token_ids": list(answer.prompt_token_ids)} if self.return_token_ids else {}
        return {
            "id": f"cmpl-{uuid.uuid4().hex}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": model,
            "choices": [
                {
                    "index": index,
                    "text": choice.text,
                    "logprobs": None if self.logprobs is None else _logprobs(choice),
                    "finish_reason": "length" if choice.finish_reason == "length" else "stop",
                    **prompt,
                    **self.token_ids(choice),
                }
                for index, choice in enumerate(answer.choices)
            ],
            "usage": usage(answer),
            **prompt,
        }

    def to_events(self, body: dict[str, Any]) -> Iterator[str]:
        chunk = {name: body[name] for name in ("id", "object", "created", "model")}
        for choice in body["choices"]:
            yield event({**chunk, "choices": [choice]})
        yield from self.usage_events(chunk, body)


def _logprobs(choice: Choice) -> dict[str, Any]:
    return {
        "tokens": list(choice.tokens),
        "token_logprobs": list(choice.logprobs),
        "top_logprobs": None,
        "text_offset": list(itertools.accumulate((len(token) for token in choice.tokens[:-1]), initial=0))
        if choice.tokens
        else [],
    }
