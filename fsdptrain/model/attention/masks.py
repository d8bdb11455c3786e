"""Masks that attention over packs does without, and how transformers is kept from looking for packs by itself.

Before transformers asks an attention for its mask, it searches the position ids for packs, and the host waits for the
device until it knows whether there are any: in each pass, right where the host should run ahead. It does not search
for an attention that has no masks at all. But asking is how a model shows that it lays a pattern of its own over the
causal mask. So the first pass of each kind is asked, and no later one.
"""

from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from transformers import AttentionMaskInterface

from fsdptrain.errors import NumericsError


def no_mask(*_: Any, use_vmap: bool = False, **__: Any) -> None:
    """The mask that transformers asks for: none. Causality, windows and boundaries are the attention's own affair.

    Raises NumericsError for a model that draws a mask of its own (prefix or image overlays), which would be lost.
    """
    if use_vmap:
        raise NumericsError(
            "this model lays its own pattern over the causal mask, which a call without a mask would lose"
        )


class SkipMaskCreation:
    """Of one model: inside, the attentions of `names` are asked for a mask if no pass of this kind has ended before.

    What decides about patterns must be in `kind`: the layout, and whether there are images.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names
        self._kinds: set[Hashable] = set()

    @contextmanager
    def __call__(self, kind: Hashable) -> Iterator[None]:
        known = AttentionMaskInterface._global_mapping  # where transformers looks; it has no way to take a name back
        hidden = {name: known.pop(name) for name in self._names if kind in self._kinds and name in known}
        try:
            yield
        finally:
            known.update(hidden)
        self._kinds.add(kind)
