"""vLLM inside the trainer's process: one engine for each rank, and its weights straight from the trainer.

vLLM is imported when an engine is built, never before: it patches torch on import. All of it that we touch is here.
"""

import hashlib
import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import AutoConfig

from fsdptrain import platform
from fsdptrain.config import Config
from fsdptrain.errors import ConfigError, RolloutError
from fsdptrain.protocols import Naming
from fsdptrain.rollout.stop_tokens import stop_tokens
from fsdptrain.rollout.vllm_readback import checksums
from fsdptrain.types import Completion, Prompt, SamplingParams

# Set before vLLM is imported: the engine in this very process, no telemetry, and threads that sleep when they wait
# (spinning ones made generation on shared cores 7 to 9 times slower).
_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "OMP_WAIT_POLICY": "PASSIVE",
}
_OURS = frozenset({"model", "dtype", "load_format", "logprobs_mode", "skip_tokenizer_init"})


class VLLMEngine:
    """Generates with vLLM, in the process and on the device of this rank. Holds no weights until `update_weights`.

    Logprobs are those of the distribution that was sampled from (vLLM's `processed_logprobs`).
    """

    weight_naming: Naming = "hub"

    def __init__(self, checkpoint: Path, *, trust_remote_code: bool = False, **options: Any) -> None:
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
        fixed = {"model": str(checkpoint), "load_format": "dummy", "logprobs_mode": "processed_logprobs"}
        self._llm = vllm.LLM(
            **options, **fixed, trust_remote_code=trust_remote_code, skip_tokenizer_init=True, disable_log_stats=True
        )

    def update_weights(self, weights: Iterable[tuple[str, Tensor]], policy_version: int) -> None:
        """Take the tensors of a checkpoint, by the names of its files, layer by layer; forget every cached prefix."""
        self._has_weights = False  # half an update must not answer
        self._llm.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(weights)})
        self._llm.apply_model(repack_tied_head)
        if self._sleeps:
            self._llm.wake_up(tags=["kv_cache"])
        if not self._llm.reset_prefix_cache():
            raise RolloutError("vLLM did not forget its cached prefixes: they belong to the weights of before")
        self.policy_version = policy_version
        self._has_weights = True

    def generate(self, prompts: Sequence[Prompt], sampling: SamplingParams) -> list[Completion]:
        """`num_samples` completions for each prompt, prompt by prompt, in order; each request has its own seed."""
        if not self._has_weights:
            raise RolloutError("vLLM has no weights: call update_weights first, also after sleep()")
        if not prompts:
            return []
        asked = [(prompt, k) for prompt in prompts for k in range(sampling.num_samples)]
        outputs = self._llm.generate(
            [{"prompt_token_ids": prompt.token_ids} for prompt, _ in asked],
            [self._params(prompt, k, sampling) for prompt, k in asked],
            use_tqdm=False,
        )
        self._cached_tokens = sum(out.num_cached_tokens or 0 for out in outputs)
        return [self._completion(prompt, out.outputs[0]) for (prompt, _), out in zip(asked, outputs, strict=True)]

    def checksums(self, names: Collection[str]) -> Mapping[str, int]:
        """Of the layers that answer: of those of `names` that vLLM keeps as a checkpoint does, fused or not."""
        return self._llm.apply_model(lambda model: checksums(model, names))[0]

    def cached_tokens(self) -> int:
        """Of the prompts of the last `generate`, also those that two of them share."""
        return self._cached_tokens

    def sleep(self) -> None:
        """Free weights and cache where the device is a GPU; the weights must come again before the next `generate`."""
        self._has_weights = False
        if self._sleeps:
            self._llm.sleep(level=2)

    def wake_up(self) -> None:
        """Room for the weights; the cache gets its room after they have come."""
        if self._sleeps:
            self._llm.wake_up(tags=["weights"])

    def close(self) -> None:
        """Give back what a GPU holds. vLLM's own shutdown would tear down the trainer's process group with its own."""
        self.sleep()

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

    def _completion(self, prompt: Prompt, output: Any) -> Completion:
        tokens = list(output.token_ids)
        logprobs = [found[token].logprob for token, found in zip(tokens, output.logprobs, strict=True)]
        if output.finish_reason not in ("stop", "length"):
            raise RolloutError(f"vLLM ended the answer to prompt {prompt.id!r} by {output.finish_reason!r}")
        return Completion(prompt.id, tokens, logprobs, output.finish_reason, self.policy_version)


def seed_of(seed: int, prompt_id: str, index: int) -> int:
    """A seed for one request that does not depend on what is generated beside it. 63 bits."""
    digest = hashlib.blake2b(f"{seed}/{index}/{prompt_id}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def repack_tied_head(model: nn.Module) -> None:
    """Give a tied head the weights that its embedding has received. Nothing to do on a GPU, where they are one tensor.

    On a CPU vLLM keeps linear layers in a packed copy, and makes it anew only for layers that received weights: a
    tied head receives none, and would go on answering with its old ones.
    """
    embeddings = {p.data_ptr() for name, p in model.named_parameters(remove_duplicate=False) if "embed" in name}
    for name, module in model.named_modules():
        head: Any = module
        is_packed_head = name.rpartition(".")[2] == "lm_head" and hasattr(head, "cpu_linear")
        if is_packed_head and head.weight.data_ptr() in embeddings:
            head.quant_method.process_weights_after_loading(head)


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
    if rollout.kv_cache_gib is not None or not on_gpu:
        options["kv_cache_memory_bytes"] = int((rollout.kv_cache_gib or 1.0) * platform.GIB)
    if dist.get_world_size() > 1:
        options["distributed_executor_backend"] = "external_launcher"  # our ranks are vLLM's workers
    for name in rollout.engine_args:
        if name in _OURS:
            raise ConfigError(
                f"--rollout-engine-args {name}: fsdptrain sets it, and exactness rests on it; leave it out"
            )
    if rollout.engine_args.get("tensor_parallel_size", 1) != 1:
        raise ConfigError(
            "--rollout-engine-args tensor_parallel_size: each rank has an engine and prompts of its own; leave it out"
        )
    return VLLMEngine(
        checkpoint, trust_remote_code=config.model.trust_remote_code, **{**options, **rollout.engine_args}
    )


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
