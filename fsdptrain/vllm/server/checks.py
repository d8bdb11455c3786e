"""Checks of servers that a user has started, before a run pushes weights to them."""

import ipaddress
import socket
from typing import Any
from urllib.parse import urlsplit

from fsdptrain.config import Config
from fsdptrain.errors import ConfigError, RolloutError
from fsdptrain.features.sections import RouterConfig
from fsdptrain.vllm.options import longest_request
from fsdptrain.vllm.server.client import VLLMClient
from fsdptrain.vllm.server.process import MIDDLEWARE, PLUGIN

_DESCRIBE_S = 120.0  # for a server to describe itself: it inspects its whole machine first


def is_local(url: str) -> bool:
    host = urlsplit(url).hostname
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError as error:
        raise ConfigError(f"--rollout-urls: {host} has no address ({error})") from error
    return all(ipaddress.ip_address(str(entry[4][0]).partition("%")[0]).is_loopback for entry in found)


async def require_fitting(client: VLLMClient, config: Config) -> None:
    """ConfigError if a running server was started with other options, or obeys others on the network."""
    try:
        described = await client.get("/server_info?config_format=json", "vllm_config", timeout=_DESCRIBE_S)
        flags = _flags_of(described, config)
    except (RolloutError, KeyError, TypeError, AttributeError) as error:  # the latter: it is another program
        what = error if isinstance(error, RolloutError) else f"{client.url} does not describe itself ({error!r})"
        raise ConfigError(
            f"--rollout-urls: {what}; is it a vLLM server that was started with VLLM_SERVER_DEV_MODE=1?"
        ) from None
    wrong = [f"--{name} {needed} (it has {value})" for name, (needed, value) in flags.items() if needed != value]
    if wrong:
        raise ConfigError(f"--rollout-urls: {client.url} must be started with {', '.join(wrong)}")
    if is_local(client.url):
        return
    try:
        # vLLM's key protects its public routes only
        await VLLMClient(client.url).get("/is_paused", timeout=_DESCRIBE_S)
    except RolloutError:
        return
    raise ConfigError(
        f"--rollout-urls: everyone who can reach {client.url} can change its weights and run code: start it with "
        f"--middleware {MIDDLEWARE['middleware']} and VLLM_API_KEY"
    )


def _flags_of(found: Any, config: Config) -> dict[str, tuple[Any, Any]]:
    """What vLLM's flags must be, and what they are on a server that described itself as `found`."""
    model, parallel = found["model_config"], found["parallel_config"]
    flags = {
        "dtype": (config.compute_dtype_name, model["dtype"].removeprefix("torch.")),
        "logprobs-mode": ("processed_logprobs", model["logprobs_mode"]),
        "worker-extension-cls": (PLUGIN["worker_extension_cls"], parallel["worker_extension_cls"]),
        "data-parallel-size": (1, parallel["data_parallel_size"]),  # the workers of the others would not be verified
        "max-model-len": (max(longest_request(config), model["max_model_len"]), model["max_model_len"]),
    }
    if config.sync.max_staleness:
        flags["scheduling-policy"] = ("priority", found["scheduler_config"]["policy"])
    if config.rollout.stop:
        has_none = model["skip_tokenizer_init"]
        flags["enable-scale-out"] = ("for --rollout-stop", "--tokens-only" if has_none else "for --rollout-stop")
    if config.section(RouterConfig).replay == "rollout":
        flags["enable-return-routed-experts"] = (True, found["aux_output_config"]["enable_return_routed_experts"])
    return flags
