"""Command lines that a command passes on to another."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from fsdptrain.checkpoints import CONFIG_FILE
from fsdptrain.commands import is_run
from fsdptrain.config.flags import RECIPE, Option, take
from fsdptrain.tools.machine import HF_CHECKPOINT


def with_flag(argv: Sequence[str]) -> list[str]:
    """Return `argv` with a flag for its first word, which may be a run or a model: its options, or --hf-checkpoint."""
    if not argv or argv[0].startswith("-"):
        return list(argv)
    run = Path(argv[0])
    flags = [RECIPE.flag, str(run / CONFIG_FILE)] if is_run(run) else [HF_CHECKPOINT.flag, argv[0]]
    return [*flags, *argv[1:]]


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
