"""Extension of griffe for docs/python_api.md: the comment beside a field of a record becomes its description."""

import re
from typing import Any

import griffe

COMMENT = re.compile(r"\s{2,}# (.*)$")


class FieldComments(griffe.Extension):
    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        """Describe the fields of the records."""
        for cls in pkg["types"].classes.values():
            lines = [
                _line(cls, name, field) for name, field in cls.attributes.items() if "property" not in field.labels
            ]
            if lines and not cls.is_alias and cls.docstring:
                cls.docstring.value += "\n\nAttributes:\n" + "\n".join(lines)


def _line(cls: griffe.Class, name: str, field: griffe.Attribute) -> str:
    assert isinstance(field.lineno, int)
    source = cls.module.lines_collection[cls.module.filepath][field.lineno - 1]
    comment = COMMENT.search(source)
    text = field.docstring.value if field.docstring else comment[1] if comment else "-"
    field.docstring = None  # shown here, and not a second time
    return f"    {name}: {' '.join(text.split())}"
