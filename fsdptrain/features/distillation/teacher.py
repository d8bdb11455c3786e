"""Teachers that are models here: a checkpoint whose shards wait on the host, and the policy itself."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel

from fsdptrain import platform
from fsdptrain.config import Config
from fsdptrain.feature import ComputeLogprobs, Feature, Features
from fsdptrain.features.distillation.divergence import Head, top_tokens
from fsdptrain.fsdp.build import load_model
from fsdptrain.fsdp.mesh import Meshes
from fsdptrain.fsdp.stream import full_tensor
from fsdptrain.model.loading.files import named_in_errors
from fsdptrain.model.policy import evaluating, head_transform, policy_logprobs
from fsdptrain.model.probes.layout import choose_layout
from fsdptrain.model.rows import Rows
from fsdptrain.model.structure import lm_head, reshard
from fsdptrain.types import PackedBatch

HIDDEN, TOP_IDS, TOP_LOGPROBS = "teacher_hidden", "teacher_top_ids", "teacher_top_logprobs"


@dataclass(frozen=True)
class Verdict:
    """What a teacher says about the M loss tokens of a pack, on the CPU."""

    logprobs: Tensor  # [M] f32, of the labels
    extras: dict[str, Tensor]  # [M, ...] by name, of `TeacherOutputs`


class Teacher(Protocol):
    @property
    def line(self) -> str:
        """A line of the log."""
        ...

    def judge(self, packs: Sequence[PackedBatch]) -> list[Verdict]:
        """Judge packs on the CPU. Collective; every rank passes the same number of packs."""
        ...

    def head(self) -> Head | None:
        """Return the head of the teacher on the device, if `Verdict.extras` has hidden states. Collective."""
        ...


@dataclass
class TeacherOutputs(Feature):
    """Adds to the outputs of a model what --opd-loss jsd needs of a teacher, at the loss positions.

    top_k: return the most likely tokens. None: return hidden states.
    """

    temperature: float
    chunk_size: int
    top_k: int | None
    model: PreTrainedModel | None = None

    def transform_model(self, model: PreTrainedModel, meshes: Meshes) -> None:
        del meshes
        self.model = model

    def outputs(self, batch: PackedBatch, rows: Rows, output: Any) -> dict[str, Tensor]:
        hidden = rows.gather(output.last_hidden_state.flatten(0, 1), batch.loss_positions)
        if self.top_k is None:
            return {HIDDEN: hidden}
        assert self.model is not None
        head = head_of(self.model, self.temperature)
        ids, logprobs = top_tokens(hidden, head, self.top_k, chunk_size=self.chunk_size)
        return {TOP_IDS: ids, TOP_LOGPROBS: logprobs}


def head_of(model: PreTrainedModel, temperature: float) -> Head:
    """Return the head of `model`, as far as it is gathered."""
    head = dict(lm_head(model).named_parameters(recurse=False))
    transform = replace(head_transform(model.config), temperature=temperature)
    return Head(head["weight"], head.get("bias"), transform)


class ModelTeacher:
    """A checkpoint. Its shards stay on the host in the compute dtype; a pass gathers one layer at a time."""

    def __init__(self, config: Config, path: Path, meshes: Meshes, outputs: TeacherOutputs | None) -> None:
        """Load the teacher and choose its layout. Raises CheckpointError or NumericsError. Collective."""
        values: dict[str, Any] = {"fsdp_cpu_offload": True, "fsdp_reshard_after_forward": True}
        config = config.with_values(hf_checkpoint=str(path), **values)
        dtype: torch.dtype = getattr(torch, config.compute_dtype_name)
        features = Features([outputs] if outputs is not None else [])
        with named_in_errors("--opd-teacher"):
            self._model = load_model(config, path, meshes, features=features, stored_dtype=dtype)
            vocab_size = self._model.config.get_text_config().vocab_size
            self._probe = choose_layout(self._model, "auto", vocab_size=vocab_size, compute_dtype=dtype)
        reshard(self._model)
        self._temperature = config.scoring_temperature
        self._has_outputs = outputs is not None

    @property
    def line(self) -> str:
        count = sum(p.numel() for p in self._model.parameters())
        return f"teacher: {count:,} parameters on the host; {self._probe.line}"

    @torch.no_grad()
    def judge(self, packs: Sequence[PackedBatch]) -> list[Verdict]:
        with evaluating(self._model):
            found = [self._judge(pack.to(platform.local_device())) for pack in packs]
        reshard(self._model)
        return found

    def _judge(self, pack: PackedBatch) -> Verdict:
        found = policy_logprobs(self._model, pack, layout=self._probe.layout, temperature=self._temperature)
        values = found.values[pack.loss_positions].float().cpu()
        return Verdict(values, {name: tensor.cpu() for name, tensor in found.extras.items()})

    def head(self) -> Head | None:
        if not self._has_outputs:
            return None
        head = head_of(self._model, self._temperature)
        bias = None if head.bias is None else full_tensor(head.bias, head.bias.dtype)
        return replace(head, weight=full_tensor(head.weight, head.weight.dtype), bias=bias)


def judge_by_policy(packs: Sequence[PackedBatch], compute_logprobs: ComputeLogprobs) -> list[Verdict]:
    """Judge packs by the policy as it is before the first update of the rollout. Collective."""
    return [
        Verdict(
            found.values[pack.loss_positions].float(),
            {name: found.extras[name] for name in (TOP_IDS, TOP_LOGPROBS) if name in found.extras},
        )
        for pack, found in zip(packs, compute_logprobs(packs, "policy"), strict=True)
    ]
