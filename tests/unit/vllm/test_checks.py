"""Which servers of a user are accepted, and how they must be started."""

from pathlib import Path
from typing import Any

import pytest

from fsdptrain.config import Config
from fsdptrain.errors import ConfigError
from fsdptrain.vllm.server.build import server_arguments, weight_path
from fsdptrain.vllm.server.checks import require_fitting
from fsdptrain.vllm.server.client import VLLMClient
from tests.event_loop import run_in_loop
from tests.testing import save_tiny_checkpoint
from tests.unit.vllm.scripted_server import ScriptedServer


def config(**values: Any) -> Config:
    return Config(hf_checkpoint="x", rollout_engine="vllm-server", **values)


def check(url: str, **values: Any) -> None:
    run_in_loop(require_fitting(VLLMClient(url), config(rollout_urls=[url], bf16=False, **values)))


def test_a_server_that_cannot_be_reached_is_refused():
    with pytest.raises(ConfigError, match=r"127.0.0.1:9 ended the connection during .*VLLM_SERVER_DEV_MODE=1"):
        check("http://127.0.0.1:9")


def test_a_server_with_other_options_is_refused_with_the_flags_that_it_lacks():
    server = ScriptedServer()
    check(server.client.url)
    fitting = server.info
    parallel = fitting["parallel_config"] | {"data_parallel_size": 2}  # vLLM reports the workers of one of them
    server.info = fitting | {"parallel_config": parallel}
    with pytest.raises(ConfigError, match=r"must be started with --data-parallel-size 1 \(it has 2\)"):
        check(server.client.url)
    server.info = fitting | {"scheduler_config": {"policy": "fcfs"}}
    with pytest.raises(ConfigError, match=r"must be started with --scheduling-policy priority \(it has fcfs\)"):
        check(server.client.url, max_staleness=1, mismatch_correction="tis")
    server.info["model_config"] = server.info["model_config"] | {"skip_tokenizer_init": True}
    with pytest.raises(ConfigError, match=r"with --enable-scale-out for --rollout-stop \(it has --tokens-only\)"):
        check(server.client.url, rollout_stop=["x"])


def test_another_program_is_refused_by_its_address():
    server = ScriptedServer()
    for server.info in ("text", {"model_config": "text"}, {}):
        with pytest.raises(ConfigError, match=f"{server.client.url} does not describe itself .* is it a vLLM server"):
            check(server.client.url)


@pytest.mark.parametrize("guarded", [False, True])
def test_a_server_that_others_can_reach_needs_a_key(guarded):
    server = ScriptedServer()
    if guarded:
        server.refuses["/is_paused"] = "the API key is missing"
    check(server.client.url)
    far = server.client.url.replace("127.0.0.1", "0.0.0.0")  # this machine, but not a loopback address
    if guarded:
        check(far)
    else:
        with pytest.raises(ConfigError, match=f"everyone who can reach {far} .*--middleware .* and VLLM_API_KEY"):
            check(far)


def test_options_become_flags_of_vllm_and_some_are_reserved(tmp_path):
    model = save_tiny_checkpoint(tmp_path)  # of 1,024 positions, fewer than packs may have tokens
    args = {"max_num_seqs": 8, "enable_prefix_caching": False, "async_scheduling": True, "override_neuron_config": {}}
    flags = server_arguments(config(rollout_num_servers=1, rollout_engine_args=args), model, on_gpu=True)
    assert flags[flags.index("--max-model-len") + 1] == "1024"
    expected = "--max-num-seqs 8 --no-enable-prefix-caching --async-scheduling --override-neuron-config {}"
    assert expected in " ".join(flags)
    assert flags[flags.index("--logprobs-mode") + 1] == "processed_logprobs"
    for name in ("logprobs_mode", "host", "worker_extension_cls", "hf_token", "data_parallel_size"):
        with pytest.raises(ConfigError, match=f"--rollout-engine-args {name}: .*remove it"):
            server_arguments(config(rollout_num_servers=1, rollout_engine_args={name: "x"}), model, on_gpu=True)


def test_weights_lie_where_all_servers_can_read_them(tmp_path):
    model, run = save_tiny_checkpoint(tmp_path / "model"), str(tmp_path / "run")
    near = weight_path(config(rollout_urls=["http://localhost:1"], output_dir=run), model)
    far = weight_path(config(rollout_urls=["http://localhost:1", "http://10.0.0.1:1"], output_dir=run), model)
    named = weight_path(config(rollout_num_servers=1, output_dir=run, weight_sync_dir=str(tmp_path / "w")), model)
    assert near.parent in (Path("/dev/shm"), Path(run))
    assert far.parent == Path(run)
    assert named.parent == tmp_path / "w"
