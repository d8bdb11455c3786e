"""The other commands: inspect, plan, report and export."""

from collections.abc import Callable
from pathlib import Path

from campaigns.inputs.case import Case, Place, Prepare, remove, rewrite, shorten
from campaigns.inputs.checkpoint import config, header
from campaigns.inputs.resume import STEP, flip, gone, of, of_run


def words(*values: str) -> Prepare:
    return lambda place: [
        value.format(model=place.checkpoint, run=place.finished, folder=place.folder) for value in values
    ]


def of_model(*values: str) -> Prepare:
    return words(*values, "--hf-checkpoint", "{model}")


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


STAGE = '{"step": 1, "stage": "train", "rollout": "a", "begin": 1, "end": 2}\n'
LINE = '{"step": 1, "reward/mean": %s}\n'
COMMANDS: list[tuple[str, Prepare, tuple[str, ...]]] = [
    ("unknown command", words("trian"), ("trian",)),
    ("a file as command", words("/etc/hostname"), ("/etc/hostname",)),
    ("no model", words("--dry-run"), ("--hf-checkpoint",)),
    ("inspect: nothing", words("inspect"), ("--hf-checkpoint",)),
    ("inspect: a word", words("inspect", "{model}"), ("--hf-checkpoint",)),
    ("inspect: missing", words("inspect", "--hf-checkpoint", "/nowhere"), ("/nowhere",)),
    ("inspect: --num-gpus 0", of_model("inspect", "--num-gpus", "0"), ("--num-gpus",)),
    ("inspect: --num-gpus -1", of_model("inspect", "--num-gpus", "-1"), ("--num-gpus",)),
    ("inspect: export's flag", words("inspect", "--checkpoint", "x"), ("--checkpoint",)),
    *(
        (f"{name}: {case}", inspect_of(change, name), texts)
        for name in ("inspect", "plan")
        for case, change, texts in [
            ("config is a list", rewrite("config.json", "[1]"), ("config.json",)),
            ("config is no JSON", rewrite("config.json", "{]"), ("config.json",)),
            ("config is deep", rewrite("config.json", '{"a":' + "[" * 9000), ("config.json",)),
            ("unknown model_type", config(model_type="nothing"), ("--hf-checkpoint", "nothing")),
            ("a million layers", config(num_hidden_layers=10**6), ("--hf-checkpoint",)),
            ("negative size", config(hidden_size=-64), ("--hf-checkpoint",)),
        ]
    ),
    (
        "inspect --against: no shards",
        inspect_of(remove("*.safetensors"), "inspect", "--against-checkpoint"),
        ("model-00001",),
    ),
    (
        "inspect --against: shard short",
        inspect_of(rewrite("*.safetensors", shorten), "inspect", "--against-checkpoint"),
        ("model-00001",),
    ),
    (
        "inspect --against: shard is deep",
        inspect_of(header(lambda e: [[[]]]), "inspect", "--against-checkpoint"),
        ("model-00001",),
    ),
    ("plan: nothing", words("plan"), ("--hf-checkpoint",)),
    ("plan: --num-gpus text", of_model("plan", "--num-gpus", "x"), ("--num-gpus",)),
    ("plan: --gpu-memory-gib nan", of_model("plan", "--gpu-memory-gib", "nan"), ("--gpu-memory-gib",)),
    ("plan: --gpu-memory-gib 0", of_model("plan", "--gpu-memory-gib", "0"), ("--gpu-memory-gib",)),
    ("report: nothing", words("report"), ("report",)),
    ("report: missing", words("report", "/nowhere"), ("/nowhere",)),
    ("report: a file", words("report", "/etc/hostname"), ("/etc/hostname",)),
    ("report: an empty folder", words("report", "{folder}"), ("metrics.jsonl",)),
    ("report: two folders", words("report", "{folder}", "again"), ("again",)),
    ("report: --rollouts 3", words("report", "{run}", "--rollouts", "3"), ("--rollouts",)),
    ("report: --rollouts 5:3", words("report", "{run}", "--rollouts", "5:3"), ("--rollouts",)),
    (
        "report: --rollouts 90:99",
        lambda p: ["report", str(p.run().parent.parent), "--rollouts", "90:99"],
        ("--rollouts 90:99",),
    ),
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
    ("report: timeline of texts", report_of("timeline.jsonl", STAGE), ("timeline.jsonl",)),
    ("export: nothing", words("export"), ("--checkpoint",)),
    ("export: no output", words("export", "--checkpoint", "{run}"), ("--output",)),
    (
        "export: missing",
        words("export", "--checkpoint", "/nowhere", "--output", "{folder}/o"),
        ("--checkpoint /nowhere",),
    ),
    ("export: the run", words("export", "--checkpoint", "{run}", "--output", "{folder}/o"), ("--checkpoint",)),
    ("export: other flag", words("export", "--checkpoint", "x", "--output", "y", "--lr", "1"), ("--lr",)),
    ("export: no manifest", export_of(lambda p, n: (n / "manifest.json").unlink()), STEP),
    ("export: tensor flipped", export_of(of("shards/*.safetensors", flip)), STEP),
    ("export: empty checkpoint", export_of(gone), STEP),
    ("export: config.yaml broken", export_of(of_run("config.yaml", "lr: [")), ("config.yaml",)),
    (
        "export: config.yaml of a lora",
        export_of(of_run("config.yaml", "model: {hf_checkpoint: /nowhere}")),
        ("/nowhere",),
    ),
    ("export: over a file", export_of(lambda p, n: p.file("a", "x"), "--output", "{folder}/a"), ("--output", "file")),
    ("export: below a file", export_of(lambda p, n: p.file("a", "x"), "--output", "{folder}/a/b"), ("--output",)),
    (
        "export: over foreign files",
        export_of(lambda p, n: p.file("b/mine.txt", "x"), "--output", "{folder}/b"),
        ("mine.txt",),
    ),
    ("export: over the run", export_of(lambda p, n: None, "--output", "{folder}/run"), ("--output",)),
    ("export: over a folder above the model", export_of(lambda p, n: None, "--output", "{folder}/.."), ("--output",)),
]


def cases() -> list[Case]:
    return [Case("commands", name, prepare, texts) for name, prepare, texts in COMMANDS]
