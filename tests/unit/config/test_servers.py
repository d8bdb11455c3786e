"""Options of servers that cannot work, or have no effect, are refused with the way out."""

import pytest

from fsdptrain.config import Config, check_processes
from fsdptrain.config.keys import all_keys
from fsdptrain.errors import ConfigError
from tests.unit.config.refusals import assert_refused

URLS = {"rollout_engine": "vllm-server", "rollout_urls": ["http://127.0.0.1:8000"]}
STARTED = {"rollout_engine": "vllm-server", "rollout_num_servers": 2}

REFUSED = [
    *(
        ({key: value}, [all_keys()[key].flag, "--rollout-engine vllm-server"])
        for key, value in [
            ("rollout_urls", ["http://a:1"]), ("rollout_num_servers", 2), ("rollout_server_python", "python"),
            ("rollout_api_key_env", "KEY"), ("rollout_allow_public_servers", True), ("weight_transfer", "gloo"),
            ("weight_sync_dir", "here"), ("update_weight_buffer_size", 1000), ("weight_sync_timeout", 5.0),
            ("server_start_timeout", 5.0), ("min_servers", 2),
        ]
    ),
    ({"rollout_engine": "vllm-server"}, ["--rollout-urls", "--rollout-num-servers", "one of the two"]),
    ({**URLS, "rollout_num_servers": 1}, ["--rollout-urls", "--rollout-num-servers", "one of the two"]),
    *(
        ({**URLS, key: value}, [all_keys()[key].flag, "run already"])
        for key, value in [
            ("rollout_server_python", "python"), ("rollout_engine_args", {"max_num_seqs": 8}),
            ("rollout_kv_cache_gib", 1.0), ("server_start_timeout", 5.0),
        ]
    ),
    *(
        ({**STARTED, key: value}, [all_keys()[key].flag, "--rollout-urls"])
        for key, value in [("rollout_api_key_env", "KEY"), ("rollout_allow_public_servers", True)]
    ),
    ({**URLS, "rollout_urls": ["127.0.0.1:8000"]}, ["--rollout-urls '127.0.0.1:8000'", "http://"]),
    ({**URLS, "rollout_urls": ["http://user@a:1"]}, ["--rollout-urls"]),
    ({**URLS, "rollout_urls": ["http://a:1", "http://a:1/"]}, ["--rollout-urls", "twice"]),
    ({**STARTED, "min_servers": 3}, ["--min-servers 3", "2 servers"]),
    ({**STARTED, "weight_sync_timeout": 900.0}, ["--dist-timeout 1800", "--weight-sync-timeout"]),
    ({**URLS, "weight_sync_timeout": 850.0},
     ["--dist-timeout 1800", "1820 s", "--weight-sync-timeout", "one that comes back"]),
    ({"rollout_engine": "hf", "rollout_timeout": 60.0}, ["--rollout-timeout", "--rollout-engine hf", "vllm"]),
    ({**URLS, "rollout_max_batch_tokens": 4096}, ["--rollout-max-batch-tokens", "vllm-server"]),
]  # fmt: skip


@pytest.mark.parametrize(("values", "parts"), REFUSED)
def test_it_is_refused_in_one_line_that_names_the_way_out(values, parts):
    assert_refused(values, parts)


@pytest.mark.parametrize(
    "values",
    [
        URLS,
        STARTED,
        {**URLS, "min_servers": 1},
        {**STARTED, "weight_transfer": "nccl"},
        {**URLS, "rollout_timeout": 60.0},
    ],
)
def test_it_is_taken(values):
    config = Config(hf_checkpoint="x", **values)
    taken = {**config.rollout.model_dump(), **config.sync.model_dump()}
    assert config.rollout.engine == "vllm-server"
    assert {key: taken[key.removeprefix("rollout_")] for key in values} == values


def test_servers_of_a_run_on_several_machines_are_started_by_the_user():
    check_processes(config := Config(hf_checkpoint="x", **STARTED), world_size=2, local_world_size=2)
    with pytest.raises(ConfigError, match=r"--rollout-num-servers 2 starts servers on one machine.+--rollout-urls"):
        check_processes(config, world_size=4, local_world_size=2)
