"""Shares of a traced step count each kernel of a device once."""

import importlib
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.autograd import DeviceType
from torch.autograd.profiler_util import FunctionEvent

from .test_benchmarks import FOLDER

SPANS = {"layer": (0, 40), "sdpa": (40, 50), "gemm": (50, 70), "softmax": (70, 80), "adam": (80, 100)}  # us


class Trace:
    """Events as torch's tracer makes them from one step on a device, of the kernels in SPANS."""

    def __init__(self) -> None:
        self.made: list[FunctionEvent] = []
        self.operation("aten::linear", ["layer"])
        self.operation("aten::_scaled_dot_product_flash_attention", ["sdpa"])
        product = self.operation("aten::mm", ["gemm"])
        self.operation("_ChunkedLogprobs", ["softmax"], [product])
        kernels = self.operation("aten::_fused_adamw_", ["adam"])
        step = self.operation("Optimizer.step#AdamW.step", [], [kernels])
        copy = self.event(step.name, DeviceType.CUDA, (80, 100), is_user_annotation=True)
        step.append_kernel(copy.name, 0, 20)
        self.event("FSDP::pre_forward", DeviceType.CUDA, (0, 80), is_user_annotation=True)

    def event(self, name: str, where: DeviceType, span: tuple[int, int], **more: Any) -> FunctionEvent:
        number, (start, end) = len(self.made), span
        found = FunctionEvent(
            number, name, 0, start, end, device_type=where, use_device="cuda", trace_name=name, **more
        )
        self.made.append(found)
        return found

    def operation(self, name: str, kernels: list[str], calls: list[FunctionEvent] | None = None) -> FunctionEvent:
        found = self.event(name, DeviceType.CPU, (0, 1))
        for child in calls or []:
            found.append_cpu_child(child)
            child.set_cpu_parent(found)
        for kernel in kernels:
            start, end = SPANS[kernel]
            self.event(kernel, DeviceType.CUDA, SPANS[kernel])
            found.append_kernel(kernel, 0, end - start)
        return found

    def events(self) -> list[FunctionEvent]:
        return self.made


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module("traced")


def test_parts_on_a_device_are_shares_of_its_kernels(traced: ModuleType) -> None:
    assert traced.parts(Trace()) == pytest.approx(
        {
            "head, matrix products": 0.2,
            "head, all else": 0.1,
            "optimizer": 0.2,
            "attention": 0.1,
            "layers and the rest": 0.4,
        }
    )


def test_what_took_longest_on_a_device_are_its_kernels_each_once(traced: ModuleType) -> None:
    rows = traced.longest(Trace())
    assert {row["what"]: row["share"] for row in rows} == {"layer": 0.4, "gemm": 0.2, "adam": 0.2, "sdpa": 0.1,
                                                           "softmax": 0.1}  # fmt: skip
    assert [row["calls"] for row in rows] == [1] * 5
    assert rows[0]["ms"] == 0.04


def test_on_a_cpu_shares_are_of_what_operations_took_themselves(traced: ModuleType) -> None:
    weight = torch.nn.Parameter(torch.ones(200, 200))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    with torch.profiler.profile() as tracer:
        (weight @ weight).sum().backward()
        optimizer.step()
    shares, rows = traced.parts(tracer), traced.longest(tracer)
    assert min(shares.values()) > -1e-9, "parts overlap"
    assert 0 < shares["optimizer"] < 1
    assert sum(row["share"] for row in rows) <= 1.001
    assert {row["what"]: row["calls"] for row in rows}["aten::mm"] == 3
