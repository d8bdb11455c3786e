"""Name the lines of the package that only run with a device, and those of them that the null GPU does not run.

A line counts if it calls the device's interface, or is in a branch that is only taken with a device. Needs Python 3.12
(sys.monitoring); `python -m tests.null_gpu` then prints the report at its end.
"""

import ast
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
_CALL = re.compile(r"torch\.(cuda|accelerator|Stream|Event)\.?\w*\(|\.(wait_stream|wait_event|record_event)\(")
_ONLY = re.compile(r"has_accelerator\b|\bon_gpu\b|== .cuda.|!= .cpu.|_stream is not None|is_cuda\b")
_NEVER = re.compile(r"not \S*has_accelerator\b|not on_gpu\b|== .cpu.|_stream is None")
UNEXPLAINED = "no reason is given in device_lines.py"
REASONS = {  # beginnings of "path" or "path:function"
    "fsdptrain/features/liger/": "needs Triton's kernels on a GPU",
    "fsdptrain/model/attention/attention.py:_best": "needs flash-attn 3",
    "fsdptrain/tools/inspect/inspection.py:_sizes": "no test marked gpu inspects a model",
    "fsdptrain/vllm/": "needs vLLM on a GPU",
    "fsdptrain/megatron/": "needs megatron-core and Transformer Engine on a GPU",
    "fsdptrain/model/probes/kernels.py": "needs flash-linear-attention, or --attn-implementation sdpa",
}


def device_lines() -> dict[tuple[str, int], str]:
    """Return the function of each line that only runs with a device, by (path, line)."""
    found = {}
    for path in sorted((ROOT / "fsdptrain").rglob("*.py")):
        name = str(path.relative_to(ROOT))
        for line, function in _lines(ast.parse(path.read_text()), "", inside=False):
            found[name, line] = function
    return found


def _lines(node: ast.AST, function: str, *, inside: bool) -> Iterator[tuple[int, str]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.FunctionDef, ast.ClassDef)):
            yield from _lines(child, child.name, inside=False)
        elif isinstance(child, ast.If):
            test = ast.unparse(child.test)
            never = bool(_NEVER.search(test))
            only = bool(_ONLY.search(test)) and not never
            if inside or _CALL.search(test):
                yield child.lineno, function
            for part, only_there in ((child.body, only), (child.orelse, never)):
                yield from _lines(ast.Module(part, []), function, inside=inside or only_there)
        elif isinstance(child, (ast.With, ast.For, ast.While, ast.Try)):
            yield from _lines(child, function, inside=inside)
        elif isinstance(child, ast.stmt):
            if inside or _CALL.search(ast.unparse(child)):
                yield child.lineno, function
        elif isinstance(child, ast.ExceptHandler):
            yield from _lines(child, function, inside=inside)


def record(target: Path) -> None:
    """Append each of these lines to `target` when it first runs, in this process and those forked from it."""
    if sys.version_info < (3, 12):
        return
    lines, file = set(device_lines()), os.open(target, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    monitoring: Any = sys.monitoring
    tool, begin = monitoring.COVERAGE_ID, f"{ROOT}{os.sep}"

    def on_line(code: Any, line: int) -> Any:
        key = (code.co_filename.removeprefix(begin), line)
        if key in lines:
            os.write(file, f"{key[0]}:{line}\n".encode())
        return monitoring.DISABLE

    monitoring.use_tool_id(tool, "device lines")
    monitoring.register_callback(tool, monitoring.events.LINE, on_line)
    monitoring.set_events(tool, monitoring.events.LINE)


def report(recorded: Path) -> list[str]:
    """Return how many of these lines ran, and a line with the reason for those of each function that did not."""
    ran, lines = set(recorded.read_text().splitlines()), device_lines()
    left: dict[str, list[int]] = {}
    for (path, line), function in lines.items():
        if f"{path}:{line}" not in ran:
            left.setdefault(f"{path}:{function}", []).append(line)
    count = sum(len(numbers) for numbers in left.values())
    rows = [f"{len(lines) - count} of {len(lines)} lines that need a device ran; not:"]
    for place, numbers in left.items():
        reason = next((why for begin, why in REASONS.items() if place.startswith(begin)), UNEXPLAINED)
        rows.append(f"{place} {numbers}: {reason}")
    return rows
