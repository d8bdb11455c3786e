"""Run the sweep over all families and write docs/models.md: `python docs/generate_models.py`.

Takes some minutes. A test checks the text of the page, and each row except its error.
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

fsdptrain does not look at model names: it finds layers, head, experts and attention by structure, and probes the model
before the first step. The families below were tested as tiny models with random weights, **on a CPU, in float32, on
{RANKS} ranks; no GPU path was run**: no varlen or flash-attention, no kernel of a recurrent mixer, no half precision.
With these a GPU may pack what is padded here.

`tests/distributed/test_sweep.py` checks for each family:

- **loading**: each rank reads its part of what `save_pretrained` wrote; all parameters and buffers equal those of the
  plain model bitwise.
- **one step of GRPO**: the gradient of every parameter equals that of the plain transformers model (float64, eager, one
  sequence at a time, loss written in the test). The error is the 2-norm of the difference relative to the gradient, for
  the worst parameter. It must be below {TOLERANCE:g} or, if float32 cannot reach that, below {WORSE:g} times the error
  of the plain model in float32 (in brackets). Gradients that are zero except for rounding must be so in both.
- **export and weight sync**: names and tensors of the files, bitwise.

`packed` rows contain many sequences without padding; `padded` rows have padding. `ours` is fsdptrain's attention for
packs, with any window, softcap or sink; `sdpa` and `eager` are transformers', with dense masks. `replay`: whether
`--router-replay` works.

| family | attention | layout | error of the gradient | replay | remark |
|---|---|---|---|---|---|
"""

REFUSED_HEAD = """
## Rejected

With this message, on all ranks, before the first step:

| family | message |
|---|---|
"""

PACKAGE_ATTENTION = "fsdptrain_segments"
_REMARKS = {  # start of the reason -> remark
    "differs": "sequences in one row affect each other",
    "'NoneType' object": "modifies its mask, and packs have none",
    "a packed attention call came without": "does not pass sequence boundaries to its attention",
}
_NUMBER = re.compile(r" by \d[\d.e+-]*| \(tolerance [\d.e-]+(, torch\.\w+)?\)")


def row(kind: str, found: Row, *, error: str) -> str:
    """Return a row of the first table. `error`: the cell of the gradient, which differs slightly between machines."""
    attention = "ours" if found.attention == PACKAGE_ATTENTION else found.attention
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
    """Return the first reason why the model is not packed with our attention, without numbers."""
    first = _NUMBER.sub("", found.reason.split("; ")[0].split(". ")[0])
    words = re.sub(rf"^(packed with )?({PACKAGE_ATTENTION}|eager): (\w+Error: )?", "", first)
    return next((ours for theirs, ours in _REMARKS.items() if words.startswith(theirs)), words)


def main() -> None:
    names = [name for members in FAMILIES.values() for name in members] + list(REFUSED)
    with tempfile.TemporaryDirectory() as folder:
        rows = sweep(names, Path(folder))
    (DOCS / "models.md").write_text(page(rows), encoding="utf-8")


if __name__ == "__main__":
    main()
