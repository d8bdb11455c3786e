"""Writes docs/configuration.md from the code: `python docs/generate_configuration.py`.

A test compares the page with the output.
"""

import re
import types
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

from fsdptrain.config.keys import Key, all_keys, all_sections

DOCS = Path(__file__).parent

CONFIGURATION = """\
# Configuration

<!-- made by docs/generate_configuration.py: change the docstrings of the sections -->

Every option works on the command line, in a recipe and in Python. The option `cpu_offload` of the section `fsdp`:

| where | how |
|---|---|
| command line | `--fsdp-cpu-offload` (and `--no-fsdp-cpu-offload`: every boolean has both) |
| recipe, in its section | `fsdp: {cpu_offload: true}` |
| recipe, flat | `fsdp_cpu_offload: true` |
| Python | `Config(fsdp_cpu_offload=True)` or `Config(fsdp={"cpu_offload": True})` |

Flags of some sections have a prefix; the tables show the flags. Sections of features, of vLLM and of megatron-core
exist if their folders are installed, and an installed package can add sections: see [architecture.md](architecture.md).

Precedence: flag > recipe > preset of the algorithm > default. A preset ranks just below the source that names its
algorithm: an `--algorithm` that differs from the recipe's overrides the recipe's loss, clip, aggregation and advantage.
`--dry-run` prints every value with its source. Its output is a recipe, and so is the `config.yaml` of a run. Unknown
and ineffective options are rejected with a suggested fix.

Lists take several words: `--reward math format=0.2`. Mappings take `key=value`: `--chat-template-kwargs
enable_thinking=false`. `None` unsets an option that has no default value.
"""


def configuration_page() -> str:
    """docs/configuration.md."""
    parts = [CONFIGURATION]
    for section, cls in all_sections().items():
        rows = [_option_row(key) for key in all_keys().values() if key.section == section]
        parts.append(f"\n## `{section}`: {_sentence(cls.__doc__)}\n\n| flag | takes | default | |\n|---|---|---|---|\n")
        parts.append("".join(rows))
    return "".join(parts)


def _option_row(key: Key) -> str:
    default = key.default
    return f"| `{key.flag}` | {_takes(key.field.annotation)} | {_value(default)} | {_cell(key.field.description)} |\n"


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
