"""Two hosts on one machine: network namespaces connected by a link that can be cut. Nothing leaves them."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import pytest

ROOT = Path(__file__).parents[2]
ADDRESSES = ("10.77.0.1", "10.77.0.2")


@dataclass(frozen=True)
class TwoHosts:
    names: tuple[str, str]  # of the namespaces

    def start(
        self,
        host: int,
        argv: Sequence[str],
        variables: Mapping[str, str] | None = None,
        *,
        python: str = sys.executable,
    ) -> subprocess.Popen:
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **(variables or {})}
        command = ["ip", "netns", "exec", self.names[host], python, "-m", *argv]
        return subprocess.Popen(
            command, env=environment, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )


@contextmanager
def two_hosts() -> Iterator[TwoHosts]:
    """Skips the test where there are no network namespaces; with FSDPTRAIN_REQUIRE_NETNS=1 it fails there."""
    if shutil.which("ip") is None:
        _do_without("there is no `ip` (iproute2), which makes network namespaces")
    names = (f"fsdptrain-{os.getpid()}-0", f"fsdptrain-{os.getpid()}-1")
    try:
        _ip("netns", "add", names[0])
    except PermissionError as error:
        _do_without(f"network namespaces are not permitted here: {error}")
    try:
        _ip("netns", "add", names[1])
        _ip("-n", names[0], "link", "add", "cable", "type", "veth", "peer", "name", "cable", "netns", names[1])
        for name, address in zip(names, ADDRESSES, strict=True):
            _ip("-n", name, "address", "add", f"{address}/24", "dev", "cable")
            _ip("-n", name, "link", "set", "cable", "up")
            _ip("-n", name, "link", "set", "lo", "up")
        yield TwoHosts(names)
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)


def _do_without(reason: str) -> NoReturn:
    if os.environ.get("FSDPTRAIN_REQUIRE_NETNS") == "1":
        pytest.fail(reason)
    pytest.skip(reason)


def _ip(*argv: str) -> None:
    done = subprocess.run(["ip", *argv], capture_output=True, text=True, check=False)
    if done.returncode:
        forbidden = any(words in done.stderr for words in ("Operation not permitted", "Permission denied"))
        kind = PermissionError if forbidden else RuntimeError
        raise kind(f"ip {' '.join(argv)}: {done.stderr.strip()}")
