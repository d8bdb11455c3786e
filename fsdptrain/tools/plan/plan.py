"""Plan the memory of a run before it starts: bytes per GPU and per host, and flags that make the run fit.

    found = make_plan(model, config, Machine(num_gpus=8, gpu_memory=80 * GIB))
    found.fits, found.training.total, [proposal.flags for proposal in found.proposals]

The plan uses exact parameter counts, a trace of a pack of --max-tokens-per-gpu tokens with the longest sequences that
the configuration allows, and the full cache of the embedded engine. It needs only config.json.
"""

import copy
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from transformers import PreTrainedModel

from fsdptrain.config import Config
from fsdptrain.config.model import LEAST_CHUNK
from fsdptrain.errors import ConfigError
from fsdptrain.features.activation_memory.checkpointing import check_selective
from fsdptrain.features.activation_memory.config import ActivationMemoryConfig
from fsdptrain.features.compile.config import CompileConfig
from fsdptrain.features.fused_logprobs.feature import is_replaced
from fsdptrain.features.lora.config import LoraConfig
from fsdptrain.features.model_parallel.plan import SplitPlan
from fsdptrain.features.quantized_base.config import QuantizedBaseConfig
from fsdptrain.features.quantized_base.feature import quantizable_layers
from fsdptrain.memory.demand import (
    GIB,
    MARGIN,
    MemoryNeed,
    MemorySupply,
    Shard,
    compute_bytes,
    dequantized,
    generation_need,
    memory_need,
    sections_memory,
    shard_state,
)
from fsdptrain.memory.grid import Grid
from fsdptrain.memory.pieces import Pieces
from fsdptrain.model.attention.attention import SEGMENTS, register_attention
from fsdptrain.model.probes.kernels import kernels
from fsdptrain.model.probes.layout import LOSES_MASK
from fsdptrain.model.rows import Layout
from fsdptrain.model.structure import ParameterCounts, count_parameters
from fsdptrain.tools.plan import remedies
from fsdptrain.tools.plan.activations import MemoryPeak, Sharding, training_peak
from fsdptrain.tools.plan.slices import config_of_slice, on_one_rank
from fsdptrain.tools.plan.trace import Trace, TraceSpec, cache_bytes, interleave, trace

GPUS_PER_NODE = 8
MAX_PROPOSALS = 3
USED = 0.9  # of the free memory that larger chunks and kept layers may fill


@dataclass(frozen=True)
class Machine:
    num_gpus: int
    gpu_memory: int  # bytes per GPU
    host_memory: int | None = None  # bytes per node; None: not checked

    @classmethod
    def of_gib(cls, *, num_gpus: int, gpu_memory_gib: float, host_memory_gib: float | None) -> "Machine":
        host = None if host_memory_gib is None else int(host_memory_gib * GIB)
        return cls(num_gpus, int(gpu_memory_gib * GIB), host)

    @property
    def ranks_per_node(self) -> int:
        return min(self.num_gpus, GPUS_PER_NODE)


@dataclass(frozen=True)
class Proposal:
    """Flags to add to the command so that the run fits."""

    flags: tuple[str, ...]
    num_gpus: int
    device: int  # peak bytes per GPU, margin included
    host: int  # bytes per node, margin included


@dataclass(frozen=True)
class Plan:
    """A memory plan. [bytes] Device sizes are per rank; host sizes are for all ranks of a node."""

    model_class: str
    counts: ParameterCounts
    machine: Machine
    layout: Layout
    seqlens: tuple[int, ...]  # of the traced pack
    chunk_size: int  # of the logprobs [tokens]
    reshards: bool  # whether layers are freed after their forward pass
    training: MemoryPeak
    generation: MemoryPeak | None  # None: an engine with its own devices, or no generation
    host_parts: Mapping[str, int]
    host: int  # margin included
    choices: Mapping[str, int]  # training peak, margin included, for each set of memory flags
    proposals: tuple[Proposal, ...]

    @property
    def device(self) -> int:
        """Peak bytes per GPU, margin included."""
        return max(with_margin(peak) for peak in (self.training, self.generation) if peak is not None)

    @property
    def fits(self) -> bool:
        host = self.machine.host_memory
        return self.device <= self.machine.gpu_memory and (host is None or self.host <= host)


def with_margin(peak: MemoryPeak) -> int:
    return math.ceil(MARGIN * peak.total)


def make_plan(model: PreTrainedModel, config: Config, machine: Machine) -> Plan:
    """Plan the memory of a run. `model` is on meta, as the run builds it.

    Raises MemoryPlanError if its activations cannot be traced, ConfigError if a run would reject the model.
    """
    if config.section(QuantizedBaseConfig).enabled:
        quantizable_layers(model)
    planner = Planner(model, machine)
    config = planner.choose_sizes(config, machine.gpu_memory)
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
        chunk_size=config.model.chunk_size,
        reshards=bool(config.fsdp.reshard_after_forward),
        training=training,
        generation=generation,
        host_parts=host_parts,
        host=host,
        choices=choices,
        proposals=(),
    )
    return found if found.fits else replace(found, proposals=tuple(_proposals(config, machine, planner)))


class Planner:
    """Computes memory demands and caches traces, because most candidates share them."""

    def __init__(self, model: PreTrainedModel, machine: Machine, *, auto_engine: str = "hf") -> None:
        """auto_engine: which engine --rollout-engine auto means."""
        register_attention()
        self._model = model
        self.machine = machine
        self._auto_engine = auto_engine
        self._traces: dict[tuple[TraceSpec, Grid], Trace] = {}
        self._pieces: dict[Grid, Pieces] = {}
        self._plans: dict[tuple[int, int], SplitPlan] = {}  # keyed by (tensor ranks, expert ranks)
        self._caches: dict[tuple[int, torch.dtype], int] = {}
        self._selective: bool | None = None  # None: not checked yet

    @cached_property
    def counts(self) -> ParameterCounts:
        return count_parameters(self._model)

    def forget_compiled(self) -> None:
        """Drop what traces have compiled, which would count toward torch's limits for the layers of a run."""
        torch._dynamo.reset()

    def on(self, machine: Machine) -> "Planner":
        """Return a planner for the same model and traces on another machine."""
        other = copy.copy(self)
        other.machine = machine
        return other

    def allows(self, config: Config) -> bool:
        """Return whether the code of the model supports the checkpointing of `config`."""
        if not config.section(ActivationMemoryConfig).is_selective:
            return True
        if self._selective is None:
            try:
                check_selective(self._model.config, trust_remote_code=config.model.trust_remote_code)
                self._selective = True
            except ConfigError:
                self._selective = False
        return self._selective

    def layout(self, config: Config) -> Layout:
        """Return the layout of packs, without running the probe.

        The layout is padded if a recurrent mixer lacks its kernels on this machine, or if packing would lose an
        attention mask.
        """
        if config.model.layout != "auto":
            return config.model.layout
        found = kernels(self._model, device_type="cuda", compute_dtype=_dtype(config))
        values = self._model.config.get_text_config().to_dict()
        unpackable = any(k.part == "recurrent mixer" and k.fell_back for k in found)
        return "padded" if unpackable or any(values.get(key) is not None for key in LOSES_MASK) else "packed"

    def training(self, config: Config) -> MemoryPeak:
        has_adapters = self.counts.frozen > 0
        assert has_adapters or not config.section(LoraConfig).enabled, "a run with --lora-rank needs its adapters"
        return training_peak(self.trace(config), self.sharding(config))

    def trace(self, config: Config) -> Trace:
        """Trace the fullest pack. If only some layers are recomputed, the trace lists every layer separately."""
        model, memory, lora = config.model, config.section(ActivationMemoryConfig), config.section(LoraConfig)
        compiled = config.section(CompileConfig)
        spec = TraceSpec(
            seqlens=seqlens(config),
            layout=self.layout(config),
            attention=SEGMENTS,
            dtype=_dtype(config),
            chunk_size=model.chunk_size,
            checkpointing=memory.gradient_checkpointing_kind if memory.gradient_checkpointing else None,
            offload=memory.offload_activations,
            lora=lora if lora.enabled else None,
            compiled=compiled.activation_memory_budget if compiled.compile else None,
        )
        pieces = self.pieces(config)
        found = self._traced(spec, pieces, trust_remote_code=model.trust_remote_code)
        every = memory.gradient_checkpointing_every
        if every == 1 or not memory.gradient_checkpointing:
            return found
        plain = self._traced(replace(spec, checkpointing=None), pieces, trust_remote_code=model.trust_remote_code)
        return interleave(found, plain, every=every)

    def _traced(self, spec: TraceSpec, pieces: Pieces, *, trust_remote_code: bool) -> Trace:
        """Trace the computation of one rank, or return the cached trace.

        The trace of a layer depends only on how tensor and expert parallelism split it. It does not depend on the
        number of shards or context-parallel ranks.
        """
        key = spec, replace(pieces.grid, replicas=1, shards=1, context=1)
        if key not in self._traces:
            config = config_of_slice(self._model, pieces, trust_remote_code=trust_remote_code)
            whole = trace(config, spec, trust_remote_code=trust_remote_code)
            tokens, itemsize = sum(spec.seqlens), spec.dtype.itemsize
            self._traces[key] = on_one_rank(whole, self._model, pieces, num_tokens=tokens, itemsize=itemsize)
        return self._traces[key]

    def pieces(self, config: Config) -> Pieces:
        grid = Grid.of(config, self.machine.num_gpus)
        if grid not in self._pieces:
            sizes = grid.tensor, grid.expert
            self._pieces[grid] = Pieces(self._model, grid, self._plans.get(sizes))
            self._plans[sizes] = self._pieces[grid].plan
        return self._pieces[grid]

    def shard(self, config: Config) -> Shard:
        """Return the sizes of the largest shard."""
        pieces = self.pieces(config)
        trained = pieces.total(lambda piece: piece.trained * piece.largest_shard)
        frozen = pieces.total(lambda piece: (not piece.trained) * piece.largest_shard)
        return Shard(self.counts, pieces.grid.shards, trained, frozen, pieces.gathered)

    def choose_sizes(self, config: Config, free: int) -> Config:
        """Replace `auto` by the largest chunk of logprobs that fits in `free` bytes, then by kept layers if they fit.

        With --deterministic-mode nothing depends on `free`. The chunk is the smallest where the passes over its logits
        are not done a few rows at a time. Raises MemoryPlanError if the activations cannot be traced.
        """
        found = config.with_values(
            logprob_chunk_size=config.model.chunk_size,
            fsdp_reshard_after_forward=bool(config.fsdp.reshard_after_forward),
        )
        if config.model.deterministic_mode:
            return found
        trace, limit = self.trace(found), USED * free
        row = compute_bytes(config) * self._model.config.get_text_config().vocab_size

        def fits(changed: Config) -> bool:
            more = row * (min(changed.model.chunk_size, tokens) - min(found.model.chunk_size, tokens))
            larger = replace(
                trace,
                head_saved=trace.head_saved + more,
                head_forward_peak=trace.head_forward_peak + more,
                head_gradients=trace.head_gradients - more,  # less what the head's backward frees
            )
            return with_margin(training_peak(larger, self.sharding(changed))) <= limit

        tokens = sum(seqlens(config))
        chosen = found
        in_blocks = config.ranks_along("tensor") == 1 and not is_replaced()
        if config.model.logprob_chunk_size == "auto" and in_blocks:
            sizes = [tokens, *(size for size in (16384, 8192, 4096, 2048, 1024) if size < tokens)]
            larger = (found.with_values(logprob_chunk_size=size) for size in sizes if size > LEAST_CHUNK)
            chosen = next((changed for changed in larger if fits(changed)), found)
        if config.fsdp.reshard_after_forward == "auto":
            kept = chosen.with_values(fsdp_reshard_after_forward=False)
            chosen = kept if fits(kept) else chosen
        return chosen

    def sharding(self, config: Config) -> Sharding:
        """Collect the sharding of a run of `config`."""
        outside = self.pieces(config).outside_layers
        return Sharding(
            outside=sum(piece.numel for piece in outside),
            outside_trained=sum(piece.numel for piece in outside if piece.trained),
            num_shards=self.pieces(config).grid.shards,
            compute_bytes=compute_bytes(config),
            reshard_after_forward=bool(config.fsdp.reshard_after_forward),
            prefetch=config.fsdp.prefetch,
            cpu_offload=config.fsdp.cpu_offload,
            layer_bytes=config.frozen_weight_bytes or compute_bytes(config),
            state=shard_state(config, self.shard(config))[0]
            | dequantized(config, self.counts.largest_layer)
            | sections_memory(config)[0],
        )

    def _is_embedded(self, config: Config) -> bool:
        engine = self._auto_engine if config.rollout.engine == "auto" else config.rollout.engine
        return config.generates and engine == "hf"

    def generation(self, config: Config) -> MemoryPeak | None:
        """Return the peak while an engine in the trainer's process generates. None if there is no such engine.

        It holds the trainer's state, the engine's weights and a cache: of a full batch of rows in the embedded engine,
        of the size that the options give other engines. Without such an option these take what is left.
        """
        if not config.generates or config.engine_has_own_devices:
            return None
        is_embedded = self._is_embedded(config)
        cache = self._embedded_cache(config) if is_embedded else _given_cache(config)
        return MemoryPeak("generation", generation_need(config, self.shard(config), cache, is_embedded=is_embedded))

    def _embedded_cache(self, config: Config) -> dict[str, int]:
        width, rows = cache_rows(config, self.machine.num_gpus)
        dtype = _dtype(config)
        if (width, dtype) not in self._caches:
            self._caches[width, dtype] = cache_bytes(
                self._model.config, num_tokens=width, dtype=dtype, trust_remote_code=config.model.trust_remote_code
            )
        return {f"key-value cache of {rows} rows": rows * self._caches[width, dtype]}

    def smaller_caches(self, config: Config) -> list[int]:
        """Return smaller caches of the embedded engine in tokens: half of the rows in use, a quarter, ..., one row."""
        if not self._is_embedded(config):
            return []
        width, rows = cache_rows(config, self.machine.num_gpus)
        halves = [rows // 2**i for i in range(1, rows.bit_length())]
        return [width * count for count in dict.fromkeys(halves) if count]

    def host(self, config: Config) -> tuple[Mapping[str, int], int]:
        """Return the host memory of one node: bytes by part, and the total with margin."""
        ranks = self.machine.ranks_per_node
        supply = MemorySupply(device_free=0, host_free=0, ranks_per_node=ranks, has_accelerator=True)
        parts = dict(memory_need(config, self.shard(config), supply).host_parts)
        if config.section(ActivationMemoryConfig).offload_activations:
            parts["activations"] = ranks * sum(layer.count * layer.on_host for layer in self.trace(config).layers)
        return parts, MemoryNeed({}, parts).host

    def fits(self, config: Config) -> int | None:
        """Return the peak bytes per GPU, margin included. None if the GPU or host memory is exceeded."""
        peaks = (self.training(config), self.generation(config))
        device = max(with_margin(peak) for peak in peaks if peak is not None)
        host = self.machine.host_memory
        too_much = device > self.machine.gpu_memory or (host is not None and self.host(config)[1] > host)
        return None if too_much else device


def seqlens(config: Config, *, processes: int = 1) -> tuple[int, ...]:
    """Return the sequence lengths of the worst pack: filled with the longest sequences that may occur.

    The pack is that of one process. With --context-parallel-size, a process holds a share of the tokens, then of the
    heads of whole sequences, which takes as much memory. Pass `processes` to get the pack that they compute together.
    """
    budget, longest = processes * config.batch.max_tokens_per_gpu, config.longest_sequence
    rest = budget % longest
    return (longest,) * (budget // longest) + ((rest,) if rest else ())


def cache_rows(config: Config, num_gpus: int) -> tuple[int, int]:
    """Return (tokens of a full row, concurrent rows) of the embedded engine on one rank."""
    width = config.prompt_budget + config.rollout.max_response_len
    own = math.ceil(config.rollout.batch_size / num_gpus) * config.algorithm.n_samples_per_prompt
    return width, max(1, min(own, config.rollout.max_batch_tokens // width))


def _proposals(config: Config, machine: Machine, planner: Planner) -> Iterator[Proposal]:
    """Yield up to three proposals, fastest first.

    If fewer than three fit, the last one has more GPUs and the given flags.
    """
    found: list[tuple[float, ...]] = []
    candidates = remedies.remedies(config, packs=smaller_packs(config), caches=planner.smaller_caches(config))
    for changed in candidates:
        if any(all(a <= b for a, b in zip(enough, changed.cost, strict=True)) for enough in found):
            continue  # a cheaper remedy fits already
        device = planner.fits(changed.config) if planner.allows(changed.config) else None
        if device is None:
            continue
        yield Proposal(changed.flags, machine.num_gpus, device, planner.host(changed.config)[1])
        found.append(changed.cost)
        if len(found) == MAX_PROPOSALS:
            return
    for factor in (2, 4, 8, 16):
        larger = replace(machine, num_gpus=factor * machine.num_gpus)
        there = planner.on(larger)
        device = there.fits(config)
        if device is not None:
            yield Proposal((), larger.num_gpus, device, there.host(config)[1])
            return


def smaller_packs(config: Config) -> list[int]:
    """Return halvings of the token budget that still hold the longest sequence.

    Without --rollout-max-prompt-len, the prompt is assumed to be as long as the response.
    """
    response = 1 if config.algorithm.algorithm == "sft" else config.rollout.max_response_len
    prompt = config.rollout.max_prompt_len
    least = 2 * response if prompt is None else prompt + response
    halves = [config.batch.max_tokens_per_gpu // factor for factor in (2, 4, 8)]
    return [tokens for tokens in halves if tokens * config.token_ranks >= max(least, 2)]


def _given_cache(config: Config) -> dict[str, int]:
    size = sum(section.engine_cache for section in config.sections)
    return {"key-value cache of the engine": size} if size else {}


def _dtype(config: Config) -> torch.dtype:
    return getattr(torch, config.compute_dtype_name)
