"""Accumulate the metrics of a step on the device and reduce them over ranks."""

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from fsdptrain.distributed import gather
from fsdptrain.errors import ConfigError
from fsdptrain.types import Metrics


class MetricSums:
    """Metrics of the packs of one step, kept on the device until they are reduced.

    Every pack must report the same names: the reduction over ranks uses only the order of names.
    """

    def __init__(self, *, copies: int = 1, checked: bool = False) -> None:
        """copies: number of ranks with the same packs.

        checked: compare the names across ranks. It takes one more collective; losses of this package do not need it.
        """
        self._copies, self._checked = copies, checked
        self._values: dict[str, Tensor] = {}  # name -> [] f32

    def add(self, metrics: Mapping[str, Tensor]) -> None:
        for name, value in metrics.items():
            before = self._values.get(name)
            combine = torch.maximum if name.endswith("_max") else torch.add
            self._values[name] = value if before is None else combine(before, value)

    @torch.no_grad()
    def broadcast(self, group: dist.ProcessGroup, *, src: int, device: torch.device) -> None:
        """Replace the metrics with those of rank `src` of `group`. Collective."""
        names = [sorted(self._values)]
        dist.broadcast_object_list(names, group=group, group_src=src, device=device)
        row = torch.zeros(len(names[0]), device=device)
        for i, name in enumerate(names[0]):
            row[i] = self._values.get(name, 0.0)
        dist.broadcast(row, group=group, group_src=src)
        self._values = dict(zip(names[0], row.unbind(), strict=True))

    def reduce(self, norm: Tensor) -> tuple[Metrics, float, bool]:
        """Reduce over ranks: (metrics, `norm`, whether `norm` is finite on every rank).

        Takes one all_reduce, and one more if a name ends in `_max`; then the only wait of a step for the device. Raises
        ConfigError on all ranks if the names differ.
        """
        if self._checked:
            first, *others = gather(sorted(self._values))
            for rank, names in enumerate(others, start=1):
                if names != first:
                    apart = ", ".join(sorted({*first} ^ {*names}))
                    raise ConfigError(
                        f"--loss names {apart} on rank 0 or rank {rank} only: it must name the same everywhere"
                    )
        maxima = sorted(name for name in self._values if name.endswith("_max"))
        sums = sorted(name for name in self._values if not name.endswith("_max"))
        summed = torch.stack([*(self._values[name] for name in sums), (~norm.isfinite()).to(norm.dtype)])
        dist.all_reduce(summed)
        if self._copies > 1:
            summed /= self._copies
        highest = torch.stack([*(self._values[name] for name in maxima), norm])
        if maxima:
            dist.all_reduce(highest[:-1], op=dist.ReduceOp.MAX)
        *values, num_not_finite, norm_value = torch.cat([highest[:-1], summed, highest[-1:]]).tolist()
        return dict(zip([*maxima, *sums], values, strict=True)), norm_value, num_not_finite == 0
