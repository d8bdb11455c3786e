"""What a run can change to need less memory, fastest first, and the flags that say so.

The costs are shares of a training step, to put remedies in an order. They are known from the work that each adds, not
measured: a forward pass is a third of a step, most of it in matrix products; Adam's state crosses to the host and back
once in a step, weights twice in each pack.
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
    flags: tuple[str, ...]  # what changed, beside the flags that were given
    effort: tuple[float, ...] = ()  # by what was changed: less of all of it is better


def change(config: Config, values: Mapping[str, Any]) -> Changed:
    """`config` with these flat keys; not checked again."""
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
    """`config` as it is, and with each remedy that it does not have: one for each set of flags."""
    seen: set[tuple[str, ...]] = set()
    for values in CHOICES:
        found = change(config, values)
        if _possible(found.config) and found.flags not in seen:
            seen.add(found.flags)
            yield found


def remedies(config: Config, *, packs: Sequence[int], caches: Sequence[int]) -> Iterator[Changed]:
    """Fastest first. `packs`, `caches`: smaller --max-tokens-per-gpu and --rollout-max-batch-tokens, from large on.

    A smaller cache and smaller packs cost little and come first.
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
    """What config/checks.py lets pass, of what is changed here."""
    model = config.model
    selective = model.gradient_checkpointing and model.gradient_checkpointing_kind == "selective"
    twice = config.fsdp.cpu_offload and config.optim.offload_optimizer
    dealt = config.parallel.context_parallel_size > 1 and (selective or model.offload_activations)
    split = config.parallel.splits and (selective or config.fsdp.cpu_offload or model.offload_activations)
    elsewhere = selective and (model.offload_activations or model.compile)
    return not (twice or dealt or split or elsewhere)


def _stronger(given: Config, changed: Config) -> bool:
    """In each respect as it was given, or more, and possible."""
    return _possible(changed) and all(new >= old for new, old in zip(_cost(changed), _cost(given), strict=True))


def _cost(config: Config) -> tuple[float, float]:
    """(of where the state is, of what layers keep)"""
    state = _EVERYTHING if config.fsdp.cpu_offload else _OPTIMIZER * config.optim.offload_optimizer
    model = config.model
    again = _FORWARD if model.gradient_checkpointing_kind == "full" else _CHEAP_OPERATIONS
    layers = again / model.gradient_checkpointing_every if model.gradient_checkpointing else 0.0
    return state, layers + _ACTIVATIONS * model.offload_activations


def _flag(flag: str, value: Any) -> str:
    if isinstance(value, bool):
        return flag if value else f"--no-{flag.removeprefix('--')}"
    return f"{flag} {value}"
