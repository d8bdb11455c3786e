"""Shell completion for bash, zsh and fish: `fsdptrain --print-completion SHELL` prints a script.

    source <(fsdptrain --print-completion bash)                                     # in ~/.bashrc
    fsdptrain --print-completion zsh > "${fpath[1]}/_fsdptrain"
    fsdptrain --print-completion fish > ~/.config/fish/completions/fsdptrain.fish

The script is complete by itself: no key press starts Python. It holds the options of the installed version.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args, get_origin

from fsdptrain.cli import EXPORT, REPORT
from fsdptrain.config.flags import RECIPE, Option, config_options
from fsdptrain.config.keys import all_keys
from fsdptrain.config.rules import ExportChoice
from fsdptrain.config.shipped import recipe_names
from fsdptrain.errors import ConfigError
from fsdptrain.registry import suggest
from fsdptrain.rewards.build import REWARDS
from fsdptrain.tools.demo.demo import OPTIONS as DEMO
from fsdptrain.tools.evaluate import CHECKPOINT
from fsdptrain.tools.inspect.command import INSPECT
from fsdptrain.tools.plan.command import PLAN

SHELLS = ("bash", "zsh", "fish")
_HELP = {"--help": "one screen of help", "--help-all": "all options", "--version": "versions"}
_PRINT = "--print-completion"


@dataclass(frozen=True)
class Words:
    """What can be completed."""

    commands: Sequence[str]
    flags: Mapping[str, Mapping[str, str]]  # command -> flag -> help; those of `train` also without a command
    choices: Mapping[str, Sequence[str]]  # flag -> values


def completion(shell: str, commands: Sequence[str]) -> str:
    """Return the script of a shell. Raises ConfigError for an unknown one."""
    scripts = {"bash": _bash, "zsh": _zsh, "fish": _fish}
    if shell not in scripts:
        raise ConfigError(f"{_PRINT} takes one of {', '.join(SHELLS)}, got {shell!r}{suggest(shell, list(SHELLS))}")
    return scripts[shell](find_words(commands))


def find_words(commands: Sequence[str]) -> Words:
    """Collect commands, flags and choices."""
    run = {"recipe": RECIPE, **config_options()}
    exported = {flat: option for flat, option in run.items() if flat in all_keys() and _is_export_choice(flat)}
    own: Mapping[str, Mapping[str, Option]] = {
        "train": run,
        "inspect": {**INSPECT, **run},
        "plan": {**PLAN, **run},
        "eval": {"checkpoint": CHECKPOINT, **run},
        "export": {**EXPORT, **exported},
        "report": REPORT,
        "demo": DEMO,
    }
    flags = {name: _HELP | _flags(own.get(name, {})) for name in commands}
    choices = {
        option.flag: found for options in own.values() for option in options.values() if (found := _choices(option))
    }
    choices |= {RECIPE.flag: recipe_names(), "--reward": list(REWARDS), _PRINT: SHELLS}
    return Words(commands, flags, choices)


def _is_export_choice(flat: str) -> bool:
    return all_keys()[flat].is_marked(ExportChoice)


def _flags(options: Mapping[str, Option]) -> dict[str, str]:
    found: dict[str, str] = {}
    for option in options.values():
        line = option.help.partition(". ")[0].rstrip(".")
        found[option.flag] = line if len(line) <= 70 else f"{line[:67]}..."
        if option.is_switch:
            found[f"--no-{option.flag[2:]}"] = f"Turn {option.flag} off"
    return found


def _choices(option: Option) -> list[str]:
    """Return the accepted values, if the type of the option lists them."""
    return [choice for choice in _literals(option.annotation) if isinstance(choice, str)]


def _literals(annotation: Any) -> list[Any]:
    if get_origin(annotation) is Literal:
        return list(get_args(annotation))
    return [choice for inner in get_args(annotation) for choice in _literals(inner)]


def _cases(words: Words) -> str:
    """Return the branches of a case statement over the word before, in bash and zsh."""
    return "\n".join(f'    {flag}) values="{" ".join(values)}" ;;' for flag, values in words.choices.items())


def _flags_by_command(words: Words) -> str:
    return "\n".join(f'    {name}) flags="{" ".join(flags)}" ;;' for name, flags in words.flags.items())


def _bash(words: Words) -> str:
    return f"""\
_fsdptrain() {{
  local cur="${{COMP_WORDS[COMP_CWORD]}}" prev="${{COMP_WORDS[COMP_CWORD-1]}}" command=train values="" flags=""
  if [[ $cur == "=" ]]; then cur=""
  elif [[ $prev == "=" ]]; then prev="${{COMP_WORDS[COMP_CWORD-2]}}"; fi
  if (( COMP_CWORD > 1 )); then
    case "${{COMP_WORDS[1]}}" in {"|".join(words.commands)}) command="${{COMP_WORDS[1]}}" ;; esac
  fi
  case "$prev" in
{_cases(words)}
  esac
  if [[ $command == recipes ]]; then values="show {" ".join(words.choices[RECIPE.flag])}"; fi
  case "$command" in
{_flags_by_command(words)}
  esac
  if [[ $cur == -* ]]; then
    if (( COMP_CWORD == 1 )); then flags="$flags {_PRINT}"; fi
    COMPREPLY=($(compgen -W "$flags" -- "$cur"))
  elif [[ -n $values ]]; then
    COMPREPLY=($(compgen -W "$values" -- "$cur"))
  elif (( COMP_CWORD == 1 )); then
    COMPREPLY=($(compgen -W "{" ".join(words.commands)}" -- "$cur"))
  else
    COMPREPLY=()
  fi
}}
complete -o default -F _fsdptrain fsdptrain
"""


def _zsh(words: Words) -> str:
    described = "\n".join(
        f"    {name}) flags=({' '.join(_quoted(f'{flag}:{text}') for flag, text in flags.items())}) ;;"
        for name, flags in words.flags.items()
    )
    return f"""\
#compdef fsdptrain
_fsdptrain() {{
  local prev="${{words[CURRENT-1]}}" command=train values=""
  local -a flags
  if (( CURRENT > 2 )); then
    case "${{words[2]}}" in ({"|".join(words.commands)}) command="${{words[2]}}" ;; esac
  fi
  case "$prev" in
{_cases(words)}
  esac
  if [[ $command == recipes ]]; then values="show {" ".join(words.choices[RECIPE.flag])}"; fi
  case "$command" in
{described}
  esac
  if [[ ${{words[CURRENT]}} == -* ]]; then
    if (( CURRENT == 2 )); then flags+=('{_PRINT}:Print the script of a shell'); fi
    _describe -o option flags
  elif [[ -n $values ]]; then
    compadd -- ${{=values}}
    [[ $prev == {RECIPE.flag} ]] && _files
  elif (( CURRENT == 2 )); then
    compadd -- {" ".join(words.commands)}
  else
    _files
  fi
}}
if [[ ${{funcstack[1]}} == _fsdptrain ]]; then _fsdptrain "$@"; else compdef _fsdptrain fsdptrain; fi
"""


def _fish(words: Words) -> str:
    lines = [f"complete -c fsdptrain -n __fish_use_subcommand -f -a {_quoted(' '.join(words.commands))}"]
    others = " ".join(name for name in words.commands if name != "train")
    lines.append(f"complete -c fsdptrain -n '__fish_seen_subcommand_from recipes' -f -a 'show {_recipes(words)}'")
    lines.append(f"complete -c fsdptrain -n __fish_use_subcommand -l {_PRINT[2:]} -x -a '{' '.join(SHELLS)}'")
    for name, flags in words.flags.items():
        seen = f"not __fish_seen_subcommand_from {others}" if name == "train" else f"__fish_seen_subcommand_from {name}"
        for flag, text in flags.items():
            values = words.choices.get(flag)
            files = "-r " if flag == RECIPE.flag else "-x "
            accepts = f"{files}-a {_quoted(' '.join(values))} " if values else ""
            lines.append(f"complete -c fsdptrain -n '{seen}' -l {flag[2:]} {accepts}-d {_quoted(text)}")
    return "\n".join(lines) + "\n"


def _recipes(words: Words) -> str:
    return " ".join(words.choices[RECIPE.flag])


def _quoted(text: str) -> str:
    """Quote for zsh and fish."""
    return "'" + text.replace("\\", "").replace("'", "’") + "'"
