"""Metrics of the packs of one step, on the device until they are summed over ranks."""

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from fsdptrain.distributed import gather
from fsdptrain.errors import ConfigError
from fsdptrain.types import Metrics


class MetricSums:
    """Metrics of the packs of one step, on the device until all are there. Every pack must name the same ones: sums go
    over ranks by the order of names alone."""

    def __init__(self, *, copies: int = 1, checked: bool = False) -> None:
        """copies: ranks that see the same packs. checked: names that differ between ranks are found out, by one more
        collective; the losses of the program need it not."""
        self._copies, self._checked = copies, checked
        self._values: dict[str, Tensor] = {}  # name -> [] f32

    def add(self, metrics: Mapping[str, Tensor]) -> None:
        for name, value in metrics.items():
            before = self._values.get(name)
            combine = torch.maximum if name.endswith("_max") else torch.add
            self._values[name] = value if before is None else combine(before, value)

    @torch.no_grad()
    def broadcast(self, group: dist.ProcessGroup, *, src: int, device: torch.device) -> None:
        """Make them what they are on rank `src` of `group`. Collective."""
        names = [sorted(self._values)]
        dist.broadcast_object_list(names, group=group, group_src=src, device=device)
        row = torch.zeros(len(names[0]), device=device)
        for i, name in enumerate(names[0]):
            row[i] = self._values.get(name, 0.0)
        dist.broadcast(row, group=group, group_src=src)
        self._values = dict(zip(names[0], row.unbind(), strict=True))

    def reduce(self, norm: Tensor) -> tuple[Metrics, float, bool]:
        """Over ranks: (metrics, `norm`, whether `norm` is finite on every rank).

        One all_reduce, and one more where a name ends in `_max`; then the only wait of a step for the device.
        ConfigError, on all ranks, where one names other metrics.
        """
        if self._checked:
            self._check_names()
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

    def _check_names(self) -> None:
        first, *others = gather(sorted(self._values))
        for rank, names in enumerate(others, start=1):
            if names != first:
                apart = ", ".join(sorted({*first} ^ {*names}))
                raise ConfigError(
                    f"--loss names {apart} on rank 0 or rank {rank} only: it must name the same everywhere"
                )
