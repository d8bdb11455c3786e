"""Check that versions and options are the same on all ranks of a run."""

import hashlib
import os
import platform
import socket
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path

import fsdptrain
from fsdptrain.config import Config
from fsdptrain.config.keys import all_keys
from fsdptrain.distributed import gather
from fsdptrain.errors import ConfigError

_IGNORED = ("--log-dir", "--nproc-per-node")
_MAX_SHOWN = 3  # number of differences in the message

Description = Mapping[str, str]


def require_same_options(config: Config) -> None:
    """Compare versions and options of all ranks. Collective. Raises ConfigError on all ranks if they differ."""
    where = f"rank {os.environ['RANK']} ({socket.gethostname()})"
    if found := difference(gather((where, {**_versions(), **_options(config)}))):
        raise ConfigError(f"all ranks must have the same versions and options: {found}")


def difference(ranks: Sequence[tuple[str, Description]]) -> str:
    """Describe the differences between the first rank and the first rank that differs; "" if there are none."""
    (first, ours), *others = ranks
    for name, theirs in others:
        found = [
            f"{what} is {ours.get(what)} on {first} and {theirs.get(what)} on {name}"
            for what in [*ours, *(set(theirs) - set(ours))]
            if ours.get(what) != theirs.get(what)
        ]
        if found:
            more = f"; {len(found) - _MAX_SHOWN} more" if len(found) > _MAX_SHOWN else ""
            return "; ".join(found[:_MAX_SHOWN]) + more
    return ""


def _options(config: Config) -> dict[str, str]:
    return {key.flag: str(key.value(config)) for key in all_keys().values() if key.flag not in _IGNORED}


def _versions() -> dict[str, str]:
    return {
        "Python": platform.python_version(),
        "fsdptrain": f"{fsdptrain.__version__} ({_source_digest()})",
        **{package: version(package) for package in ("torch", "transformers")},
    }


def _source_digest() -> str:
    """Hash the source code: checkouts of different commits have the same version number."""
    folder = Path(fsdptrain.__file__).parent
    found = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        found.update(str(path.relative_to(folder)).encode() + path.read_bytes())
    return found.hexdigest()[:8]
