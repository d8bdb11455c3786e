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
import math
from collections.abc import Iterator, Set
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from fsdptrain import platform
from fsdptrain.errors import ConfigError
from fsdptrain.features.lora.folder import WEIGHTS_FILE
from fsdptrain.features.lora.targets import find_targets, find_whole, shortest_names
from fsdptrain.features.sections import LoraConfig
from fsdptrain.fsdp.stream import full_tensor
from fsdptrain.model.loading.fill import filled_like, own_part
from fsdptrain.model.loading.materialize import local_part, moved, register

if TYPE_CHECKING:
    import peft

NAME = "default"  # adapter name in peft's modules; absent from files


@dataclass(frozen=True)
class _Slot:
    """A position in the model that holds either peft's layer or the stock module that it wraps."""

    name: str  # module name of the position
    parent: nn.Module
    child: str  # its name in `parent`
    layer: nn.Module
    stock: nn.Module


class Adapters:
    """The adapters of one model. Only their weights are trained."""

    def __init__(self, model: PreTrainedModel, peft_config: "peft.LoraConfig", whole: Set[str] = frozenset()) -> None:
        """`model` already has peft's layers, created from `peft_config`. whole: trained weights of the stock model."""
        from peft.tuners.lora import LoraLayer

        self._model = model
        self.peft_config = peft_config
        self.whole = whole
        self._slots = [
            _Slot(f"{name}.{child}".lstrip("."), parent, child, cast(nn.Module, layer), layer.get_base_layer())
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
        config, kind = self.peft_config, "rsLoRA" if self.peft_config.use_rslora else "LoRA"
        return ", ".join([f"{kind} of rank {config.r}, alpha {config.lora_alpha}", *sorted(self.whole)])

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
        """Return the trained parameters by their names in a peft file, sharded like the model; tied ones by each."""
        named = dict(self._model.named_parameters()) | {name: self._model.get_parameter(name) for name in self.whole}
        trained = {name.replace(f".{NAME}.weight", ".weight"): p for name, p in named.items() if p.requires_grad}
        return {f"base_model.model.{name}": p for name, p in trained.items()}

    def write_config(self, folder: Path, *, base: str) -> None:
        """Write adapter_config.json with `base` as the base model name."""
        config = copy.deepcopy(self.peft_config)
        config.base_model_name_or_path, config.inference_mode = base, True
        config.target_modules = sorted(config.target_modules or [])
        config.target_parameters = sorted(config.target_parameters or []) or None
        config.modules_to_save = sorted({name.rpartition(".")[0] for name in self.whole}) or None
        config.save_pretrained(str(folder))

    @torch.no_grad()
    def finish(self, *, seed: int, cpu_offload: bool) -> None:
        """Freeze the weights and initialize the adapters. Call it after the weights are loaded. Collective.

        A is uniform in +-1/sqrt(columns) and B is zero, as in peft. Each matrix has its own random stream, so it is the
        same on any number of ranks; peft would fill the shards of all ranks with the same numbers.
        """
        with self.detached():
            self._model.requires_grad_(False)  # the loader creates new parameters
        for name in self.whole:
            self._model.get_parameter(name).requires_grad_(True)
        device = torch.device("cpu") if cpu_offload else platform.local_device()
        for weight, layer in self.layers.items():
            a, b = _factors(layer)
            bound = 1.0 / math.sqrt(a.weight.shape[-1])
            digest = hashlib.sha256(f"{seed} {weight}".encode()).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
            _fill(a, torch.empty(a.weight.shape).uniform_(-bound, bound, generator=generator), device)
            _fill(b, torch.zeros(b.weight.shape), device)

    def check_start(self, folder: Path) -> None:
        """Raise ConfigError unless the adapter in `folder` has the names and shapes of this one."""
        with safe_open(folder / WEIGHTS_FILE, framework="pt") as file:
            theirs = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118  # no mapping
        ours = {name: tuple(p.shape) for name, p in self.parameters().items()}
        for name, _ in sorted(theirs.items() ^ ours.items()):
            raise ConfigError(
                f"--lora-init {folder} has {name} {theirs.get(name, 'not')}, this run {ours.get(name, 'not')}: leave "
                "--lora-targets and --lora-modules-to-save out, and train its base model; tied weights need both names"
            )

    @torch.no_grad()
    def load_start(self, folder: Path) -> None:
        """Load the adapter of `folder`, which `check_start` has accepted. Raises ConfigError for untied weights."""
        loaded: dict[nn.Parameter, Tensor] = {}
        with safe_open(folder / WEIGHTS_FILE, framework="pt") as file:
            for name, p in self.parameters().items():
                whole = file.get_tensor(name).to(platform.local_device(), p.dtype)
                if not torch.equal(loaded.setdefault(p, whole), whole):
                    raise ConfigError(f"--lora-init {folder}: {name} differs from the weight that it is tied to")
                local_part(p.detach()).copy_(own_part(whole, p))

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
    whole = find_whole(model, lora.modules_to_save, targets.weights)
    modules = [name for name, _ in model.named_modules()]
    weights = [name for name, _ in model.named_parameters()]
    conv1d = [isinstance(model.get_submodule(name), Conv1D) for name in targets.modules]
    config = peft.LoraConfig(
        task_type=peft.TaskType.CAUSAL_LM,
        r=lora.rank,
        lora_alpha=lora.alpha,
        use_rslora=lora.rslora,
        target_modules=shortest_names(targets.modules, modules),
        target_parameters=shortest_names(targets.parameters, weights, parts=2) or None,
        fan_in_fan_out=any(conv1d),  # GPT-2 stores its weights transposed
    )
    with torch.device("meta"):
        peft.inject_adapter_in_model(config, model, adapter_name=NAME)
    for name in whole:
        model.get_parameter(name).requires_grad_(True)
    adapters = Adapters(model, config, whole)
    if adapters.layers.keys() != targets.weights:
        differing = sorted(adapters.layers.keys() ^ targets.weights)
        raise ConfigError(
            f"--lora-targets {' '.join(lora.targets)}: peft {peft.__version__} does not adapt {differing[0]} as "
            "requested: choose other targets"
        )
    return adapters


@torch.no_grad()
def merged(weight: Tensor, layer: Any) -> Tensor:
    """Return `weight` merged with the adapter of a peft `layer`, sharded like it, in float32. Collective.

    The layer computes W x + s B A x with s = alpha / rank, or alpha / sqrt(rank). So the merged weight is W + s B A.
    Each rank merges its own part of W in float32.
    """
    total = moved(weight, platform.local_device(), torch.float32, copy=True)
    a, b = (full_tensor(module.weight, torch.float32) for module in _factors(layer))
    local_part(total).add_(own_part(_product(layer, weight.dim(), a, b).mul_(layer.scaling[NAME]), total))
    return total


def _product(layer: Any, num_dims: int, a: Tensor, b: Tensor) -> Tensor:
    """Return B A in the dim order of the weight. For fused experts A is [experts x rank, in], B [out, rank x experts].

    peft's own function rounds it to the dtype of the weight.
    """
    if num_dims == 2:
        return (b @ a).T if layer.fan_in_fan_out else b @ a
    a = a.reshape(layer.num_experts, -1, a.shape[-1])  # [E, r, in]
    b = b.reshape(b.shape[0], -1, layer.num_experts).permute(2, 0, 1)  # [E, out, r]
    transposed = getattr(layer.get_base_layer(), "is_transposed", False)  # weights [E, in, out]; same check as in peft
    return (b @ a).mT if transposed else b @ a


def _factors(layer: Any) -> tuple[nn.Linear, nn.Linear]:
    """Return the modules that hold A and B of a peft layer."""
    return layer.lora_A[NAME], layer.lora_B[NAME]


def _fill(module: Any, whole: Tensor, device: torch.device) -> None:
    """Set this rank's part of `whole` as the weight of the meta `module`, on `device`."""
    part = own_part(whole.to(platform.local_device()), module.weight)
    register(module, ["weight"], filled_like(module.weight, part, device))
