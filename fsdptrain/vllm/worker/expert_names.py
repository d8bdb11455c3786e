"""Names of experts in a checkpoint: `...experts.5.up_proj.weight`."""

import re
from collections.abc import Iterable

EXPERT = re.compile(r"(?P<experts>.*\.experts)\.(?P<number>\d+)\.(?P<part>\w+)\.weight")


def missing_experts(received: Iterable[str]) -> list[str]:
    """Names that `received` lacks. All layers have the same number of experts, all experts of a layer the same parts.

    vLLM fuses experts, and counts the fused tensor as loaded when one of them has arrived.
    """
    found: dict[str, set[tuple[int, str]]] = {}
    for match in filter(None, map(EXPERT.fullmatch, received)):
        found.setdefault(match["experts"], set()).add((int(match["number"]), match["part"]))
    count = max((number + 1 for held in found.values() for number, _ in held), default=0)
    return [
        f"{experts}.{number}.{part}.weight"
        for experts, held in found.items()
        for number in range(count)
        for part in sorted({part for _, part in held})
        if (number, part) not in held
    ]
