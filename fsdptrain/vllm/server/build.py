"""Build the server engine from the configuration: find or start the servers, and tell every rank about them."""

import logging
import os
import secrets
import sys
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoConfig

from fsdptrain.config import Config
from fsdptrain.distributed import gather, raise_on_all_ranks
from fsdptrain.errors import ConfigError, RolloutError
from fsdptrain.rollout.stacks import StackDump
from fsdptrain.rollout.stop_tokens import stop_tokens
from fsdptrain.vllm.config import ServerConfig, VllmConfig
from fsdptrain.vllm.options import derived_options, engine_options, request_batch_invariance, require_free
from fsdptrain.vllm.server.checks import is_local, require_private
from fsdptrain.vllm.server.client import VLLMClient, host_of
from fsdptrain.vllm.server.engine import VLLMServerEngine
from fsdptrain.vllm.server.event_loop import EventLoop
from fsdptrain.vllm.server.fleet import Fleet, Server
from fsdptrain.vllm.server.process import MIDDLEWARE, PLUGIN, ServerProcess, command_line
from fsdptrain.vllm.server.weight_files import WeightFolder, folder_name, shared_memory

log = logging.getLogger(__name__)

_REQUIRED = {"tokens_only": True, "enable_prompt_tokens_details": True}
API_KEY = "ROLLOUT_API_KEY"  # environment variable, for servers that run already
_RESERVED = frozenset(
    {"model", "host", "port", "api_key", "dtype", "load_format", "logprobs_mode", "enable_lora", "scheduling_policy"}
    | {*_REQUIRED, *PLUGIN, *MIDDLEWARE}
)
_PARALLEL = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")


def build_vllm_server_engine(config: Config, *, checkpoint: Path, device: torch.device) -> VLLMServerEngine:
    """Collective. Rank 0 checks the servers, or starts them and waits until they are up."""
    rank, loop = dist.get_rank(), EventLoop()
    urls, fleet, folder, key = [], None, None, None
    with raise_on_all_ranks(RolloutError, "--rollout-engine vllm-server"):
        if rank == 0:
            urls, fleet, folder, key = _open_servers(config, checkpoint, device, loop)
        stacks = StackDump(Path(config.run.output_dir) / "stacks", rank)
    urls, key, run_id = gather((urls, key, secrets.token_hex(4)))[0]
    trust = config.model.trust_remote_code
    model_config = AutoConfig.from_pretrained(checkpoint, trust_remote_code=trust)
    return VLLMServerEngine(
        config,
        [VLLMClient(url, key) for url in urls],
        run_id,
        loop=loop,
        stop_token_ids=stop_tokens(checkpoint, model_config, trust_remote_code=trust),
        stacks=stacks,
        fleet=fleet,
        folder=folder,
    )


def _open_servers(
    config: Config, checkpoint: Path, device: torch.device, loop: EventLoop
) -> tuple[list[str], Fleet, WeightFolder, str | None]:
    vllm, options = config.section(VllmConfig), config.section(ServerConfig)
    if options.weight_transfer == "nccl" and device.type != "cuda":
        raise ConfigError(f"--weight-transfer nccl needs a GPU, and the trainer is on {device}: use file or gloo")
    folder = WeightFolder(
        weight_path(config, checkpoint),
        max_file_bytes=options.update_weight_buffer_size,
        with_deltas=options.weight_transfer != "file",
    )
    if vllm.urls:
        key = os.environ.get(API_KEY)
        servers = [Server(VLLMClient(url, key)) for url in vllm.urls]
        for server in servers:
            require_private(server.client.host, server.client.url, allow_public=vllm.allow_public_servers)
    else:
        key = secrets.token_hex(16)
        servers = _processes(config, checkpoint, folder.path, key, device)
    fleet = Fleet(servers, config)
    try:
        loop.run(fleet.start())
    except BaseException:
        loop.run(fleet.close())
        folder.delete()
        raise
    return [server.client.url for server in servers], fleet, folder, key


def _processes(config: Config, checkpoint: Path, weights: Path, key: str, device: torch.device) -> list[Server]:
    request_batch_invariance(config, on_gpu=device.type == "cuda")
    folder = Path(config.run.output_dir) / "servers"
    folder.mkdir(parents=True, exist_ok=True)
    python, count = config.section(VllmConfig).server_python or sys.executable, config.section(VllmConfig).num_servers
    arguments = server_arguments(config, checkpoint, on_gpu=device.type == "cuda")
    arguments += command_line(derived_options(config, checkpoint, device.type))
    processes = [
        ServerProcess(python, arguments, folder / f"server{i}.log", api_key=key, weights=weights, devices=devices)
        for i, devices in enumerate(_devices(config, count or 0, device))
    ]
    return [Server(VLLMClient(process.url, key), process) for process in processes]


def server_arguments(config: Config, checkpoint: Path, *, on_gpu: bool) -> list[str]:
    """The flags of a server; docs/vllm_servers.md gives them to users who start their own."""
    args = config.section(VllmConfig).engine_args
    require_free(args, _RESERVED)
    options: dict[str, Any] = {
        **engine_options(config, on_gpu=on_gpu),
        "seed": config.rollout.seed % 2**31,
        "scheduling_policy": "priority",  # by arrival among equals
        "disable_uvicorn_access_log": True,
        "disable_log_stats": True,
    }
    if config.model.trust_remote_code:
        options["trust_remote_code"] = True
    fixed: dict[str, Any] = {"model": str(checkpoint), "logprobs_mode": "processed_logprobs"}
    load = {"load_format": options.pop("load_format", "dummy")}
    return command_line({**options, **args, **fixed, **load, **_REQUIRED, **PLUGIN, **MIDDLEWARE})


def _devices(config: Config, count: int, device: torch.device) -> list[str | None]:
    """CUDA_VISIBLE_DEVICES of each server: the GPUs after those of the trainer's ranks."""
    if device.type != "cuda":
        return [None] * count
    visible = torch.accelerator.device_count()
    names = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(visible)))).split(",")
    each = prod(int(config.section(VllmConfig).engine_args.get(name, 1)) for name in _PARALLEL)
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if ranks + count * each > visible:
        raise ConfigError(
            f"--rollout-num-servers {count}: {ranks} ranks and {count} servers of {each} GPUs each need more than the "
            f"{visible} GPUs of this machine: lower it, or --nproc-per-node"
        )
    return [",".join(names[ranks + i * each : ranks + (i + 1) * each]) for i in range(count)]


def weight_path(config: Config, checkpoint: Path) -> Path:
    """The folder of the newest weights, used by nobody else."""
    name = folder_name(Path(config.run.output_dir))
    options = config.section(ServerConfig)
    if options.weight_sync_dir is not None:
        return Path(options.weight_sync_dir) / name
    if options.weight_transfer != "file" or all(is_local(host_of(url)) for url in config.section(VllmConfig).urls):
        # twice the files of the checkpoint, whose dtype may be half as wide as the compute dtype
        needed = 2 * sum(path.stat().st_size for path in checkpoint.glob("*.safetensors"))
        if options.weight_transfer != "file":  # a file is compared with the one before
            needed += min(needed, options.update_weight_buffer_size)
        shared = shared_memory(needed)
        if shared is not None:
            return shared / name
    return Path(config.run.output_dir) / name
