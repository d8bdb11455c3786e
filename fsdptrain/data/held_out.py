"""The rows of --eval-prompt-data, or held out of --prompt-data, and their prompts."""

import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import Subset
from transformers import PreTrainedTokenizerBase

from fsdptrain.config import Config
from fsdptrain.config.keys import all_keys
from fsdptrain.data.prompts import make_prompt
from fsdptrain.data.rows import Row, Rows, content_hash
from fsdptrain.data.sources import open_rows
from fsdptrain.errors import DataError
from fsdptrain.types import Prompt

if TYPE_CHECKING:
    from fsdptrain.data.images import PromptProcessor

log = logging.getLogger(__name__)

DEFAULT_EVAL_SIZE = 128  # prompts


def hold_out(
    config: Config, rows: Rows, image_key: str | None, dataset: Sequence[Mapping[str, Any]] | None
) -> tuple[Rows, list[Row]]:
    """Return the rows to train on, and those held out. dataset: in place of --eval-prompt-data."""
    size = config.data.eval_size
    if config.data.eval_prompt_data is not None:
        data = config.data.source(config.data.eval_prompt_data)
        others = open_rows(config, data, dataset, flag="--eval-prompt-data", image_key=image_key)
        return rows, [others[i] for i in range(min(len(others), size or DEFAULT_EVAL_SIZE))]
    size = min(DEFAULT_EVAL_SIZE, len(rows) // 10) if size is None else size
    rows, held_out = split_rows(rows, size, config.run.seed)
    if not held_out:
        _tell_nothing(
            config, f"nothing is evaluated: {len(rows)} rows are too few to hold out a tenth of; set --eval-size"
        )
    return rows, held_out


def split_rows(rows: Rows, eval_size: int, seed: int) -> tuple[Rows, list[Row]]:
    """Split into training rows and up to `eval_size` distinct held-out rows, drawn by `seed`.

    Generators may repeat a question at other indices. Pass `content_hash` of the held-out rows to PromptStream, which
    skips duplicates of them. Raises DataError if no training rows are left.
    """
    held_out: dict[str, Row] = {}
    taken: set[int] = set()
    for index in torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed)).tolist()[: 4 * eval_size]:
        if len(held_out) == eval_size:
            break
        row = rows[index]
        held_out.setdefault(content_hash(row), row)
        taken.add(index)
    if len(taken) == len(rows):
        raise DataError(
            f"--eval-size {eval_size} leaves no training rows, the data has {len(rows)} rows; "
            "lower it, or set --eval-prompt-data"
        )
    left: Any = Subset(rows, [index for index in range(len(rows)) if index not in taken])  # type: ignore[arg-type]
    return left, list(held_out.values())


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
    if not prompts:
        _tell_nothing(config, "nothing is evaluated: all held-out prompts are too long; raise --rollout-max-prompt-len")
    return prompts


def _tell_nothing(config: Config, line: str) -> None:
    """Warn that nothing is evaluated. Raises DataError if an option needs evaluations."""
    needing = [flat for flat in ("keep_best", "early_stop_evals", "eval_metric") if config.is_set(flat)]
    needing += ["stop_when"] if (config.run.stop_when or "").startswith("eval/") else []
    if needing and config.run.num_rollout:
        raise DataError(f"{all_keys()[needing[0]].shown(config)}: {line}")
    log.warning(line)
