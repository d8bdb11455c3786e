"""Run a command of Python with the null GPU: `python -m tests.null_gpu -m pytest ...`.

Without arguments: every test marked gpu. The library is built for the torch of this Python.
"""

import os
import re
import resource
import sys
from pathlib import Path

from tests.null_gpu.build import build

ROOT = Path(__file__).parents[2]
MARK = re.compile(r"pytest\.mark\.gpu\b")
_MEMORY = 32 << 30  # bytes of address space of a process: a bug must not exhaust the memory of the machine


def main() -> None:
    arguments = sys.argv[1:] or ["-m", "pytest", *options(), *files()]
    library = build(Path(sys.prefix) / "null_gpu")
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, resource.getrlimit(resource.RLIMIT_AS)[1]))
    variables = {"LD_PRELOAD": str(library), "LD_LIBRARY_PATH": str(library.parent), "PYTHONPATH": str(ROOT)}
    variables |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    os.execve(sys.executable, [sys.executable, *arguments], os.environ | variables)


def options() -> list[str]:
    """Return options of pytest. Warnings are not errors, because the torch version differs from that of the suite."""
    plugin = ["-p", "tests.null_gpu.plugin", "-p", "no:cacheprovider"]
    return [*plugin, "-m", "gpu", "-o", "filterwarnings=default", "-rs", "--durations=5"]


def files() -> list[str]:
    found = sorted((ROOT / "tests").rglob("test_*.py"))
    return [str(path) for path in found if MARK.search(path.read_text())]


if __name__ == "__main__":
    main()
