"""Addresses and ports of this machine."""

import ipaddress
import socket
import sys
from contextlib import suppress

import psutil

from fsdptrain.errors import ConfigError, RankError


def listen(endpoint: tuple[str, int], *, backlog: int) -> socket.socket:
    """At the address of --rdzv-endpoint, where this machine has it; else at all of its addresses."""
    host, port = endpoint
    address = own_address(host)
    try:
        if address is not None:
            family = socket.AF_INET6 if ":" in address else socket.AF_INET
            server = socket.create_server((address, port), family=family, backlog=backlog)
        else:
            sys.stderr.write(
                f"fsdptrain: --rdzv-endpoint {host}:{port} names no one address of this machine, node 0: it listens at "
                "all that it has, and whoever reaches the port can take part\n"
            )
            both = socket.has_dualstack_ipv6()
            family = socket.AF_INET6 if both else socket.AF_INET
            server = socket.create_server(("", port), family=family, dualstack_ipv6=both, backlog=backlog)
    except OSError as error:
        reason = (error.strerror or str(error)).partition(" (while ")[0]  # Python repeats the address
        raise ConfigError(
            f"--rdzv-endpoint {host}:{port}: node 0 cannot listen there ({reason}): choose another port"
        ) from None
    server.setblocking(False)
    return server


def own_address(host: str) -> str | None:
    """The address that `host` names, where it is one of this machine's at which others can reach it.

    None for a name that is the loopback device here: on other machines it is something else. None too for a name of
    several addresses here: other machines may know it by another one.
    """
    own = {found.address.partition("%")[0] for every in psutil.net_if_addrs().values() for found in every}
    try:
        named = [str(info[4][0]) for info in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)]
    except OSError:
        return None
    here = list(dict.fromkeys(address for address in named if address in own))
    if host in (*named, "localhost"):
        return here[0] if here else None
    reachable = [address for address in here if not ipaddress.ip_address(address).is_loopback]
    return reachable[0] if len(reachable) == 1 else None


def interface_of(address: str | None) -> str | None:
    """The network interface that has `address`."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(found.address.partition("%")[0] == address for found in addresses):
            return name
    return None


def free_port(first: int) -> int:
    """The next one that is free, on all addresses: far from those that the system deals out itself."""
    for port in range(first, first + 100):
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("", port))
            return port
    raise RankError(f"no port from {first} to {first + 99} is free for the store of the ranks")
