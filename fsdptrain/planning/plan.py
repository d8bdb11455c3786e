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
from fsdptrain.errors import MemoryPlanError
from fsdptrain.fsdp.wrap import largest_shard
from fsdptrain.models.attention import SEGMENTS, register_attention
from fsdptrain.models.inputs import Layout
from fsdptrain.models.kernels import kernels
from fsdptrain.models.layout import LOSES_MASK
from fsdptrain.models.structure import ParameterCounts, count_parameters
from fsdptrain.planning.activations import Moment, Sharding, training_peak
from fsdptrain.planning.memory import DEVICE_MARGIN, GIB, MASTER_BYTES, MemoryDemand, MemorySupply, load_memory_need
from fsdptrain.planning.trace import Recipe, Trace, cache_bytes, trace

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
        for offload in ({}, {"cpu_offload": True})
        for checkpointing in ({}, {"checkpointing": True})
        for changed in [_change(config, {**offload, **checkpointing})]
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
        self._traces: dict[Recipe, Trace] = {}
        self._caches: dict[tuple[int, torch.dtype], int] = {}

    @cached_property
    def counts(self) -> ParameterCounts:
        return count_parameters(self._model)

    def on(self, machine: Machine) -> "Planner":
        """The same model and traces on another machine."""
        other = Planner(self._model, machine)
        other._traces, other._caches = self._traces, self._caches
        return other

    def layout(self, config: Config) -> Layout:
        """Without a probe: padded where a recurrent mixer lacks its kernels here, or a mask would be lost."""
        if config.model.layout != "auto":
            return config.model.layout
        found = kernels(self._model, device_type="cuda", compute_dtype=_dtype(config))
        values = self._model.config.get_text_config().to_dict()
        unpackable = any(k.part == "recurrent mixer" and k.fell_back for k in found)
        return "padded" if unpackable or any(values.get(key) is not None for key in LOSES_MASK) else "packed"

    def training(self, config: Config) -> Moment:
        if config.lora.rank:
            raise MemoryPlanError(
                "--lora-rank is not planned yet: an adapter needs less than the same run without it, leave it out"
            )
        recipe = Recipe(
            seqlens=seqlens(config),
            layout=self.layout(config),
            attention=SEGMENTS,
            dtype=_dtype(config),
            chunk_size=config.model.logprob_chunk_size,
            checkpointing=config.model.gradient_checkpointing,
        )
        if recipe not in self._traces:
            self._traces[recipe] = trace(self._model.config, recipe, trust_remote_code=config.model.trust_remote_code)
        return training_peak(self._traces[recipe], self._sharding(config))

    def generation(self, config: Config) -> Moment | None:
        """The embedded engine at its fullest: its weights beside the trainer's, and rows of full length."""
        if not config.generates or config.rollout.engine not in ("auto", "hf"):
            return None
        width, rows = cache_rows(config, self.machine.num_gpus)
        dtype = _dtype(config)
        if (width, dtype) not in self._caches:
            self._caches[width, dtype] = cache_bytes(
                self._model.config, num_tokens=width, dtype=dtype, trust_remote_code=config.model.trust_remote_code
            )
        state = 0 if config.fsdp.cpu_offload else 3 * MASTER_BYTES * self._shard(config)
        parts = {
            "weights, gradients, Adam": state,
            "the engine's weights": dtype.itemsize * self.counts.total,
            f"key-value cache of {rows} rows": rows * self._caches[width, dtype],
            "gathered layers": dtype.itemsize * max(self.counts.largest_layer, self.counts.outside_layers),
        }
        return Moment("generation", parts)

    def host(self, config: Config) -> tuple[Mapping[str, int], int]:
        """What the host of one node holds: its parts, and all with a margin."""
        demand = MemoryDemand(
            counts=self.counts,
            num_shards=self._num_shards(config),
            compute_bytes=_dtype(config).itemsize,
            cpu_offload=config.fsdp.cpu_offload,
            reshard_after_forward=config.fsdp.reshard_after_forward,
            reference=config.needs_reference,
            load_strategy=config.model.load_strategy,
        )
        supply = MemorySupply(
            *(self.machine.gpu_memory, self.machine.gpu_memory, _NO_LIMIT, _NO_LIMIT),
            ranks_per_node=self.machine.ranks_per_node,
            has_accelerator=True,
        )
        need = load_memory_need(demand, supply)
        return need.host_parts, need.host

    def fits(self, config: Config) -> int | None:
        """Bytes of the fullest moment, margin included; None where that is too much for GPU or host."""
        moments = (self.training(config), self.generation(config))
        device = max(with_margin(moment) for moment in moments if moment is not None)
        host = self.machine.host_memory
        too_much = device > self.machine.gpu_memory or (host is not None and self.host(config)[1] > host)
        return None if too_much else device

    def _sharding(self, config: Config) -> Sharding:
        return sharding(self._model, config, self.machine.num_gpus)

    def _num_shards(self, config: Config) -> int:
        return max(1, self.machine.num_gpus // config.fsdp.replicate_size)

    def _shard(self, config: Config) -> int:
        return sum(largest_shard(p, self._num_shards(config)) for p in self._model.parameters())


def sharding(model: PreTrainedModel, config: Config, num_gpus: int) -> Sharding:
    """Of a run of `config` over so many ranks."""
    num_shards = max(1, num_gpus // config.fsdp.replicate_size)
    shard = sum(largest_shard(p, num_shards) for p in model.parameters())
    return Sharding(
        outside=count_parameters(model).outside_layers,
        num_shards=num_shards,
        compute_bytes=_dtype(config).itemsize,
        reshard_after_forward=config.fsdp.reshard_after_forward,
        prefetch=config.fsdp.prefetch,
        cpu_offload=config.fsdp.cpu_offload,
        state=0 if config.fsdp.cpu_offload else 4 * MASTER_BYTES * shard,
    )


def seqlens(config: Config) -> tuple[int, ...]:
    """The worst pack: full of the longest sequences that may come."""
    budget = config.batch.max_tokens_per_gpu
    response = 1 if config.algorithm.algorithm == "sft" else config.rollout.max_response_len
    longest = min(budget, config.prompt_budget + response)
    rest = budget % longest
    return (longest,) * (budget // longest) + ((rest,) if rest else ())


def cache_rows(config: Config, num_gpus: int) -> tuple[int, int]:
    """(tokens of a full row, rows at one time) of the embedded engine on one rank."""
    width = config.prompt_budget + config.rollout.max_response_len
    own = math.ceil(config.rollout.batch_size / num_gpus) * config.algorithm.n_samples_per_prompt
    return width, max(1, min(own, config.rollout.max_batch_tokens // width))


@dataclass(frozen=True)
class _Changed:
    config: Config
    flags: tuple[str, ...]


def _proposals(config: Config, machine: Machine, planner: Planner) -> Iterator[Proposal]:
    """At most three, fastest first: a smaller cache and smaller packs cost little, checkpointing a forward pass more,
    offload a transfer of all weights and an optimizer step on the host; then more GPUs with the flags as given."""
    found: list[set[str]] = []
    for changed in _candidates(config, machine):
        names = {flag.split(" ")[0] for flag in changed.flags}
        if any(enough <= names for enough in found):
            continue  # less does it too
        device = planner.fits(changed.config)
        if device is None:
            continue
        yield Proposal(changed.flags, machine.num_gpus, device, planner.host(changed.config)[1])
        found.append(names)
        if len(found) == MOST_PROPOSALS:
            return
    for factor in (2, 4, 8, 16):
        larger = replace(machine, num_gpus=factor * machine.num_gpus)
        there = planner.on(larger)
        device = there.fits(config)
        if device is not None:
            yield Proposal((), larger.num_gpus, device, there.host(config)[1])
            return


def _candidates(config: Config, machine: Machine) -> Iterator[_Changed]:
    packs = [{}, *({"tokens": tokens} for tokens in _smaller_packs(config))]
    caches = [{}, *({"cache": tokens} for tokens in _smaller_caches(config, machine))]
    for offload in ({}, {"cpu_offload": True}):
        for checkpointing in ({}, {"checkpointing": True}):
            for pack in packs:
                for cache in caches:
                    yield _change(config, {**offload, **checkpointing, **pack, **cache})


def _change(config: Config, changes: Mapping[str, int]) -> _Changed:
    """`config` with what it does not have yet, and the flags of that."""
    flags: list[str] = []
    model, fsdp, batch, rollout = config.model, config.fsdp, config.batch, config.rollout
    if "cache" in changes:
        rollout = rollout.model_copy(update={"max_batch_tokens": changes["cache"]})
        flags.append(f"--rollout-max-batch-tokens {changes['cache']}")
    if "tokens" in changes:
        batch = batch.model_copy(update={"max_tokens_per_gpu": changes["tokens"]})
        flags.append(f"--max-tokens-per-gpu {changes['tokens']}")
    if "checkpointing" in changes and not model.gradient_checkpointing:
        model = model.model_copy(update={"gradient_checkpointing": True})
        flags.append("--gradient-checkpointing")
    if "cpu_offload" in changes and not fsdp.cpu_offload:
        fsdp = fsdp.model_copy(update={"cpu_offload": True})
        flags.append("--fsdp-cpu-offload")
    update = {"model": model, "fsdp": fsdp, "batch": batch, "rollout": rollout}
    return _Changed(config.model_copy(update=update), tuple(flags))


def _smaller_packs(config: Config) -> list[int]:
    """Halves of the budget that still hold the longest sequence, or with no limit of prompts, one of like length."""
    response = 1 if config.algorithm.algorithm == "sft" else config.rollout.max_response_len
    prompt = config.rollout.max_prompt_len
    least = 2 * response if prompt is None else prompt + response
    halves = [config.batch.max_tokens_per_gpu // factor for factor in (2, 4, 8)]
    return [tokens for tokens in halves if tokens >= max(least, 2)]


def _smaller_caches(config: Config, machine: Machine) -> list[int]:
    """Fewer rows at one time: half, a quarter and so on of what is used, down to one."""
    if not config.generates or config.rollout.engine not in ("auto", "hf"):
        return []
    width, rows = cache_rows(config, machine.num_gpus)
    halves = [rows // 2**i for i in range(1, rows.bit_length())]
    return [width * count for count in dict.fromkeys(halves) if count]


def _dtype(config: Config) -> torch.dtype:
    return getattr(torch, config.compute_dtype_name)
