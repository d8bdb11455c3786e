"""From rows to tokenised prompts, and the endless, seeded, resumable stream of them."""

import hashlib
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from fsdptrain.config import DataConfig, RolloutConfig
from fsdptrain.data.curriculum import PassRates
from fsdptrain.data.images import open_picture, with_places
from fsdptrain.data.sources import GENERATOR, Row, Rows, as_messages, content_hash
from fsdptrain.errors import ConfigError, DataError
from fsdptrain.features.vision.processor import ImageProcessor, Segment
from fsdptrain.types import Images, Message, Metrics, Prompt

ANSWER_TAGS_PROMPT = (
    "Reason about the question first. Then give the final answer, and nothing else, inside <answer></answer> tags, "
    "for example <answer>42</answer>."
)
RESERVED_TEMPLATE_KWARGS = ("tokenize", "add_generation_prompt", "continue_final_message")


class PromptStream:
    """Prompts without end, shuffled anew in each epoch by `rollout.seed`.

    It holds indices, not data: its state is a few numbers, and a resumed stream goes on with the very next row. Rows
    whose content is in `exclude` (`content_hash` of the evaluation rows) are never given out; rows longer than
    `max_prompt_len` (default: `rollout.max_prompt_len`) tokens are left out and counted in `num_too_long`. From the
    second epoch on an id carries the epoch (`task:17@1`), so that no two prompts of a run share one, nor the random
    numbers that hang on it.

    It remembers what it gave out until `record` is told what became of it. What is left then is part of its state, and
    a resumed stream gives that out first: prompts of rollouts that were under way are neither lost nor asked twice.

    With a `curriculum` a row that comes up may be skipped for this epoch; what `record` is told decides. A rank whose
    stream was asked for other prompts, or told other results, than those of the others would go its own way.
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
        curriculum: PassRates | None = None,
        processor: ImageProcessor | None = None,
    ) -> None:
        check_template(tokenizer, data)
        self.rows = rows
        self.tokenizer = tokenizer
        self.data = data
        self.exclude = frozenset(exclude)
        self.max_prompt_len = max_prompt_len or rollout.max_prompt_len
        self.shuffle = rollout.shuffle
        self.seed = rollout.seed
        self.curriculum = curriculum
        self.processor = processor  # None: prompts are of text alone
        self.epoch = 0  # epochs that are complete
        self.position = 0  # rows of this epoch that were looked at
        self.num_too_long = 0
        self._order = self._make_order()
        self._since_last = 0  # rows looked at since the last one that can be used
        self._given_out: dict[str, tuple[int, int]] = {}  # prompt -> (epoch, row), until its result is recorded
        self._again: deque[tuple[int, int]] = deque()  # given out before the checkpoint, and to be asked again
        self._num_given, self._num_skipped = 0, 0  # since the last `metrics`

    @property
    def progress(self) -> float:
        """Epochs so far, with their fraction."""
        return self.epoch + self.position / len(self.rows)

    def next(self, n: int) -> list[Prompt]:
        """The next `n` prompts; one epoch runs into the next. DataError if no row at all can be used."""
        prompts: list[Prompt] = []
        while len(prompts) < n:
            if self._again:
                prompts.append(self._give(*self._again.popleft()))
            elif (prompt := self._prompt_of_next_row()) is not None:
                prompts.append(prompt)
        return prompts

    def record(self, prompt: Prompt, *, passed: int = 0, tried: int = 0) -> None:
        """What became of a prompt that was given out: `passed` of the `tried` answers that could be scored."""
        _, row = self._given_out.pop(prompt.id)
        if self.curriculum is not None:
            self.curriculum.record(row, passed=passed, tried=tried)

    def metrics(self) -> Metrics:
        """curriculum/*, of the prompts since the last call; nothing without a curriculum."""
        if self.curriculum is None:
            return {}
        skipped, looked_at = self._num_skipped, self._num_skipped + self._num_given
        self._num_given, self._num_skipped = 0, 0
        return {
            "curriculum/skipped_fraction": skipped / max(1, looked_at),
            "curriculum/mean_pass_rate": self.curriculum.mean_rate,
            "curriculum/seen_fraction": self.curriculum.seen_fraction,
        }

    def state_dict(self) -> dict[str, Any]:
        state = {
            "epoch": self.epoch,
            "position": self.position,
            "seed": self.seed,
            "num_rows": len(self.rows),
            "num_too_long": self.num_too_long,
        }
        if under_way := [*self._given_out.values(), *self._again]:
            state["given_out"] = under_way
        return state if self.curriculum is None else state | {"curriculum": self.curriculum.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state` was taken. DataError if the data have another number of rows now.

        A curriculum that `state` knows nothing of, since that run had none, begins here.
        """
        if state["num_rows"] != len(self.rows):
            raise DataError(
                f"--prompt-data {self.data.prompt_data} has {len(self.rows)} rows to train on, {state['num_rows']} "
                "when the checkpoint was made: resume with the same data and --eval-size, or use --resume never"
            )
        self.epoch, self.position, self.seed = state["epoch"], state["position"], state["seed"]
        self.num_too_long = state["num_too_long"]
        self._order = self._make_order()
        self._since_last = 0
        self._given_out, self._again = {}, deque((epoch, row) for epoch, row in state.get("given_out", ()))
        if self.curriculum is not None and "curriculum" in state:
            self.curriculum.load_state_dict(state["curriculum"])

    def _prompt_of_next_row(self) -> Prompt | None:
        if self._since_last >= 2 * len(self.rows):  # a whole epoch lies in these, wherever they began
            self._raise_none_left()
        if self.position == len(self.rows):
            self.epoch, self.position = self.epoch + 1, 0
            self._order = self._make_order()
        index = int(self._order[self.position])
        self.position += 1
        if self.curriculum is not None and not self.curriculum.draws(index, epoch=self.epoch, seed=self.seed):
            self._num_skipped += 1
            self._since_last = 0  # it was asked before, so it can be used: in an epoch to come
            return None
        row = self.rows[index]
        self._since_last += 1
        if content_hash(row) in self.exclude:
            return None
        prompt = self._make(self.epoch, row)
        if self.max_prompt_len is not None and len(prompt.token_ids) > self.max_prompt_len:
            self.num_too_long += 1
            return None
        self._since_last = 0
        self._num_given += 1
        self._given_out[prompt.id] = (self.epoch, index)
        return prompt

    def _give(self, epoch: int, index: int) -> Prompt:
        """Once more what was given out before."""
        prompt = self._make(epoch, self.rows[index])
        self._given_out[prompt.id] = (epoch, index)
        return prompt

    def _make(self, epoch: int, row: Row) -> Prompt:
        prompt_id = f"{row.id}@{epoch}" if epoch else row.id
        return make_prompt(row, self.tokenizer, data=self.data, prompt_id=prompt_id, processor=self.processor)

    def _raise_none_left(self) -> None:
        raise DataError(
            f"--prompt-data {self.data.prompt_data}: none of its {len(self.rows)} rows can be trained on, all are "
            f"longer than {self.max_prompt_len} tokens or held out; raise --rollout-max-prompt-len "
            "(or --max-tokens-per-gpu), or lower --eval-size"
        )

    def _make_order(self) -> torch.Tensor:
        """[rows] i64: the rows of this epoch in order."""
        if not self.shuffle:
            return torch.arange(len(self.rows))
        digest = hashlib.sha256(f"{self.seed}:{self.epoch}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
        return torch.randperm(len(self.rows), generator=generator)


def make_prompts(
    rows: Sequence[Row],
    tokenizer: PreTrainedTokenizerBase,
    *,
    data: DataConfig,
    max_prompt_len: int | None = None,
    processor: ImageProcessor | None = None,
) -> list[Prompt]:
    """All rows that are not longer than `max_prompt_len` tokens, in order: for evaluation."""
    check_template(tokenizer, data)
    prompts = [make_prompt(row, tokenizer, data=data, processor=processor) for row in rows]
    return [p for p in prompts if max_prompt_len is None or len(p.token_ids) <= max_prompt_len]


def make_prompt(
    row: Row,
    tokenizer: PreTrainedTokenizerBase,
    *,
    data: DataConfig,
    prompt_id: str = "",
    processor: ImageProcessor | None = None,
) -> Prompt:
    """Tokenise a row once and for all. Special tokens come from the template or the tokenizer, never from both."""
    system_prompt = _system_prompt(data)
    images: Images | None = None
    if processor is not None:
        token_ids, images = _show(row, tokenizer, processor, data=data, system_prompt=system_prompt)
    elif data.apply_chat_template:
        text = _render_chat(as_messages(row.prompt), tokenizer, data=data, system_prompt=system_prompt, row_id=row.id)
        token_ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    else:
        text = _plain_text(row, system_prompt)
        has_bos = tokenizer.bos_token is not None and text.startswith(str(tokenizer.bos_token))
        token_ids = tokenizer(text, add_special_tokens=not has_bos)["input_ids"]
    if not token_ids:
        raise DataError(f"--input-key {data.input_key}: row {row.id} is an empty prompt")
    return Prompt(
        id=prompt_id or row.id,
        token_ids=list(token_ids),
        text=str(tokenizer.decode(token_ids)),
        label=row.label,
        metadata=row.metadata,
        images=images,
    )


def _show(
    row: Row, tokenizer: PreTrainedTokenizerBase, processor: ImageProcessor, *, data: DataConfig, system_prompt: str
) -> Segment:
    """The chat of a row with its pictures, by the processor of the checkpoint."""
    assert data.image_key is not None
    messages = with_places(as_messages(row.prompt), len(row.images), row_id=row.id)
    text = _render_chat(messages, tokenizer, data=data, system_prompt=system_prompt, row_id=row.id)
    pictures = [open_picture(one, row_id=row.id, column=data.image_key) for one in row.images]
    try:
        return processor.read(text, pictures)
    except (ValueError, TypeError, IndexError) as error:
        reason = str(error).strip().splitlines()[0]
        raise DataError(f"the processor of --hf-checkpoint does not take row {row.id}: {reason}") from error


def check_template(tokenizer: PreTrainedTokenizerBase, data: DataConfig) -> None:
    """Raises ConfigError if the chat template is asked for and there is none, or is given what only we may set."""
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


def _system_prompt(data: DataConfig) -> str:
    if data.system_prompt != "auto":
        return data.system_prompt
    return ANSWER_TAGS_PROMPT if data.prompt_data.startswith(GENERATOR) else ""


def _plain_text(row: Row, system_prompt: str) -> str:
    if not isinstance(row.prompt, str):
        raise DataError(f"row {row.id} is a list of chat messages, which need --apply-chat-template")
    return f"{system_prompt}\n\n{row.prompt}" if system_prompt else row.prompt


def _render_chat(
    messages: list[Message], tokenizer: PreTrainedTokenizerBase, *, data: DataConfig, system_prompt: str, row_id: str
) -> str:
    """The chat as text. A system prompt of ours goes to the first message where the template knows no system role
    (gemma raises, others leave it out); a row that brings its own system message keeps that one.
    """
    own_system = messages[0]["role"] == "system"
    try:
        if system_prompt and not own_system:
            with_system = [{"role": "system", "content": system_prompt}, *messages]
            text = _try_template(with_system, tokenizer, data.chat_template_kwargs)
            if text is not None and system_prompt in text:
                return text
            messages = _in_front(system_prompt, messages)
        return _apply_template(messages, tokenizer, data.chat_template_kwargs)
    except (TemplateError, ValueError, TypeError) as error:  # TypeError: content that is no text, in most templates
        raise DataError(f"the chat template of --hf-checkpoint does not take row {row_id}: {error}") from error


def _try_template(
    messages: list[Message], tokenizer: PreTrainedTokenizerBase, template_kwargs: dict[str, Any]
) -> str | None:
    try:
        return _apply_template(messages, tokenizer, template_kwargs)
    except (TemplateError, TypeError):
        return None


def _apply_template(
    messages: list[Message], tokenizer: PreTrainedTokenizerBase, template_kwargs: dict[str, Any]
) -> str:
    """A chat that ends with the assistant's own words is continued there."""
    prefilled = messages[-1]["role"] == "assistant"
    text = tokenizer.apply_chat_template(
        [dict(message) for message in messages],
        tokenize=False,
        add_generation_prompt=not prefilled,
        continue_final_message=prefilled,
        **template_kwargs,
    )
    assert isinstance(text, str)
    return text


def _in_front(system_prompt: str, messages: list[Message]) -> list[Message]:
    first, *rest = messages
    words, content = f"{system_prompt}\n\n", first["content"]
    shown = [{"type": "text", "text": words}, *content] if isinstance(content, list) else words + content
    return [{**first, "content": shown}, *rest]
