"""The names of experts in a checkpoint: `...experts.5.up_proj.weight`.

Imported in vLLM's own processes too: it needs the standard library and nothing else.
"""

import re
from collections.abc import Iterable

EXPERT = re.compile(r"(?P<experts>.*\.experts)\.(?P<number>\d+)\.(?P<part>\w+)\.weight")


def missing_experts(came: Iterable[str]) -> list[str]:
    """Names that `came` lacks: all layers have as many experts, and of those that lie together each has the parts that
    any of them has. vLLM fuses them, and takes the whole for loaded when one has come."""
    found: dict[str, set[tuple[int, str]]] = {}
    for match in filter(None, map(EXPERT.fullmatch, came)):
        found.setdefault(match["experts"], set()).add((int(match["number"]), match["part"]))
    count = max((number + 1 for held in found.values() for number, _ in held), default=0)
    return [
        f"{experts}.{number}.{part}.weight"
        for experts, held in found.items()
        for number in range(count)
        for part in sorted({part for _, part in held})
        if (number, part) not in held
    ]
