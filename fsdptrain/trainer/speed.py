"""Model FLOPs utilization (MFU) of the training passes."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from transformers import PreTrainedModel

from fsdptrain.memory.flops import ModelFlops, model_flops, peak_tflops
from fsdptrain.trainer import metrics as summary
from fsdptrain.trainer.batches import StepBatches
from fsdptrain.types import Metrics, PackedBatch


@dataclass(frozen=True)
class Speed:
    flops: ModelFlops
    peak_tflops: float
    copies: int = 1  # ranks that share the work on a pack; each of them counts all of it

    @classmethod
    def of(cls, model: PreTrainedModel, device: torch.device, dtype: torch.dtype, *, copies: int) -> "Speed":
        return cls(model_flops(model), peak_tflops(device, dtype), copies)

    def utilization(self, steps: Sequence[StepBatches], *, train_s: float) -> Metrics:
        """Compute perf/mfu and perf/mfu_causal of the forward and backward passes, mean over ranks."""
        packs = [pack for step in steps for pack in step.packs]
        own = {
            name: sum(self._flops(p, causal=causal) for p in packs)
            for name, causal in (("perf/mfu", False), ("perf/mfu_causal", True))
        }
        possible = self.peak_tflops * 1e12 * max(train_s, 1e-9) * dist.get_world_size() * self.copies
        return {name: total / possible for name, total in summary.reduce_sums(own).items()}

    def _flops(self, pack: PackedBatch, *, causal: bool) -> float:
        """Count the FLOPs of a pack. A shared prompt counts once; every response attends to it."""
        prefixes = None if pack.shared is None else pack.shared.lengths
        return self.flops.training(pack.seqlens, pack.loss_positions.numel(), causal=causal, prefixes=prefixes)
