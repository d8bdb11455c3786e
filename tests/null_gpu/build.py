"""Build the library of the null GPU for the torch of this Python: `build()` returns its path."""

import re
import subprocess
import sysconfig
from pathlib import Path

import torch

SOURCE = Path(__file__).parent
_LINKED = ("libc10_cuda.so", "libtorch_cuda.so", "libtorch_python.so")
_REPLACED = re.compile(r"(cuda|cublas|cublasLt|nccl)[A-Z]\w*")
_NOT_SUPPORTED = 801  # cudaErrorNotSupported: a function without a definition must fail


def build(folder: Path) -> Path:
    """Compile runtime.cpp, and stubs for the other functions that torch imports. Returns the path of the library."""
    folder.mkdir(parents=True, exist_ok=True)
    own, stubs, library = folder / "runtime.o", folder / "stubs.cpp", folder / "libnullgpu.so"
    headers = Path(sysconfig.get_path("purelib")) / "nvidia" / "cu13" / "include"
    _run("g++", "-O1", "-fPIC", "-std=c++17", f"-I{SOURCE / 'include'}", f"-I{headers}", "-c", SOURCE / "runtime.cpp",
         "-o", own)  # fmt: skip
    defined = _symbols(own, "--defined-only")
    imported = {name for file in _LINKED for name in _symbols(Path(torch.__file__).parent / "lib" / file, "-Du")}
    missing = sorted(name for name in imported - defined if _REPLACED.fullmatch(name))
    lines = (f'extern "C" int {name}() {{ return {_NOT_SUPPORTED if _is_cuda(name) else 0}; }}' for name in missing)
    stubs.write_text("\n".join(lines) + "\n")
    _run("g++", "-O1", "-fPIC", "-shared", own, stubs, "-o", library)
    driver = folder / "libcuda.so.1"  # which torch opens by its name
    driver.unlink(missing_ok=True)
    driver.symlink_to(library.name)
    return library


def _is_cuda(name: str) -> bool:
    return name.startswith("cuda")


def _symbols(file: Path, option: str) -> set[str]:
    found = _run("nm", option, file).splitlines()
    return {line.split()[-1].partition("@")[0] for line in found if line.strip()}


def _run(*command: str | Path) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout
