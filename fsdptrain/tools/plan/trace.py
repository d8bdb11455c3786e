"""Trace the memory of a forward and a backward pass by running the model's code on fake tensors.

The trace runs one layer of each kind. It counts every tensor that an operation creates until its last reference is
gone, but not the weights. It uses no architecture-specific formulas, and it includes what attention and checkpointing
keep. A pack of 8192 tokens takes two seconds and no memory. Compiled layers are partitioned as inductor does it, which
takes some ten seconds, and computed by single operations: what they save is exact, what they need while they run an
upper bound.
"""

import copy
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import DynamicCache, PreTrainedConfig, PreTrainedModel

from fsdptrain.errors import MemoryPlanError
from fsdptrain.features.activation_memory.checkpointing import CheckpointingKind, enable_gradient_checkpointing
from fsdptrain.features.activation_memory.offload import enable_activation_offload
from fsdptrain.features.compile.feature import compile_layers
from fsdptrain.features.lora.adapters import add_adapters
from fsdptrain.features.lora.config import LoraConfig
from fsdptrain.fsdp.transfers import Transfers
from fsdptrain.model.architecture import model_from_config
from fsdptrain.model.layer_kinds import layer_kinds
from fsdptrain.model.loading.materialize import parameter_names, quiet_transformers, register
from fsdptrain.model.policy import MODEL_ERRORS, install_policy_forward, plain_batch, policy_logprobs
from fsdptrain.model.probes.random_copy import keep_one_of_each_kind
from fsdptrain.model.rows import Layout

_CPU = torch.device("cpu")


@dataclass(frozen=True)
class TraceSpec:
    """Settings that determine how a pack is computed."""

    seqlens: tuple[int, ...]  # of the sequences in the pack
    layout: Layout
    attention: str
    dtype: torch.dtype
    chunk_size: int  # for logprobs
    checkpointing: CheckpointingKind | None  # for every layer
    offload: bool = False  # of activations
    lora: LoraConfig | None = field(default=None, hash=False)  # train only an adapter
    compiled: float | None = None  # memory budget of compiled layers; None: not compiled


@dataclass(frozen=True)
class LayerTrace:
    """Memory of one layer of a kind. [bytes] Peaks are relative to the memory when its pass starts."""

    numel: int  # parameters
    count: int  # layers of this kind
    saved: int  # from the end of the forward to the backward, output included
    forward_peak: int
    backward_peak: int  # weight gradients included
    input_bytes: int  # of the hidden states
    trained: int  # trainable parameters
    on_host: int = 0  # saved on the host


@dataclass(frozen=True)
class Trace:
    """Memory of one pack on one rank. [bytes]"""

    before: int  # embedded tokens, rotary tables, masks
    layers: tuple[LayerTrace, ...]
    head_saved: int  # by the last norm and the logprobs
    head_forward_peak: int  # relative to the memory after the last layer
    head_backward_peak: int  # relative to the memory at the start of the backward pass
    head_gradients: int  # gradients of the head weights, less what the head's backward freed
    end_peak: int  # during the embedding gradient, relative to the memory before it


class MemoryTracker(TorchDispatchMode):
    """Count the bytes of live tensors that were created while the mode was active."""

    def __init__(self) -> None:
        super().__init__()
        self.live = 0
        self.peak = 0
        self.on_host = 0  # bytes of live `host_buffer` tensors; not part of `live`
        self._sizes: dict[int, int] = {}
        self._making_host_buffer = False

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def host_buffer(self, num_bytes: int) -> Tensor:
        """Create a [num_bytes] uint8 tensor that counts as host memory."""
        self._making_host_buffer = True
        try:
            return torch.empty(num_bytes, dtype=torch.uint8)
        finally:
            self._making_host_buffer = False

    def ignore(self, tensors: Sequence[Tensor]) -> None:
        """Exclude existing tensors. The caller must keep them alive."""
        for tensor in tensors:
            self._sizes[tensor.untyped_storage()._cdata] = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        grouped = func is torch.ops.aten._grouped_mm.default and args[0].dtype != torch.bfloat16
        out = _grouped_mm(*args) if grouped else func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor):
                self._count(tensor.untyped_storage())
        self.peak = max(self.peak, self.live)
        return out

    def take_peak(self) -> int:
        """Return the peak since the last call."""
        peak, self.peak = self.peak, self.live
        return peak

    def _count(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key not in self._sizes:
            self._sizes[key] = storage.nbytes()
            self._add(storage.nbytes(), self._making_host_buffer)
            weakref.finalize(storage, self._drop, key, self._making_host_buffer)

    def _drop(self, key: int, on_host: bool) -> None:
        self._add(-self._sizes.pop(key), on_host)

    def _add(self, num_bytes: int, on_host: bool) -> None:
        if on_host:
            self.on_host += num_bytes
        else:
            self.live += num_bytes


def trace(config: PreTrainedConfig, spec: TraceSpec, *, trust_remote_code: bool = False) -> Trace:
    """Trace one forward and backward pass of a pack.

    Raises MemoryPlanError if the model cannot run on fake tensors.
    """
    mode = FakeTensorMode()
    model, kinds = _fake_model(config, spec.dtype, spec.attention, mode, trust_remote_code, spec.lora)
    tracker = MemoryTracker()
    if spec.compiled is not None:
        compile_layers(model, backend="aot_eager_decomp_partition", memory_budget=spec.compiled)
    if spec.checkpointing is not None:
        enable_gradient_checkpointing(model, kind=spec.checkpointing)
    if spec.offload:  # tensors of a layer move to the host when it ends and return when its backward starts
        enable_activation_offload(model, Transfers(_CPU), ahead=0, host_buffer=tracker.host_buffer)
    install_policy_forward(model, chunk_size=spec.chunk_size)
    batch = plain_batch([[1] * length for length in spec.seqlens], device=_CPU)._map(mode.from_tensor)
    tracker.ignore([*model.parameters(), *model.buffers(), *(x for x in vars(batch).values() if isinstance(x, Tensor))])
    spans = _Spans(tracker, [layer for layer, _ in kinds])
    # families share functions, which are compiled for each traced model
    compiling = nullcontext() if spec.compiled is None else torch._dynamo.config.patch(recompile_limit=256)
    with mode, tracker, compiling, _capture_trace_errors(model):
        logprobs = policy_logprobs(model, batch, layout=spec.layout, with_entropy=True)
        head_saved, head_forward_peak = spans.close_forward()
        (logprobs.values * batch.loss_weights).sum().backward()
        end_peak = spans.close_backward()
    return Trace(
        before=spans.before,
        layers=tuple(spans.of_layer(i, layer, count) for i, (layer, count) in enumerate(kinds)),
        head_saved=head_saved,
        head_forward_peak=head_forward_peak,
        head_backward_peak=spans.head_backward_peak,
        head_gradients=spans.head_gradients,
        end_peak=end_peak,
    )


def interleave(recomputed: Trace, plain: Trace, *, every: int) -> Trace:
    """Combine two traces into that of a model that recomputes every n-th layer, starting with the first."""
    pairs = [pair for pair in zip(recomputed.layers, plain.layers, strict=True) for _ in range(pair[0].count)]
    layers = (pair[0] if i % every == 0 else pair[1] for i, pair in enumerate(pairs))
    return replace(plain, layers=tuple(replace(layer, count=1) for layer in layers))


def cache_bytes(
    config: PreTrainedConfig, *, num_tokens: int, dtype: torch.dtype, trust_remote_code: bool = False
) -> int:
    """Return the bytes of the key-value cache and recurrent states of one row in the embedded engine."""
    mode = FakeTensorMode()
    model, kinds = _fake_model(config, dtype, "eager", mode, trust_remote_code)
    cache = DynamicCache(config=model.config.get_text_config(decoder=True))
    with mode, MemoryTracker(), torch.no_grad(), _capture_trace_errors(model):
        ids = torch.ones((1, num_tokens), dtype=torch.int64)
        model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
    per_layer = [_bytes_of(layer) for layer in cache.layers]
    return sum(size * count for size, (_, count) in zip(per_layer, kinds, strict=True))


def _fake_model(
    config: PreTrainedConfig,
    dtype: torch.dtype,
    attention: str,
    mode: FakeTensorMode,
    trust_remote_code: bool,
    lora: LoraConfig | None = None,
) -> tuple[PreTrainedModel, list[tuple[nn.Module, int]]]:
    """Build a fake model with one layer of each kind and weights in `dtype`.

    Returns the model, and its text layers with the number of layers of each kind.
    """
    small = copy.deepcopy(config)
    with torch.device("meta"), quiet_transformers():
        model = model_from_config(
            small, dtype=torch.float32, attn_implementation=attention, trust_remote_code=trust_remote_code
        )
    if lora is not None:
        add_adapters(model, lora)
    text = [(kind.layer, len(kind.indices)) for kind in layer_kinds(model) if kind.of_text]
    keep_one_of_each_kind(model)
    with mode:
        for names in parameter_names(model):
            stock = model.get_parameter(names[0])
            fake = nn.Parameter(torch.empty(stock.shape, dtype=dtype), requires_grad=stock.requires_grad)
            register(model, names, fake)
        for name, buffer in list(model.named_buffers()):
            register(model, [name], torch.empty(buffer.shape, dtype=buffer.dtype))
    for place, (layer, _) in enumerate(text):
        for module in layer.modules():
            if "layer_idx" in vars(module):
                vars(module)["layer_idx"] = place  # index of its cache entry
    return model, text


def _grouped_mm(a: Tensor, b: Tensor, offsets: Tensor, *_: Any) -> Tensor:
    """Return a tensor of the output shape.

    The fake kernel of torch accepts bfloat16 only; the real kernels accept more dtypes.
    """
    if a.dim() == 2 and b.dim() == 2:  # weight gradient
        return a.new_empty((offsets.shape[0], a.shape[0], b.shape[1]))
    return a.new_empty((a.shape[0], b.shape[-1]))


@contextmanager
def _capture_trace_errors(model: PreTrainedModel) -> Iterator[None]:
    """Raise MemoryPlanError if the model cannot run on fake tensors.

    Some models read tensor values, for example to see which expert got a token.
    """
    try:
        yield
    except MODEL_ERRORS as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise MemoryPlanError(f"the activations of {type(model).__name__} cannot be planned: {reason}") from error


@dataclass
class _Span:
    """Memory measured at the start and the end of one layer. [bytes] `input` is a weak reference."""

    begin: int = 0
    end: int = 0
    forward_peak: int = 0
    backward_peak: int = 0
    input_bytes: int = 0
    input: Callable[[], torch.UntypedStorage | None] = lambda: None  # None: freed
    host_begin: int = 0
    host_end: int = 0


class _Spans:
    """Hooks that record memory where a layer starts and ends, in the forward and the backward pass."""

    def __init__(self, tracker: MemoryTracker, layers: Sequence[nn.Module]) -> None:
        self._tracker = tracker
        self._spans = [_Span() for _ in layers]
        self._backward_begin = 0
        self.before = 0
        self.head_backward_peak = 0
        self.head_gradients = 0
        for i, layer in enumerate(layers):
            layer.register_forward_pre_hook(lambda _, args, kwargs, i=i: self._enter(i, args, kwargs), with_kwargs=True)
            layer.register_forward_hook(lambda _, args, out, i=i: self._exit(i, out))

    def of_layer(self, i: int, layer: nn.Module, count: int) -> LayerTrace:
        span = self._spans[i]
        return LayerTrace(
            numel=sum(p.numel() for p in layer.parameters()),
            count=count,
            saved=span.end - span.begin,
            forward_peak=span.forward_peak,
            backward_peak=span.backward_peak,
            input_bytes=span.input_bytes,
            trained=sum(p.numel() for p in layer.parameters() if p.requires_grad),
            on_host=span.host_end - span.host_begin,
        )

    def close_forward(self) -> tuple[int, int]:
        """Return (bytes saved by the operations after the layers, their peak)."""
        gone = [span.input_bytes if span.input() is None else 0 for span in self._spans]
        held_until_now = {0, len(gone) - 1}  # the model itself holds the embeddings and the input of its last layer
        after_layers = self._spans[-1].end - sum(gone[i] for i in held_until_now)
        for span, size in zip(self._spans, gone, strict=True):  # alive at the end of the layer, but not saved
            span.end -= size
        saved = self._tracker.live - after_layers
        peak = self._tracker.take_peak() - after_layers
        self._backward_begin = self._tracker.live
        return saved, peak

    def close_backward(self) -> int:
        if self._at >= 0:  # no trainable parameters below: the backward pass ended in this layer
            self._backward_of(self._at - 1)
        return self._tracker.take_peak() - self._last

    def _enter(self, i: int, args: tuple, kwargs: dict) -> None:
        hidden = args[0] if args else kwargs["hidden_states"]
        self._tracker.take_peak()
        span = self._spans[i]
        span.begin, span.host_begin = self._tracker.live, self._tracker.on_host
        span.input, span.input_bytes = weakref.ref(hidden.untyped_storage()), hidden.nbytes
        if i == 0:
            self.before = self._tracker.live
            self._register_backward(hidden, -1)

    def _exit(self, i: int, out: Any) -> None:
        hidden = out[0] if isinstance(out, tuple) else out
        span = self._spans[i]
        span.end, span.host_end = self._tracker.live, self._tracker.on_host
        span.forward_peak = self._tracker.take_peak() - span.begin
        self._register_backward(hidden, i)

    def _register_backward(self, hidden: Tensor, i: int) -> None:
        if hidden.requires_grad:
            hidden.register_hook(lambda _: self._backward_of(i))

    def _backward_of(self, i: int) -> None:
        """Record the backward peak of the layer after `i`, when the gradient of the output of layer `i` is ready."""
        peak = self._tracker.take_peak()
        if i == len(self._spans) - 1:
            self.head_backward_peak = peak - self._backward_begin
            self.head_gradients = self._tracker.live - self._backward_begin
        else:
            self._spans[i + 1].backward_peak = peak - self._last
        self._last = self._tracker.live
        self._at = i


def _bytes_of(layer: Any) -> int:
    """Sum the bytes of the distinct tensors in a cache layer."""
    held = [value for value in vars(layer).values() if value is not None]
    tensors = {id(x): x for x in tree_leaves(held) if isinstance(x, Tensor)}
    return sum(x.numel() * x.element_size() for x in tensors.values())
