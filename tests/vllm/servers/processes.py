"""Signals to the processes of a server: the one that listens, its engine and its worker, which are one group."""

import os

import psutil


def send(url: str, number: int) -> None:
    """A signal to all of them at one time: none is left that could notice the death of another."""
    os.killpg(os.getpgid(listening(url).pid), number)


def listening(url: str) -> psutil.Process:
    port = int(url.rpartition(":")[2])
    [pid] = {c.pid for c in psutil.net_connections("tcp") if c.laddr.port == port and c.status == "LISTEN"}
    return psutil.Process(pid)
