"""Which servers of a user are accepted, and how they must be started."""

import logging
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from fsdptrain.config import Config
from fsdptrain.errors import ConfigError
from fsdptrain.vllm.server.build import server_arguments, weight_path
from fsdptrain.vllm.server.checks import require_private
from fsdptrain.vllm.server.client import VLLMClient
from fsdptrain.vllm.server.fleet import Fleet, Server, State
from tests.event_loop import run_in_loop
from tests.testing import save_tiny_checkpoint
from tests.unit.vllm.scripted_server import ANSWERS, ScriptedServer

PRIVATE = [
    "127.0.0.1",
    "localhost",
    "10.1.2.3",
    "192.168.0.7",
    "172.16.5.5",
    "100.64.0.1",
    "100.127.9.9",
    "::1",
    "fd00::1",
]
PUBLIC = ["8.8.8.8", "100.63.0.1", "100.128.0.1", "2001:4860:4860::8888"]


def config(**values: Any) -> Config:
    return Config(hf_checkpoint="x", rollout_engine="vllm-server", **values)


def states(*urls: str, **values: Any) -> list[State]:
    servers = [Server(VLLMClient(url)) for url in urls]
    run_in_loop(Fleet(servers, config(rollout_urls=list(urls), bf16=False, **values)).start())
    return [server.state for server in servers]


@pytest.mark.parametrize("host", [*PRIVATE, *PUBLIC])
def test_a_public_address_needs_a_flag(host):
    require_private(host, "http://there", allow_public=True)
    if host in PRIVATE:
        require_private(host, "http://there", allow_public=False)
        return
    with pytest.raises(ConfigError, match="--rollout-allow-public-servers"):
        require_private(host, "http://there", allow_public=False)


def test_a_server_that_cannot_be_reached_is_left_out_while_enough_can():
    urls = [ScriptedServer().client.url, "http://127.0.0.1:9"]
    assert states(*urls, min_servers=1) == [State.UP, State.DOWN]
    with pytest.raises(ConfigError, match=r"127.0.0.1:9 broke off .*--min-servers is 2"):
        states(*urls, min_servers=2)


def test_a_server_with_other_options_is_rejected_also_when_it_comes_back():
    server = ScriptedServer(version="default")
    given = config(rollout_urls=[server.client.url], bf16=False, max_staleness=1, mismatch_correction="tis")
    down = Server(server.client, state=State.DOWN)
    fleet = Fleet([down], given)
    fitting = server.info
    server.info = fitting | {"scheduler_config": {"policy": "fcfs"}}
    with pytest.raises(ConfigError, match=r"must be started with --scheduling-policy priority \(it has fcfs\)"):
        run_in_loop(Fleet([Server(server.client)], given).start())
    run_in_loop(fleet._let_rejoin())
    assert down.state is State.DOWN
    server.info = fitting
    run_in_loop(fleet._let_rejoin())
    assert down.state is State.UP


def test_a_returning_server_that_is_silent_holds_a_sync_up_no_longer_than_its_timeout():
    server = ScriptedServer()
    server.delays["/server_info"] = 60.0
    down = Server(server.client, state=State.DOWN)
    begin = time.monotonic()
    run_in_loop(
        Fleet([down], config(rollout_urls=[server.client.url], bf16=False, weight_sync_timeout=2))._let_rejoin()
    )
    assert down.state is State.DOWN
    assert time.monotonic() - begin < 30  # other ranks wait meanwhile


def test_another_program_is_rejected_by_its_address():
    server = ScriptedServer()
    for server.info in ("text", {"model_config": "text"}, {}):
        with pytest.raises(ConfigError, match=f"{server.client.url} does not describe itself .* is it a vLLM server"):
            states(server.client.url)


def test_one_server_under_two_addresses_is_rejected():
    url = ScriptedServer().client.url
    with pytest.raises(ConfigError, match="are the same server"):
        states(url, url.replace("127.0.0.1", "localhost"))


@pytest.mark.parametrize("guarded", [False, True])
def test_a_server_without_a_key_that_others_can_reach_is_warned_of(guarded, caplog):
    server = ScriptedServer()
    if guarded:
        server.refuses["/is_paused"] = "the API key is missing"
    far = server.client.url.replace("127.0.0.1", "0.0.0.0")  # this machine, but not a loopback address
    with caplog.at_level(logging.WARNING, logger="fsdptrain"):
        states(far)
        states(server.client.url)
        states(far, rollout_allow_public_servers=True)
    warnings = [record.getMessage() for record in caplog.records]
    assert len(warnings) == (not guarded)
    assert all(f"--rollout-urls {far}: everyone who can reach it" in line for line in warnings)


def test_servers_are_checked_at_the_same_time(monkeypatch):
    all_asked = threading.Barrier(4)

    def describe(server: ScriptedServer, body: Any) -> Any:
        all_asked.wait(timeout=60)
        return {"vllm_config": server.info}

    monkeypatch.setitem(ANSWERS, "/server_info", describe)
    assert states(*(ScriptedServer().client.url for _ in range(4))) == [State.UP] * 4


def test_options_become_flags_of_vllm_and_some_are_reserved():
    args = {"max_num_seqs": 8, "enable_prefix_caching": False, "async_scheduling": True, "override_neuron_config": {}}
    flags = server_arguments(config(rollout_num_servers=1, rollout_engine_args=args), Path("here"), on_gpu=True)
    expected = "--max-num-seqs 8 --no-enable-prefix-caching --async-scheduling --override-neuron-config {}"
    assert expected in " ".join(flags)
    assert flags[flags.index("--logprobs-mode") + 1] == "processed_logprobs"
    for name in ("logprobs_mode", "host", "worker_extension_cls"):
        with pytest.raises(ConfigError, match=f"--rollout-engine-args {name}: .*remove it"):
            server_arguments(config(rollout_num_servers=1, rollout_engine_args={name: "x"}), Path("here"), on_gpu=True)


def test_weights_lie_where_all_servers_can_read_them(tmp_path):
    model, run = save_tiny_checkpoint(tmp_path / "model"), str(tmp_path / "run")
    near = weight_path(config(rollout_urls=["http://localhost:1"], output_dir=run), model)
    far = weight_path(config(rollout_urls=["http://localhost:1", "http://10.0.0.1:1"], output_dir=run), model)
    named = weight_path(config(rollout_num_servers=1, output_dir=run, weight_sync_dir=str(tmp_path / "w")), model)
    assert near.parent in (Path("/dev/shm"), Path(run))
    assert far.parent == Path(run)
    assert named.parent == tmp_path / "w"
