"""The texts of --help: one screen, one section or a search, and all options. The last is drawn by tyro."""

import dataclasses
import shutil
import sys
import textwrap
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, get_args, get_origin

from fsdptrain.config.flags import RECIPE, Option, config_options
from fsdptrain.config.keys import all_keys, all_sections
from fsdptrain.errors import ConfigError
from fsdptrain.registry import suggest

Groups = Mapping[str, Mapping[str, Option]]  # box of the help text -> options; "" is the top level

SHORT = """\
Reinforcement learning on any Hugging Face model, with PyTorch's own FSDP2.

  fsdptrain demo                       a run of a minute, on a CPU, no network
  fsdptrain --recipe gsm_symbolic_qwen3_4b --dry-run
  fsdptrain --hf-checkpoint Qwen/Qwen3-4B --prompt-data my.jsonl --reward math

Options that most runs set:
  --recipe NAME              an included recipe, or a YAML file with options
  --hf-checkpoint MODEL      what to train: a Hub id or a folder
  --prompt-data DATA ...     a .jsonl or .csv file, a Hub id, reasoning_gym:TASK
  --reward NAME ...          math, code, exact, judge, package.module:function
  --algorithm NAME           grpo, dapo, gspo, sft, ...
  --lr, --num-rollout        learning rate; rollouts (steps) to run
  --rollout-batch-size       prompts per rollout; --n-samples-per-prompt each
  --rollout-max-response-len tokens per response
  --max-tokens-per-gpu       tokens per forward pass: memory against speed
  --rollout-engine           hf, vllm, vllm-server
  --lora-rank                train an adapter; --load-in-4bit for QLoRA
  --fsdp-cpu-offload         keep weights and optimizer in host memory
  --nproc-per-node           processes on this machine; default: its GPUs
  --output-dir               where to write; the same command resumes there
  --dry-run                  check everything, print each value with its source

Commands (fsdptrain COMMAND --help):
{commands}

More:
  --help-all                 every option; also docs/configuration.md
  --help WORD                a section (lora, optim, ...) or a search: --help kl
  --version                  versions of fsdptrain, torch, transformers, vllm"""
FULL = """\
Reinforcement learning on any Hugging Face model, with PyTorch's own FSDP2.

All options of a run. `fsdptrain --help` prints one screen.

Precedence: flag > recipe > preset > default. --dry-run shows each source."""


def asks_for_help(argv: Sequence[str]) -> bool:
    return "--help" in argv or "-h" in argv


def print_run_help(argv: Sequence[str], commands: Mapping[str, str]) -> None:
    """Print one screen; after `--help WORD` a section or what has the word; after --help-all all options.

    commands: one line each, by name.
    """
    if "--help-all" in argv:
        print_all_options()
        return
    at = next((i for i, word in enumerate(argv) if word in ("--help", "-h", "help")), len(argv))
    topic = argv[at + 1] if len(argv) > at + 1 and not argv[at + 1].startswith("--") else None
    if topic is not None:
        print_topic(topic)
        return
    listed = "\n".join(f"  {name:<9} {line}" for name, line in commands.items())
    sys.stdout.write(SHORT.format(commands=listed) + "\n")


def print_topic(word: str) -> None:
    """Print the options of the section `word`; else those with the word in the flag or the help text.

    Raises ConfigError if there are none.
    """
    options, keys = config_options(), all_keys()
    word = word.lower()
    if word in all_sections():
        found = [flat for flat, key in keys.items() if key.section == word]
        sys.stdout.write(f"{all_sections()[word].__doc__ or word}\n\n")
    else:
        plain = word.lstrip("-").replace("_", "-")
        in_flag = [flat for flat, option in options.items() if plain in option.flag]
        found = in_flag + [
            flat for flat, option in options.items() if word in option.help.lower() and flat not in in_flag
        ]
    if not found:
        known = [*all_sections(), *(option.flag[2:] for option in options.values())]
        raise ConfigError(
            f"--help {word}: no section, flag or help text has this word{suggest(word, known)}; --help-all prints all"
        )
    width = min(100, shutil.get_terminal_size().columns)
    for flat in found:
        sys.stdout.write(_describe(options[flat], keys[flat].section, width))


def _describe(option: Option, section: str, width: int) -> str:
    inner = [choice for choice in get_args(option.annotation) if choice is not type(None)]
    is_optional = type(None) in get_args(option.annotation)
    if option.annotation is bool:
        kind = ""
    elif option.many:
        kind = " KEY=VALUE ..." if get_origin(option.annotation) is dict else " VALUE ..."
    else:
        kind = " " + _metavar(inner[0] if is_optional else option.annotation)
    shown = " ".join(map(str, option.default)) if isinstance(option.default, list) else option.default
    lines = [f"{option.flag}{kind}  [{section}; default: {'none' if shown in (None, '', {}) else shown}]"]
    return (
        "\n".join([*lines, *textwrap.wrap(option.help, width, initial_indent="    ", subsequent_indent="    ")]) + "\n"
    )


def print_options(prog: str, description: str, options: Mapping[str, Option]) -> int:
    """Print the options of a command with help text and default."""
    _print_help(prog, description, {"": options})
    return 0


def print_all_options() -> None:
    """Print all options of a run with help text and default, one box per section."""
    options = config_options()
    groups = {"": {"recipe": RECIPE}} | {
        section: {flat: options[flat] for flat, key in all_keys().items() if key.section == section}
        for section in all_sections()
    }
    _print_help("fsdptrain", FULL, groups)


def _print_help(prog: str, description: str, groups: Groups) -> None:
    import tyro  # lazy: takes 0.5 s

    try:
        tyro.cli(_view(groups), prog=prog, description=description, args=["--help"])
    except SystemExit:
        sys.stdout.flush()


def _view(groups: Groups) -> type:
    """Build a dataclass that tyro turns into flags."""
    mapping = _mapping_constructor()
    fields: list[tuple[str, Any, Any]] = []
    for group, options in groups.items():
        members = [_member(name, option, mapping) for name, option in options.items()]
        if not group:
            fields += members
            continue
        section = dataclasses.make_dataclass(group, members)
        section.__doc__ = all_sections()[group].__doc__ or ""
        fields.append((group, section, dataclasses.field(default_factory=section)))
    return dataclasses.make_dataclass("Options", fields)


def _member(name: str, option: Option, mapping: Any) -> tuple[str, Any, Any]:
    import tyro

    inner = [choice for choice in get_args(option.annotation) if choice is not type(None)]
    metavar = _metavar(inner[0]) if type(None) in get_args(option.annotation) else None  # avoids the metavar {None}|STR
    marks: list[Any] = [tyro.conf.arg(name=option.flag[2:], prefix_name=False, help=option.help, metavar=metavar)]
    if get_origin(option.annotation) is dict:
        marks.append(mapping)
    annotation = Annotated[(option.annotation, *marks)]  # pyright: ignore[reportInvalidTypeForm]
    return name, annotation, dataclasses.field(default_factory=lambda: option.default)


def _metavar(annotation: Any) -> str:
    choices = get_args(annotation)
    return f"{{{','.join(choices)}}}" if choices else annotation.__name__.upper()


def _mapping_constructor() -> Any:
    import tyro

    return tyro.constructors.PrimitiveConstructorSpec(
        nargs="*",
        metavar="[KEY=VALUE ...]",
        instance_from_str=lambda words: dict(word.split("=", 1) for word in words),
        is_instance=lambda value: isinstance(value, dict),
        str_from_instance=lambda mapping: [f"{key}={value}" for key, value in mapping.items()],
    )
