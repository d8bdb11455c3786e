"""The ranks of one attempt connect. A rank is a thread here."""

import socket
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch.distributed as dist

from fsdptrain.errors import ConfigError, RankError
from fsdptrain.rank_variables import RankVariables
from fsdptrain.rendezvous import open_store
from tests.testing import reserved_port

pytestmark = pytest.mark.slow


def ranks_of(world_size, port):
    first = RankVariables(0, world_size, world_size, "127.0.0.1", port, False)
    return [replace(first, rank=rank) for rank in range(world_size)]


def test_ranks_connect_at_the_port_of_rank_0():
    with reserved_port() as port, ThreadPoolExecutor(3) as threads:
        first, second, third = threads.map(lambda rank: open_store(rank, 300.0), ranks_of(3, port))
        first.set("key", "value")
        assert second.get("key") == third.get("key") == b"value"


def test_restarted_ranks_do_not_meet_the_dead_ones_in_the_store_of_their_agent():
    with reserved_port() as port, ThreadPoolExecutor(2) as threads:
        agent = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
        ranks = [replace(rank, store_of_agent=True, local_world_size=2) for rank in ranks_of(2, port)]
        first, _ = threads.map(lambda rank: open_store(rank, 300.0), ranks)
        first.set("address", "of a dead rank")
        with pytest.raises(RankError, match=r"not connected: rank 1 \(of 2\)"):
            open_store(replace(ranks[0], restart=1), 1.0)
        del agent


def test_missing_ranks_are_named_at_the_timeout():
    with reserved_port() as port:
        first, _, third = ranks_of(3, port)
        where = f"MASTER_ADDR=127.0.0.1 MASTER_PORT={port}"
        with pytest.raises(RankError, match=rf"^{where}: not connected: rank 1, 2 \(of 3\) after 1 s \(--dist-timeout"):
            open_store(first, 1.0)
        with pytest.raises(RankError, match=rf"^{where}: rank 0 does not answer after 1 s \(--dist-timeout\)$"):
            open_store(third, 1.0)


def test_a_port_in_use_and_a_store_of_dead_ranks_are_one_line():
    with socket.create_server(("", 0)) as taken:
        first, _ = ranks_of(2, port := taken.getsockname()[1])
        with pytest.raises(ConfigError, match=f"^MASTER_PORT={port}: rank 0 cannot listen there .address already in"):
            open_store(first, 1.0)
    with pytest.raises(ConfigError, match="--max-restarts on multiple machines needs TORCH_DISABLE_SHARE_RDZV_TCP_ST"):
        open_store(replace(first, store_of_agent=True, max_restarts=1, local_world_size=1), 1.0)
