"""The wheel, installed into an empty environment, works from an empty folder: recipes, dry runs, the demo."""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = ("fsdptrain", "pyproject.toml", "README.md", "LICENSE")

pytestmark = pytest.mark.matrix


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy: a build leaves files beside the sources, which a later wheel would include."""
    folder = tmp_path_factory.mktemp("wheel")
    ignore = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for source in map(ROOT.joinpath, SOURCES):
        if source.is_dir():
            shutil.copytree(source, folder / source.name, ignore=ignore)
        elif source.exists():
            shutil.copy(source, folder)
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", "dist", "."]
    subprocess.run(build, cwd=folder, check=True, capture_output=True, timeout=300)
    return next((folder / "dist").glob("*.whl"))


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The `bin` of a new environment with the wheel, which also sees the packages of this one."""
    folder = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True, timeout=300)
    python = folder / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--no-deps", "--no-index", str(wheel)]
    subprocess.run(pip, check=True, capture_output=True, timeout=300)
    where = [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    packages = subprocess.run(where, check=True, capture_output=True, text=True, timeout=60)
    here = Path(packages.stdout.strip())
    (here / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")  # does not read the .pth files in there
    return folder / "bin"


def run(installed: Path, folder: Path, *argv: str) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [str(installed / argv[0]), *argv[1:]]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def test_the_wheel_has_the_recipes_the_demo_and_the_license(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    assert {f"fsdptrain/recipes/{path.name}" for path in (ROOT / "fsdptrain" / "recipes").glob("*.yaml")} <= names
    assert {"fsdptrain/tools/demo/model.json", "fsdptrain/py.typed"} <= names
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names) == (ROOT / "LICENSE").exists()
    assert all(name.startswith(("fsdptrain/", "fsdptrain-")) for name in names)


def test_the_demo_trains_in_an_empty_folder(installed: Path, tmp_path: Path) -> None:
    where = run(installed, tmp_path, "python", "-c", "import fsdptrain; print(fsdptrain.__file__)")
    assert Path(where.strip()).is_relative_to(installed.parent)
    assert "  recipe\n" in run(installed, tmp_path, "fsdptrain", "--recipe", "gsm_symbolic_qwen3_4b", "--dry-run")
    said = run(installed, tmp_path, "fsdptrain", "demo", "--seed", "1", "--warm-up-steps", "21", "--rollouts", "1")
    folder = tmp_path / "runs" / "quickstart"
    assert json.loads((folder / "summary.json").read_text())["accuracy_after"] >= 0
    assert (folder / "grpo" / "hf" / "model.safetensors").is_file()
    assert (folder / "grpo" / "report.html").is_file()
    assert "Held-out accuracy, sampled: " in said
