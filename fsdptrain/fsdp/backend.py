"""The training backend on PyTorch's own FSDP2: any transformers model, one process for each device."""

import gc
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from fsdptrain import platform
from fsdptrain.algo.losses import LOSSES
from fsdptrain.algo.metrics import finish_metrics
from fsdptrain.config import Config
from fsdptrain.config.prefix_checks import configured_obstacle
from fsdptrain.distributed import raise_on_all_ranks
from fsdptrain.errors import CheckpointError, ConfigError
from fsdptrain.features.lora.export import export_adapter, stream_adapter
from fsdptrain.features.model_parallel.gradient_check import require_whole_gradients
from fsdptrain.features.moe.controller import MoEController
from fsdptrain.features.prefix_sharing.probe import PrefixProbe, probe_prefixes, require_prefixes
from fsdptrain.features.vision.processor import ImageProcessor, open_processor
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
from fsdptrain.fsdp.shards import HostStash, content_digest, describe, fingerprint, local_shard
from fsdptrain.fsdp.staging import Staging
from fsdptrain.model.loading.files import stored_dtype
from fsdptrain.model.loading.meta import resolve_checkpoint
from fsdptrain.model.policy import (
    RouterFunction,
    check_backward,
    check_head,
    evaluating,
    policy_logprobs,
)
from fsdptrain.model.probes.kernels import Kernel, kernels
from fsdptrain.model.probes.layout import LayoutProbe, choose_layout, probe_segments
from fsdptrain.model.structure import reshard
from fsdptrain.model.truncation import Truncation
from fsdptrain.protocols import Loss, ModelRole, Naming
from fsdptrain.types import LogProbs, LossConfig, Metrics, PackedBatch


class FSDPBackend:
    """Owns the policy, its optimizer and its reference. Every method is collective.

    Dropout is off while scoring, and in reinforcement learning while training too: there the ratio of new to old
    logprobs must measure the policy, not the noise. `--algorithm sft` trains with what the model's config says.

    Gradients are reduced after every pack: a rank then holds the sum of its own shard and never a whole gradient.
    """

    def __init__(
        self,
        config: Config,
        *,
        total_steps: int,
        before_load: Callable[[PreTrainedModel], None] | None = None,
        processor: ImageProcessor | None = None,
    ) -> None:
        """Load, shard and verify the model of `config`. Raises ConfigError, CheckpointError or NumericsError.

        `before_load` sees the model while it is on meta and unsharded: whether it will fit, for one.
        `processor`: the one of the checkpoint, where it is open already.
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
        self._experts = MoEController(config, self.checkpoint_path)
        with raise_on_all_ranks(ConfigError, "--image-key"):
            self._processor = processor or open_processor(config, self.checkpoint_path)
        other = self._other_reference()  # before the policy: two models are never on the device together
        self._model, self.adapters = load_model(
            config,
            self.checkpoint_path,
            self._meshes,
            experts=self._experts,
            before_load=before_load,
            processor=self._processor,
        )
        self._base_digest = ""  # of the frozen weights
        if self.adapters is not None:
            with self.adapters.detached():
                self._base_digest = content_digest(self._model)
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
    def shares_prefixes(self) -> bool:
        """Packs may hold samples that share a prompt."""
        return self.layout_probe.prefixes is not None and self.layout_probe.prefixes.shares

    @property
    def lines(self) -> list[str]:
        """What was built, for the log."""
        probe = self.layout_probe
        found = [self.adapters.line if self.adapters else "", probe.line, probe.prefixes.line if probe.prefixes else ""]
        return [line for line in found if line]

    def kernels(self) -> list[Kernel]:
        """What computes the parts of the model."""
        device_type, dtype = platform.device_type(), self.compute_dtype
        return kernels(self._model, device_type=device_type, compute_dtype=dtype, probe=self.layout_probe)

    def score(self, batches: Sequence[PackedBatch], model: ModelRole) -> list[LogProbs]:
        """Log-probabilities at the temperature of the rollout, without gradient, on the CPU, for each batch.

        All batches of `reference` are scored under one swap of weights. There is one if a KL term asks for it.
        It chooses its own experts; the policy takes those of `batch.routes`, or reports which it took, as
        --router-replay says.
        """
        assert not self._stash, "onload comes before score"
        records = self._experts.records and model == "policy"
        if model == "reference":
            batches = [replace(batch, routes=None) for batch in batches]
        with torch.no_grad(), evaluating(self._model), self._weights_of(model):
            found = [self._logprobs(b.to(self.device), with_entropy=False, with_routes=records) for b in batches]
            return [LogProbs(x.values.cpu(), routes=x.routes.cpu() if x.routes is not None else None) for x in found]

    def train_step(self, batches: Sequence[PackedBatch], loss: Loss, config: LossConfig) -> Metrics:
        """One optimizer step over the packs of this rank; every rank passes the same number of packs.

        Without a loss token on any rank the weights stay, and only the schedule of the learning rate goes on. Else it
        waits for the device once, whatever the number of packs, and once more for each of: the load of experts before
        the step, that after it by which biases move, and how evenly tokens came to split experts. (These tell the host
        in every layer how many tokens go where: transformers' dispatch.) Gradients that are not finite on any rank are
        dropped on every rank; then there is no optim/grad_norm. Raises NumericsError after more than
        --max-skipped-steps of such.
        """
        assert not self._is_away, "onload comes before train_step"
        if not batches[0].num_loss_tokens:  # of the whole step: the same on every rank
            return self._optimizer.pass_over()
        self._model.train(self._config.algorithm.algorithm == "sft")
        self._optimizer.zero_grad()
        load = self._experts.load(self._model, batches, layout=self.layout_probe.layout, device=self.device)
        dispatches = self._experts.dispatches(self._model)
        if dispatches is not None:
            dispatches.reset()
        balance = self._experts.bias_balance(self._model)
        sums = MetricSums(copies=self._config.pack_copies, checked=self._config.algorithm.loss not in LOSSES)
        for batch in batches:
            moved = batch.to(self.device)
            router = self._experts.router_loss(moved, load)
            logprobs = self._logprobs(moved, with_entropy=True, with_routes=balance is not None, router=router)
            if balance is not None:
                balance.count(logprobs.routes, moved)
            output = self._experts.add_loss(loss(moved, logprobs.for_loss(config), config), logprobs)
            self._optimizer.scale(output.loss).backward()
            sums.add(output.metrics)
        norm = self._optimizer.clip().to(self.device)
        metrics, norm_value, finite = sums.reduce(norm)
        metrics = finish_metrics(metrics) | (load.metrics() if load else {})
        metrics |= dispatches.metrics(self.device) if dispatches is not None else {}
        metrics |= balance.finish(move=finite) if balance is not None else {}
        return metrics | self._optimizer.end_step(norm_value, finite=finite)

    def update_reference(self) -> None:
        """Make the present policy the reference. Checkpoints hold it from now on."""
        assert not self._stash, "onload comes before update_reference"
        self._bank.copy_from(self._model)
        self._reference_moved = True

    def hf_weights(self, naming: Naming = "hub") -> Iterator[tuple[str, Tensor]]:
        """Full tensors in the compute dtype, layer by layer, on the device; every rank gets each and takes each."""
        assert not self._stash, "onload comes before hf_weights"
        return stream_weights(self._model, dtype=self.compute_dtype, naming=naming, adapters=self.adapters)

    def adapter_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Full float32 tensors of the adapter by peft's names, on the device: for engines that take adapters."""
        assert not self._stash, "onload comes before adapter_weights"
        assert self.adapters is not None, "there is no adapter without --lora-rank"
        return stream_adapter(self._model, self.adapters)

    def write_adapter_config(self, folder: Path) -> None:
        """peft's adapter_config.json. Not collective."""
        assert self.adapters is not None, "there is no adapter without --lora-rank"
        self.adapters.write_config(folder, base=self._base_name)

    def export(self, target: Path) -> None:
        """Write the policy as a Hugging Face folder, in the dtype of the checkpoint that it came from.

        With an adapter --lora-export says what is written: it as a peft folder, the model with it, or both.
        """
        assert not self._stash, "onload comes before export"
        form = "merged" if self.adapters is None else self._config.lora.export
        if form != "adapter":
            stored = stored_dtype(self.checkpoint_path)
            dtype = getattr(torch, stored) if stored else self.compute_dtype
            export_hf(self._model, self.checkpoint_path, target, dtype=dtype, adapters=self.adapters)
        if self.adapters is not None and form != "merged":
            folder = target if form == "adapter" else target / "adapter"
            export_adapter(self._model, self.adapters, folder, source=self.checkpoint_path, base=self._base_name)

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
        kept, adapter = self._staging, self._adapter_identity
        rests = [save_checkpoint(directory, self._model, self._optimizer, step=step, adapter=adapter, staging=kept)]
        if self._reference_moved:
            with self._bank.swapped_into(self._model):
                rests.append(save_reference(directory, self._model, staging=kept))
        return partial(_all, [rest for rest in rests if rest is not None]) if kept is not None else None

    def load(self, directory: Path) -> int:
        """Returns the step that was saved. Raises CheckpointError."""
        assert not self._is_away, "onload comes before load"
        step = load_checkpoint(directory, self._model, self._optimizer, adapter=self._adapter_identity)
        self._reference_moved = self._reference is not None and has_reference(directory)
        if self._reference_moved:
            with self._bank.swapped_into(self._model):
                load_reference(directory, self._model)
        return step

    @property
    def _bank(self) -> ReferenceBank:
        assert self._reference is not None, "there is no reference of its own weights"
        return self._reference

    @property
    def _adapter_identity(self) -> str | None:
        """What a checkpoint says that it belongs to, since it does not hold the frozen weights."""
        return None if self.adapters is None else f"{self.adapters.kind} on weights {self._base_digest}"

    @property
    def _base_name(self) -> str:
        """How an adapter names its base: as a user of it would."""
        name = self._config.model.hf_checkpoint
        return str(Path(name).resolve()) if Path(name).is_dir() else name

    @contextmanager
    def _weights_of(self, role: ModelRole) -> Iterator[None]:
        """Inside, the model is the one of `role`: of an adapter, the reference is the model without it."""
        assert role == "policy" or self._reference or self.adapters, "there is no reference without a KL term"
        with ExitStack() as stack:
            if role == "reference":
                if self.adapters is not None:
                    stack.enter_context(self.adapters.detached())
                if self._reference is not None:
                    stack.enter_context(self._reference.swapped_into(self._model))
            yield

    def _logprobs(
        self,
        batch: PackedBatch,
        *,
        with_entropy: bool,
        with_routes: bool = False,
        router: RouterFunction | None = None,
    ) -> LogProbs:
        return policy_logprobs(
            self._model,
            batch,
            layout=self.layout_probe.layout,
            temperature=self._config.scoring_temperature,
            truncation=Truncation.of(self._config.rollout),
            with_entropy=with_entropy,
            with_routes=with_routes,
            router=router,
        )

    def _verify_model(self) -> LayoutProbe:
        """The layout that the model computes exactly. NumericsError: there is none, or its head is not understood."""
        vocab_size = self.hf_config.get_text_config().vocab_size
        probe = choose_layout(
            self._model,
            self._config.model.layout,
            vocab_size=vocab_size,
            compute_dtype=self.compute_dtype,
            shown=self._processor.probe_segments(vocab_size) if self._processor else (),
            dealt=self._meshes.context is not None,
        )
        probe = replace(probe, prefixes=self._probe_prefixes(probe, vocab_size))
        check_head(self._model, vocab_size=vocab_size, layout=probe.layout, compute_dtype=self.compute_dtype)
        check_backward(self._model, vocab_size=vocab_size, layout=probe.layout, look=self._check_gradients)
        return probe

    def _check_gradients(self) -> None:
        """Of what is not split over tensor ranks."""
        tensor = self._meshes.tensor
        if tensor is not None and tensor.size() > 1:
            require_whole_gradients(self._model, tensor)

    def _probe_prefixes(self, probe: LayoutProbe, vocab_size: int) -> PrefixProbe:
        """ConfigError where --prefix-sharing on is asked for and the model does not allow it."""
        obstacle = configured_obstacle(self._config, on_gpu=platform.has_accelerator())
        if obstacle:
            return PrefixProbe(False, obstacle)
        segments = probe_segments(self._model, vocab_size)
        chosen = {"layout": probe.layout, "attention": probe.attention, "tolerance": probe.tolerance}
        found = probe_prefixes(self._model, segments, **chosen)
        if self._config.batch.prefix_sharing == "on":
            require_prefixes(found.reason)
        return found

    def _other_reference(self) -> ReferenceBank | None:
        """The weights of --ref-load, where there is one; its sharded model is gone again when this returns."""
        config = self._config
        if not config.needs_reference or config.ref.load is None:
            return None
        try:
            path = resolve_checkpoint(config.ref.load)
            bank = ReferenceBank(load_model(config, path, self._meshes, with_adapters=False)[0])
        except CheckpointError as error:  # of all ranks
            raise CheckpointError(str(error).replace("--hf-checkpoint", "--ref-load")) from error
        gc.collect()  # modules and FSDP's hooks refer to each other
        return bank

    def _checked_reference(self, other: ReferenceBank | None) -> ReferenceBank | None:
        if not self._config.needs_reference:
            return None
        with nullcontext() if self.adapters is None else self.adapters.detached():
            own = fingerprint(self._model)
        if other is not None and other.fingerprint != own:
            raise CheckpointError(
                f"--ref-load {self._config.ref.load} is {describe(other.fingerprint)}, but --hf-checkpoint is "
                f"{describe(own)}: the reference must have the same shapes"
            )
        if other is None and self.adapters is None:
            return ReferenceBank(self._model)
        return other


def _all(actions: Sequence[Callable[[], None]]) -> None:
    for act in actions:
        act()
