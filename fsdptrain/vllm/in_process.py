"""vLLM inside the trainer's process: an engine for each rank, or for some together, with weights straight from the
trainer.

vLLM is imported when an engine is built, never before: it patches torch on import. All of it that we touch is here.
"""

import gc
import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AutoConfig

from fsdptrain import platform
from fsdptrain.config import Config
from fsdptrain.distributed import any_rank, raise_on_all_ranks
from fsdptrain.errors import ConfigError, RolloutError
from fsdptrain.protocols import Naming
from fsdptrain.registry import suggest
from fsdptrain.rollout.sampling import seed_of
from fsdptrain.rollout.stop_tokens import stop_tokens
from fsdptrain.types import ChecksumKind, Completion, Prompt, SamplingParams
from fsdptrain.vllm.adapter import AdapterSlot, adapter_options
from fsdptrain.vllm.call_limit import CallLimit
from fsdptrain.vllm.engine_ranks import ask_together
from fsdptrain.vllm.options import derived_options, routes_of
from fsdptrain.vllm.worker.readback import checksums

# Set before vLLM is imported: the engine in this very process, no telemetry, and threads that sleep when they wait
# (spinning ones made generation on shared cores 7 to 9 times slower).
_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "OMP_WAIT_POLICY": "PASSIVE",
}
_OURS = frozenset(
    {"model", "dtype", "load_format", "logprobs_mode", "skip_tokenizer_init", "enable_lora"}
    | {"distributed_executor_backend", "worker_cls"}
)
_SPREAD = frozenset({"pipeline_parallel_size", "data_parallel_size"})
CPU_WORKER = "fsdptrain.vllm.worker.cpu_worker.Worker"
_STEPS_BETWEEN = 16  # in which ranks that share an engine agree on what time it is
_GENERATE, _UPDATE = "generate of --rollout-engine vllm", "a hand-over to --rollout-engine vllm"


class VLLMEngine:
    """Generates with vLLM, in the process and on the device of this rank. Holds no weights until `update_weights`.

    With vLLM's `tensor_parallel_size` N an engine is spread over N neighbouring ranks, which call all methods together.

    Logprobs are those of the distribution that was sampled from (vLLM's `processed_logprobs`).
    """

    weight_naming: Naming = "hub"

    def __init__(self, checkpoint: Path, *, limit: CallLimit, trust_remote_code: bool = False, **options: Any) -> None:
        """`options` are vLLM's own (`vllm.LLM`); those that exactness rests on are set here and cannot be changed."""
        vllm = _import_vllm()
        self._vllm = vllm
        self.stop_token_ids = stop_tokens(
            checkpoint,
            AutoConfig.from_pretrained(checkpoint, trust_remote_code=trust_remote_code),
            trust_remote_code=trust_remote_code,
        )
        self.policy_version = 0
        self._sleeps = bool(options.get("enable_sleep_mode"))
        self._has_weights = False
        self._cached_tokens = 0
        fixed = {"model": str(checkpoint), "logprobs_mode": "processed_logprobs", "skip_tokenizer_init": True}
        options = {"load_format": "dummy", **options, **fixed, "disable_log_stats": True}
        self._llm = vllm.LLM(**options, trust_remote_code=trust_remote_code)
        self._adapter = _adapter_slot(self._llm) if options.get("enable_lora") else None
        self._ranks = _ranks_of_engine() if options.get("tensor_parallel_size", 1) > 1 else None
        self._limit = limit
        self._num_steps = 0  # of the present `generate`
        self._step, self._llm.llm_engine.step = self._llm.llm_engine.step, self._checked_step

    def update_weights(self, weights: Iterable[tuple[str, Tensor]], policy_version: int) -> None:
        """Take the tensors of a checkpoint, by the names of its files, layer by layer; forget every cached prefix."""
        self._has_weights = False  # half an update must not answer
        weights = iter(weights)
        with self._limit.around(_UPDATE), raise_on_all_ranks(RolloutError, "--rollout-engine vllm"):
            try:
                self._llm.collective_rpc(_reload, kwargs={"weights": weights})
            finally:
                for _ in weights:  # to make them is collective: also after an error
                    pass
            self._begin(policy_version)
        self._has_weights = True

    def update_adapter(
        self, weights: Iterable[tuple[str, Tensor]], write_config: Callable[[Path], None], policy_version: int
    ) -> None:
        """Take an adapter in place of the one before; the weights that it stands beside are the checkpoint's."""
        self._has_weights = False
        tensors = {name: tensor.cpu().contiguous() for name, tensor in weights}
        with self._limit.around(_UPDATE), raise_on_all_ranks(RolloutError, "--lora-sync adapter"):
            assert self._adapter is not None, "vLLM was started with --lora-sync adapter"
            self._adapter.load(tensors, write_config, policy_version)
            self._begin(policy_version)
        self._has_weights = True

    def _begin(self, policy_version: int) -> None:
        if self._sleeps:
            self._llm.wake_up(tags=["kv_cache"])
        if not self._llm.reset_prefix_cache():
            raise RolloutError("vLLM did not forget its cached prefixes: they belong to the weights of before")
        self.policy_version = policy_version

    def generate(self, prompts: Sequence[Prompt], sampling: SamplingParams) -> list[Completion]:
        """`num_samples` completions for each prompt, prompt by prompt, in order; each request has its own seed."""
        if not self._has_weights:
            raise RolloutError("vLLM has no weights: call update_weights first, also after sleep()")
        with self._limit.around(_GENERATE, checked=True):
            if self._ranks is not None:
                return ask_together(self._ranks, self._ask, prompts, sampling)
            return self._ask(prompts, sampling)

    def _ask(self, prompts: Sequence[Prompt], sampling: SamplingParams) -> list[Completion]:
        if not prompts:
            return []
        asked = [(prompt, k) for prompt in prompts for k in range(sampling.num_samples)]
        self._num_steps = 0
        try:
            outputs = self._llm.generate(
                [{"prompt_token_ids": prompt.token_ids} for prompt, _ in asked],
                [self._params(prompt, k, sampling) for prompt, k in asked],
                use_tqdm=False,
                lora_request=self._adapter.request if self._adapter else None,
            )
        except RolloutError:  # ours: vLLM still works on them
            engine = self._llm.llm_engine
            engine.abort_request(list(engine.output_processor.request_states), internal=True)
            raise
        self._cached_tokens = sum(out.num_cached_tokens or 0 for out in outputs)
        return [
            self._completion(prompt, out.outputs[0], sampling.with_routes)
            for (prompt, _), out in zip(asked, outputs, strict=True)
        ]

    def _checked_step(self) -> Any:
        """In place of the step that vLLM's loop takes again and again. Ranks that share an engine end it together."""
        ranks, self._num_steps = self._ranks, self._num_steps + 1
        if ranks is None or self._num_steps % _STEPS_BETWEEN == 0:
            is_over = self._limit.is_over
            if is_over if ranks is None else any_rank(is_over, ranks):
                raise self._limit.error(_GENERATE)
        return self._step()

    def checksums(self, names: Collection[str], kind: ChecksumKind = "bits") -> Mapping[str, int]:
        """Of the layers that answer: of those of `names` that vLLM keeps as a checkpoint does, fused or not."""
        return self._llm.apply_model(lambda model: checksums(model, names, kind))[0]

    def cached_tokens(self) -> int:
        """Of the prompts of the last `generate`, also those that two of them share."""
        return self._cached_tokens

    def sleep(self) -> None:
        """Free weights and cache where the device is a GPU; the weights must come again before the next `generate`.

        Beside an adapter the frozen ones wait in host memory.
        """
        self._has_weights = False
        if self._sleeps:
            self._llm.sleep(level=2 if self._adapter is None else 1)

    def wake_up(self) -> None:
        """Room for the weights; the cache gets its room after they have come."""
        if self._sleeps:
            self._llm.wake_up(tags=["weights"])

    def close(self) -> None:
        """Give back what a GPU holds.

        vLLM's own shutdown would tear down the trainer's process group with its own, which end with the trainer's. vLLM
        would also call it when Python ends, and print a traceback, since there is no group any more.
        """
        self.sleep()
        self._llm.llm_engine.engine_core._finalizer.detach()
        vars(self._llm.llm_engine).pop("step", None)  # ours refers to this object, which refers to vLLM
        gc.unfreeze()  # vLLM has frozen what was there at its start; what stays to the very end is told as a leak
        if self._adapter is not None:
            self._adapter.close()

    def _params(self, prompt: Prompt, index: int, sampling: SamplingParams) -> Any:
        return self._vllm.SamplingParams(
            n=1,
            max_tokens=sampling.limit_of(prompt),
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=max(sampling.top_k, 0),  # vLLM: 0 is off
            min_p=sampling.min_p,
            stop_token_ids=sorted({*self.stop_token_ids, *sampling.stop_token_ids}),
            ignore_eos=True,  # which ids end a response is said by `stop_token_ids` alone
            logprobs=0,  # of the sampled token only
            seed=seed_of(sampling.seed, prompt.id, index),
            detokenize=False,
        )

    def _completion(self, prompt: Prompt, output: Any, with_routes: bool) -> Completion:
        tokens = list(output.token_ids)
        logprobs = [found[token].logprob for token, found in zip(tokens, output.logprobs, strict=True)]
        if output.finish_reason not in ("stop", "length"):
            raise RolloutError(f"vLLM ended the answer to prompt {prompt.id!r} by {output.finish_reason!r}")
        routes = routes_of(output.routed_experts) if with_routes else None
        return Completion(prompt.id, tokens, logprobs, output.finish_reason, self.policy_version, routes=routes)


def build_vllm_engine(config: Config, *, checkpoint: Path, device: torch.device) -> VLLMEngine:
    """The engine as `config` wants it, on `device`."""
    rollout = config.rollout
    on_gpu = device.type == "cuda"
    options: dict[str, Any] = {
        "dtype": config.compute_dtype_name,
        "max_model_len": config.prompt_budget + rollout.max_response_len,
        "seed": rollout.seed,
        "enforce_eager": not on_gpu,
        "enable_sleep_mode": on_gpu,
    }
    if not on_gpu:
        # a request with a seed whose prompt is read in parts ends vLLM 0.32: "CPU Generator does not use offset"
        options["enable_chunked_prefill"] = False
    if rollout.kv_cache_gib is not None or not on_gpu:
        options["kv_cache_memory_bytes"] = int((rollout.kv_cache_gib or 1.0) * platform.GIB)
    if config.lora.sync == "adapter":
        options |= adapter_options(config.lora)
    options |= _parallel_options(
        rollout.engine_args.get("tensor_parallel_size", 1), on_gpu=on_gpu, timeout_s=config.launch.dist_timeout
    )
    for name in rollout.engine_args:
        if name in _OURS:
            raise ConfigError(
                f"--rollout-engine-args {name}: fsdptrain sets it, and exactness rests on it; leave it out"
            )
        if name in _SPREAD:
            raise ConfigError(
                f"--rollout-engine-args {name}: an engine in the trainer's process is spread over ranks by "
                "tensor_parallel_size only; leave it out, or use --rollout-engine vllm-server"
            )
    known = _known_options()
    for name in rollout.engine_args:
        if name not in known:
            raise ConfigError(f"--rollout-engine-args {name}: vLLM has no such option{suggest(name, known)}")
    options |= {**rollout.engine_args, **derived_options(config, checkpoint, device.type)}
    limit = CallLimit(rollout.timeout, Path(config.run.output_dir) / "stacks", dist.get_rank())
    return VLLMEngine(checkpoint, limit=limit, trust_remote_code=config.model.trust_remote_code, **options)


def _reload(worker: Any, *, weights: Iterable[tuple[str, Tensor]]) -> None:
    """Runs in vLLM's worker, which is this process."""
    from vllm.config import set_current_vllm_config  # pyright: ignore[reportMissingImports] - an extra

    from fsdptrain.vllm.worker.reload import WeightReload

    reload = WeightReload(worker.get_model(), worker.model_config)
    with set_current_vllm_config(worker.vllm_config):
        reload.start()
        reload.load(weights)
        reload.finish()


def _parallel_options(tensor_size: Any, *, on_gpu: bool, timeout_s: int) -> dict[str, Any]:
    """Our ranks are vLLM's workers: `tensor_size` neighbours are one engine, whose waits for each other end after
    `timeout_s`, as those of all ranks do."""
    if type(tensor_size) is not int or tensor_size < 1:
        raise ConfigError(
            f"--rollout-engine-args tensor_parallel_size={tensor_size!r}: give a whole number of ranks, 1 or more"
        )
    num_ranks = dist.get_world_size()
    if num_ranks % tensor_size:
        raise ConfigError(
            f"--rollout-engine-args tensor_parallel_size={tensor_size}: an engine is spread over so many ranks, and "
            f"there are {num_ranks}: take a divisor of them"
        )
    if num_ranks == 1:
        return {}
    options: dict[str, Any] = {"distributed_executor_backend": "external_launcher"}
    if tensor_size > 1:
        options |= {"distributed_timeout_seconds": timeout_s, "cpu_distributed_timeout_seconds": timeout_s}
    if tensor_size > 1 and not on_gpu:
        options["worker_cls"] = CPU_WORKER
    return options


def _ranks_of_engine() -> dist.ProcessGroup:
    from vllm.distributed.parallel_state import get_tp_group  # pyright: ignore[reportMissingImports] - an extra

    return get_tp_group().cpu_group


def _known_options() -> list[str]:
    _import_vllm()
    from vllm.engine.arg_utils import EngineArgs  # pyright: ignore[reportMissingImports] - an extra

    return [field.name for field in fields(EngineArgs)]


def _adapter_slot(llm: Any) -> AdapterSlot:
    from vllm.lora.request import LoRARequest  # pyright: ignore[reportMissingImports] - an extra

    return AdapterSlot(llm, LoRARequest)


def _import_vllm() -> Any:
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    try:
        import vllm  # pyright: ignore[reportMissingImports] - an extra
    except ImportError as error:
        raise ConfigError(
            f"--rollout-engine vllm: vLLM cannot be imported ({error}); pip install 'fsdptrain[vllm]', or use "
            "--rollout-engine hf"
        ) from error
    return vllm
