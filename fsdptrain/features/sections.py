"""The options of the features: a section for each, with the rules of its fields. Imports no torch."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, model_validator

from fsdptrain.config.rules import (
    COLUMN,
    EXPORT_CHOICE,
    FSDP_ONLY,
    NEUTRAL,
    NOT_EXPORTED,
    RL_ONLY,
    TUNING,
    WHOLE_VOCABULARY,
    Excludes,
    Fact,
    IdleWith,
    Package,
    Problem,
    RankGroup,
    Requires,
)
from fsdptrain.config.section import Names, Section

if TYPE_CHECKING:
    from fsdptrain.config.root import Config


class LoraConfig(Section):
    """LoRA: train a small adapter instead of the weights: docs/lora.md."""

    NAME = "lora"
    PREFIX = "lora_"
    RULES = (Requires("lora_rank", fix="set it, e.g. 32"), FSDP_ONLY)
    FACTS = ((Fact.FROZEN_WEIGHTS, "lora_rank"), (Fact.START, "lora_init"), (Fact.START, "lora_modules_to_save"))

    rank: Annotated[int, Package("peft", "lora")] = Field(default=0, ge=0)
    """Rank of the adapter, e.g. 32: an 8B model can then fit on a 24 GB GPU. 0: no adapter, train all weights."""
    alpha: int = Field(default=32, ge=1)
    """The adapter's output is scaled by alpha / rank."""
    rslora: bool = False
    """Scale the output by alpha / sqrt(rank) (rsLoRA)."""
    targets: Names = Field(default=["all-linear"], min_length=1)
    """Adapted weights: `all-linear` (except the head), or name suffixes: q_proj, experts.down_proj: docs/lora.md."""
    modules_to_save: Annotated[Names, Excludes("ref_load")] = Field(default=[])
    """Modules to train whole and save in the adapter, by name suffix, e.g. embed_tokens lm_head."""
    init: Annotated[str | None, NOT_EXPORTED] = None
    """Start from the adapter in this peft directory, with its rank, alpha, targets, rslora and modules_to_save."""
    export: Annotated[Literal["adapter", "merged", "both"], NEUTRAL, EXPORT_CHOICE] = "adapter"
    """`adapter`: a peft folder. `merged`: a full model. `both`: that, with the adapter in its folder `adapter`."""

    @model_validator(mode="before")
    @classmethod
    def _of_its_folder(cls, values: Any) -> Any:
        if isinstance(values, dict) and isinstance(values.get("init"), str):
            from fsdptrain.features.lora.folder import with_options

            return with_options(values)
        return values


class QuantizedBaseConfig(Section):
    """QLoRA: frozen weights in 4 bits under an adapter: docs/lora.md."""

    NAME = "quantized_base"
    RULES = (
        Requires("lora_rank", fix="set it, e.g. 32: only frozen weights can be quantized"),
        Excludes("fsdp_cpu_offload", "compile", "liger", "ref_load"),
        FSDP_ONLY,
    )

    load_in_4bit: Annotated[bool, Package("bitsandbytes", "qlora")] = False
    """Store the frozen weights of linear layers in 4 bits (NF4, QLoRA), e.g. for a 7B model on a 16 GB GPU."""


_TARGETS = "name layers of the tower by --lora-targets, e.g. all-linear visual.merger.linear_fc1"


class VisionConfig(Section):
    """Prompts with images."""

    NAME = "vision"
    RULES = (FSDP_ONLY,)
    FACTS = ((Fact.RUNS_TOWER, "image_key"), (Fact.TRAINS_TOWER, "train_vision"), (Fact.EMBEDDED_ENGINE, "image_key"))

    image_key: Annotated[
        str | None,
        COLUMN,
        Package("PIL", "vision"),
        Requires("apply_chat_template", fix="only the template knows how a prompt shows an image"),
        Excludes("environment", "environment_command", "record_rollouts", "replay_rollouts"),
        Requires("rollout_engine=auto|hf", fix="use --rollout-engine hf"),
    ] = None
    """Column of the images of a prompt: one or a list of file paths, bytes, or images opened by `datasets`. `<image>`
    in the prompt marks each position; without marks, images come first. See docs/images.md."""
    train_vision: Annotated[bool, Requires("image_key"), IdleWith("lora_rank", fix=_TARGETS)] = False
    """Also train the vision tower and its projector, which are frozen otherwise. Needs --image-key."""


class RouterConfig(Section):
    """Expert routing of mixture-of-experts models."""

    NAME = "router"
    PREFIX = "router_"
    RULES = (FSDP_ONLY,)
    FACTS = ((Fact.RECORDS_ROUTES, "router_replay=rollout"), (Fact.POLICY_SCORES, "router_replay=scoring"))

    replay: Annotated[Literal["off", "scoring", "rollout"], IdleWith("algorithm=sft")] = "off"
    """Replay recorded expert choices in training. `scoring`: from the computation of old logprobs (R2). `rollout`: from
    the engine (R3), for old logprobs too."""

    def problems(self, config: "Config") -> Iterator[Problem]:
        if self.replay == "scoring" and not config.scores_policy:
            reason = "where the policy is not scored: use --router-replay rollout, or remove it"
            yield from config.without_effect(["router_replay"], reason)
        ahead = config.sync.max_staleness
        if self.replay == "rollout" and ahead and config.rollout.engine == "vllm-server":
            yield (
                f"--router-replay rollout with --max-staleness {ahead}: servers read tokens again after a weight sync, "
                "with other experts: use --router-replay scoring, or leave one of them out"
            )


_NOT_TESTED_SPLIT = Excludes(
    "lora_rank", "image_key", "compile", "offload_activations", "fp16", "fsdp_cpu_offload", "async_save",
)  # fmt: skip
_NOT_TESTED_WITH_TENSOR = Excludes("algorithm=sft", "router_replay")


class ModelParallelConfig(Section):
    """Tensor and expert parallelism."""

    NAME = "model_parallel"
    ON_RESUME = NEUTRAL

    tensor_parallel_size: Annotated[
        int,
        RankGroup("tensor"),
        _NOT_TESTED_SPLIT,
        _NOT_TESTED_WITH_TENSOR,
        WHOLE_VOCABULARY,
        Excludes("backend=megatron", fix="use --megatron-tensor-parallel"),
    ] = Field(default=1, ge=1)
    """Neighboring processes that split each layer, by the transformers plan of the model. Keep them within a node."""
    expert_parallel_size: Annotated[
        int,
        RankGroup("experts", shares_packs=False),
        _NOT_TESTED_SPLIT,
        Excludes("backend=megatron", fix="use --megatron-expert-parallel"),
    ] = Field(default=1, ge=1)
    """Processes that share the experts; tokens are sent to them."""


class ContextParallelConfig(Section):
    """Context parallelism."""

    NAME = "context_parallel"
    ON_RESUME = NEUTRAL
    FACTS = ((Fact.OWN_ATTENTION, "context_parallel_size>1"),)

    context_parallel_size: Annotated[
        int,
        RankGroup("context", shares_tokens=True),
        Excludes("image_key", "compile", "offload_activations", "layout=padded"),
        Excludes("attn_implementation=flash_attention_2|flash_attention_3", fix="use auto, varlen or sdpa"),
        Excludes("backend=megatron"),
    ] = Field(default=1, ge=1)
    """Processes that share the tokens of each pack: sequences may be that many times longer."""


_NOT_EXACT = IdleWith(
    "algorithm=sft", "router_replay", "image_key", "tensor_parallel_size>1", "expert_parallel_size>1",
    "context_parallel_size>1", "layout=padded", "attn_implementation=flash_attention_2|flash_attention_3",
    "deterministic_mode",
)  # fmt: skip


class PrefixSharingConfig(Section):
    """Sharing of the prompt of a group."""

    NAME = "prefix_sharing"
    ON_RESUME = NEUTRAL
    FACTS = ((Fact.OWN_ATTENTION, "prefix_sharing"),)

    prefix_sharing: Annotated[bool, _NOT_EXACT, FSDP_ONLY] = False
    """Compute the prompt of a group once per pack, if a test at start proves it exact."""


class ActivationMemoryConfig(Section):
    """Memory of activations."""

    NAME = "activation_memory"
    ON_RESUME = NEUTRAL

    gradient_checkpointing: bool = False
    """Recompute each decoder layer in the backward pass: less memory, about a third more time."""
    offload_activations: Annotated[bool, Requires("gradient_checkpointing"), FSDP_ONLY] = False
    """Keep the inputs of decoder layers, all that --gradient-checkpointing saves, in host memory."""


class CompileConfig(Section):
    """torch.compile."""

    NAME = "compile"
    ON_RESUME = NEUTRAL

    compile: Annotated[bool, FSDP_ONLY] = False
    """Apply torch.compile to each decoder layer, except attention. Needs a C++ compiler. See docs/optimizers.md."""


class LigerConfig(Section):
    """Kernels of liger-kernel."""

    NAME = "liger"
    ON_RESUME = NEUTRAL

    liger: Annotated[
        bool,
        Package("liger_kernel", "liger"),
        Package("triton", "liger"),
        Excludes("compile", reason="with --compile, which fuses the same operations: leave one of them out"),
        Excludes("tensor_parallel_size>1", "expert_parallel_size>1", "image_key"),
        FSDP_ONLY,
    ] = False
    """Use liger-kernel's Triton kernels for norms and gated MLPs, if a test at start finds them correct."""


_JSD = Requires("opd_loss=jsd", fix="add --opd-loss jsd, or remove it")


class DistillationConfig(Section):
    """On-policy distillation from a teacher: docs/distillation.md."""

    NAME = "distillation"
    PREFIX = "opd_"
    RULES = (RL_ONLY, Requires("opd_teacher", fix="name a teacher, or remove it"), FSDP_ONLY)
    FACTS = ((Fact.TEACHES, "opd_teacher"), (Fact.ZERO_ADVANTAGE, "opd_teacher"))

    teacher: Annotated[
        str | None,
        TUNING,
        Excludes("image_key", fix="the teacher gets no images: leave one of them out"),
        Excludes("@is_truncated", reason="with truncated sampling, whose renormalized logprobs no teacher has: set "
                 "--rollout-top-p 1, --rollout-top-k and --rollout-min-p off"),
    ] = None  # fmt: skip
    """Teacher: a checkpoint (directory or Hub name) with the tokenizer of the policy, or the URL of a vLLM server.
    Default: no distillation."""
    loss: Annotated[
        Literal["token", "jsd"],
        Excludes("tensor_parallel_size>1", "context_parallel_size>1", fix="leave it out, or use token"),
        Excludes("epochs_per_rollout>1", fix="set it to 1"),
    ] = "token"
    """`token`: add opd_kl_coef * (teacher logprob - old logprob) to each token's advantage: on average the negative
    reverse KL. `jsd`: add opd_kl_coef times the generalized Jensen-Shannon divergence of the next-token distributions
    to each token's loss, over the teacher's opd_top_k most likely tokens, and all others together."""
    kl_coef: Annotated[float, TUNING] = Field(default=1.0, gt=0.0)
    """Coefficient of the teacher's term."""
    beta: Annotated[float, _JSD] = Field(default=0.5, ge=0.0, le=1.0)
    """jsd: 0 is the forward KL(teacher || policy), 1 the reverse KL(policy || teacher), between them the divergence to
    the mixture beta * teacher + (1 - beta) * policy (GKD)."""
    top_k: Annotated[int, _JSD] = Field(default=20, ge=1)
    """jsd: number of tokens to compare. A server allows 20 unless it has another --max-logprobs."""

    @property
    def is_server(self) -> bool:
        return self.teacher is not None and self.teacher.startswith(("http://", "https://"))

    def problems(self, config: "Config") -> Iterator[Problem]:
        if self.teacher is not None:
            from fsdptrain.features.distillation.checks import option_problems

            yield from option_problems(self, config)


_NOT_TESTED_WITH_FP8 = Excludes("lora_rank", "liger", "fp16", "tensor_parallel_size>1", "expert_parallel_size>1")


class Fp8Config(Section):
    """Training in 8-bit floats: docs/optimizers.md."""

    NAME = "fp8"
    ON_RESUME = TUNING

    fp8: Annotated[bool, NOT_EXPORTED, _NOT_TESTED_WITH_FP8, FSDP_ONLY, Package("torchao", "torchao")] = False
    """Compute linear layers in 8-bit floats in the forward and backward pass, with torchao."""


SECTIONS: tuple[type[Section], ...] = (
    LoraConfig, QuantizedBaseConfig, VisionConfig, RouterConfig, ModelParallelConfig, ContextParallelConfig,
    PrefixSharingConfig, ActivationMemoryConfig, CompileConfig, LigerConfig, DistillationConfig, Fp8Config,
)  # fmt: skip
