"""The memory of a run before it starts: what each GPU and each host will hold, and which flags make it fit.

    found = make_plan(config, num_gpus=8, gpu_memory=80 * GIB)
    found.fits, found.training.total, [proposal.flags for proposal in found.proposals]

Exact parameter counts, the trace of a pack of --max-tokens-per-gpu tokens in the longest sequences that the
configuration allows, and the cache of the embedded engine at its fullest. All of it from config.json.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from transformers import PreTrainedModel

from fsdptrain.config import Config
from fsdptrain.errors import ConfigError
from fsdptrain.features.activation_memory.selective_check import check_selective
from fsdptrain.features.model_parallel.plan import SplitPlan
from fsdptrain.memory.demand import (
    DEVICE_MARGIN,
    GIB,
    MASTER_BYTES,
    MemoryNeed,
    MemorySupply,
    demand_of,
    load_memory_need,
)
from fsdptrain.memory.pieces import Grid, Pieces
from fsdptrain.model.attention.attention import SEGMENTS, register_attention
from fsdptrain.model.inputs import Layout
from fsdptrain.model.probes.kernels import kernels
from fsdptrain.model.probes.layout import LOSES_MASK
from fsdptrain.model.structure import ParameterCounts, count_parameters
from fsdptrain.tools.plan import remedies
from fsdptrain.tools.plan.activations import Moment, Sharding, training_peak
from fsdptrain.tools.plan.slices import config_of_slice, on_one_rank
from fsdptrain.tools.plan.trace import Recipe, Trace, cache_bytes, interleave, trace

GPUS_PER_NODE = 8
MOST_PROPOSALS = 3
_NO_LIMIT = 2**62


@dataclass(frozen=True)
class Machine:
    num_gpus: int
    gpu_memory: int  # bytes of one
    host_memory: int | None = None  # bytes of a node; None: not asked

    @classmethod
    def of_gib(cls, *, num_gpus: int, gpu_memory_gib: float, host_memory_gib: float | None) -> "Machine":
        host = None if host_memory_gib is None else int(host_memory_gib * GIB)
        return cls(num_gpus, int(gpu_memory_gib * GIB), host)

    @property
    def ranks_per_node(self) -> int:
        return min(self.num_gpus, GPUS_PER_NODE)


@dataclass(frozen=True)
class Proposal:
    """Flags that make it fit, beside those that were given."""

    flags: tuple[str, ...]
    num_gpus: int
    device: int  # bytes of the fullest moment, margin included
    host: int  # bytes of a node, margin included


@dataclass(frozen=True)
class Plan:
    """Bytes; of one rank on the device, of all ranks of a node on the host."""

    model_class: str
    counts: ParameterCounts
    machine: Machine
    layout: Layout
    seqlens: tuple[int, ...]  # of the pack that was traced
    training: Moment
    generation: Moment | None  # None: another engine, or nothing is generated
    host_parts: Mapping[str, int]
    host: int  # margin included
    choices: Mapping[str, int]  # training, margin included, by the flags that change it most
    proposals: tuple[Proposal, ...]

    @property
    def device(self) -> int:
        """Of the fullest moment, margin included."""
        return max(with_margin(moment) for moment in (self.training, self.generation) if moment is not None)

    @property
    def fits(self) -> bool:
        host = self.machine.host_memory
        return self.device <= self.machine.gpu_memory and (host is None or self.host <= host)


def with_margin(moment: Moment) -> int:
    return math.ceil(DEVICE_MARGIN * moment.total)


def make_plan(model: PreTrainedModel, config: Config, machine: Machine) -> Plan:
    """`model` on meta, as the run builds it. Raises MemoryPlanError where its activations cannot be traced."""
    planner = Planner(model, machine)
    training, generation = planner.training(config), planner.generation(config)
    host_parts, host = planner.host(config)
    choices = {
        " ".join(changed.flags) or "as given": with_margin(planner.training(changed.config))
        for changed in remedies.choices(config)
        if planner.allows(changed.config)
    }
    found = Plan(
        model_class=type(model).__name__,
        counts=planner.counts,
        machine=machine,
        layout=planner.layout(config),
        seqlens=seqlens(config),
        training=training,
        generation=generation,
        host_parts=host_parts,
        host=host,
        choices=choices,
        proposals=(),
    )
    return found if found.fits else replace(found, proposals=tuple(_proposals(config, machine, planner)))


class Planner:
    """Remembers its traces: most candidates differ in something else."""

    def __init__(self, model: PreTrainedModel, machine: Machine) -> None:
        register_attention()
        self._model = model
        self.machine = machine
        self._traces: dict[tuple[Recipe, Grid], Trace] = {}
        self._pieces: dict[Grid, Pieces] = {}
        self._plans: dict[tuple[int, int], SplitPlan] = {}  # by tensor and expert ranks
        self._caches: dict[tuple[int, torch.dtype], int] = {}
        self._selective: bool | None = None  # not known yet

    @cached_property
    def counts(self) -> ParameterCounts:
        return count_parameters(self._model)

    def on(self, machine: Machine) -> "Planner":
        """The same model and traces on another machine."""
        other = Planner(self._model, machine)
        other._traces, other._caches, other._selective = self._traces, self._caches, self._selective
        other._pieces, other._plans = self._pieces, self._plans
        return other

    def allows(self, config: Config) -> bool:
        """Whether the model's own code lets `config` compute it."""
        selective = config.model.gradient_checkpointing and config.model.gradient_checkpointing_kind == "selective"
        return not selective or self._selective_works(config.model.trust_remote_code)

    def _selective_works(self, trust_remote_code: bool) -> bool:
        if self._selective is None:
            try:
                check_selective(self._model.config, trust_remote_code=trust_remote_code)
                self._selective = True
            except ConfigError:
                self._selective = False
        return self._selective

    def layout(self, config: Config) -> Layout:
        """Without a probe: padded where a recurrent mixer lacks its kernels here, or a mask would be lost."""
        if config.model.layout != "auto":
            return config.model.layout
        found = kernels(self._model, device_type="cuda", compute_dtype=_dtype(config))
        values = self._model.config.get_text_config().to_dict()
        unpackable = any(k.part == "recurrent mixer" and k.fell_back for k in found)
        return "padded" if unpackable or any(values.get(key) is not None for key in LOSES_MASK) else "packed"

    def training(self, config: Config) -> Moment:
        assert not config.lora.rank or self.counts.frozen, "a run with --lora-rank needs its adapters on the model"
        return training_peak(self.trace(config), sharding(self.pieces(config), config))

    def trace(self, config: Config) -> Trace:
        """Of the fullest pack; layers are those of the model, one by one, where only some are recomputed."""
        model = config.model
        recipe = Recipe(
            seqlens=seqlens(config),
            layout=self.layout(config),
            attention=SEGMENTS,
            dtype=_dtype(config),
            chunk_size=model.logprob_chunk_size,
            checkpointing=model.gradient_checkpointing_kind if model.gradient_checkpointing else None,
            offload=model.offload_activations,
            lora=config.lora if config.lora.rank else None,
        )
        pieces = self.pieces(config)
        found = self._traced(recipe, pieces, trust_remote_code=model.trust_remote_code)
        every = model.gradient_checkpointing_every
        if every == 1 or not model.gradient_checkpointing:
            return found
        plain = self._traced(replace(recipe, checkpointing=None), pieces, trust_remote_code=model.trust_remote_code)
        return interleave(found, plain, every=every)

    def _traced(self, recipe: Recipe, pieces: Pieces, *, trust_remote_code: bool) -> Trace:
        """Of one rank. The trace of a layer depends on how it is split alone, and not on the number of shards, nor on
        how many ranks have other tokens of the same pack."""
        key = recipe, replace(pieces.grid, replicas=1, shards=1, context=1)
        if key not in self._traces:
            config = config_of_slice(self._model, pieces, trust_remote_code=trust_remote_code)
            whole = trace(config, recipe, trust_remote_code=trust_remote_code)
            tokens, itemsize = sum(recipe.seqlens), recipe.dtype.itemsize
            self._traces[key] = on_one_rank(whole, self._model, pieces, num_tokens=tokens, itemsize=itemsize)
        return self._traces[key]

    def pieces(self, config: Config) -> Pieces:
        grid = Grid.of(config, self.machine.num_gpus)
        if grid not in self._pieces:
            sizes = grid.tensor, grid.expert
            self._pieces[grid] = Pieces(self._model, grid, self._plans.get(sizes))
            self._plans[sizes] = self._pieces[grid].plan
        return self._pieces[grid]

    def generation(self, config: Config) -> Moment | None:
        """The embedded engine at its fullest: its weights beside the trainer's, and rows of full length. With
        --offload-train its weights beside the trainer's, or beside such rows.
        """
        if not config.generates or config.rollout.engine not in ("auto", "hf"):
            return None
        width, rows = cache_rows(config, self.machine.num_gpus)
        dtype = _dtype(config)
        if (width, dtype) not in self._caches:
            self._caches[width, dtype] = cache_bytes(
                self._model.config, num_tokens=width, dtype=dtype, trust_remote_code=config.model.trust_remote_code
            )
        numbers = 1 if config.optim.offload_optimizer else 3
        whole = self.counts.frozen if config.lora.rank else self.counts.total  # an adapter is merged
        gathered = self.pieces(config).gathered
        engine = {"the engine's weights": dtype.itemsize * whole}
        cache = {f"key-value cache of {rows} rows": rows * self._caches[width, dtype]}
        layers = {"gathered layers": dtype.itemsize * max(gathered.largest_layer, gathered.outside_layers)}
        pieces = self.pieces(config)
        if config.sync.offload_train:
            moments = ({"weights": _state(pieces, config, 1)} | engine | layers, engine | cache)
            return Moment("generation", max(moments, key=lambda parts: sum(parts.values())))
        return Moment(
            "generation", {"weights, gradients, Adam": _state(pieces, config, numbers)} | engine | cache | layers
        )

    def host(self, config: Config) -> tuple[Mapping[str, int], int]:
        """What the host of one node holds: its parts, and all with a margin."""
        demand = demand_of(config, self.pieces(config), self.counts, embedded_engine=False)
        supply = MemorySupply(_NO_LIMIT, _NO_LIMIT, self.machine.ranks_per_node, has_accelerator=True)
        parts = dict(load_memory_need(demand, supply).host_parts)
        if config.model.offload_activations:
            kept = sum(layer.count * layer.on_host for layer in self.trace(config).layers)
            parts["activations"] = self.machine.ranks_per_node * kept
        need = MemoryNeed({}, parts)
        return need.host_parts, need.host

    def fits(self, config: Config) -> int | None:
        """Bytes of the fullest moment, margin included; None where that is too much for GPU or host."""
        moments = (self.training(config), self.generation(config))
        device = max(with_margin(moment) for moment in moments if moment is not None)
        host = self.machine.host_memory
        too_much = device > self.machine.gpu_memory or (host is not None and self.host(config)[1] > host)
        return None if too_much else device


def sharding(pieces: Pieces, config: Config) -> Sharding:
    """Of a run of `config`."""
    outside = pieces.outside_layers
    return Sharding(
        outside=sum(piece.numel for piece in outside),
        outside_trained=sum(piece.numel for piece in outside if piece.trained),
        num_shards=pieces.grid.shards,
        compute_bytes=_dtype(config).itemsize,
        reshard_after_forward=config.fsdp.reshard_after_forward,
        prefetch=config.fsdp.prefetch,
        cpu_offload=config.fsdp.cpu_offload,
        state=_state(pieces, config, 2 if config.optim.offload_optimizer else 4),
    )


def _state(pieces: Pieces, config: Config, numbers: int) -> int:
    """Bytes on the device of a rank's shards: so many float32 `numbers` for each trained one, frozen ones once."""
    if config.fsdp.cpu_offload:
        return 0
    frozen_bytes = _dtype(config).itemsize if config.lora.rank else MASTER_BYTES
    return pieces.total(lambda piece: piece.most * (numbers * MASTER_BYTES if piece.trained else frozen_bytes))


def seqlens(config: Config, *, processes: int = 1) -> tuple[int, ...]:
    """The worst pack: full of the longest sequences that may come. Of one process: with --context-parallel-size it has
    a share of the tokens, and of the heads of whole sequences, which takes as much memory; the work is that of the pack
    of all `processes` that share it."""
    budget, longest = processes * config.batch.max_tokens_per_gpu, config.longest_sequence
    rest = budget % longest
    return (longest,) * (budget // longest) + ((rest,) if rest else ())


def cache_rows(config: Config, num_gpus: int) -> tuple[int, int]:
    """(tokens of a full row, rows at one time) of the embedded engine on one rank."""
    width = config.prompt_budget + config.rollout.max_response_len
    own = math.ceil(config.rollout.batch_size / num_gpus) * config.algorithm.n_samples_per_prompt
    return width, max(1, min(own, config.rollout.max_batch_tokens // width))


def _proposals(config: Config, machine: Machine, planner: Planner) -> Iterator[Proposal]:
    """At most three, fastest first; then more GPUs with the flags as given."""
    found: list[tuple[float, ...]] = []
    candidates = remedies.remedies(config, packs=_smaller_packs(config), caches=_smaller_caches(config, machine))
    for changed in candidates:
        if any(all(a <= b for a, b in zip(enough, changed.effort, strict=True)) for enough in found):
            continue  # less does it too
        device = planner.fits(changed.config) if planner.allows(changed.config) else None
        if device is None:
            continue
        yield Proposal(changed.flags, machine.num_gpus, device, planner.host(changed.config)[1])
        found.append(changed.effort)
        if len(found) == MOST_PROPOSALS:
            return
    for factor in (2, 4, 8, 16):
        larger = replace(machine, num_gpus=factor * machine.num_gpus)
        there = planner.on(larger)
        device = there.fits(config)
        if device is not None:
            yield Proposal((), larger.num_gpus, device, there.host(config)[1])
            return


def _smaller_packs(config: Config) -> list[int]:
    """Halves of the budget that still hold the longest sequence, or with no limit of prompts, one of like length."""
    context = config.parallel.context_parallel_size
    response = 1 if config.algorithm.algorithm == "sft" else config.rollout.max_response_len
    prompt = config.rollout.max_prompt_len
    least = 2 * response if prompt is None else prompt + response
    halves = [config.batch.max_tokens_per_gpu // factor for factor in (2, 4, 8)]
    return [tokens for tokens in halves if tokens * context >= max(least, 2)]


def _smaller_caches(config: Config, machine: Machine) -> list[int]:
    """Fewer rows at one time: half, a quarter and so on of what is used, down to one."""
    if not config.generates or config.rollout.engine not in ("auto", "hf"):
        return []
    width, rows = cache_rows(config, machine.num_gpus)
    halves = [rows // 2**i for i in range(1, rows.bit_length())]
    return [width * count for count in dict.fromkeys(halves) if count]


def _dtype(config: Config) -> torch.dtype:
    return getattr(torch, config.compute_dtype_name)
