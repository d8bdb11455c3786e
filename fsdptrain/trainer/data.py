"""The prompts of a run: the stream to train on, and those held out for evaluation."""

import hashlib
import logging
import math
from collections.abc import Callable, Collection, Mapping, Sequence, Sized
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from transformers import PreTrainedTokenizerBase

from fsdptrain.config import Config, DataConfig
from fsdptrain.config.sft import sft_options
from fsdptrain.data.prompts import PromptStream, make_prompt, make_prompts, system_prompt_of
from fsdptrain.data.rows import Row, Rows, content_hash, split_rows
from fsdptrain.data.sources import load_rows
from fsdptrain.data.stream import PromptSource
from fsdptrain.distributed import raise_on_all_ranks, require_same
from fsdptrain.errors import DataError
from fsdptrain.protocols import PromptProcessor
from fsdptrain.types import Prompt

if TYPE_CHECKING:
    from fsdptrain.data.streaming import RowStream
    from fsdptrain.trainer.samples.environment import LoadedEnvironment

log = logging.getLogger(__name__)

DEFAULT_EVAL_SIZE = 128  # prompts
ENVIRONMENT_DATA = "environment"  # value of --prompt-data: the environment supplies the data


@dataclass(frozen=True)
class RunData:
    """The data of a run."""

    stream: PromptSource  # to train on
    prompts: list[Prompt]  # held out, to generate responses for
    supervised: Mapping[str, Sequence[Prompt]]  # held out by source, to compute the loss of; empty in RL
    held_out: Mapping[str, DataConfig]  # of each source with held-out rows


@dataclass(frozen=True)
class OpenSource:
    """One source of --prompt-data, without its held-out rows; or the rows of --eval-prompt-data."""

    data: DataConfig  # of this source only
    rows: "Rows | RowStream"
    held_out: list[Row]


def build_data(
    config: Config,
    tokenizer: PreTrainedTokenizerBase,
    dataset: Sequence[Mapping[str, Any]] | None,
    environment: "LoadedEnvironment | None",
    processor: PromptProcessor | None = None,
    *,
    eval_dataset: Sequence[Mapping[str, Any]] | None = None,
) -> RunData:
    """Load the rows, and split them into those to train on and those held out (none if the run never evaluates)."""
    image_key = None if processor is None else processor.image_key
    sources = _open_sources(config, dataset, environment, image_key)
    held_out = {name: source for name, source in sources.items() if source.held_out}
    if config.evaluates and config.data.eval_prompt_data is not None:
        own = config.data.source(config.data.eval_prompt_data)
        if len(sources) == 1:  # evaluated with the system prompt that is trained
            [trained] = sources.values()
            own = own.model_copy(update={"system_prompt": system_prompt_of(trained.data)})
        rows = _evaluation_rows(config, own, image_key, eval_dataset)
        held_out = {"": OpenSource(own, rows, rows)}
    exclude = {content_hash(row) for source in held_out.values() for row in source.held_out}
    streams = {
        name: _stream(config, source, tokenizer, exclude=exclude, processor=processor)
        for name, source in sources.items()
    }
    prompts: list[Prompt] = []
    supervised: dict[str, list[Prompt]] = {}
    for name, source in held_out.items():
        if config.generates:
            made = held_out_prompts(config, tokenizer, source, processor)
            prompts += [replace(prompt, id=f"{name}/{prompt.id}") if name else prompt for prompt in made]
        if make := supervised_prompt(config, source.data, tokenizer, processor):
            supervised[name] = [make(row) for row in source.held_out]
    data = {name: source.data for name, source in held_out.items()}
    return RunData(_joined(config, streams), prompts, supervised, data)


def _open_sources(
    config: Config,
    dataset: Sequence[Mapping[str, Any]] | None,
    environment: "LoadedEnvironment | None",
    image_key: str | None,
) -> dict[str, OpenSource]:
    """Open each source and hold rows out: --eval-size of them, in proportion to the weights."""
    data = config.data
    splits = config.evaluates and data.eval_prompt_data is None
    total = sum(weight for _, weight in data.sources.values())
    found: dict[str, OpenSource] = {}
    for name, (spec, weight) in data.sources.items():
        share = weight / total
        own = data.source(spec)
        rows = _rows(config, own, environment, dataset, image_key)
        held_out: list[Row] = []
        if splits and isinstance(rows, Sized):
            most = math.ceil(DEFAULT_EVAL_SIZE * share)
            size = min(most, len(rows) // 10) if data.eval_size is None else math.ceil(data.eval_size * share)
            rows, held_out = split_rows(rows, size, config.run.seed)
            if not held_out and data.eval_size != 0:
                log.warning(
                    "nothing is evaluated: %d rows are too few to hold out a tenth of; set --eval-size", len(rows)
                )
        elif splits:
            size = DEFAULT_EVAL_SIZE if data.eval_size is None else data.eval_size
            rows, held_out = cast("RowStream", rows).split(math.ceil(size * share))
        found[name] = OpenSource(own, rows, held_out)
    return found


def _evaluation_rows(
    config: Config, data: DataConfig, image_key: str | None, dataset: Sequence[Mapping[str, Any]] | None
) -> list[Row]:
    """Return the first rows of --eval-prompt-data, or of `dataset` in place of it."""
    options: dict[str, Any] = {"image_key": image_key, "sft": sft_options(config)}
    if dataset is not None:
        from fsdptrain.data.tables import as_rows

        rows = as_rows(dataset, data, **options)
    else:
        rows = load_rows(data, seed=config.run.seed, flag="--eval-prompt-data", **options)
    return [rows[i] for i in range(min(len(rows), config.data.eval_size or DEFAULT_EVAL_SIZE))]


def _stream(
    config: Config,
    source: OpenSource,
    tokenizer: PreTrainedTokenizerBase,
    *,
    exclude: Collection[str],
    processor: PromptProcessor | None,
) -> PromptStream:
    """Build the stream of one source."""
    options: dict[str, Any] = {
        "data": source.data,
        "rollout": config.rollout,
        "exclude": exclude,
        "max_prompt_len": config.prompt_budget,
        "processor": processor,
        "make": supervised_prompt(config, source.data, tokenizer, processor),
    }
    if not isinstance(source.rows, Sized):
        from fsdptrain.data.streaming import StreamedPrompts

        return StreamedPrompts(source.rows, tokenizer, **options)
    return PromptStream(source.rows, tokenizer, **options)


def _joined(config: Config, streams: Mapping[str, PromptStream]) -> PromptSource:
    """Return the stream of all sources."""
    if len(streams) == 1:
        return next(iter(streams.values()))
    from fsdptrain.data.mixture import MixedPrompts

    return MixedPrompts(streams, [weight for _, weight in config.data.sources.values()], seed=config.rollout.seed)


def require_same_data(stream: PromptSource) -> None:
    """Raise DataError on all ranks if their sources differ in length, first row or held-out rows. Collective."""
    with raise_on_all_ranks(DataError, "--prompt-data"):
        found = [(len(part.rows), content_hash(part.first_row()), sorted(part.exclude)) for part in stream.parts]
    digest = hashlib.sha256(repr(found).encode()).hexdigest()
    require_same(
        digest, DataError(f"--prompt-data {stream.name}: ranks read different rows: give all of them one copy")
    )


def supervised_prompt(
    config: Config, data: DataConfig, tokenizer: PreTrainedTokenizerBase, processor: PromptProcessor | None
) -> Callable[..., Prompt] | None:
    """Return the function that makes a prompt of a supervised row, without tokens but with images. None in RL."""
    if sft_options(config) is None:
        return None
    if processor is not None:
        return partial(make_prompt, tokenizer=tokenizer, data=data, processor=processor)
    from fsdptrain.data.sft import untokenized

    return untokenized


def held_out_prompts(
    config: Config, tokenizer: PreTrainedTokenizerBase, source: OpenSource, processor: PromptProcessor | None
) -> list[Prompt]:
    """Return the prompts to generate responses for, none longer than the prompt limit."""
    budget, rows = config.prompt_budget, source.held_out
    if sft_options(config) is not None:
        from fsdptrain.data.sft_forms import require_labels

        require_labels(rows)
    prompts = make_prompts(rows, tokenizer, data=source.data, max_prompt_len=budget, processor=processor)
    if len(prompts) < len(rows):
        line = "evaluations leave out %d of %d prompts, which are longer than %d tokens"
        log.warning(line, len(rows) - len(prompts), len(rows), budget)
    return prompts


def _rows(
    config: Config,
    data: DataConfig,
    environment: "LoadedEnvironment | None",
    dataset: Sequence[Mapping[str, Any]] | None,
    image_key: str | None,
) -> "Rows | RowStream":
    """Open the rows of one source."""
    options: dict[str, Any] = {"image_key": image_key, "sft": sft_options(config)}
    if dataset is not None:
        from fsdptrain.data.tables import as_rows

        return as_rows(dataset, data, **options)
    if data.data_name == ENVIRONMENT_DATA:
        from fsdptrain.data.tables import environment_rows

        if environment is None or environment.dataset is None:
            name = config.environment.environment
            raise DataError(
                f"--prompt-data {ENVIRONMENT_DATA}: --environment {name} has no method dataset; set other data"
            )
        return environment_rows(environment.dataset())
    if data.prompt_data_streaming:
        from fsdptrain.data.streaming import open_stream

        return open_stream(data, **options)
    return load_rows(data, seed=config.run.seed, **options)
