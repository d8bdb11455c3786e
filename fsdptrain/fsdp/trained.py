"""Choose the parameters to train and their learning rates, by name: --freeze and --lr-scale.

Regular expressions are searched in the names of `model.named_parameters()`, of which a tied parameter has several.
"""

import logging
import math
import re
from collections.abc import Sequence
from difflib import get_close_matches

from torch import nn

from fsdptrain.config import OptimConfig
from fsdptrain.errors import ConfigError
from fsdptrain.model.loading.fill import parameter_names

log = logging.getLogger(__name__)


def choose_trained(model: nn.Module, options: OptimConfig) -> None:
    """Freeze parameters of the meta `model`, and set its `lr_scales`: factors by first names. Raises ConfigError."""
    trained = _trained(model)
    frozen = {names for pattern in options.freeze for names in _matching("--freeze", pattern, trained)}
    if len(frozen) == len(trained):
        raise ConfigError(f"--freeze {' '.join(options.freeze)} leaves no parameter to train: freeze fewer")
    for names in frozen:
        model.get_parameter(names[0]).requires_grad_(False)
    log.info("%d of %d parameters are trained", len(trained) - len(frozen), len(parameter_names(model)))
    chosen: dict[str, str] = {}
    for pattern, factor in options.lr_scale.items():
        if not 0 < factor < math.inf:
            raise ConfigError(f"--lr-scale {pattern}={factor:g} must be above 0: --freeze keeps parameters unchanged")
        for name, *_ in _matching("--lr-scale", pattern, _trained(model)):
            if chosen.setdefault(name, pattern) != pattern:
                raise ConfigError(f"--lr-scale {chosen[name]} and {pattern} both match {name}: narrow one of them")
    vars(model)["lr_scales"] = {name: options.lr_scale[pattern] for name, pattern in chosen.items()}


def _trained(model: nn.Module) -> list[tuple[str, ...]]:
    return [names for names in parameter_names(model) if model.get_parameter(names[0]).requires_grad]


def _matching(flag: str, pattern: str, trained: Sequence[tuple[str, ...]]) -> list[tuple[str, ...]]:
    try:
        found = [names for names in trained if any(re.search(pattern, name) for name in names)]
    except re.error as error:
        raise ConfigError(f"{flag} {pattern} is not a regular expression: {error}") from error
    if not found:
        known = {re.split(r"\.\d+\.", name)[-1].removesuffix(".weight") for names in trained for name in names}
        near = ", ".join(get_close_matches(pattern, sorted(known), n=3, cutoff=0.0))
        raise ConfigError(f"{flag} {pattern} matches no parameter that is trained; the nearest names are {near}")
    return found
