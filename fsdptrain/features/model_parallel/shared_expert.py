"""Compute the shared expert of a block while its tokens travel to the routed experts of other ranks.

Stock blocks of DeepSeek-V3 and related models call the routed experts, then the shared expert with the block's input.
The shared expert can therefore be computed once the tokens are sent, and the block's call returns that result. Blocks
that call it first (Qwen3-Next), or with another input, are unchanged. Outputs are bitwise equal; gradients of the
block's input are summed in another order.
"""

import inspect
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from fsdptrain.features.model_parallel.dispatch import dispatch_of

_NAMES = ("shared_experts", "shared_expert", "shared_mlp")


class EarlyShared:
    """Replaces the forwards of a block and of its shared expert. Create it before sharding."""

    def __init__(self, block: nn.Module, shared: nn.Module) -> None:
        self._block: Callable[..., Any] = block.forward
        self._shared: Callable[..., Any] = shared.forward
        self._given: Tensor | None = None  # input of the block, until its shared expert is called
        self._made: Tensor | None = None  # output of the shared expert, computed early
        self._helps = True  # until the block calls it with another input
        block.forward = self.block_forward
        shared.forward = self.shared_forward

    def block_forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        self._given = hidden_states
        try:
            return self._block(hidden_states, *args, **kwargs)
        finally:  # a recomputation for the backward pass may stop early
            self._given = self._made = None

    def shared_forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        given, made, self._given, self._made = self._given, self._made, None, None
        if made is None:
            return self._shared(hidden_states, *args, **kwargs)
        self._helps = hidden_states is given and not args and not kwargs
        return made if self._helps else self._shared(hidden_states, *args, **kwargs)

    def compute(self) -> None:
        if self._helps and self._given is not None:
            self._made = self._shared(self._given)


def _takes_one(shared: nn.Module) -> bool:
    """Return whether the shared expert takes a single input.

    In Inkling it also takes the output of the router, which is not available before the block calls it.
    """
    parameters = inspect.signature(shared.forward).parameters.values()
    return sum(parameter.default is parameter.empty for parameter in parameters) == 1


def overlap_shared_experts(model: nn.Module) -> None:
    """Enable the overlap in every block with split experts.

    Call it before sharding and after everything else that replaces forwards.
    """
    for block in list(model.modules()):
        dispatches = [found for child in block.children() if (found := dispatch_of(child)) is not None]
        shared = [child for name, child in block.named_children() if name in _NAMES]
        if len(dispatches) == len(shared) == 1 and _takes_one(shared[0]):
            dispatches[0].meanwhile = EarlyShared(block, shared[0]).compute
