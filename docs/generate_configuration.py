"""Writes docs/configuration.md and docs/coming_from_slime.md from the code: `python docs/generate_configuration.py`.

A test holds the pages to what this makes.
"""

import re
import types
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

from fsdptrain.config.former_flags import FORMER_FLAGS
from fsdptrain.config.keys import SECTIONS, Key, all_keys

DOCS = Path(__file__).parent

CONFIGURATION = """\
# Configuration

<!-- made by docs/generate_configuration.py: change the docstrings in fsdptrain/config/sections.py -->

Every option works on the command line, in a recipe and in Python. The option `cpu_offload` of the section `fsdp`:

| where | how |
|---|---|
| command line | `--fsdp-cpu-offload` (and `--no-fsdp-cpu-offload`: every boolean has both) |
| recipe, in its section | `fsdp: {cpu_offload: true}` |
| recipe, flat | `fsdp_cpu_offload: true` |
| Python | `Config(fsdp_cpu_offload=True)` or `Config(fsdp={"cpu_offload": True})` |

Sections `lora`, `fsdp`, `rollout`, `ref`, `router` and `log` put their name before their flags, the others do not.
Defaults give way to the recipe (`--recipe FILE`), and the recipe to flags. The preset of an algorithm stands just below
whoever names it: an `--algorithm` that differs from the recipe's wins over what the recipe says of loss, clip,
aggregation and advantage. `--dry-run` prints every value with its source, and is a recipe itself; so is the
`config.yaml` in the folder of a run. Unknown keys, and options that would have no effect, are errors.

Lists take several words: `--reward math format=0.2`. Mappings take `key=value`: `--chat-template-kwargs
enable_thinking=false`. `None` unsets an option that has no default value.
"""

SLIME = """\
# Coming from slime

<!-- made by docs/generate_configuration.py: change fsdptrain/config/former_flags.py -->

What became of the flags of slime's FSDP backend. The command line knows this table: an unknown flag that stands in it
is answered with its row. Booleans that are on by default can be turned off here (`--no-x`), a recipe wins over
defaults, and flags win over a recipe.

| there (its default) | here (its default) | |
|---|---|---|
"""


def configuration_page() -> str:
    """docs/configuration.md."""
    parts = [CONFIGURATION]
    for section, cls in SECTIONS.items():
        rows = [_option_row(key) for key in all_keys().values() if key.section == section]
        parts.append(f"\n## `{section}`: {_sentence(cls.__doc__)}\n\n| flag | takes | default | |\n|---|---|---|---|\n")
        parts.append("".join(rows))
    return "".join(parts)


def slime_page() -> str:
    """docs/coming_from_slime.md."""
    return SLIME + "".join(_former_row(flag) for flag in FORMER_FLAGS)


def _option_row(key: Key) -> str:
    default = key.default
    return f"| `{key.flag}` | {_takes(key.field.annotation)} | {_value(default)} | {_cell(key.field.description)} |\n"


def _former_row(flag: str) -> str:
    former = FORMER_FLAGS[flag]
    there = f"`{flag}`" + (f" ({former.default})" if former.default else "")
    note = former.note[:1].upper() + former.note[1:] if not former.note.startswith(("`", "--")) else former.note
    if not former.here:
        return f"| {there} | none | {_cell(note)} |\n"
    key = next(key for key in all_keys().values() if key.flag == former.here)
    default = key.default
    name = "the same" if former.here == flag else f"`{former.here}`"
    return f"| {there} | {name} ({_value(default)}) | {_cell(note)} |\n"


def _takes(annotation: Any) -> str:
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return ", ".join(f"`{choice}`" for choice in args)
    if origin in (Union, types.UnionType):
        return " or ".join(_takes(choice) for choice in args if choice is not type(None))
    if origin is list:
        return "texts"
    if origin is dict:
        return "`key=value`, several"
    return {bool: "yes or no", int: "whole number", float: "number", str: "text"}[annotation]


def _value(default: Any) -> str:
    if isinstance(default, bool):
        return "on" if default else "off"
    if default in (None, "", {}):
        return "none"
    if isinstance(default, list):
        return " ".join(f"`{item}`" for item in default)
    return f"`{default:g}`" if isinstance(default, float) else f"`{default}`"


def _sentence(text: str | None) -> str:
    return _cell(text).rstrip(".")


def _cell(text: str | None) -> str:
    escaped = " ".join((text or "").split()).replace("|", "\\|")
    return re.sub(r"\bdocs/(\w+\.md)", r"[\1](\1)", escaped)


if __name__ == "__main__":
    (DOCS / "configuration.md").write_text(configuration_page(), encoding="utf-8")
    (DOCS / "coming_from_slime.md").write_text(slime_page(), encoding="utf-8")
