"""Curriculum: prefer rows that are sometimes solved.

If all or none of the responses to a prompt are correct, their comparison gives no learning signal. A row that comes up
in an epoch is therefore drawn with probability max(floor, 4 p (1 - p)), where p is its pass rate; it is 1 at p = 1/2.
"""

import base64
import hashlib
import zlib
from collections.abc import Mapping

import numpy as np

_PRIOR = 0.5  # prior passes and failures per row (Jeffreys); an unseen row has a pass rate of 1/2


class PassRates:
    """Pass rates by row. Each new visit scales earlier counts by `decay`.

    Stores two float32 numbers per row in memory. The state dict contains only rows that have been tried.
    """

    def __init__(self, num_rows: int, *, floor: float = 0.1, decay: float = 0.5) -> None:
        assert floor > 0, "a row that is never asked again would never be found to have changed"
        self.floor = floor
        self.decay = decay
        self._tried = np.zeros(num_rows, dtype=np.float32)  # (rows,) responses, weighted by age
        self._passed = np.zeros(num_rows, dtype=np.float32)  # (rows,) passed responses, weighted by age

    def record(self, row: int, *, passed: int, tried: int) -> None:
        """Record one visit: `tried` responses were scored, `passed` of them were correct."""
        assert 0 <= passed <= tried
        if tried:
            self._tried[row] = self.decay * self._tried[row] + tried
            self._passed[row] = self.decay * self._passed[row] + passed

    def weight(self, row: int) -> float:
        """Return the probability that `row` is drawn when it comes up; 1 for a row that was never tried."""
        rate = self._rate(self._passed[row], self._tried[row])
        return max(self.floor, float(4 * rate * (1 - rate)))

    def draws(self, row: int, *, epoch: int, seed: int) -> bool:
        """Return whether `row` is drawn in `epoch`. Reproducible: depends on seed, epoch, row and its weight only."""
        digest = hashlib.blake2b(f"{seed}/{epoch}/{row}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little") < self.weight(row) * 2.0**64

    @property
    def mean_rate(self) -> float:
        """Mean pass rate over the tried rows; 1/2 if there are none."""
        seen = self._tried > 0
        return float(self._rate(self._passed[seen], self._tried[seen]).mean()) if seen.any() else 0.5

    @property
    def seen_fraction(self) -> float:
        """Fraction of rows that have been tried."""
        return float((self._tried > 0).mean())

    def state_dict(self) -> dict[str, str]:
        """Return a JSON-serializable, bit-exact state: row indices (delta-encoded to compress well), tried, passed."""
        (rows,) = np.nonzero(self._tried)
        steps = np.diff(rows, prepend=0)
        return {
            "rows": _to_text(steps.astype("<i4")),
            "tried": _to_text(self._tried[rows].astype("<f4")),
            "passed": _to_text(self._passed[rows].astype("<f4")),
        }

    def load_state_dict(self, state: Mapping[str, str]) -> None:
        rows = np.cumsum(np.frombuffer(_to_bytes(state["rows"]), dtype="<i4"))
        for name, values in (("tried", self._tried), ("passed", self._passed)):
            values[:] = 0
            values[rows] = np.frombuffer(_to_bytes(state[name]), dtype="<f4")

    @staticmethod
    def _rate(passed: np.ndarray, tried: np.ndarray) -> np.ndarray:
        return (passed + _PRIOR) / (tried + 2 * _PRIOR)


def _to_text(values: np.ndarray) -> str:
    return base64.b64encode(zlib.compress(values.tobytes())).decode()


def _to_bytes(text: str) -> bytes:
    return zlib.decompress(base64.b64decode(text))
