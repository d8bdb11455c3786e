"""The prompts of a run: the stream to train on, and those held out for evaluation."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from transformers import PreTrainedTokenizerBase

from fsdptrain.config import Config
from fsdptrain.config.data import sft_options
from fsdptrain.data.prompts import PromptStream
from fsdptrain.data.rows import Row, Rows, content_hash
from fsdptrain.data.sources import open_rows
from fsdptrain.distributed import raise_on_all_ranks, require_same
from fsdptrain.errors import DataError
from fsdptrain.types import Prompt

if TYPE_CHECKING:
    from fsdptrain.data.images import PromptProcessor
    from fsdptrain.trainer.samples.environment import LoadedEnvironment

ENVIRONMENT_DATA = "environment"  # value of --prompt-data: the environment supplies the data


@dataclass(frozen=True)
class RunData:
    """The data of a run."""

    stream: PromptStream  # to train on
    prompts: Mapping[str, list[Prompt]]  # held out, by evaluation set, to generate responses for
    supervised: Mapping[str, list[Prompt]]  # held out, by evaluation set, to compute the loss of; empty in RL


def build_data(
    config: Config,
    tokenizer: PreTrainedTokenizerBase,
    dataset: Sequence[Mapping[str, Any]] | None,
    environment: "LoadedEnvironment | None",
    processor: "PromptProcessor | None" = None,
    *,
    eval_dataset: Sequence[Mapping[str, Any]] | None = None,
) -> RunData:
    """Load the rows, and split them into those to train on and those held out (none if the run never evaluates)."""
    image_key = None if processor is None else processor.image_key
    rows, held_out = _rows(config, environment, dataset, image_key), dict[str, list[Row]]()
    if config.evaluates:
        from fsdptrain.data.held_out import hold_out

        rows, held_out = hold_out(config, rows, image_key, eval_dataset)
    if environment is not None:
        rows, *sets = (environment.rows_of(each, config, tokenizer) for each in (rows, *held_out.values()))
        held_out = {name: [own[i] for i in range(len(own))] for name, own in zip(held_out, sets, strict=True)}
    make = None
    if sft_options(config) is not None:
        from fsdptrain.data.sft import prompt_maker

        make = prompt_maker(config.data, tokenizer, processor)
    stream = PromptStream(
        rows,
        tokenizer,
        data=config.data,
        rollout=config.rollout,
        exclude={content_hash(row) for own in held_out.values() for row in own},
        max_prompt_len=config.prompt_budget,
        processor=processor,
        make=make,
    )
    if make is None and config.run.num_rollout:  # supervised rows are tried when samples are built of them
        start = stream.state_dict()
        stream.next(1)  # fails before the model is loaded if no row can be trained on
        stream.load_state_dict(start)
    prompts = dict[str, list[Prompt]]()
    if held_out and config.generates:
        from fsdptrain.data.held_out import held_out_prompts

        prompts = held_out_prompts(config, tokenizer, held_out, processor)
    return RunData(stream, prompts, {name: [*map(make, own)] for name, own in held_out.items()} if make else {})


def require_same_data(stream: PromptStream) -> None:
    """Raise DataError on all ranks if their rows differ in length, first row or held-out rows. Collective."""
    with raise_on_all_ranks(DataError, "--prompt-data"):
        found = (len(stream.rows), content_hash(stream.rows[0]), sorted(stream.exclude))
    digest = hashlib.sha256(repr(found).encode()).hexdigest()
    name = stream.data.prompt_data
    require_same(digest, DataError(f"--prompt-data {name}: ranks read different rows: give all of them one copy"))


def _rows(
    config: Config,
    environment: "LoadedEnvironment | None",
    dataset: Sequence[Mapping[str, Any]] | None,
    image_key: str | None,
) -> Rows:
    """Open the rows of --prompt-data, or of `dataset` in place of it."""
    if dataset is not None or config.data.prompt_data != ENVIRONMENT_DATA:
        return open_rows(config, config.data, dataset, image_key=image_key)
    from fsdptrain.data.tables import environment_rows

    if environment is None or environment.dataset is None:
        name = " ".join(config.environment.environment)
        raise DataError(f"--prompt-data {ENVIRONMENT_DATA}: --environment {name} has no method dataset; set other data")
    return environment_rows(environment.dataset())
