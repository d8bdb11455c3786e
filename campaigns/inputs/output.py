"""Folders that --output-dir must not or cannot use."""

import fcntl
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from campaigns.inputs.case import Case, Place, Prepare, link_to_itself, train


def output(path: Callable[[Place], object], *more: str) -> Prepare:
    return lambda place: train(place, "--output-dir", str(path(place)), *more)


def with_files(place: Place, **files: str) -> Path:
    for name, content in files.items():
        place.file(f"run/{name.replace('__', '/')}", content)
    return place.output


_locks: list[Any] = []  # held until the campaign ends


def locked(place: Place) -> Path:
    file = open(place.file("run/.lock", "host x, pid 1"), "a+")  # noqa: SIM115
    fcntl.flock(file, fcntl.LOCK_EX)
    _locks.append(file)
    return place.output


OUT = ("--output-dir",)
OUTPUTS: list[tuple[str, Prepare, tuple[str, ...]]] = [
    ("a file", output(lambda place: place.file("a", "x")), OUT),
    ("below a file", output(lambda place: place.file("a", "x") + "/run"), OUT),
    ("far below a file", output(lambda place: place.file("a", "x") + "/b/c/d"), OUT),
    ("a link to itself", output(lambda place: link_to_itself(place.folder / "loop")), OUT),
    ("below a link to itself", output(lambda place: link_to_itself(place.folder / "loop") / "run"), OUT),
    ("a link to a file", output(lambda p: Path(shutil.move(p.file("a", "x"), p.folder / "b"))), OUT),
    ("name too long", output(lambda place: place.folder / ("x" * 300)), ("too long",)),
    ("path too long", output(lambda place: place.folder / "/".join(["x" * 100] * 50)), ("too long",)),
    ("NUL", output(lambda place: f"{place.folder}/a\0b"), OUT),
    ("not in the file system", output(lambda place: "/proc/run"), OUT),
    ("a device", output(lambda place: "/dev/null"), OUT),
    ("below a device", output(lambda place: "/dev/null/run"), OUT),
    ("in use", output(locked), (*OUT, "in use")),
    (
        "holds a config, resume never",
        output(lambda p: with_files(p, **{"config.yaml": "{}"}), "--resume", "never"),
        OUT,
    ),
    ("config.yaml is a folder", output(lambda p: with_files(p, **{"config.yaml__x": ""})), OUT),
    ("metrics.jsonl is a folder", output(lambda p: with_files(p, **{"metrics.jsonl__x": ""})), OUT),
    ("checkpoints is a file", output(lambda p: with_files(p, checkpoints="x"), "--save-interval", "1"), OUT),
    (".lock is a folder", output(lambda p: with_files(p, **{".lock__x": ""})), OUT),
    ("hf is a foreign file", output(lambda p: with_files(p, hf="mine")), ("hf",)),
    ("hf is a foreign folder", output(lambda p: with_files(p, **{"hf__notes.txt": "mine"})), ("notes.txt",)),
    ("hf has a broken list", output(lambda p: with_files(p, **{"hf__fsdptrain_export.json": "{]"})), ("hf",)),
    ("hf has a strange list", output(lambda p: with_files(p, **{"hf__fsdptrain_export.json": "[]"})), ("hf",)),
    ("stacks is a file", output(lambda p: with_files(p, stacks="x")), OUT),
    (
        "the model",
        lambda p: train(p, "--hf-checkpoint", str(shutil.copytree(p.checkpoint, p.output / "hf"))),
        ("hf", "model that this run reads"),
    ),
    (
        "a foreign checkpoint",
        output(lambda p: with_files(p, checkpoints__step_00000001__x="")),
        ("step_00000001",),
    ),
]


def cases() -> list[Case]:
    return [Case("output", name, prepare, texts) for name, prepare, texts in OUTPUTS]
