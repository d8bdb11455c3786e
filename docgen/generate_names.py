"""Write the tables of docs/coming_from_*.md from config/other_names.ini: `python -m docgen`."""

from pathlib import Path

from fsdptrain.config.other_names import NONE, tables

DOCS = Path(__file__).parents[1] / "docs"
TITLES = {"trl": "TRL", "verl": "verl", "prime_rl": "prime-rl", "slime": "slime"}


def names_page(trainer: str) -> str:
    """Return the page of a trainer; its table comes last."""
    text = (DOCS / f"coming_from_{trainer}.md").read_text(encoding="utf-8")
    head, options, rest = text.partition("## Options\n")
    introduction = rest.partition("\n|")[0]
    rows = [_row(name, here, note) for name, (here, note) in tables()[trainer].items()]
    return f"{head}{options}{introduction}\n| {TITLES[trainer]} | here | |\n|---|---|---|\n{''.join(rows)}"


def _row(name: str, here: str, note: str) -> str:
    name = name.removeprefix("actor_rollout_ref.")  # docs/coming_from_verl.md says so
    return f"| `{name}` | {here if here == NONE else f'`{here}`'} | {note} |\n".replace("|  |", "| |")
