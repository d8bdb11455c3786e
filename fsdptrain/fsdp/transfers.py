"""Copies between device and host that overlap with computation. On a CPU the copies are synchronous."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


class Transfers:
    """A copy stream of one device. Copies run in order; the computation waits for them only in `wait`.

    Memory that a copy reads or writes must stay allocated until the computation (`wait`) or the host (`finish`) has
    waited for it. It is then freed in the order of the computation, and no check for a pending copy is needed.
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
