"""LoRA through peft: small trained matrices next to frozen weights (Hu et al. 2021, arXiv 2106.09685).

    adapters = add_adapters(model, lora)          # on meta, before sharding: wraps the target modules in peft's layers
    with adapters.detached():                     # inside, `model` has its stock modules, names and values
        load_weights(model, path, ...)
    adapters.finish(seed=..., cpu_offload=...)    # freezes the weights, initializes the adapter (no effect yet)

peft renames what it wraps (`q_proj.weight` becomes `q_proj.base_layer.weight`). A loader unaware of this treats the
weights as missing and fills them with random numbers, without an error. Loading, export and reference scoring therefore
do not translate names; they temporarily remove peft's layers from the model.
"""

import copy
import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from fsdptrain import platform
from fsdptrain.errors import ConfigError
from fsdptrain.features.lora.config import LoraConfig
from fsdptrain.features.lora.targets import find_targets, shortest_names
from fsdptrain.features.lora.weights import NAME, factors, initial_a
from fsdptrain.model.loading.materialize import filled_like, own_part, register

if TYPE_CHECKING:
    import peft


@dataclass(frozen=True)
class _Slot:
    """A position in the model that holds either peft's layer or the stock module that it wraps."""

    name: str  # module name of the position
    parent: nn.Module
    layer: nn.Module
    stock: nn.Module

    @property
    def child(self) -> str:
        return self.name.rpartition(".")[2]


class Adapters:
    """The adapters of one model. Only their weights are trained."""

    def __init__(self, model: PreTrainedModel, peft_config: "peft.LoraConfig") -> None:
        """`model` already has peft's layers, created from `peft_config`."""
        from peft.tuners.lora import LoraLayer

        self._model = model
        self.peft_config = peft_config
        self._slots = [
            _Slot(f"{name}.{child}".lstrip("."), parent, cast(nn.Module, layer), layer.get_base_layer())
            for name, parent in model.named_modules()
            if not isinstance(parent, LoraLayer)
            for child, layer in parent.named_children()
            if isinstance(layer, LoraLayer)
        ]
        self.layers = dict(self._adapted())  # stock weight name -> peft layer
        self._num_parameters = sum(p.numel() for p in model.parameters())  # later, quantized weights have other shapes

    @contextmanager
    def detached(self) -> Iterator[None]:
        """Restore the stock model with frozen weights within the context, and what was there on exit or error."""
        before = [getattr(slot.parent, slot.child) for slot in self._slots]
        for slot in self._slots:
            setattr(slot.parent, slot.child, slot.stock)
        try:
            yield
        finally:
            for slot, module in zip(self._slots, before, strict=True):
                setattr(slot.parent, slot.child, module)

    @property
    def kind(self) -> str:
        """Description of the adapter kind, for what its shapes do not show."""
        config = self.peft_config
        return f"LoRA of rank {config.r}, alpha {config.lora_alpha}"

    @property
    def line(self) -> str:
        """The line of the startup report."""
        trained = sum(p.numel() for p in self._model.parameters() if p.requires_grad)
        stored = next(str(p.dtype).removeprefix("torch.") for p in self._model.parameters() if not p.requires_grad)
        return (
            f"{self.kind}, on {len(self.layers)} weights: {trained:,} of {self._num_parameters:,} parameters are "
            f"trained, the others are stored in {stored}"
        )

    def parameters(self) -> dict[str, nn.Parameter]:
        """Return the trained parameters by their names in a peft file, sharded like the model."""
        return {_file_name(name): p for name, p in self._model.named_parameters() if p.requires_grad}

    def write_config(self, folder: Path, *, base: str) -> None:
        """Write adapter_config.json with `base` as the base model name."""
        config = copy.deepcopy(self.peft_config)
        config.base_model_name_or_path, config.inference_mode = base, True
        config.target_modules = sorted(config.target_modules or [])
        config.target_parameters = sorted(config.target_parameters or []) or None
        config.save_pretrained(str(folder))

    @torch.no_grad()
    def finish(self, *, seed: int, cpu_offload: bool) -> None:
        """Freeze the weights and initialize the adapters. Call it after the weights are loaded. Collective.

        A is uniform in +-1/sqrt(columns) and B is zero, as in peft. Each matrix has its own random stream, so it is the
        same on any number of ranks; peft would fill the shards of all ranks with the same numbers.
        """
        with self.detached():
            self._model.requires_grad_(False)  # the loader creates new parameters
        device = torch.device("cpu") if cpu_offload else platform.local_device()
        for weight, layer in self.layers.items():
            a, b = factors(layer)
            _fill(a, initial_a(a.weight.shape, _generator(seed, weight)), device)
            _fill(b, torch.zeros(b.weight.shape), device)

    def _adapted(self) -> Iterator[tuple[str, nn.Module]]:
        from peft.tuners.lora.layer import ParamWrapper

        for slot in self._slots:
            layer = slot.layer
            while isinstance(layer, ParamWrapper):  # nested if a module has several adapted weights
                yield f"{slot.name}.{layer.parameter_name}", layer
                layer = layer.base_layer
            if layer is not slot.stock:
                yield f"{slot.name}.weight", layer


def add_adapters(model: PreTrainedModel, lora: LoraConfig) -> Adapters:
    """Insert peft's layers into the meta `model` and freeze the other weights.

    Raises ConfigError for targets that peft cannot adapt.
    """
    import peft

    targets = find_targets(model, lora.targets)
    modules = [name for name, _ in model.named_modules()]
    weights = [name for name, _ in model.named_parameters()]
    conv1d = [isinstance(model.get_submodule(name), Conv1D) for name in targets.modules]
    config = peft.LoraConfig(
        task_type=peft.TaskType.CAUSAL_LM,
        r=lora.rank,
        lora_alpha=lora.alpha,
        target_modules=shortest_names(targets.modules, modules),
        target_parameters=shortest_names(targets.parameters, weights, parts=2) or None,
        fan_in_fan_out=any(conv1d),  # GPT-2 stores its weights transposed
    )
    with torch.device("meta"):
        peft.inject_adapter_in_model(config, model, adapter_name=NAME)
    adapters = Adapters(model, config)
    if adapters.layers.keys() != targets.weights:
        differing = sorted(adapters.layers.keys() ^ targets.weights)
        raise ConfigError(
            f"--lora-targets {' '.join(lora.targets)}: peft {peft.__version__} does not adapt {differing[0]} as "
            "requested: choose other targets"
        )
    return adapters


def _fill(module: Any, whole: Tensor, device: torch.device) -> None:
    """Set this rank's part of `whole` as the weight of the meta `module`, on `device`."""
    part = own_part(whole.to(platform.local_device()), module.weight)
    register(module, ["weight"], filled_like(module.weight, part, device))


def _generator(seed: int, weight: str) -> torch.Generator:
    digest = hashlib.sha256(f"{seed} {weight}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))


def _file_name(name: str) -> str:
    """Return the name of a parameter in a peft file.

    `layers.0.q_proj.lora_A.default.weight` becomes `base_model.model.layers.0.q_proj.lora_A.weight`.
    """
    return f"base_model.model.{name.replace(f'.{NAME}.weight', '.weight')}"
