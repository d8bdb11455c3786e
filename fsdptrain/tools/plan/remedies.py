"""Options that reduce memory, fastest first, and their flags.

Costs are fractions of a training step and serve only to order the options. They are estimated from the added work, not
measured: a forward pass is a third of a step, most of it in matrix products; Adam's state moves to the host and back
once per step, weights twice per pack.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from fsdptrain.config import Config
from fsdptrain.features.activation_memory.config import ActivationMemoryConfig
from fsdptrain.features.compile.config import CompileConfig
from fsdptrain.memory.remedies import OPTIMIZER_ON_HOST, STATE_ON_HOST, Changed, change

_FORWARD, _CHEAP_OPERATIONS, _ACTIVATIONS, _OPTIMIZER, _EVERYTHING = 0.33, 0.1, 0.05, 0.05, 0.6

_SELECTIVE = {"gradient_checkpointing": True, "gradient_checkpointing_kind": "selective"}
_BUDGET = {"activation_memory_budget": 0.5}  # only with --compile
_EVERY = {"gradient_checkpointing": True, "gradient_checkpointing_kind": "full", "activation_memory_budget": 1.0}
_SECOND = _EVERY | {"gradient_checkpointing_every": 2}
_FULL = _SECOND | {"gradient_checkpointing_every": 1}
_INPUTS = _FULL | {"offload_activations": True}

LAYERS: tuple[Mapping[str, Any], ...] = (_BUDGET, _SELECTIVE, _SECOND, _FULL, _INPUTS)
STATES: tuple[Mapping[str, Any], ...] = (OPTIMIZER_ON_HOST, STATE_ON_HOST)
_OF_LAYERS = (_BUDGET, _SELECTIVE, _FULL, _INPUTS)
CHOICES: tuple[Mapping[str, Any], ...] = ({}, OPTIMIZER_ON_HOST, *_OF_LAYERS, STATE_ON_HOST, {**STATE_ON_HOST, **_FULL})


def choices(config: Config) -> Iterator[Changed]:
    """Yield `config` as given, and with each remedy that it does not have. Each set of flags appears once."""
    seen: set[tuple[str, ...]] = set()
    for values in CHOICES:
        found = change(config, values)
        if found.is_valid and found.flags not in seen:
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
        if _stronger(config, changed := change(config, {**state, **layers}))
    ]
    for cost, values in sorted(pairs, key=lambda pair: sum(pair[0])):
        for i, pack in enumerate([{}, *({"max_tokens_per_gpu": tokens} for tokens in packs)]):
            for j, cache in enumerate([{}, *({"rollout_max_batch_tokens": tokens} for tokens in caches)]):
                found = change(config, {**cache, **pack, **values})
                yield Changed(found.config, found.flags, (*cost, i, j))


def _stronger(given: Config, changed: Changed) -> bool:
    """Return whether `changed` is valid and saves at least as much memory as `given` in every respect."""
    costs = zip(_cost(changed.config), _cost(given), strict=True)
    return all(new >= old for new, old in costs) and changed.is_valid


def _cost(config: Config) -> tuple[float, float]:
    """Return the cost of (state placement, layer recomputation and offload)."""
    state = _EVERYTHING if config.fsdp.cpu_offload else _OPTIMIZER * config.optim.offload_optimizer
    memory = config.section(ActivationMemoryConfig)
    again = _FORWARD if memory.gradient_checkpointing_kind == "full" else _CHEAP_OPERATIONS
    budget = config.section(CompileConfig).activation_memory_budget
    compiled = _FORWARD * (1 - budget) ** 2  # the cheapest operations first
    layers = again / memory.gradient_checkpointing_every if memory.gradient_checkpointing else compiled
    return state, layers + _ACTIVATIONS * memory.offload_activations
