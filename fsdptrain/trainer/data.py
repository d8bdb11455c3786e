"""The prompts of a run: the stream to train on, and those held out for evaluation."""

import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from transformers import PreTrainedTokenizerBase

from fsdptrain.config import Config
from fsdptrain.config.algorithm import SelectionConfig
from fsdptrain.data.prompts import PromptStream, make_prompts
from fsdptrain.data.rows import Row, Rows, content_hash, split_rows
from fsdptrain.data.sources import load_rows
from fsdptrain.errors import DataError
from fsdptrain.protocols import PromptProcessor
from fsdptrain.types import Prompt

if TYPE_CHECKING:
    from fsdptrain.data.curriculum import PassRates
    from fsdptrain.trainer.samples.environment import LoadedEnvironment

log = logging.getLogger(__name__)

DEFAULT_EVAL_SIZE = 128  # prompts
ENVIRONMENT_DATA = "environment"  # value of --prompt-data: the environment supplies the data


def build_data(
    config: Config,
    tokenizer: PreTrainedTokenizerBase,
    dataset: Sequence[Mapping[str, Any]] | None,
    environment: "LoadedEnvironment | None",
    processor: PromptProcessor | None = None,
) -> tuple[PromptStream, list[Prompt]]:
    """Build the stream of training prompts and the held-out prompts (none if the run never evaluates)."""
    data, image_key = config.data, None if processor is None else processor.image_key
    rows = _rows(config, environment, dataset, image_key)
    held_out: list[Row] = []
    if config.evaluates and data.eval_prompt_data is not None:
        source = data.model_copy(update={"prompt_data": data.eval_prompt_data})
        other = load_rows(source, seed=config.run.seed, flag="--eval-prompt-data", image_key=image_key)
        held_out = [other[i] for i in range(min(len(other), data.eval_size or DEFAULT_EVAL_SIZE))]
    elif config.evaluates:
        size = min(DEFAULT_EVAL_SIZE, len(rows) // 10) if data.eval_size is None else data.eval_size
        rows, held_out = split_rows(rows, size, config.run.seed)
    exclude = {content_hash(row) for row in held_out}
    budget = config.prompt_budget
    stream = PromptStream(
        rows,
        tokenizer,
        data=data,
        rollout=config.rollout,
        exclude=exclude,
        max_prompt_len=budget,
        curriculum=build_curriculum(config.selection, num_rows=len(rows)),
        processor=processor,
    )
    prompts = make_prompts(held_out, tokenizer, data=data, max_prompt_len=budget, processor=processor)
    if config.evaluates and not held_out:
        log.warning("nothing is evaluated: %d rows are too few to hold out a tenth of; set --eval-size", len(rows))
    elif len(prompts) < len(held_out):
        line = "evaluations leave out %d of %d prompts, which are longer than %d tokens"
        log.warning(line, len(held_out) - len(prompts), len(held_out), budget)
    return stream, prompts


def build_curriculum(selection: SelectionConfig, *, num_rows: int) -> "PassRates | None":
    if selection.curriculum == "none":
        return None
    from fsdptrain.data.curriculum import PassRates

    return PassRates(num_rows, floor=selection.curriculum_floor, decay=selection.curriculum_decay)


def _rows(
    config: Config,
    environment: "LoadedEnvironment | None",
    dataset: Sequence[Mapping[str, Any]] | None,
    image_key: str | None,
) -> Rows:
    if dataset is None and config.data.prompt_data != ENVIRONMENT_DATA:
        return load_rows(config.data, seed=config.run.seed, image_key=image_key)
    from fsdptrain.data.tables import as_rows, environment_rows

    if dataset is not None:
        return as_rows(dataset, config.data, image_key=image_key)
    if environment is None or environment.dataset is None:
        name = config.environment.environment
        raise DataError(f"--prompt-data {ENVIRONMENT_DATA}: --environment {name} has no method dataset; set other data")
    return environment_rows(environment.dataset())
