"""What is asked of servers that a user has started, before a run gives them its weights."""

import ipaddress
import logging
import socket
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from fsdptrain.config import Config
from fsdptrain.config.server_checks import LOOK_S
from fsdptrain.errors import ConfigError
from fsdptrain.vllm.server.client import ServerError, ServerGoneError, VLLMClient
from fsdptrain.vllm.server.fleet import Server, State
from fsdptrain.vllm.server.process import GUARD, PLUGIN

log = logging.getLogger(__name__)


def is_local(host: str) -> bool:
    return all(address.is_loopback for address in _addresses(host))


def _addresses(host: str) -> list[ipaddress.IPv4Address | ipaddress.IPv6Address]:
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError as error:
        raise ConfigError(f"--rollout-urls: {host} has no address ({error})") from error
    return [ipaddress.ip_address(str(entry[4][0]).partition("%")[0]) for entry in found]


def require_private(host: str, url: str, *, allow_public: bool) -> None:
    """ConfigError for a server that the whole world may reach: its routes for weights obey anyone."""
    for address in _addresses(host):
        if not allow_public and not (address.is_loopback or address.is_private):
            raise ConfigError(
                f"--rollout-urls {url} is public ({address}), and whoever reaches a server in development mode can "
                "change its weights and run code: use a private address, or --rollout-public-servers if a firewall "
                "guards it"
            )


def look_at(servers: Sequence[Server], config: Config) -> None:
    """Servers that cannot be reached are left behind; ConfigError if too few are left, or one does not fit. All are
    asked at one time: what they do not answer is waited for once."""
    with ThreadPoolExecutor(len(servers)) as threads:
        _look_at(servers, config, threads)


def _look_at(servers: Sequence[Server], config: Config, threads: ThreadPoolExecutor) -> None:
    found: dict[str, str] = {}  # addresses
    tasks = [threads.submit(_info_of, server.client, LOOK_S) for server in servers]
    for server, task in zip(servers, tasks, strict=True):
        url = server.client.url
        try:
            info = task.result()
        except ServerGoneError as error:
            server.give_up(str(error))
            continue
        _require_fitting(info, url, config)
        if found.setdefault(info["instance_id"], url) != url:
            raise ConfigError(f"--rollout-urls: {found[info['instance_id']]} and {url} are one server: name it once")
    down = [server for server in servers if server.state is not State.UP]
    if len(servers) - len(down) < config.sync.min_servers:
        raise ConfigError(
            f"--rollout-urls: {'; '.join(server.why for server in down)}; is it a vLLM server that was started with "
            f"VLLM_SERVER_DEV_MODE=1? --min-servers {config.sync.min_servers} says how many are needed"
        )
    for server in down:
        log.warning("%s; the run begins without it", server.why)
    clients = [server.client for server in servers if server.state is State.UP]
    obeying = threads.map(_obeys_strangers, clients)
    obey = [client.url for client, obeys in zip(clients, obeying, strict=True) if obeys]
    if obey and not config.rollout.public_servers:
        log.warning(
            "--rollout-urls %s: whoever reaches it can change its weights and run code; start it with --middleware %s "
            "and VLLM_API_KEY, or say by --rollout-public-servers that a firewall guards it",
            " ".join(obey),
            GUARD["middleware"],
        )


def _obeys_strangers(client: VLLMClient) -> bool:
    """From another machine, without a key. vLLM's own guards only its public routes."""
    if is_local(client.host):
        return False
    try:
        VLLMClient(client.url).get("/is_paused", timeout=LOOK_S)
    except ServerError:
        return False
    return True


def require_fitting(client: VLLMClient, config: Config, *, timeout: float = LOOK_S) -> None:
    """ConfigError where a server that runs was not started as it must be; ServerGoneError where it cannot be asked."""
    _require_fitting(_info_of(client, timeout), client.url, config)


def _info_of(client: VLLMClient, timeout: float) -> Any:
    """What a server says of its configuration."""
    try:
        return client.get("/server_info?config_format=json", timeout=timeout)["vllm_config"]
    except ServerGoneError:
        raise
    except ServerError as error:
        raise ConfigError(
            f"--rollout-urls: {error}; is it a vLLM server that was started with VLLM_SERVER_DEV_MODE=1?"
        ) from None


def _require_fitting(info: Any, url: str, config: Config) -> None:
    model, longest = info["model_config"], config.prompt_budget + config.rollout.max_response_len
    backend = PLUGIN["weight_transfer_config"]["backend"]
    wanted = {
        "dtype": (config.compute_dtype_name, model["dtype"].removeprefix("torch.")),
        "logprobs-mode": ("processed_logprobs", model["logprobs_mode"]),
        "worker-extension-cls": (PLUGIN["worker_extension_cls"], info["parallel_config"]["worker_extension_cls"]),
        "weight-transfer-config": (backend, (info["weight_transfer_config"] or {}).get("backend")),
        "max-model-len": (max(longest, model["max_model_len"]), model["max_model_len"]),
    }
    if config.sync.max_staleness:
        wanted["scheduling-policy"] = ("priority", info["scheduler_config"]["policy"])
    if config.router.replay == "rollout":
        wanted["enable-return-routed-experts"] = (True, info["aux_output_config"]["enable_return_routed_experts"])
    wrong = [f"--{name} {needed} (it has {found})" for name, (needed, found) in wanted.items() if needed != found]
    if wrong:
        raise ConfigError(f"--rollout-urls: {url} must be started with {', '.join(wrong)}")
