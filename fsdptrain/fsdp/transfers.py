"""Copies between device and host that run beside the computation. On a CPU the same copies are made, at once."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


class Transfers:
    """A stream of copies of one device. What is queued runs in order; the computation waits only where `wait` says so.

    Memory that a copy reads or writes must stay until the computation, by `wait`, or the host, by `finish`, has waited
    for it: then it is freed in the computation's own order, and nothing has to ask whether a copy has ended.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = None if device.type == "cpu" else torch.Stream(device=device)

    def host_buffer(self, num_bytes: int) -> Tensor:
        """[num_bytes] uint8, pinned where there is a device."""
        return torch.empty(num_bytes, dtype=torch.uint8, device="cpu", pin_memory=self._stream is not None)

    @contextmanager
    def queued(self) -> Iterator[None]:
        """Copies inside begin when all that was computed before is done."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.accelerator.current_stream(self.device))
        with self._stream:
            yield

    def mark(self) -> torch.Event | None:
        """The end of what is queued so far."""
        return None if self._stream is None else self._stream.record_event()

    def wait(self, mark: torch.Event | None) -> None:
        """What is computed from here on begins after `mark`; the host goes on."""
        if mark is not None:
            torch.accelerator.current_stream(self.device).wait_event(mark)

    def finish(self, mark: torch.Event | None = None) -> None:
        """The host waits for `mark`, or for all that is queued."""
        if self._stream is not None:
            (mark or self._stream).synchronize()
