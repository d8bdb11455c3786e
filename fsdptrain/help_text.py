"""The texts of --help: one screen, one section or a search, and all options. Imported for these only."""

import re
import shutil
import sys
import textwrap
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from itertools import takewhile
from typing import Any, Literal, get_args, get_origin

from fsdptrain import __version__
from fsdptrain.config.flags import RECIPE, Option, config_options
from fsdptrain.config.keys import all_keys, all_sections
from fsdptrain.errors import ConfigError
from fsdptrain.registry import suggest

SHORT = """\
RL and supervised fine-tuning for Hugging Face models with PyTorch's FSDP2.

  fsdptrain demo                       one to two minutes on a CPU, no network
  fsdptrain --recipe gsm_symbolic_qwen3_4b --dry-run
  fsdptrain --hf-checkpoint Qwen/Qwen3-4B --prompt-data my.jsonl --reward math

Options that most runs set:
  --recipe NAME              an included recipe, or a YAML file with options
  --hf-checkpoint MODEL      what to train: a Hub id or a folder
  --prompt-data DATA ...     a .jsonl or .csv file, a Hub id, reasoning_gym:TASK
  --reward NAME ...          math, code, exact, package.module:function
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
  --dry-run                  check everything, print what was set and read

Commands (fsdptrain COMMAND --help):
{commands}

More:
  --help-all                 every option; also docs/configuration.md
  --help WORD                a section (lora, optim, ...) or a search: --help kl
  --version                  versions of fsdptrain, torch, transformers, vllm"""
FULL = """\
usage: fsdptrain [OPTIONS]

All options of a run. `fsdptrain --help` prints one screen.

Precedence: flag > recipe > preset > default. --dry-run full shows each source.
"""


def print_run_help(argv: Sequence[str], commands: Mapping[str, str]) -> None:
    """Print one screen; after `--help WORD ...` a section or what has the words; after --help-all all options.

    commands: one line each, by name.
    """
    if "--help-all" in argv:
        sys.stdout.write(f"{FULL}\n{_describe(RECIPE)}")
        for section in all_sections():
            _print_section(section)
        return
    at = next((i for i, word in enumerate(argv) if word in ("--help", "-h", "help")), len(argv))
    topic = " ".join(takewhile(lambda word: not word.startswith("--"), argv[at + 1 :]))
    if topic:
        print_topic(topic)
        return
    listed = "\n".join(f"  {name:<9} {line}" for name, line in commands.items())
    sys.stdout.write(SHORT.format(commands=listed) + "\n")


def print_version() -> int:
    """Print the versions of fsdptrain and of the packages that results depend on, without importing them."""
    found = {}
    for name in ("torch", "transformers", "vllm"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    others = ", ".join(f"{name} {number}" for name, number in found.items())
    sys.stdout.write(f"fsdptrain {__version__} ({others}, Python {sys.version.split()[0]})\n")
    return 0


def print_topic(word: str) -> None:
    """Print the options of the section `word`; else those with it in the flag, or all its parts in the help text.

    Raises ConfigError if there are none.
    """
    options = config_options()
    word = word.lower()
    if word in all_sections():
        _print_section(word)
        return
    plain = re.sub("[_ ]", "-", word.lstrip("-"))
    matches = [flat for flat, option in options.items() if plain in option.flag]
    texts = {flat: option.help.lower() for flat, option in options.items() if flat not in matches}
    matches += [flat for flat, text in texts.items() if all(part in text for part in word.split())]
    if not matches:
        known = [*all_sections(), *(option.flag[2:] for option in options.values())]
        raise ConfigError(
            f"--help {word}: no section, flag or help text has this word{suggest(word, known)}; --help-all prints all"
        )
    sys.stdout.writelines(_describe(options[flat], all_keys()[flat].section) for flat in matches)


def print_options(prog: str, description: str, options: Mapping[str, Option]) -> int:
    """Print the options of a command with help text and default."""
    sys.stdout.write(f"usage: {prog} [OPTIONS]\n\n{description.strip()}\n\n")
    sys.stdout.writelines(map(_describe, options.values()))
    return 0


def _print_section(section: str) -> None:
    options = config_options()
    title = _wrap(f"{section}: {all_sections()[section].__doc__ or ''}", "", "")
    sys.stdout.write("\n{}\n\n".format("\n".join(title)))
    sys.stdout.writelines(_describe(options[flat]) for flat, key in all_keys().items() if key.section == section)


def _describe(option: Option, section: str = "") -> str:
    shown = " ".join(map(str, option.default)) if isinstance(option.default, list) else option.default
    default = f"default: {'none' if shown in (None, '', {}) else shown}"
    head = f"{option.flag}{_values(option.annotation)}  [{'; '.join(filter(None, (section, default)))}]"
    return "".join(f"{line}\n" for line in (*_wrap(head, "", " " * 8), *_wrap(option.help, " " * 4, " " * 4)))


def _wrap(text: str, first: str, others: str) -> list[str]:
    width = min(100, shutil.get_terminal_size().columns)
    return textwrap.wrap(text, width, initial_indent=first, subsequent_indent=others, break_on_hyphens=False)


def _values(annotation: Any) -> str:
    """Format the values that a flag takes, such as ` {auto,packed,padded}`."""
    origin = get_origin(annotation)
    if annotation is bool:
        return ""
    if origin in (list, dict):
        return " KEY=VALUE ..." if origin is dict else " VALUE ..."
    names = _names(annotation)
    return f" {names[0]}" if len(names) == 1 else f" {{{', '.join(names)}}}"


def _names(annotation: Any) -> list[str]:
    """Name the choices of an annotation, or its types."""
    if get_origin(annotation) is Literal:
        return list(map(str, get_args(annotation)))
    if inner := get_args(annotation):
        return [name for choice in inner if choice is not type(None) for name in _names(choice)]
    return [annotation.__name__.upper()]
