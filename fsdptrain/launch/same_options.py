"""Check that versions and options are the same on all ranks of a run."""

import os
import platform
import socket
from collections.abc import Mapping, Sequence
from importlib.metadata import version

import fsdptrain
from fsdptrain.config import Config
from fsdptrain.config.keys import all_keys
from fsdptrain.distributed import gather
from fsdptrain.errors import ConfigError


def require_same_options(config: Config) -> None:
    """Compare versions and options of all ranks. Collective. Raises ConfigError on all ranks if they differ."""
    where = f"rank {os.environ['RANK']} ({socket.gethostname()})"
    versions = {package: version(package) for package in ("torch", "transformers")}
    ours = {"Python": platform.python_version(), "fsdptrain": fsdptrain.__version__, **versions}
    ours |= {key.flag: str(key.value(config)) for key in all_keys().values() if key.flag != "--nproc-per-node"}
    if text := difference(gather((where, ours))):
        raise ConfigError(f"all ranks must have the same versions and options: {text}")


def difference(ranks: Sequence[tuple[str, Mapping[str, str]]]) -> str:
    """Describe the first difference between the first rank and another one; "" if there are none."""
    (first, ours), *others = ranks
    for name, theirs in others:
        for what in [*ours, *theirs]:
            if ours.get(what) != theirs.get(what):
                return f"{what} is {ours.get(what)} on {first} and {theirs.get(what)} on {name}"
    return ""
