"""Detection of explicitly set options, and the error for an option without effect."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from fsdptrain.config.keys import all_keys
from fsdptrain.config.presets import preset_values
from fsdptrain.errors import ConfigError

if TYPE_CHECKING:
    from fsdptrain.config.root import Config


class NoEffectError(ConfigError):
    """Option without effect, given the other options or the model. `key`: flat name, if the configuration knows it."""

    def __init__(self, message: str, key: str = "") -> None:
        super().__init__(message)
        self.key = key


Problem = str | NoEffectError


def changed(config: Config, *keys: str) -> Iterator[str]:
    """Yield those of `keys` (flat names) whose value differs from the default and from the algorithm's preset."""
    preset = preset_values(config.algorithm.algorithm, config.algorithm.loss)
    for flat in keys:
        key = all_keys()[flat]
        if key.value(config) != preset.get(flat, key.default):
            yield flat


def without_effect(config: Config, keys: str, reason: str) -> Iterator[Problem]:
    for flat in changed(config, *keys.split()):
        yield NoEffectError(f"{all_keys()[flat].flag} has no effect {reason}", flat)
