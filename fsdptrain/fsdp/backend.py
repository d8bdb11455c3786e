"""The training backend on PyTorch's FSDP2: any transformers model, one process per device."""

import gc
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from fsdptrain import platform
from fsdptrain.algo.losses import LOSSES
from fsdptrain.algo.metrics import finish_metrics
from fsdptrain.config import Config
from fsdptrain.errors import CheckpointError
from fsdptrain.feature import Features, load_features
from fsdptrain.fsdp.build import load_model
from fsdptrain.fsdp.checkpoint import (
    PendingWrite,
    has_reference,
    load_checkpoint,
    load_reference,
    save_checkpoint,
    save_reference,
)
from fsdptrain.fsdp.export import export_hf, stream_weights
from fsdptrain.fsdp.mesh import build_meshes
from fsdptrain.fsdp.metric_sums import MetricSums
from fsdptrain.fsdp.optimizer import Optimizer
from fsdptrain.fsdp.reference import ReferenceBank
from fsdptrain.fsdp.shards import HostStash, describe, fingerprint, local_shard
from fsdptrain.fsdp.staging import Staging
from fsdptrain.model.loading.files import stored_dtype
from fsdptrain.model.loading.meta import resolve_checkpoint
from fsdptrain.model.policy import check_backward, check_head, evaluating, policy_logprobs
from fsdptrain.model.probes.kernels import Kernel, kernels
from fsdptrain.model.probes.layout import LayoutProbe, choose_layout
from fsdptrain.model.structure import reshard
from fsdptrain.model.truncation import Truncation
from fsdptrain.protocols import Loss, ModelRole, Naming, RolloutEngine
from fsdptrain.types import LogProbs, LossConfig, Metrics, PackedBatch


class FSDPBackend:
    """The policy, its optimizer and its reference. Every method is collective.

    Dropout is off in scoring and in reinforcement learning, where the ratio of new to old logprobs must measure the
    policy and not the noise. `--algorithm sft` trains with the dropout of the model's config.

    Gradients are reduced after every pack: a rank holds the sum for its own shard and never a whole gradient.
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
            features: those of `config`, if they exist already.
            before_load: called with the model on meta, before anything is allocated.
        """
        self.device = platform.local_device()
        self._meshes = build_meshes(
            replicate_size=config.fsdp.replicate_size,
            tensor_size=config.parallel.tensor_parallel_size,
            expert_size=config.parallel.expert_parallel_size,
            context_size=config.parallel.context_parallel_size,
        )
        self.compute_dtype: torch.dtype = getattr(torch, config.compute_dtype_name)
        self.checkpoint_path = resolve_checkpoint(config.model.hf_checkpoint)
        self._config = config
        self._stash, self._optimizer_stash = HostStash(), HostStash()  # what `offload` has moved
        self._staging = Staging(config.launch.dist_timeout) if config.run.async_save else None
        self.features = load_features(config, self.checkpoint_path) if features is None else features
        other = self._load_other_reference()  # before the policy: two models are never on the device together
        self._model = load_model(
            config, self.checkpoint_path, self._meshes, features=self.features, before_load=before_load
        )
        self._reference = self._checked_reference(other)
        self._reference_moved = False  # it is no longer the one that this run began with
        self.layout_probe = self._verify_model()
        self._optimizer = Optimizer(self._model, config.optim, total_steps=total_steps, fp16=config.model.fp16)

    @property
    def model(self) -> PreTrainedModel:
        return self._model

    @property
    def hf_config(self) -> PreTrainedConfig:
        return self._model.config

    @property
    def lines(self) -> list[str]:
        """What was built, for the log."""
        return [self.layout_probe.line, *self.features.lines]

    def kernels(self) -> list[Kernel]:
        """What computes the parts of the model."""
        device_type, dtype = platform.device_type(), self.compute_dtype
        return kernels(self._model, device_type=device_type, compute_dtype=dtype, probe=self.layout_probe)

    def score(self, batches: Sequence[PackedBatch], model: ModelRole) -> list[LogProbs]:
        """Logprobs at the temperature of the rollout, without gradient, on the CPU, for each batch.

        All batches of `reference` are computed under one swap of weights; there is a reference if a KL term needs it.
        """
        assert not self._stash, "onload comes before score"
        with torch.no_grad(), evaluating(self._model), self._weights_of(model):
            found = [self._logprobs(batch.to(self.device), with_entropy=False) for batch in batches]
            return [LogProbs(x.values.cpu(), extras={name: y.cpu() for name, y in x.extras.items()}) for x in found]

    def train_step(self, batches: Sequence[PackedBatch], loss: Loss, config: LossConfig) -> Metrics:
        """One optimizer step over the packs of this rank; every rank passes the same number of packs.

        Without a loss token on any rank the weights stay, and only the learning-rate schedule advances. Otherwise it
        waits for the device once, whatever the number of packs; features may wait once more. Gradients that are not
        finite on any rank are dropped on every rank; then there is no optim/grad_norm. Raises NumericsError after more
        than --max-skipped-steps such steps.
        """
        assert not self._is_away, "onload comes before train_step"
        if not batches[0].num_loss_tokens:  # of the whole step: the same on every rank
            return self._optimizer.pass_over()
        self._model.train(self._config.algorithm.algorithm == "sft")
        self._optimizer.zero_grad()
        for feature in self.features:
            feature.before_step(self._model, batches, self._without_head)
        sums = MetricSums(copies=self._config.pack_copies, checked=self._config.algorithm.loss not in LOSSES)
        for batch in batches:
            moved = batch.to(self.device)
            logprobs = self._logprobs(moved, with_entropy=True)
            output = loss(moved, logprobs.for_loss(config), config)
            output = self.features.finish_loss(output, moved, logprobs)
            self._optimizer.scale(output.loss).backward()
            sums.add(output.metrics)
        norm = self._optimizer.clip().to(self.device)
        metrics, norm_value, finite = sums.reduce(norm)
        metrics = finish_metrics(metrics) | self.features.after_step(updated=finite)
        return metrics | self._optimizer.end_step(norm_value, finite=finite)

    def update_reference(self) -> None:
        """Make the present policy the reference. Checkpoints hold it from now on."""
        assert not self._stash, "onload comes before update_reference"
        self._bank.copy_from(self._model)
        self._reference_moved = True

    def hf_weights(self, naming: Naming = "hub") -> Iterator[tuple[str, Tensor]]:
        """Full tensors in the compute dtype, layer by layer, on the device; every rank gets each and takes each."""
        assert not self._stash, "onload comes before hf_weights"
        return stream_weights(self._model, dtype=self.compute_dtype, naming=naming, features=self.features)

    def push_weights(self, engine: RolloutEngine, policy_version: int) -> bool:
        """Send weights to `engine` in a feature's own way; False where there is none, and nothing was sent."""
        assert not self._stash, "onload comes before push_weights"
        return self.features.push_weights(engine, policy_version)

    def export(self, target: Path) -> None:
        """Write the policy as a Hugging Face folder, in the dtype of the checkpoint that it came from."""
        assert not self._stash, "onload comes before export"
        if not self.features.export(target, self._export_model):
            self._export_model(target)

    def _export_model(self, target: Path) -> None:
        stored = stored_dtype(self.checkpoint_path)
        dtype = getattr(torch, stored) if stored else self.compute_dtype
        export_hf(self._model, self.checkpoint_path, target, dtype=dtype, features=self.features)

    def offload(self, *, keep_weights: bool = False) -> None:
        """Move optimizer state and parameters to the host until `onload`. What is not on the device stays as it is.
        `keep_weights`: the optimizer state alone. On a CPU it is copied, which frees nothing.
        """
        self._optimizer.zero_grad()
        if not self._optimizer_stash:
            self._optimizer_stash.stash(self._on_device(self._optimizer.tensors().values()))
        if not keep_weights and not self._stash:
            reshard(self._model)
            self._stash.stash(self._on_device(self._model.parameters()))

    def onload(self) -> None:
        self._stash.restore()
        self._optimizer_stash.restore()

    @property
    def _is_away(self) -> bool:
        return bool(self._stash or self._optimizer_stash)

    def _on_device(self, tensors: Iterable[Tensor]) -> list[Tensor]:
        return [local_shard(tensor) for tensor in tensors if tensor.device.type == self.device.type]

    def save(self, directory: Path, step: int) -> PendingWrite | None:
        """Into a folder that exists: see `CheckpointFolder.write`. With --async-save, what is left to be written."""
        assert not self._is_away, "onload comes before save"
        kept, identity = self._staging, self.features.checkpoint_identity()
        rests = [save_checkpoint(directory, self._model, self._optimizer, step=step, adapter=identity, staging=kept)]
        if self._reference_moved:
            with self._bank.swapped_into(self._model):
                rests.append(save_reference(directory, self._model, staging=kept))
        return partial(_all, [rest for rest in rests if rest is not None]) if kept is not None else None

    def load(self, directory: Path) -> int:
        """Returns the step that was saved. Raises CheckpointError."""
        assert not self._is_away, "onload comes before load"
        step = load_checkpoint(directory, self._model, self._optimizer, adapter=self.features.checkpoint_identity())
        self._reference_moved = self._reference is not None and has_reference(directory)
        if self._reference_moved:
            with self._bank.swapped_into(self._model):
                load_reference(directory, self._model)
        return step

    @property
    def _bank(self) -> ReferenceBank:
        assert self._reference is not None, "there is no reference of its own weights"
        return self._reference

    @contextmanager
    def _weights_of(self, role: ModelRole) -> Iterator[None]:
        """Inside, the model computes what `role` does."""
        with ExitStack() as stack:
            stack.enter_context(self.features.around_scoring(role))
            if role == "reference" and self._reference is not None:
                stack.enter_context(self._reference.swapped_into(self._model))
            assert role == "policy" or self._reference or self.features.provides_reference, "no KL term, no reference"
            yield

    def _logprobs(self, batch: PackedBatch, *, with_entropy: bool) -> LogProbs:
        return policy_logprobs(
            self._model,
            batch,
            layout=self.layout_probe.layout,
            temperature=self._config.scoring_temperature,
            truncation=Truncation.of(self._config.rollout),
            with_entropy=with_entropy,
        )

    def _without_head(self, batch: PackedBatch) -> Mapping[str, Tensor]:
        """What features report of a forward pass without gradient; the head is left out."""
        with torch.no_grad(), evaluating(self._model):
            return self._model(batch.to(self.device), layout=self.layout_probe.layout, with_head=False)

    def _verify_model(self) -> LayoutProbe:
        """The layout that the model computes exactly. NumericsError: there is none, or its head is not understood."""
        vocab_size = self.hf_config.get_text_config().vocab_size
        probe = choose_layout(
            self._model,
            self._config.model.layout,
            vocab_size=vocab_size,
            compute_dtype=self.compute_dtype,
            features=self.features,
        )
        for feature in self.features:
            feature.after_probe(self._model, probe, vocab_size)
        check_head(self._model, vocab_size=vocab_size, layout=probe.layout, compute_dtype=self.compute_dtype)
        check_backward(self._model, vocab_size=vocab_size, layout=probe.layout, look=self._check_gradients)
        return probe

    def _check_gradients(self) -> None:
        for feature in self.features:
            feature.check_gradients(self._model)

    def _load_other_reference(self) -> ReferenceBank | None:
        """The weights of --ref-load, if given; its sharded model is gone again when this returns."""
        config = self._config
        if not config.needs_reference or config.ref.load is None:
            return None
        stored = self.features.build_options().stored_dtype
        features = Features([feature for feature in self.features if feature.cuts_parameters])
        try:
            path = resolve_checkpoint(config.ref.load)
            bank = ReferenceBank(load_model(config, path, self._meshes, features=features, stored_dtype=stored))
        except CheckpointError as error:  # raised on all ranks
            raise CheckpointError(str(error).replace("--hf-checkpoint", "--ref-load")) from error
        gc.collect()  # modules and FSDP's hooks refer to each other
        return bank

    def _checked_reference(self, other: ReferenceBank | None) -> ReferenceBank | None:
        if not self._config.needs_reference:
            return None
        with self.features.without():
            own = fingerprint(self._model)
        if other is not None and other.fingerprint != own:
            raise CheckpointError(
                f"--ref-load {self._config.ref.load} is {describe(other.fingerprint)}, but --hf-checkpoint is "
                f"{describe(own)}: the reference must have the same shapes"
            )
        if other is None and not self.features.provides_reference:
            return ReferenceBank(self._model)
        return other


def _all(actions: Sequence[Callable[[], None]]) -> None:
    for act in actions:
        act()
