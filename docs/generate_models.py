"""Writes docs/models.md from the sweep over all families, which it runs: `python docs/generate_models.py`.

Takes some minutes. A test holds the words of the page, and each row but its error, to what the sweep finds.
"""

import re
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

DOCS = Path(__file__).parent
sys.path.insert(0, str(DOCS.parent))

from tests.families import FAMILIES, REFUSED  # noqa: E402
from tests.sweep import RANKS, TOLERANCE, WORSE, Row, sweep  # noqa: E402

HEAD = f"""\
# Models

<!-- made by docs/generate_models.py: change that file, or tests/families.py -->

Nothing in fsdptrain asks a model for its name: layers, head, experts and attention are found by structure, and before
the first step the model itself is asked how it must be called. These are the families that were asked, each as a tiny
model with random weights. **All of it on a CPU, in float32, on {RANKS} ranks; no GPU path was run**: no varlen or
flash-attention, no kernel of a recurrent mixer, no half precision. With those a GPU may pack what is padded here.

For each family `tests/distributed/test_sweep.py` holds that

- **loading**: each rank read its part of what `save_pretrained` wrote, and all parameters and buffers are those of the
  plain model, bit by bit;
- **one step of GRPO**: the gradient of every parameter is that of the plain transformers model (in float64, eager,
  each sequence by itself, the loss written in the test). The error is the 2-norm of the difference relative to that of
  the gradient, of the worst parameter. It must be below {TOLERANCE:g}, or, where float32 cannot do that, below
  {WORSE:g} times the error of the plain model in float32 (in brackets). Gradients that are zero but for rounding must
  be so in both;
- **export, and weights for an engine**: the names and tensors of the files, bit by bit.

`packed` rows hold many sequences without padding; `padded` costs the padding. Ours is the attention that takes packs
with any window, softcap or sink; `sdpa` and `eager` are transformers' own, with dense masks. `replay` says whether
`--router-replay` works.

| family | attention | layout | error of the gradient | replay | remark |
|---|---|---|---|---|---|
"""

REFUSED_HEAD = """
## Refused

With this line, on all ranks, before the first step:

| family | |
|---|---|
"""

OURS = "fsdptrain_segments"
_SAID = {  # of a pack, by what its code did with it
    "differs": "in one row sequences would see each other",
    "'NoneType' object": "works on its mask itself, and packs have none",
    "a packed attention call came without": "does not tell its attention where sequences begin",
}
_NUMBER = re.compile(r" by \d[\d.e+-]*| \(tolerance [\d.e-]+(, torch\.\w+)?\)")


def row(kind: str, found: Row, *, error: str) -> str:
    """One line of the first table. `error`: what is written of the gradient; it differs a little between machines."""
    attention = "ours" if found.attention == OURS else found.attention
    replay = "" if not found.has_experts else "no" if found.replay_refusal else "yes"
    cells = [found.name, kind, f"{found.layout}, {attention}", error, replay, _remark(found)]
    return f"| {' | '.join(cells)} |"


def refused_row(found: Row) -> str:
    return f"| {found.name} | {_NUMBER.sub('', found.refusal)} |"


def error(found: Row) -> str:
    beside = f" ({found.plain_error:.0e})" if found.plain_error else ""
    return f"{found.gradient_error:.0e}{beside}{', reference in float32' if found.reference == 'float32' else ''}"


def page(rows: Iterable[Row]) -> str:
    by_name = {found.name: found for found in rows}
    lines = [row(kind, by_name[n], error=error(by_name[n])) for kind, names in FAMILIES.items() for n in names]
    refused = [refused_row(by_name[name]) for name in REFUSED]
    return HEAD + "\n".join(lines) + "\n" + REFUSED_HEAD + "\n".join(refused) + "\n"


def _remark(found: Row) -> str:
    """Why it is not packed with our attention: the first reason, without its numbers."""
    first = _NUMBER.sub("", found.reason.split("; ")[0].split(". ")[0])
    words = re.sub(rf"^(packed with )?({OURS}|eager): (\w+Error: )?", "", first)
    return next((ours for theirs, ours in _SAID.items() if words.startswith(theirs)), words)


def main() -> None:
    names = [name for members in FAMILIES.values() for name in members] + list(REFUSED)
    with tempfile.TemporaryDirectory() as folder:
        rows = sweep(names, Path(folder))
    (DOCS / "models.md").write_text(page(rows), encoding="utf-8")


if __name__ == "__main__":
    main()
