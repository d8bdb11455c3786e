"""How servers are started, and where weights lie."""

from pathlib import Path

import pytest

from fsdptrain.config import Config
from fsdptrain.errors import ConfigError
from fsdptrain.testing import save_tiny_checkpoint
from fsdptrain.vllm.server.build import server_arguments, weight_path


def config(**values) -> Config:
    return Config(hf_checkpoint="x", rollout_engine="vllm-server", **values)


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
