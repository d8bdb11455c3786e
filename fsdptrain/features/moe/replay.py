"""Router replay on stock transformers models: record the experts chosen for each token and choose them again.

A router scores all experts and selects the best k with `topk`. What model families do before and after that (softmax,
sigmoid, a bias, groups, a norm, a scale) differs, so replay intercepts only that call. While a router runs, a torch
function mode sees its calls of topk; the choice is the call that takes k of [tokens, experts]. It is recorded, or
answered with given experts and their scores. The family's own code then computes the expert weights from the current
scores, with their gradient. No formula is duplicated, and replaying a model's own choice is bitwise equal to not
replaying.

`features/moe/checks.py` verifies this on a small random copy of the model and rejects the few families where it fails.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from fsdptrain.features.activation_memory.feature import Recomputed
from fsdptrain.model.sizes import ExpertChoice
from fsdptrain.model.structure import decoder_layers
from fsdptrain.types import NO_ROUTE


class RouterReplay:
    """Records and replays the expert choices of one model.

    It wraps the forward of each router, before sharding. It does nothing outside `choosing`.

    Routes are [tokens, layers, k] int16: the experts of each token of the model's rows in each decoder layer. NO_ROUTE
    marks layers without experts and tokens for which the model chooses itself.

    Layers that are already `Recomputed` reuse in the backward pass the routes given to their forward pass, regardless
    of later calls.
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
        """Use the experts of `routes` in forward passes within the context. None: the model chooses.

        `routes` must be on the device of the model.
        """
        before = self._active, self._given
        self._active, self._given = True, routes
        try:
            yield
        finally:
            self._active, self._given = before

    @property
    def routes(self) -> Tensor:
        """Routes of the last forward pass inside `choosing`, on its device."""
        chosen = [[choice for router in members for choice in router] for members in self._chosen]
        nothing = torch.full_like(next(choices[0] for choices in chosen if choices), NO_ROUTE)
        return torch.stack([choices[0] if choices else nothing for choices in chosen], dim=1).to(torch.int16)

    @property
    def choices_by_layer(self) -> list[int]:
        """Number of choices per decoder layer in the last forward pass: 0 without experts, normally 1."""
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
        """Return the context for recomputing a layer that is now in its forward pass."""
        return nullcontext() if self._given is None else self.choosing(self._given)


def _routers(model: PreTrainedModel, layers: Sequence[nn.Module]) -> list[list[nn.Module]]:
    """Return the routers of each layer.

    These are the modules whose logits transformers records, or the layer itself if none is declared.
    """
    declared: list[Any] = []  # module classes, or output recorders of them
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            recorders = module.can_record_outputs.get("router_logits", [])
            declared += recorders if isinstance(recorders, list) else [recorders]
    classes = tuple(recorder if isinstance(recorder, type) else recorder.target_class for recorder in declared)
    found = [[module for module in layer.modules() if isinstance(module, classes)] for layer in layers]
    return found if any(found) else [[layer] for layer in layers]


class _Choosing(TorchFunctionMode):
    """Intercepts the calls of topk that choose experts."""

    def __init__(self, choice: ExpertChoice, given: Tensor | None) -> None:
        super().__init__()
        self._choice = choice
        self._given = given  # [tokens, k] i64
        self.chosen: list[Tensor] = []  # [tokens, k] i64, one per choice

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        output = func(*args, **(kwargs or {}))
        if func is not torch.topk and func is not torch.Tensor.topk:
            return output
        scores = args[0] if args else (kwargs or {})["input"]
        indices = output.indices
        if scores.dim() != 2 or (scores.shape[1], indices.shape[1]) != self._choice:
            return output  # a choice of groups, or of keys in sparse attention
        if self._given is not None:
            indices = torch.where(self._given == NO_ROUTE, indices, self._given)
            output = type(output)((scores.gather(1, indices), indices))
        self.chosen.append(indices)
        return output


class EngineRoutes:
    """Routes of one `decode` call: first of all tokens of the prompts, then of one token per row and step."""

    def __init__(self, replay: RouterReplay, prompt_lengths: Sequence[int], prompt_of_row: Sequence[int]) -> None:
        self._replay = replay
        self._lengths = prompt_lengths
        self._prompt_of_row = prompt_of_row
        self._prompts: list[Tensor] = []  # [P, layers, k] of each prompt, on the CPU
        self._steps: list[tuple[Tensor, Tensor]] = []  # (rows [A], routes [A, layers, k]) on the device

    def recording(self) -> AbstractContextManager[None]:
        """Record the forward passes of `decode` in the context."""
        return self._replay.choosing()

    def read_prompts(self) -> None:
        """Store the routes of the prompts. Call it after the forward pass over all prompts, padded on the left."""
        rows = self._replay.routes.unflatten(0, (len(self._lengths), -1)).cpu()
        self._prompts = [row[row.shape[0] - length :] for row, length in zip(rows, self._lengths, strict=True)]

    def read_tokens(self, rows: Tensor) -> None:
        """Store the routes of one token for each of `rows`. Call it after the forward pass over them."""
        self._steps.append((rows, self._replay.routes))

    def of_rows(self, num_tokens: Sequence[int]) -> list[Tensor]:
        """Return [P + n - 1, layers, k] for each row with n tokens: the model has not read the last token."""
        shape = self._prompts[0].shape[1:]
        responses = torch.full((len(num_tokens), len(self._steps), *shape), NO_ROUTE, dtype=torch.int16)
        for step, (rows, routes) in enumerate(self._steps):
            responses[rows.cpu(), step] = routes.cpu()
        prompts = [self._prompts[prompt] for prompt in self._prompt_of_row]
        return [
            torch.cat([prompt, response[: count - 1]])
            for prompt, response, count in zip(prompts, responses, num_tokens, strict=True)
        ]
