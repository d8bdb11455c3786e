"""Files of --prompt-data that are missing, broken or of another form."""

import json
from pathlib import Path
from typing import Any

from campaigns.inputs.case import Case, Place, Prepare, flags, link_to_itself, train

ROWS = [{"prompt": f"{i} + 1?", "label": str(i + 1)} for i in range(12)]
DATA = ("--reward", "exact", "tests.e2e.rewards:variety", "--prompt-data")
SFT = ["--algorithm", "sft", "--num-rollout", "3", "--rollout-batch-size", "4", "--max-tokens-per-gpu", "512"]
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
    ("prompt is empty", data(every(prompt=""), "--no-apply-chat-template"), ("--input-key prompt",)),
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
    ("huge row", data(every(prompt="a" * 100_000)), ("prompt",)),
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
    ("sft: label of strings", sft(label=["a"]), ("rows.jsonl", "['a']")),
    ("sft: message without role", sft(label=[{"content": "a"}]), ("rows.jsonl",)),
    ("sft: label ends with a question", sft(label=[USER]), ("rows.jsonl",)),
    ("sft: label too long", sft(label="a" * 9999), ("--max-tokens-per-gpu",)),
]


def cases() -> list[Case]:
    return [Case("data", name, prepare, texts) for name, prepare, texts in DATA_FILES]
