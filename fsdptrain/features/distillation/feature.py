"""The distillation feature: a teacher's term in the advantages of tokens, or in the loss."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from fsdptrain import platform
from fsdptrain.config import Config
from fsdptrain.distributed import raise_on_all_ranks
from fsdptrain.errors import ConfigError
from fsdptrain.feature import ComputeLogprobs, Feature, ForwardPass
from fsdptrain.features.distillation.config import CHUNK, SELF, DistillationConfig
from fsdptrain.features.distillation.data_share import FROM_DATA, DataShare
from fsdptrain.features.distillation.divergence import Head, Target, TopTokens, WholeVocabulary, chunked_divergence
from fsdptrain.features.distillation.prompts import (
    IDS,
    LENGTHS,
    pack_with_prompts,
    score_with_prompts,
    teacher_prompt,
    with_prompts,
)
from fsdptrain.features.distillation.teacher import (
    HIDDEN,
    TOP_IDS,
    TOP_LOGPROBS,
    ModelTeacher,
    Teacher,
    TeacherOutputs,
    TeacherScores,
    head_of,
    score_by_policy,
)
from fsdptrain.features.distillation.tokenizers import require_same_tokenizer
from fsdptrain.fsdp.mesh import Meshes
from fsdptrain.model.loading.files import named_in_errors, resolve_checkpoint
from fsdptrain.model.loading.meta import model_config
from fsdptrain.model.rows import Rows, zeros_with
from fsdptrain.trainer.samples.single_turn import Sampler
from fsdptrain.trainer.tokenizer import load_tokenizer
from fsdptrain.types import LogProbs, LossOutput, Metrics, PackedBatch, Prompt, Sample

if TYPE_CHECKING:
    from fsdptrain.data.packing.pack import PackPlan

LOGPROBS = "teacher_logprobs"
DIVERGENCE = "teacher_divergence"


class DistillationFeature(Feature):
    def __init__(self, config: Config, tokenizer: PreTrainedTokenizerBase, *, vocab_size: int) -> None:
        """vocab_size: of the policy's head."""
        self._config = config
        self._options = config.section(DistillationConfig)
        self._tokenizer = tokenizer
        self._meshes: Meshes | None = None
        self._model: PreTrainedModel | None = None
        self._teacher: Teacher | None = None  # None: the policy itself
        self._path: Path | None = None  # of a teacher that is loaded here
        self._head: Head | None = None  # of the teacher, during a step
        self._reports = False  # the policy's outputs are those of a teacher
        jsd, scale = self._options.loss == "jsd", config.scoring_temperature
        self._chunk = min(CHUNK, config.model.logprob_chunk_size)
        self._outputs = TeacherOutputs(scale, self._chunk, self._options.top_k, vocab_size) if jsd else None

    @classmethod
    def create(cls, config: Config, checkpoint: Path) -> "DistillationFeature":
        """Compare the tokenizers, and reach the teacher's server. Raises ConfigError on all ranks."""
        trust, options = config.model.trust_remote_code, config.section(DistillationConfig)
        shape = model_config(checkpoint, trust_remote_code=trust).get_text_config()
        with raise_on_all_ranks(ConfigError, "--hf-checkpoint"):
            tokenizer = load_tokenizer(checkpoint, trust_remote_code=trust)
        feature = cls(config, tokenizer, vocab_size=shape.vocab_size)
        if options.is_server:
            from fsdptrain.features.distillation.server import ServerTeacher

            with raise_on_all_ranks(ConfigError, "--opd-teacher"):
                feature._teacher = ServerTeacher.connect(config, tokenizer, vocab_size=shape.vocab_size)
        elif options.teacher != SELF:
            assert options.teacher is not None
            with named_in_errors("--opd-teacher"):
                feature._path = resolve_checkpoint(options.teacher)
                with raise_on_all_ranks(ConfigError, "--opd-teacher"):
                    theirs = load_tokenizer(feature._path, trust_remote_code=trust)
                    require_same_tokenizer(tokenizer, theirs, options.teacher)
        return feature

    @property
    def lines(self) -> list[str]:
        return [self._teacher.line] if self._teacher is not None else ["teacher: the policy with another prompt"]

    def transform_model(self, model: PreTrainedModel, meshes: Meshes) -> None:
        self._model, self._meshes = model, meshes
        if self._outputs is not None:
            self._outputs.model = model

    def after_load(self, model: PreTrainedModel) -> None:
        if self._path is not None:
            assert self._meshes is not None
            outputs = None if self._outputs is None else replace(self._outputs, model=None)
            self._teacher = ModelTeacher(self._config, self._path, self._meshes, outputs)

    # Data

    def wrap_sampler(self, sampler: Sampler) -> Sampler:
        share = self._options.on_policy_fraction
        return sampler if share == 1.0 else DataShare.of(self._config, sampler, share, self._tokenizer)

    def finish_samples(self, samples: list[Sample], prompts: Mapping[str, Prompt]) -> list[Sample]:
        template = self._options.teacher_prompt
        if template is None:
            return samples
        ids = {
            name: teacher_prompt(template, prompts[name], self._tokenizer, self._config.data)
            for name in {sample.group_id for sample in samples}
        }
        drops = self._config.batch.overlong_samples == "drop"
        return with_prompts(samples, prompts, ids, max_tokens=self._config.max_tokens_per_pack, drops=drops)

    def finish_pack(self, batch: PackedBatch, samples: Sequence[Sample], plan: "PackPlan") -> PackedBatch:
        if self._options.on_policy_fraction < 1.0:
            given = torch.tensor([FROM_DATA in sample.extras for sample in samples])
            of_tokens = given.repeat_interleave(torch.tensor(batch.seqlens))
            batch = replace(batch, extras={**batch.extras, FROM_DATA: of_tokens})
        return batch if self._options.teacher_prompt is None else pack_with_prompts(batch, samples)

    def score_packs(self, packs: Sequence[PackedBatch], compute_logprobs: ComputeLogprobs) -> list[PackedBatch]:
        def score(packs: Sequence[PackedBatch]) -> list[TeacherScores]:
            if self._teacher is not None:
                return self._teacher.score(packs)
            with self._reporting():
                return score_by_policy(packs, compute_logprobs)

        if self._options.teacher_prompt is None:
            of_packs = score(packs)
        else:
            of_packs = score_with_prompts(packs, score, max_tokens=self._config.max_tokens_per_pack)
        found = []
        for pack, scores in zip(packs, of_packs, strict=True):
            kept = {name: tensor for name, tensor in pack.extras.items() if name not in (IDS, LENGTHS)}
            logprobs = zeros_with(scores.logprobs, pack.loss_positions, pack.num_tokens)
            extras = {LOGPROBS: logprobs, **scores.extras}
            if platform.has_accelerator():
                extras = {name: tensor.pin_memory() for name, tensor in extras.items()}
            found.append(replace(pack, extras={**kept, **extras}))
        return found

    @contextmanager
    def _reporting(self) -> Iterator[None]:
        self._reports = self._outputs is not None
        try:
            yield
        finally:
            self._reports = False

    # The optimizer step

    def before_step(self, model: PreTrainedModel, batches: Sequence[PackedBatch], forward: ForwardPass) -> None:
        if self._outputs is not None and self._outputs.top_k is None and self._teacher is not None:
            self._head = self._teacher.head()

    def outputs(self, batch: PackedBatch, rows: Rows, output: Any) -> dict[str, Tensor]:
        if self._reports and self._outputs is not None:
            return self._outputs.outputs(batch, rows, output)
        target = self._target(batch) if torch.is_grad_enabled() else None
        if target is None:
            return {}
        assert self._model is not None
        hidden = rows.gather(output.last_hidden_state.flatten(0, 1), batch.loss_positions)
        head = head_of(self._model, self._config.scoring_temperature)
        values = chunked_divergence(hidden, head, target, chunk_size=self._chunk)
        return {DIVERGENCE: rows.to_pack(values, batch.loss_positions)}

    def _target(self, batch: PackedBatch) -> Target | None:
        extras, beta = batch.extras, self._options.beta
        if TOP_IDS in extras:
            return TopTokens(extras[TOP_IDS], extras[TOP_LOGPROBS], beta)
        if HIDDEN in extras and self._head is not None:
            return WholeVocabulary(extras[HIDDEN], self._head, beta)
        return None

    def before_loss(self, batch: PackedBatch, logprobs: LogProbs) -> PackedBatch:
        """Add the teacher's term to the advantages: the per-token reward of the negative reverse KL divergence.

        Tokens of the data were sampled by no engine: they get the logprobs of the policy, which is no mismatch.
        """
        if self._options.loss != "token":
            given = batch.extras.get(FROM_DATA)
            if given is None:
                return batch
            old = logprobs.values.detach() if batch.old_logprobs is None else batch.old_logprobs
            return replace(batch, rollout_logprobs=torch.where(given, old, batch.rollout_logprobs))
        term = -self._options.kl_coef * self._log_ratio(batch, logprobs)
        return replace(batch, advantages=batch.advantages + term)

    def finish_loss(self, output: LossOutput, batch: PackedBatch, logprobs: LogProbs) -> LossOutput:
        share = batch.loss_mask / max(1, batch.num_trained_tokens)
        metrics = {**output.metrics, "distill/reverse_kl": (share * self._log_ratio(batch, logprobs)).sum()}
        if self._options.loss == "token":
            return LossOutput(output.loss, metrics)
        values = logprobs.extras[DIVERGENCE]
        term = self._options.kl_coef * (batch.loss_weights * values).sum()
        metrics |= {"distill/divergence": (share * values).sum().detach(), "loss/distill": term.detach()}
        if "loss/total" in metrics:  # a custom loss may not report it
            metrics["loss/total"] = metrics["loss/total"] + term.detach()
        return LossOutput(output.loss + term, metrics)

    def after_step(self, *, updated: bool) -> Metrics:
        self._head = None
        return {}

    def _log_ratio(self, batch: PackedBatch, logprobs: LogProbs) -> Tensor:
        """Return lo - lt at the loss tokens, an estimate of the reverse KL(policy || teacher). [T] [nats]"""
        old = logprobs.values.detach() if batch.old_logprobs is None else batch.old_logprobs
        return torch.where(batch.loss_mask, old - batch.extras[LOGPROBS], 0.0)
