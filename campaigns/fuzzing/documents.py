"""JSON documents with something wrong in them, as bytes."""

import copy
import json
from typing import Any

from hypothesis import strategies as st

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-3, 3)
    | st.sampled_from([2**31, 2**63, 10**30, -(10**18), 1e300])
    | st.floats()
    | st.text(max_size=6)
    | st.sampled_from(["", "../x", "/etc/passwd", "a\0b", "x" * 300, "\ud800"])
)
JSON = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
DEEP = b"[" * 9000


@st.composite
def changed(draw: st.DrawFn, good: Any) -> Any:
    """Draw a copy of `good` in which up to three values are replaced, removed or added."""
    document = copy.deepcopy(good)
    for _ in range(draw(st.integers(0, 3))):
        document = _change(draw, document)
    return document


def _change(draw: st.DrawFn, document: Any) -> Any:
    if not isinstance(document, dict | list) or not document or draw(st.integers(0, 4)) == 0:
        return draw(JSON)
    keys = list(document) if isinstance(document, dict) else list(range(len(document)))
    key = draw(st.sampled_from(keys))
    action = draw(st.sampled_from(["descend", "descend", "descend", "remove", "add"]))
    if action == "remove":
        del document[key]
    elif action == "add" and isinstance(document, dict):
        document[draw(st.text(max_size=4))] = draw(JSON)
    elif action == "add":
        document.append(draw(JSON))
    else:
        document[key] = _change(draw, document[key])
    return document


@st.composite
def broken(draw: st.DrawFn, good: Any, *, lines: bool = False) -> bytes:
    """Draw the bytes of a changed document (with `lines`: of a list, one item per line), themselves cut or changed."""
    document = draw(changed(good))
    if lines:
        rows = document if isinstance(document, list) else [document]
        content = "".join(json.dumps(row) + "\n" for row in rows).encode()
    else:
        content = json.dumps(document).encode()
    return draw(damaged(content))


@st.composite
def damaged(draw: st.DrawFn, content: bytes) -> bytes:
    """Draw `content`, whole or with other bytes in it."""
    at = draw(st.integers(0, len(content)))
    action = draw(st.sampled_from(["whole", "whole", "whole", "cut", "insert", "flip", "deep", "other"]))
    if action == "cut":
        return content[:at]
    if action == "insert":
        return content[:at] + draw(st.binary(max_size=8)) + content[at:]
    if action == "flip" and at < len(content):
        return content[:at] + bytes([content[at] ^ (1 << draw(st.integers(0, 7)))]) + content[at + 1 :]
    if action == "deep":
        return content[:at] + DEEP + content[at:]
    return draw(st.binary(max_size=60)) if action == "other" else content
