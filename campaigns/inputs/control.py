"""The inputs of the other groups, unbroken."""

from campaigns.inputs.case import Case, Prepare, flags, train, with_file
from campaigns.inputs.commands import export_of, words
from campaigns.inputs.data import ROWS, USER, data, every, jsonl, sft
from campaigns.inputs.recipe import recipe
from campaigns.inputs.resume import resume
from campaigns.inputs.reward import returns


def cases() -> list[Case]:
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
        ("reward", with_file("good.py", returns("len(response) % 3"), "--reward", "good:f")),
        ("resume", resume(lambda p, n: None)),
        ("inspect", words("inspect", "--hf-checkpoint", "{model}", "--against-checkpoint")),
        ("plan", words("plan", "--hf-checkpoint", "{model}", "--gpu-memory-gib", "80")),
        ("report", lambda place: ["report", str(place.run().parent.parent)]),
        ("export", export_of(lambda p, n: None)),
        ("no arguments", lambda place: ["--help"]),
    ]
    variables = {"PYTHONPATH": "."}
    return [Case("control", name, prepare, (), 0, variables, why="nothing is broken") for name, prepare in rows]
