"""Sections of generation, of the batches made from it, and of the weight sync to the engine."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from fsdptrain.config.rules import FSDP_ONLY, NEUTRAL, RL_ONLY, TUNING, IdleWith, Package, Problem, Requires
from fsdptrain.config.section import Names, Section
from fsdptrain.registry import misnamed

if TYPE_CHECKING:
    from fsdptrain.config.root import Config

ENGINE_NAMES = ("auto", "hf", "vllm", "vllm-server")
_NEEDS_LENGTH = Requires("@generates", "loss_aggregation=fixed_length", reason="with --algorithm sft: remove it")
NEEDS_IN_FLIGHT = (
    "needs an engine that keeps requests across weight syncs, --rollout-engine vllm or vllm-server: set it to 0"
)
_OWN_DEVICES = "with servers, which have separate devices: remove it"


class BatchConfig(Section):
    """Batch sizes and packing."""

    NAME = "batch"
    ON_RESUME = TUNING

    max_tokens_per_gpu: Annotated[int, NEUTRAL] = Field(default=8192, ge=1)
    """Pack size: tokens per forward pass. Out of memory: lower it. --context-parallel-size multiplies it. [tokens]"""
    overlong_samples: Literal["error", "drop", "truncate"] = "error"
    """Samples longer than a pack: stop the run, drop and count them, or cut off their end (supervised data only)."""
    global_batch_size: int | None = Field(default=None, ge=1)
    """Batch size of an optimizer step, drawn at random, not by group. Default: the whole rollout. [samples]"""
    epochs_per_rollout: Annotated[int, RL_ONLY] = Field(default=1, ge=1)
    """Training passes over each rollout, each with its steps in another order; logprobs are computed once."""

    def problems(self, config: "Config") -> Iterator[Problem]:
        size, batch = self.global_batch_size, config.rollout.batch_size
        if config.algorithm.algorithm == "sft":
            if size and config.is_set("rollout_batch_size") and size != batch:
                yield (
                    f"--rollout-batch-size {batch} and --global-batch-size {size} differ: with --algorithm sft both "
                    "mean the samples of one optimizer step, give one of them"
                )
        elif self.overlong_samples == "truncate":
            yield "--overlong-samples truncate cuts supervised rows, not responses: use drop, or --algorithm sft"
        elif size and config.samples_per_rollout % size:
            samples = config.samples_per_rollout
            divisor = next(most for most in range(min(size, samples), 0, -1) if samples % most == 0)
            yield (
                f"--global-batch-size {size} must divide --rollout-batch-size {batch} x --n-samples-per-prompt "
                f"{config.algorithm.n_samples_per_prompt} = {samples} samples, e.g. {divisor}"
            )


class RolloutConfig(Section):
    """Rollout generation."""

    NAME = "rollout"
    PREFIX = "rollout_"

    engine: Annotated[str, NEUTRAL, RL_ONLY, Package("vllm", "vllm", "vllm")] = "auto"
    """`hf`: embedded, on the trainer's device. `vllm`: in the trainer's process. `vllm-server`: over HTTP. Or
    `package.module:function`. `auto`: vllm if installed and there is a GPU, else hf."""
    batch_size: Annotated[int, TUNING] = Field(default=32, ge=1)
    """Prompts per rollout, each with --n-samples-per-prompt responses. [prompts]"""
    max_prompt_len: int | None = Field(default=None, ge=1)
    """Maximum prompt length; longer prompts are skipped and counted (progress/too_long_prompts). Default: the length of
    a pack minus the response. [tokens]"""
    max_response_len: Annotated[int, _NEEDS_LENGTH] = Field(default=2048, ge=1)
    """Maximum response length. [tokens]"""
    temperature: Annotated[float, RL_ONLY] = Field(default=1.0, ge=0.01, le=100.0)
    """Sampling temperature, also used for the trainer's logprobs."""
    top_p: Annotated[float, RL_ONLY] = Field(default=1.0, gt=0.0, le=1.0)
    """Sample from the smallest set of most likely tokens whose total probability reaches this. The trainer's logprobs
    use the same set."""
    top_k: Annotated[int | None, RL_ONLY] = Field(default=None, ge=1)
    """Sample from the k most likely tokens. The trainer's logprobs use the same set. Default: off. [tokens]"""
    min_p: Annotated[float, RL_ONLY] = Field(default=0.0, ge=0.0, le=1.0)
    """Keep tokens whose probability is at least min_p times the highest one. The trainer's logprobs use
    the same set."""
    stop: Annotated[Names, RL_ONLY] = Field(default=[])
    """Stop strings: texts that end a response and stay in it, in evaluations too, e.g. </answer>: docs/rollouts.md."""
    stop_token_ids: Annotated[list[int], RL_ONLY] = Field(default=[])
    """Token ids that end a response, in addition to the model's, in evaluations too."""
    max_batch_tokens: Annotated[int, NEUTRAL, RL_ONLY, IdleWith("rollout_engine=vllm|vllm-server")] = Field(
        default=262_144, ge=1
    )
    """Engine hf: capacity of the key-value cache. [tokens]"""
    shuffle: bool = True
    """Shuffle prompts, differently in each epoch."""
    seed: int = Field(default=42, gt=-(2**62), lt=2**62)
    """Seed of sampling and of the prompt order."""

    def problems(self, config: "Config") -> Iterator[Problem]:
        """Report an unknown engine, and lengths that do not fit into a pack or into the embedded engine's cache."""
        yield from misnamed("--rollout-engine", self.engine, ENGINE_NAMES, "rollout")
        for text in self.stop:
            if not text or "\ufffd" in text:  # which stands for a part of a character
                yield f"--rollout-stop {text!r}: it must be a text that is not empty and has no U+FFFD"
        budget, prompt, response = config.max_tokens_per_pack, self.max_prompt_len, self.max_response_len
        is_sft = config.algorithm.algorithm == "sft"
        if not is_sft and response >= budget:
            yield (
                f"--rollout-max-response-len {response} leaves no room for a prompt in {config.pack_budget}: lower the "
                "first or raise the second"
            )
        longest = config.prompt_budget + (1 if is_sft else response)
        if prompt is not None and longest > budget and config.batch.overlong_samples == "error":
            yield (
                f"--rollout-max-prompt-len {prompt} and a response make {longest} tokens, more than "
                f"{config.pack_budget}: lower the first, raise the second, or use --overlong-samples drop"
            )
        embedded = self.engine not in ("vllm", "vllm-server")
        if embedded and config.generates and self.max_batch_tokens < config.prompt_budget + response:
            yield (
                f"--rollout-max-batch-tokens {self.max_batch_tokens} cannot hold one sequence of "
                f"{config.prompt_budget} prompt and {response} response tokens: raise it"
            )


class SyncConfig(Section):
    """Engines and weight sync."""

    NAME = "sync"

    max_staleness: Annotated[int, TUNING, RL_ONLY] = Field(default=0, ge=0)
    """Generate at most this many rollouts ahead of training, with vllm or vllm-server. A step trains on the first
    finished groups; the others continue across weight syncs, so their first tokens may come from older weights. With
    vllm-server, generation and training overlap. 0: always the newest weights. [rollouts]"""
    offload_train: Annotated[
        bool,
        NEUTRAL,
        RL_ONLY,
        IdleWith("fsdp_cpu_offload"),
        IdleWith("rollout_engine=vllm-server", reason=_OWN_DEVICES),
        FSDP_ONLY,
    ] = False
    """Move the trainer's weights and optimizer state to host memory while the engine generates, twice per rollout."""

    def problems(self, config: "Config") -> Iterator[Problem]:
        if self.max_staleness and config.rollout.engine == "hf":
            yield f"--max-staleness {self.max_staleness} {NEEDS_IN_FLIGHT}"
