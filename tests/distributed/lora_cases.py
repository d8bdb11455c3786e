"""Adapters to compare: plain peft in one process, and this package with the same numbers."""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import peft
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from fsdptrain.fsdp.backend import FSDPBackend
from fsdptrain.fsdp.shards import local_shard
from fsdptrain.model.loading.fill import own_part
from fsdptrain.model.structure import reshard
from fsdptrain.types import LogProbs, LossConfig, LossOutput, PackedBatch, Sample
from tests.exact import in_float64

from .test_fsdp_backend import config

RANK, ALPHA = 4, 6
EXPERTS = ["experts.gate_up_proj", "experts.down_proj"]
MLP = ["gate_proj", "up_proj", "down_proj"]
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]

# name -> (architecture of the zoo, our options, options of peft.LoraConfig)
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "dense": ("qwen3", {}, {"target_modules": [*ATTENTION, *MLP]}),
    "tied": ("qwen2", {"lora_targets": [*ATTENTION, "down_proj"]}, {"target_modules": [*ATTENTION, "down_proj"]}),
    "experts": (
        "qwen3_moe",
        {"lora_targets": ["all-linear", *EXPERTS, "gate"]},
        {"target_modules": ATTENTION, "target_parameters": [*EXPERTS, "gate.weight"]},
    ),
    "transposed experts": ("gpt_oss", {"lora_targets": EXPERTS}, {"target_modules": [], "target_parameters": EXPERTS}),
    "names that peft takes for others": (
        "deepseek_v3",
        {"lora_targets": ["o_proj", "shared_experts.down_proj"]},
        {"target_modules": ["o_proj"], "target_parameters": ["shared_experts.down_proj.weight"]},
    ),
    "whole": (
        "qwen3",
        {"lora_rslora": True, "lora_modules_to_save": ["embed_tokens", "lm_head"]},
        {"target_modules": [*ATTENTION, *MLP], "use_rslora": True, "modules_to_save": ["embed_tokens", "lm_head"]},
    ),
    "whole, tied": (
        "qwen2",
        {"lora_targets": ["q_proj"], "lora_modules_to_save": ["lm_head"]},
        {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens", "lm_head"]},
    ),
    "transposed": ("gpt2", {}, {"target_modules": ["c_attn", "c_proj", "c_fc"], "fan_in_fan_out": True}),
}


def options(case: str) -> dict[str, Any]:
    return {"lora_rank": RANK, "lora_alpha": ALPHA, "bf16": False, "rollout_temperature": 1.0} | CASES[case][1]


def backend_of(hub: str, case: str, checkpoint: str | None = None, **values: Any) -> FSDPBackend:
    """Ours; `hub` holds a checkpoint of each architecture."""
    path = str(Path(hub) / (checkpoint or CASES[case][0]))
    return FSDPBackend(config(path, **{**options(case), **values}), total_steps=10)


def plain_peft(path: Path, case: str) -> peft.PeftModel:
    """The same adapter in one process, by peft alone, in float64, with the numbers of `fill`."""
    model = plain(path)
    config = peft.LoraConfig(task_type="CAUSAL_LM", r=RANK, lora_alpha=ALPHA, **CASES[case][2])
    adapted = peft.get_peft_model(model, config)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if parameter.requires_grad:
                parameter.copy_(chosen(f"base_model.model.{our_name(adapted, name)}", parameter.shape))
    return adapted


def fill(backend: FSDPBackend) -> None:
    """Replace the initial numbers, where B is zero, by others that depend on names only."""
    reshard(backend.model)
    with torch.no_grad():
        for name, parameter in trained(backend.model).items():
            local_shard(parameter).copy_(own_part(chosen(f"base_model.model.{name}", parameter.shape), parameter))


def our_name(model: nn.Module, name: str) -> str:
    """The name of a parameter of peft here, where tied weights that are trained are one parameter."""
    name = name.removeprefix("base_model.model.").replace(".modules_to_save.default", "")
    return name.replace("lm_head", "model.embed_tokens") if model.config.tie_word_embeddings else name


def chosen(name: str, shape: torch.Size) -> Tensor:
    seed = int(hashlib.sha256(name.encode()).hexdigest()[:8], 16)
    noise = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return 0.1 * noise


def trained(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def objective(batch: PackedBatch, logprobs: LogProbs, config: LossConfig) -> LossOutput:
    """The sum of all logprobs, each with a weight of its own."""
    return LossOutput((logprobs.values * batch.loss_mask * batch.labels.sin()).sum(), {})


def plain_gradients(model: peft.PeftModel, items: Sequence[Sample]) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Logprobs of each sample's loss tokens, and the gradients of `objective`: one sample at a time, no packs."""
    found = []
    for sample in items:
        tokens = torch.tensor(sample.token_ids)
        logprobs = model(input_ids=tokens[None]).logits[0, :-1].log_softmax(-1)
        labels, mask = tokens[1:], torch.tensor(sample.loss_mask[1:])
        values = logprobs.gather(1, labels[:, None])[:, 0][mask]
        (values * labels[mask].sin()).sum().backward()
        found.append(values.detach())
    gradients: dict[str, Tensor] = {}
    for name, p in model.named_parameters():
        if p.grad is not None:
            gradients[our_name(model, name)] = gradients.get(our_name(model, name), 0) + p.grad
    return found, gradients


def logits(model: nn.Module) -> Tensor:
    with torch.no_grad():
        return model(input_ids=torch.arange(5, 45)[None]).logits


def plain(path: Path) -> PreTrainedModel:
    """The stock model in float64."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    return in_float64(model).eval()
