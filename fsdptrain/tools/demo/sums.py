"""Sums of two digits, the task of `fsdptrain demo --model`: its rows and its reward."""

import json
import re
from pathlib import Path

from fsdptrain.types import Prompt


def write_sums(target: Path) -> None:
    """Write the 100 sums of two digits as JSON lines."""
    with target.open("w") as file:
        for left in range(10):
            for right in range(10):
                question = f"What is {left} + {right}? Reply with only the number."
                file.write(json.dumps({"prompt": question, "label": str(left + right)}) + "\n")


def last_number(prompt: Prompt, response: str) -> float:
    """1 if the last number of the response is the label: small models write more than the number, whatever one asks."""
    return float(re.findall(r"\d+", response)[-1:] == [prompt.label])
