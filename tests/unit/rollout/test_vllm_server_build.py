"""Which servers may be spoken to, how servers are started, and where weights lie."""

from functools import partial
from pathlib import Path

import pytest

from fsdptrain.config import Config
from fsdptrain.errors import ConfigError
from fsdptrain.rollout.vllm_fleet import Fleet, Server, State
from fsdptrain.rollout.vllm_http import VLLMClient
from fsdptrain.rollout.vllm_server_build import (
    look_at,
    require_fitting,
    require_private,
    server_arguments,
    weight_path,
)
from fsdptrain.rollout.weight_push import FilePush
from fsdptrain.testing import save_tiny_checkpoint
from tests.unit.rollout.scripted_server import FITTING, ScriptedServer

PRIVATE = ["127.0.0.1", "localhost", "10.1.2.3", "192.168.0.7", "172.16.5.5", "::1", "fd00::1"]
PUBLIC = ["8.8.8.8", "2001:4860:4860::8888"]


@pytest.mark.parametrize("host", [*PRIVATE, *PUBLIC])
def test_only_loopback_and_private_addresses_are_spoken_to_unless_asked_for(host):
    def refusal(allow_public: bool) -> str:
        try:
            require_private(host, "http://there", allow_public=allow_public)
        except ConfigError as error:
            return str(error)
        return ""

    assert ("--rollout-public-servers" in refusal(allow_public=False)) == (host in PUBLIC)
    assert refusal(allow_public=True) == ""


def config(**values) -> Config:
    return Config(hf_checkpoint="x", rollout_engine="vllm-server", **values)


def test_a_server_that_is_not_there_is_left_behind_while_enough_are():
    urls = [ScriptedServer().client.url, "http://127.0.0.1:9"]

    def states(min_servers: int) -> list[State]:
        servers = [Server(VLLMClient(url)) for url in urls]
        look_at(servers, config(rollout_urls=urls, bf16=False, min_servers=min_servers))
        return [server.state for server in servers]

    assert states(1) == [State.UP, State.DOWN]
    with pytest.raises(ConfigError, match=r"127.0.0.1:9 broke off .*--min-servers 2 says how many are needed"):
        states(2)


def test_one_that_does_not_fit_is_refused_also_when_it_comes_back():
    server = ScriptedServer(version="default")
    given = config(rollout_urls=[server.client.url], bf16=False, max_staleness=1, mismatch_correction="tis")
    require_fitting(server.client, given)
    server.info = FITTING | {"scheduler_config": {"policy": "fcfs"}}
    with pytest.raises(ConfigError, match=r"must be started with --scheduling-policy priority \(it has fcfs\)"):
        require_fitting(server.client, given)
    left = Server(server.client, state=State.DOWN)
    fleet = Fleet(
        [left],
        push=FilePush(),
        sync_timeout=5.0,
        start_timeout=5.0,
        min_servers=1,
        require_fitting=partial(require_fitting, config=given),
    )
    fleet._take_back()
    assert left.state is State.DOWN
    server.info = FITTING
    fleet._take_back()
    assert left.state is State.UP


def test_options_become_flags_of_vllm_and_what_exactness_rests_on_cannot_be_changed():
    args = {"max_num_seqs": 8, "enable_prefix_caching": False, "async_scheduling": True, "override_neuron_config": {}}
    flags = server_arguments(config(rollout_num_servers=1, rollout_engine_args=args), Path("here"), on_gpu=True)
    assert "--max-num-seqs 8 --no-enable-prefix-caching --async-scheduling --override-neuron-config {}" in " ".join(
        flags
    )
    assert flags[flags.index("--logprobs-mode") + 1] == "processed_logprobs"
    for name in ("logprobs_mode", "host", "weight_transfer_config"):
        with pytest.raises(ConfigError, match=f"--rollout-engine-args {name}: .*leave it out"):
            server_arguments(config(rollout_num_servers=1, rollout_engine_args={name: "x"}), Path("here"), on_gpu=True)


def test_weights_lie_where_all_servers_can_read_them(tmp_path):
    model, run = save_tiny_checkpoint(tmp_path / "model"), str(tmp_path / "run")
    near = weight_path(config(rollout_urls=["http://localhost:1"], output_dir=run), model)
    far = weight_path(config(rollout_urls=["http://localhost:1", "http://10.0.0.1:1"], output_dir=run), model)
    named = weight_path(config(rollout_num_servers=1, output_dir=run, weight_folder=str(tmp_path / "w")), model)
    assert near.parent in (Path("/dev/shm"), Path(run))
    assert far.parent == Path(run)
    assert named.parent == tmp_path / "w"
