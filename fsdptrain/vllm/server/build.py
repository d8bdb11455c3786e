"""The server engine as the configuration wants it: servers found or started, and what each rank must know of them."""

import logging
import os
import secrets
import sys
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoConfig

from fsdptrain import platform
from fsdptrain.config import Config
from fsdptrain.distributed import gather, raise_on_all_ranks
from fsdptrain.errors import ConfigError, RolloutError
from fsdptrain.rollout.stacks import StackDump
from fsdptrain.rollout.stop_tokens import stop_tokens
from fsdptrain.vllm.adapter import adapter_options
from fsdptrain.vllm.options import OTHER_NUMBERS, derived_options
from fsdptrain.vllm.server.checks import is_local, look_at, require_fitting, require_private
from fsdptrain.vllm.server.client import VLLMClient
from fsdptrain.vllm.server.engine import Endpoints, Timeouts, VLLMServerEngine, new_run
from fsdptrain.vllm.server.fleet import Fleet, Server
from fsdptrain.vllm.server.process import GUARD, PLUGIN, Launch, ServerProcess, command_line
from fsdptrain.vllm.server.push import FilePush, GroupPush
from fsdptrain.vllm.server.push_check import prove
from fsdptrain.vllm.server.weight_files import WeightFolder, folder_name, shared_memory

log = logging.getLogger(__name__)

_ALWAYS = {"tokens_only": True, "enable_prompt_tokens_details": True}
_OURS = frozenset(
    {"model", "host", "port", "api_key", "dtype", "load_format", "logprobs_mode", "enable_lora", "scheduling_policy"}
    | {*_ALWAYS, *PLUGIN, *GUARD}
)
_PARALLEL = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")


def build_vllm_server_engine(config: Config, *, checkpoint: Path, device: torch.device) -> VLLMServerEngine:
    """Collective. Rank 0 looks at the servers, or starts them and waits until they are up."""
    rank = dist.get_rank()
    output_dir, sync = Path(config.run.output_dir), config.sync
    contact = fleet = folder = None
    with raise_on_all_ranks(RolloutError, "--rollout-engine vllm-server"):
        if rank == 0:
            contact, fleet, folder = _gather_servers(config, checkpoint, device)
        stacks = StackDump(output_dir / "stacks", rank)
    contact = gather(contact)[0]
    trust = config.model.trust_remote_code
    model_config = AutoConfig.from_pretrained(checkpoint, trust_remote_code=trust)
    starting = 0.0 if config.rollout.urls else sync.server_start_timeout
    return VLLMServerEngine(
        contact,
        stop_token_ids=stop_tokens(checkpoint, model_config, trust_remote_code=trust),
        patience=Timeouts(
            sync.sync_timeout, sync.sync_timeout + starting, sync.min_servers, answer=config.rollout.timeout
        ),
        stacks=stacks,
        fleet=fleet,
        folder=folder,
        overtakes=sync.max_staleness > 0,
    )


def _gather_servers(config: Config, checkpoint: Path, device: torch.device) -> tuple[Endpoints, Fleet, WeightFolder]:
    rollout, sync = config.rollout, config.sync
    if sync.weight_push == "nccl" and device.type != "cuda":
        raise ConfigError(f"--weight-push nccl goes from GPU to GPU, and the trainer is on {device}: use file or gloo")
    folder = WeightFolder(weight_path(config, checkpoint), max_file_bytes=sync.update_weight_buffer_size)
    if rollout.urls:
        key = _api_key(rollout.api_key_env)
        servers = [Server(VLLMClient(url, key)) for url in rollout.urls]
        for server in servers:
            require_private(server.client.host, server.client.url, allow_public=rollout.public_servers)
        look_at(servers, config)
    else:
        key = secrets.token_hex(16)
        servers = _processes(config, checkpoint, folder.path, key, device)
    push = FilePush() if sync.weight_push == "file" else GroupPush(sync.weight_push, sync.sync_timeout)
    is_checked = config.run.sync_check != "off" and not OTHER_NUMBERS.intersection(rollout.engine_args)
    fleet = Fleet(
        servers,
        push=push,
        sync_timeout=sync.sync_timeout,
        start_timeout=sync.server_start_timeout,
        min_servers=sync.min_servers,
        keep_requests=sync.max_staleness > 0,
        require_fitting=partial(require_fitting, config=config),
        **({"prove": prove} if is_checked else {}),
    )
    try:
        fleet.start()
    except BaseException:
        fleet.close()
        folder.delete()
        raise
    return Endpoints(tuple(server.client.url for server in servers), new_run(), key), fleet, folder


def _processes(config: Config, checkpoint: Path, weights: Path, key: str, device: torch.device) -> list[Server]:
    folder = Path(config.run.output_dir) / "servers"
    folder.mkdir(parents=True, exist_ok=True)
    launch = Launch(
        python=config.rollout.server_python or sys.executable,
        arguments=server_arguments(config, checkpoint, on_gpu=device.type == "cuda")
        + command_line(derived_options(config, checkpoint, device.type)),
        folder=folder,
        weights=weights,
        api_key=key,
    )
    count = config.rollout.num_servers or 0
    processes = [ServerProcess(launch, i, devices) for i, devices in enumerate(_devices(config, count, device))]
    return [Server(VLLMClient(process.url, key), process) for process in processes]


def server_arguments(config: Config, checkpoint: Path, *, on_gpu: bool) -> list[str]:
    """What a server must be started with; also what the docs tell users who start their own."""
    rollout = config.rollout
    for name in rollout.engine_args:
        if name in _OURS:
            raise ConfigError(
                f"--rollout-engine-args {name}: fsdptrain sets it, and exactness rests on it; leave it out"
            )
    options: dict[str, Any] = {
        "dtype": config.compute_dtype_name,
        "max_model_len": config.prompt_budget + rollout.max_response_len,
        "seed": rollout.seed % 2**31,
        "scheduling_policy": "priority",  # by arrival among equals
        "disable_uvicorn_access_log": True,
        "disable_log_stats": True,
    }
    if not on_gpu:
        options["enforce_eager"] = True
        # a request with a seed whose prompt is read in parts ends vLLM 0.32: "CPU Generator does not use offset"
        options["enable_chunked_prefill"] = False
    if rollout.kv_cache_gib is not None or not on_gpu:
        options["kv_cache_memory_bytes"] = int((rollout.kv_cache_gib or 1.0) * platform.GIB)
    if config.model.trust_remote_code:
        options["trust_remote_code"] = True
    fixed: dict[str, Any] = {"model": str(checkpoint), "load_format": "dummy", "logprobs_mode": "processed_logprobs"}
    if config.lora.sync == "adapter":
        fixed |= adapter_options(config.lora)
    return command_line({**options, **rollout.engine_args, **fixed, **_ALWAYS, **PLUGIN, **GUARD})


def _devices(config: Config, count: int, device: torch.device) -> list[str | None]:
    """For each server the GPUs behind those of the trainer's ranks."""
    if device.type != "cuda":
        return [None] * count
    visible = torch.accelerator.device_count()
    names = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(visible)))).split(",")
    each = prod(int(config.rollout.engine_args.get(name, 1)) for name in _PARALLEL)
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if ranks + count * each > visible:
        raise ConfigError(
            f"--rollout-num-servers {count} of {each} GPUs each, behind those of {ranks} ranks, are more than the "
            f"{visible} GPUs of this machine: lower it, or --nproc-per-node"
        )
    return [",".join(names[ranks + i * each : ranks + (i + 1) * each]) for i in range(count)]


def weight_path(config: Config, checkpoint: Path) -> Path:
    """Where the weights of the newest version lie; a folder of our own."""
    name = folder_name(Path(config.run.output_dir))
    if config.sync.weight_folder is not None:
        return Path(config.sync.weight_folder) / name
    hosts = [VLLMClient(url).host for url in config.rollout.urls]
    if all(is_local(host) for host in hosts):
        # twice: the files may hold half as many bytes for a number as the compute dtype
        place = shared_memory(2 * sum(path.stat().st_size for path in checkpoint.glob("*.safetensors")))
        if place is not None:
            return place / name
    return Path(config.run.output_dir) / name


def _api_key(variable: str | None) -> str | None:
    if variable is None:
        return None
    key = os.environ.get(variable)
    if not key:
        raise ConfigError(f"--rollout-api-key-env {variable}: there is no such variable in the environment; set it")
    return key
