"""The rows of --eval-prompt-data, or held out of --prompt-data, and their prompts."""

import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from transformers import PreTrainedTokenizerBase

from fsdptrain.config import Config
from fsdptrain.config.sft import sft_options
from fsdptrain.data.held_out import split_rows
from fsdptrain.data.prompts import make_prompt
from fsdptrain.data.rows import Row, Rows
from fsdptrain.data.sources import load_rows
from fsdptrain.types import Prompt

if TYPE_CHECKING:
    from fsdptrain.data.images import PromptProcessor

log = logging.getLogger(__name__)

DEFAULT_EVAL_SIZE = 128  # prompts


def hold_out(
    config: Config, rows: Rows, image_key: str | None, dataset: Sequence[Mapping[str, Any]] | None
) -> tuple[Rows, list[Row]]:
    """Return the rows to train on, and those held out. dataset: in place of --eval-prompt-data."""
    if config.data.eval_prompt_data is not None:
        return rows, _evaluation_rows(config, image_key, dataset)
    size = config.data.eval_size
    size = min(DEFAULT_EVAL_SIZE, len(rows) // 10) if size is None else size
    rows, held_out = split_rows(rows, size, config.run.seed)
    if not held_out:
        log.warning("nothing is evaluated: %d rows are too few to hold out a tenth of; set --eval-size", len(rows))
    return rows, held_out


def _evaluation_rows(config: Config, image_key: str | None, dataset: Sequence[Mapping[str, Any]] | None) -> list[Row]:
    """Return the first rows of --eval-prompt-data, or of `dataset` in place of it."""
    options: dict[str, Any] = {"image_key": image_key, "sft": sft_options(config)}
    data = config.data.source(config.data.eval_prompt_data or "")
    if dataset is not None:
        from fsdptrain.data.tables import as_rows

        rows = as_rows(dataset, data, **options)
    else:
        rows = load_rows(data, seed=config.run.seed, flag="--eval-prompt-data", **options)
    return [rows[i] for i in range(min(len(rows), config.data.eval_size or DEFAULT_EVAL_SIZE))]


def held_out_prompts(
    config: Config, tokenizer: PreTrainedTokenizerBase, rows: list[Row], processor: "PromptProcessor | None"
) -> list[Prompt]:
    """Return the prompts to generate responses for, none longer than the prompt limit."""
    budget = config.prompt_budget
    made = [make_prompt(row, tokenizer, data=config.data, processor=processor) for row in rows]
    prompts = [prompt for prompt in made if len(prompt.token_ids) <= budget]
    if len(prompts) < len(rows):
        line = "evaluations leave out %d of %d prompts, which are longer than %d tokens"
        log.warning(line, len(rows) - len(prompts), len(rows), budget)
    return prompts
