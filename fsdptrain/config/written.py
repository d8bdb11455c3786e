"""Writing of a configuration as a recipe: config.yaml of a run, and --dry-run."""

import math
import re
from collections.abc import Mapping
from typing import Any

import yaml

from fsdptrain.config.keys import all_keys
from fsdptrain.config.root import Config

# Python's floats without a point (1e-6), which YAML 1.1 takes for strings
FLOAT = re.compile(r"^[-+]?(?:[0-9][0-9_]*\.?[0-9_]*|\.[0-9][0-9_]*)[eE][-+]?[0-9]+$")
_NOT_WRITTEN = ("dry_run",)  # it would make the recipe only print itself


def to_yaml(config: Config, sources: Mapping[str, str] | None = None) -> str:
    """Format `config` as a recipe with all values and, from `sources` (by flat key), aligned source comments."""
    lines: list[tuple[str, str]] = []
    section = ""
    for flat, key in all_keys().items():
        if flat in _NOT_WRITTEN:
            continue
        if key.section != section:
            section = key.section
            lines.append((f"{section}:", ""))
        lines.append((f"  {key.name}: {_scalar(key.value(config))}", f"  # {sources[flat]}" if sources else ""))
    width = max(min(len(line), 60) for line, _ in lines)
    return "".join(f"{line:<{width}}{source}\n" if source else f"{line}\n" for line, source in lines)


def _scalar(value: Any) -> str:
    """Format `value` on one line."""
    in_list = yaml.dump(
        [value], Dumper=_Dumper, default_flow_style=True, width=math.inf, allow_unicode=True, sort_keys=False
    )
    return in_list.strip()[1:-1]


class _Dumper(yaml.SafeDumper):
    """YAML dumper that quotes strings that the loader of recipes would read as numbers."""


def _string(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    """Quote text with line breaks or other unprintable characters, which plain YAML folds or rejects."""
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=None if text.isprintable() else '"')


_Dumper.add_representer(str, _string)
_Dumper.add_implicit_resolver("tag:yaml.org,2002:float", FLOAT, list("-+0123456789."))
