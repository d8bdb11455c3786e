"""What must be the same on all machines of a run: versions and options. In words that can be compared and shown."""

import hashlib
import json
import platform
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import fsdptrain
from fsdptrain.config import Config
from fsdptrain.config.keys import all_keys

_OWN = ("node_rank", "network_interface", "rdzv_endpoint", "log_rank_dir", "nproc_per_node")  # of each machine
_LONGEST = 3  # differences that are shown

Description = Mapping[str, str]


def describe(config: Config, *, nproc: int) -> Description:
    """Name -> what it is on this machine."""
    options = {
        key.flag: str(getattr(getattr(config, key.section), key.name))
        for key in all_keys().values()
        if key.section != "launch" or key.name not in _OWN
    }
    return {**_versions(), "--nproc-per-node": str(nproc), **options}


def digest(description: Description) -> str:
    return hashlib.sha256(json.dumps(description, sort_keys=True).encode()).hexdigest()


def difference(nodes: Sequence[tuple[str, Description]]) -> str | None:
    """The message for the first machine that is not as the first one is; None: all are alike."""
    (first, ours), *others = nodes
    for name, theirs in others:
        found = [
            f"{what} is {ours.get(what)} on {first} and {theirs.get(what)} on {name}"
            for what in [*ours, *(set(theirs) - set(ours))]
            if ours.get(what) != theirs.get(what)
        ]
        if found:
            more = f"; {len(found) - _LONGEST} more" if len(found) > _LONGEST else ""
            return f"machines of one run must be alike: {'; '.join(found[:_LONGEST])}{more}"
    return None


def _versions() -> dict[str, str]:
    found = {"Python": platform.python_version(), "fsdptrain": f"{fsdptrain.__version__} ({_sources()})"}
    for package in ("torch", "transformers"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "missing"
    return found


def _sources() -> str:
    """Two clones of different commits have the same version."""
    folder = Path(fsdptrain.__file__).parent
    found = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        found.update(str(path.relative_to(folder)).encode() + path.read_bytes())
    return found.hexdigest()[:8]
