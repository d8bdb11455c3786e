"""The table of features. A feature's modules are imported only if it is enabled; `sections.py` has its options.

The order of features is that of the hooks: weights are quantized, adapters wrap stock modules, kernels replace modules,
ranks split the wrapped modules, then layers are compiled and recomputed and their routers wrapped.
"""

import importlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from fsdptrain.config import Config

if TYPE_CHECKING:
    from fsdptrain.feature import Feature


@dataclass(frozen=True)
class Entry:
    """A feature: its class, and conditions one of which enables it (see `config.rules`)."""

    target: str  # folder:class
    conditions: tuple[str, ...]
    only_trains: bool = False  # a run that only evaluates does not need it

    def enabled(self, config: Config) -> bool:
        return any(map(config.holds, self.conditions)) and not (self.only_trains and config.run.num_rollout == 0)

    def create(self, config: Config, checkpoint: Path) -> "Feature":
        folder, _, name = self.target.partition(":")
        kind: type[Feature] = getattr(importlib.import_module(f"fsdptrain.features.{folder}.feature"), name)
        return kind.create(config, checkpoint)


FEATURES = (
    Entry("quantized_base:QuantizedBaseFeature", ("load_in_4bit",)),
    Entry("lora:LoraFeature", ("lora_rank",)),
    Entry("liger:LigerFeature", ("liger",)),
    Entry("context_parallel:ContextParallelFeature", ("context_parallel_size>1",)),
    Entry("model_parallel:ModelParallelFeature", ("tensor_parallel_size>1", "expert_parallel_size>1")),
    Entry("compile:CompileFeature", ("compile",)),
    Entry("activation_memory:CheckpointingFeature", ("gradient_checkpointing",)),
    Entry("moe:MoEFeature", ("router_replay",)),
    Entry("vision:VisionFeature", ("image_key",)),
    Entry("prefix_sharing:PrefixSharingFeature", ("prefix_sharing",)),
    Entry("distillation:DistillationFeature", ("opd_teacher",), only_trains=True),
    Entry("fp8:Fp8Feature", ("fp8",)),  # after the probes of the others
)
