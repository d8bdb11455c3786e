"""The memory of a run from the shapes of its model, by one table of formulas. See docs/memory.md.

    found = estimate(model, config, Machine(num_ranks=8))
    found.device, found.training["activations"]

Counted: what a rank holds while it trains and while an engine in its process generates, and what the ranks of a node
hold on the host. Not counted: the CUDA context, the page cache, a vision tower's activations, a teacher, and the
intermediate results of a recurrent mixer without its kernels.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import nn
from transformers import PreTrainedModel

from fsdptrain.config import Config
from fsdptrain.fsdp.expert_shards import expert_placement
from fsdptrain.memory.activations import activation_memory, cache_bytes
from fsdptrain.model.sizes import is_of_adapter, num_fused_experts
from fsdptrain.model.structure import repeated_layers
from fsdptrain.platform import GIB

MASTER_BYTES = 4  # float32
MARGIN = 1.05  # fragmentation and kernel workspaces
GPUS_PER_NODE = 8
Parts = dict[str, int]  # bytes by purpose


@dataclass(frozen=True)
class Machine:
    """What a run has. [bytes] Without an accelerator, everything is on the host."""

    num_ranks: int
    device: int | None = None  # available to each rank; None: unknown
    host: int | None = None  # available on each node; None: unknown
    has_accelerator: bool = True
    local_ranks: int | None = None  # per node; None: as many as there are, at most 8

    @property
    def ranks_per_node(self) -> int:
        return self.local_ranks or min(self.num_ranks, GPUS_PER_NODE)


@dataclass(frozen=True)
class Estimate:
    """Bytes by purpose: while a rank trains and while it generates, and on the host for all ranks of a node."""

    training: Parts
    generation: Parts  # empty: no engine in the trainer's process
    on_host: Parts
    machine: Machine

    @property
    def device(self) -> int:
        """Peak bytes per rank, margin included; 0 without an accelerator."""
        return with_margin(max(self.training, self.generation, key=size_of)) * self.machine.has_accelerator

    @property
    def host(self) -> int:
        """Bytes per node, margin included."""
        of_ranks = {} if self.machine.has_accelerator else max(self.training, self.generation, key=size_of)
        return with_margin(self.on_host) + self.machine.ranks_per_node * with_margin(of_ranks)

    @property
    def needs(self) -> Mapping[str, int]:
        return {"device": self.device, "host": self.host}

    @property
    def limits(self) -> Mapping[str, int | None]:
        return {"device": self.machine.device, "host": self.machine.host}

    @property
    def lacks(self) -> str:
        """What does not suffice: `device`, `host`, or "" if the run fits."""
        return next((k for k, limit in self.limits.items() if limit is not None and self.needs[k] > limit), "")

    @property
    def line(self) -> str:
        """Needed and available memory, for the log."""
        limits = [(self.needs[k], k, limit) for k, limit in self.limits.items() if limit is not None and self.needs[k]]
        return ", ".join(f"{gib(need)} of {gib(limit)} GiB on the {kind}" for need, kind, limit in limits)


def size_of(parts: Parts) -> int:
    return sum(parts.values())


def with_margin(parts: Parts) -> int:
    return math.ceil(MARGIN * size_of(parts))


def gib(size: int) -> str:
    return f"{size / GIB:.1f}"


def count(number: float) -> str:
    """Format a number: `4.02 B`, `100.93 M`, `2560`."""
    for size, unit in ((1e9, "B"), (1e6, "M")):
        if number >= size:
            return f"{number / size:.2f} {unit}"
    return str(int(number))


def estimate(model: PreTrainedModel, config: Config, machine: Machine) -> Estimate:
    """Estimate the memory of a run. `model` is on meta or sharded, with its adapters."""
    shapes = Shapes(model, config, machine.num_ranks)
    state, on_host = shapes.state(), Parts()
    if not machine.has_accelerator:
        config = config.with_values(offload_train=False)  # it would copy, and save nothing
    ranks = machine.ranks_per_node
    if config.fsdp.cpu_offload or config.optim.offload_optimizer:
        moved = set(state) if config.fsdp.cpu_offload else {"optimizer state"}
        state = {name: size for name, size in state.items() if name not in moved}
        pinned = shapes.state(pinned=machine.has_accelerator)
        on_host |= {name: ranks * pinned[name] for name in moved}
    activations, offloaded = activation_memory(model, config)
    if offloaded:
        on_host["activations"] = ranks * offloaded
    generation = _generation(model, config, shapes, state, machine.num_ranks)
    on_host |= {name: ranks * size for name, size in shapes.copies_on_host(pinned=machine.has_accelerator).items()}
    if config.sync.offload_train:
        away = {name: size for name, size in state.items() if name != "gradients"}
        on_host["the trainer, while the engine generates"] = ranks * size_of(away)
    return Estimate(state | shapes.gathered() | activations, generation, on_host, machine)


class Shapes:
    """The parameters of a model as one rank holds them: split over tensor and expert ranks, then sharded."""

    def __init__(self, model: PreTrainedModel, config: Config, num_ranks: int) -> None:
        """If `num_ranks` does not fit the parallel sizes, it is rounded down."""
        self._config = config
        self._tensor, self._experts = config.ranks_along("tensor"), config.ranks_along("experts")
        self.num_shards = max(1, num_ranks // config.fsdp.replicate_size)
        self._expert_parameters = {
            p for m in model.modules() if num_fused_experts(m) for p in m.parameters(recurse=False)
        }
        self._layers = [list(layer.parameters()) for layer in repeated_layers(model)]
        self._in_layers = {p for layer in self._layers for p in layer}
        self.outside = [p for p in model.parameters() if p not in self._in_layers]
        self._parameters = list(model.parameters())
        self._adapters = {p for name, p in model.named_parameters() if is_of_adapter(name)}
        self._itemsize, self._is_quantized = compute_bytes(config), bool(config.value("load_in_4bit"))

    def state(self, *, pinned: bool = False) -> Parts:
        """Return the bytes of a rank's shard of weights, gradients and optimizer state."""
        trained = [p for p in self._parameters if p.requires_grad]
        weights = [
            self.shard(p) * (MASTER_BYTES if p.requires_grad else self._frozen_bytes(p)) for p in self._parameters
        ]
        gradients = [self.shard(p) * MASTER_BYTES for p in trained]
        moments = [self.shard(p) * moment for p in trained for moment in self._moments(p)]
        found = {"weights": weights, "optimizer state": moments, "gradients": gradients}
        return {name: _rounded(sizes) if pinned else math.ceil(sum(sizes)) for name, sizes in found.items()}

    def gathered(self) -> Parts:
        """Return the bytes of gathered layers, and of gradients before they are reduced."""
        bytes_of = self._frozen_bytes if self._is_quantized else lambda _: self._itemsize
        layers = [sum(self.gathered_elements(p) * bytes_of(p) for p in layer) for layer in self._layers]
        outside = sum(self.gathered_elements(p) for p in self.outside) * self._itemsize
        held = 2 * max(layers) if self._config.fsdp.reshard_after_forward else sum(layers)  # this layer and the next
        groups = (
            sum(self.gathered_elements(p) for p in group if p.requires_grad) for group in (*self._layers, self.outside)
        )
        found = {
            "gathered layers": math.ceil(held + outside),
            "gradients of one layer": (self._itemsize + MASTER_BYTES) * max(groups),
        }
        if self._is_quantized:
            found["a dequantized weight"] = self._itemsize * max(self.gathered_elements(p) for p in self._in_layers)
        return found

    def whole_weights(self, ranks: int) -> int:
        """Return the bytes of an engine's weights over `ranks`. An adapter is merged."""
        sizes = sum(p.numel() for p in self._parameters if p not in self._adapters)
        return math.ceil(self._itemsize * sizes / ranks)

    def largest_gathered(self) -> int:
        """Return the bytes of the largest group, which a weight sync gathers."""
        return self._itemsize * max(
            sum(self.gathered_elements(p) for p in group) for group in (*self._layers, self.outside)
        )

    def copies_on_host(self, *, pinned: bool) -> Parts:
        """Return the bytes of a rank's copies on the host: of the reference and of a checkpoint in writing."""
        found, config = Parts(), self._config
        if config.stores_reference:
            is_start = self._adapters and config.ref.load is None  # a copy of what is trained
            width = self._itemsize if self._adapters and not is_start else MASTER_BYTES
            chosen = (p for p in self._parameters if (p.requires_grad if is_start else p not in self._adapters))
            sizes = [width * self.shard(p) for p in chosen]
            found["the reference"] = _rounded(sizes) if pinned else sum(sizes)
        if config.run.async_save:
            state = self.state(pinned=pinned)
            found["the checkpoint in writing"] = state["weights"] + state["optimizer state"]
        return found

    def gathered_elements(self, parameter: nn.Parameter) -> int:
        """Return the elements that a rank holds while the parameter is gathered."""
        return _largest_shard(parameter, 1, parts=self._parts(parameter))

    def shard(self, parameter: nn.Parameter) -> int:
        """Return the elements of the largest shard."""
        of_experts = parameter in self._expert_parameters
        split = self._parts(parameter) if of_experts else self._tensor
        return _largest_shard(parameter, max(1, self.num_shards // split), parts=self._parts(parameter))

    def _parts(self, parameter: nn.Parameter) -> int:
        """Return the number of ranks over which the parameter is split before FSDP shards the part."""
        if parameter in self._expert_parameters:
            return self._experts
        return self._tensor if parameter.dim() > 1 else 1

    def _frozen_bytes(self, parameter: nn.Parameter) -> float:
        """Return the bytes per element of a frozen weight. Without an adapter it is stored like the trained ones."""
        if self._is_quantized and parameter in self._in_layers and parameter.dim() > 1:
            return 0.5 + MASTER_BYTES / 64  # a scale per 64 weights
        return self._itemsize if self._adapters else MASTER_BYTES

    def _moments(self, parameter: nn.Parameter) -> tuple[float, ...]:
        """Return the bytes per element of each tensor of the optimizer's state. Unknown optimizers count like AdamW."""
        optimizer = self._config.optim.optimizer
        if optimizer == "muon" and parameter in self._in_layers and parameter.dim() > 1:
            return (MASTER_BYTES,)
        if optimizer == "sgd":
            return ()
        return (MASTER_BYTES,) * 2


def compute_bytes(config: Config) -> int:
    return getattr(torch, config.compute_dtype_name).itemsize


def _generation(model: PreTrainedModel, config: Config, shapes: Shapes, state: Parts, num_ranks: int) -> Parts:
    """Return the device memory while an engine in this process generates. vLLM without a size takes what is left.

    With --offload-train it is the larger of two: both copies of the weights, or the engine's weights and the cache.
    """
    if not config.generates or config.run.replay_rollouts or config.rollout.engine == "vllm-server":
        return {}
    held = {name: size for name, size in state.items() if name != "gradients"}
    if config.rollout.engine == "vllm":
        size = (config.value("rollout_engine_args") or {}).get("tensor_parallel_size", 1)
        cache = {"key-value cache": int((config.value("rollout_kv_cache_gib") or 0) * GIB)}
        engine = {"the engine's weights": shapes.whole_weights(size if isinstance(size, int) and size > 0 else 1)}
    else:  # auto may be the embedded engine: count the most
        width = config.prompt_budget + config.rollout.max_response_len
        own = math.ceil(config.rollout.batch_size / num_ranks) * config.algorithm.n_samples_per_prompt
        rows = max(1, min(own, config.rollout.max_batch_tokens // width))
        cache = {"key-value cache": rows * cache_bytes(model.config, num_tokens=width, itemsize=compute_bytes(config))}
        engine = {"the engine's weights": shapes.whole_weights(1)}
    layers = {"gathered layers": shapes.largest_gathered()}
    if not config.sync.offload_train:
        return held | engine | cache | layers
    weights = {name: size for name, size in held.items() if name == "weights"}
    return max(weights | engine | layers, engine | cache, key=size_of)


def _rounded(sizes: Iterable[float]) -> int:
    """Sum pinned buffers: torch allocates each in a power of two."""
    return sum(1 << (math.ceil(size) - 1).bit_length() for size in sizes if size)


def _largest_shard(parameter: nn.Parameter, num_shards: int, *, parts: int) -> int:
    """Return the number of elements of the largest shard of `parameter`, first split into `parts` along dim 0."""
    if not parameter.dim():
        return parameter.numel()
    placement = expert_placement(num_shards, parts=parts)(parameter)
    shape = list(parameter.shape)
    for dim, count in ((0, parts), (0 if placement is None else placement.dim, num_shards)):
        shape[dim] = math.ceil(shape[dim] / count)
    return math.prod(shape)


def count_parameters(model: PreTrainedModel) -> tuple[int, int]:
    """Return the number of parameters, tied ones once, and that of the frozen ones. The model may be on meta."""
    sizes = [(p.numel(), p.requires_grad) for p in model.parameters()]
    return sum(size for size, _ in sizes), sum(size for size, is_trained in sizes if not is_trained)
