"""The training backend on PyTorch FSDP2: any transformers model, one process per device."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from fsdptrain import platform
from fsdptrain.algo.losses import LOSSES, checked
from fsdptrain.algo.metrics import finish_metrics
from fsdptrain.config import Config
from fsdptrain.config.rules import Fact
from fsdptrain.distributed import raise_on_all_ranks
from fsdptrain.enabled_features import Features, load_features
from fsdptrain.errors import ConfigError
from fsdptrain.fsdp.build import load_model
from fsdptrain.fsdp.mesh import build_meshes
from fsdptrain.fsdp.metric_sums import MetricSums
from fsdptrain.fsdp.optimizer import Optimizer
from fsdptrain.fsdp.optimizers import find_optimizer
from fsdptrain.fsdp.reference import ReferenceBank, reference_line
from fsdptrain.fsdp.stream import stream_weights
from fsdptrain.model.loading.meta import resolve_checkpoint
from fsdptrain.model.policy import evaluating, policy_logprobs
from fsdptrain.model.probes.head import check_backward, check_head
from fsdptrain.model.probes.layout import LayoutProbe, choose_layout
from fsdptrain.types import LogProbs, LossConfig, Metrics, PackedBatch, Truncation

if TYPE_CHECKING:
    from fsdptrain.fsdp.stash import HostStash
    from fsdptrain.model.probes.kernels import Kernel
    from fsdptrain.protocols import ForwardRole, Loss, ModelRole, Naming


class FSDPBackend:
    """The policy, its optimizer and its reference. Every method is collective.

    Dropout is off for scoring and for reinforcement learning, so that the ratio of new to old logprobs measures the
    policy and not dropout noise. `--algorithm sft` trains with the dropout of the model's config.

    Gradients are reduced after every pack. A rank holds the sum for its own shard and never a whole gradient.
    """

    def __init__(
        self,
        config: Config,
        *,
        total_steps: int,
        features: Features | None = None,
        before_load: Callable[[PreTrainedModel], None] | None = None,
    ) -> None:
        """Load, shard and verify the model of `config`. Raises ConfigError, CheckpointError or NumericsError.

        Args:
            total_steps: optimizer steps of the run, for the learning-rate schedule.
            features: features of `config`, if already loaded.
            before_load: called with the model on meta, before anything is allocated.
        """
        self.device = platform.local_device()
        self._meshes = build_meshes(
            replicate_size=config.fsdp.replicate_size,
            tensor_size=config.ranks_along("tensor"),
            expert_size=config.ranks_along("experts"),
            context_size=config.ranks_along("context"),
        )
        self.compute_dtype: torch.dtype = getattr(torch, config.compute_dtype_name)
        self.checkpoint_path = resolve_checkpoint(config.model.hf_checkpoint)
        self._config = config
        self._away: dict[str, HostStash] = {}  # what `offload` has moved: weights, optimizer
        self._stager = None
        if config.run.async_save:
            from fsdptrain.fsdp.shard_files import HostStager

            self._stager = HostStager(config.launch.dist_timeout)
        with raise_on_all_ranks(ConfigError, "--optimizer"):
            build = find_optimizer(config.optim)
        self.features = load_features(config, self.checkpoint_path) if features is None else features
        given = None
        if config.needs_reference and config.ref.load is not None:
            from fsdptrain.fsdp.reference_load import load_bank

            given = load_bank(config, self.features, self._meshes)  # before the policy: one model is on the device
        self._model = load_model(
            config, self.checkpoint_path, self._meshes, features=self.features, before_load=before_load
        )
        self._reference: ReferenceBank | None = None
        self.lines: list[str] = []
        if config.needs_reference:
            if given is not None:
                from fsdptrain.fsdp.reference_load import require_shapes

                self._reference, found = given
                require_shapes(self._model, config, self.features, found)
            elif config.stores_reference:
                self._reference = ReferenceBank(self._model, only_trained=config.has(Fact.FROZEN_WEIGHTS))
            self.lines.append(reference_line(self._reference))
        self.layout_probe = self._verify_model()
        self.lines.append(self.layout_probe.line)
        fp16, fix = config.model.fp16, config.precision_fix
        with raise_on_all_ranks(ConfigError, "--optimizer"):
            self._optimizer = Optimizer(
                self._model, config.optim, total_steps=total_steps, fp16=fp16, build=build, fix=fix
            )

    @property
    def model(self) -> PreTrainedModel:
        return self._model

    @property
    def hf_config(self) -> PreTrainedConfig:
        return self._model.config

    def kernels(self) -> "list[Kernel]":
        from fsdptrain.model.probes.kernels import kernels

        device_type, dtype = platform.device_type(), self.compute_dtype
        return kernels(self._model, device_type=device_type, compute_dtype=dtype, probe=self.layout_probe)

    def compute_logprobs(self, batches: Sequence[PackedBatch], model: "ModelRole") -> list[LogProbs]:
        """Compute the logprobs of each batch at the rollout temperature, without gradient, on the CPU.

        For `reference` the weights are swapped once for all batches. A reference exists only if a KL term needs it.
        """
        assert "weights" not in self._away, "onload comes before score"
        with torch.no_grad(), evaluating(self._model), self._weights_of(model):
            found = [self._logprobs(batch.to(self.device), role=model) for batch in batches]
            return [LogProbs(x.values.cpu(), extras={name: y.cpu() for name, y in x.extras.items()}) for x in found]

    def train_step(self, batches: Sequence[PackedBatch], loss: "Loss", config: LossConfig) -> Metrics:
        """Run one optimizer step over the packs of this rank. Every rank passes the same number of packs.

        If no rank has a loss token, the weights stay and only the learning-rate schedule advances. Otherwise the step
        waits for the device once, for any number of packs; features may wait once more. If any rank has gradients that
        are not finite, every rank drops them and optim/grad_norm is not reported. Raises NumericsError after
        MAX_SKIPPED such steps in a row.
        """
        assert not self._away, "onload comes before train_step"
        if not batches[0].num_loss_tokens:  # of the whole step, so the same on every rank
            return self._optimizer.advance_without_update()
        self._model.train(self._config.algorithm.algorithm == "sft")
        self._optimizer.zero_grad()
        of_features = self.features.merged(lambda feature: feature.before_step(self._model, batches))
        loss = self.features.chained(lambda feature, stock: feature.loss_function(stock), loss)
        sums = MetricSums(copies=self._config.pack_copies, checked=self._config.algorithm.loss not in LOSSES)
        for batch in batches:
            moved = batch.to(self.device)
            output = checked(loss(moved, self._logprobs(moved, with_entropy=True).for_loss(config), config))
            self._optimizer.scale(output.loss).backward()
            sums.add(output.metrics)
        norm = self._optimizer.clip().to(self.device)
        metrics, norm_value, finite = sums.reduce(norm)
        metrics = finish_metrics(metrics, num_tokens=batches[0].num_trained_tokens) | of_features
        return metrics | self._optimizer.end_step(norm_value, finite=finite, kl=metrics.get("loss/kl", 0.0))

    def hf_weights(self, naming: "Naming" = "hub") -> Iterator[tuple[str, Tensor]]:
        assert "weights" not in self._away, "onload comes before hf_weights"
        return stream_weights(self._model, dtype=self.compute_dtype, naming=naming, features=self.features)

    def export(self, target: Path) -> None:
        """Write the policy as a Hugging Face folder, in the dtype of --export-dtype."""
        from fsdptrain.fsdp.export import export_policy

        assert "weights" not in self._away, "onload comes before export"
        stream = partial(stream_weights, self._model, naming="hub", features=self.features)
        options = {"config": self._config, "source": self.checkpoint_path, "model": self._model, "stream": stream}
        if self.features.adapter is None:
            export_policy(target, **options)
        else:
            self.features.adapter.export(target, partial(export_policy, **options))

    def offload(self, *, keep_weights: bool = False) -> None:
        """Tensors that are not on the device stay. On a CPU the tensors are copied, which frees no memory."""
        from fsdptrain.fsdp.stash import stash_trainer

        stash_trainer(self._model, self._optimizer, self._away, keep_weights=keep_weights)

    def onload(self) -> None:
        while self._away:
            self._away.popitem()[1].restore()

    def save(self, directory: Path, step: int) -> Future[Any] | None:
        """Save into an existing folder (see `CheckpointFolder.write`). With --async-save, shards follow in a thread."""
        from fsdptrain.fsdp.checkpoint import save_checkpoint

        assert not self._away, "onload comes before save"
        return save_checkpoint(
            directory, self._model, self._optimizer, step=step, adapter=self._adapter_identity, stager=self._stager
        )

    def load(self, directory: Path) -> int:
        from fsdptrain.fsdp.checkpoint import load_checkpoint

        assert not self._away, "onload comes before load"
        return load_checkpoint(directory, self._model, self._optimizer, adapter=self._adapter_identity)

    @property
    def _adapter_identity(self) -> str | None:
        return None if self.features.adapter is None else self.features.adapter.identity()

    def _weights_of(self, role: "ModelRole") -> AbstractContextManager[None]:
        """Run the model as `role` within the context."""
        assert role == "policy" or self._config.needs_reference, "no KL term, no reference"
        if role == "policy" or self._reference is None:  # the reference: the policy without its adapter
            return nullcontext()
        return self._reference.swapped_into(self._model, self.features)

    def _logprobs(self, batch: PackedBatch, *, role: "ForwardRole" = "train", with_entropy: bool = False) -> LogProbs:
        return policy_logprobs(
            self._model,
            batch,
            layout=self.layout_probe.layout,
            temperature=self._config.scoring_temperature,
            truncation=Truncation.of(self._config.rollout),
            role=role,
            with_entropy=with_entropy,
        )

    def _verify_model(self) -> LayoutProbe:
        """Return the layout that the model computes exactly, after checking its head and its backward pass.

        Raises NumericsError if there is no exact layout, or the head is not understood, or the backward pass fails.
        """
        vocab_size = self.hf_config.get_text_config().vocab_size
        probe = choose_layout(
            self._model,
            self._config.model.layout,
            vocab_size=vocab_size,
            compute_dtype=self.compute_dtype,
            features=self.features,
        )
        for feature in self.features:
            feature.verify(self._model, probe, vocab_size)
        check_head(self._model, vocab_size=vocab_size, layout=probe.layout, compute_dtype=self.compute_dtype)
        check_backward(self._model, vocab_size=vocab_size, layout=probe.layout)
        return probe
