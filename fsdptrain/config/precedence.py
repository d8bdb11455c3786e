"""Precedence between a recipe and flags that select another algorithm or loss.

    flag > preset of a flag's algorithm > recipe > preset of the recipe's algorithm > default

A preset ranks just below the source that names its algorithm. `--recipe runs/a/config.yaml --algorithm gspo` therefore
selects gspo, although the recipe, written by a run, contains every value of another algorithm. If a flag repeats the
recipe's algorithm, all values of the recipe are kept.
"""

from collections.abc import Mapping
from typing import Any

from fsdptrain.config.algorithm import AlgorithmConfig
from fsdptrain.config.keys import all_keys
from fsdptrain.config.presets import LOSS_FIELDS, OLD_POLICY, preset_values

LOSS_OWN = frozenset(LOSS_FIELDS) - OLD_POLICY  # clip values do not transfer between losses
ALGORITHM_OWN = LOSS_OWN | {"loss", "loss_aggregation", "advantage_estimator", "advantage_scale"}

RIVALS = (  # alternatives, or mutually exclusive
    ("steps_per_rollout", "global_batch_size"),
    ("fp16", "bf16"),
    ("lr_warmup_iters", "lr_warmup_fraction"),
)


def outspoken(recipe: Mapping[str, Mapping[str, Any]], flags: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return flat keys of `recipe` that an alternative option among `flags` replaces.

    Both arguments are section -> name -> value.
    """
    before, now = _chosen(recipe), _chosen(flags)
    pairs = [*RIVALS, *((b, a) for a, b in RIVALS)]
    return [other for key, other in pairs if now.get(key) and before.get(other) and other not in now]


def superseded(recipe: Mapping[str, Mapping[str, Any]], flags: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return flat keys of `recipe` that `flags` override implicitly. Both are section -> name -> value.

    If a flag selects another algorithm: the loss with all its options, aggregation, advantage, all values of the new
    preset, and values that equal those of the recipe's preset. If a flag selects another loss: the options of losses.
    """
    before, now = _chosen(recipe), _chosen(flags)
    algorithm = before.get("algorithm", AlgorithmConfig().algorithm)
    old = preset_values(algorithm, before.get("loss"))
    giving_way: set[str] = set()
    if now.get("algorithm", algorithm) != algorithm:
        new = preset_values(now["algorithm"], now.get("loss"))
        giving_way = set(ALGORITHM_OWN) | set(new) | {flat for flat in old if before.get(flat) == old[flat]}
    elif now.get("loss", before.get("loss", old.get("loss"))) != before.get("loss", old.get("loss")):
        giving_way = set(LOSS_OWN)
    return [flat for flat in before if flat in giving_way and flat not in now]


def _chosen(values: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    return {flat: values[k.section][k.name] for flat, k in all_keys().items() if k.name in values.get(k.section, {})}
