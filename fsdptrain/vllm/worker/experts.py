"""Which experts an update lacks: vLLM fuses experts, and counts the fused tensor as loaded when one has arrived."""

import re
from collections.abc import Iterable

_EXPERT = re.compile(r"(?P<experts>.*\.experts)\.(?P<number>\d+)\.(?P<part>\w+)\.weight")  # in a checkpoint


def missing_experts(received: Iterable[str]) -> list[str]:
    """Names that `received` lacks. All layers have as many experts, and all experts of a layer the same parts."""
    found: dict[str, set[tuple[int, str]]] = {}
    for match in filter(None, map(_EXPERT.fullmatch, received)):
        found.setdefault(match["experts"], set()).add((int(match["number"]), match["part"]))
    count = max((number + 1 for held in found.values() for number, _ in held), default=0)
    return [
        f"{experts}.{number}.{part}.weight"
        for experts, held in found.items()
        for number in range(count)
        for part in sorted({part for _, part in held})
        if (number, part) not in held
    ]
