"""Command lines that a command passes on to another."""

from collections.abc import Mapping, Sequence

from fsdptrain.config.flags import Option, take


def without(argv: Sequence[str], options: Mapping[str, Option]) -> list[str]:
    """Return `argv`, which must be valid for `parse`, without `options` and their values."""
    by_flag = {option.flag: option for option in options.values()}
    others: list[str] = []
    rest = list(argv)
    while rest:
        word = rest.pop(0)
        flag, equals, _ = word.partition("=")
        option = by_flag.get(flag.replace("_", "-") if flag.startswith("--") else flag)
        if option is None:
            others.append(word)
        elif option.annotation is not bool and not equals:
            take(rest, many=option.many)
    return others
