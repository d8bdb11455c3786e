"""The prompts of a run: the stream to train on, and those held out for evaluation."""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from transformers import PreTrainedTokenizerBase

from fsdptrain.config import Config
from fsdptrain.config.algorithm import SelectionConfig
from fsdptrain.config.sft import SftConfig
from fsdptrain.data.prompts import PromptStream, make_prompt, make_prompts
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


@dataclass(frozen=True)
class RunData:
    """The data of a run."""

    stream: PromptStream  # to train on
    prompts: list[Prompt]  # held out, to generate responses for
    supervised: Mapping[str, Sequence[Prompt]]  # held out by source, to compute the loss of; empty in RL


def build_data(
    config: Config,
    tokenizer: PreTrainedTokenizerBase,
    dataset: Sequence[Mapping[str, Any]] | None,
    environment: "LoadedEnvironment | None",
    processor: PromptProcessor | None = None,
) -> RunData:
    """Load the rows, and split them into those to train on and those held out (none if the run never evaluates)."""
    data, image_key = config.data, None if processor is None else processor.image_key
    rows = _rows(config, environment, dataset, image_key)
    held_out: list[Row] = []
    if config.evaluates and data.eval_prompt_data is not None:
        source = data.model_copy(update={"prompt_data": data.eval_prompt_data})
        flag = "--eval-prompt-data"
        other = load_rows(source, seed=config.run.seed, flag=flag, image_key=image_key, sft=sft_options(config))
        held_out = [other[i] for i in range(min(len(other), data.eval_size or DEFAULT_EVAL_SIZE))]
    elif config.evaluates:
        size = min(DEFAULT_EVAL_SIZE, len(rows) // 10) if data.eval_size is None else data.eval_size
        rows, held_out = split_rows(rows, size, config.run.seed)
    make = supervised_prompt(config, tokenizer, processor)
    stream = PromptStream(
        rows,
        tokenizer,
        data=data,
        rollout=config.rollout,
        exclude={content_hash(row) for row in held_out},
        max_prompt_len=config.prompt_budget,
        curriculum=build_curriculum(config.selection, num_rows=len(rows)),
        processor=processor,
        make=make,
    )
    if config.evaluates and not held_out:
        log.warning("nothing is evaluated: %d rows are too few to hold out a tenth of; set --eval-size", len(rows))
    prompts = held_out_prompts(config, tokenizer, held_out, processor) if config.generates else []
    supervised = {"": [make(row) for row in held_out]} if make and held_out else {}
    return RunData(stream, prompts, supervised)


def sft_options(config: Config) -> SftConfig | None:
    """Return the options of supervised data, if the run is supervised."""
    return config.sft if config.algorithm.algorithm == "sft" else None


def supervised_prompt(
    config: Config, tokenizer: PreTrainedTokenizerBase, processor: PromptProcessor | None
) -> Callable[..., Prompt] | None:
    """Return the function that makes a prompt of a supervised row, without tokens but with images. None in RL."""
    if sft_options(config) is None:
        return None
    if processor is not None:
        return partial(make_prompt, tokenizer=tokenizer, data=config.data, processor=processor)
    from fsdptrain.data.sft import untokenized

    return untokenized


def held_out_prompts(
    config: Config, tokenizer: PreTrainedTokenizerBase, rows: Sequence[Row], processor: PromptProcessor | None
) -> list[Prompt]:
    """Return the prompts to generate responses for, none longer than the prompt limit."""
    budget = config.prompt_budget
    if sft_options(config) is not None:
        from fsdptrain.data.sft_forms import require_labels

        require_labels(rows)
    prompts = make_prompts(rows, tokenizer, data=config.data, max_prompt_len=budget, processor=processor)
    if len(prompts) < len(rows):
        line = "evaluations leave out %d of %d prompts, which are longer than %d tokens"
        log.warning(line, len(rows) - len(prompts), len(rows), budget)
    return prompts


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
        return load_rows(config.data, seed=config.run.seed, image_key=image_key, sft=sft_options(config))
    from fsdptrain.data.tables import as_rows, environment_rows

    if dataset is not None:
        return as_rows(dataset, config.data, image_key=image_key, sft=sft_options(config))
    if environment is None or environment.dataset is None:
        name = config.environment.environment
        raise DataError(f"--prompt-data {ENVIRONMENT_DATA}: --environment {name} has no method dataset; set other data")
    return environment_rows(environment.dataset())
