"""Which experts a model chooses for each token, and choosing them again: router replay on stock transformers models.

A router scores all experts and takes the best k by `topk`; what families do before and after that (softmax, sigmoid, a
bias, groups, a norm, a scale) differs. So the seam is that one call. While a router runs, a mode sees its calls of
topk; the choice is the one that takes k of [tokens, experts]. It is noted, or answered with given experts and their
scores. The weights of the experts are then made by the family's own code from the current scores, with their gradient:
no formula is repeated here, and with its own choice given a model computes bit by bit what it does without.

`router_check` asks a small random copy of the model whether this holds, and refuses the few families where it does not.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from fsdptrain.features.activation_memory.checkpointing import Recomputed
from fsdptrain.model.structure import ExpertChoice, decoder_layers
from fsdptrain.types import NO_ROUTE


class RouterReplay:
    """The choices of one model. It wraps the forward of each router, before sharding; idle, it does nothing.

    Routes are [tokens, layers, k] int16: the experts of each token of the model's rows in each decoder layer. NO_ROUTE
    stands where there are none (a layer without experts), and where the model shall choose itself.

    Layers that are `Recomputed`, from before, choose in the backward pass among what was given to their forward pass,
    whatever was asked of the model since.
    """

    def __init__(self, model: PreTrainedModel, choice: ExpertChoice) -> None:
        self._choice = choice
        self._active = False
        self._given: Tensor | None = None
        layers = decoder_layers(model)
        routers = _routers(model, layers)
        self._chosen: list[list[list[Tensor]]] = [[[] for _ in members] for members in routers]
        for index, members in enumerate(routers):
            for number, router in enumerate(members):
                router.forward = partial(self._route, index, number, router.forward)
        for layer in layers:
            if isinstance(layer.forward, Recomputed):
                layer.forward.again = self._again

    @contextmanager
    def choosing(self, routes: Tensor | None = None) -> Iterator[None]:
        """Forward passes inside take the experts of `routes`, on the device of the model; None: they choose."""
        before = self._active, self._given
        self._active, self._given = True, routes
        try:
            yield
        finally:
            self._active, self._given = before

    @property
    def routes(self) -> Tensor:
        """What the last forward pass inside `choosing` took, on its device."""
        chosen = [[choice for router in members for choice in router] for members in self._chosen]
        nothing = torch.full_like(next(choices[0] for choices in chosen if choices), NO_ROUTE)
        return torch.stack([choices[0] if choices else nothing for choices in chosen], dim=1).to(torch.int16)

    @property
    def choices_by_layer(self) -> list[int]:
        """How often each decoder layer chose in the last forward pass: 0 without experts, else 1."""
        return [sum(len(router) for router in members) for members in self._chosen]

    def _route(self, index: int, number: int, stock: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not self._active:
            return stock(*args, **kwargs)
        given = None if self._given is None else self._given[:, index].long()
        with _Choosing(self._choice, given) as mode:
            output = stock(*args, **kwargs)
        self._chosen[index][number] = mode.chosen
        return output

    def _again(self) -> AbstractContextManager[None]:
        """In which a layer that now goes forward is to be computed again."""
        return nullcontext() if self._given is None else self.choosing(self._given)


def _routers(model: PreTrainedModel, layers: Sequence[nn.Module]) -> list[list[nn.Module]]:
    """Of each layer: the modules whose logits transformers records; the layer itself where none is declared."""
    declared: list[Any] = []  # classes of modules, or records of them
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            recorders = module.can_record_outputs.get("router_logits", [])
            declared += recorders if isinstance(recorders, list) else [recorders]
    classes = tuple(recorder if isinstance(recorder, type) else recorder.target_class for recorder in declared)
    found = [[module for module in layer.modules() if isinstance(module, classes)] for layer in layers]
    return found if any(found) else [[layer] for layer in layers]


class _Choosing(TorchFunctionMode):
    """Sees the calls of topk that choose experts."""

    def __init__(self, choice: ExpertChoice, given: Tensor | None) -> None:
        super().__init__()
        self._choice = choice
        self._given = given  # [tokens, k] i64
        self.chosen: list[Tensor] = []  # [tokens, k] i64, one for each choice

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        output = func(*args, **(kwargs or {}))
        if func is not torch.topk and func is not torch.Tensor.topk:
            return output
        scores = args[0] if args else (kwargs or {})["input"]
        indices = output.indices
        if scores.dim() != 2 or (scores.shape[1], indices.shape[1]) != self._choice:
            return output  # of groups, or of keys in a sparse attention
        if self._given is not None:
            indices = torch.where(self._given == NO_ROUTE, indices, self._given)
            output = type(output)((scores.gather(1, indices), indices))
        self.chosen.append(indices)
        return output
