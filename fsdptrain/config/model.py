"""Sections of the model, its sharding, the optimizer and the reference."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any, Literal

import pydantic
from pydantic import Field

from fsdptrain.config.presets import is_custom
from fsdptrain.config.rules import (
    EXPORT_CHOICE,
    FSDP_ONLY,
    NEEDS_KL,
    NEUTRAL,
    NOT_EXPORTED,
    REFUSED,
    RL_ONLY,
    TUNING,
    Excludes,
    IdleWith,
    Package,
    Problem,
    Requires,
)
from fsdptrain.config.section import Names, Section
from fsdptrain.registry import unknown_name

if TYPE_CHECKING:
    from fsdptrain.config.root import Config

_DECAYS = "choose linear or cosine"
_DECAYING = "lr_decay_style=linear|cosine"


class ModelConfig(Section):
    """Model and its computation."""

    NAME = "model"

    hf_checkpoint: str = ""
    """Model to train: a Hub id or a local folder. Required. To run offline, without network, set HF_HUB_OFFLINE=1."""
    backend: Annotated[Literal["fsdp", "megatron"], Package("megatron.core", "megatron", "megatron")] = "fsdp"
    """`fsdp`: transformers' model with PyTorch FSDP2. `megatron`: it on megatron-core, see docs/megatron.md."""
    trust_remote_code: Annotated[bool, EXPORT_CHOICE, NOT_EXPORTED] = False
    """Run Python code from the checkpoint. Only for authors whom you trust."""
    attn_implementation: Annotated[
        Literal["auto", "flash_attention_2", "flash_attention_3", "varlen", "sdpa"], NEUTRAL, FSDP_ONLY
    ] = "auto"
    """Attention over packs. `auto`: flash-attn 3 on Hopper if installed, else varlen on CUDA, else a plug-in for the
    device (docs/own_parts.md), else sdpa per sequence."""
    layout: Annotated[Literal["auto", "packed", "padded"], NEUTRAL, FSDP_ONLY] = "auto"
    """Layout of sequences in the model. `auto`: packed if a test at start proves it exact, else padded."""
    bf16: Annotated[bool | Literal["auto"], TUNING] = "auto"
    """Compute in bfloat16; master weights and gradient reduction stay in float32. `--no-bf16`: float32. `auto`:
    bfloat16 on accelerators and on CPUs with AVX512-BF16, AMX or Arm BF16, else float32."""
    fp16: Annotated[bool, TUNING, FSDP_ONLY] = False
    """Compute in float16 with a gradient scaler. Turns --bf16 auto off; setting both is an error."""
    logprob_chunk_size: Annotated[int, NEUTRAL] = Field(default=512, ge=1)
    """Tokens whose logits are in memory at a time. At --max-tokens-per-gpu nothing is recomputed. [tokens]"""
    strict: Annotated[bool, NEUTRAL] = False
    """Make fallbacks (padding instead of packing, torch code instead of a kernel) errors instead of warnings."""
    deterministic_mode: Annotated[bool, NEUTRAL] = False
    """Make runs reproducible: deterministic kernels, and batch-invariant vLLM on a GPU. See docs/optimizers.md."""

    @pydantic.model_validator(mode="before")
    @classmethod
    def _one_compute_dtype(cls, values: Any) -> Any:
        if isinstance(values, dict) and values.get("fp16") is True and values.get("bf16", "auto") == "auto":
            return {**values, "bf16": False}
        return values

    def problems(self, config: "Config") -> Iterator[Problem]:
        if not self.hf_checkpoint:
            yield "--hf-checkpoint is missing: the model to train, e.g. --hf-checkpoint Qwen/Qwen3-4B or a local folder"
        if self.fp16 and self.bf16:
            yield "--fp16 and --bf16 are both on: choose one, e.g. --fp16 --no-bf16"


class FsdpConfig(Section):
    """FSDP sharding."""

    NAME = "fsdp"
    PREFIX = "fsdp_"
    RULES = (FSDP_ONLY,)
    ON_RESUME = NEUTRAL

    cpu_offload: bool = False
    """Keep parameters, gradients and optimizer state in host memory: least GPU memory, slow steps."""
    replicate_size: int = Field(default=1, ge=1)
    """Replicas of the sharded model (HSDP): world size = replicas x shards."""
    reshard_after_forward: bool = True
    """Free each layer's gathered parameters after its forward pass. Off: faster, more memory."""


OPTIMIZERS = ["adamw", "muon", "sgd"]  # keys of fsdptrain.fsdp.optimizers.OPTIMIZERS
_OF_ADAMW, _OF_MUON = Requires("optimizer=adamw"), Requires("optimizer=muon")
_NO_SGD = IdleWith("optimizer=sgd")


class OptimConfig(Section):
    """Optimizer and learning rate schedule."""

    NAME = "optim"
    ON_RESUME = TUNING

    optimizer: Annotated[str, FSDP_ONLY, REFUSED] = "adamw"
    """adamw, muon, sgd, or `package.module:function`, which returns a torch.optim.Optimizer. See docs/optimizers.md."""
    lr: float = Field(default=1e-6, gt=0.0)
    """Peak learning rate."""
    min_lr: Annotated[float, IdleWith("lr_decay_style=constant", fix=_DECAYS)] = Field(default=0.0, ge=0.0)
    """Learning rate at the end of the decay."""
    lr_decay_style: Literal["constant", "linear", "cosine"] = "constant"
    """Learning rate scheduler after the warm-up."""
    lr_decay_iters: Annotated[int | None, Requires(_DECAYING)] = Field(default=None, ge=1)
    """Optimizer steps until the learning rate is --min-lr. Default: all steps of the run."""
    lr_warmup_iters: int = Field(default=0, ge=0)
    """Optimizer steps of linear warm-up of the learning rate. The first has the rate 0, as in transformers."""
    weight_decay: float = Field(default=0.0, ge=0.0)
    """Weight decay, decoupled from the gradient except with sgd."""
    adam_beta1: Annotated[float, _NO_SGD] = Field(default=0.9, ge=0.0, lt=1.0)
    """AdamW: decay of the first moment."""
    adam_beta2: Annotated[float, _NO_SGD] = Field(default=0.95, ge=0.0, lt=1.0)
    """AdamW: decay of the second moment."""
    adam_eps: Annotated[float, _NO_SGD] = Field(default=1e-8, gt=0.0)
    """AdamW: term added to the root of the second moment."""
    muon_lr: Annotated[float | None, _OF_MUON, Requires("lr"), FSDP_ONLY] = Field(default=None, gt=0.0)
    """Peak learning rate of the matrices with --optimizer muon, with the schedule of --lr. Default: --lr."""
    clip_grad: float = Field(default=1.0, ge=0.0)
    """Maximum global gradient norm. 0: no clipping."""
    freeze: Annotated[Names, REFUSED, FSDP_ONLY, Excludes("lora_rank")] = Field(default=[])
    """Do not train parameters whose names match one of these regular expressions. See docs/optimizers.md."""
    lr_scale: Annotated[dict[str, float], FSDP_ONLY] = Field(default={})
    """Multiply --lr for parameters whose names match a regular expression, e.g. `embed_tokens=0.1`."""
    offload_optimizer: Annotated[bool, NEUTRAL, IdleWith("fsdp_cpu_offload"), _OF_ADAMW, FSDP_ONLY] = False
    """Keep the optimizer state in host memory, and run optimizer steps there."""

    def problems(self, config: "Config") -> Iterator[Problem]:
        if not is_custom(self.optimizer) and self.optimizer not in OPTIMIZERS:
            yield unknown_name("--optimizer", self.optimizer, OPTIMIZERS)
        if self.optimizer == "muon" and config.ranks_along("tensor") > 1:
            yield (
                "--optimizer muon does not work with --tensor-parallel-size, which divides its matrices once more: "
                "leave one of them out"
            )
        if self.min_lr > self.lr:
            yield f"--min-lr {self.min_lr:g} is above --lr {self.lr:g}: it is where the decay ends, lower it"
        steps = self.lr_decay_iters or config.total_optimizer_steps
        if self.lr_decay_style != "constant" and steps and self.lr_warmup_iters >= steps:
            yield (
                f"--lr-warmup-iters {self.lr_warmup_iters} leaves nothing of the {steps} optimizer steps to decay in: "
                "lower it, or use --lr-decay-style constant"
            )


class RefConfig(Section):
    """Reference model of the KL term."""

    NAME = "ref"
    PREFIX = "ref_"

    load: Annotated[str | None, RL_ONLY, NEEDS_KL] = None
    """Checkpoint of the reference model, with the same shapes. Default: --hf-checkpoint."""
