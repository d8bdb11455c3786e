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
    effort: tuple[float, ...] = ()  # cost by kind of change; lower is better


def change(config: Config, values: Mapping[str, Any]) -> Changed:
    """Return `config` with the values of these flat keys. Does not validate the result."""
    flags: list[str] = []
    sections: dict[str, dict[str, Any]] = {}
    for flat, value in values.items():
        key = all_keys()[flat]
        if key.value(config) != value:
            sections.setdefault(key.section, {})[key.name] = value
            flags.append(_flag(key.flag, value))
    update = {name: getattr(config, name).model_copy(update=fields) for name, fields in sections.items()}
    return Changed(config.model_copy(update=update), tuple(flags))


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
    """Return whether config/checks.py accepts the changed options together."""
    model = config.model
    selective = model.gradient_checkpointing and model.gradient_checkpointing_kind == "selective"
    twice = config.fsdp.cpu_offload and config.optim.offload_optimizer
    dealt = config.parallel.context_parallel_size > 1 and (selective or model.offload_activations)
    split = config.parallel.splits and (selective or config.fsdp.cpu_offload or model.offload_activations)
    elsewhere = selective and (model.offload_activations or model.compile)
    return not (twice or dealt or split or elsewhere)


def _stronger(given: Config, changed: Config) -> bool:
    """Return whether `changed` is possible and saves at least as much memory as `given` in every respect."""
    return _possible(changed) and all(new >= old for new, old in zip(_cost(changed), _cost(given), strict=True))


def _cost(config: Config) -> tuple[float, float]:
    """Return the cost of (state placement, layer recomputation and offload)."""
    state = _EVERYTHING if config.fsdp.cpu_offload else _OPTIMIZER * config.optim.offload_optimizer
    model = config.model
    again = _FORWARD if model.gradient_checkpointing_kind == "full" else _CHEAP_OPERATIONS
    layers = again / model.gradient_checkpointing_every if model.gradient_checkpointing else 0.0
    return state, layers + _ACTIVATIONS * model.offload_activations


def _flag(flag: str, value: Any) -> str:
    if isinstance(value, bool):
        return flag if value else f"--no-{flag.removeprefix('--')}"
    return f"{flag} {value}"
