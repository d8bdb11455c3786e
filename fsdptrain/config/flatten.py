"""Sections in the values of a configuration, as in recipes. Imported only where there are some."""

from collections.abc import Iterator, Mapping
from typing import Any

from fsdptrain.config.keys import Key, all_keys, all_sections
from fsdptrain.config.other_names import advice, translate
from fsdptrain.config.section import Section
from fsdptrain.errors import ConfigError


def flatten_sections(values: Mapping[str, Any]) -> dict[str, Any]:
    """See `keys.flatten`."""
    flat, problems = dict[str, Any](), list[Any]()
    for name, value in values.items():
        try:
            for key, setting in _pairs(name, value):
                if key.flat in flat:
                    raise ConfigError(f"{key.section}.{key.name} is given twice, in its section and flat: give it once")
                flat[key.flat] = setting
        except ConfigError as error:
            problems += error.args
    if problems:
        raise ConfigError(*problems)
    return flat


def _pairs(key: str, value: Any) -> Iterator[tuple[Key, Any]]:
    keys, sections = all_keys(), all_sections()
    if key in sections and (isinstance(value, Mapping | Section) or key not in keys):
        yield from ((Key(sections[key], name), v) for name, v in _fields_of(key, value).items())
    elif key in keys:
        yield keys[key], value
    else:
        raise ConfigError(f"unknown key {str(key)!r}{advice(str(key), [*keys, *sections])}")


def _fields_of(section: str, value: Any) -> dict[str, Any]:
    cls = all_sections()[section]
    if isinstance(value, cls):
        return {name: v for name, v in value if name in value.model_fields_set}
    if value is None:
        return {}  # empty `model:` in YAML
    known = list(cls.model_fields)
    if not isinstance(value, Mapping):
        example = f"{{{known[0]}: {cls.model_fields[known[0]].default!r}}}"
        raise ConfigError(f"{section!r} is a section, it takes a mapping such as {example}, got {value!r}")
    for name in value:
        if name not in known:
            translated = translate(f"{section}.{name}")  # verl and OpenRLHF have a section data, too
            advised = f": {translated}" if translated else advice(str(name), known)
            raise ConfigError(f"unknown key {str(name)!r} in section {section!r}{advised}")
    return dict(value)
