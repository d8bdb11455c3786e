"""Write the generated pages and tables: `python -m docgen`. Not docs/models.md, which takes minutes."""

import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path

from docgen.generate_algorithms import algorithms_page
from docgen.generate_configuration import configuration_page
from docgen.generate_keywords import keywords_module
from docgen.generate_names import TITLES, names_page
from docgen.generate_performance import performance_page
from docgen.generate_recipes import recipes_page

ROOT = Path(__file__).parents[1]
PAGES: dict[str, Callable[[], str]] = {
    "docs/performance.md": performance_page,
    "docs/algorithms.md": algorithms_page,
    "docs/configuration.md": configuration_page,
    "docs/recipes.md": recipes_page,
    "fsdptrain/config/keywords.pyi": keywords_module,
    **{f"docs/coming_from_{trainer}.md": partial(names_page, trainer) for trainer in TITLES},
}

if __name__ == "__main__":
    logging.getLogger("transformers").setLevel(logging.ERROR)
    for name, make in PAGES.items():
        (ROOT / name).write_text(make(), encoding="utf-8")
