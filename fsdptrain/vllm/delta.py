"""Leaves out weights that an engine has already: frozen ones, and those that did not change in its dtype.

for name, tensor in delta.changed(weights): ...    # to an engine that keeps its weights between two updates
delta.commit()                                      # it has taken them all

Imported in vLLM's own processes too: it needs torch and nothing else.
"""

from collections.abc import Iterable, Iterator, Mapping

from torch import Tensor

from fsdptrain.rollout.weight_sync.checksum import bit_checksum


class DeltaFilter:
    """Remembers a checksum of each tensor, not the tensor."""

    def __init__(self) -> None:
        self.pushed_bytes = 0  # of the last update
        self.saved_bytes = 0
        self._held: dict[str, int] = {}
        self._new: dict[str, int] = {}

    def changed(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Those of `weights`, bit by bit, that are not what was committed last, and all others of their block.

        A block is a part of a decoder layer (its attention, its experts): engines fuse tensors within one, and take
        them all or none. `weights` is read to its end, one layer ahead. Until `commit` the engine counts as empty.
        """
        self.pushed_bytes = self.saved_bytes = 0
        held, self._held, self._new = self._held, {}, {}
        layer: list[tuple[str, Tensor]] = []
        for name, tensor in weights:
            if layer and _layer(name) != _layer(layer[0][0]):
                yield from self._of_layer(layer, held)
                layer = []
            layer.append((name, tensor))
        yield from self._of_layer(layer, held)

    @property
    def is_empty(self) -> bool:
        """The next update is whole."""
        return not self._held

    def commit(self) -> None:
        """The engine holds what was last gone through."""
        self._held = self._new

    def forget(self) -> None:
        """The engine holds nothing, or nobody knows what: the next update is whole."""
        self._held = {}

    def _of_layer(self, layer: list[tuple[str, Tensor]], held: Mapping[str, int]) -> Iterator[tuple[str, Tensor]]:
        sums = {name: bit_checksum(tensor) for name, tensor in layer}
        self._new |= sums
        changed = {block_of(name) for name, value in sums.items() if held.get(name) != value}
        for name, tensor in layer:
            if block_of(name) in changed:
                self.pushed_bytes += tensor.nbytes
                yield name, tensor
            else:
                self.saved_bytes += tensor.nbytes


def _layer(name: str) -> str:
    """`model.layers.3` of `model.layers.3.mlp.up_proj.weight`; a tensor outside of layers is one by itself."""
    parts = name.split(".")
    number = next((i for i, part in enumerate(parts) if part.isdecimal()), len(parts))
    return ".".join(parts[: number + 1])


def block_of(name: str) -> str:
    """`model.layers.3.mlp` of `model.layers.3.mlp.experts.5.up_proj.weight`."""
    layer = _layer(name)
    return layer if layer == name else f"{layer}.{name[len(layer) + 1 :].split('.')[0]}"
