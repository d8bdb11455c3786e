"""What a recipe says that gives way to an algorithm or a loss that a flag names.

    default < preset of the recipe's algorithm < recipe < preset of a flag's algorithm < flag

A preset stands just below whoever named it. So `--recipe runs/a/config.yaml --algorithm gspo` is gspo, although the
recipe, which a run wrote, holds every value of another algorithm. A flag that repeats the recipe's algorithm says
nothing new, and the recipe's own choices stay.
"""

from collections.abc import Mapping
from typing import Any

from fsdptrain.config.algorithm import AlgorithmConfig
from fsdptrain.config.keys import all_keys
from fsdptrain.config.presets import LOSS_FIELDS, OLD_POLICY, preset_values

LOSS_OWN = frozenset(LOSS_FIELDS) - OLD_POLICY  # a clip of one loss means nothing to another
ALGORITHM_OWN = LOSS_OWN | {"loss", "loss_aggregation", "advantage_estimator", "advantage_scale"}

RIVALS = (  # two ways to say one thing, or two that exclude each other
    ("steps_per_rollout", "global_batch_size"),
    ("fp16", "bf16"),
    ("lr_warmup_iters", "lr_warmup_fraction"),
)


def outspoken(recipe: Mapping[str, Mapping[str, Any]], flags: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Flat keys of `recipe` whose rival is turned on by a flag; both are section -> name -> value."""
    before, now = _chosen(recipe), _chosen(flags)
    pairs = [*RIVALS, *((b, a) for a, b in RIVALS)]
    return [other for key, other in pairs if now.get(key) and before.get(other) and other not in now]


def superseded(recipe: Mapping[str, Mapping[str, Any]], flags: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Flat keys of `recipe` that give way to `flags`; both are section -> name -> value.

    Of another algorithm: its loss with all options, aggregation, advantage, and what its preset or that of the recipe's
    algorithm says of other sections, unless the user had changed it. Of another loss: the options of losses.
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
