"""--stop-when: a metric, a relation and a number."""

import operator
import re
from collections.abc import Mapping
from dataclasses import dataclass

from fsdptrain.errors import ConfigError

_RELATIONS = {">": operator.gt, ">=": operator.ge, "<": operator.lt, "<=": operator.le}
_NUMBER = r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?"
_FORM = re.compile(rf"\s*([^\s<>=]+)\s*([<>]=?)\s*({_NUMBER})\s*")


@dataclass(frozen=True)
class StopWhen:
    text: str
    metric: str
    relation: str
    bound: float

    @classmethod
    def parse(cls, text: str) -> "StopWhen":
        """Parse e.g. `eval/heldout/accuracy>0.9`. Raises ConfigError."""
        match = _FORM.fullmatch(text)
        if match is None:
            form = "a metric, one of > >= < <=, and a number, in quotes"
            raise ConfigError(f"--stop-when must be {form}: 'eval/heldout/accuracy>0.9', got {text!r}")
        return cls(text, match[1], match[2], float(match[3]))

    @property
    def of_evaluation(self) -> bool:
        return self.metric.startswith("eval/")

    def holds(self, metrics: Mapping[str, float]) -> bool:
        return self.metric in metrics and _RELATIONS[self.relation](metrics[self.metric], self.bound)
