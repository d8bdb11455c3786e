"""Run `make gpu` without a GPU: `python -m tests.null_gpu.rehearsal WHEELS`, in the environment of the oldest versions.

The Python that runs benchmarks/gpu.py has only what a GPU machine has: torch, transformers and what these require. The
null GPU takes the place of the GPU, with tiny sizes. Steps that need Triton's kernels fail, and nothing else may.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import venv
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from tests.null_gpu.__main__ import ROOT
from tests.null_gpu.build import build

WORK = ROOT / "build" / "rehearsal"
START = """
import os
if os.environ.get("PYTHONPATH"):
    from tests.null_gpu.emulate import start
    start()
"""


def main() -> None:
    shutil.rmtree(WORK, ignore_errors=True)
    python = bare_environment(WORK / "bare", "torch", "transformers")
    library = build(Path(sys.prefix) / "null_gpu")
    variables = {"LD_PRELOAD": str(library), "LD_LIBRARY_PATH": str(library.parent)}
    variables |= {"OMP_NUM_THREADS": "1", "PYTEST_PLUGINS": "tests.null_gpu.plugin", "PYTHONPATH": ""}
    argv = [python, ROOT / "benchmarks" / "gpu.py", "--rehearse", "--minutes", "25"]
    argv += ["--wheels", Path(sys.argv[1]).resolve()]
    folders = ["--output", WORK / "results", "--venv", WORK / "venv"]
    subprocess.run([*argv, *folders], env=os.environ | variables, check=False)
    found = json.loads((WORK / "results" / "gpu.json").read_text())
    failed = {name for name, step in found.items() if isinstance(step, dict) and step.get("exit", 0) != 0}
    sys.exit(f"failed: {', '.join(failed)}" if failed else 0)


def bare_environment(folder: Path, *names: str) -> Path:
    """Create an environment with links to the files of these packages and of those that they require."""
    venv.create(folder, symlinks=True)
    [packages] = (folder / "lib").glob("python*/site-packages")
    wanted, known = [*names, "pip"], set()
    while wanted:
        name = wanted.pop()
        if name in known:
            continue
        known.add(name)
        try:
            found = distribution(name)
        except PackageNotFoundError:  # of another platform
            continue
        tops = {file.parts[0] for file in found.files or [] if file.parts[0] not in ("..", "__pycache__")}
        for top in tops:
            link = packages / top
            if not link.exists():
                link.symlink_to(found.locate_file(top))
        # torch asks for extras of cuda-toolkit, which are libraries
        required = [line for line in found.requires or [] if "extra ==" not in line or name == "cuda-toolkit"]
        wanted += [re.split(r"[^\w.-]", line)[0] for line in required]
    (packages / "sitecustomize.py").write_text(START)
    return folder / "bin" / "python"


if __name__ == "__main__":
    main()
