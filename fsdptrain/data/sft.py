"""Supervised samples: a response after a prompt, a conversation, or text."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby, pairwise
from typing import Any

from transformers import PreTrainedTokenizerBase

from fsdptrain.config import Config, DataConfig
from fsdptrain.config.data import LossOn
from fsdptrain.data.chat import TurnRenderer
from fsdptrain.data.prompts import make_prompt
from fsdptrain.data.rows import Row
from fsdptrain.data.sft_forms import THOUGHTS, Conversation, Text, UnusableRowError
from fsdptrain.data.sft_masks import ConversationEncoder
from fsdptrain.data.tables import written_chat
from fsdptrain.data.text import plain_tokens, tokens_of
from fsdptrain.errors import ConfigError, DataError
from fsdptrain.types import Message, Prompt, Sample

LONG_PROMPT, OVERLONG = "long prompt", "overlong"  # kinds of `UnusableRowError`


def untokenized(row: Row, *, prompt_id: str = "") -> Prompt:
    """Return a row as a prompt without tokens. `SampleBuilder` tokenizes it, on one rank only."""
    return Prompt(prompt_id or row.id, [], "", label=row.label, metadata=row.metadata, source=row.prompt)


@dataclass(frozen=True)
class SampleBuilder:
    """Builds supervised samples."""

    tokenizer: PreTrainedTokenizerBase
    data: DataConfig
    loss_on: LossOn
    max_prompt_len: int  # tokens before the first trained one
    max_tokens: int | None = None  # of a sample; None: longer ones are handled elsewhere
    budget: str = ""  # the options that set `max_tokens`
    num_tokens: int | None = None  # of the model's vocabulary; None: unknown

    @classmethod
    def of(cls, config: Config, tokenizer: PreTrainedTokenizerBase, *, num_tokens: int | None) -> "SampleBuilder":
        limit = config.max_tokens_per_pack if config.batch.overlong_samples == "drop" else None
        limits = (config.prompt_budget, limit, config.pack_budget, num_tokens)
        return cls(tokenizer, config.data, config.sft.loss_on, *limits)

    def build(self, prompt: Prompt) -> Sample:
        """Return the sample of an untokenized prompt, or of one with images. Raises UnusableRowError."""
        try:
            sample = self._build(prompt)
        except DataError as error:
            kind = error.kind if isinstance(error, UnusableRowError) else "template"
            named = str(error) if prompt.id in str(error) else f"row {prompt.id}: {error}"
            raise UnusableRowError(kind, named) from error
        largest = max(sample.token_ids)
        if self.num_tokens is not None and largest >= self.num_tokens and prompt.images is None:
            raise UnusableRowError(
                "unknown token",
                f"row {prompt.id} has token {largest}, and the model has {self.num_tokens} tokens: the tokenizer has "
                "added tokens for which the model was not resized",
            )
        if True not in sample.loss_mask[1:]:
            raise UnusableRowError("no trained token", f"row {prompt.id} has no token to train on")
        if sample.loss_mask.index(True) > self.max_prompt_len:
            raise UnusableRowError(
                LONG_PROMPT,
                f"row {prompt.id} has more than {self.max_prompt_len} tokens before those that are trained: raise "
                "--rollout-max-prompt-len or --max-tokens-per-gpu",
            )
        if self.max_tokens is not None and len(sample.token_ids) > self.max_tokens:
            raise UnusableRowError(
                OVERLONG, f"--overlong-samples drop leaves out row {prompt.id}, which is longer than {self.budget}"
            )
        return sample

    def _build(self, prompt: Prompt) -> Sample:
        label = prompt.label
        if isinstance(label, UnusableRowError):
            raise label
        if isinstance(label, Conversation):
            return make_sample(prompt.id, *self._encoder.encode(label))
        if isinstance(label, Text):
            ids = [*plain_tokens(label.text, self.tokenizer), end_token(self.tokenizer)]
            ids = ids[:-1] if ids[-2:-1] == ids[-1:] else ids  # the text has its end token
            return make_sample(prompt.id, ids, [True] * len(ids))
        if not prompt.token_ids:
            row = Row(prompt.id, prompt.source, label)  # type: ignore[arg-type]
            prompt = replace(make_prompt(row, self.tokenizer, data=self.data), label=label)
        sample = sft_sample(prompt, self.tokenizer, renderer=self._renderer)
        return replace(sample, loss_mask=chosen(sample.loss_mask, self.loss_on))

    @cached_property
    def _encoder(self) -> ConversationEncoder:
        return ConversationEncoder(self.tokenizer, self.data, self.loss_on)

    @cached_property
    def _renderer(self) -> TurnRenderer:
        return TurnRenderer(self.tokenizer, data=self.data)


def chosen(mask: Sequence[bool], loss_on: LossOn) -> list[bool]:
    """Return the mask of all assistant turns as that of all tokens, of the same turns, or of the last turn."""
    if loss_on == "all":
        return [True] * len(mask)
    if loss_on == "assistant" or True not in mask:
        return list(mask)
    stop = len(mask) - mask[::-1].index(True)
    start = stop - [*mask[:stop][::-1], False].index(False)
    return [start <= index < stop for index in range(len(mask))]


def end_token(tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the tokenizer's end-of-sequence token. Raises ConfigError if it has none."""
    end = tokenizer.eos_token_id
    if not isinstance(end, int):
        raise ConfigError(
            "--algorithm sft: the tokenizer of --hf-checkpoint has no end-of-sequence token; set eos_token in it"
        )
    return end


def make_sample(group_id: str, token_ids: list[int], loss_mask: list[bool]) -> Sample:
    """Return a sample without reward and group; the advantage is 1."""
    return Sample(group_id, token_ids, loss_mask, rollout_logprobs=[0.0] * len(token_ids), advantage=1.0)


def sft_sample(prompt: Prompt, tokenizer: PreTrainedTokenizerBase, *, renderer: TurnRenderer | None = None) -> Sample:
    """Build the sample of a response. The loss covers the response and the tokenizer's end token.

    The response is tokenized separately, after the prompt tokens, exactly as an engine would have to generate it. A
    label that is a list of messages is an episode after the prompt: the loss covers each assistant turn, and
    `renderer` renders the other messages as it renders observations. Too long samples are handled by
    `pack.drop_overlong`.
    """
    end = end_token(tokenizer)
    token_ids, loss_mask = list(prompt.token_ids), [False] * len(prompt.token_ids)
    for is_model, messages in groupby(_episode(prompt), key=lambda message: message["role"] == "assistant"):
        if is_model:
            [message] = messages
            ids = tokens_of(message["content"], tokenizer)
            ids += [] if ids[-1:] == [end] else [end]  # a text may have the end token
        else:
            assert renderer is not None, "an episode needs a renderer"
            ids = renderer.between(list(messages), last_token=end)
        token_ids += ids
        loss_mask += [is_model] * len(ids)
    return make_sample(prompt.id, token_ids, loss_mask)


def _episode(prompt: Prompt) -> Sequence[Message]:
    """Return the label as messages that start and end with the assistant, without consecutive assistant messages."""
    label: Any = written_chat(prompt.label) if isinstance(prompt.label, str) else prompt.label
    if label is None or label in ("", []):
        raise UnusableRowError(
            "no response", f"row {prompt.id} has no response; --label-key names the column that holds it"
        )
    if isinstance(label, bool | Mapping):
        raise UnusableRowError("no response", f"the response of row {prompt.id} is {label!r:.60}, not text or messages")
    if not isinstance(label, list):
        return [{"role": "assistant", "content": str(label)}]
    is_episode = all(isinstance(m, Mapping) and m.get("role") and isinstance(m.get("content"), str) for m in label)
    for name in ("tool_calls", "function_call", *THOUGHTS):  # their text depends on the template
        if any(isinstance(m, Mapping) and m.get(name) for m in label):
            raise DataError(
                f"--label-key: the response of row {prompt.id} has {name}, which only the chat template can render: "
                "write the whole conversation into one column `messages`, see docs/sft.md"
            )
    is_assistant = [message["role"] == "assistant" for message in label] if is_episode else []
    if not is_episode or not (is_assistant[0] and is_assistant[-1]) or any(a and b for a, b in pairwise(is_assistant)):
        raise UnusableRowError(
            "not an episode",
            f"the response of row {prompt.id} is a list, {str(label)[:80]}; it is messages with role "
            "and content, the first and the last of the assistant, and others between its turns",
        )
    return label
