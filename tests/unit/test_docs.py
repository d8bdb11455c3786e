"""Pages are true: links, generated parts, commands, flags and error lines. Snippets: tests/e2e/test_guides.py.

docs/models.md: tests/distributed/test_sweep.py; docs/metrics.md: test_metric_names.py.
"""

import ast
import fnmatch
import json
import re
import shlex
import tomllib
from functools import cache
from pathlib import Path

import pytest

from docgen.__main__ import PAGES as GENERATED
from fsdptrain.config import resolve
from fsdptrain.config.keys import all_keys

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
README = ROOT / "README.md"
PAGES = [*sorted(DOCS.glob("*.md")), *sorted(ROOT.glob("*.md"))]
LINK = re.compile(r"\[[^]]*\]\((?!https?:|mailto:)([^)#\s]*)(?:#([^)\s]*))?\)")
CODE = re.compile(r"^```.*?^```|`[^`\n]+`", re.MULTILINE | re.DOTALL)
MENTIONED = re.compile(r"\bdocs/([\w.]+\.md)(?:#([\w-]+))?")
FOLDERS = ("fsdptrain", "examples", "benchmarks", "campaigns", "docgen", "docs", "tests", "constraints")
SUFFIXES = {".py", ".yaml", ".md", ".sbatch", ".toml", ".json"}
OF_COMMANDS = {"--recipe", "--help", "--help-all", "--json", "--rollouts", "--num-gpus", "--gpu-memory-gib", "--output"}
OF_COMMANDS |= {"--checkpoint", "--host-memory-gib", "--model"}
OF_OTHER_PROGRAMS = {
    *("--constraint", "--dry-run", "--ignore-installed", "--index-url"),  # pip
    *("--max-restarts", "--nnodes", "--rdzv-endpoint", "--rdzv-id", "--rdzv-conf", "--local-addr"),  # torchrun
    *("--build-arg", "--target", "--no-build-isolation", "--requeue", "--shutdown-timeout"),  # docker, pip, Slurm, vLLM
    *("--generation-config", "--enable-scale-out", "--scheduling-policy", "--tokens-only"),  # vLLM
    *("--shm-size", "--tasks", "--include_path", "--middleware"),  # docker, lm_eval, vLLM
    *("--cases", "--checkpointing", "--kl", "--lora", "--only", "--rename", "--sides"),  # benchmarks
}
PATH = re.compile(
    r"(?<![\w/.])((?:fsdptrain|recipes|examples|benchmarks|docgen|docs|tests|constraints)/[\w/.-]+\.[a-z]+)"
)
OUTPUTS = {"benchmarks/results/gpu/table.md", "benchmarks/results/mfu.json"}
ELLIPSIS = "..."


@cache
def text_of(page: Path) -> str:
    return page.read_text(encoding="utf-8")


@cache
def without_blocks(page: Path) -> str:
    return re.sub(r"^```.*?^```", "", text_of(page), flags=re.MULTILINE | re.DOTALL)


@cache
def anchors(page: Path) -> frozenset[str]:
    """Anchors of the headings, as code hosts and the docs site make them."""
    found: list[str] = []
    for heading in re.findall(r"^#{1,6} +(.*?) *$", without_blocks(page), re.MULTILINE):
        shown = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading)
        found.append(re.sub(r"[^\w\- ]", "", shown).strip().lower().replace(" ", "-"))
    return frozenset(found)


def test_links_and_anchors_resolve() -> None:
    broken = []
    for page in PAGES:
        for target, anchor in LINK.findall(CODE.sub("``", text_of(page))):
            file = (page.parent / target).resolve() if target else page
            if not file.exists() or (anchor and anchor not in anchors(file)):
                broken.append(f"{page.name}: {target}#{anchor}")
    assert not broken


def test_pages_that_files_name_exist() -> None:
    files = [file for folder in FOLDERS for file in (ROOT / folder).rglob("*") if file.suffix in SUFFIXES]
    files += [ROOT / "Makefile", ROOT / "pyproject.toml", ROOT / "Dockerfile", *ROOT.glob("*.md")]
    missing, count = [], 0
    for file in files:
        for name, anchor in MENTIONED.findall(text_of(file)):
            count += 1
            if not (DOCS / name).is_file() or (anchor and anchor not in anchors(DOCS / name)):
                missing.append(f"{file.relative_to(ROOT)}: docs/{name}#{anchor}")
    assert count > 100
    assert not missing


def test_tests_files_scripts_targets_and_recipes_that_pages_name_exist() -> None:
    """Benchmarks of an older commit are named with it, in the same paragraph."""
    files = {f"/{path.relative_to(ROOT)}" for folder in FOLDERS for path in (ROOT / folder).rglob("*")}
    tests = "\n".join(text_of(path) for path in (ROOT / "tests").rglob("*.py"))
    names = set(re.findall(r"^(?:async )?def (test_\w+)", tests, re.MULTILINE))
    targets = set(re.findall(r"^([a-z0-9-]+):", text_of(ROOT / "Makefile"), re.MULTILINE))
    recipes = {path.stem for path in (ROOT / "fsdptrain/recipes").glob("*.yaml")} | {"recipe"}
    missing = []
    for page in PAGES:
        text = text_of(page).replace("\\\n", " ")
        paths = {path for part in text.split("\n\n") if "commit" not in part for path in PATH.findall(part)}
        lost = [path for path in paths - OUTPUTS if not any(file.endswith(f"/{path}") for file in files)]
        lost += set(re.findall(r"`(test_\w+_\w+_\w+)`", text)) - names
        lost += set(re.findall(r"(?:^    |`)make ([a-z0-9-]+)", text, re.MULTILINE)) - targets
        lost += set(re.findall(r"(?:--recipe |recipes? `)([a-z]\w+_[\w.]+\w)(?<!yaml)\b", text)) - recipes
        for script, flags in re.findall(r"^    \S*python3? ((?:benchmarks|docgen)/\w+\.py)(.*)$", text, re.MULTILINE):
            lost += [flag for flag in re.findall(r"(?<= )--[a-z-]+", flags) if flag not in text_of(ROOT / script)]
        missing += [f"{page.name}: {name}" for name in lost]
    assert missing == []


def test_metrics_that_pages_name_are_rows_of_the_metrics_page() -> None:
    """`*` stands for any of them, <name> in a row for any text."""
    rows = re.findall(r"^\| `([^`]+)`", text_of(DOCS / "metrics.md"), re.MULTILINE)
    forms = re.compile("|".join(re.sub(r"<\w+>", r"[\\w/@<>]+", row) for row in rows))
    name = re.compile(rf"(?<![\w/.-])(?:{'|'.join({row.partition('/')[0] for row in rows})})/[\w@<>*/]+(?![\w./])")
    named = {
        found for page in PAGES for code in re.findall(r"`[^`\n]+`", text_of(page)) for found in name.findall(code)
    }
    assert len(named) > 50
    assert not [found for found in named if not forms.fullmatch(found) and not fnmatch.filter(rows, found)]


@pytest.mark.parametrize("page", GENERATED)
def test_a_generated_page_is_up_to_date(page: str) -> None:
    assert text_of(ROOT / page) == GENERATED[page](), "run: python -m docgen"


@cache
def known_flags() -> set[str]:
    flags = {key.flag for key in all_keys().values()} | OF_COMMANDS
    return flags | {f"--no-{flag[2:]}" for flag in flags}


def commands(page: Path) -> list[str]:
    """Return the arguments of fsdptrain in each command of the indented blocks."""
    begin = re.compile(r"^(?:\S*/)?fsdptrain (?=[-a-z])|^torchrun .*? -m fsdptrain ")
    lines = "\n".join(re.findall(r"^    (.*)$", text_of(page), re.MULTILINE)).replace("\\\n", " ").splitlines()
    whole = [re.sub(r"\s+# .*$", "", line) for line in lines]
    return [line[found.end() :].strip() for line in whole if (found := begin.match(line))]


def test_commands_are_accepted_with_their_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every flag exists; whole training commands are resolved."""
    monkeypatch.chdir(ROOT)
    count = 0
    for page in PAGES:
        for line in commands(page):
            words = shlex.split(line)
            unknown = {word.partition("=")[0] for word in words if word.startswith("--")} - known_flags()
            assert not unknown, f"{page.name}: {line}"
            if line.startswith("--") and ELLIPSIS not in line and is_here(words):
                assert resolve(words).config.model.hf_checkpoint, f"{page.name}: {line}"
                count += 1
    assert count > 20


def is_here(words: list[str]) -> bool:
    """Whether the command has no recipe, or one of the package."""
    return "--recipe" not in words or (ROOT / f"fsdptrain/recipes/{words[words.index('--recipe') + 1]}.yaml").is_file()


def test_no_command_of_the_readme_is_expanded_by_a_shell() -> None:
    """`?` and `*` outside quotes stop zsh with `no matches found`."""
    assert [line for line in commands(README) if set("?*[") & set(re.sub(r"'[^']*'", "", line))] == []


def test_flags_in_prose_exist() -> None:
    for page in PAGES:
        if page.name == "coming_from_slime.md":  # whose flags are those of slime
            continue
        named = {
            flag
            for code in re.findall(r"`(--[^`]+)`", without_blocks(page))
            for flag in re.findall(r"--[a-z][\w-]*", code)
        }
        assert named - known_flags() <= OF_OTHER_PROGRAMS, page.name


@cache
def texts() -> list[str]:
    """Return every text of the sources, with a NUL for each placeholder."""
    found = []
    for path in (ROOT / "fsdptrain").rglob("*.py"):
        for node in ast.walk(ast.parse(text_of(path))):
            if isinstance(node, ast.JoinedStr):
                found.append("".join(str(p.value) if isinstance(p, ast.Constant) else "\0" for p in node.values))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(re.sub(r"%(?:\.\d+)?[sdg]", "\0", node.value))
    return found


def test_error_lines_of_the_troubleshooting_page_are_printed_somewhere() -> None:
    """`...` stands for what a placeholder is filled with. The rest is one text of the sources, with them in order."""
    blocks = re.findall(r"^```error\n(.*?)^```", text_of(DOCS / "troubleshooting.md"), re.MULTILINE | re.DOTALL)
    lines = [line for block in blocks for line in block.splitlines()]
    assert len(lines) > 30
    for line in lines:
        parts = [part for part in (part.strip() for part in line.split(ELLIPSIS)) if len(part) > 1]
        assert parts
        pattern = re.compile(".*?".join(map(re.escape, parts)), re.DOTALL)
        assert any(pattern.search(text) for text in texts()), line


def test_one_sentence_describes_the_package_everywhere() -> None:
    sentence = tomllib.loads(text_of(ROOT / "pyproject.toml"))["project"]["description"]
    for name in ("README.md", "CITATION.cff", "mkdocs.yml", "docs/index.md", "fsdptrain/help_text.py"):
        assert sentence in text_of(ROOT / name), name


def test_numbers_of_the_readme_are_measured() -> None:
    """Ratios to TRL and minutes until it has learned; tables of performance.md are generated from the same files."""
    files = [json.loads(text_of(path))["results"] for path in (ROOT / "benchmarks/results").glob("real_model_*.json")]
    cases = [{row["side"]: row for row in rows} for rows in files]
    times = [{side: row["step_s"]["median"] for side, row in case.items()} for case in cases]
    ratios = [case["trl"]["times_ours"]["median"] for case in cases]
    ratios += [one[side] / one["ours-all"] for one in times for side in one if side[:3] == "trl" and "ours-all" in one]
    [learned] = (case for case in cases if "curve" in case["trl"])
    minutes = [f"{learned[side]['curve'][-1]['s'] / 60:.0f}" for side in ("trl", "ours")]
    about_trl = " ".join(line for line in text_of(README).splitlines() if "TRL" in line)
    claimed = [x for pair in re.findall(r"([\d.]+)(?: to ([\d.]+))? times", about_trl) for x in pair if x]
    assert set(claimed) <= {f"{ratio:.{places}f}" for ratio in ratios for places in (0, 1)}
    assert re.findall(r"in (\d+) minutes instead of (\d+)", " ".join(text_of(README).split())) == [tuple(minutes)]
