"""Tokenized prompts from rows, and an infinite, seeded, resumable stream of them."""

import hashlib
import re
from collections import deque
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from transformers import PreTrainedTokenizerBase

from fsdptrain.config import DataConfig, RolloutConfig
from fsdptrain.data.rows import Row, Rows, as_messages, content_hash
from fsdptrain.data.sources import GENERATOR
from fsdptrain.data.text import plain_tokens, render_chat, tokens_of
from fsdptrain.errors import ConfigError, DataError
from fsdptrain.registry import suggest
from fsdptrain.types import Images, Message, Prompt

if TYPE_CHECKING:
    from fsdptrain.data.images import PromptProcessor

ANSWER_TAGS_PROMPT = (
    "Reason about the question first. Then give the final answer, and nothing else, inside <answer></answer> tags, "
    "for example <answer>42</answer>."
)
MOST_UNUSABLE = 1000  # rows in random order before the first usable one
RESERVED_TEMPLATE_KWARGS = ("tokenize", "add_generation_prompt", "continue_final_message")


class PromptStream:
    """Infinite stream of prompts, reshuffled in each epoch by `rollout.seed`.

    The stream stores indices, not data. Its state is a few numbers, and a resumed stream continues with the next row.
    Rows whose content is in `exclude` (`content_hash` of the evaluation rows) are skipped. Rows longer than
    `max_prompt_len` tokens (default: `rollout.max_prompt_len`) are skipped and counted in `num_too_long`. From the
    second epoch on, ids include the epoch (`task:17@1`), so that ids, and the random numbers derived from them, are
    unique within a run.

    Prompts stay pending until `record` is called for them. Pending prompts are part of the state and come first in a
    resumed stream, so prompts of unfinished rollouts are neither lost nor repeated.

    All ranks must request and record the same prompts; otherwise their streams diverge.
    """

    def __init__(
        self,
        rows: Rows,
        tokenizer: PreTrainedTokenizerBase,
        *,
        data: DataConfig,
        rollout: RolloutConfig,
        exclude: Collection[str] = (),
        max_prompt_len: int | None = None,
        processor: "PromptProcessor | None" = None,
        make: Callable[..., Prompt] | None = None,
    ) -> None:
        """Create a stream. make: (row, prompt_id=) -> prompt, in place of tokenizing the row as a prompt."""
        if make is None:
            check_template(tokenizer, data)
            make = partial(make_prompt, tokenizer=tokenizer, data=data, processor=processor)
        self.rows = rows
        self.tokenizer = tokenizer
        self.data = data
        self.exclude = frozenset(exclude)
        self.max_prompt_len = max_prompt_len or rollout.max_prompt_len
        self.shuffle = rollout.shuffle
        self.seed = rollout.seed
        self.processor = processor  # None: text-only prompts
        self._make_prompt = make
        self.epoch = 0  # completed epochs
        self.position = 0  # rows visited in this epoch
        self.num_too_long = 0  # skipped rows
        self.num_held_out = 0  # skipped rows that equal a held-out row
        self._order = self._make_order()
        self._num_unusable = [0, 0]  # rows since the last usable one: too long, held out
        self._has_given = False
        self._pending: dict[str, tuple[int, int]] = {}  # pending prompts: id -> (epoch, row)
        self._resumed: deque[tuple[int, int]] = deque()  # prompts that were pending at the checkpoint; returned first

    @property
    def progress(self) -> float:
        """Epochs so far, including the fraction of the current one."""
        return self.epoch + self.position / len(self.rows)

    def next(self, n: int) -> list[Prompt]:
        """Return the next `n` prompts, across epochs. Raises DataError if no row is usable."""
        prompts: list[Prompt] = []
        while len(prompts) < n:
            if self._resumed:
                place = self._resumed.popleft()
                prompts.append(self._make(place[0], self.rows[place[1]]))
                self._pending[prompts[-1].id] = place
            elif (prompt := self._prompt_of_next_row()) is not None:
                prompts.append(prompt)
        return prompts

    def record(self, prompt: Prompt) -> None:
        """Record that a returned prompt is no longer pending."""
        del self._pending[prompt.id]

    def state_dict(self) -> dict[str, Any]:
        state = {
            "epoch": self.epoch,
            "position": self.position,
            "seed": self.seed,
            "num_rows": len(self.rows),
            "num_too_long": self.num_too_long,
            "num_held_out": self.num_held_out,
        }
        if pending := [*self._pending.values(), *self._resumed]:
            state["pending"] = pending
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state`. Raises DataError if the number of rows has changed."""
        if state["num_rows"] != len(self.rows):
            raise DataError(
                f"--prompt-data {self.data.prompt_data} has {len(self.rows)} training rows, {state['num_rows']} "
                "when the checkpoint was written: resume with the same data and --eval-size, or use --resume never"
            )
        self.epoch, self.position, self.seed = state["epoch"], state["position"], state["seed"]
        self.num_too_long, self.num_held_out = state["num_too_long"], state.get("num_held_out", 0)
        self._order = self._make_order()
        self._num_unusable, self._has_given = [0, 0], True
        self._pending, self._resumed = {}, deque((epoch, row) for epoch, row in state.get("pending", ()))

    def _prompt_of_next_row(self) -> Prompt | None:
        most = 2 * len(self.rows)  # unusable ones in a row; covers a whole epoch from any starting point
        if sum(self._num_unusable) >= (min(most, MOST_UNUSABLE) if self.shuffle and not self._has_given else most):
            self._raise_none_left()
        epoch, index = self._next_place()
        row = self.rows[index]
        if self.exclude and content_hash(row) in self.exclude:
            self.num_held_out += 1
            self._num_unusable[1] += 1
            return None
        prompt = self._make(epoch, row)
        if self.max_prompt_len is not None and len(prompt.token_ids) > self.max_prompt_len:
            self.num_too_long += 1
            self._num_unusable[0] += 1
            return None
        self._num_unusable, self._has_given = [0, 0], True
        self._pending[prompt.id] = (epoch, index)
        return prompt

    def _next_place(self) -> tuple[int, int]:
        """Move to the next row and return its epoch and its index."""
        if self.position == len(self.rows):
            self.epoch, self.position = self.epoch + 1, 0
            self._order = self._make_order()
        self.position += 1
        return self.epoch, int(self._order[self.position - 1])

    def _make(self, epoch: int, row: Row) -> Prompt:
        prompt_id = f"{row.id}@{epoch}" if epoch else row.id
        return self._make_prompt(row, prompt_id=prompt_id)

    def _raise_none_left(self) -> None:
        too_long, held_out = (min(count, len(self.rows)) for count in self._num_unusable)
        reasons = [f"{too_long} are longer than {self.max_prompt_len} tokens"] * bool(too_long)
        reasons += [f"{held_out} equal a prompt that is held out for evaluation"] * bool(held_out)
        fixes = ["raise --rollout-max-prompt-len (or --max-tokens-per-gpu)"] * bool(too_long)
        fixes += ["lower --eval-size (0 trains on all rows) or add other rows"] * bool(held_out)
        raise DataError(
            f"--prompt-data {self.data.prompt_data}: none of {too_long + held_out} rows can be trained on, "
            f"{' and '.join(reasons)}: {', '.join(fixes)}"
        )

    def _make_order(self) -> torch.Tensor:
        """Return the row order of this epoch. [rows] i64"""
        return permutation(len(self.rows), f"{self.seed}:{self.epoch}" if self.shuffle else None)


def permutation(count: int, key: str | None) -> torch.Tensor:
    """Return 0 to `count` - 1 in an order that depends on `key`; in their order if it is None. [count] i64"""
    if key is None:
        return torch.arange(count)
    digest = hashlib.sha256(key.encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
    return torch.randperm(count, generator=generator)


def make_prompt(
    row: Row,
    tokenizer: PreTrainedTokenizerBase,
    *,
    data: DataConfig,
    prompt_id: str = "",
    processor: "PromptProcessor | None" = None,
) -> Prompt:
    """Tokenize a row. Special tokens come from either the template or the tokenizer, never from both."""
    images: Images | None = None
    data = data.model_copy(update=row.options) if row.options else data
    try:
        if processor is not None:
            from fsdptrain.data.images import read_images

            render = partial(_render_row, tokenizer=tokenizer, data=data, row_id=row.id)
            token_ids, images = read_images(row, processor, render, column=processor.image_key)
        elif data.apply_chat_template:
            text = _render_row(as_messages(row.prompt), tokenizer, data=data, row_id=row.id)
            token_ids = tokens_of(text, tokenizer)
        else:
            if not isinstance(row.prompt, str):
                raise DataError(f"row {row.id} is a list of chat messages, which need --apply-chat-template")
            system_prompt = system_prompt_of(data)
            token_ids = plain_tokens(f"{system_prompt}\n\n{row.prompt}" if system_prompt else row.prompt, tokenizer)
    except DataError as error:
        named = str(error) if f"row {row.id}" in str(error) else f"row {row.id}: {error}"
        raise DataError(named) from error
    if not token_ids:
        raise DataError(f"--input-key {data.input_key}: row {row.id} is an empty prompt")
    return Prompt(
        id=prompt_id or row.id,
        token_ids=list(token_ids),
        text=str(tokenizer.decode(token_ids)),
        label=row.label,
        metadata=row.metadata,
        images=images,
        source=row.prompt,
    )


def check_template(tokenizer: PreTrainedTokenizerBase, data: DataConfig) -> None:
    """Raise ConfigError if the required chat template is missing, or a template argument is reserved or not read."""
    if data.apply_chat_template and tokenizer.chat_template is None:
        raise ConfigError(
            "--apply-chat-template: the tokenizer of --hf-checkpoint has no chat template; "
            "use --no-apply-chat-template to train on plain text"
        )
    for name in RESERVED_TEMPLATE_KWARGS:
        if name in data.chat_template_kwargs:
            raise ConfigError(
                f"--chat-template-kwargs must not set {name}: prompts always end where the response begins"
            )
    for name in data.chat_template_kwargs:
        if not reads(tokenizer, name):
            close = suggest(name, _words(tokenizer))
            raise ConfigError(f"--chat-template-kwargs {name}: the template of --hf-checkpoint does not read it{close}")


def reads(tokenizer: PreTrainedTokenizerBase, name: str) -> bool:
    """Return whether the chat template can read the argument `name`: whether it contains the word."""
    return name in _words(tokenizer)


def _words(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    return re.findall(r"\w+", str(tokenizer.chat_template))


def system_prompt_of(data: DataConfig) -> str:
    if data.system_prompt != "auto":
        return data.system_prompt
    return ANSWER_TAGS_PROMPT if data.prompt_data.startswith(GENERATOR) else ""


def _render_row(messages: list[Message], tokenizer: PreTrainedTokenizerBase, *, data: DataConfig, row_id: str) -> str:
    """Render the chat of a row as text, with the system prompt. If it ends with an assistant message, continue that."""
    prefilled = messages[-1]["role"] == "assistant"

    def render(messages: list[Message]) -> str:
        options = {"generation": not prefilled, "continue_final_message": prefilled}
        text = render_chat(messages, tokenizer, data, **options)
        content: Any = messages[-1].get("content") or ""
        start = content if isinstance(content, str) else content[-1].get("text", "")
        if prefilled and not text.endswith(start):
            raise DataError(
                "it changes or drops the beginning of the response, the last message: write that message as the "
                "template renders it, or use --no-apply-chat-template"
            )
        return text

    try:
        messages, text = render_with_system(messages, system_prompt_of(data), render)
        if any(message["role"] == "tool" or message.keys() - {"role", "content"} for message in messages):
            from fsdptrain.data.sft_forms import not_shown, warn_once

            for error in not_shown(messages, text, render):
                if error.kind == "tools":
                    raise error
                warn_once(f"prompts: {error}")
        return text
    except DataError as error:
        raise DataError(f"the chat template of --hf-checkpoint cannot render row {row_id}: {error}") from error


def render_with_system(
    messages: list[Message], system_prompt: str, render: Callable[[list[Message]], str]
) -> tuple[list[Message], str]:
    """Return messages with the system prompt, in the form that the template renders, and the rendering.

    The system prompt goes into the first message if the template has no system role (gemma raises, others omit it). A
    system message in the row takes precedence.
    """
    if not system_prompt or messages[0]["role"] == "system":
        return render_calls(messages, render)
    with suppress(DataError):
        found, text = render_calls([{"role": "system", "content": system_prompt}, *messages], render)
        if system_prompt in text:
            return found, text
    first, *rest = messages
    words, content = f"{system_prompt}\n\n", first.get("content") or ""
    shown = [{"type": "text", "text": words}, *content] if isinstance(content, list) else words + content
    return render_calls([{**first, "content": shown}, *rest], render)


def render_calls(messages: list[Message], render: Callable[[list[Message]], str]) -> tuple[list[Message], str]:
    """Return the messages in the form that the template renders, and the rendering.

    Tool arguments become JSON text if the template joins them to a text or writes a mapping as Python does.
    """
    if not any(message.get("tool_calls") for message in messages):
        return messages, render(messages)
    from fsdptrain.data.tool_calls import render_tool_calls

    return render_tool_calls(messages, render)
