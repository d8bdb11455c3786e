"""`--dry-run`: check what a run checks before it loads weights, and print what was set and what was read."""

import logging
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from logging.handlers import BufferingHandler
from pathlib import Path
from typing import TYPE_CHECKING

from fsdptrain import stages
from fsdptrain.config import Config, DataConfig
from fsdptrain.config.checks import check_world_size
from fsdptrain.config.eval_sets import UNNAMED, eval_sets
from fsdptrain.config.flags import Resolved
from fsdptrain.config.keys import all_keys
from fsdptrain.config.written import to_yaml
from fsdptrain.data.sources import GENERATOR, open_rows
from fsdptrain.launch.data_files import image_key
from fsdptrain.launch.inputs import check_inputs, data_configs
from fsdptrain.model.loading.formats import with_config
from fsdptrain.rank_variables import read_rank_variables

if TYPE_CHECKING:
    from fsdptrain.data.rows import Row
    from fsdptrain.trainer.build import Prepared

_MOST_ROWS = 10_000  # read; of more, so many at equal distances
_MOST_IMAGES = 200  # rows with images
_MOST_SHOWN = 600  # characters of a prompt
_SHOWN_RANKS = 4  # groups, and members per group


def dry_run(resolved: Resolved) -> None:
    """Print the options that were set, what was read, the planned memory, the rank groups, and what was not checked.

    Raises the error that would end the run before it loads weights. Does not use the network.
    """
    os.environ |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    config, ranks = resolved.config.with_values(dry_run=False), read_rank_variables()
    check_inputs(config)
    local = ranks.local_world_size if ranks else config.launch.nproc_per_node
    world_size = ranks.world_size if ranks else local
    if world_size is not None:
        check_world_size(config, world_size)
    unchecked = list(_unchecked(config))
    if config.model.backend == "megatron" and Path(config.model.hf_checkpoint).is_dir():
        from fsdptrain.megatron.model import check_sizes

        check_sizes(config)
    lines = _read_parts(config) if unchecked else _prepare(config, world_size, local)
    lines += [] if world_size is None else draw_grid(config, world_size)
    lines += [*(f"not checked: {line}" for line in unchecked), "ok so far" if unchecked else "ok"]
    if resolved.config.launch.dry_run == "full":
        sys.stdout.write(to_yaml(config, resolved.sources))
        lines = [f"# {line}" for line in lines]
    else:
        lines = [*_set_options(resolved), *lines]
    sys.stdout.writelines(f"{line}\n" for line in lines)


def _set_options(resolved: Resolved) -> Iterator[str]:
    """Yield the options that are not the default, and by whom they were set."""
    config, sources = resolved.config, resolved.sources
    shown = {
        key.shown(config): sources[flat]
        for flat, key in all_keys().items()
        if flat != "dry_run" and sources[flat] != "default" and (sources[flat] != "recipe" or config.is_set(flat))
    }
    width = min(60, max(map(len, shown), default=0))
    return (f"{option:<{width}}  {source}" for option, source in shown.items())


def _unchecked(config: Config) -> Iterator[str]:
    """Yield what only the run checks, because it is not on this machine."""
    name = config.model.hf_checkpoint
    if not Path(name).is_dir() and not _is_cached(name):
        yield f"--hf-checkpoint {name}, which is no local folder: on the Hub?"
    elif Path(name).is_dir() and not any(with_config(Path(name)).glob("*.safetensors")):
        yield f"prompts, rewards and memory: there are no weights in --hf-checkpoint {name}"
    for data, flag in ((each.data.prompt_data, flag) for each, flag in data_configs(config)):
        if data != "environment" and not data.startswith(GENERATOR) and not _is_here(data):
            yield f"{flag} {data}, which is no local file: on the Hub?"
    teacher = config.value("opd_teacher")
    if teacher is not None and not Path(teacher).is_dir():
        yield f"--opd-teacher {teacher}, which is no local folder"


def _is_here(data: str) -> bool:
    return Path(data.partition("?")[0]).exists()


def _is_cached(name: str) -> bool:
    """Return whether the cache of the Hub has weights of the model, which are downloaded with all other files."""
    from huggingface_hub import try_to_load_from_cache

    files = ("model.safetensors", "model.safetensors.index.json")
    return any(isinstance(try_to_load_from_cache(name, file), str) for file in files)


def _read_parts(config: Config) -> list[str]:
    """Read what is here, and return lines about it."""
    lines, read = list[str](), list["Row"]()
    for each, flag in data_configs(config):
        name = each.data.prompt_data
        is_generated = name.startswith(GENERATOR) and name != DataConfig().prompt_data  # the default needs no check
        if is_generated or _is_here(name):
            rows = open_rows(config, each.data, flag=flag, image_key=image_key(config))
            read += [rows[index] for index in _spread(len(rows))]
            lines.append(f"{flag} {name}: {len(rows)} rows")
    if config.environment.environment:
        from fsdptrain.trainer.samples.environment import find_environment, name_in, short_names

        for name in config.environment.environment:
            find_environment(name)
        for row in read:
            name_in(row.metadata, row.id, config.data.environment_key, short_names(config.environment))
    return lines


def _spread(count: int, most: int = _MOST_ROWS) -> list[int]:
    """Return up to `most` indices of `count` rows, at equal distances."""
    return sorted({index * count // min(count, most) for index in range(min(count, most))})


def _prepare(config: Config, world_size: int | None, local_ranks: int | None) -> list[str]:
    """Prepare the run up to its weights. Returns lines about it, those that it logs among them."""
    import torch.distributed as dist

    from fsdptrain.fsdp.build import meta_policy
    from fsdptrain.memory.report import MemoryReport
    from fsdptrain.model.attention.rope import check_longest
    from fsdptrain.model.loading.meta import resolve_checkpoint
    from fsdptrain.platform import device_count
    from fsdptrain.trainer.build import prepare

    logged = BufferingHandler(capacity=10_000)
    log = logging.getLogger("fsdptrain")
    log.addHandler(logged)
    log.setLevel(logging.INFO)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with ExitStack() as stack:
            files = resolve_checkpoint(config.model.hf_checkpoint)
            run = prepare(config, files, stack)
            lines = list(_data_lines(run, files))
            if config.run.replay_rollouts is not None:
                from fsdptrain.trainer.samples.recorded import open_recorded

                open_recorded(run.config, run.folder)
            if config.model.backend == "fsdp":
                model = meta_policy(run.config, files, run.features)
                check_longest(model.config, run.config.longest_sequence)
                count = world_size or device_count()
                report = MemoryReport(run.config, num_ranks=count, local_ranks=local_ranks or count)
                report.before_load(model)
        return [*lines, *(record.getMessage() for record in logged.buffer if record.name != stages.__name__)]
    finally:
        dist.destroy_process_group()
        log.removeHandler(logged)


def _data_lines(run: "Prepared", files: Path) -> Iterator[str]:
    """Yield the number of rows, a prompt or sample as it is rendered, and the longest.

    Raises the DataError or RolloutError that the run would raise when it comes to such a row.
    """
    config, stream, sets = run.config, run.data.stream, run.data.prompts or run.data.supervised
    held_out = ", ".join(f"{len(own)} {name}" for name, own in sets.items()).removesuffix(f" {UNNAMED}") or "0"
    trained = f"{len(stream.rows)} rows to train on, " if config.run.num_rollout else ""
    yield f"--prompt-data {config.data.prompt_data}: {trained}{held_out} held out"
    most = _MOST_ROWS if stream.processor is None else _MOST_IMAGES
    rows = [stream.rows[index] for index in _spread(len(stream.rows), most) if config.run.num_rollout]
    if run.builder is None:
        kind, tokens, refused = "prompt", *_prompts(run, rows, files)
    else:
        from fsdptrain.data.sft import prompt_maker
        from fsdptrain.trainer.samples.sft import build_samples

        make = prompt_maker(config.data, run.tokenizer, stream.processor)
        samples, refusals = build_samples(run.builder, [make(row) for row in rows])
        kind, tokens = "sample", [s.token_ids for own in [samples, *(run.held_out or {}).values()] for s in own]
        refused = f"; skipped: {refusals.reasons}" if refusals.counts else ""
    if not tokens:  # an evaluation of prompts that are all too long, which is logged
        return
    text = run.tokenizer.decode(tokens[0])
    text = text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]} ..."
    yield f"{kind} of {len(tokens[0])} tokens: {text!r}"
    yield f"the longest of {len(tokens)}: {max(map(len, tokens))} tokens{refused}"


def _prompts(run: "Prepared", rows: "Sequence[Row]", files: Path) -> tuple[list[list[int]], str]:
    """Return the tokens of prompts that are not skipped, and how many are."""
    from fsdptrain.data.prompts import make_prompt
    from fsdptrain.model.loading.meta import model_config
    from fsdptrain.rollout.embedded.engine import check_prompt

    config, stream = run.config, run.data.stream
    budget = config.prompt_budget
    prompts = [make_prompt(row, run.tokenizer, data=stream.data, processor=stream.processor) for row in rows]
    fitting = [prompt for prompt in prompts if len(prompt.token_ids) <= budget]
    skipped = f", {len(rows) - len(fitting)} longer than {budget} are skipped" * (len(fitting) < len(rows))
    sets, checked = eval_sets(config), [(prompt, config) for prompt in fitting]
    checked += [(prompt, sets[name]) for name, own in run.data.prompts.items() for prompt in own]
    if config.rollout.engine == "hf" and run.environment is None:
        model = model_config(files, trust_remote_code=config.model.trust_remote_code)
        for prompt, each in checked:
            limit, most = each.rollout.max_response_len, config.rollout.max_batch_tokens
            check_prompt(prompt, limit, model, max_batch_tokens=most)
    return [prompt.token_ids for prompt, _ in checked], skipped


def draw_grid(config: Config, world_size: int) -> list[str]:
    """Draw the groups of `config.rank_groups`. `world_size` must pass `check_world_size`."""
    copies, replicas = config.pack_copies, config.fsdp.replicate_size
    groups = [group for group in config.rank_groups if group.size > 1]
    data = f"{replicas} replicas x {world_size // replicas // copies} shards"
    if config.model.backend != "fsdp":
        data = f"{world_size // copies} replicas"
    factors = [f"{group.size} {group.kind}" for group in reversed(groups) if group.shares_packs]
    lines = [f"{world_size} processes = {' x '.join([data, *factors])}"]
    if copies > 1:
        lines.append(f"packs {_groups(world_size, copies)}")
    if replicas > 1:
        lines.append(f"replicas {_groups(world_size, world_size // replicas)}")
    return lines + [f"{group.kind} {_groups(world_size, group.size, group.stride)}" for group in groups]


def _groups(num_ranks: int, size: int, stride: int = 1) -> str:
    """Format the ranks as bracketed groups of `size` members with `stride` between them."""
    starts = [start for start in range(num_ranks) if start // stride % size == 0]
    return _some([f"[{_some([str(start + i * stride) for i in range(size)])}]" for start in starts])


def _some(words: list[str]) -> str:
    return " ".join(words if len(words) <= 2 * _SHOWN_RANKS else [*words[:_SHOWN_RANKS], "...", words[-1]])
