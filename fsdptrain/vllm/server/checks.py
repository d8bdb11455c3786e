"""Checks of servers that a user has started, before a run pushes weights to them."""

import asyncio
import ipaddress
import logging
import socket
from collections.abc import Sequence
from typing import Any

from fsdptrain.config import Config
from fsdptrain.errors import ConfigError
from fsdptrain.features.moe.config import RouterConfig
from fsdptrain.vllm.config import DESCRIBE_S
from fsdptrain.vllm.server.client import ServerError, ServerGoneError, VLLMClient
from fsdptrain.vllm.server.process import MIDDLEWARE, PLUGIN

log = logging.getLogger(__name__)

_CARRIER_NAT = ipaddress.ip_network("100.64.0.0/10")  # RFC 6598; also used by overlay networks and clouds
_Address = ipaddress.IPv4Address | ipaddress.IPv6Address


def is_local(host: str) -> bool:
    return all(address.is_loopback for address in _addresses(host))


def require_private(host: str, url: str, *, allow_public: bool) -> None:
    """ConfigError for a public address: the routes of weight transfer obey everyone who can reach them."""
    for address in _addresses(host):
        if not allow_public and not _is_private(address):
            raise ConfigError(
                f"--rollout-urls {url} has the public address {address}, and everyone who can reach a server in "
                "development mode can change its weights and run code: use a private address, or "
                "--rollout-allow-public-servers if a firewall protects it"
            )


def _is_private(address: _Address) -> bool:
    return address.is_loopback or address.is_private or (address.version == 4 and address in _CARRIER_NAT)


def _addresses(host: str) -> list[_Address]:
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError as error:
        raise ConfigError(f"--rollout-urls: {host} has no address ({error})") from error
    return [ipaddress.ip_address(str(entry[4][0]).partition("%")[0]) for entry in found]


async def warn_of_open_servers(clients: Sequence[VLLMClient]) -> None:
    is_open = await asyncio.gather(*map(_answers_without_key, clients))
    urls = [client.url for client, answers in zip(clients, is_open, strict=True) if answers]
    if urls:
        log.warning(
            "--rollout-urls %s: everyone who can reach it can change its weights and run code; start it with "
            "--middleware %s and VLLM_API_KEY, or give --rollout-allow-public-servers if a firewall protects it",
            *(" ".join(urls), MIDDLEWARE["middleware"]),
        )


async def _answers_without_key(client: VLLMClient) -> bool:
    """On another machine. vLLM's own key protects only its public routes."""
    if is_local(client.host):
        return False
    try:
        await VLLMClient(client.url).get("/is_paused", timeout=DESCRIBE_S)
    except ServerError:
        return False
    return True


async def require_fitting(client: VLLMClient, timeout: float, config: Config) -> str:
    """The id of a running server. ConfigError if it was started with other options; ServerGoneError if it is gone."""
    try:
        found = await client.engine_config(timeout=timeout)
        instance, flags = found["instance_id"], _flags_of(found, config)
    except ServerGoneError:
        raise
    except (ServerError, KeyError, TypeError, AttributeError) as error:  # the latter: it is another program
        what = error if isinstance(error, ServerError) else f"{client.url} does not describe itself ({error!r})"
        raise ConfigError(
            f"--rollout-urls: {what}; is it a vLLM server that was started with VLLM_SERVER_DEV_MODE=1?"
        ) from None
    wrong = [f"--{name} {needed} (it has {value})" for name, (needed, value) in flags.items() if needed != value]
    if wrong:
        raise ConfigError(f"--rollout-urls: {client.url} must be started with {', '.join(wrong)}")
    return instance


def _flags_of(found: Any, config: Config) -> dict[str, tuple[Any, Any]]:
    """What vLLM's flags must be, and what they are on a server that described itself as `found`."""
    model, longest = found["model_config"], config.prompt_budget + config.rollout.max_response_len
    flags = {
        "dtype": (config.compute_dtype_name, model["dtype"].removeprefix("torch.")),
        "logprobs-mode": ("processed_logprobs", model["logprobs_mode"]),
        "worker-extension-cls": (PLUGIN["worker_extension_cls"], found["parallel_config"]["worker_extension_cls"]),
        "max-model-len": (max(longest, model["max_model_len"]), model["max_model_len"]),
    }
    if config.sync.max_staleness:
        flags["scheduling-policy"] = ("priority", found["scheduler_config"]["policy"])
    if config.section(RouterConfig).replay == "rollout":
        flags["enable-return-routed-experts"] = (True, found["aux_output_config"]["enable_return_routed_experts"])
    return flags
