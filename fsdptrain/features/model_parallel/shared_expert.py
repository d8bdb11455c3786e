"""The shared expert of a block is computed while its tokens travel to the routed experts of other ranks.

Stock blocks of DeepSeek-V3 and its relatives call the routed experts and then the shared one, with what the block was
given. So it can be computed as soon as the tokens have left, and the block finds its result where it would compute it.
Blocks that call it first (Qwen3-Next), or with something else, stay as they are. Same operations, same operands: the
values are the same bits, and gradients of the block's input are added up in another order.
"""

import inspect
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from fsdptrain.features.model_parallel.dispatch import dispatch_of

_NAMES = ("shared_experts", "shared_expert", "shared_mlp")


class EarlyShared:
    """Takes the place of the forwards of a block and of its shared expert, before sharding."""

    def __init__(self, block: nn.Module, shared: nn.Module) -> None:
        self._block: Callable[..., Any] = block.forward
        self._shared: Callable[..., Any] = shared.forward
        self._given: Tensor | None = None  # to the block, until its shared expert is called
        self._made: Tensor | None = None  # from it, ahead of that call
        self._helps = True  # until the block has once called it with something else
        block.forward = self.block_forward
        shared.forward = self.shared_forward

    def block_forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        self._given = hidden_states
        try:
            return self._block(hidden_states, *args, **kwargs)
        finally:  # a recomputation for the backward pass may break off
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
    """Not with what the router says of it, as in Inkling: that is not there before the block asks."""
    parameters = inspect.signature(shared.forward).parameters.values()
    return sum(parameter.default is parameter.empty for parameter in parameters) == 1


def overlap_shared_experts(model: nn.Module) -> None:
    """In every block whose experts are split; before sharding, and after all else that replaces forwards."""
    for block in list(model.modules()):
        dispatches = [found for child in block.children() if (found := dispatch_of(child)) is not None]
        shared = [child for name, child in block.named_children() if name in _NAMES]
        if len(dispatches) == len(shared) == 1 and _takes_one(shared[0]):
            dispatches[0].meanwhile = EarlyShared(block, shared[0]).compute
