"""Checkpoints and runs that are broken, foreign or changed."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from campaigns.inputs.case import Case, Place, Prepare, edit, remove, rewrite, shorten, train
from tests.testing import save_tiny_checkpoint


def resume(change: Callable[[Place, Path], object], *more: str) -> Prepare:
    """`change` breaks the run, or its newest checkpoint."""

    def prepare(place: Place) -> list[str]:
        change(place, place.run())
        return train(place, "--num-rollout", "3", *more)

    return prepare


def of(name: str, content: str | bytes | Callable[[bytes], bytes]) -> Callable[[Place, Path], object]:
    return lambda place, newest: rewrite(name, content)(newest)


def state(**values: Any) -> Callable[[Place, Path], object]:
    """Change trainer.json, and the manifest, so that only the content is wrong."""

    def change(place: Place, newest: Path) -> None:
        edit(newest / "trainer.json", **values)
        sign(newest, "trainer.json")

    return change


def progress(content: str | None = None, **values: Any) -> Callable[[Place, Path], object]:
    def change(place: Place, newest: Path) -> None:
        if content is None:
            edit(newest / "progress.json", **values)
        else:
            (newest / "progress.json").write_text(content)
        sign(newest, "progress.json")

    return change


def sign(newest: Path, name: str) -> None:
    import xxhash

    content = (newest / name).read_bytes()
    edit(newest / "manifest.json", **{name: [len(content), xxhash.xxh3_128(content).hexdigest()]})


def flip(content: bytes) -> bytes:
    return content[:-1] + bytes([content[-1] ^ 1])


def of_run(name: str, content: str | bytes) -> Callable[[Place, Path], object]:
    return lambda place, newest: rewrite(name, content)(place.output)


def other_model(place: Place, newest: Path) -> None:
    save_tiny_checkpoint(place.folder / "other", hidden_size=32)


def gone(place: Place, newest: Path) -> None:
    shutil.rmtree(newest)
    newest.mkdir()


STEP = ("step_00000002",)
RESUMES: list[tuple[str, Prepare, tuple[str, ...]]] = [
    ("missing", resume(lambda p, n: None, "--resume", "nowhere"), ("--resume", "nowhere")),
    ("empty name", resume(lambda p, n: None, "--resume", ""), ("--resume",)),
    ("a file", resume(lambda p, n: None, "--resume", "/etc/hostname"), ("--resume", "hostname")),
    ("the run", lambda p: p.run() and train(p, "--num-rollout", "3", "--resume", str(p.output)), ("--resume",)),
    ("NUL", resume(lambda p, n: None, "--resume", "a\0b"), ("--resume",)),
    ("empty checkpoint", resume(gone), STEP),
    ("no manifest", resume(lambda p, n: (n / "manifest.json").unlink()), STEP),
    ("manifest {}", resume(of("manifest.json", "{}")), STEP),
    ("manifest []", resume(of("manifest.json", "[]")), STEP),
    ("manifest 5", resume(of("manifest.json", "5")), STEP),
    ("manifest empty", resume(of("manifest.json", "")), STEP),
    ("manifest of numbers", resume(lambda p, n: edit(n / "manifest.json", **{"trainer.json": 5})), STEP),
    ("manifest of nulls", resume(lambda p, n: edit(n / "manifest.json", **{"trainer.json": None})), STEP),
    ("manifest names files outside", resume(lambda p, n: edit(n / "manifest.json", **{"../../x": [1, "a"]})), STEP),
    ("manifest is partial", resume(lambda p, n: edit(n / "manifest.json", **{"trainer.json": ...})), STEP),
    ("manifest is deep", resume(of("manifest.json", "[" * 9000)), STEP),
    ("manifest with an empty name", resume(lambda p, n: edit(n / "manifest.json", **{"": [0, ""]})), STEP),
    ("no trainer.json", resume(lambda p, n: (n / "trainer.json").unlink()), STEP),
    ("trainer.json broken", resume(of("trainer.json", "{]")), STEP),
    ("trainer.json a list", resume(of("trainer.json", "[]")), STEP),
    ("trainer.json binary", resume(of("trainer.json", b"\xff\xfe")), STEP),
    ("trainer.json deep", resume(of("trainer.json", '{"format": ' + "[" * 9000)), STEP),
    ("format 1", resume(state(format=1)), (*STEP, "format 1")),
    ("format 99", resume(state(format=99)), (*STEP, "format 99")),
    ("format is text", resume(state(format="2")), STEP),
    ("no model", resume(state(model=...)), STEP),
    ("model is a number", resume(state(model=5)), STEP),
    ("model is a list", resume(state(model=[])), STEP),
    ("no optimizer", resume(state(optimizer=...)), STEP),
    ("optimizer is a text", resume(state(optimizer="x")), STEP),
    ("optimizer is empty", resume(state(optimizer={})), STEP),
    ("no step", resume(state(step=...)), STEP),
    ("step is a text", resume(state(step="x")), STEP),
    ("no progress", resume(lambda p, n: (n / "progress.json").unlink()), STEP),
    ("progress broken", resume(progress("{]")), STEP),
    ("progress a list", resume(progress("[]")), STEP),
    ("progress empty", resume(progress("{}")), STEP),
    ("progress without step", resume(progress(step=...)), STEP),
    ("progress with a text as step", resume(progress(step="x")), STEP),
    ("progress with step -1", resume(progress(step=-1)), STEP),
    ("progress with the stream as text", resume(progress(prompts="x", data="x", stream="x")), STEP),
    ("tensor flipped", resume(of("shards/*.safetensors", flip)), (*STEP, "changed")),
    ("tensor short", resume(of("shards/*.safetensors", shorten)), STEP),
    ("tensor empty", resume(of("shards/*.safetensors", b"")), STEP),
    ("tensor file missing", resume(lambda p, n: remove("shards/*.safetensors")(n)), STEP),
    ("random state flipped", resume(of("rng-*.safetensors", flip)), STEP),
    ("random state missing", resume(lambda p, n: remove("rng-*")(n)), STEP),
    ("foreign file", resume(of("extra.json", "{}")), (*STEP, "extra.json")),
    ("other model", lambda p: [*resume(other_model)(p), "--hf-checkpoint", str(p.folder / "other")], ("--resume",)),
    ("other data", resume(lambda p, n: None, "--prompt-data", "reasoning_gym:chain_sum"), ("--prompt-data",)),
    ("other reward", resume(lambda p, n: None, "--reward", "reasoning_gym"), ("--reward",)),
    ("other algorithm", resume(lambda p, n: None, "--algorithm", "rloo"), ("--algorithm",)),
    ("other seed", resume(lambda p, n: None, "--seed", "5"), ("--seed",)),
    ("a lora now", resume(lambda p, n: None, "--lora-rank", "4"), ("--lora-rank",)),
    ("config.yaml broken", resume(of_run("config.yaml", "lr: [")), ("config.yaml",)),
    ("config.yaml a list", resume(of_run("config.yaml", "[]")), ("config.yaml",)),
    ("config.yaml binary", resume(of_run("config.yaml", b"\xff\xfe\0")), ("config.yaml",)),
    ("config.yaml foreign", resume(of_run("config.yaml", "services: {web: 1}")), ("config.yaml",)),
    ("finished, other lr", lambda p: p.run() and train(p, "--lr", "5"), ("--lr",)),
    (
        "checkpoints is a file",
        resume(lambda p, n: (shutil.rmtree(n.parent), n.parent.write_text(""))),
        ("checkpoints",),
    ),
    ("a checkpoint is a file", resume(lambda p, n: (shutil.rmtree(n), n.write_text(""))), STEP),
]
REPAIRED: list[tuple[str, Prepare]] = [  # broken records of a run do not keep it from going on
    ("metrics.jsonl is garbage", resume(of_run("metrics.jsonl", "garbage\n" * 3))),
    ("metrics.jsonl is binary", resume(of_run("metrics.jsonl", bytes(range(256)) + b"\n"))),
    ("metrics.jsonl is deep", resume(of_run("metrics.jsonl", "[" * 9000 + "\n"))),
    ("metrics.jsonl has texts as steps", resume(of_run("metrics.jsonl", '{"step": "x"}\n[]\n'))),
    ("metrics.jsonl is empty", resume(of_run("metrics.jsonl", ""))),
    ("timeline.jsonl is garbage", resume(of_run("timeline.jsonl", "x\n"))),
]


def cases() -> list[Case]:
    repaired = [Case("resume", name, prepare, (), 0, why="dropped with a warning") for name, prepare in REPAIRED]
    return [Case("resume", name, prepare, texts) for name, prepare, texts in RESUMES] + repaired
