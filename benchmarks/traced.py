"""Time of a traced step, by part and by operation."""

from collections import Counter, defaultdict
from typing import Any

from torch.autograd import DeviceType

# Names in autograd and torch for each part. Parts do not overlap; a part includes everything called inside it.
_PARTS = {
    "head": ("_ChunkedLogprobs", "_ChunkedLogprobsBackward"),
    "optimizer": ("Optimizer.step#",),
    "attention": (
        "aten::_scaled_dot_product",
        "aten::_flash_attention",
        "aten::_efficient_attention",
        "_Merged",
    ),
}
_PRODUCTS = ("aten::mm", "aten::addmm", "aten::addmm_")


def longest(tracer: Any, count: int = 25) -> list[dict[str, Any]]:
    """Return the longest operations on the device, or on the CPU without one, excluding nested calls. [ms]"""
    calls: Counter[str] = Counter()
    busy: defaultdict[str, float] = defaultdict(float)
    for event in _at_work(tracer):
        calls[event.name] += 1
        busy[event.name] += _own(event)
    whole = sum(busy.values())
    return [
        {"what": name[:90], "calls": calls[name], "ms": round(spent / 1e3, 3), "share": round(spent / whole, 4)}
        for name, spent in sorted(busy.items(), key=lambda item: -item[1])[:count]
    ]


def parts(tracer: Any) -> dict[str, float]:
    """Return the fraction of each part of the step, including nested calls. `layers and the rest` is the remainder.

    The head computes logprobs and their gradients. Its time without matrix products is its overhead over a minimal
    head, except for the logits that are computed a second time.
    """
    working = _at_work(tracer)
    whole, on_device = sum(map(_own, working)), bool(working) and _of_device(working[0])
    spent = dict.fromkeys([*_PARTS, "products"], 0.0)
    for event in tracer.events():
        if _of_device(event):
            continue  # included in the operation that launched it
        part, around = _part(event.name), _part_around(event)
        if part is not None and around is None:
            spent[part] += _with_all_called(event, on_device=on_device)
        elif around == "head" and event.name in _PRODUCTS:
            spent["products"] += _with_all_called(event, on_device=on_device)
    head, products = spent.pop("head"), spent.pop("products")
    found = {"head, matrix products": products, "head, all else": head - products, **spent}
    shares = {name: value / whole for name, value in found.items()}
    return {**shares, "layers and the rest": 1 - sum(shares.values())}


def _at_work(tracer: Any) -> list[Any]:
    """Return the events that make up the total time, each once: device events if there are any, else CPU events.

    A device kernel is a separate event, and is also part of the time of every operation around its launch. A named
    range (FSDP::..., Optimizer.step#...) has a copy on the device that spans its kernels. Only the kernels count.
    """
    events = list(tracer.events())
    return [e for e in events if _of_device(e) and not e.is_user_annotation] or [e for e in events if not _of_device(e)]


def _of_device(event: Any) -> bool:
    return event.device_type != DeviceType.CPU


def _own(event: Any) -> float:
    """Return the time without nested calls. [us]"""
    return event.time_range.elapsed_us() if _of_device(event) else event.self_cpu_time_total


def _with_all_called(event: Any, *, on_device: bool) -> float:
    """Return the time of a CPU operation with nested calls: kernel time if the device does the work. [us]"""
    if not on_device:
        return event.cpu_time_total
    own = sum(kernel.duration for kernel in event.kernels if kernel.name != event.name)  # skips a named range's copy
    return own + sum(_with_all_called(child, on_device=True) for child in event.cpu_children)


def _part(name: str) -> str | None:
    fitting = [(len(begin), part) for part, begins in _PARTS.items() for begin in begins if name.startswith(begin)]
    return max(fitting)[1] if fitting else None


def _part_around(event: Any) -> str | None:
    while (event := event.cpu_parent) is not None:
        if (part := _part(event.name)) is not None:
            return part
    return None
