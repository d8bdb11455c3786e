"""Prevent transformers from building masks and searching position ids for packs.

Before transformers asks an attention implementation for its mask, it searches the position ids for packed sequences.
This makes the host wait for the device in each forward pass. It skips the search for implementations without a
registered mask function. The mask request is also how a model reveals a pattern of its own on top of the causal mask,
so it is allowed in the first pass of each kind and skipped afterwards.
"""

from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from transformers import AttentionMaskInterface

from fsdptrain.errors import NumericsError


def no_mask(*_: Any, use_vmap: bool = False, **__: Any) -> None:
    """Return no mask to transformers: the attention itself applies causality, windows and boundaries.

    Raises NumericsError for a model that adds its own mask pattern (prefix or image overlays), which would be lost.
    """
    if use_vmap:
        raise NumericsError(
            "this model lays its own pattern over the causal mask, which a call without a mask would lose"
        )


class SkipMaskCreation:
    """Context manager that skips mask creation for the attentions `names` after the first pass of each kind.

    Use one instance per model. `kind` must contain everything that determines mask patterns: the layout, and whether
    there are images.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names
        self._kinds: set[Hashable] = set()

    @contextmanager
    def __call__(self, kind: Hashable) -> Iterator[None]:
        known = AttentionMaskInterface._global_mapping  # transformers has no public way to unregister a name
        hidden = {name: known.pop(name) for name in self._names if kind in self._kinds and name in known}
        try:
            yield
        finally:
            known.update(hidden)
        self._kinds.add(kind)
