"""The ranks of one attempt connect, without keys of earlier attempts. A rank is a thread here."""

import re
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch.distributed as dist

from fsdptrain.errors import ConfigError, RankError
from fsdptrain.rank_variables import RankVariables
from fsdptrain.rendezvous import open_store
from tests.testing import reserved_port


@pytest.fixture
def port() -> Iterator[int]:
    with reserved_port() as port:
        yield port


def ranks_of(world_size, port, *, store_of_agent=False):
    first = RankVariables(0, world_size, 0, world_size, "127.0.0.1", port, store_of_agent)
    return [replace(first, rank=rank, local_rank=rank) for rank in range(world_size)]


def open_stores(ranks):
    with ThreadPoolExecutor(len(ranks)) as threads:
        return list(threads.map(lambda one: open_store(one, 300.0), ranks))


def test_ranks_connect_at_the_port_of_rank_0(port):
    first, second, third = open_stores(ranks_of(3, port))
    first.set("key", "value")
    assert second.get("key") == third.get("key") == b"value"


def test_a_restart_reads_no_keys_of_dead_ranks():
    """https://github.com/pytorch/pytorch/issues/135712: with the store of the agent, 6 of 6 restarts failed."""
    agent = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ranks = ranks_of(2, agent.port, store_of_agent=True)
    before = open_stores(ranks)
    before[0].set("address", "of a dead rank")
    agent.set("fsdptrain/hello/1", "left by a rank that died while it waited")
    first, second = open_stores(ranks)
    second.set("alive", "")
    assert first.check(["alive"])
    assert not second.check(["address"])


def test_missing_ranks_are_named_while_waiting_and_at_the_timeout(port, capsys, monkeypatch):
    monkeypatch.setattr("fsdptrain.rendezvous._FIRST_NOTICE_S", 0.0)
    first, _, third = ranks_of(3, port)
    where = f"MASTER_ADDR=127.0.0.1 MASTER_PORT={port}"
    with pytest.raises(RankError, match=rf"^{where}: not connected: rank 1, 2 \(of 3\) after 1 s \(--dist-timeout\)$"):
        open_store(first, 1.0)
    with pytest.raises(RankError, match=rf"^{where}: rank 0 does not answer after 1 s \(--dist-timeout\)$"):
        open_store(third, 1.0)
    notice = rf"fsdptrain: {where}: waiting, not connected: rank 1, 2 \(of 3\) after \d+ s\n"
    assert re.fullmatch(notice, capsys.readouterr().err)


def test_a_port_in_use_and_an_unknown_host_are_one_line():
    with socket.create_server(("", 0)) as taken:
        first, _ = ranks_of(2, port := taken.getsockname()[1])
        with pytest.raises(ConfigError, match=f"^MASTER_PORT={port}: rank 0 cannot listen there .address already in"):
            open_store(first, 1.0)
    _, second = ranks_of(2, 29500)
    with pytest.raises(ConfigError, match=r"host there.is.no.such.host.invalid is unknown after 1 s"):
        open_store(replace(second, master_addr="there.is.no.such.host.invalid"), 1.0)
