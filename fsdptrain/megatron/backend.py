"""The megatron-core training backend. It uses the same recipes, losses, packs and engines as FSDP."""

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from fsdptrain import platform
from fsdptrain.algo.losses import LOSSES, checked
from fsdptrain.algo.metrics import finish_metrics
from fsdptrain.config import Config
from fsdptrain.distributed import raise_on_all_ranks
from fsdptrain.enabled_features import NO_FEATURES
from fsdptrain.errors import CheckpointError, ConfigError
from fsdptrain.fsdp.export import export_policy, stored_entries
from fsdptrain.fsdp.metric_sums import MetricSums
from fsdptrain.fsdp.optimizer import Optimizer
from fsdptrain.fsdp.reference import ReferenceBank, reference_line
from fsdptrain.fsdp.reference_load import named_in_errors
from fsdptrain.megatron.config import MegatronConfig
from fsdptrain.megatron.cpu_shims import prepare_megatron
from fsdptrain.megatron.forward import LogprobsHead, from_last_stage, layout_of, run_packs
from fsdptrain.megatron.groups import process_groups, start_groups
from fsdptrain.megatron.hub_names import by_module, hub_state, shapes_of, vision_tensors
from fsdptrain.megatron.masters import Masters, wrap
from fsdptrain.megatron.model import build_model, build_options, has_transformer_engine
from fsdptrain.megatron.parity import check_parity, small_models
from fsdptrain.megatron.report import kernels_of, report_lines
from fsdptrain.megatron.storage import identity, load_checkpoint, save_checkpoint
from fsdptrain.megatron.table import text_path
from fsdptrain.megatron.transformer_config import is_whole, text_config, transformer_config
from fsdptrain.megatron.weights import WeightMap, open_files
from fsdptrain.megatron.whole import WholeLayers, note_layout
from fsdptrain.model.loading.meta import build_meta_model, resolve_checkpoint
from fsdptrain.model.probes.kernels import Kernel, kernels, report_fallbacks
from fsdptrain.model.probes.layout import LayoutProbe
from fsdptrain.model.rows import Layout
from fsdptrain.protocols import Loss, ModelRole, Naming
from fsdptrain.types import LogProbs, LossConfig, LossOutput, Metrics, PackedBatch, Truncation


class MegatronBackend:
    """Owns the policy, its optimizer and its reference. Every method is collective.

    All pipeline and tensor-parallel ranks of a replica receive the same packs. Dropout is always off.
    """

    features = NO_FEATURES

    def __init__(self, config: Config, *, total_steps: int) -> None:
        """Build, load and verify the model. Raises ConfigError, CheckpointError or NumericsError."""
        self._config, split = config, config.section(MegatronConfig)
        self.device = platform.local_device()
        self.checkpoint_path = resolve_checkpoint(config.model.hf_checkpoint)
        trust = config.model.trust_remote_code
        self._stock = build_meta_model(self.checkpoint_path, trust_remote_code=trust, attn_implementation="eager")
        self._text = text = text_config(self.hf_config)
        with raise_on_all_ranks(ConfigError, "--backend megatron"):
            prepare_megatron()
            if config.algorithm.algorithm == "sft" and text.to_dict().get("attention_dropout"):
                raise ConfigError("--algorithm sft would train with the attention_dropout of config.json: set it to 0")
        probe = note_layout(text) if is_whole(text, split.spec) else None
        options = build_options(config)
        self.compute_dtype: torch.dtype = options["dtype"]
        self._layout: Layout = layout_of(text, split, has_engine=options["has_engine"], dtype=self.compute_dtype)
        start_groups(split, timeout_s=config.launch.dist_timeout)
        self._groups = process_groups()
        with raise_on_all_ranks(ConfigError, "--backend megatron"):
            built = transformer_config(text, split, **options)
            self._model = build_model(built, text, spec=split.spec).to(self.device)
        self.weights = WeightMap(self._model, self._stock, bridge=split.bridge)
        report_fallbacks([self.weights.converter], strict=config.model.strict)
        copy = small_models(text, split, options, device=self.device)
        difference, tolerance = check_parity(*copy, split, options)
        reason = "megatron-core packs with Transformer Engine alone, which is not here"
        if has_transformer_engine():
            reason = "Transformer Engine packs in half precision alone"
        reason = "" if self._layout == "packed" else reason
        attention, reason = (probe.attention, probe.reason) if probe else ("megatron-core", reason)
        self.layout_probe = LayoutProbe(self._layout, attention, difference, tolerance, reason)
        self._wrapped = wrap(self._model)
        self._masters = masters = Masters(self._model, self._wrapped)
        self._reference = self._load()
        self._optimizer = Optimizer(
            self._model,
            config.optim,
            total_steps=total_steps,
            fp16=False,
            masters=masters.named,
            total_norm=lambda _: masters.total_norm(),
            fix=config.precision_fix,
        )

    @property
    def model(self) -> PreTrainedModel:
        """The transformers model on meta. The weights are in the megatron-core model."""
        return self._stock

    @property
    def hf_config(self) -> PreTrainedConfig:
        return self._stock.config

    @property
    def lines(self) -> list[str]:
        reference = [reference_line(self._reference)] if self._reference else []
        return [*report_lines(self._model, layout=self._layout), self._masters.line, *reference, self.layout_probe.line]

    def kernels(self) -> list[Kernel]:
        if isinstance(self._model[0], WholeLayers):
            options: Any = {"device_type": platform.device_type(), "compute_dtype": self.compute_dtype}
            return kernels(self._stock, probe=self.layout_probe, **options)
        return kernels_of(self._model, self._stock)

    def compute_logprobs(self, batches: Sequence[PackedBatch], model: ModelRole) -> list[LogProbs]:
        moved = [batch.to(self.device) for batch in batches]
        weights = nullcontext()
        if model == "reference":
            assert self._reference is not None, "there is no reference without a KL term"
            weights = self._reference.swapped_into(self._model)
        with torch.no_grad(), weights:
            found = self._run(moved, lambda *hidden: self._logprobs(*hidden, with_entropy=False).values, train=False)
        return [LogProbs(values.cpu()) for values in from_last_stage(found, [b.advantages for b in moved])]

    def train_step(self, batches: Sequence[PackedBatch], loss: Loss, config: LossConfig) -> Metrics:
        """As in FSDPBackend: without loss tokens only the schedule advances, and non-finite gradients are dropped."""
        if not batches[0].num_loss_tokens:  # of the whole step: the same on every rank
            return self._optimizer.advance_without_update()
        for part in self._wrapped:
            part.zero_grad_buffer()

        def finish(hidden: Tensor, batch: PackedBatch) -> tuple[Tensor, Tensor, LossOutput]:
            logprobs = self._logprobs(hidden, batch, with_entropy=True)
            output = checked(loss(batch, logprobs.for_loss(config), config))
            return output.loss, torch.zeros((), dtype=torch.int, device=hidden.device), output

        outputs = self._run([batch.to(self.device) for batch in batches], finish, train=True)
        self._masters.reduce_gradients()
        sums = MetricSums(copies=self._config.pack_copies, checked=self._config.algorithm.loss not in LOSSES)
        for output in outputs:
            sums.add(output.metrics)
        if self._groups.pp.size() > 1:  # the last stage has the metrics; broadcast them for the logs
            sums.broadcast(self._groups.pp, src=self._groups.pp.size() - 1, device=self.device)
        metrics, norm, finite = sums.reduce(self._optimizer.clip())
        metrics = finish_metrics(metrics, num_tokens=batches[0].num_trained_tokens)
        metrics |= self._optimizer.end_step(norm, finite=finite, kl=metrics.get("loss/kl", 0.0))
        if finite:
            self._masters.publish()
        return metrics

    def hf_weights(self, naming: Naming = "hub") -> Iterator[tuple[str, Tensor]]:
        return self._named(naming, dtype=self.compute_dtype)

    def export(self, target: Path) -> None:
        stream = partial(self._named, "hub", of=self._masters.whole_master)
        export_policy(target, self._config, self.checkpoint_path, self._stock, stream)

    def _named(self, naming: Naming, *, dtype: torch.dtype, **options: Any) -> Iterator[tuple[str, Tensor]]:
        """Yield the weights, and from the files those of the vision part, which no stage has. Collective."""
        stream = self.weights.stream(dtype=dtype, **options)
        yield from by_module(stream, self._stock) if naming == "module" or self._fused else stream
        for name, tensor in vision_tensors(self.checkpoint_path, self._stock, modules=naming == "module"):
            yield name, tensor.to(self.device, dtype)

    def save(self, directory: Path, step: int) -> None:
        save_checkpoint(directory, self.weights, self._masters, self._optimizer, step=step, model=self._identity)

    def load(self, directory: Path) -> int:
        return load_checkpoint(directory, self.weights, self._masters, self._optimizer, model=self._identity)

    def _load(self) -> ReferenceBank | None:
        """Load --hf-checkpoint into the model.

        Returns the reference, from --ref-load if given, else from --hf-checkpoint. None if the run needs no reference.
        """
        config = self._config
        bank = None
        if config.needs_reference and config.ref.load is not None:
            self._read(config.ref.load, "--ref-load")
            bank = ReferenceBank(self._model)
        self._read(str(self.checkpoint_path), "--hf-checkpoint", self._masters.take)
        fused = re.compile(rf"{text_path(self._stock)}\..*\.experts\.down_proj")
        self._fused = any(fused.fullmatch(name) for name, _ in stored_entries(self.checkpoint_path))
        self._masters.publish()
        return ReferenceBank(self._model) if config.needs_reference and bank is None else bank

    def _read(self, name: str, flag: str, put: Callable[[str, Tensor], None] | None = None) -> None:
        with named_in_errors(flag):
            path = resolve_checkpoint(name)
            shapes = shapes_of(hub_state(self._stock))
            with (
                raise_on_all_ranks(CheckpointError, f"{flag} {path}"),
                open_files(path, shapes, ignored=self.weights.ignored) as source,
            ):
                self.weights.load(source, put)

    def _run(self, batches: Sequence[PackedBatch], finish: Callable[..., Any], *, train: bool) -> list[Any]:
        model = self._wrapped if train else self._model
        return run_packs(model, batches, finish, layout=self._layout, train=train)

    def _logprobs(self, hidden: Tensor, batch: PackedBatch, *, with_entropy: bool) -> LogProbs:
        chunk_size, temperature = self._config.model.logprob_chunk_size, self._config.scoring_temperature
        truncation = Truncation.of(self._config.rollout)
        head = LogprobsHead(self._text, self._layout, chunk_size, temperature, truncation)
        return head(self._model, hidden, batch, with_entropy=with_entropy)

    @property
    def _identity(self) -> dict[str, Any]:
        return identity(self._stock, self.weights)
