"""Bad inputs of every kind, one command each: each is refused in one line that names the culprit, and nothing is lost.

Law, of every row: the command ends within 30 s with exit code 2, or with another code that the row names; standard
error has at most three lines, besides those of a run without a mistake, and no traceback, and contains the texts that
the row names (flag, file or value); every file that stood there before is unchanged; new files appear only in the
output folder. The rows of the group
`control` use the same inputs unbroken and must end with 0, so that no row is refused for another reason than its own.

    python -m campaigns.bad_inputs [GROUP[/CASE] ...]
"""

import fcntl
import functools
import hashlib
import json
import os
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from campaigns.report import Report
from tests.e2e import command
from tests.e2e.command import UNEVALUATED
from tests.testing import free_port, save_tiny_checkpoint, tiny_tokenizer

DEADLINE_S = 30.0
MOST_LINES = 3
AT_ONCE = 2
SHOWN = 160


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

    def model(self) -> Path:
        return Path(shutil.copytree(self.checkpoint, self.folder / "model", dirs_exist_ok=True))

    def run(self) -> Path:
        """Copy the finished run to the output folder. Returns its newest checkpoint."""
        shutil.copytree(self.finished, self.output)
        return max((self.output / "checkpoints").iterdir())


Prepare = Callable[[Place], list[str]]  # writes the bad input; returns words of the command line


@dataclass(frozen=True)
class Case:
    group: str
    name: str
    prepare: Prepare
    texts: tuple[str, ...]  # on standard error
    code: int = 2
    variables: Mapping[str, str] = field(default_factory=dict)  # of the environment
    is_fresh: bool = False  # needs an interpreter of its own: its variables are read at import
    why: str = ""  # of another code than 2


def train(place: Place, *words: str) -> list[str]:
    return ["--hf-checkpoint", str(place.checkpoint), "--output-dir", str(place.output), *UNEVALUATED, *words]


def flags(*words: str) -> Prepare:
    return lambda place: train(place, *words)


# --------------------------------------------------------------------------------------------------------- recipe


def recipe(content: str | bytes) -> Prepare:
    return lambda place: train(place, "--recipe", place.file("recipe.yaml", content))


BOMB = "a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"{name}: &{name} [{','.join(['*' + before] * 9)}]\n" for before, name in zip("abcdefgh", "bcdefghi", strict=True)
)
RECIPES: list[tuple[str, str | bytes, tuple[str, ...]]] = [
    ("open bracket", "lr: [1", ("line 1",)),
    ("tab", "optim:\n\tlr: 1", ("line 2",)),
    ("two colons", "lr: 1: 2", ("line 1",)),
    ("list", "- lr\n- 1", ("list",)),
    ("text", "just text", ("str",)),
    ("number", "42", ("int",)),
    ("two documents", "lr: 1\n---\nlr: 2", ("recipe.yaml",)),
    ("unknown version", "%YAML 9.9\n---\nlr: 1", ("recipe.yaml",)),
    ("undefined alias", "lr: *x", ("line 1",)),
    ("recursive alias", "reward: &a [*a]", ("--reward",)),
    ("alias bomb", BOMB + "reward: *i", ("recipe.yaml",)),
    ("python object", "lr: !!python/object/apply:os.getcwd []", ("line 1",)),
    ("list as key", "? [a]\n: 1", ("line 1",)),
    ("mapping as key", "{a: 1}: 1", ("line 1",)),
    ("null as key", "null: 1", ("None",)),
    ("number as key", "1: 2", ("'1'",)),
    ("boolean as key", "true: 1", ("True",)),
    ("key twice", "lr: 1\nlr: 2", ("'lr'", "twice")),
    ("key twice in section", "optim: {lr: 1, lr: 2}", ("'lr'", "twice")),
    ("flat and in section", "optim: {lr: 1.0e-3}\nlr: 1.0e-3", ("optim.lr", "twice")),
    ("unknown key", "learning_rat: 1", ("learning_rat",)),
    ("unknown section", "optimiser: {lr: 1}", ("optimiser",)),
    ("unknown key in section", "optim: {l: 1}", ("'l'", "optim")),
    ("number as section", "optim: 3", ("optim", "3")),
    ("list as section", "optim: [lr]", ("optim",)),
    ("merge of a number", "<<: 3", ("line 1",)),
    ("text as number", "lr: abc", ("--lr", "abc")),
    ("quoted number", "lr: '1e-3'", ("--lr",)),
    ("nan", "lr: .nan", ("--lr", "finite")),
    ("infinite", "lr: .inf", ("--lr", "finite")),
    ("negative", "lr: -1", ("--lr", "-1")),
    ("boolean as number", "lr: true", ("--lr", "True")),
    ("mapping as number", "lr: {}", ("--lr",)),
    ("date as text", "output_dir: 2020-01-01", ("--output-dir",)),
    ("fraction as integer", "num_rollout: 1.5", ("--num-rollout", "1.5")),
    ("5000 digits", "num_rollout: " + "9" * 5000, ("recipe.yaml",)),
    ("mapping as rewards", "reward: {a: 1}", ("reward", "'a'")),
    ("numbers as rewards", "reward: [1, 2]", ("--reward",)),
    ("no rewards", "reward: []", ("--reward",)),
    ("list as mapping", "chat_template_kwargs: [1]", ("--chat-template-kwargs",)),
    ("null in mapping", "chat_template_kwargs: {a: }", ("--chat-template-kwargs",)),
    ("number as key of a mapping", "chat_template_kwargs: {1: 2}", ("--chat-template-kwargs",)),
    ("deep list", "reward: " + "[" * 5000, ("recipe.yaml",)),
    ("deep mapping", "reward: " + "{a: " * 3000, ("recipe.yaml",)),
    ("2 MB", "# x\n" * 500_000, ("recipe.yaml", "bytes")),
    ("zeros", b"\0" * 100, ("recipe.yaml",)),
    ("binary", bytes(range(256)), ("recipe.yaml",)),
    ("utf-16", "lr: 1".encode("utf-16"), ("recipe.yaml",)),
    ("latin-1", "output_dir: caf\xe9".encode("latin-1"), ("recipe.yaml",)),
    ("control character", "output_dir: a\x07b", ("recipe.yaml",)),
]


def recipe_cases() -> list[Case]:
    cases = [Case("recipe", name, recipe(content), texts) for name, content, texts in RECIPES]

    def at(name: str, texts: tuple[str, ...], path: Callable[[Place], object]) -> None:
        cases.append(Case("recipe", name, lambda place: train(place, "--recipe", str(path(place))), texts))

    at("missing", ("nowhere.yaml",), lambda place: place.folder / "nowhere.yaml")
    at("folder", ("--recipe",), lambda place: place.folder)
    at("below a file", ("--recipe",), lambda place: place.file("a", "") + "/b.yaml")
    at("name too long", ("--recipe",), lambda place: place.folder / ("x" * 300))
    at("link to itself", ("--recipe",), lambda place: link_to_itself(place.folder / "loop"))
    at("endless device", ("--recipe /dev/zero",), lambda place: "/dev/zero")
    at("NUL in the name", ("--recipe",), lambda place: "a\0b")
    at("empty name", ("--recipe",), lambda place: "")
    return cases


def link_to_itself(path: Path) -> Path:
    path.symlink_to(path)
    return path


# ---------------------------------------------------------------------------------------------------------- flags

FLAGS: list[tuple[tuple[str, ...], tuple[str, ...]]] = [
    (("--lrr", "1"), ("--lrr",)),
    (("--learning-rate", "1"), ("--learning-rate", "--lr")),
    (("--per_device_train_batch_size", "1"), ("--per-device-train-batch-size",)),
    (("--actor-lr", "1"), ("--actor-lr",)),
    (("--beta", "0.1"), ("--beta",)),
    (("--num-generations", "8"), ("--num-generations", "--n-samples-per-prompt")),
    (("--micro-batch-size", "8"), ("--micro-batch-size",)),
    (("--rollout_batch_siz", "8"), ("--rollout-batch-siz", "--rollout-batch-size")),
    (("-lr", "1"), ("-lr",)),
    (("--", "x"), ("--",)),
    (("---lr", "1"), ("---lr",)),
    (("lr=1",), ("lr=1",)),
    (("",), ("''",)),
    ((" --lr", "1"), ("--lr",)),
    (("–lr", "1"), ("–lr",)),
    (("--lr",), ("--lr needs a value",)),
    (("--lr", "--seed", "1"), ("--lr needs a value",)),
    (("--lr", ""), ("--lr",)),
    (("--lr=",), ("--lr",)),
    (("--lr", "abc"), ("--lr", "abc")),
    (("--lr", "nan"), ("--lr",)),
    (("--lr", "inf"), ("--lr",)),
    (("--lr", "-1e-6"), ("--lr",)),
    (("--lr", "1e999"), ("--lr",)),
    (("--lr", "1,5"), ("--lr", "1,5")),
    (("--lr", "1e-6", "2e-6"), ("2e-6",)),
    (("--lr", "١e-٦x"), ("--lr",)),
    (("--eps-clip", "1.5"), ("--eps-clip", "1.5")),
    (("--eps-clip", "nan"), ("--eps-clip",)),
    (("--num-rollout", "-1"), ("--num-rollout",)),
    (("--num-rollout", "1.5"), ("--num-rollout",)),
    (("--num-rollout", "9" * 5000), ("--num-rollout",)),
    (("--num-rollout", "0x10"), ("--num-rollout",)),
    (("--seed", str(2**63)), ("--seed",)),
    (("--rollout-seed", str(-(2**63))), ("--rollout-seed",)),
    (("--rollout-temperature", "0"), ("--rollout-temperature",)),
    (("--rollout-top-p", "0"), ("--rollout-top-p",)),
    (("--rollout-top-k", "0"), ("--rollout-top-k",)),
    (("--rollout-min-p", "2"), ("--rollout-min-p",)),
    (("--n-samples-per-prompt", "1"), ("--n-samples-per-prompt",)),
    (("--rollout-batch-size", "0"), ("--rollout-batch-size",)),
    (("--global-batch-size", "5"), ("--global-batch-size",)),
    (("--max-tokens-per-gpu", "0"), ("--max-tokens-per-gpu",)),
    (("--max-tokens-per-gpu", "8"), ("--max-tokens-per-gpu",)),
    (("--algorithm", "ppo"), ("--algorithm", "ppo")),
    (("--algorithm", "GRPO"), ("--algorithm", "GRPO")),
    (("--loss", "grp"), ("--loss", "grp")),
    (("--loss", "no.such.module:f"), ("--loss", "no.such")),
    (("--loss", ":"), ("--loss",)),
    (("--loss", "os:path"), ("--loss",)),
    (("--advantage-estimator", "tests.e2e.rewards:nothing"), ("--advantage-estimator",)),
    (("--lr-decay-style", "WSD"), ("--lr-wsd-decay-iters",)),
    (("--min-lr", "1e-7"), ("--min-lr",)),
    (("--adam-beta1", "1"), ("--adam-beta1",)),
    (("--adam-eps", "0"), ("--adam-eps",)),
    (("--bf16=false",), ("--bf16",)),
    (("--bf16", "no"), ("--bf16", "--no-bf16")),
    (("--fp16", "--bf16"), ("--fp16", "--bf16")),
    (("--no-lr",), ("--no-lr",)),
    (("--no-no-bf16",), ("--no-no-bf16",)),
    (("--keep-last", "0", "--save-interval", "5"), ("--save-interval",)),
    (("--steps-per-rollout", "2", "--global-batch-size", "4"), ("--steps-per-rollout",)),
    (("--use-rollout-logprobs", "--mismatch-correction", "tis"), ("--mismatch-correction",)),
    (("--kl-loss-type", "k1"), ("--kl-loss-type",)),
    (("--lora-alpha", "16"), ("--lora-alpha", "--lora-rank")),
    (("--lora-rank", "4", "--lora-targets", "nothing_proj"), ("--lora-targets",)),
    (("--lora-rank", "99999999"), ("--lora-rank",)),
    (("--tensor-parallel-size", "3"), ("--tensor-parallel-size",)),
    (("--context-parallel-size", "2"), ("--context-parallel-size",)),
    (("--fsdp-replicate-size", "2"), ("--fsdp-replicate-size",)),
    (("--nproc-per-node", "0"), ("--nproc-per-node",)),
    (("--attn-implementation", "eager"), ("--attn-implementation",)),
    (("--attn-implementation", "flash_attention_2"), ("--attn-implementation",)),
    (("--rollout-engine", "sglang"), ("--rollout-engine",)),
    (("--rollout-engine", "vllm"), ("vllm",)),
    (("--rollout-engine-args", "x"), ("--rollout-engine-args",)),
    (("--rollout-engine", "vllm", "--rollout-engine-args", "{" * 3000), ("--rollout-engine-args",)),
    (("--rollout-engine", "vllm", "--rollout-engine-args", "a=" + "[" * 3000), ("--rollout-engine-args",)),
    (("--chat-template-kwargs", "a"), ("--chat-template-kwargs",)),
    (("--chat-template-kwargs", "a=!!python/name:os.system"), ("--chat-template-kwargs",)),
    (("--chat-template-kwargs", "a=[1]"), ("--chat-template-kwargs",)),
    (("--log-to", "tensorboard"), ("--log-to", "tensorboard")),
    (("--log-to", "console", "console"), ("--log-to",)),
    (("--log-to", "no.such:logger"), ("--log-to",)),
    (("--reward",), ("--reward",)),
    (("--environment", "nothing"), ("--environment",)),
    (("--environment", "tests.e2e.rewards:variety"), ("--environment",)),
    (("--image-key", "image"), ("--image-key",)),
    (("--hf-checkpoint", ""), ("--hf-checkpoint",)),
    (("--hf-checkpoint", "no/such-model"), ("--hf-checkpoint no/such-model",)),
    (("--hf-checkpoint", "a/b/c/d"), ("--hf-checkpoint a/b/c/d",)),
    (("--hf-checkpoint", "/nowhere"), ("--hf-checkpoint /nowhere",)),
    (("--hf-checkpoint", "x" * 5000), ("too long",)),
    (("--hf-checkpoint", "modèle/ü"), ("--hf-checkpoint modèle/ü",)),
    (("--hf-checkpoint", "a\0b"), ("--hf-checkpoint",)),
    (("--hf-checkpoint", "https://huggingface.co/a/b"), ("--hf-checkpoint https://huggingface.co/a/b",)),
    (("--backend", "megatron", "--fsdp-cpu-offload"), ("--fsdp-cpu-offload",)),
    (("--ref-load", "x"), ("--ref-load",)),
    (("--kl-loss-coef", "0.1", "--ref-load", "/nowhere"), ("--ref-load /nowhere",)),
    (("--eval-size", "0", "--eval-interval", "5"), ("--eval-interval",)),
    (("--eval-prompt-data", "nowhere.jsonl"), ("--eval-prompt-data",)),
    (("--max-staleness", "3"), ("--max-staleness",)),
    (("--log-dir", "/proc/nowhere"), ("--log-dir",)),
    (("--log-dir", "a\0b"), ("--log-dir",)),
    (("train",), ("train",)),
    (("--rollout-max-prompt-len", "1"), ("--rollout-max-prompt-len",)),
    (("--rollout-max-response-len", "99999999999"), ("--rollout-max-response-len",)),
    (("--rollout-max-batch-tokens", "10"), ("--rollout-max-batch-tokens",)),
]


def flag_cases() -> list[Case]:
    return [Case("flags", " ".join(words)[:60], flags(*words), texts) for words, texts in FLAGS]


# ----------------------------------------------------------------------------------------------------------- data

ROWS = [{"prompt": f"{i} + 1?", "label": str(i + 1)} for i in range(12)]
DATA = ("--reward", "exact", "tests.e2e.rewards:variety", "--prompt-data")
SFT = ["--algorithm", "sft", "--num-rollout", "1", "--rollout-batch-size", "4", "--max-tokens-per-gpu", "512"]
SFT += ["--no-bf16", "--eval-interval", "0", "--log-to", "--prompt-data"]


def jsonl(rows: list[Any]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def data(content: str | bytes, *more: str, name: str = "rows.jsonl") -> Prepare:
    return lambda place: train(place, *DATA, place.file(name, content), *more)


def every(**values: Any) -> str:
    """Rows with other values; a value that is a function gets the number of its row."""
    return jsonl([row | {k: v(i) if callable(v) else v for k, v in values.items()} for i, row in enumerate(ROWS)])


def sft(**values: Any) -> Prepare:
    def prepare(place: Place) -> list[str]:
        argv = ["--hf-checkpoint", str(place.checkpoint), "--output-dir", str(place.output), *SFT]
        return [*argv, place.file("rows.jsonl", every(**values))]

    return prepare


def chat(*messages: Any) -> list[Any]:
    return list(messages)


USER = {"role": "user", "content": "1 + 1?"}
DATA_FILES: list[tuple[str, Prepare, tuple[str, ...]]] = [
    ("missing", flags(*DATA, "nowhere.jsonl"), ("--prompt-data nowhere.jsonl",)),
    ("empty", data(""), ("rows.jsonl", "empty")),
    ("blank lines", data("\n\n\n"), ("rows.jsonl",)),
    ("empty list", data("[]", name="rows.json"), ("rows.json",)),
    ("no JSON", data("what is this\n"), ("rows.jsonl",)),
    ("truncated", data(jsonl(ROWS)[:-9]), ("rows.jsonl",)),
    ("broken in the middle", data(jsonl(ROWS[:6]) + "{]\n" + jsonl(ROWS[6:])), ("rows.jsonl",)),
    ("lists", data("[1, 2]\n" * 9), ("rows.jsonl",)),
    ("numbers", data("1\n" * 9), ("rows.jsonl",)),
    ("strings", data('"a"\n' * 9), ("rows.jsonl",)),
    ("nulls", data("null\n" * 9), ("rows.jsonl",)),
    ("empty objects", data("{}\n" * 9), ("rows.jsonl",)),
    ("not UTF-8", data(every(prompt="caf\xe9").encode("latin-1").replace(b"\\u00e9", b"\xe9")), ("rows.jsonl",)),
    ("UTF-16", data(jsonl(ROWS).encode("utf-16")), ("rows.jsonl",)),
    ("zeros", data(b"\0" * 1000), ("rows.jsonl",)),
    ("binary", data(bytes(range(256)) * 9), ("rows.jsonl",)),
    ("deep nesting", data('{"prompt": ' + "[" * 9000 + "]" * 9000 + ', "label": "1"}\n'), ("rows.jsonl",)),
    ("other columns", data(jsonl([{"question": "a", "answer": "b"}] * 9)), ("--input-key", "question")),
    ("no label", data(jsonl([{"prompt": "a"}] * 9)), ("--label-key",)),
    ("column in another case", data(jsonl([{"Prompt": "a", "label": "b"}] * 9)), ("--input-key", "Prompt")),
    ("column twice", data('{"prompt": "a", "prompt": 1, "label": "b"}\n' * 9), ("rows.jsonl",)),
    ("key of a missing column", data(jsonl(ROWS), "--input-key", "text"), ("--input-key", "text")),
    ("metadata of a missing column", data(jsonl(ROWS), "--metadata-key", "m"), ("--metadata-key",)),
    ("metadata is a text", data(every(m="x"), "--metadata-key", "m"), ("--metadata-key",)),
    ("metadata is a list", data(every(m=[1]), "--metadata-key", "m"), ("--metadata-key",)),
    ("prompt is null", data(every(prompt=None)), ("--input-key prompt", "None")),
    ("prompt is a number", data(every(prompt=3)), ("--input-key prompt", "3")),
    ("prompt is empty", data(every(prompt="")), ("prompt",)),
    ("prompt is an empty list", data(every(prompt=[])), ("--input-key prompt",)),
    ("prompt of strings", data(every(prompt=["a"])), ("--input-key prompt",)),
    ("prompt of mixed types", data(every(prompt=lambda i: "a" if i % 2 else 1)), ("rows.jsonl",)),
    ("one null prompt", data(every(prompt=lambda i: None if i == 7 else "a")), ("--input-key prompt", "rows.jsonl:7")),
    ("message without role", data(every(prompt=[{"content": "a"}])), ("--input-key prompt",)),
    ("message without content", data(every(prompt=[{"role": "user"}])), ("--input-key prompt",)),
    ("null content", data(every(prompt=[{"role": "user", "content": None}])), ("--input-key prompt",)),
    ("number as content", data(every(prompt=[{"role": "user", "content": 5}])), ("prompt",)),
    ("number as role", data(every(prompt=[{"role": 5, "content": "a"}])), ("prompt",)),
    ("nested message", data(every(prompt=[[USER]])), ("--input-key prompt",)),
    ("huge row", data(every(prompt="a" * 5_000_000)), ("prompt",)),
    ("tools", data(every(tools=[{"name": "f"}])), ("tools",)),
    ("image of a text row", data(jsonl(ROWS), "--image-key", "image"), ("--image-key",)),
    ("image missing", data(every(image="nowhere.png"), "--image-key", "image"), ("--image-key",)),
    ("images of a text model", data(every(image=[1]), "--image-key", "image"), ("--image-key",)),
    ("CSV", data("prompt,label\na,b\n", name="rows.csv"), ("rows.csv", ".jsonl")),
    ("CSV called JSONL", data("prompt,label\na,b\n"), ("rows.jsonl",)),
    ("parquet is text", data("a,b\n", name="rows.parquet"), ("rows.parquet",)),
    ("parquet is empty", data("", name="rows.parquet"), ("rows.parquet",)),
    ("parquet is truncated", data(b"PAR1" + b"\0" * 100, name="rows.parquet"), ("rows.parquet",)),
    ("gzip called JSONL", data(b"\x1f\x8b\x08\0" + b"\0" * 50), ("rows.jsonl",)),
    ("folder called JSONL", lambda p: train(p, *DATA, str(Path(p.file("rows.jsonl/a", "")).parent)), ("rows.jsonl",)),
    ("empty folder", lambda place: train(place, *DATA, str(Path(place.file("d/.x", "")).parent)), ("--prompt-data",)),
    ("below a file", lambda place: train(place, *DATA, place.file("a", "") + "/b.jsonl"), ("--prompt-data",)),
    ("empty name", flags(*DATA, ""), ("--prompt-data",)),
    ("NUL in the name", flags(*DATA, "a\0.jsonl"), ("--prompt-data",)),
    ("link to itself", lambda p: train(p, *DATA, str(link_to_itself(p.folder / "x.jsonl"))), ("--prompt-data",)),
    ("name too long", flags(*DATA, "x" * 300 + ".jsonl"), ("too long",)),
    ("unknown option", data(jsonl(ROWS), name="rows.jsonl?x=1"), ("--prompt-data",)),
    (
        "broken broken data set",
        lambda p: train(p, *DATA, str(Path(p.file("d/state.json", "{]")).parent)),
        ("--prompt-data",),
    ),
    ("broken splits", lambda p: train(p, *DATA, str(Path(p.file("d/dataset_dict.json", "{}")).parent)), ("--prompt",)),
    ("unknown hub data", flags(*DATA, "no/such-data"), ("--prompt-data no/such-data",)),
    ("unknown task", flags("--prompt-data", "reasoning_gym:nothing"), ("--prompt-data", "nothing")),
    ("unknown parameter", flags("--prompt-data", "reasoning_gym:spell_backward?x=1"), ("--prompt-data", "'x'")),
    ("broken parameter", flags("--prompt-data", "reasoning_gym:spell_backward?size=["), ("--prompt-data", "size")),
    ("text as parameter", flags("--prompt-data", "reasoning_gym:spell_backward?size=a"), ("--prompt-data", "size")),
    ("negative size", flags("--prompt-data", "reasoning_gym:spell_backward?size=-5"), ("--prompt-data", "size")),
    ("huge size", flags("--prompt-data", "reasoning_gym:spell_backward?size=1e18"), ("--prompt-data",)),
    ("list as size", flags("--prompt-data", "reasoning_gym:spell_backward?size=[1]"), ("--prompt-data",)),
    ("sft: label is null", sft(label=None), ("label",)),
    ("sft: label is empty", sft(label=""), ("label",)),
    ("sft: label is an empty list", sft(label=[]), ("label",)),
    ("sft: label of strings", sft(label=["a"]), ("label",)),
    ("sft: message without role", sft(label=[{"content": "a"}]), ("label",)),
    ("sft: label ends with a question", sft(label=[USER]), ("label",)),
    ("sft: label too long", sft(label="a" * 9999), ("--max-tokens-per-gpu",)),
    ("sft: one null label", sft(label=lambda i: None if i == 5 else "a"), ("label", "rows.jsonl:5")),
]


def data_cases() -> list[Case]:
    return [Case("data", name, prepare, texts) for name, prepare, texts in DATA_FILES]


# ----------------------------------------------------------------------------------------------------- checkpoint


def edit(path: Path, **values: Any) -> None:
    """Change keys of a JSON file; a key whose value is ... is removed."""
    found = json.loads(path.read_text()) | values
    path.write_text(json.dumps({key: value for key, value in found.items() if value is not ...}))


def config(**values: Any) -> Callable[[Path], None]:
    return lambda model: edit(model / "config.json", **values)


def tensors(change: Callable[[dict[str, torch.Tensor]], Any]) -> Callable[[Path], None]:
    """Change the tensors of one file. `change` alters the mapping in place."""

    def apply(model: Path) -> None:
        path = sorted(model.glob("*.safetensors"))[0]
        found = load_file(path)
        change(found)
        save_file(found, path, metadata={"format": "pt"})

    return apply


def first_name(found: Mapping[str, torch.Tensor]) -> str:
    return min(found)


def rewrite(name: str, content: str | bytes | Callable[[bytes], bytes]) -> Callable[[Path], None]:
    """Replace the content of the first file that `name` matches, or create it."""

    def apply(model: Path) -> None:
        path = next(iter(sorted(model.glob(name))), model / name)
        new = content(path.read_bytes()) if callable(content) else content
        path.write_bytes(new if isinstance(new, bytes) else new.encode())

    return apply


def remove(*patterns: str) -> Callable[[Path], None]:
    return lambda model: [path.unlink() for pattern in patterns for path in model.glob(pattern)] and None


def header(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    """Change the JSON header of one safetensors file in place, and keep its data."""

    def new(content: bytes) -> bytes:
        size = struct.unpack("<Q", content[:8])[0]
        found = json.loads(content[8 : 8 + size])
        entries = {key: value for key, value in found.items() if key != "__metadata__"}
        changed = change(entries)
        text = json.dumps(entries if changed is None else changed).encode()
        return struct.pack("<Q", len(text)) + text + content[8 + size :]

    return rewrite("*.safetensors", new)


def set_entry(**values: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda entries: entries[min(entries)].update(values)


def index(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    def apply(model: Path) -> None:
        path = model / "model.safetensors.index.json"
        found = json.loads(path.read_text())
        new = change(found)
        path.write_text(json.dumps(found if new is None else new))

    return apply


def to_pickles(model: Path) -> None:
    for path in model.glob("*.safetensors"):
        torch.save(load_file(path), model / "pytorch_model.bin")
        path.unlink()
    (model / "model.safetensors.index.json").unlink()


def to_gguf(model: Path) -> None:
    remove("*.safetensors", "*.index.json")(model)
    (model / "model.gguf").write_bytes(b"GGUF" + b"\0" * 64)


def with_nan(found: dict[str, torch.Tensor]) -> None:
    for tensor in found.values():
        tensor.fill_(float("nan"))


def links_to_themselves(model: Path) -> None:
    path = sorted(model.glob("*.safetensors"))[0]
    path.unlink()
    link_to_itself(path)


def shorten(content: bytes) -> bytes:
    return content[: len(content) // 2]


CODE = {"AutoConfig": "code.C", "AutoModelForCausalLM": "code.M"}
TOKENS = "its tokenizer"
CHECKPOINTS: list[tuple[str, Callable[[Path], None], tuple[str, ...]]] = [
    ("no config", remove("config.json"), ("config.json",)),
    ("config is empty", rewrite("config.json", ""), ("config.json",)),
    ("config is no JSON", rewrite("config.json", "{]"), ("config.json",)),
    ("config is binary", rewrite("config.json", bytes(range(256))), ("config.json",)),
    ("config is a list", rewrite("config.json", "[1]"), ("config.json",)),
    ("config is a number", rewrite("config.json", "5"), ("config.json",)),
    ("config is null", rewrite("config.json", "null"), ("config.json",)),
    ("config is deep", rewrite("config.json", '{"a":' + "[" * 9000), ("config.json",)),
    ("config has nothing", rewrite("config.json", "{}"), ("--hf-checkpoint", "model_type")),
    ("unknown model_type", config(model_type="nothing"), ("--hf-checkpoint", "nothing")),
    ("model_type is a number", config(model_type=5), ("--hf-checkpoint",)),
    ("model_type is null", config(model_type=None), ("--hf-checkpoint",)),
    ("encoder", config(model_type="bert"), ("--hf-checkpoint",)),
    ("speech model", config(model_type="whisper"), ("--hf-checkpoint", "whisper")),
    ("remote code", config(model_type="own", auto_map=CODE), ("--trust-remote-code",)),
    ("auto_map is a list", config(model_type="own", auto_map=[1]), ("--hf-checkpoint",)),
    ("negative hidden_size", config(hidden_size=-64), ("--hf-checkpoint",)),
    ("hidden_size is text", config(hidden_size="big"), ("--hf-checkpoint", "hidden_size")),
    ("hidden_size 0", config(hidden_size=0), ("--hf-checkpoint",)),
    ("no layers", config(num_hidden_layers=0), ("--hf-checkpoint",)),
    ("a million layers", config(num_hidden_layers=10**6), ("--hf-checkpoint",)),
    ("heads do not divide", config(num_attention_heads=3, num_key_value_heads=2), ("--hf-checkpoint",)),
    ("other layer_types", config(layer_types=["full_attention"]), ("--hf-checkpoint", "layer")),
    ("unknown layer_types", config(layer_types=["x", "y"]), ("--hf-checkpoint",)),
    ("unknown activation", config(hidden_act="nothing"), ("--hf-checkpoint", "nothing")),
    ("unknown rope", config(rope_parameters={"rope_type": "nothing"}), ("--hf-checkpoint",)),
    ("rope is a text", config(rope_parameters="x"), ("--hf-checkpoint",)),
    ("unknown dtype", config(dtype="float3"), ("--hf-checkpoint", "float3")),
    ("quantized", config(quantization_config={"quant_method": "gptq", "bits": 4}), ("quantized", "gptq")),
    ("quantized by a text", config(quantization_config="int4"), ("quantized",)),
    ("quantized by a list", config(quantization_config=[4]), ("quantized",)),
    ("huge vocabulary", config(vocab_size=10**9), ("--hf-checkpoint",)),
    ("small vocabulary", config(vocab_size=100), ("--hf-checkpoint",)),
    ("vocabulary is text", config(vocab_size="264"), ("--hf-checkpoint",)),
    ("eos is a text", config(eos_token_id="end"), ("--hf-checkpoint",)),
    ("not tied", config(tie_word_embeddings=False), ("--hf-checkpoint", "lm_head")),
    ("no index", remove("*.index.json"), ("--hf-checkpoint", "model.safetensors")),
    ("index is empty", rewrite("*.index.json", ""), ("index.json",)),
    ("index is a list", index(lambda found: [1]), ("index.json",)),
    ("index is deep", rewrite("*.index.json", '{"weight_map":' + "[" * 9000), ("index.json",)),
    ("weight_map is a list", index(lambda found: {"weight_map": ["a"]}), ("index.json",)),
    ("weight_map has numbers", index(lambda found: {"weight_map": {"a": 1}}), ("index.json",)),
    ("weight_map is empty", index(lambda found: {"weight_map": {}}), ("--hf-checkpoint",)),
    ("file name is long", index(lambda found: {"weight_map": {"a": "x" * 300}}), ("index.json",)),
    ("file name has a NUL", index(lambda found: {"weight_map": {"a": "x\0"}}), ("index.json",)),
    ("file outside", index(lambda found: {"weight_map": {"a": "../x"}}), ("outside",)),
    ("absolute file", index(lambda found: {"weight_map": {"a": "/etc/passwd"}}), ("outside",)),
    ("file is no safetensors", index(lambda found: {"weight_map": {"a": "config.json"}}), ("config.json",)),
    ("no shards", remove("*.safetensors"), ("lacks model-00001",)),
    ("shard is empty", rewrite("*.safetensors", b""), ("model-00001",)),
    ("shard is short", rewrite("*.safetensors", shorten), ("model-00001",)),
    ("shard is long", rewrite("*.safetensors", lambda content: content + b"x"), ("model-00001",)),
    ("shard is text", rewrite("*.safetensors", "version https://git-lfs.github.com/spec/v1\n"), ("model-00001",)),
    ("shard is a link to itself", links_to_themselves, ("model-00001",)),
    ("header length huge", rewrite("*.safetensors", lambda content: b"\xff" * 8 + content[8:]), ("model-00001",)),
    ("header length 0", rewrite("*.safetensors", lambda content: b"\0" * 8 + content[8:]), ("model-00001",)),
    ("header is no JSON", rewrite("*.safetensors", lambda c: c[:8] + b"]" * (len(c) - 8)), ("model-00001",)),
    ("header is a list", header(lambda entries: [1]), ("model-00001",)),
    ("header is deep", header(lambda entries: functools.reduce(lambda a, _: [a], range(900), [])), ("model-00001",)),
    ("entry is a number", header(lambda entries: {min(entries): 5}), ("model-00001",)),
    ("unknown dtype in the header", header(set_entry(dtype="X9")), ("model-00001",)),
    ("8-bit dtype in the header", header(set_entry(dtype="F8_E4M3")), ("model-00001",)),
    ("integer dtype in the header", header(set_entry(dtype="I32")), ("--hf-checkpoint",)),
    ("complex dtype in the header", header(set_entry(dtype="C64")), ("model-00001",)),
    ("offsets overlap", header(set_entry(data_offsets=[0, 4])), ("model-00001",)),
    ("offsets negative", header(set_entry(data_offsets=[-4, 4])), ("model-00001",)),
    ("offsets beyond the file", header(set_entry(data_offsets=[0, 10**12])), ("model-00001",)),
    ("shape huge", header(set_entry(shape=[2**40, 2**40])), ("model-00001",)),
    ("shape negative", header(set_entry(shape=[-1])), ("model-00001",)),
    ("other shape", tensors(lambda found: found.update({first_name(found): torch.zeros(3, 3)})), ("shape",)),
    ("missing tensor", tensors(lambda found: found.pop(first_name(found))), ("--hf-checkpoint",)),
    ("all missing", tensors(lambda found: found.clear()), ("--hf-checkpoint",)),
    ("extra tensor", tensors(lambda found: found.update(extra=torch.zeros(3))), ("extra",)),
    ("integers", tensors(lambda found: found.update({k: v.long() for k, v in found.items()})), ("--hf-checkpoint",)),
    ("NaN weights", tensors(with_nan), ("--hf-checkpoint",)),
    ("pickles", to_pickles, ("pickles", ".bin")),
    ("GGUF", to_gguf, ("GGUF",)),
    ("no tokenizer", remove("tokenizer*"), ("--hf-checkpoint", "tokenizer")),
    ("tokenizer is empty", rewrite("tokenizer.json", ""), ("tokenizer",)),
    ("tokenizer is no JSON", rewrite("tokenizer.json", "{]"), ("tokenizer",)),
    ("tokenizer is a list", rewrite("tokenizer.json", "[]"), ("tokenizer",)),
    ("tokenizer has nothing", rewrite("tokenizer.json", "{}"), ("tokenizer",)),
    ("tokenizer config is broken", rewrite("tokenizer_config.json", "{]"), ("tokenizer",)),
    ("tokenizer config is a list", rewrite("tokenizer_config.json", "[]"), ("tokenizer",)),
    ("chat template does not parse", rewrite("chat_template.jinja", "{% for %}"), ("chat template",)),
    ("chat template raises", rewrite("chat_template.jinja", "{{ raise_exception('no') }}"), ("chat template",)),
    ("chat template divides by 0", rewrite("chat_template.jinja", "{{ 1 / 0 }}"), ("chat template",)),
    ("chat template is endless", rewrite("chat_template.jinja", "{{ 'x' * 10**12 }}"), ("chat template",)),
    ("chat template calls nothing", rewrite("chat_template.jinja", "{{ f() }}"), ("chat template",)),
    ("chat template is binary", rewrite("chat_template.jinja", b"\xff\xfe\0"), ("chat",)),
    ("chat template is missing", remove("chat_template.jinja"), ("chat template",)),
    ("generation config is broken", rewrite("generation_config.json", "{]"), ("generation_config.json",)),
    ("generation config is a list", rewrite("generation_config.json", "[1]"), ("generation_config.json",)),
    ("generation eos is a text", rewrite("generation_config.json", '{"eos_token_id": "a"}'), ("generation_config",)),
]


def checkpoint_cases() -> list[Case]:
    def row(name: str, change: Callable[[Path], None], texts: tuple[str, ...]) -> Case:
        def prepare(place: Place) -> list[str]:
            model = place.model()
            change(model)
            return train(place, "--hf-checkpoint", str(model), "--system-prompt", "auto")

        return Case("checkpoint", name, prepare, texts)

    return [row(*each) for each in CHECKPOINTS]


# --------------------------------------------------------------------------------------------------------- reward


def reward(code: str, *more: str) -> Prepare:
    """`more` is given after --reward bad:f."""
    return lambda place: place.file("bad.py", code) and train(place, "--reward", *(more or ("bad:f",)))


def returns(value: str) -> str:
    return f"def f(prompt, response):\n    return {value}\n"


UNSCORED = "--max-unscored-fraction"
HANGING = ("bad:f", "--reward-timeout", "0.5")
REWARDS: list[tuple[str, Prepare, tuple[str, ...]]] = [
    ("missing module", reward("", "nothing:f"), ("--reward", "nothing")),
    ("missing function", reward(""), ("--reward", "bad")),
    ("no function name", reward("", "bad:"), ("--reward", "bad:")),
    ("no module name", reward("", ":f"), ("--reward", ":f")),
    ("two colons", reward("", "bad:f:g"), ("--reward", "bad:f:g")),
    ("dots", reward("", "..bad:f"), ("--reward", "..bad:f")),
    ("unknown name", reward("", "exactly"), ("--reward", "exact")),
    ("weight is text", reward(returns("1"), "bad:f=x"), ("--reward", "bad:f=x")),
    ("weight is nan", reward(returns("1"), "bad:f=nan"), ("--reward", "bad:f=nan")),
    ("same reward twice", reward(returns("1"), "bad:f", "bad:f"), ("--reward",)),
    ("syntax error", reward("def f(:\n"), ("--reward", "bad")),
    ("import raises", reward("1 / 0\n"), ("--reward", "ZeroDivisionError")),
    ("import exits", reward("import sys; sys.exit(0)\n"), ("--reward", "SystemExit")),
    ("import needs a missing module", reward("import nothing_here\n"), ("--reward", "nothing_here")),
    (
        "not UTF-8",
        lambda place: place.file("bad.py", b"x = '\xff'\n") and train(place, "--reward", "bad:f"),
        ("--reward",),
    ),
    ("a number", reward("f = 3\n"), ("--reward", "bad:f")),
    ("a class", reward("class f: pass\n"), ("--reward", "bad:f")),
    ("no arguments", reward("def f(): return 1\n"), ("--reward", "bad:f")),
    ("one argument", reward("def f(prompt): return 1\n"), ("--reward", "bad:f")),
    ("three arguments", reward("def f(a, b, c): return 1\n"), ("--reward", "bad:f")),
    ("async", reward("async def f(a, b): return 1\n"), ("--reward",)),
    ("generator", reward("def f(a, b):\n    yield 1\n"), ("--reward",)),
    ("raises", reward("def f(a, b): raise ValueError('one\\ntwo\\nthree\\nfour')\n"), (UNSCORED, "ValueError: one")),
    ("raises a long text", reward("def f(a, b): raise ValueError('x' * 10**6)\n"), (UNSCORED, "ValueError")),
    ("exits", reward("def f(a, b): raise SystemExit(0)\n"), ("--reward", "SystemExit")),
    ("recurses", reward("def f(a, b): return f(a, b)\n"), (UNSCORED, "RecursionError")),
    ("returns None", reward(returns("None")), ("--reward", "None")),
    ("returns nan", reward(returns("float('nan')")), (UNSCORED, "nan")),
    ("returns inf", reward(returns("float('inf')")), (UNSCORED, "inf")),
    ("returns 1e30", reward(returns("1e30")), (UNSCORED, "1e+30")),
    ("returns 10**400", reward(returns("10**400")), (UNSCORED, "OverflowError")),
    ("returns text", reward(returns("'1'")), (UNSCORED, "'1'")),
    ("returns a list", reward(returns("[1.0]")), (UNSCORED,)),
    ("returns a complex number", reward(returns("1j")), (UNSCORED,)),
    ("returns a vector", reward("import torch\n" + returns("torch.zeros(3)")), (UNSCORED,)),
    ("returns an empty mapping", reward(returns("{}")), ("--reward",)),
    ("returns a mapping of texts", reward(returns("{'reward': 'a'}")), (UNSCORED,)),
    ("returns a mapping with a number as key", reward(returns("{1: 1.0}")), (UNSCORED,)),
    ("hangs", reward("import time\ndef f(a, b): time.sleep(999)\n", *HANGING), ("--reward-timeout",)),
    ("computes for ever", reward("def f(a, b):\n    while True: pass\n", *HANGING), ("--reward-timeout",)),
    ("data of another reward", reward("", "environment"), ("--reward environment",)),
]


def reward_cases() -> list[Case]:
    def row(name: str, prepare: Prepare, texts: tuple[str, ...]) -> Case:
        return Case("reward", name, prepare, texts, variables={"PYTHONPATH": "."})

    return [row(*each) for each in REWARDS]


# --------------------------------------------------------------------------------------------------------- output


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
        "a foreign checkpoint",
        output(lambda p: with_files(p, **{"checkpoints__step_00000001__x": ""})),
        ("step_00000001",),
    ),
]


def output_cases() -> list[Case]:
    return [Case("output", name, prepare, texts) for name, prepare, texts in OUTPUTS]


# ---------------------------------------------------------------------------------------------------- environment

RANK = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29999"}
ENVIRONMENTS: list[tuple[str, dict[str, str], tuple[str, ...]]] = [
    ("RANK alone", {"RANK": "0"}, ("WORLD_SIZE",)),
    ("RANK is text", {**RANK, "RANK": "zero"}, ("RANK=zero",)),
    ("RANK is empty", {**RANK, "RANK": ""}, ("RANK",)),
    ("RANK is negative", {**RANK, "RANK": "-1"}, ("RANK=-1",)),
    ("RANK beyond the world", {**RANK, "RANK": "1"}, ("RANK=1",)),
    ("WORLD_SIZE 0", {**RANK, "WORLD_SIZE": "0"}, ("WORLD_SIZE=0",)),
    ("WORLD_SIZE huge", {**RANK, "WORLD_SIZE": "9" * 30}, ("WORLD_SIZE",)),
    ("LOCAL_RANK beyond", {**RANK, "LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": "1"}, ("LOCAL_RANK=3",)),
    ("no MASTER_ADDR", {**RANK, "MASTER_ADDR": ""}, ("MASTER_ADDR",)),
    (
        "MASTER_ADDR unknown",
        {**RANK, "RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "no.such.host.invalid"},
        ("no.such.host",),
    ),
    ("MASTER_PORT text", {**RANK, "MASTER_PORT": "x"}, ("MASTER_PORT=x",)),
    ("MASTER_PORT 70000", {**RANK, "MASTER_PORT": "70000"}, ("MASTER_PORT=70000",)),
    ("nobody at MASTER_PORT", {**RANK, "RANK": "1", "WORLD_SIZE": "2", "MASTER_PORT": "29998"}, ("29998",)),
    ("restart count is text", {"TORCHELASTIC_RESTART_COUNT": "x"}, ("TORCHELASTIC_RESTART_COUNT=x",)),
]
# A variable of another program that is broken, and which does not concern this run: the run must work.
HARMLESS: list[tuple[str, dict[str, str]]] = [
    ("OMP_NUM_THREADS is text", {"OMP_NUM_THREADS": "abc"}),
    ("OMP_NUM_THREADS 0", {"OMP_NUM_THREADS": "0"}),
    ("CUDA_VISIBLE_DEVICES nonsense", {"CUDA_VISIBLE_DEVICES": "x,y,99"}),
    ("HF_HOME is a file", {"HF_HOME": "/etc/hostname"}),
    ("HF_HOME below a device", {"HF_HOME": "/dev/null/x"}),
    ("TMPDIR missing", {"TMPDIR": "/nowhere"}),
    ("PYTHONPATH missing", {"PYTHONPATH": "/nowhere:\t:"}),
    ("HOME missing", {"HOME": "/nowhere"}),
    ("HOME empty", {"HOME": ""}),
    ("LANG unknown", {"LANG": "xx_YY", "LC_ALL": "xx_YY.nothing"}),
    ("ASCII only", {"PYTHONIOENCODING": "ascii", "LC_ALL": "C", "PYTHONUTF8": "0"}),
    ("TERM unknown", {"TERM": "nothing", "COLUMNS": "x"}),
    ("COLUMNS 0", {"COLUMNS": "0", "LINES": "0"}),
    ("LOCAL_RANK without RANK", {"LOCAL_RANK": "5", "WORLD_SIZE": "7"}),
    ("proxy nonsense", {"HTTP_PROXY": "nonsense", "https_proxy": "::::"}),
    ("TORCH_LOGS unknown", {"TORCH_CPP_LOG_LEVEL": "nothing", "TRANSFORMERS_VERBOSITY": "nothing"}),
    ("TORCHELASTIC_ERROR_FILE cannot be written", {"TORCHELASTIC_ERROR_FILE": "/nowhere/x"}),
    ("launcher's pid is text", {"FSDPTRAIN_LAUNCHER_PID": "x"}),
    ("launcher's pid is gone", {"FSDPTRAIN_LAUNCHER_PID": "999999999"}),
]


def environment_cases() -> list[Case]:
    wrong = [
        Case("environment", name, flags("--dist-timeout", "5"), texts, variables=variables, is_fresh=True)
        for name, variables, texts in ENVIRONMENTS
    ]
    harmless = [
        Case("environment", name, flags("--num-rollout", "0"), (), 0, variables, is_fresh=True, why="does not matter")
        for name, variables in HARMLESS
    ]
    return wrong + harmless


# --------------------------------------------------------------------------------------------------------- resume


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


def resume_cases() -> list[Case]:
    repaired = [Case("resume", name, prepare, (), 0, why="dropped with a warning") for name, prepare in REPAIRED]
    return [Case("resume", name, prepare, texts) for name, prepare, texts in RESUMES] + repaired


# ------------------------------------------------------------------------------------------------------- endpoint


class BadServer(BaseHTTPRequestHandler):
    """Answers by the first part of the path, e.g. /html/server_info."""

    ANSWERS: Mapping[str, tuple[int, bytes]] = {
        "html": (200, b"<html><body>hello</body></html>"),
        "500": (500, b"Internal Server Error"),
        "404": (404, b'{"detail":"Not Found"}'),
        "401": (401, b'{"error":"Unauthorized"}'),
        "503": (503, b"<html>" + b"x" * 5000),
        "redirect": (302, b""),
        "nothing": (200, b""),
        "broken": (200, b'{"vllm_config": '),
        "list": (200, b"[1, 2, 3]"),
        "null": (200, b"null"),
        "deep": (200, b"[" * 9000),
        "binary": (200, b'{"\xff\xfe\0":'),
        "strange": (200, b'{"vllm_config": [1]}'),
        "partial": (200, b'{"vllm_config": {"instance_id": "a", "model_config": {}}}'),
        "numbers": (200, b'{"vllm_config": {"instance_id": 5, "model_config": {"dtype": 5, "logprobs_mode": 1}}}'),
    }

    def do_GET(self) -> None:
        kind = self.path.split("/")[1]
        if kind == "slow":
            time.sleep(5.0)
        if kind in ("slow", "closes"):
            self.close_connection = True
            return
        if kind == "talks":
            self.wfile.write(b"SSH-2.0-OpenSSH_9.6\r\n")
            self.close_connection = True
            return
        status, body = self.ANSWERS[kind]
        self.send_response(status)
        self.send_header("Content-Length", str(len(body) + (1000 if kind == "null" else 0)))
        self.send_header("Location", "/redirect/again")
        self.end_headers()
        self.wfile.write(body)

    do_POST = do_GET

    def log_message(self, *_: Any) -> None: ...


@functools.cache
def server_port() -> int:
    server = ThreadingHTTPServer(("127.0.0.1", 0), BadServer)
    Thread(target=server.serve_forever, daemon=True).start()
    return server.server_address[1]


def servers(*urls: str, more: tuple[str, ...] = ()) -> Prepare:
    def prepare(place: Place) -> list[str]:
        named = [url.format(port=server_port(), nobody=free_port()) for url in urls]
        waits = ["--weight-sync-timeout", "2", "--rollout-timeout", "5"]
        return train(place, "--rollout-engine", "vllm-server", *waits, "--rollout-urls", *named, *more)

    return prepare


URLS: list[tuple[str, Prepare, tuple[str, ...]]] = [
    ("no scheme", servers("127.0.0.1:8000"), ("--rollout-urls", "127.0.0.1:8000")),
    ("other scheme", servers("ftp://127.0.0.1:8000"), ("--rollout-urls", "ftp:")),
    ("no host", servers("http://"), ("--rollout-urls", "http://")),
    ("only a port", servers("http://:8000"), ("--rollout-urls",)),
    ("port is text", servers("http://127.0.0.1:abc"), ("--rollout-urls", "abc")),
    ("port 99999", servers("http://127.0.0.1:99999"), ("--rollout-urls", "99999")),
    ("port -1", servers("http://127.0.0.1:-1"), ("--rollout-urls", "-1")),
    ("port 0", servers("http://127.0.0.1:0"), ("--rollout-urls",)),
    ("open bracket", servers("http://[::1"), ("--rollout-urls", "[::1")),
    ("no address in brackets", servers("http://[x]:80"), ("--rollout-urls", "[x]")),
    ("space", servers("http://127.0.0.1 :80"), ("--rollout-urls",)),
    ("line break", servers("http://127.0.0.1\n:80"), ("--rollout-urls",)),
    ("unicode", servers("http://höst.invalid:80"), ("--rollout-urls",)),
    ("empty label", servers("http://a..b:80"), ("--rollout-urls", "a..b")),
    ("long label", servers(f"http://{'a' * 300}:80"), ("--rollout-urls",)),
    ("user", servers("http://user:secret@127.0.0.1:80"), ("--rollout-urls",)),
    ("query", servers("http://127.0.0.1:80?x=1"), ("--rollout-urls",)),
    ("fragment", servers("http://127.0.0.1:80#x"), ("--rollout-urls",)),
    ("empty", servers(""), ("--rollout-urls",)),
    ("none", servers(), ("--rollout-urls",)),
    ("twice", servers("http://127.0.0.1:80", "http://127.0.0.1:80/"), ("--rollout-urls", "twice")),
    ("unknown host", servers("http://no.such.host.invalid:80"), ("--rollout-urls", "no.such.host")),
    ("public", servers("http://8.8.8.8:80"), ("--rollout-urls", "8.8.8.8")),
    ("no key", servers("http://127.0.0.1:80", more=("--rollout-api-key-env", "NO_SUCH")), ("--rollout-api-key-env",)),
    ("also started", servers("http://127.0.0.1:80", more=("--rollout-num-servers", "1")), ("--rollout-num-servers",)),
    ("more needed", servers("http://127.0.0.1:80", more=("--min-servers", "2")), ("--min-servers",)),
    ("nobody there", servers("http://127.0.0.1:{nobody}"), ("--rollout-urls",)),
    ("nobody at the second", servers("http://127.0.0.1:{port}/html", "http://127.0.0.1:{nobody}"), ("--rollout-urls",)),
    ("https of http", servers("https://127.0.0.1:{port}"), ("--rollout-urls",)),
    *((kind, servers(f"http://127.0.0.1:{{port}}/{kind}"), ("--rollout-urls",)) for kind in BadServer.ANSWERS),
    *(
        (kind, servers(f"http://127.0.0.1:{{port}}/{kind}"), ("--rollout-urls",))
        for kind in ("slow", "closes", "talks")
    ),
]


def endpoint_cases() -> list[Case]:
    return [Case("endpoint", name, prepare, texts) for name, prepare, texts in URLS]


# ------------------------------------------------------------------------------------------------------- commands


def words(*values: str) -> Prepare:
    return lambda place: [
        value.format(model=place.checkpoint, run=place.finished, folder=place.folder) for value in values
    ]


def report_of(name: str, content: str | bytes) -> Prepare:
    def prepare(place: Place) -> list[str]:
        place.run()
        rewrite(name, content)(place.output)
        return ["report", str(place.output)]

    return prepare


def export_of(change: Callable[[Place, Path], object], *more: str) -> Prepare:
    def prepare(place: Place) -> list[str]:
        newest = place.run()
        change(place, newest)
        given = [word.format(folder=place.folder) for word in more]
        return ["export", "--checkpoint", str(newest), "--output", str(place.folder / "run" / "exported"), *given]

    return prepare


def inspect_of(change: Callable[[Path], None], *more: str) -> Prepare:
    def prepare(place: Place) -> list[str]:
        model = place.model()
        change(model)
        return [*more, "--hf-checkpoint", str(model)]

    return prepare


LINE = '{"step": 1, "reward/mean": %s}\n'
COMMANDS: list[tuple[str, Prepare, tuple[str, ...]]] = [
    ("unknown command", words("trian"), ("trian",)),
    ("a file as command", words("/etc/hostname"), ("/etc/hostname",)),
    ("no model", words("--dry-run"), ("--hf-checkpoint",)),
    ("inspect: nothing", words("inspect"), ("--hf-checkpoint",)),
    ("inspect: a word", words("inspect", "{model}"), ("--hf-checkpoint",)),
    ("inspect: missing", words("inspect", "--hf-checkpoint", "/nowhere"), ("/nowhere",)),
    ("inspect: --num-gpus 0", words("inspect", "--hf-checkpoint", "{model}", "--num-gpus", "0"), ("--num-gpus",)),
    ("inspect: --num-gpus -1", words("inspect", "--hf-checkpoint", "{model}", "--num-gpus", "-1"), ("--num-gpus",)),
    ("inspect: export's flag", words("inspect", "--checkpoint", "x"), ("--checkpoint",)),
    *((f"{name}: {case}", inspect_of(change, name), texts) for name in ("inspect", "plan") for case, change, texts in [
        ("config is a list", rewrite("config.json", "[1]"), ("config.json",)),
        ("config is no JSON", rewrite("config.json", "{]"), ("config.json",)),
        ("config is deep", rewrite("config.json", '{"a":' + "[" * 9000), ("config.json",)),
        ("unknown model_type", config(model_type="nothing"), ("--hf-checkpoint", "nothing")),
        ("a million layers", config(num_hidden_layers=10**6), ("--hf-checkpoint",)),
        ("negative size", config(hidden_size=-64), ("--hf-checkpoint",)),
    ]),
    ("inspect --against: no shards", inspect_of(remove("*.safetensors"), "inspect", "--against-checkpoint"), ("model-00001",)),
    ("inspect --against: shard short", inspect_of(rewrite("*.safetensors", shorten), "inspect", "--against-checkpoint"), ("model-00001",)),
    ("inspect --against: shard is deep", inspect_of(header(lambda e: [[[]]]), "inspect", "--against-checkpoint"), ("model-00001",)),
    ("plan: nothing", words("plan"), ("--hf-checkpoint",)),
    ("plan: --num-gpus text", words("plan", "--hf-checkpoint", "{model}", "--num-gpus", "x"), ("--num-gpus",)),
    ("plan: --gpu-memory-gib nan", words("plan", "--hf-checkpoint", "{model}", "--gpu-memory-gib", "nan"), ("--gpu-memory-gib",)),
    ("plan: --gpu-memory-gib 0", words("plan", "--hf-checkpoint", "{model}", "--gpu-memory-gib", "0"), ("--gpu-memory-gib",)),
    ("report: nothing", words("report"), ("report",)),
    ("report: missing", words("report", "/nowhere"), ("/nowhere",)),
    ("report: a file", words("report", "/etc/hostname"), ("/etc/hostname",)),
    ("report: an empty folder", words("report", "{folder}"), ("metrics.jsonl",)),
    ("report: two folders", words("report", "{folder}", "{folder}"), ("{folder}",)),
    ("report: --rollouts 3", words("report", "{run}", "--rollouts", "3"), ("--rollouts",)),
    ("report: --rollouts 5:3", words("report", "{run}", "--rollouts", "5:3"), ("--rollouts",)),
    ("report: --rollouts 90:99", lambda p: ["report", str(p.run().parent.parent), "--rollouts", "90:99"], ("--rollouts 90:99",)),
    ("report: --rollouts of digits", words("report", "{run}", "--rollouts", "²:³"), ("--rollouts",)),
    ("report: garbage", report_of("metrics.jsonl", "garbage\n"), ("metrics.jsonl", "line 1")),
    ("report: deep", report_of("metrics.jsonl", "[" * 9000 + "\n"), ("metrics.jsonl", "line 1")),
    ("report: list", report_of("metrics.jsonl", "[1]\n"), ("metrics.jsonl", "line 1")),
    ("report: step is text", report_of("metrics.jsonl", '{"step": "x"}\n'), ("metrics.jsonl", "line 1")),
    ("report: step is nan", report_of("metrics.jsonl", '{"step": NaN, "reward/mean": 1}\n'), ("metrics.jsonl",)),
    ("report: value is text", report_of("metrics.jsonl", LINE % '"x"'), ("metrics.jsonl",)),
    ("report: value is a list", report_of("metrics.jsonl", LINE % "[1]"), ("metrics.jsonl",)),
    ("report: config.yaml broken", report_of("config.yaml", "lr: ["), ("config.yaml",)),
    ("report: config.yaml a list", report_of("config.yaml", "[1]"), ("config.yaml",)),
    ("report: config.yaml a text section", report_of("config.yaml", "algorithm: x"), ("config.yaml",)),
    ("report: config.yaml binary", report_of("config.yaml", b"\xff\xfe\0"), ("config.yaml",)),
    ("report: timeline garbage", report_of("timeline.jsonl", "x\n"), ("timeline.jsonl",)),
    ("report: timeline without stages", report_of("timeline.jsonl", '{"step": 1}\n'), ("timeline.jsonl",)),
    ("report: timeline of texts", report_of("timeline.jsonl", '{"step": 1, "stage": "train", "rollout": "a", "begin": 1, "end": 2}\n'), ("timeline.jsonl",)),
    ("export: nothing", words("export"), ("--checkpoint",)),
    ("export: no output", words("export", "--checkpoint", "{run}"), ("--output",)),
    ("export: missing", words("export", "--checkpoint", "/nowhere", "--output", "{folder}/o"), ("--checkpoint /nowhere",)),
    ("export: the run", words("export", "--checkpoint", "{run}", "--output", "{folder}/o"), ("--checkpoint",)),
    ("export: other flag", words("export", "--checkpoint", "x", "--output", "y", "--lr", "1"), ("--lr",)),
    ("export: no manifest", export_of(lambda p, n: (n / "manifest.json").unlink()), STEP),
    ("export: tensor flipped", export_of(of("shards/*.safetensors", flip)), STEP),
    ("export: empty checkpoint", export_of(gone), STEP),
    ("export: config.yaml broken", export_of(of_run("config.yaml", "lr: [")), ("config.yaml",)),
    ("export: config.yaml of a lora", export_of(of_run("config.yaml", "model: {hf_checkpoint: /nowhere}")), ("/nowhere",)),
    ("export: over a file", export_of(lambda p, n: p.file("a", "x"), "--output", "{folder}/a"), ("--output", "file")),
    ("export: below a file", export_of(lambda p, n: p.file("a", "x"), "--output", "{folder}/a/b"), ("--output",)),
    ("export: over foreign files", export_of(lambda p, n: p.file("b/mine.txt", "x"), "--output", "{folder}/b"), ("mine.txt",)),
    ("export: over the run", export_of(lambda p, n: None, "--output", "{folder}/run"), ("--output",)),
    ("export: over a folder above the model", export_of(lambda p, n: None, "--output", "{folder}/.."), ("--output",)),
]  # fmt: skip


def command_cases() -> list[Case]:
    return [Case("commands", name, prepare, texts) for name, prepare, texts in COMMANDS]


def control_cases() -> list[Case]:
    rows: list[tuple[str, Prepare]] = [
        ("run", flags()),
        ("recipe", recipe("optim: {lr: 1.0e-3}\n")),
        ("recipe with a byte order mark", recipe("\ufeffoptim: {lr: 1.0e-3}\n")),
        ("empty recipe", recipe("")),
        ("data", data(jsonl(ROWS))),
        ("data with a byte order mark", data("\ufeff" + jsonl(ROWS))),
        ("chat data", data(every(prompt=[USER]))),
        ("the same row twelve times", data(jsonl([ROWS[0] | {"id": 1}] * 12))),
        ("sft", sft()),
        ("checkpoint", lambda p: train(p, "--hf-checkpoint", str(p.model()), "--system-prompt", "auto")),
        ("reward", lambda p: p.file("good.py", returns("len(response) % 3")) and train(p, "--reward", "good:f")),
        ("resume", resume(lambda p, n: None)),
        ("inspect", words("inspect", "--hf-checkpoint", "{model}", "--against-checkpoint")),
        ("plan", words("plan", "--hf-checkpoint", "{model}", "--gpu-memory-gib", "80")),
        ("report", lambda place: ["report", str(place.run().parent.parent)]),
        ("export", export_of(lambda p, n: None)),
        ("no arguments", lambda place: ["--help"]),
    ]
    variables = {"PYTHONPATH": "."}
    return [Case("control", name, prepare, (), 0, variables, why="nothing is broken") for name, prepare in rows]


# ------------------------------------------------------------------------------------------------------- the law


@dataclass(frozen=True)
class Outcome:
    code: int | None  # None: it did not end
    err: str
    seconds: float
    lost: tuple[str, ...]  # files that stood there before and have changed, and new ones outside of the output folder


def attempt(case: Case, folder: Path, shared: Path) -> Outcome:
    """Prepare one case in the new `folder`, run it and compare the files."""
    folder.mkdir()
    place = Place(folder, shared / "model", shared / "run")
    argv = case.prepare(place)
    variables = {name: value.replace(".", str(folder)) if name == "PYTHONPATH" and value == "." else value
                 for name, value in case.variables.items()}  # fmt: skip
    before = contents(folder) | contents(shared)
    start = time.monotonic()
    ended = run_fresh(argv, folder, variables) if case.is_fresh else run_forked(argv, folder, variables)
    seconds = time.monotonic() - start
    after = contents(folder) | contents(shared)
    err = (folder / "out" / "err").read_text(errors="replace")
    changed = [str(path) for path in before if after.get(path) != before[path]] if case.code else []
    written = (place.output, folder / "out", folder / "__pycache__")
    stray = [str(path) for path in after.keys() - before if not any(path.is_relative_to(one) for one in written)]
    return Outcome(ended, err, seconds, tuple(sorted(changed + stray)))


def run_forked(argv: list[str], folder: Path, variables: Mapping[str, str]) -> int | None:
    process = command.start(argv, folder / "out", variables)
    process.join(DEADLINE_S)
    code = process.exitcode
    process.kill()
    process.join()
    return code


def run_fresh(argv: list[str], folder: Path, variables: Mapping[str, str]) -> int | None:
    (folder / "out").mkdir()
    root = str(Path(__file__).parents[1])
    path = f"{root}:{variables['PYTHONPATH']}" if "PYTHONPATH" in variables else root
    with open(folder / "out" / "out", "w") as out, open(folder / "out" / "err", "w") as err:
        process = subprocess.Popen(
            [sys.executable, "-m", "fsdptrain", *argv],
            env={**os.environ, **variables, "PYTHONPATH": path},
            stdout=out,
            stderr=err,
            start_new_session=True,
        )
    try:
        return process.wait(DEADLINE_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return None


def contents(folder: Path) -> dict[Path, str]:
    """Return the digest of each file, or the target of each link."""
    found: dict[Path, str] = {}
    for path in folder.rglob("*"):
        if path.is_symlink():
            found[path] = os.readlink(path)
        elif path.is_file():
            found[path] = hashlib.sha256(path.read_bytes()).hexdigest()
    return found


def broken_law(case: Case, outcome: Outcome, lines: list[str]) -> str | None:
    """Return what does not hold, in one line. lines: of standard error that a good run does not have."""
    missing = [text for text in case.texts if text not in outcome.err]
    if outcome.code is None:
        return f"still running after {DEADLINE_S:.0f} s"
    if "Traceback" in outcome.err:
        return f"traceback: {lines[-1][:SHOWN]}"
    if outcome.code != case.code:
        return f"exit code {outcome.code}, not {case.code}"
    if len(lines) > MOST_LINES:
        return f"{len(lines)} lines on standard error"
    if missing:
        return f"does not name {missing[0]}"
    if outcome.lost:
        return f"changed {outcome.lost[0]}"
    return None


def all_cases() -> list[Case]:
    groups = [control_cases, recipe_cases, flag_cases, data_cases, checkpoint_cases, reward_cases, output_cases]
    groups += [environment_cases, resume_cases, endpoint_cases, command_cases]
    return [case for group in groups for case in group()]


def main(chosen: list[str]) -> int:
    cases = [case for case in all_cases() if not chosen or {case.group, f"{case.group}/{case.name}"} & {*chosen}]
    report = Report("bad_inputs" if not chosen else "bad_inputs_chosen", (__doc__ or "").split("\n\n")[1])
    with tempfile.TemporaryDirectory(prefix="bad-inputs-") as name, ThreadPoolExecutor(AT_ONCE) as threads:
        root = Path(name)
        os.environ.update(HF_HOME=str(root / "hub"), HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1", OMP_NUM_THREADS="1")
        shared = root / "shared"
        save_tiny_checkpoint(shared / "model")
        argv = ["--hf-checkpoint", str(shared / "model"), "--output-dir", str(shared / "run"), *UNEVALUATED]
        good = command.run([*argv, "--save-interval", "1"], root / "out")
        assert good.code == 0, good.err
        work = [threads.submit(attempt, case, root / f"{i:03}", shared) for i, case in enumerate(cases)]
        for i, (case, future) in enumerate(zip(cases, work, strict=True)):
            outcome = future.result()
            shutil.rmtree(root / f"{i:03}", ignore_errors=True)
            lines = [line for line in outcome.err.splitlines() if line not in good.err]
            shown = [line.replace(name, "<tmp>") for line in lines]
            report.add(
                case.group,
                (broken_law(case, outcome, lines) or "").replace(name, "<tmp>") or None,
                case=case.name.encode("unicode_escape").decode(),
                code=outcome.code,
                lines=len(shown),
                message=(shown or [""])[-1][:SHOWN],
                **({"accepted": f"{case.code}: {case.why}"} if case.why else {}),
            )
    return report.finish()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
