"""Build the server engine from the configuration: find or start the servers, and tell every rank about them."""

import os
import secrets
import shutil
import sys
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from fsdptrain.config import Config
from fsdptrain.distributed import gather, raise_on_all_ranks
from fsdptrain.errors import ConfigError, RolloutError
from fsdptrain.features.sections import RouterConfig
from fsdptrain.vllm.config import ServerConfig, VllmConfig
from fsdptrain.vllm.options import engine_options, request_batch_invariance, routes_options, stop_token_ids
from fsdptrain.vllm.server.checks import is_local, require_fitting
from fsdptrain.vllm.server.client import VLLMClient
from fsdptrain.vllm.server.engine import VLLMServerEngine
from fsdptrain.vllm.server.event_loop import EventLoop, all_of
from fsdptrain.vllm.server.process import MIDDLEWARE, PLUGIN, ServerProcess, command_line
from fsdptrain.vllm.server.transfer import NcclTransfer, over_file, take_part
from fsdptrain.vllm.weight_file import SHARED_MEMORY, WeightFile, folder_name

_START_SHARE = 0.8  # of --dist-timeout, after which the other ranks wait no longer
API_KEY = "ROLLOUT_API_KEY"  # environment variable, for servers that run already
_RESERVED = frozenset(
    {"host", "port", "api_key", "hf_token", "scheduling_policy", "tokens_only", "enable_scale_out"}
    | {*PLUGIN, *MIDDLEWARE}
)


def build_vllm_server_engine(config: Config, *, checkpoint: Path, device: torch.device) -> VLLMServerEngine:
    """Collective. Rank 0 checks the servers, or starts them and waits until they are up."""
    loop, options = EventLoop(), config.section(ServerConfig)
    timeout = options.weight_sync_timeout
    key, file, servers = os.environ.get(API_KEY, "").strip() or None, None, list[VLLMClient]()
    with raise_on_all_ranks(RolloutError, "--rollout-engine vllm-server"), ExitStack() as after_error:
        if options.weight_transfer == "nccl" and device.type != "cuda":
            raise ConfigError("--weight-transfer nccl sends from GPU to GPU, and this run computes on a CPU: use file")
        if dist.get_rank() == 0:
            file = WeightFile(weight_path(config, checkpoint))
            after_error.callback(file.delete)
            if urls := config.section(VllmConfig).urls:
                servers = [VLLMClient(url, key) for url in urls]
                loop.run(all_of(require_fitting(server, config) for server in servers))
            else:
                key = secrets.token_hex(16)
                processes = _start(config, checkpoint, file.folder, key, device)
                for process in processes:
                    after_error.callback(process.close)
                seconds = _START_SHARE * config.launch.dist_timeout
                loop.run(all_of(process.wait_until_up(seconds) for process in processes))
                servers = [process.client for process in processes]
            begin = "fsdptrain_begin", options.weight_transfer
            loop.run(all_of(server.call_workers(*begin, timeout=timeout) for server in servers))
        transfer = partial(over_file, file)
        if options.weight_transfer == "nccl":
            transfer = NcclTransfer(servers, loop, timeout) if servers else take_part
        cleanup = after_error.pop_all()
    found, key, run_id = gather(([(server.url, server.log) for server in servers], key, secrets.token_hex(4)))[0]
    return VLLMServerEngine(
        config,
        [VLLMClient(url, key, log=log) for url, log in found],
        run_id,
        loop=loop,
        transfer=transfer,
        stop_token_ids=stop_token_ids(config, checkpoint),
        cleanup=cleanup,
    )


def _start(config: Config, checkpoint: Path, weights: Path, key: str, device: torch.device) -> list[ServerProcess]:
    request_batch_invariance(config, on_gpu=device.type == "cuda")
    folder = Path(config.run.output_dir) / "servers"
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)  # logs show --rollout-engine-args
    python = config.section(VllmConfig).server_python or sys.executable
    arguments = server_arguments(config, checkpoint, on_gpu=device.type == "cuda")
    arguments += command_line(routes_options(config.section(RouterConfig).replay, device.type))
    return [
        ServerProcess(python, arguments, folder / f"server{i}.log", api_key=key, weights=weights, devices=devices)
        for i, devices in enumerate(_devices(config, config.section(VllmConfig).num_servers or 0, device))
    ]


def server_arguments(config: Config, checkpoint: Path, *, on_gpu: bool) -> list[str]:
    """The flags of a server; docs/rollouts.md gives them to users who start their own."""
    options = engine_options(config, checkpoint, reserved=_RESERVED, on_gpu=on_gpu)
    options |= {"scheduling_policy": "priority", "disable_uvicorn_access_log": True}  # by arrival among equals
    mode = {"enable_scale_out" if config.rollout.stop else "tokens_only": True}  # the former loads a tokenizer
    return command_line({**options, **config.section(VllmConfig).engine_args, **mode, **PLUGIN, **MIDDLEWARE})


def _devices(config: Config, count: int, device: torch.device) -> list[str | None]:
    """CUDA_VISIBLE_DEVICES of each server: the GPUs after those of the trainer's ranks."""
    if device.type != "cuda":
        return [None] * count
    visible = torch.accelerator.device_count()
    names = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(visible)))).split(",")
    args = config.section(VllmConfig).engine_args
    each = int(args.get("tensor_parallel_size", 1)) * int(args.get("pipeline_parallel_size", 1))
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
    if options.weight_transfer != "file" or all(is_local(url) for url in config.section(VllmConfig).urls):
        # twice the files of the checkpoint, whose dtype may be half as wide as the compute dtype
        needed = 2 * sum(path.stat().st_size for path in checkpoint.glob("*.safetensors"))
        if SHARED_MEMORY.is_dir() and shutil.disk_usage(SHARED_MEMORY).free >= needed:
            return SHARED_MEMORY / name
    return Path(config.run.output_dir) / name
