"""vLLM in the trainer's process: one engine per rank, or one over several ranks. See docs/rollouts.md.

vLLM is imported when an engine is built, because it patches torch at import.
"""

import gc
import math
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fsdptrain.config import Config
from fsdptrain.distributed import raise_on_all_ranks
from fsdptrain.errors import ConfigError, RolloutError
from fsdptrain.features.sections import RouterConfig
from fsdptrain.memory.report import device_memory
from fsdptrain.protocols import Naming
from fsdptrain.random_state import preserve_rng_state
from fsdptrain.registry import suggest
from fsdptrain.types import Completion, Prompt, SamplingParams
from fsdptrain.vllm.call_limit import CallLimit
from fsdptrain.vllm.config import VllmConfig
from fsdptrain.vllm.options import (
    ENVIRONMENT,
    completion_of,
    engine_options,
    memory_utilization,
    request_batch_invariance,
    routes_options,
    sampling_options,
    stop_token_ids,
)
from fsdptrain.vllm.requests import Request, Requests

_RESERVED = frozenset(
    {"skip_tokenizer_init", "distributed_executor_backend", "worker_cls", "pipeline_parallel_size", "scheduling_policy"}
)
CPU_WORKER = "fsdptrain.vllm.worker.cpu_worker.Worker"
_STEP, _SYNC = "a step of --rollout-engine vllm", "a weight sync to --rollout-engine vllm"


class VLLMEngine:
    """Generates with vLLM in the process and on the device of this rank. Has no weights until `update_weights`.

    With vLLM's `tensor_parallel_size` N an engine spans N neighboring ranks, which call all methods together.
    Logprobs are those of the distribution that was sampled from (vLLM's `processed_logprobs`).
    """

    weight_naming: Naming = "hub"

    def __init__(self, config: Config, checkpoint: Path, options: Mapping[str, Any]) -> None:
        """options: those of `vllm.LLM`."""
        self._vllm = _import_vllm()
        self._stop_token_ids = stop_token_ids(config, checkpoint)
        self._limit = CallLimit(config.section(VllmConfig).timeout)
        self.policy_version = 0
        self._sleeps = bool(options.get("enable_sleep_mode"))
        self._has_weights = self._is_checked = False
        self._checksums: dict[str, int] = {}
        with preserve_rng_state():  # vLLM seeds the generators of the process
            self._llm = self._vllm.LLM(**options)
        self._ranks: dist.ProcessGroup | None = None
        if options.get("tensor_parallel_size", 1) > 1:
            from vllm.distributed.parallel_state import get_tp_group  # pyright: ignore[reportMissingImports]

            self._ranks = get_tp_group().cpu_group
        self._requests = Requests()
        self._prioritizes = options.get("scheduling_policy") == "priority"  # `generate` precedes requests in flight
        self._records_routes = bool(options.get("enable_return_routed_experts"))

    @property
    def is_collective(self) -> bool:
        """Whether `generate` waits for other ranks."""
        return self._ranks is not None

    @property
    def keeps_requests(self) -> bool:
        """Experts of tokens that are read again differ."""
        return not (self.is_collective or self._records_routes)

    def update_weights(self, weights: Iterable[tuple[str, Tensor]], policy_version: int) -> None:
        """Load the tensors of a checkpoint, by the names of its files, layer by layer; reset the prefix cache."""
        self._has_weights = False  # also after half an update
        weights = iter(weights)
        from fsdptrain.vllm.worker.reload import Reload  # needs vLLM

        def reload(worker: Any) -> None:  # in vLLM's worker, which is this process
            update = Reload(worker.get_model(), worker.vllm_config, checked=self._is_checked)
            update.load_weights(weights)
            update.finish()
            self._checksums, self._is_checked = update.checksums(), False

        with self._limit.around(_SYNC), raise_on_all_ranks(RolloutError, "--rollout-engine vllm"):
            try:
                self._llm.collective_rpc(reload)
            finally:
                for _ in weights:  # iterating is collective: other ranks go on after an error of this one
                    pass
            if self._sleeps:
                self._llm.wake_up(tags=["kv_cache"])
            if not self._llm.reset_prefix_cache(reset_running_requests=True):
                raise RolloutError("vLLM did not reset its prefix cache, which belongs to the old weights")
            self._llm.llm_engine.set_weight_version(str(policy_version))
            self.policy_version = policy_version
        self._has_weights = True

    def generate(self, prompts: Sequence[Prompt], sampling: SamplingParams) -> list[Completion]:
        """`num_samples` completions of each prompt, prompt by prompt, in order; each request has its own seed."""
        self._require_weights()
        if self._ranks is not None:
            return self._generate_for_all_ranks(self._ranks, prompts, sampling)
        return self._generate(prompts, sampling)

    def submit(self, prompt: Prompt, sampling: SamplingParams) -> list[Future[Completion]]:
        return self._submit([prompt], sampling)

    def generate_in_flight(self, prompts: Sequence[Prompt], sampling: SamplingParams) -> list[Completion]:
        """Like `generate`, from another thread. After a weight sync, vLLM reads the previous tokens again."""
        return [future.result() for future in self._submit(prompts, sampling)]

    def work(self, *, until: Callable[[], bool], seconds: float = math.inf) -> None:
        """Step vLLM with all requests. Not for engines that span ranks."""
        self._require_weights()
        end = time.monotonic() + seconds
        self._run(lambda: until() or time.monotonic() >= end)

    def _submit(
        self, prompts: Sequence[Prompt], sampling: SamplingParams, *, priority: int = 0
    ) -> list[Future[Completion]]:
        requests = [
            Request(
                prompt.token_ids,
                self._vllm.SamplingParams(n=1, **sampling_options(prompt, index, sampling, self._stop_token_ids)),
                partial(_completion, prompt, sampling),
                priority=priority,
            )
            for prompt in prompts
            for index in range(sampling.num_samples)
        ]
        for request in requests:
            self._requests.add(request)
        return [request.future for request in requests]

    def _generate_for_all_ranks(
        self, ranks: dist.ProcessGroup, prompts: Sequence[Prompt], sampling: SamplingParams
    ) -> list[Completion]:
        """Completions of this rank's `prompts`, from an engine that all `ranks` call with all prompts. Collective."""
        shares: list[list[Prompt]] = [[]] * dist.get_world_size(ranks)
        plain = [replace(prompt, text="", label=None, metadata={}, images=None) for prompt in prompts]
        dist.all_gather_object(shares, plain, group=ranks)
        made = self._generate([prompt for share in shares for prompt in share], sampling)
        begin = sum(len(share) for share in shares[: dist.get_rank(ranks)])
        return made[begin * sampling.num_samples : (begin + len(prompts)) * sampling.num_samples]

    def _generate(self, prompts: Sequence[Prompt], sampling: SamplingParams) -> list[Completion]:
        futures = self._submit(prompts, sampling, priority=-1 if self._prioritizes else 0)
        self._run(lambda: all(future.done() for future in futures))
        return [future.result() for future in futures]

    def _run(self, until: Callable[[], bool]) -> None:
        """Step vLLM until the condition holds."""
        engine = self._llm.llm_engine
        with self._limit.around(_STEP):
            while not until():
                self._limit.restart()
                self._requests.start_new(self._llm)
                if engine.has_unfinished_requests():
                    for output in engine.step():
                        self._requests.finish(output)
                else:
                    self._requests.wait()

    def _require_weights(self) -> None:
        if not self._has_weights:
            raise RolloutError("vLLM has no weights: call update_weights first, also after sleep()")

    def expect_checksums(self) -> None:
        self._is_checked = True

    def checksums(self) -> Mapping[str, Mapping[str, int]]:
        return {"the engine": self._checksums}

    def sleep(self) -> None:
        """Free weights and cache on a GPU. `update_weights` must come before the next `generate`.

        Requests stay and continue afterwards.
        """
        self._has_weights = False
        if self._sleeps:
            self._llm.sleep(level=2, mode="keep")

    def wake_up(self) -> None:
        """Allocate the weights; the cache is allocated after they have been loaded."""
        if self._sleeps:
            self._llm.wake_up(tags=["weights"])

    def close(self) -> None:
        """End all requests and free the device.

        Does not call vLLM's shutdown, which destroys the trainer's process group too, and keeps vLLM from calling it
        at interpreter exit, when there is no group any more.
        """
        self._requests.close(self._llm.llm_engine)
        self.sleep()
        self._llm.llm_engine.engine_core._finalizer.detach()
        gc.unfreeze()  # vLLM froze the objects that existed at its start; they would be reported as leaks


def _completion(prompt: Prompt, sampling: SamplingParams, output: Any) -> Completion:
    tokens = list(output.token_ids)
    versions = [int(span.version) for span in output.weight_versions for _ in range(span.start, span.end)]
    logprobs = [found[token].logprob for token, found in zip(tokens, output.logprobs, strict=True)]
    experts = output.routed_experts if sampling.with_routes else None
    return completion_of(prompt, tokens, logprobs, output.finish_reason, versions, experts, source="vLLM")


def build_vllm_engine(config: Config, *, checkpoint: Path, device: torch.device) -> VLLMEngine:
    """Raises ConfigError for --rollout-engine-args that vLLM does not have or that fsdptrain must set."""
    args, on_gpu = config.section(VllmConfig).engine_args, device.type == "cuda"
    request_batch_invariance(config, on_gpu=on_gpu)
    options = engine_options(config, checkpoint, reserved=_RESERVED, on_gpu=on_gpu)
    options |= {"enable_sleep_mode": on_gpu, "skip_tokenizer_init": not config.rollout.stop}
    if on_gpu:
        torch.accelerator.empty_cache()
        options["gpu_memory_utilization"] = memory_utilization(*device_memory())
    options |= _parallel_options(
        args.get("tensor_parallel_size", 1), on_gpu=on_gpu, timeout_s=config.launch.dist_timeout
    )
    if config.sync.max_staleness:
        options["scheduling_policy"] = "priority"
    _import_vllm()
    from vllm.engine.arg_utils import EngineArgs  # pyright: ignore[reportMissingImports] - an extra

    known = [field.name for field in fields(EngineArgs)]
    for name in args:
        if name not in known:
            raise ConfigError(f"--rollout-engine-args {name}: vLLM has no such option{suggest(name, known)}")
    options |= {**args, **routes_options(config.section(RouterConfig).replay, device.type)}
    return VLLMEngine(config, checkpoint, options)


def _parallel_options(tensor_size: Any, *, on_gpu: bool, timeout_s: int) -> dict[str, Any]:
    """The trainer's ranks are vLLM's workers; `tensor_size` neighbors share an engine and its timeouts."""
    num_ranks = dist.get_world_size()
    if type(tensor_size) is not int or tensor_size < 1 or num_ranks % tensor_size:
        raise ConfigError(
            f"--rollout-engine-args tensor_parallel_size={tensor_size!r}: an engine spans this number of ranks, and "
            f"there are {num_ranks}: use a divisor of {num_ranks}"
        )
    if num_ranks == 1:
        return {}
    options: dict[str, Any] = {"distributed_executor_backend": "external_launcher"}
    if tensor_size > 1:
        options |= {"distributed_timeout_seconds": timeout_s, "cpu_distributed_timeout_seconds": timeout_s}
    if tensor_size > 1 and not on_gpu:
        options["worker_cls"] = CPU_WORKER
    return options


def _import_vllm() -> Any:
    own = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR"}
    for name, value in {**ENVIRONMENT, **own}.items():
        os.environ.setdefault(name, value)
    try:
        import vllm  # pyright: ignore[reportMissingImports] - an extra
    except ImportError as error:
        raise ConfigError(
            f"--rollout-engine vllm: vLLM cannot be imported ({error}); in the clone, pip install '.[vllm]', or use "
            "--rollout-engine hf"
        ) from error
    return vllm
