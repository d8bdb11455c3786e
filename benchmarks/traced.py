"""Where the time of a traced step goes: by part, by operation, and as a picture."""

from pathlib import Path
from typing import Any

import torch

# What autograd and torch call each part: seconds of all that ran inside of it, and nothing is in two parts.
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
    """What took longest on the device, else on the CPU, without what it called. [ms]"""
    clock = "self_device_time_total" if torch.cuda.is_available() else "self_cpu_time_total"
    events = sorted(tracer.key_averages(), key=lambda e: -getattr(e, clock))
    whole = sum(getattr(e, clock) for e in events)
    return [
        {"what": e.key[:90], "calls": e.count, "ms": round(getattr(e, clock) / 1e3, 3),
         "share": round(getattr(e, clock) / whole, 4)}
        for e in events[:count]
    ]  # fmt: skip


def parts(tracer: Any) -> dict[str, float]:
    """Share of each part of the step, with all that it called; `layers and the rest` is what is left.

    The head is what makes log-probabilities and their gradients. All but its matrix products is what it costs over
    a head that could not be spared, but for the logits that are computed a second time.
    """
    clock = "device_time_total" if torch.cuda.is_available() else "cpu_time_total"
    whole = sum(getattr(e, f"self_{clock}") for e in tracer.key_averages())
    seconds = dict.fromkeys([*_PARTS, "products"], 0.0)
    for event in tracer.events():
        part, around = _part(event.name), _part_around(event)
        if part is not None and around is None:
            seconds[part] += getattr(event, clock)
        elif around == "head" and event.name in _PRODUCTS:
            seconds["products"] += getattr(event, clock)
    head, products = seconds.pop("head"), seconds.pop("products")
    found = {"head, matrix products": products, "head, all else": head - products, **seconds}
    shares = {name: value / whole for name, value in found.items()}
    return {**shares, "layers and the rest": 1 - sum(shares.values())}


def _part(name: str) -> str | None:
    fitting = [(len(begin), part) for part, begins in _PARTS.items() for begin in begins if name.startswith(begin)]
    return max(fitting)[1] if fitting else None


def _part_around(event: Any) -> str | None:
    while (event := event.cpu_parent) is not None:
        if (part := _part(event.name)) is not None:
            return part
    return None


def draw(path: Path, shares: dict[str, dict[str, float]], title: str) -> None:
    """A bar for each case, cut into its parts."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 1.2 + 0.6 * len(shares)), layout="constrained")
    left = dict.fromkeys(shares, 0.0)
    for part in next(iter(shares.values())):
        widths = [100 * shares[case][part] for case in shares]
        bars = axes.barh(list(shares), widths, left=list(left.values()), label=part)
        axes.bar_label(bars, [f"{w:.0f}" if w >= 4 else "" for w in widths], label_type="center", fontsize=8)
        left = {case: left[case] + width for case, width in zip(shares, widths, strict=True)}
    axes.set(xlabel="% of the step", xlim=(0, 100), title=title)
    axes.invert_yaxis()
    axes.legend(
        ncols=len(next(iter(shares.values()))),
        fontsize=7,
        loc="upper center",
        bbox_to_anchor=(0.5, -0.35),
        frameon=False,
    )
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
