"""The Dockerfile and the examples for clusters install what their recipes need, in versions that pip resolves.

The image is not built, and nothing is installed: `pip install --dry-run` resolves the requirements of each environment.
"""

import ast
import re
import shlex
from collections.abc import Mapping
from pathlib import Path

import pytest
import yaml

from fsdptrain.config import load_recipe, resolve
from tests.recipe_headers import extras_of, needed_extras

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"


def pip_lines(text: str) -> list[str]:
    """Return the commands of a shell script that install packages, with the path of pip."""
    joined = text.replace("\\\n", " ")
    parts = [part.strip() for line in joined.splitlines() for part in re.split(r"&&|;", line.removeprefix("RUN "))]
    return [re.sub(r"\s+# .*", "", part).removeprefix("# ") for part in parts if re.search(r"pip install", part)]


def dockerfile() -> dict[str, list[str]]:
    """Return the pip lines of each environment of the Dockerfile, by the target that makes it."""
    stages: dict[str, tuple[str, list[str]]] = {}
    for stage in re.split(r"^FROM ", (ROOT / "Dockerfile").read_text(), flags=re.MULTILINE)[1:]:
        words, _, rest = stage.partition("\n")
        base, *name = words.split(" AS ")
        arguments = dict(re.findall(r"^ARG (\w+)=(.*)$", rest, re.MULTILINE))
        for key, value in arguments.items():
            rest = rest.replace(f"${{{key}}}", value)
        stages[name[0] if name else ""] = (base, pip_lines(rest))
    assert stages[""] == ("vllm", [])  # what `docker build .` makes
    return {name: lines for name, (_, lines) in stages.items() if lines}


def modal_constants() -> tuple[str, list[str]]:
    """Return the command of the Modal example, and the pip lines of its image."""
    tree = ast.parse((EXAMPLES / "modal" / "train.py").read_text())
    texts = [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    (command,) = (text for text in texts if text.startswith("fsdptrain "))
    return command, [line for text in texts if text != ast.get_docstring(tree, clean=False) for line in pip_lines(text)]


def skypilot() -> list[str]:
    return pip_lines(yaml.safe_load((EXAMPLES / "skypilot" / "train.yaml").read_text())["setup"])


def slurm() -> list[str]:
    return pip_lines((EXAMPLES / "slurm" / "train.sbatch").read_text())


ENVIRONMENTS: Mapping[str, list[str]] = {
    **{f"docker_{name}": lines for name, lines in dockerfile().items()},
    "modal": modal_constants()[1],
    "skypilot": skypilot(),
    "slurm": slurm(),
}


@pytest.mark.parametrize("name", ["docker_vllm", "skypilot", "slurm"])
def test_the_environment_has_what_the_recipe_of_several_machines_needs(name: str) -> None:
    scripts = [EXAMPLES / "kubernetes/train.yaml", EXAMPLES / "skypilot/train.yaml", EXAMPLES / "slurm/train.sbatch"]
    for script in scripts:
        (recipe,) = re.findall(r"--recipe (\S+)", script.read_text())
        needs = needed_extras(load_recipe(ROOT / recipe), on_gpu=True)
        assert set().union(*map(extras_of, ENVIRONMENTS[name])) >= needs


def test_the_modal_example_runs_a_recipe_for_its_gpu_and_installs_what_it_needs() -> None:
    command, lines = modal_constants()
    config = resolve(shlex.split(command)[1:]).config
    assert config.run.output_dir.startswith("/runs/")  # the volume
    assert "# Hardware: 1 x 80 GB" in (ROOT / shlex.split(command)[2]).read_text()
    assert set().union(*map(extras_of, lines)) >= needed_extras(config, on_gpu=True)


def test_the_image_has_the_extras_of_every_recipe_that_runs_with_vllm() -> None:
    extras = set().union(*map(extras_of, ENVIRONMENTS["docker_vllm"]))
    for path in sorted((ROOT / "recipes").glob("*.yaml")):
        assert needed_extras(load_recipe(path), on_gpu=True) - extras <= {"megatron"}, path.name
