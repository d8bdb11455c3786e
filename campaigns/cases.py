"""The cases of the campaign of bad inputs: one for each cause, not one for each spelling of it."""

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.e2e.command import UNEVALUATED


@dataclass(frozen=True)
class Place:
    """What a case may use: an empty folder of its own, a good checkpoint, and the folder of a finished run."""

    folder: Path
    checkpoint: Path
    finished: Path

    def file(self, name: str, content: str | bytes) -> str:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return str(path)

    @property
    def output(self) -> Path:
        return self.folder / "run"


Prepare = Callable[[Place], list[str]]  # writes the bad input; returns words of the command line
Change = Callable[[Path], object]  # breaks a folder


@dataclass(frozen=True)
class Case:
    group: str
    name: str
    prepare: Prepare
    texts: tuple[str, ...] = ()  # on standard error
    code: int = 2


def train(place: Place, *words: str) -> list[str]:
    return ["--hf-checkpoint", str(place.checkpoint), "--output-dir", str(place.output), *UNEVALUATED, *words]


def rewrite(name: str, content: str | bytes | Callable[[bytes], bytes]) -> Change:
    """Replace the content of the first file that `name` matches, or create it."""

    def apply(folder: Path) -> None:
        path = next(iter(sorted(folder.glob(name))), folder / name)
        new = content(path.read_bytes()) if callable(content) else content
        path.write_bytes(new if isinstance(new, bytes) else new.encode())

    return apply


def remove(pattern: str) -> Change:
    return lambda folder: [path.unlink() for path in folder.glob(pattern)]


def edit(name: str, **values: Any) -> Change:
    """Change keys of a JSON file."""
    return rewrite(name, lambda content: json.dumps(json.loads(content) | values).encode())


def half(content: bytes) -> bytes:
    return content[: len(content) // 2]


def model(change: Change) -> Prepare:
    def prepare(place: Place) -> list[str]:
        copy = Path(shutil.copytree(place.checkpoint, place.folder / "model"))
        change(copy)
        return train(place, "--hf-checkpoint", str(copy), "--system-prompt", "auto")

    return prepare


def resume(change: Callable[[Path], object], *more: str, of: str = "checkpoints/step_00000002") -> Prepare:
    """Break a file of a finished run, or of its newest checkpoint, and train longer."""

    def prepare(place: Place) -> list[str]:
        shutil.copytree(place.finished, place.output)
        change(place.output / of)
        return train(place, "--num-rollout", "3", *more)

    return prepare


def data(content: str | bytes, name: str = "rows.jsonl") -> Prepare:
    reward = ("--reward", "exact", "tests.e2e.rewards:variety")
    return lambda place: train(place, *reward, "--prompt-data", place.file(name, content))


def rows(**values: Any) -> str:
    good = [{"prompt": f"{i} + 1?", "label": str(i + 1)} for i in range(12)]
    return "".join(json.dumps(row | values) + "\n" for row in good)


def recipe(content: str | bytes) -> Prepare:
    return lambda place: train(place, "--recipe", place.file("recipe.yaml", content))


def reward(code: str, *more: str) -> Prepare:
    def prepare(place: Place) -> list[str]:
        place.file("bad.py", code)
        return train(place, "--reward", "bad:f", *more)

    return prepare


def output(name: str, content: str = "x", *, inside: str = "") -> Prepare:
    """Create a file below the folder of the case, and use it, or what is `inside`, as output folder."""

    def prepare(place: Place) -> list[str]:
        path = place.file(name, content)
        return train(place, "--output-dir", path + inside if inside else str(place.output))

    return prepare


FLAGS: list[tuple[str, str]] = [  # words, and what the message names
    ("--lrr 1", "--lrr"),
    ("--learning-rate 1", "--lr"),
    ("--num-generations 8", "--n-samples-per-prompt"),
    ("lr=1", "lr=1"),
    ("--lr", "--lr needs a value"),
    ("--lr abc", "--lr"),
    ("--lr nan", "--lr"),
    ("--lr -1e-6", "--lr"),
    ("--lr 1e-6 2e-6", "2e-6"),
    ("--num-rollout 1.5", "--num-rollout"),
    ("--num-rollout " + "9" * 5000, "--num-rollout"),
    ("--rollout-top-p 0", "--rollout-top-p"),
    ("--n-samples-per-prompt 1", "--n-samples-per-prompt"),
    ("--max-tokens-per-gpu 8", "--max-tokens-per-gpu"),
    ("--algorithm ppo", "--algorithm"),
    ("--loss no.such.module:f", "no.such"),
    ("--bf16=maybe", "--bf16"),
    ("--fp16 --bf16", "--fp16"),
    ("--lora-alpha 16", "--lora-rank"),
    ("--tensor-parallel-size 3", "--tensor-parallel-size"),
    ("--context-parallel-size 2", "--context-parallel-size"),
    ("--rollout-engine sglang", "--rollout-engine"),
    ("--hf-checkpoint /nowhere", "/nowhere"),
    ("--prompt-data nowhere.jsonl", "nowhere.jsonl"),
    ("--prompt-data reasoning_gym:nothing", "nothing"),
    ("--output-dir /dev/null/run", "--output-dir"),
    ("--resume nowhere", "--resume"),
    ("--rollout-engine vllm-server --rollout-urls ftp://127.0.0.1:80", "--rollout-urls"),
    ("--rollout-engine vllm-server --rollout-urls http://127.0.0.1:abc", "--rollout-urls"),
    ("trian", "trian"),
]
RECIPES: list[tuple[str, str | bytes, str]] = [
    ("open bracket", "lr: [1", "line 1"),
    ("list", "- lr\n- 1", "list"),
    ("python object", "lr: !!python/object/apply:os.getcwd []", "line 1"),
    ("key twice", "lr: 1\nlr: 2", "twice"),
    ("unknown key", "learning_rat: 1", "learning_rat"),
    ("unknown section", "optimiser: {lr: 1}", "optimiser"),
    ("text as number", "lr: abc", "--lr"),
    ("infinite", "lr: .inf", "--lr"),
    ("deep list", "reward: " + "[" * 5000, "recipe.yaml"),
    ("binary", bytes(range(256)), "recipe.yaml"),
]
MODELS: list[tuple[str, Change, str]] = [
    ("no config", remove("config.json"), "config.json"),
    ("config is no JSON", rewrite("config.json", "{]"), "config.json"),
    ("config is deep", rewrite("config.json", '{"a":' + "[" * 9000), "config.json"),
    ("unknown model_type", edit("config.json", model_type="nothing"), "nothing"),
    ("remote code", edit("config.json", model_type="x", auto_map={"AutoConfig": "code.C"}), "--trust-remote-code"),
    ("negative hidden_size", edit("config.json", hidden_size=-64), "--hf-checkpoint"),
    ("a million layers", edit("config.json", num_hidden_layers=10**6), "--hf-checkpoint"),
    ("quantized", edit("config.json", quantization_config={"quant_method": "gptq", "bits": 4}), "quantized"),
    ("index is a list", rewrite("*.index.json", "[1]"), "index.json"),
    ("file outside", edit("model.safetensors.index.json", weight_map={"a": "../x"}), "outside"),
    ("no shards", remove("*.safetensors"), "lacks model-00001"),
    ("shard is short", rewrite("*.safetensors", half), "model-00001"),
    ("header is no JSON", rewrite("*.safetensors", lambda c: c[:8] + b"]" * (len(c) - 8)), "model-00001"),
    ("no tokenizer", remove("tokenizer*"), "tokenizer"),
    ("chat template does not parse", rewrite("chat_template.jinja", "{% for %}"), "chat template"),
    ("generation config is broken", rewrite("generation_config.json", "{]"), "generation_config.json"),
]
DATA: list[tuple[str, Prepare, str]] = [
    ("empty", data(""), "rows.jsonl"),
    ("no JSON", data("what is this\n"), "rows.jsonl"),
    ("truncated", data(rows()[:-9]), "rows.jsonl"),
    ("not UTF-8", data(b'{"prompt": "caf\xe9", "label": "1"}\n' * 9), "rows.jsonl"),
    ("binary", data(bytes(range(256)) * 9), "rows.jsonl"),
    ("other columns", data('{"question": "a", "answer": "b"}\n' * 9), "--input-key"),
    ("prompt is a number", data(rows(prompt=3)), "--input-key prompt"),
    ("message without role", data(rows(prompt=[{"content": "a"}])), "--input-key prompt"),
    ("parquet is text", data("a,b\n", "rows.parquet"), "rows.parquet"),
]
HASTY = ["--reward-timeout", "0.5", "--reward-workers", "1"]
REWARDS: list[tuple[str, Prepare, str]] = [
    ("missing function", reward(""), "--reward"),
    ("syntax error", reward("def f(:\n"), "--reward"),
    ("import exits", reward("import sys; sys.exit(0)\n"), "SystemExit"),
    ("no arguments", reward("def f(): return 1\n"), "bad:f"),
    ("raises", reward("def f(a, b): raise ValueError('one\\ntwo\\nthree')\n"), "ValueError: one"),
    ("returns None", reward("def f(a, b): return None\n"), "None"),
    ("returns text", reward("def f(a, b): return '1'\n"), "bad:f"),
    (
        "hangs",
        reward("def f(a, b):\n    while True: pass\n", "--reward-timeout", "0.5", "--reward-workers", "1"),
        "--reward-timeout",
    ),
]
RESUMES: list[tuple[str, Prepare, str]] = [
    ("empty checkpoint", resume(lambda folder: [path.unlink() for path in folder.rglob("*.*")]), "step_00000002"),
    ("no manifest", resume(remove("manifest.json")), "step_00000002"),
    ("manifest is deep", resume(rewrite("manifest.json", "[" * 9000)), "step_00000002"),
    ("trainer.json broken", resume(rewrite("trainer.json", "{]")), "step_00000002"),
    ("tensor short", resume(rewrite("shards/*.safetensors", half)), "step_00000002"),
    ("other algorithm", resume(lambda folder: None, "--algorithm", "rloo"), "--algorithm"),
    ("config.yaml broken", resume(rewrite("config.yaml", "lr: ["), of=""), "config.yaml"),
]
OUTPUTS: list[tuple[str, Prepare, str]] = [
    ("below a file", output("a", inside="/run"), "--output-dir"),
    ("name too long", output("a", inside="x" * 300), "too long"),
    ("config.yaml is a folder", output("run/config.yaml/x"), "--output-dir"),
    ("hf is a foreign folder", output("run/hf/notes.txt"), "notes.txt"),
    ("a foreign checkpoint", output("run/checkpoints/step_00000001/x"), "step_00000001"),
]
CONTROLS: list[tuple[str, Prepare]] = [
    ("run", train),
    ("recipe", recipe("optim: {lr: 1.0e-3}\n")),
    ("data", data(rows())),
    ("checkpoint", model(lambda folder: None)),
    ("reward", reward("def f(a, b): return len(b) % 3\n")),
    ("resume", resume(lambda folder: None)),
]


def all_cases() -> list[Case]:
    def at(words: str) -> Prepare:
        return lambda place: train(place, *words.split(" "))

    found = [Case("control", name, prepare, code=0) for name, prepare in CONTROLS]
    found += [Case("flags", words[:60], at(words), (text,)) for words, text in FLAGS]
    found += [Case("recipe", name, recipe(content), (text,)) for name, content, text in RECIPES]
    found += [Case("checkpoint", name, model(change), (text,)) for name, change, text in MODELS]
    for group, table in {"data": DATA, "reward": REWARDS, "resume": RESUMES, "output": OUTPUTS}.items():
        found += [Case(group, name, prepare, (text,)) for name, prepare, text in table]
    return found
