"""With a memory budget compiled layers keep less for the backward pass, and compute the same gradients."""

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch._functorch.config
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

from fsdptrain.features.compile.feature import compile_layers
from fsdptrain.model.attention.attention import SEGMENTS, register_attention
from fsdptrain.model.policy import install_policy_forward, plain_batch, policy_logprobs
from fsdptrain.model.structure import decoder_layers
from fsdptrain.tools.plan.trace import TraceSpec, _fake_model, trace
from tests import configs, zoo
from tests.matrix import only
from tests.seam import CPU, random_pack

pytestmark = pytest.mark.filterwarnings(  # torch's own
    "ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning",
    "ignore:`torch.jit.script:DeprecationWarning",
)
LENGTHS = (30, 22, 12)
NUM_LAYERS = 2
BUDGETS = (1.0, 0.8, 0.4, 0.0)
# of the products that a layer computes for its output, how many are computed again for each budget
RECOMPUTED = {"qwen3": (0, 1, 3, 4), "llama": (0, 0, 1, 2)}
PARTITIONED = "aot_eager_decomp_partition"  # the partition of inductor, computed by torch's own operations


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Products(TorchDispatchMode):
    """`count`: matrix products that were computed inside."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.bmm.default)
        return func(*args, **(kwargs or {}))


def step(name: str, budget: float | None, dtype: torch.dtype = torch.float64) -> tuple[dict[str, Tensor], int, int]:
    """(gradients, products in the backward pass, bytes that the layers save). None: not compiled."""
    register_attention()
    model = zoo.build(name, num_hidden_layers=NUM_LAYERS).to(dtype)
    model.set_attn_implementation(SEGMENTS)
    if budget is not None:
        compile_layers(model, backend=PARTITIONED, memory_budget=budget)
    install_policy_forward(model, chunk_size=64)
    batch = random_pack(LENGTHS, seed=1)
    saved = {p.untyped_storage()._cdata: p.untyped_storage() for p in model.parameters()}  # held: no address is reused
    weights = set(saved)
    inside: list[bool] = []
    for layer in decoder_layers(model):
        layer.register_forward_pre_hook(lambda *_: inside.append(True))
        layer.register_forward_hook(lambda *_: inside.clear())

    def pack(tensor: Tensor) -> Tensor:
        if inside:
            saved[tensor.untyped_storage()._cdata] = tensor.untyped_storage()
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        values = policy_logprobs(model, batch, layout="packed").values
    with Products() as products:
        (values * (batch.position_ids + 1).sin()).sum().backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return gradients, products.count, sum(saved[key].nbytes() for key in saved.keys() - weights)


@pytest.mark.slow
@pytest.mark.parametrize("name", only(["llama"], RECOMPUTED))
def test_a_smaller_budget_keeps_fewer_bytes_computes_more_products_again_and_changes_no_gradient(name: str):
    """All budgets in one process, without a reset: none uses the graphs of another. Norms compute in float32."""
    wanted, products, most = step(name, None)
    rounded, _, _ = step(name, None, torch.float32)
    kept: list[int] = []
    for budget, recomputed in zip(BUDGETS, RECOMPUTED[name], strict=True):
        gradients, found, num_bytes = step(name, budget)
        assert found - products == NUM_LAYERS * recomputed, budget
        kept.append(num_bytes)
        assert gradients.keys() == wanted.keys()
        for key, gradient in wanted.items():
            error = (gradients[key] - gradient).norm()
            assert error < 0.1 * (rounded[key] - gradient).norm(), (budget, key)
    assert kept == sorted(set(kept), reverse=True)
    assert kept[0] < most
    assert kept[-1] < most / 2


AT_WIDTH = {  # products of a layer that are computed again, in bfloat16 with a pack of 4,096 tokens
    ("qwen3-4b", 0.8): 1,  # [2560, 1024]: 3 % of the layer's forward products
    ("qwen3-4b", 0.4): 2,
    ("qwen3-4b", 0.0): 4,
    ("llama-3.1-8b", 0.8): 0,
    ("llama-3.1-8b", 0.0): 2,
}


def products_at_width(name: str, budget: float | None) -> int:
    """Products in the backward pass of one layer of each kind, on fake tensors."""
    register_attention()
    mode = FakeTensorMode()
    model, _ = _fake_model(configs.meta_model(name).config, torch.bfloat16, SEGMENTS, mode, False)
    if budget is not None:
        compile_layers(model, backend=PARTITIONED, memory_budget=budget)
    install_policy_forward(model, chunk_size=512)
    batch = plain_batch([[1] * 2048] * 2, device=CPU)._map(mode.from_tensor)
    with mode:
        values = policy_logprobs(model, batch, layout="packed").values
        with Products() as products:
            values.sum().backward()
    return products.count


@pytest.mark.slow
@pytest.mark.parametrize(("name", "budget"), only([("qwen3-4b", 0.8)], list(AT_WIDTH)))
def test_at_the_width_of_a_large_model_a_budget_of_08_computes_hardly_a_product_again(name: str, budget: float):
    assert products_at_width(name, budget) - products_at_width(name, None) == AT_WIDTH[name, budget]


@pytest.mark.slow
def test_the_budget_holds_while_a_graph_is_compiled_and_nowhere_else():
    """torch's caches of graphs have all of this configuration in their keys."""
    seen: list[float] = []

    def backend(graph: Any, _: Any) -> Any:
        seen.append(torch._functorch.config.save_config_portable()["activation_memory_budget"])
        return graph.forward

    def run(budget: float) -> set[float]:
        seen.clear()
        model = zoo.build("llama")
        compile_layers(model, backend=backend, memory_budget=budget)
        model(input_ids=torch.ones((1, 7), dtype=torch.int64), use_cache=False)
        once = len(seen)
        with torch.no_grad():
            model(input_ids=torch.ones((1, 7), dtype=torch.int64), use_cache=False)
        assert len(seen) > once > 0  # compiled again
        return set(seen)

    assert run(0.5) == {0.5}
    assert torch._functorch.config.activation_memory_budget == 1
    assert run(1.0) == {1.0}
    assert run(0.25) == {0.25}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "budget"), only([("llama", 0.5)], [("llama", 0.5), ("llama", 0.0), ("qwen3", 0.5)]))
def test_the_plan_knows_what_compiled_layers_save(name: str, budget: float):
    """`test_memory_plan.py` compares the plan with a step of layers that inductor has compiled."""
    register_attention()
    spec = TraceSpec(LENGTHS, "packed", SEGMENTS, torch.float64, chunk_size=64, checkpointing=None, compiled=budget)
    planned = trace(zoo.config(name), spec).layers[0].saved
    assert math.isclose(planned, step(name, budget)[2] / NUM_LAYERS, rel_tol=0.1)
