"""Checks of server options: the engine that they require, and valid server addresses."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from fsdptrain.config.effects import Problem, without_effect

if TYPE_CHECKING:
    from fsdptrain.config.root import Config

SERVER_ENGINE = "vllm-server"
DESCRIBE_S = 120.0  # for a server to describe itself: it inspects its whole machine first
_OF_ALL = (
    "rollout_urls rollout_num_servers rollout_server_python rollout_api_key_env rollout_allow_public_servers "
    "weight_transfer weight_sync_dir update_weight_buffer_size weight_sync_timeout server_start_timeout min_servers"
)
_OF_STARTED = "rollout_server_python rollout_engine_args rollout_kv_cache_gib server_start_timeout"


def check_servers(config: Config) -> Iterator[Problem]:
    rollout, sync = config.rollout, config.sync
    if rollout.engine != SERVER_ENGINE:
        yield from without_effect(config, _OF_ALL, f"without --rollout-engine {SERVER_ENGINE}: leave it out")
        return
    reason = f"with --rollout-engine {SERVER_ENGINE}, whose servers have devices of their own: leave it out"
    yield from without_effect(config, "offload_train", reason)
    if bool(rollout.urls) == (rollout.num_servers is not None):
        yield (
            f"--rollout-engine {SERVER_ENGINE} needs --rollout-urls, of servers that run, or --rollout-num-servers, "
            "to start some: give one of the two"
        )
    if rollout.urls:
        yield from without_effect(config, _OF_STARTED, "with --rollout-urls, whose servers run already: leave it out")
        yield from _addresses(rollout.urls)
    else:
        yield from without_effect(
            config, "rollout_api_key_env rollout_allow_public_servers", "without --rollout-urls: leave it out"
        )
    num_servers = len(rollout.urls) or rollout.num_servers or 0
    if sync.min_servers > num_servers:
        yield f"--min-servers {sync.min_servers} is more than the {num_servers} servers: lower it"
    if rollout.urls:
        besides, why = min(DESCRIBE_S, sync.weight_sync_timeout), f"at most {DESCRIBE_S:g} s for one that comes back"
    else:
        besides, why = sync.server_start_timeout, "--server-start-timeout"
    longest = 2 * sync.weight_sync_timeout + besides
    if longest > config.launch.dist_timeout:
        yield (
            f"--dist-timeout {config.launch.dist_timeout} is shorter than ranks may wait for one that speaks with a "
            f"server, {longest:g} s (2 x --weight-sync-timeout, {why}): raise it"
        )


def _addresses(urls: list[str]) -> Iterator[Problem]:
    for url in urls:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.username:
            yield f"--rollout-urls {url!r} is no address of a server: write e.g. http://127.0.0.1:8000"
    if len({url.rstrip("/") for url in urls}) < len(urls):
        yield f"--rollout-urls names a server twice: {', '.join(urls)}"
