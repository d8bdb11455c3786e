"""Supervised samples: a response after a prompt, a conversation, or text."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import groupby
from typing import TYPE_CHECKING

from transformers import PreTrainedTokenizerBase

from fsdptrain.config import Config, DataConfig
from fsdptrain.config.data import LossOn
from fsdptrain.data.chat import TurnRenderer
from fsdptrain.data.prompts import make_prompt
from fsdptrain.data.rows import Row, as_messages
from fsdptrain.data.sft_forms import Conversation, Text, Tokens, UnusableRowError, episode_of, turn_weights, weight_of
from fsdptrain.data.sft_masks import ConversationEncoder
from fsdptrain.data.text import plain_tokens, tokens_of
from fsdptrain.errors import ConfigError, DataError
from fsdptrain.types import Prompt, Sample

if TYPE_CHECKING:
    from fsdptrain.data.images import PromptProcessor

LONG_PROMPT, OVERLONG = "long prompt", "overlong"  # kinds of `UnusableRowError`


def prompt_maker(
    data: DataConfig, tokenizer: PreTrainedTokenizerBase, processor: "PromptProcessor | None"
) -> Callable[..., Prompt]:
    """Return the function that makes a prompt of a row, without tokens but with images."""
    if processor is None:
        return untokenized
    return partial(make_prompt, tokenizer=tokenizer, data=data, processor=processor)


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
    overlong: str = "drop"  # --overlong-samples: what to do with samples longer than `max_tokens`
    aggregation: str = "token_mean"  # --loss-aggregation

    @classmethod
    def of(cls, config: Config, tokenizer: PreTrainedTokenizerBase, *, num_tokens: int | None) -> "SampleBuilder":
        overlong = config.batch.overlong_samples
        limit = None if overlong == "error" else config.max_tokens_per_pack
        limits = (config.prompt_budget, limit, config.pack_budget, num_tokens)
        return cls(tokenizer, config.data, config.sft.loss_on, *limits, overlong, config.algorithm.loss_aggregation)

    def build(self, prompt: Prompt) -> Sample:
        """Return the sample of an untokenized prompt, or of one with images. Raises UnusableRowError."""
        try:
            token_ids, weights = self._tokens(prompt)
            of_row = weight_of(prompt.metadata, is_row=True)
            weights = [of_row * weight for weight in weights]
            if not math.isfinite(sum(weights)):
                raise UnusableRowError("weight", f"row {prompt.id} has weights in the loss whose sum is not finite")
            sample = make_sample(prompt.id, token_ids, weights)
        except DataError as error:
            kind = error.kind if isinstance(error, UnusableRowError) else "template"
            named = str(error) if prompt.id in str(error) else f"row {prompt.id}: {error}"
            raise UnusableRowError(kind, named) from error
        if sample.token_weights is not None and self.aggregation != "token_mean":
            line = f"row {prompt.id} has weights other than 0 and 1, which need token_mean"
            raise ConfigError(f"--loss-aggregation {self.aggregation}: {line}")
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
        limit = self.max_tokens
        if limit is None or len(sample.token_ids) <= limit:
            return sample
        has_all_images = len(prompt.token_ids) <= limit
        if self.overlong == "truncate" and has_all_images and True in sample.loss_mask[1:limit]:
            return replace(make_sample(prompt.id, token_ids[:limit], weights[:limit]), truncated=True)
        flag = f"--overlong-samples {self.overlong}"
        raise UnusableRowError(OVERLONG, f"{flag} leaves out row {prompt.id}, which is longer than {self.budget}")

    def _tokens(self, prompt: Prompt) -> tuple[list[int], Sequence[float]]:
        """Return token ids (L,) and their weights in the loss (L,), without that of the row."""
        label = prompt.label
        if isinstance(label, UnusableRowError):
            raise label
        if isinstance(label, Conversation):
            return self._encoder.encode(label)
        if isinstance(label, Tokens):
            return label.token_ids, label.loss_mask
        if isinstance(label, Text):
            ids = [*plain_tokens(label.text, self.tokenizer), end_token(self.tokenizer)]
            ids = ids[:-1] if ids[-2:-1] == ids[-1:] else ids  # the text has its end token
            return ids, [1.0] * len(ids)
        if not prompt.token_ids:
            row = Row(prompt.id, prompt.source, label)  # type: ignore[arg-type]
            prompt = replace(make_prompt(row, self.tokenizer, data=self.data), label=label)
        return episode_tokens(prompt, self.tokenizer, renderer=self._renderer, loss_on=self.loss_on)

    @cached_property
    def _encoder(self) -> ConversationEncoder:
        return ConversationEncoder(self.tokenizer, self.data, self.loss_on)

    @cached_property
    def _renderer(self) -> TurnRenderer:
        return TurnRenderer(self.tokenizer, data=self.data)


def end_token(tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the tokenizer's end-of-sequence token. Raises ConfigError if it has none."""
    end = tokenizer.eos_token_id
    if not isinstance(end, int):
        raise ConfigError(
            "--algorithm sft: the tokenizer of --hf-checkpoint has no end-of-sequence token; set eos_token in it"
        )
    return end


def make_sample(group_id: str, token_ids: list[int], weights: Sequence[float]) -> Sample:
    """Return a sample without reward and group; the advantage is 1. Weights of 0 and 1 alone are a mask."""
    mask, token_weights = [weight > 0 for weight in weights], None if {*weights} <= {0, 1} else list(weights)
    return Sample(group_id, token_ids, mask, [0.0] * len(mask), advantage=1.0, token_weights=token_weights)


def episode_tokens(
    prompt: Prompt,
    tokenizer: PreTrainedTokenizerBase,
    *,
    renderer: TurnRenderer | None = None,
    loss_on: LossOn = "assistant",
) -> tuple[list[int], list[float]]:
    """Return token ids (L,) and weights (L,) of a response. The loss covers it and the token that ends a turn.

    The response is tokenized separately, after the prompt tokens, exactly as an engine would have to generate it. A
    label that is a list of messages is an episode after the prompt: the loss covers each assistant turn, and
    `renderer` renders the other messages as it renders observations. Too long samples are handled by
    `pack.drop_overlong`.
    """
    end = renderer.end if renderer is not None and renderer.end is not None else end_token(tokenizer)
    messages = episode_of(prompt)
    of_turns = turn_weights([*as_messages(prompt.source), *messages], loss_on)[-len(messages) :]
    token_ids, weights = list(prompt.token_ids), [float(loss_on == "all")] * len(prompt.token_ids)
    for is_model, group in groupby(range(len(messages)), key=lambda index: messages[index]["role"] == "assistant"):
        first, *others = group
        if is_model:
            ids = tokens_of(messages[first]["content"], tokenizer)
            ids += [] if ids and ids[-1] in (end, tokenizer.eos_token_id) else [end]  # a text may have its end
        else:
            assert renderer is not None, "an episode needs a renderer"
            ids = renderer.between(messages[first : first + len(others) + 1], last_token=token_ids[-1])
        token_ids += ids
        weights += [of_turns[first]] * len(ids)
    return token_ids, weights
