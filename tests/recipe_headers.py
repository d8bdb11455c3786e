"""What the comments at the top of a recipe say."""

import re
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

RECIPES = sorted((Path(__file__).parents[1] / "fsdptrain" / "recipes").glob("*.yaml"))
HARDWARE = re.compile(r"CPU|(?:(\d+) nodes x )?(\d+) x (\d+) GB")


@dataclass(frozen=True)
class Header:
    summary: str
    commands: tuple[str, ...]
    hardware: str
    time: str | None

    @property
    def machine(self) -> tuple[int, int, int]:
        """(nodes, GPUs per node, GB per GPU), 0 GPUs for a CPU."""
        found = HARDWARE.fullmatch(self.hardware)
        assert found, self.hardware
        nodes, gpus, size = found.groups()
        return int(nodes or 1), int(gpus or 0), int(size or 0)


def read_header(path: Path) -> Header:
    header = takewhile(lambda line: line.startswith("#"), path.read_text().splitlines())
    lines = [line[1:].removeprefix(" ") for line in header]
    labels = dict(line.split(": ", 1) for line in lines if re.match(r"(Hardware|Time): ", line))
    commands = [line.strip() for line in lines if line.startswith("    ")]
    return Header(lines[0], tuple(commands), labels.get("Hardware", ""), labels.get("Time"))
