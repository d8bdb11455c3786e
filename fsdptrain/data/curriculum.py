"""Which rows are worth asking again: those that are sometimes solved.

Where every answer of a prompt is right, or none, nothing can be learned from comparing them. So a row that comes up in
its epoch is asked with a chance of max(floor, 4 p (1 - p)), p its pass rate: 1 where half of the answers pass.
"""

import base64
import hashlib
import zlib
from collections.abc import Mapping

import numpy as np

_PRIOR = 0.5  # passes and failures that each row is thought to have had (Jeffreys): an unseen row has a rate of 1/2


class PassRates:
    """How often the answers to each row passed, with older ones forgotten by `decay` at each new visit.

    Two float32 numbers for each row in memory; its state holds the rows that were ever tried and nothing of the others.
    """

    def __init__(self, num_rows: int, *, floor: float, decay: float) -> None:
        assert floor > 0, "a row that is never asked again would never be found to have changed"
        self.floor = floor
        self.decay = decay
        self._tried = np.zeros(num_rows, dtype=np.float32)  # (rows,) answers, weighted by their age
        self._passed = np.zeros(num_rows, dtype=np.float32)  # (rows,) those of them that passed

    def record(self, row: int, *, passed: int, tried: int) -> None:
        """One visit: `tried` answers could be scored, `passed` of them were right."""
        assert 0 <= passed <= tried
        if tried:
            self._tried[row] = self.decay * self._tried[row] + tried
            self._passed[row] = self.decay * self._passed[row] + passed

    def weight(self, row: int) -> float:
        """The chance that `row` is asked when it comes up; 1 for a row that was never tried."""
        rate = self._rate(self._passed[row], self._tried[row])
        return max(self.floor, float(4 * rate * (1 - rate)))

    def draws(self, row: int, *, epoch: int, seed: int) -> bool:
        """Whether `row` is asked in `epoch`: by chance, but the same wherever and whenever it is asked for."""
        digest = hashlib.blake2b(f"{seed}/{epoch}/{row}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little") < self.weight(row) * 2.0**64

    @property
    def mean_rate(self) -> float:
        """Over the rows that were tried; 1/2 where none was."""
        seen = self._tried > 0
        return float(self._rate(self._passed[seen], self._tried[seen]).mean()) if seen.any() else 0.5

    @property
    def seen_fraction(self) -> float:
        """The share of rows that were ever tried."""
        return float((self._tried > 0).mean())

    def state_dict(self) -> dict[str, str]:
        """What JSON can hold, to the bit: indices (as differences, which compress), tried and passed."""
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
