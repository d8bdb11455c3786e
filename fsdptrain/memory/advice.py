"""Which single changes of options let a run fit into memory, by the estimate."""

from collections.abc import Iterator, Mapping
from typing import Any

from transformers import PreTrainedModel

from fsdptrain.config import Config
from fsdptrain.config.checks import check
from fsdptrain.config.keys import all_keys
from fsdptrain.errors import ConfigError
from fsdptrain.memory.estimate import Machine, estimate, gib

_CHANGES: tuple[Mapping[str, Any], ...] = (  # single changes that take less memory, fastest first
    {"async_save": False},
    {"offload_optimizer": True},
    {"fsdp_reshard_after_forward": True},
    {"logprob_chunk_size": 512},
    {"gradient_checkpointing": True},
    {"offload_activations": True},
    {"offload_train": True},
    {"offload_optimizer": False, "offload_train": False, "fsdp_cpu_offload": True},
    {"fsdp_cpu_offload": False},
)


def flags_that_help(model: PreTrainedModel, config: Config, machine: Machine) -> list[str]:
    """Return the single changes of flags that need less of what `config` lacks, with the GiB that they then need.

    If the run fits by the estimate, they are those that need less on the device.
    """
    given = estimate(model, config, machine)
    lacks = given.lacks or ("device" if machine.has_accelerator else "host")
    needs = {flags: estimate(model, changed, machine).needs[lacks] for changed, flags in _changed(config)}
    return [f"{flags} ({gib(need)} GiB)" for flags, need in needs.items() if need < 0.99 * given.needs[lacks]]


def _changed(config: Config) -> Iterator[tuple[Config, str]]:
    """Yield `config` with each valid single change, and the flags of the change."""
    tokens, cache = config.batch.max_tokens_per_gpu, config.rollout.max_batch_tokens
    smaller = ({"max_tokens_per_gpu": tokens // 2}, {"rollout_max_batch_tokens": cache // 2})
    for values in (*_CHANGES, *smaller):
        changes = {flat: x for flat, x in values.items() if flat in all_keys() and config.value(flat) != x}
        if not changes:
            continue
        changed = config.with_values(**changes)
        try:
            check(changed)
        except ConfigError:
            continue
        yield changed, " ".join(all_keys()[flat].shown(changed) for flat in changes)
