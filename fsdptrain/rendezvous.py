"""The store at which the ranks of one attempt find each other."""

import os
import socket
import sys
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta

import psutil
import torch.distributed as dist

from fsdptrain.errors import ConfigError, RankError
from fsdptrain.rank_variables import RankVariables

_GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"
_POLL_S, _FIRST_NOTICE_S, _NOTICE_S = 0.05, 3.0, 30.0
_UNKNOWN_HOST_S = 60.0  # a scheduler may register names after it has started processes


def open_store(ranks: RankVariables, timeout_s: float) -> dist.Store:
    """Connect all ranks to a new store. Collective.

    torchrun's agents keep one store over restarts, in which restarted ranks read the addresses of dead ones
    (https://github.com/pytorch/pytorch/issues/135712). There rank 0 opens a new one on a free port.

    Raises ConfigError where rank 0 cannot listen, RankError where ranks do not come within `timeout_s`.
    """
    wait = _Wait(ranks, timeout_s)
    if ranks.rank and not ranks.store_of_agent:
        host = f"host {ranks.master_addr} is unknown"
        wait.until(lambda: _is_known(ranks.master_addr), lambda: host, limit_s=_UNKNOWN_HOST_S, error=ConfigError)
        wait.until(lambda: _answers(ranks), lambda: "rank 0 does not answer")
    _set_gloo_interface(ranks)
    if ranks.store_of_agent:
        new = _listen(ranks, 0) if ranks.rank == 0 else None
        port = _exchange_port(_connect(ranks, ranks.master_port, timeout_s), ranks, new.port if new else 0, wait)
        store = new or _connect(ranks, port, timeout_s)
    else:
        port = ranks.master_port
        store = _connect(ranks, port, timeout_s) if ranks.rank else _listen(ranks, port)
        _exchange_port(store, ranks, port, wait)
    store.set_timeout(timedelta(seconds=timeout_s))
    return store


def _listen(ranks: RankVariables, port: int) -> dist.TCPStore:
    try:
        return dist.TCPStore(ranks.master_addr, port, ranks.world_size, is_master=True, wait_for_workers=False)
    except dist.DistNetworkError as error:
        reason = str(error).partition("\n")[0].rpartition("message: ")[2]
        raise ConfigError(
            f"MASTER_PORT={port}: rank 0 cannot listen there ({reason}): choose another port, the same for all ranks"
        ) from None


def _connect(ranks: RankVariables, port: int, timeout_s: float) -> dist.TCPStore:
    return dist.TCPStore(ranks.master_addr, port, ranks.world_size, timeout=timedelta(seconds=timeout_s))


def _exchange_port(store: dist.Store, ranks: RankVariables, port: int, wait: "_Wait") -> int:
    """Send `port` of rank 0 to all ranks. Collective: returns on rank 0 when all have it.

    `store` may hold keys of dead ranks. Each rank therefore waits for an answer to a nonce, and rank 0 for receipts of
    its answer, which has a nonce too.
    """
    nonce = uuid.uuid4().hex
    if ranks.rank:
        store.set(f"fsdptrain/hello/{ranks.rank}", nonce)
        wait.until(lambda: store.check([f"fsdptrain/answer/{nonce}"]), lambda: "rank 0 does not answer")
        answer = store.get(f"fsdptrain/answer/{nonce}").decode()
        store.set(f"fsdptrain/receipt/{answer}/{ranks.rank}", "")
        return int(answer.partition(":")[2])
    answer, missing = f"{nonce}:{port}", list(range(1, ranks.world_size))

    def all_have_it() -> bool:
        for rank in missing:
            if store.check([f"fsdptrain/hello/{rank}"]):
                store.set(f"fsdptrain/answer/{store.get(f'fsdptrain/hello/{rank}').decode()}", answer)
        missing[:] = [rank for rank in missing if not store.check([f"fsdptrain/receipt/{answer}/{rank}"])]
        return not missing

    wait.until(all_have_it, lambda: f"not connected: {_format_ranks(missing)} (of {ranks.world_size})")
    return port


class _Wait:
    """One deadline for several waits. The first rank of each machine reports what it waits for."""

    def __init__(self, ranks: RankVariables, timeout_s: float) -> None:
        self._where = f"MASTER_ADDR={ranks.master_addr} MASTER_PORT={ranks.master_port}"
        self._reports = ranks.local_rank == 0
        self._timeout_s = timeout_s
        self._begin = time.monotonic()

    def until(
        self,
        done: Callable[[], bool],
        problem: Callable[[], str],
        *,
        limit_s: float = float("inf"),
        error: type[ConfigError] | type[RankError] = RankError,
    ) -> None:
        """Raises `error` after the deadline, or after `limit_s` if that is earlier."""
        limit_s, notice = min(limit_s, self._timeout_s), _FIRST_NOTICE_S
        while not done():
            seconds = time.monotonic() - self._begin
            if seconds > limit_s:
                flag = " (--dist-timeout)" if limit_s == self._timeout_s else ""
                raise error(f"{self._where}: {problem()} after {limit_s:g} s{flag}")
            if self._reports and seconds > notice:
                sys.stderr.write(f"fsdptrain: {self._where}: waiting, {problem()} after {seconds:.0f} s\n")
                notice = seconds + _NOTICE_S
            time.sleep(_POLL_S)


def _is_known(host: str) -> bool:
    try:
        socket.getaddrinfo(host, None)
    except OSError:
        return False
    return True


def _answers(ranks: RankVariables) -> bool:
    try:
        with socket.create_connection((ranks.master_addr, ranks.master_port), timeout=5.0):
            return True
    except OSError:
        return False


def _format_ranks(ranks: list[int]) -> str:
    return "rank " + ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")


def _set_gloo_interface(ranks: RankVariables) -> None:
    """Choose the interface towards rank 0. gloo would take that of the host name, often the loopback device."""
    if _GLOO_INTERFACE in os.environ:
        return
    with suppress(OSError):  # `_connect` reports what cannot be reached
        family, *_, address = socket.getaddrinfo(ranks.master_addr, ranks.master_port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as route:
            route.connect(address)  # sends nothing
            own = route.getsockname()[0]
        for name, addresses in psutil.net_if_addrs().items():
            if any(found.address.partition("%")[0] == own for found in addresses):
                os.environ[_GLOO_INTERFACE] = name
                return
