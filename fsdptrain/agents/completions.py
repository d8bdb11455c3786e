"""Completions of a text or of token ids, as in the OpenAI API, with the token ids of vLLM."""

import itertools
from collections.abc import Iterator
from typing import Annotated, Any

from pydantic import Field, PlainValidator

from fsdptrain.agents.calls import Answer, Choice, ModelCall
from fsdptrain.agents.wire import ChoicesRequest, Conversations, event


def _one_prompt(prompt: Any) -> str | list[int]:
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], (str, list)):
        prompt = prompt[0]
    is_tokens = isinstance(prompt, list) and prompt and all(type(token) is int and token >= 0 for token in prompt)
    if not isinstance(prompt, str) and not is_tokens:
        raise ValueError("must be one text or one list of token ids")
    return prompt


class CompletionRequest(ChoicesRequest, neutral={"echo": (False,), "suffix": ("",), "best_of": (1,)}):
    prompt: Annotated[str | list[int], PlainValidator(_one_prompt)]
    logprobs: int | None = Field(None, ge=0, le=1)  # only those of the sampled tokens are returned

    def to_call(self, conversations: Conversations) -> ModelCall:
        return ModelCall(
            text=self.prompt if isinstance(self.prompt, str) else None,
            token_ids=None if isinstance(self.prompt, str) else self.prompt,
            num_choices=self.n,
            max_tokens=self.max_tokens,
            stop=self.stop,
            sampling=self.sampling,
        )

    def to_body(self, answer: Answer, model: str, conversations: Conversations) -> dict[str, Any]:
        choices = [
            {
                "index": index,
                "text": choice.text,
                "logprobs": None if self.logprobs is None else _logprobs(choice),
                "finish_reason": "length" if choice.finish_reason == "length" else "stop",
                **({"prompt_token_ids": list(answer.prompt_token_ids)} if self.return_token_ids else {}),
            }
            for index, choice in enumerate(answer.choices)
        ]
        return self.body("text_completion", answer, model, choices)

    def to_events(self, body: dict[str, Any]) -> Iterator[str]:
        chunk = {name: body[name] for name in ("id", "object", "created", "model")}
        for choice in body["choices"]:
            yield event({**chunk, "choices": [choice]})
        yield from self.last_events(chunk, body)


def _logprobs(choice: Choice) -> dict[str, Any]:
    offsets = list(itertools.accumulate((len(token) for token in choice.tokens), initial=0))[:-1]
    logprobs = list(choice.logprobs)
    return {"tokens": list(choice.tokens), "token_logprobs": logprobs, "top_logprobs": None, "text_offset": offsets}
