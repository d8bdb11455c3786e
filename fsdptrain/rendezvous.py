"""The store at which the ranks of one attempt find each other."""

import os
import socket
from contextlib import suppress
from datetime import timedelta

import psutil
import torch.distributed as dist

from fsdptrain.errors import ConfigError, RankError
from fsdptrain.rank_variables import RankVariables

_GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"


def open_store(ranks: RankVariables, timeout_s: float) -> dist.Store:
    """Connect all ranks to a new store. Collective.

    Raises ConfigError where rank 0 cannot listen, RankError where ranks do not come within `timeout_s`.
    """
    if ranks.keeps_store_over_restarts:
        raise ConfigError(
            "torchrun --max-restarts on multiple machines needs TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 in torchrun's "
            "environment: otherwise restarted ranks read the addresses of dead ones (pytorch issue 135712)"
        )
    _set_gloo_interface(ranks)
    store: dist.Store = _connect(ranks, timeout_s)
    if ranks.store_of_agent:  # of one machine: it outlives restarts, and holds the addresses of dead ranks
        store = dist.PrefixStore(f"restart {ranks.restart}", store)
    joined = [f"joined/{rank}" for rank in range(ranks.world_size)]
    store.set(joined[ranks.rank], "")
    try:
        store.wait(joined, timedelta(seconds=timeout_s))
    except dist.DistStoreError:
        missing = [str(rank) for rank, name in enumerate(joined) if not store.check([name])]
        names = ", ".join(missing[:8]) + (", ..." if len(missing) > 8 else "")
        problem = f"not connected: rank {names} (of {ranks.world_size})"
        raise RankError(f"{_where(ranks)}: {problem} after {timeout_s:g} s (--dist-timeout)") from None
    return store


def _connect(ranks: RankVariables, timeout_s: float) -> dist.TCPStore:
    listens = ranks.rank == 0 and not ranks.store_of_agent
    address = (ranks.master_addr, ranks.master_port, ranks.world_size)
    try:
        return dist.TCPStore(*address, is_master=listens, wait_for_workers=False, timeout=timedelta(seconds=timeout_s))
    except dist.DistError as error:
        if not listens:
            problem = f"rank 0 does not answer after {timeout_s:g} s (--dist-timeout)"
            raise RankError(f"{_where(ranks)}: {problem}") from None
        reason = str(error).partition("\n")[0].rpartition("message: ")[2]
        raise ConfigError(
            f"MASTER_PORT={ranks.master_port}: rank 0 cannot listen there ({reason}): choose another port, the same "
            "for all ranks"
        ) from None


def _where(ranks: RankVariables) -> str:
    return f"MASTER_ADDR={ranks.master_addr} MASTER_PORT={ranks.master_port}"


def address_towards(host: str | None) -> str:
    """Return the address of this machine from which `host` is reached. Raises OSError."""
    family, *_, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as route:
        route.connect(address)  # sends nothing
        return route.getsockname()[0]


def _set_gloo_interface(ranks: RankVariables) -> None:
    """Choose the interface towards rank 0. gloo would take that of the host name, often the loopback device."""
    if _GLOO_INTERFACE in os.environ:
        return
    with suppress(OSError):  # `_connect` reports what cannot be reached
        local_address = address_towards(ranks.master_addr)
        for name, addresses in psutil.net_if_addrs().items():
            if any(other.address.partition("%")[0] == local_address for other in addresses):
                os.environ[_GLOO_INTERFACE] = name
                return
