"""A teacher that is a checkpoint, whose shards wait on the host."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from fsdptrain import platform
from fsdptrain.config import Config
from fsdptrain.enabled_features import Features
from fsdptrain.errors import ConfigError, NumericsError
from fsdptrain.feature import Feature, Rows
from fsdptrain.features.distillation.divergence import Head, top_tokens
from fsdptrain.fsdp.build import load_model
from fsdptrain.fsdp.mesh import Meshes
from fsdptrain.fsdp.reference_load import named_in_errors
from fsdptrain.model.logit_passes import EXCLUDED
from fsdptrain.model.policy import evaluating, head_transform, policy_logprobs
from fsdptrain.model.probes.head import check_head
from fsdptrain.model.probes.layout import choose_layout
from fsdptrain.model.structure import lm_head, reshard
from fsdptrain.types import PackedBatch

LOGPROBS, TOP_IDS, TOP_LOGPROBS = "teacher_logprobs", "teacher_top_ids", "teacher_top_logprobs"


@dataclass
class TeacherOutputs(Feature):
    """Adds the most likely tokens at the loss positions to the outputs of a model, for --opd-loss jsd."""

    temperature: float
    chunk_size: int
    top_k: int
    vocab_size: int  # of the policy
    model: PreTrainedModel | None = None

    def transform_model(self, model: PreTrainedModel, meshes: Meshes) -> None:
        self.model = model

    def outputs(self, batch: PackedBatch, rows: Rows, output: Any) -> dict[str, Tensor]:
        hidden = rows.gather(output.last_hidden_state.flatten(0, 1), batch.loss_positions)
        assert self.model is not None
        head = head_of(self.model, self.temperature)
        ids, logprobs = top_tokens(hidden, head, self.top_k, vocab_size=self.vocab_size, chunk_size=self.chunk_size)
        return {TOP_IDS: ids, TOP_LOGPROBS: logprobs}


def head_of(model: PreTrainedModel, temperature: float) -> Head:
    """Return the head of `model`, as far as it is gathered."""
    head = dict(lm_head(model).named_parameters(recurse=False))
    transform = replace(head_transform(model.config), temperature=temperature)
    bias = head.get("bias")
    if bias is not None:  # as in `logprobs`: -inf excludes a token, and 0 * inf would be nan
        bias = bias.clamp(min=max(EXCLUDED, torch.finfo(bias.dtype).min / 2))
    return Head(head["weight"], bias, transform)


class ModelTeacher:
    """A checkpoint. Its shards stay on the host in the compute dtype; a pass gathers one layer at a time."""

    def __init__(self, config: Config, path: Path, meshes: Meshes, outputs: TeacherOutputs | None) -> None:
        """Load the teacher and choose its layout. Raises CheckpointError or NumericsError. Collective."""
        values: dict[str, Any] = {"fsdp_cpu_offload": True, "fsdp_reshard_after_forward": True}
        config = config.with_values(hf_checkpoint=str(path), freeze=[], lr_scale={}, **values)
        dtype: torch.dtype = getattr(torch, config.compute_dtype_name)
        features = Features([outputs] if outputs is not None else [])
        with named_in_errors("--opd-teacher"):
            self._model = load_model(config, path, meshes, features=features, stored_dtype=dtype)
            vocab_size = self._model.config.get_text_config().vocab_size
            try:
                self._probe = choose_layout(self._model, "auto", vocab_size=vocab_size, compute_dtype=dtype)
                layout = self._probe.layout
                check_head(self._model, vocab_size=vocab_size, layout=layout, compute_dtype=dtype)
            except NumericsError as error:  # raised on all ranks
                raise NumericsError(f"--opd-teacher {config.value('opd_teacher')}: {error}") from error
        reshard(self._model)
        self._temperature = config.scoring_temperature

    @property
    def line(self) -> str:
        count = sum(p.numel() for p in self._model.parameters())
        return f"teacher: {count:,} parameters on the host; {self._probe.line}"

    @torch.no_grad()
    def score(self, packs: Sequence[PackedBatch]) -> list[dict[str, Tensor]]:
        """Score packs on the CPU: logprobs of the labels, and more for --opd-loss jsd, of their M loss tokens [M, ...].

        Collective; every rank passes the same number of packs.
        """
        with evaluating(self._model):
            found = [self._score(pack.to(platform.local_device())) for pack in packs]
        reshard(self._model)
        return found

    def _score(self, pack: PackedBatch) -> dict[str, Tensor]:
        found = policy_logprobs(self._model, pack, layout=self._probe.layout, temperature=self._temperature)
        scores = {LOGPROBS: found.values[pack.loss_positions].float(), **found.extras}
        return {name: tensor.cpu() for name, tensor in scores.items()}


def require_same_tokenizer(policy: PreTrainedTokenizerBase, teacher: PreTrainedTokenizerBase, name: str) -> None:
    """Raise ConfigError if a token of the policy has another id, or none, in the vocabulary of the teacher `name`."""
    ours, theirs = policy.get_vocab(), teacher.get_vocab()
    different = [token for token, id_ in ours.items() if theirs.get(token) != id_]
    if different:
        token = min(different, key=ours.__getitem__)
        raise ConfigError(
            f"--opd-teacher {name} has another tokenizer than --hf-checkpoint: token {token!r} is {ours[token]} in one "
            f"and {theirs.get(token)} in the other ({len(different):,} differ); choose a teacher of the same family"
        )
