"""Advice for names of other trainers' options and of removed ones: other_names.ini. Imported after an error only."""

import re
from collections.abc import Mapping
from configparser import RawConfigParser
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path

from fsdptrain.registry import suggest

FILE = Path(__file__).with_suffix(".ini")
_LINK = re.compile(r"\[([^]]*)\]\([^)]*\)")  # of Markdown
NONE = "none"  # in place of a flag: there is no such option here


@cache
def tables() -> Mapping[str, Mapping[str, tuple[str, str]]]:
    """Return trainer -> name there -> (flag here or `none`, note)."""
    return {
        trainer: {name: (here.strip(), note.strip()) for name, (here, _, note) in rows}
        for trainer, section in sections().items()
        if trainer != "advice"
        for rows in [[(name, text.partition("|")) for name, text in section.items()]]
    }


def as_flag(name: str) -> str:
    """Return an option's name in the form of flags here: `--learning-rate` for `learning_rate`."""
    return "--" + name.lstrip("-+").replace("_", "-")


def translate(name: str) -> str:
    """Return advice for the `name` that another trainer gives an option, or ""."""
    flag = as_flag(name)
    for pattern, sentence in sections()["advice"].items():
        if fnmatchcase(flag[2:], pattern):
            return sentence
    here, note = names_here().get(flag, ("", ""))
    if note:
        note = " (" + _LINK.sub(r"\1", note).replace("`", "") + ")"
    if here == NONE:
        return f"there is none here{note}: leave it out"
    return f"it is {here} here{note}" if here else ""


def advice(name: str, known: list[str]) -> str:
    """Return advice for an unknown `name`: the name here of another trainer's option, or the nearest name."""
    translated = translate(name)
    return f": {translated}" if translated else suggest(name, known, cutoff=0.8)


@cache
def names_here() -> Mapping[str, tuple[str, str]]:
    """Return the names of all trainers that are none here, as flags -> (flag here or `none`, note)."""
    rows = [(as_flag(name), row) for table in [*tables().values()][::-1] for name, row in table.items()]
    return {flag: row for flag, row in rows if flag != row[0]}


@cache
def sections() -> Mapping[str, Mapping[str, str]]:
    parser = RawConfigParser(delimiters=("=",), comment_prefixes=("#",), strict=True)
    parser.optionxform = str  # type: ignore[assignment]  # names keep their case
    parser.read_string(FILE.read_text(encoding="utf-8"))
    return {name: dict(parser[name]) for name in parser.sections()}
