"""The shared expert is computed during the all-to-all to the other experts, and no number changes."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode

from fsdptrain.features.model_parallel import shared_expert
from fsdptrain.features.model_parallel.dispatch import AsyncAllToAll, dispatch_of
from fsdptrain.features.model_parallel.plan import split_model
from tests import zoo
from tests.exact import Exact
from tests.families import tiny
from tests.testing import spawn

# family -> products of matrices between start and end of the all-to-all to the experts; of a shared expert
COMPUTED = {"deepseek_v3": 3, "glm4_moe": 3, "nemotron_h": 2, "qwen3_next": 0, "inkling_text": 0, "qwen3_moe": 0}


class Log(TorchDispatchMode):
    """What happens, in its order: products, and starts and ends of trips."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm):
            self.seen.append("product")
        return func(*args, **(kwargs or {}))

    def between(self) -> list[int]:
        """Products in each trip."""
        found, starts = [], [i for i, name in enumerate(self.seen) if name == "start"]
        for start in starts:
            end = self.seen.index("end", start)
            assert "start" not in self.seen[start + 1 : end]
            found.append(self.seen[start:end].count("product"))
        return found


class Experts:
    """One block of experts of a model, split over all ranks, and the same whole."""

    def __init__(self, family: str) -> None:
        whole, self.split = tiny(family).double(), tiny(family).double()
        for model in (whole, self.split):
            model.set_experts_implementation("eager")
        mesh = init_device_mesh("cpu", (1, dist.get_world_size()), mesh_dim_names=("tensor", "expert"))
        split_model(self.split, tensor=mesh["tensor"], experts=mesh["expert"])
        blocks = {
            name: module
            for name, module in self.split.named_modules()
            if any(dispatch_of(child) is not None for child in module.children())
        }
        self.name, self.block = next(iter(blocks.items()))
        self.whole = whole.get_submodule(self.name)


def tokens() -> torch.Tensor:
    generator = torch.Generator().manual_seed(dist.get_rank())
    return torch.randn(1, 24, zoo.HIDDEN, generator=generator, dtype=torch.float64)


def run(block: torch.nn.Module, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Output, and gradient of the input of something that weighs all outputs."""
    given = rows.clone().requires_grad_()
    found = block(given)
    found = found[0] if isinstance(found, tuple) else found
    (found * torch.arange(found.numel()).view_as(found).sin()).sum().backward()
    assert given.grad is not None
    return found.detach(), given.grad


def compare(family: str) -> tuple[list[int], list[float], bool]:
    """(products in the trips of a forward and backward pass, differences from the whole block, anything kept)."""
    made = Experts(family)
    log, start, end = Log(), AsyncAllToAll.start, AsyncAllToAll.end

    def logged_start(self: AsyncAllToAll, *args: Any, **kwargs: Any) -> torch.Tensor:
        log.seen.append("start")
        return start(self, *args, **kwargs)

    def logged_end(self: AsyncAllToAll) -> torch.Tensor:
        log.seen.append("end")
        return end(self)

    AsyncAllToAll.start, AsyncAllToAll.end = logged_start, logged_end  # this process is the test's own
    with Exact():
        with log:
            output, grad = run(made.block, tokens())
        wanted, wanted_grad = run(made.whole, tokens())
    differences = [((a - b).abs().max() / b.abs().max()).item() for a, b in ((output, wanted), (grad, wanted_grad))]
    early = getattr(made.block.forward, "__self__", None)
    kept = isinstance(early, shared_expert.EarlyShared) and (early._made is not None or early._given is not None)
    return log.between(), differences, kept


@pytest.mark.parametrize("family", COMPUTED)
def test_the_shared_expert_is_computed_while_tokens_travel_forward_and_backward(family):
    forward = COMPUTED[family]
    for between, differences, kept in spawn(2, compare, family):
        assert between == [forward, 2 * forward]  # backward: of each matrix the gradients of its input and of itself
        assert max(differences) < 1e-12
        assert not kept


def called_otherwise() -> tuple[float, int]:
    """A block that gives its shared expert something else: exact, and computed ahead once at most."""
    made = Experts("deepseek_v3")
    stock, calls = made.block.shared_experts, []  # type: ignore[union-attr]
    early = made.block.forward.__self__  # type: ignore[union-attr]
    computed = early._shared
    early._shared = lambda x: calls.append(x) or computed(x)
    early._block = lambda x: made.block.experts(*routed(made.block, x)).view_as(x) + stock(2 * x)
    whole = made.whole
    rows = tokens()
    [*_, found] = [made.block(rows) for _ in range(3)]
    wanted = whole.experts(*routed(whole, rows)).view_as(rows) + whole.shared_experts(2 * rows)  # type: ignore[operator]
    return (found - wanted).abs().max().item(), len(calls)


def routed(block: Any, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    _, weights, indices = block.gate(rows)
    return rows.flatten(0, 1), indices, weights


def test_a_block_that_gives_its_shared_expert_something_else_is_left_as_it_is():
    for difference, num_calls in spawn(2, called_otherwise):
        assert difference < 1e-12
        assert num_calls == 4  # once ahead, for nothing
