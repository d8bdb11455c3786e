"""Compute each CUDA operation on the CPU, in the memory of the null GPU.

torch's own CUDA code runs first. It checks inputs, selects a kernel, allocates memory and launches the kernel, which
does nothing. Then the CPU computes the same operation on tensors that share the memory of the device tensors. Attention
kernels, which a CPU lacks, are computed by their definition.
"""

from collections.abc import Callable, Iterable
from contextlib import contextmanager
from ctypes import CDLL
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

CPU = torch.device("cpu")
# Collectives copy on the null GPU itself; the profiler computes nothing.
_HOST_NAMESPACES = {"c10d", "_c10d_functional", "c10d_functional", "profiler"}
# These allocate, or change sizes and owners, but no values. The last one is a copy to the host and selects a kernel.
_NO_VALUES = {
    *("empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided", "set_", "resize_", "resize_as_"),
    *("record_stream", "pin_memory", "_pin_memory", "is_pinned", "lift_fresh", "_local_scalar_dense"),
    "_fused_sdp_choice",
}
# The size of the result depends on values, which torch's CUDA code would read from the device before they exist.
_SIZE_FROM_VALUES = {
    *("nonzero", "masked_select", "_unique2", "unique_dim", "unique_consecutive", "bincount", "repeat_interleave"),
}
_BY_MASK = {"index", "index_put", "index_put_", "_index_put_impl_"}


def on_host(value: Any) -> Any:
    """Return a CPU tensor in the memory of a device tensor, and the CPU for a device. Other values are unchanged."""
    if isinstance(value, torch.device):
        return CPU
    if not isinstance(value, Tensor) or value.device.type != "cuda":
        return value
    storage = value.untyped_storage()
    size = storage.nbytes()
    if not size:
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype)
    memory = torch._C._construct_storage_from_data_pointer(storage.data_ptr(), CPU, size)
    empty = torch.empty(0, dtype=value.dtype)
    return empty.set_(memory, value.storage_offset(), value.shape, value.stride())


def _on_device(value: Any, device: torch.device) -> Any:
    if not isinstance(value, Tensor):
        return value
    moved = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device)
    on_host(moved).copy_(value)
    return moved


class Emulation(TorchDispatchMode):
    """Computes CUDA operations within the context."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(issubclass(kind, (DTensor, AsyncCollectiveTensor)) for kind in types):
            return NotImplemented  # they call again with their local tensors
        device = _device_of(args, kwargs)
        if device is None or func.namespace in _HOST_NAMESPACES:
            return func(*args, **kwargs)
        if torch.is_inference_mode_enabled():  # then composite operations arrive whole
            with self:
                found = func.decompose(*args, **kwargs)
            if found is not NotImplemented:
                return found
        name = func._schema.name.partition("::")[2]
        if name in _NO_VALUES or func.is_view:
            return func(*args, **kwargs)
        host_args, host_kwargs = tree_map(on_host, args), _host_options(tree_map(on_host, kwargs))
        if name in _SIZE_FROM_VALUES or (name in _BY_MASK and _has_mask(args[1])):
            found = func(*host_args, **host_kwargs)
            return args[0] if func._schema.is_mutable else tree_map(lambda x: _on_device(x, device), found)
        with _same_random_numbers(func, device):
            out = func(*args, **kwargs)
            found = _special(name)(func, host_args, host_kwargs)
        if func._schema.is_mutable:
            return out
        for ours, theirs in zip(tree_leaves(out), tree_leaves(found), strict=False):
            if isinstance(ours, Tensor) and isinstance(theirs, Tensor):
                on_host(ours).copy_(theirs)
        return out if any(isinstance(x, Tensor) for x in tree_leaves(out)) else found


def _device_of(args: Any, kwargs: Any) -> torch.device | None:
    """Return the CUDA device that an operation reads, writes or creates tensors on."""
    leaves = tree_leaves((args, kwargs))
    devices = (x.device if isinstance(x, Tensor) else x for x in leaves if isinstance(x, (Tensor, torch.device)))
    return next((device for device in devices if device.type == "cuda"), None)


def _host_options(kwargs: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in kwargs.items() if name not in ("generator", "pin_memory")}


def _has_mask(indices: Iterable[Tensor | None]) -> bool:
    return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in indices)


@contextmanager
def _same_random_numbers(func: Any, device: torch.device) -> Any:
    """Let the CPU draw numbers that follow from the state of the device's generator, which torch advances itself."""
    if torch.Tag.nondeterministic_seeded not in func.tags:
        yield
        return
    seed = hash(bytes(torch.cuda.default_generators[device.index or 0].get_state().tolist()))
    state = torch.default_generator.get_state()
    torch.default_generator.manual_seed(seed % 2**63)
    try:
        yield
    finally:
        torch.default_generator.set_state(state)


def _special(name: str) -> Callable[[Any, tuple, dict[str, Any]], Any]:
    return _DEFINITIONS.get(name, lambda func, args, kwargs: func(*args, **kwargs))


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """[..., H, Q, D], [..., HK, K, D] -> [..., H, Q, D] f32. The logsumexp is not computed: nothing here reads it."""
    values = v.float().repeat_interleave(q.shape[-3] // k.shape[-3], dim=-3)
    return _weights(q, k, mask, scale) @ values


def _weights(q: Tensor, k: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """[..., H, Q, K] f32. Queries that see nothing have zeros, as in torch."""
    scores = q.float() @ k.float().repeat_interleave(q.shape[-3] // k.shape[-3], dim=-3).transpose(-1, -2) * scale
    return (scores if mask is None else scores.masked_fill(~mask, -torch.inf)).softmax(-1).nan_to_num()


def _attend_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    groups, weights, grad = q.shape[-3] // k.shape[-3], _weights(q, k, mask, scale), grad.float()
    keys, values = (x.float().repeat_interleave(groups, dim=-3) for x in (k, v))
    of_weights = grad @ values.transpose(-1, -2)
    of_scores = weights * (of_weights - (of_weights * weights).sum(-1, keepdim=True)) * scale
    of_keys, of_values = of_scores.transpose(-1, -2) @ q.float(), weights.transpose(-1, -2) @ grad
    of_keys, of_values = (x.unflatten(-3, (-1, groups)).sum(-3) for x in (of_keys, of_values))
    return of_scores @ keys, of_keys, of_values


def _seen(queries: int, keys: int, left: int, right: int) -> Tensor:
    """[queries, keys] bool. The last query is aligned with the last key; a negative number is no limit."""
    behind = torch.arange(queries)[:, None] + keys - queries - torch.arange(keys)
    seen = torch.ones(queries, keys, dtype=torch.bool)
    if left >= 0:
        seen &= behind <= left
    if right >= 0:
        seen &= -behind <= right
    return seen


def _options(func: Any, args: tuple, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return all arguments by their names in the schema, with defaults."""
    schema = func._schema.arguments
    given = dict(zip((argument.name for argument in schema), args, strict=False)) | kwargs
    return {a.name: given.get(a.name, a.default_value) for a in schema}


def _mask_of(o: dict[str, Any]) -> Tensor | None:
    bias = o.get("attn_bias")
    if bias is not None and bias.dtype != torch.bool:  # the host made -inf of False
        bias = bias == 0
    return _seen(o["query"].shape[-2], o["key"].shape[-2], -1, 0) if o["is_causal"] else bias


def _scale_of(o: dict[str, Any]) -> float:
    return o["query"].shape[-1] ** -0.5 if o["scale"] is None else o["scale"]


def _dense(func: Any, args: tuple, kwargs: dict[str, Any]) -> Tensor:
    o = _options(func, args, kwargs)
    return _attend(o["query"], o["key"], o["value"], _mask_of(o), _scale_of(o))


def _dense_backward(func: Any, args: tuple, kwargs: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
    o = _options(func, args, kwargs)
    grad = o["grad_out"] if "grad_out" in o else o["grad_out_"]
    return _attend_backward(grad, o["query"], o["key"], o["value"], _mask_of(o), _scale_of(o))


def _segments(o: dict[str, Any]) -> Iterable[tuple[slice, slice, Tensor]]:
    left, right = (-1, 0) if o["is_causal"] else o["window_size"]
    for (a, b), (c, d) in zip(pairwise(o["cu_seq_q"].tolist()), pairwise(o["cu_seq_k"].tolist()), strict=True):
        yield slice(a, b), slice(c, d), _seen(b - a, d - c, left, right)


def _varlen(func: Any, args: tuple, kwargs: dict[str, Any]) -> Tensor:
    o = _options(func, args, kwargs)
    q, k, v = (o[name].transpose(0, 1) for name in ("query", "key", "value"))  # [H, T, D]
    parts = [_attend(q[:, i], k[:, j], v[:, j], seen, _scale_of(o)) for i, j, seen in _segments(o)]
    return torch.cat(parts, dim=1).transpose(0, 1)


def _varlen_backward(func: Any, args: tuple, kwargs: dict[str, Any]) -> tuple[Tensor, ...]:
    o = _options(func, args, kwargs)
    inputs = [o[name].transpose(0, 1) for name in ("grad_out", "query", "key", "value")]
    found = [torch.zeros_like(x, dtype=torch.float32) for x in inputs[1:]]
    for i, j, seen in _segments(o):
        grad, q, k, v = (x[:, part] for x, part in zip(inputs, (i, i, j, j), strict=True))
        for total, part, where in zip(
            found, _attend_backward(grad, q, k, v, seen, _scale_of(o)), (i, j, j), strict=True
        ):
            total[:, where] += part
    return tuple(x.transpose(0, 1) for x in found)


def _softmax(func: Any, args: tuple, kwargs: dict[str, Any]) -> Tensor:
    """A CPU has no kernel that takes half precision and returns float32."""
    x, dim, half_to_float = args
    return func(x.float() if half_to_float else x, dim, False, **kwargs)


def _product(func: Any, args: tuple, kwargs: dict[str, Any]) -> Tensor:
    """A CPU has no kernel of mm and addmm with `out_dtype`."""
    o = _options(func, args, kwargs)
    if "out_dtype" not in o:
        return func(*args, **kwargs)
    first, total = (o["mat1"], o["self"]) if "mat1" in o else (o["self"], None)
    found = first.to(o["out_dtype"]) @ o["mat2"].to(o["out_dtype"])
    if total is not None:
        found = o["beta"] * total + o["alpha"] * found
    return o["out"].copy_(found) if "out" in o else found


_DEFINITIONS: dict[str, Callable[[Any, tuple, dict[str, Any]], Any]] = {
    "_varlen_attn": _varlen,
    "_varlen_attn_backward": _varlen_backward,
    "_scaled_dot_product_flash_attention": _dense,
    "_scaled_dot_product_efficient_attention": _dense,
    "_scaled_dot_product_flash_attention_backward": _dense_backward,
    "_scaled_dot_product_efficient_attention_backward": _dense_backward,
    "_softmax": _softmax,
    "_log_softmax": _softmax,
    "mm": _product,
    "addmm": _product,
}
_emulation: Emulation | None = None


def start() -> None:
    """Emulate from here on in this thread, in threads of autograd, and in processes forked from this one."""
    global _emulation
    if not hasattr(CDLL(None), "null_gpu_waits"):
        raise RuntimeError("this process has no null GPU: start it by python -m tests.null_gpu")
    if _emulation is None:
        _emulation = Emulation()
        _emulation.__enter__()
