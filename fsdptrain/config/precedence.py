"""Precedence between a recipe and flags that select another algorithm or loss.

    flag > preset of a flag's algorithm > recipe > preset of the recipe's algorithm > default

A preset ranks just below the source that names its algorithm. `--recipe runs/a/config.yaml --algorithm gspo` therefore
selects gspo, although the recipe, written by a run, contains every value of another algorithm. If a flag repeats the
recipe's algorithm, all values of the recipe are kept.
"""

from collections.abc import Mapping
from typing import Any

from fsdptrain.config.algorithm import AlgorithmConfig
from fsdptrain.config.presets import LOSS_FIELDS, OLD_POLICY, preset_values

LOSS_OWN = frozenset(LOSS_FIELDS) - OLD_POLICY  # clip values do not transfer between losses
ALGORITHM_OWN = LOSS_OWN | {"loss", "loss_aggregation", "advantage_estimator", "advantage_scale"}


def superseded(recipe: Mapping[str, Any], flags: Mapping[str, Any]) -> list[str]:
    """Return the keys of `recipe` that `flags` override implicitly. All keys are flat.

    If a flag selects another algorithm: the loss with all its options, aggregation, advantage, all values of the new
    preset, and values that equal those of the recipe's preset. If a flag selects another loss: the options of losses.
    """
    algorithm = recipe.get("algorithm", AlgorithmConfig().algorithm)
    old = preset_values(algorithm, recipe.get("loss"))
    giving_way: set[str] = set()
    if flags.get("algorithm", algorithm) != algorithm:
        new = preset_values(flags["algorithm"], flags.get("loss"))
        giving_way = set(ALGORITHM_OWN) | set(new) | {flat for flat in old if recipe.get(flat) == old[flat]}
    elif flags.get("loss", recipe.get("loss", old.get("loss"))) != recipe.get("loss", old.get("loss")):
        giving_way = set(LOSS_OWN)
    return [flat for flat in recipe if flat in giving_way and flat not in flags]
