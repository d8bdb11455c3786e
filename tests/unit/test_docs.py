"""Pages are true: links, generated parts, commands, flags and error lines. Snippets: tests/e2e/test_guides.py.

docs/models.md: tests/distributed/test_sweep.py; docs/metrics.md: test_metric_names.py.
"""

import ast
import re
import runpy
import shlex
from functools import cache
from pathlib import Path

import pytest

from fsdptrain.config import resolve
from fsdptrain.config.keys import all_keys

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
README = ROOT / "README.md"
PAGES = [*sorted(DOCS.glob("*.md")), *sorted(ROOT.glob("*.md"))]
LINK = re.compile(r"\[[^]]*\]\((?!https?:|mailto:)([^)#\s]*)(?:#([^)\s]*))?\)")
CODE = re.compile(r"^```.*?^```|`[^`\n]+`", re.MULTILINE | re.DOTALL)
MENTIONED = re.compile(r"\bdocs/([\w.]+\.md)(?:#([\w-]+))?")
FOLDERS = ("fsdptrain", "examples", "benchmarks", "campaigns", "docgen", "docs", "tests")
SUFFIXES = {".py", ".yaml", ".md", ".sbatch", ".toml", ".json"}
GENERATED = {  # page -> script and function, with its arguments
    "algorithms.md": ("generate_algorithms.py", "algorithms_page"),
    "configuration.md": ("generate_configuration.py", "configuration_page"),
    "hardware.md": ("generate_hardware.py", "hardware_page"),
    "recipes.md": ("generate_recipes.py", "recipes_page"),
    "../fsdptrain/config/keywords.pyi": ("generate_keywords.py", "keywords_module"),
    **{
        f"coming_from_{other}.md": ("generate_names.py", "page", other)
        for other in ("trl", "verl", "prime_rl", "slime")
    },
}
GUIDES = ("install", "tutorial_*", "math_and_code", "tools_and_agents", "images", "sft", "distillation", "lora", "moe")
GUIDES += ("multi_node", "asynchronous", "evaluation", "own_parts", "environments", "coming_from_*")
WITH_COMMANDS = [README, *sorted(path for name in GUIDES for path in DOCS.glob(f"{name}.md"))]
OF_COMMANDS = {"--recipe", "--help", "--help-all", "--json", "--rollouts", "--num-gpus", "--gpu-memory-gib", "--output"}
OF_COMMANDS |= {"--checkpoint", "--host-memory-gib", "--model"}
OF_OTHER_PROGRAMS = {
    *("--constraint", "--dry-run", "--ignore-installed"),  # pip
    *("--max-restarts", "--nnodes", "--rdzv-endpoint", "--rdzv-id", "--rdzv-conf", "--local-addr"),  # torchrun
    *("--build-arg", "--target", "--no-build-isolation", "--requeue", "--shutdown-timeout"),  # docker, pip, Slurm, vLLM
    *("--generation-config", "--enable-scale-out", "--scheduling-policy", "--tokens-only"),  # vLLM
    *("--shm-size", "--tasks", "--include_path"),  # docker, lm_eval
}
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


def test_tests_that_pages_name_exist() -> None:
    tests = {path: text_of(path) for path in (ROOT / "tests").rglob("*.py")}
    names = {name for text in tests.values() for name in re.findall(r"^def (test_\w+)", text, re.MULTILINE)}
    named = {name for page in PAGES for name in re.findall(r"`(test_\w{20,})`", text_of(page))}
    assert named - names == set()
    files = {path for page in PAGES for path in re.findall(r"\btests/[\w/]+\.py\b", text_of(page))}
    assert [path for path in sorted(files) if not (ROOT / path).is_file()] == []


@pytest.mark.parametrize("page", GENERATED)
def test_a_generated_page_is_up_to_date(page: str) -> None:
    script, make, *arguments = GENERATED[page]
    generated = runpy.run_path(str(ROOT / "docgen" / script))[make](*arguments)
    assert text_of(DOCS / page) == generated, f"run: python docgen/{script}"


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
    for page in WITH_COMMANDS:
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
    for page in [*WITH_COMMANDS[1:], DOCS / "troubleshooting.md"]:
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
