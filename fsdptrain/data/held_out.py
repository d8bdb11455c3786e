"""The rows of --eval-prompt-data, or held out of --prompt-data, and their prompts."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import Subset
from transformers import PreTrainedTokenizerBase

from fsdptrain.config import Config
from fsdptrain.config.eval_sets import UNNAMED, eval_sets
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
) -> tuple[Rows, dict[str, list[Row]]]:
    """Return the rows to train on, and those held out, by evaluation set. dataset: in place of --eval-prompt-data."""
    size, sets = config.data.eval_size, dict[str, list[Row]]()
    if config.data.eval_prompt_data:
        for name, each in eval_sets(config).items():
            others = open_rows(each, each.data, dataset, flag="--eval-prompt-data", image_key=image_key)
            sets[name] = [others[i] for i in range(min(len(others), each.data.eval_size or DEFAULT_EVAL_SIZE))]
        return rows, sets
    size = min(DEFAULT_EVAL_SIZE, len(rows) // 10) if size is None else size
    rows, held_out = split_rows(rows, size, config.run.seed)
    if not held_out:
        line = f"nothing is evaluated: {len(rows)} rows are too few to hold out a tenth of; set --eval-size"
        _tell_nothing(config, line)
    return rows, {UNNAMED: held_out} if held_out else {}


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
    config: Config, tokenizer: PreTrainedTokenizerBase, sets: dict[str, list[Row]], processor: "PromptProcessor | None"
) -> dict[str, list[Prompt]]:
    """Return the prompts to generate responses for, by evaluation set, none longer than the prompt limit."""
    budget, data, prompts = config.prompt_budget, config.data, dict[str, list[Prompt]]()
    for name, rows in sets.items():
        own = name if eval_sets(config)[name].reward is not config.reward else ""
        made = [replace(make_prompt(row, tokenizer, data=data, processor=processor), eval_set=own) for row in rows]
        fitting = [prompt for prompt in made if len(prompt.token_ids) <= budget]
        if len(fitting) < len(rows):
            line = "evaluations%s leave out %d of %d prompts, which are longer than %d tokens"
            log.warning(line, f" of {name}" * (name != UNNAMED), len(rows) - len(fitting), len(rows), budget)
        prompts |= {name: fitting} if fitting else {}
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
