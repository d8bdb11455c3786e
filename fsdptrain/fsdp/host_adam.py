"""AdamW with moments on the host, while weights and gradients stay where they are.

Weights and gradients are copied to the host piece by piece, stepped there by the same fused kernel, and the weights are
copied back. The next piece is copied while the current one is stepped.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from fsdptrain import platform
from fsdptrain.fsdp.shard_files import with_shard
from fsdptrain.fsdp.shards import local_shard

PIECE = 1 << 24  # elements per copy; a multiple of any vector width, so that splitting changes no bit
_SLOTS = 2  # one is stepped, the other is copied


@dataclass(frozen=True)
class _Piece:
    """A contiguous part of one parameter, flattened: views."""

    weights: Tensor
    gradients: Tensor
    moments: tuple[Tensor, Tensor]  # on the host
    step: Tensor  # [] f32 on the host: number of completed steps
    group: dict[str, Any]


def host_moment(parameter: nn.Parameter) -> Tensor:
    """Return zeros in host memory with the shape and sharding of `parameter`."""
    local = local_shard(parameter)
    host = torch.zeros(local.shape, dtype=local.dtype, device="cpu", pin_memory=platform.has_accelerator())
    return with_shard(parameter, host)


class HostAdam:
    """Runs the steps of an AdamW with its state on the host. `adam` keeps the options and the state."""

    def __init__(self, adam: torch.optim.AdamW) -> None:
        self._adam = adam
        self._transfers = Transfers(local_shard(adam.param_groups[0]["params"][0]).device)
        self._grad_scale: Tensor | None = None

    @torch.no_grad()
    def step(self) -> None:
        """Run a step like `AdamW.step`. The host waits for the copies, so it may read the moments afterwards."""
        divisor = getattr(self._adam, "grad_scale", None)  # of clipping
        self._grad_scale = None if divisor is None else divisor.cpu()
        pieces = list(self._pieces())
        size = max((piece.weights.nbytes for piece in pieces), default=0)
        slots = [(self._transfers.host_buffer(size), self._transfers.host_buffer(size)) for _ in range(_SLOTS)]
        begun = [self._fetch(piece, slot) for piece, slot in zip(pieces[:1], slots, strict=False)]
        for i, piece in enumerate(pieces):
            if i + 1 < len(pieces):
                begun.append(self._fetch(pieces[i + 1], slots[(i + 1) % _SLOTS]))
            (weights, gradients), mark = begun[i]
            self._transfers.finish(mark)
            self._transfers.wait(mark)
            self._compute(piece, weights, gradients)
            with self._transfers.queued():
                piece.weights.copy_(weights, non_blocking=True)
        self._transfers.wait(self._transfers.mark())
        self._transfers.finish()
        for p, state in self._adam.state.items():
            state["step"] += p.grad is not None

    def _pieces(self) -> Iterator[_Piece]:
        for group in self._adam.param_groups:
            for p in group["params"]:
                if p.grad is None:  # not connected to the loss: an indexer that is only searched (deepseek_v32)
                    continue
                state = self._adam.state[p]
                flat = [local_shard(x).reshape(-1) for x in (p.grad, state["exp_avg"], state["exp_avg_sq"])]
                weights = local_shard(p).view(-1)
                for w, g, m, v in zip(weights.split(PIECE), *(x.split(PIECE) for x in flat), strict=True):
                    if w.numel():
                        yield _Piece(w, g, (m, v), state["step"], group)

    def _fetch(self, piece: _Piece, slot: tuple[Tensor, Tensor]) -> tuple[list[Tensor], torch.Event | None]:
        """Start copying a piece into a slot. Returns (copies, event of their completion).

        Copies run in order, so the previous piece has left the slot.
        """
        moving = (piece.weights, piece.gradients)
        arriving = [room[: x.nbytes].view(x.dtype) for room, x in zip(slot, moving, strict=True)]
        with self._transfers.queued():
            for target, source in zip(arriving, moving, strict=True):
                target.copy_(source, non_blocking=True)
        return arriving, self._transfers.mark()

    def _compute(self, piece: _Piece, weights: Tensor, gradients: Tensor) -> None:
        first, second = piece.moments
        beta1, beta2 = piece.group["betas"]
        # per piece: the kernel increments it
        step = torch.full((), piece.step.item(), dtype=torch.float32)
        adamw(
            *([weights], [gradients], [first], [second], [], [step]),
            fused=piece.group["fused"],
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=piece.group["lr"],
            weight_decay=piece.group["weight_decay"],
            eps=piece.group["eps"],
            maximize=False,
            grad_scale=self._grad_scale,
        )


class Transfers:
    """Copies between a device and the host in a stream of their own, in order; on a CPU they are synchronous.

    The computation waits for them only in `wait`. Memory that a copy reads or writes must stay allocated until the
    computation (`wait`) or the host (`finish`) has waited for it. It is then freed in the order of the computation, and
    no check for a pending copy is needed.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = None if device.type == "cpu" else torch.Stream(device=device)

    def host_buffer(self, num_bytes: int) -> Tensor:
        """Return a buffer [num_bytes] uint8, pinned if there is a device."""
        return torch.empty(num_bytes, dtype=torch.uint8, device="cpu", pin_memory=self._stream is not None)

    @contextmanager
    def queued(self) -> Iterator[None]:
        """Queue the copies made in the context. They start after all computation issued so far."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.accelerator.current_stream(self.device))
        with self._stream:
            yield

    def mark(self) -> torch.Event | None:
        """Return an event for the end of the copies queued so far."""
        return None if self._stream is None else self._stream.record_event()

    def wait(self, mark: torch.Event | None) -> None:
        """Make later computation wait for `mark`. The host does not wait."""
        if mark is not None:
            torch.accelerator.current_stream(self.device).wait_event(mark)

    def finish(self, mark: torch.Event | None = None) -> None:
        """Make the host wait for `mark`, or for all queued copies."""
        if self._stream is not None:
            (mark or self._stream).synchronize()
