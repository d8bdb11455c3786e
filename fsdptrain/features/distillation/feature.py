"""The distillation feature: a teacher's term in the advantages of tokens, or in the loss."""

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from fsdptrain import platform
from fsdptrain.config import Config
from fsdptrain.distributed import raise_on_all_ranks
from fsdptrain.errors import ConfigError
from fsdptrain.feature import Feature, Rows
from fsdptrain.features.distillation.divergence import TopTokens, chunked_divergence
from fsdptrain.features.distillation.teacher import (
    LOGPROBS,
    TOP_IDS,
    TOP_LOGPROBS,
    ModelTeacher,
    TeacherOutputs,
    head_of,
    require_same_tokenizer,
)
from fsdptrain.features.sections import DistillationConfig
from fsdptrain.fsdp.mesh import Meshes
from fsdptrain.fsdp.reference_load import named_in_errors
from fsdptrain.model.loading.files import resolve_checkpoint
from fsdptrain.model.loading.meta import model_config
from fsdptrain.model.rows import zeros_with
from fsdptrain.protocols import Loss
from fsdptrain.trainer.tokenizer import load_tokenizer
from fsdptrain.types import LogProbs, LossConfig, LossOutput, PackedBatch

if TYPE_CHECKING:
    from fsdptrain.features.distillation.server import ServerTeacher

log = logging.getLogger(__name__)

CHUNK = 512  # most tokens whose logits the divergence holds at a time
DIVERGENCE = "teacher_divergence"


class DistillationFeature(Feature):
    def __init__(self, config: Config, teacher: "ServerTeacher | Path", *, vocab_size: int) -> None:
        """teacher: a checkpoint is loaded after the policy. vocab_size: of the policy's head."""
        self._config, self._options = config, config.section(DistillationConfig)
        self._teacher: ServerTeacher | ModelTeacher | Path = teacher
        self._vocab_size = vocab_size
        self._is_jsd = self._options.loss == "jsd"
        self._chunk = min(CHUNK, config.model.logprob_chunk_size)
        self._meshes: Meshes | None = None
        self._model: PreTrainedModel | None = None

    @classmethod
    def create(cls, config: Config, checkpoint: Path) -> "DistillationFeature":
        """Compare the tokenizers, and reach the teacher's server. Raises ConfigError on all ranks."""
        trust, options = config.model.trust_remote_code, config.section(DistillationConfig)
        vocab_size = model_config(checkpoint, trust_remote_code=trust).get_text_config().vocab_size
        with raise_on_all_ranks(ConfigError, "--hf-checkpoint"):
            tokenizer = load_tokenizer(checkpoint, trust_remote_code=trust)
        if options.is_server:
            from fsdptrain.features.distillation.server import ServerTeacher

            with raise_on_all_ranks(ConfigError, "--opd-teacher"):
                return cls(config, ServerTeacher(config, tokenizer, vocab_size=vocab_size), vocab_size=vocab_size)
        assert options.teacher is not None
        with named_in_errors("--opd-teacher"):
            path = resolve_checkpoint(options.teacher)
            with raise_on_all_ranks(ConfigError, "--opd-teacher"):
                require_same_tokenizer(tokenizer, load_tokenizer(path, trust_remote_code=trust), options.teacher)
        return cls(config, path, vocab_size=vocab_size)

    def transform_model(self, model: PreTrainedModel, meshes: Meshes) -> None:
        self._model, self._meshes = model, meshes

    def after_load(self, model: PreTrainedModel) -> None:
        if isinstance(self._teacher, Path):
            assert self._meshes is not None
            scale, top_k = self._config.scoring_temperature, self._options.top_k
            outputs = TeacherOutputs(scale, self._chunk, top_k, self._vocab_size) if self._is_jsd else None
            self._teacher = ModelTeacher(self._config, self._teacher, self._meshes, outputs)
        log.info("%s", self._teacher.line)

    def score_packs(self, packs: Sequence[PackedBatch]) -> list[PackedBatch]:
        assert not isinstance(self._teacher, Path), "the teacher is loaded after the policy"
        scored = []
        for pack, scores in zip(packs, self._teacher.score(packs), strict=True):
            extras = scores | {LOGPROBS: zeros_with(scores[LOGPROBS], pack.loss_positions, pack.num_tokens)}
            if platform.has_accelerator():
                extras = {name: tensor.pin_memory() for name, tensor in extras.items()}
            scored.append(replace(pack, extras={**pack.extras, **extras}))
        return scored

    def outputs(self, batch: PackedBatch, rows: Rows, output: Any) -> dict[str, Tensor]:
        if not torch.is_grad_enabled() or TOP_IDS not in batch.extras:
            return {}
        assert self._model is not None
        target = TopTokens(batch.extras[TOP_IDS], batch.extras[TOP_LOGPROBS], self._options.beta)
        hidden = rows.gather(output.last_hidden_state.flatten(0, 1), batch.loss_positions)
        head = head_of(self._model, self._config.scoring_temperature)
        values = chunked_divergence(hidden, head, target, chunk_size=self._chunk)
        return {DIVERGENCE: rows.to_pack(values, batch.loss_positions)}

    def loss_function(self, stock: Loss) -> Loss:
        """Add the teacher's term to the advantages or, for jsd, the divergence to the loss."""
        coef = self._options.kl_coef

        def distilling(batch: PackedBatch, logprobs: LogProbs, config: LossConfig) -> LossOutput:
            ratio = _log_ratio(batch, logprobs)
            share = batch.loss_mask / max(1, batch.num_trained_tokens)
            metrics = {"distill/reverse_kl": (share * ratio).sum()}
            if not self._is_jsd:  # the per-token reward of the negative reverse KL divergence
                output = stock(replace(batch, advantages=batch.advantages - coef * ratio), logprobs, config)
                return LossOutput(output.loss, {**output.metrics, **metrics})
            output = stock(batch, logprobs, config)
            values = logprobs.extras[DIVERGENCE]
            term = coef * (batch.loss_weights * values).sum()
            metrics |= {"distill/divergence": (share * values).sum().detach(), "loss/distill": term.detach()}
            if "loss/total" in output.metrics:  # a custom loss may not report it
                metrics["loss/total"] = output.metrics["loss/total"] + term.detach()
            return LossOutput(output.loss + term, {**output.metrics, **metrics})

        return distilling


def _log_ratio(batch: PackedBatch, logprobs: LogProbs) -> Tensor:
    """Return lo - lt at the loss tokens, an estimate of the reverse KL(policy || teacher). [T] [nats]"""
    old = logprobs.values.detach() if batch.old_logprobs is None else batch.old_logprobs
    return torch.where(batch.loss_mask, old - batch.extras[LOGPROBS], 0.0)
