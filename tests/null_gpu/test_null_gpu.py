"""The null GPU computes the results of a CPU, with the memory and random state of the device."""

from collections.abc import Callable
from ctypes import CDLL
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fsdptrain.model.logprobs import plus_product
from tests.null_gpu.__main__ import ROOT
from tests.unit import test_torch_calls

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not hasattr(CDLL(None), "null_gpu_waits"), reason="needs the null GPU: python -m tests.null_gpu"
    ),
]


def sum_of_products(x: Tensor) -> Tensor:
    first = plus_product(None, x, x, dtype=torch.float32)
    return plus_product(first, x, x, dtype=torch.float32)


OPERATIONS: dict[str, Callable[[Tensor], Any]] = {
    "product": lambda x: x @ x.T,
    "values by mask": lambda x: x[x > 0],
    "places by mask": lambda x: (
        x.clone().masked_fill_(x > 0, 2.0).index_put_((x > 1,), torch.tensor(3.0, device=x.device))
    ),
    "sort": lambda x: x.sort(dim=1),
    "sums": lambda x: torch.cumsum(x, 0).logsumexp(1),
    "distinct values": lambda x: x.round().unique(return_counts=True),
    "half precision": lambda x: F.softmax(x.half(), dim=1, dtype=torch.float32),
    "gradient": lambda x: torch.autograd.grad(F.gelu(x.requires_grad_()).norm(), x),
    "lists": lambda x: torch._foreach_mul([x, x + 1], 2.0),
    "sum of products of half precision": lambda x: sum_of_products(x.round().bfloat16()),  # exact, as these are small
    "attention": lambda x: F.scaled_dot_product_attention(*(x.view(1, 1, 6, 8),) * 3, is_causal=True),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_operations_are_those_of_a_cpu(name: str) -> None:
    x = torch.randn(6, 8, generator=torch.Generator().manual_seed(0))
    found, wanted = OPERATIONS[name](x.cuda()), OPERATIONS[name](x.clone())
    torch.testing.assert_close(found, wanted, check_device=False)
    assert all(tensor.is_cuda for tensor in (found if isinstance(found, (tuple, list)) else [found]))


def test_inference_and_other_threads_of_autograd_are_emulated() -> None:
    layer = torch.nn.Linear(4, 4, device="cuda")
    x = torch.ones(2, 4, device="cuda")
    with torch.inference_mode():
        assert torch.equal(layer(x).cpu(), layer.cpu()(x.cpu()))
    layer.cuda()(x).sum().backward()
    assert layer.bias.grad is not None
    assert layer.bias.grad.tolist() == [2.0] * 4


def test_random_numbers_follow_from_the_state_of_the_device() -> None:
    on_host, state = torch.get_rng_state(), torch.cuda.get_rng_state()
    first, second = torch.rand(64, device="cuda"), torch.rand(64, device="cuda")
    assert not torch.equal(first, second)
    torch.cuda.set_rng_state(state)
    assert torch.equal(torch.rand(64, device="cuda"), first)
    assert torch.equal(torch.get_rng_state(), on_host)


def test_memory_is_that_of_one_device() -> None:
    before = torch.cuda.memory_allocated()
    held = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    assert torch.cuda.memory_allocated() - before == held.nbytes
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(80 << 30, dtype=torch.uint8, device="cuda")


def test_copies_are_counted_by_kind() -> None:
    library = CDLL(None)
    counters = [library.null_gpu_copies_to_device, library.null_gpu_copies_to_host, library.null_gpu_pageable_copies]

    def counted(copy: Callable[[], Any]) -> list[int]:
        before = [counter() for counter in counters]
        copy()
        return [counter() - old for counter, old in zip(counters, before, strict=True)]

    pinned, plain, device = torch.ones(9).pin_memory(), torch.ones(9), torch.ones(9, device="cuda")
    assert counted(lambda: pinned.to("cuda", non_blocking=True)) == [1, 0, 0]
    assert counted(lambda: plain.cuda()) == [1, 0, 1]
    assert counted(lambda: device.cpu()) == [0, 1, 1]
    assert counted(lambda: device.to("cpu", non_blocking=True)) == [0, 1, 0]


def test_tests_that_cannot_run_exist() -> None:
    from tests.null_gpu.plugin import CANNOT  # importing it starts the emulation

    for begin in CANNOT:
        assert "mark.gpu" in (ROOT / begin.partition("::")[0]).read_text()


def test_calls_match_the_signatures_of_the_oldest_torch_and_transformers() -> None:
    test_torch_calls.test_calls_match_the_signatures_of_the_installed_versions()
