"""The page: one HTML file with its style and script, and in a saved one the data."""

import base64
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

_SCRIPTS = ("base.js", "charts.js", "samples.js", "main.js")


@dataclass(frozen=True)
class Page:
    html: str
    policy: str  # Content-Security-Policy: the page runs its own script and loads nothing from elsewhere


def render(data: Mapping[str, Any] | None = None) -> Page:
    """Build the page. With `data`, it needs no server."""
    folder = files("fsdptrain.tools.watch") / "page"
    template, style = (folder.joinpath(name).read_text(encoding="utf-8") for name in ("page.html", "style.css"))
    script = "".join(folder.joinpath(name).read_text(encoding="utf-8") for name in _SCRIPTS)
    policy = (
        f"default-src 'none'; script-src {_digest(script)}; style-src {_digest(style)}; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'"
    )
    parts = {"POLICY": policy, "STYLE": style, "SCRIPT": script, "DATA": _as_json(data)}
    head, *rest = template.split("@@")  # @@NAME@@ in the template
    html = head + "".join(parts[part] if i % 2 == 0 else part for i, part in enumerate(rest))
    return Page(html, policy)


def _as_json(data: Mapping[str, Any] | None) -> str:
    """Encode data for a script element. Its text ends at `</script>` and changes at `<!--`, so `<` is escaped."""
    return json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")


def _digest(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
