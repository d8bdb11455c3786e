"""Options that reduce memory, fastest first, and their flags.

Costs are fractions of a training step and serve only to order the options. They are estimated from the added work, not
measured: a forward pass is a third of a step, most of it in matrix products; Adam's state moves to the host and back
once per step, weights twice per pack.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fsdptrain.config import Config
from fsdptrain.config.keys import all_keys
from fsdptrain.features.activation_memory.config import ActivationMemoryConfig
from fsdptrain.features.compile.config import CompileConfig
from fsdptrain.features.context_parallel.config import ContextParallelConfig
from fsdptrain.features.model_parallel.config import ModelParallelConfig

_FORWARD, _CHEAP_OPERATIONS, _ACTIVATIONS, _OPTIMIZER, _EVERYTHING = 0.33, 0.1, 0.05, 0.05, 0.6

_SELECTIVE = {"gradient_checkpointing": True, "gradient_checkpointing_kind": "selective"}
_SECOND = {"gradient_checkpointing": True, "gradient_checkpointing_kind": "full", "gradient_checkpointing_every": 2}
_FULL = _SECOND | {"gradient_checkpointing_every": 1}
_INPUTS = _FULL | {"offload_activations": True}
_STATE = {"offload_optimizer": True}
_ALL = {"offload_optimizer": False, "offload_optimizer_step": "host", "fsdp_cpu_offload": True}

LAYERS: tuple[Mapping[str, Any], ...] = (_SELECTIVE, _SECOND, _FULL, _INPUTS)
STATES: tuple[Mapping[str, Any], ...] = (_STATE, _ALL)
CHOICES: tuple[Mapping[str, Any], ...] = ({}, _STATE, _SELECTIVE, _FULL, _INPUTS, _ALL, _ALL | _FULL)


@dataclass(frozen=True)
class Changed:
    config: Config
    flags: tuple[str, ...]  # flags for the changed options
    cost: tuple[float, ...] = ()  # cost by kind of change; lower is better


def change(config: Config, values: Mapping[str, Any]) -> Changed:
    """Return `config` with the values of these flat keys. Does not validate the result."""
    changed = {flat: value for flat, value in values.items() if config.value(flat) != value}
    flags = [_flag(all_keys()[flat].flag, value) for flat, value in changed.items()]
    return Changed(config.with_values(**changed), tuple(flags))


def choices(config: Config) -> Iterator[Changed]:
    """Yield `config` as given, and with each remedy that it does not have. Each set of flags appears once."""
    seen: set[tuple[str, ...]] = set()
    for values in CHOICES:
        found = change(config, values)
        if _possible(found.config) and found.flags not in seen:
            seen.add(found.flags)
            yield found


def remedies(config: Config, *, packs: Sequence[int], caches: Sequence[int]) -> Iterator[Changed]:
    """Yield combinations of remedies, fastest first.

    A smaller cache and smaller packs cost little and come first.

    Args:
        packs: smaller values of --max-tokens-per-gpu, largest first.
        caches: smaller values of --rollout-max-batch-tokens, largest first.
    """
    pairs = [
        (_cost(changed.config), {**state, **layers})
        for state in ({}, *STATES)
        for layers in ({}, *LAYERS)
        if _stronger(config, (changed := change(config, {**state, **layers})).config)
    ]
    for cost, values in sorted(pairs, key=lambda pair: sum(pair[0])):
        for i, pack in enumerate([{}, *({"max_tokens_per_gpu": tokens} for tokens in packs)]):
            for j, cache in enumerate([{}, *({"rollout_max_batch_tokens": tokens} for tokens in caches)]):
                found = change(config, {**cache, **pack, **values})
                yield Changed(found.config, found.flags, (*cost, i, j))


def _possible(config: Config) -> bool:
    """Return whether the rules of the changed options accept them together."""
    memory = config.section(ActivationMemoryConfig)
    selective, offloads = memory.is_selective, memory.offload_activations
    both_offloads = config.fsdp.cpu_offload and config.optim.offload_optimizer
    context = config.section(ContextParallelConfig).enabled and (selective or offloads)
    split = config.section(ModelParallelConfig).enabled and (selective or config.fsdp.cpu_offload or offloads)
    selective_conflict = selective and (offloads or config.section(CompileConfig).compile)
    return not (both_offloads or context or split or selective_conflict)


def _stronger(given: Config, changed: Config) -> bool:
    """Return whether `changed` is possible and saves at least as much memory as `given` in every respect."""
    return _possible(changed) and all(new >= old for new, old in zip(_cost(changed), _cost(given), strict=True))


def _cost(config: Config) -> tuple[float, float]:
    """Return the cost of (state placement, layer recomputation and offload)."""
    state = _EVERYTHING if config.fsdp.cpu_offload else _OPTIMIZER * config.optim.offload_optimizer
    memory = config.section(ActivationMemoryConfig)
    again = _FORWARD if memory.gradient_checkpointing_kind == "full" else _CHEAP_OPERATIONS
    layers = again / memory.gradient_checkpointing_every if memory.gradient_checkpointing else 0.0
    return state, layers + _ACTIVATIONS * memory.offload_activations


def _flag(flag: str, value: Any) -> str:
    if isinstance(value, bool):
        return flag if value else f"--no-{flag.removeprefix('--')}"
    return f"{flag} {value}"
