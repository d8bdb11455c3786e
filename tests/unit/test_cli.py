"""The command: quick, quiet, and honest about every mistake."""

import json
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import NamedTuple

import pyarrow
import pyarrow.parquet
import pytest
import yaml

from fsdptrain import cli
from fsdptrain.cli import COMMANDS
from fsdptrain.config import Config, checks
from fsdptrain.config.flags import config_options
from fsdptrain.config.keys import all_keys
from fsdptrain.config.recipe import load_recipe
from fsdptrain.config.rules import Package
from fsdptrain.data.sources import load_rows
from fsdptrain.launch.inputs import check_inputs
from tests import configs
from tests.testing import save_tiny_checkpoint

ROOT = Path(__file__).parents[2]
MODEL = ["--hf-checkpoint", "Qwen/Qwen3-4B"]
LOCAL = ["--hf-checkpoint", str(configs.CONFIGS / "qwen3-4b")]
MEGATRON = ["--backend", "megatron", "--megatron-tensor-parallel"]
SET = ["--eval-prompt-data", "a=rows.jsonl", "--eval-set-options"]
RECIPES = sorted((ROOT / "fsdptrain" / "recipes").rglob("*.yaml"))


class Done(NamedTuple):
    code: int
    out: str
    err: str


@pytest.fixture
def fsdptrain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """Runs the command in this process, in a folder of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)

    def run(*argv: str) -> Done:
        capsys.readouterr()
        return Done(cli.run(argv), *capsys.readouterr())

    yield run
    for name in ("own", "broken"):
        sys.modules.pop(name, None)


def test_help_all_shows_every_flag(fsdptrain, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    done = fsdptrain("--help-all")
    assert (done.code, done.err) == (0, "")
    assert set(re.findall(r"--[a-z][a-z0-9-]+", done.out)).issuperset(o.flag for o in config_options().values())
    assert all(len(line) <= 80 for line in done.out.splitlines())
    assert "\x1b" not in done.out


def test_help_fits_one_screen_and_names_what_exists(fsdptrain):
    done = fsdptrain("--help")
    assert (done.code, done.err) == (0, "")
    lines = done.out.splitlines()
    assert 24 <= len(lines) <= 40
    assert all(len(line) <= 80 for line in lines)
    flags = {option.flag for option in config_options().values()} | {"--recipe", "--help", "--help-all", "--version"}
    assert set(re.findall(r"--[a-z][a-z0-9-]+", done.out)) <= flags
    assert all(any(line.startswith(f"  {name} ") for line in lines) for name in COMMANDS)
    assert "\x1b" not in done.out
    for argv in (["help"], ["-h"], ["--lr", "1", "--help"], ["train", "--help"]):
        assert fsdptrain(*argv) == done


def test_help_of_a_section_shows_its_options_and_a_word_searches(fsdptrain):
    lora = fsdptrain("--help", "lora").out
    of_lora = [key.flag for key in all_keys().values() if key.section == "lora"]
    assert re.findall(r"^(--\S+)", lora, re.MULTILINE) == of_lora
    kl = re.findall(r"^(--\S+)", fsdptrain("--help", "kl").out, re.MULTILINE)
    assert kl[0].count("kl")
    assert {"--kl-loss-coef", "--kl-loss-type"} <= {*kl}
    assert "--lora-rank" not in kl
    found = {"stop string": "rollout-stop", "max tokens": "max-tokens-per-gpu", "two gpus": "nproc-per-node"}
    found |= {"early stopping": "early-stop-evals", "best checkpoint": "keep-best", "offline": "hf-checkpoint"}
    for words, flag in found.items():
        done = fsdptrain("--help", words)
        assert f"--{flag} " in done.out
        assert fsdptrain("--help", *words.split()) == done
    unknown = fsdptrain("--help", "rolout")
    assert (unknown.code, unknown.out) == (2, "")
    assert unknown.err.endswith("did you mean 'rollout'?; --help-all prints all\n")


ANSWERED = [
    *(["--help"], ["--help-all"], ["--help", "kl"], [*MODEL, "--dry-run"], ["export", "--help"], ["report", "--help"]),
    *(["--no-such-flag"], ["--version"], ["recipes"], [*MODEL, "--prompt-data", "none.jsonl"]),
    [*MODEL, "--prompt-data", "tests/data/rows.csv", "--label-key", "lable"],
    *([*MODEL, "--reward", "maths"], [*MODEL, "--reward", "tests.e2e.scripts:none"]),
    *([*MODEL, "--output-dir", "README.md/x"], ["eval", "tests", "--prompt-data", "none.jsonl"], ["export", "tests"]),
]


def test_torch_is_not_imported_to_answer():
    program = (
        "import json, sys, fsdptrain; from fsdptrain.cli import run; fsdptrain.Config, fsdptrain.load_recipe\n"
        "for argv in json.loads(sys.argv[1]):\n"
        "    run(argv)\n"
        "    if heavy := {'torch', 'transformers', 'datasets'} & set(sys.modules): sys.exit(f'{argv}: {heavy}')"
    )
    argv = [sys.executable, "-c", program, json.dumps(ANSWERED)]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


def test_a_full_dry_run_prints_a_recipe_with_the_source_of_each_value(fsdptrain, tmp_path):
    (tmp_path / "own.yaml").write_text("hf_checkpoint: Qwen/Qwen3-4B\n")
    done = fsdptrain("--recipe", "own.yaml", "--fsdp-cpu-offload", "--lr", "2e-6", "--dry-run", "full")
    assert (done.code, done.err) == (0, "")
    assert yaml.safe_load(done.out)["optim"]["lr"] == 2e-6
    lines = [line.split() for line in done.out.splitlines()]
    assert len({line.index(" # ") for line in done.out.splitlines() if " # " in line}) == 1
    assert ["hf_checkpoint:", "Qwen/Qwen3-4B", "#", "recipe"] in lines
    assert ["cpu_offload:", "true", "#", "flag"] in lines
    assert ["reshard_after_forward:", "true", "#", "default"] in lines
    assert "\x1b" not in done.out
    (tmp_path / "r.yaml").write_text(done.out)
    assert load_recipe(tmp_path / "r.yaml") == Config(hf_checkpoint="Qwen/Qwen3-4B", fsdp_cpu_offload=True, lr=2e-6)


def test_a_dry_run_says_what_was_set_and_what_was_read(fsdptrain, tmp_path):
    save_tiny_checkpoint(tmp_path / "model")
    rows = [{"prompt": f"What is {n}+{n}?", "label": str(2 * n), "completion": str(2 * n)} for n in range(30)]
    rows[7]["prompt"] += 800 * "!"
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = ["--hf-checkpoint", "model", "--prompt-data", "rows.jsonl", "--max-tokens-per-gpu", "1024", "--dry-run"]
    length, split = ["--rollout-max-response-len", "300"], ["--nproc-per-node", "8", "--tensor-parallel-size"]
    done = fsdptrain(*flags, *length, "--no-bf16")
    assert (done.code, done.err) == (0, "")
    *options, data, prompt, longest, reward, memory, last = done.out.splitlines()
    assert [line.split() for line in options] == [
        *(["--hf-checkpoint", "model", "flag"], ["--no-bf16", "flag"], ["--prompt-data", "rows.jsonl", "flag"]),
        ["--kl-loss-coef", "0.001", "preset"],
        *(["--max-tokens-per-gpu", "1024", "flag"], ["--rollout-max-response-len", "300", "flag"]),
    ]
    assert data == "--prompt-data rows.jsonl: 27 rows to train on, 3 held out"
    assert prompt == "prompt of 15 tokens: '<|user|>What is 0+0?<|end|><|assistant|>'"
    assert longest == "the longest of 29: 17 tokens, 1 longer than 724 are skipped"
    assert re.fullmatch(r"planned memory of 91008 parameters: \S+ of \S+ GiB on the host", memory)
    assert (reward, last) == ("--reward auto: math", "ok")
    sft = fsdptrain(*flags, "--algorithm", "sft", "--no-bf16")
    assert "sample of 17 tokens: '<|user|>What is 0+0?<|end|><|assistant|>0<|end|>'\n" in sft.out
    for more, message in (
        ([*length, "--max-tokens-per-gpu", "4096"], "exceed the 1024 positions of the model"),
        ([*length, "--reward", "own:f"], "--reward own:f"),
        ([*length, *split, "8"], "must divide the 4 attention heads of Qwen3For"),
    ):
        (tmp_path / "own.py").write_text("def f(prompt, text): return {}['no']\n")
        done = fsdptrain(*flags, *more)
        assert (done.code, done.out, done.err.count("\n")) == (2, "", 1)
        assert message in done.err


def test_a_missing_package_is_named_with_the_command_that_installs_it(fsdptrain, monkeypatch):
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    texts = "".join(path.read_text() for path in (ROOT / "fsdptrain").rglob("*.py"))
    assert {package.extra for key in all_keys().values() for package in key.marks(Package)} <= extras.keys()
    assert {"agents", "vllm"} < {*re.findall(r"'\.\[(\w+)\]'", texts)} <= extras.keys()
    monkeypatch.setattr(checks, "find_spec", lambda name: None)
    done = fsdptrain(*MODEL, "--lora-rank", "8", "--log-to", "console", "wandb")
    assert (done.code, done.out) == (2, "")
    assert done.err.splitlines() == [
        "fsdptrain: --log-to console wandb needs the package wandb: in the clone, pip install '.[wandb]'",
        "fsdptrain: --lora-rank 8 needs the package peft: in the clone, pip install '.[lora]'",
    ]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--prompt-data", "none.jsonl"], "--prompt-data none.jsonl: file not found"),
        (["--eval-prompt-data", "none.jsonl"], "--eval-prompt-data none.jsonl: file not found"),
        (["--eval-prompt-data", "a=rows.jsonl", "b=none.jsonl"], "--eval-prompt-data none.jsonl: file not found"),
        ([*SET, "a.label_key=answer"], "--label-key 'answer' is not a column of --eval-prompt-data"),
        ([*SET, "a.reward=maths"], "--reward: unknown name 'maths'; did you mean 'math'?"),
        (["--prompt-data", "rows.txt"], "--prompt-data rows.txt: its name must end in .jsonl"),
        (["--prompt-data", "empty.jsonl"], "--prompt-data empty.jsonl has no rows"),
        (["--prompt-data", "rows.jsonl", "--label-key", "answer"], "--label-key 'answer' is not a column of "),
        (["--prompt-data", "rows.csv", "--input-key", "promt"], "did you mean 'prompt'?"),
        (["--prompt-data", "rows.parquet", "--label-key", "answer"], "--label-key 'answer' is not a column of "),
        (["--prompt-data", "rows.jsonl", "--algorithm", "sft", "--input-key", "x"], "'x' is not a column"),
        (["--prompt-data", "reasoning_gym:spell_backwards"], "reasoning_gym has no task 'spell_backwards'"),
        (["--reward", "maths"], "--reward: unknown name 'maths'; did you mean 'math'?"),
        (["--reward", "own:none"], "--reward own:none: module 'own' has no attribute 'none'"),
        (["--reward", "broken:f"], "--reward broken:f cannot be imported: ZeroDivisionError"),
        (["--reward", "own:one"], "--reward own:one has the signature (x), which does not match its calls"),
        (["--prompt-data", "rows.jsonl?foo=3", "--hf-checkpoint", "m"], "rows.jsonl: no option 'foo'"),
        (["--prompt-data", "second.jsonl", "--hf-checkpoint", "m"], "--prompt-data second.jsonl:2 is not JSON: "),
        (["--prompt-data", "gap.jsonl"], "--input-key prompt: row gap.jsonl:1, counted from 0, holds 'None'"),
        (["--environment", "nope", "--hf-checkpoint", "m"], "--environment: unknown name 'nope'"),
        (["--output-dir", "rows.txt/run"], "--output-dir rows.txt/run cannot be written: "),
        (["--hf-checkpoint", "./none"], "--hf-checkpoint ./none: there is no such local folder"),
        (["--hf-checkpoint", "m", "--resume", "bogus"], "--resume bogus is not there: it is auto, never, or a folder"),
        (["--hf-checkpoint", "empty"], "--hf-checkpoint empty has no config.json"),
        (["--hf-checkpoint", "m", "--nproc-per-node", "2", "--tensor-parallel-size", "4"], "must divide"),
        (["--hf-checkpoint", "m", *MEGATRON, "16"], "--megatron-tensor-parallel 16 must divide the 8 key-value heads"),
    ],
)
def test_a_dry_run_finds_what_would_end_the_run(fsdptrain, flags, message, tmp_path):
    (tmp_path / "rows.txt").write_text("x")
    (tmp_path / "empty.jsonl").write_text("")
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1+1", "label": "2"}\n')
    (tmp_path / "gap.jsonl").write_text('{"prompt": "1+1", "label": "2"}\n{"label": "2"}\n')
    (tmp_path / "rows.csv").write_text("prompt,label\n1+1,2\n")
    pyarrow.parquet.write_table(pyarrow.table({"prompt": ["1+1"], "label": ["2"]}), tmp_path / "rows.parquet")
    (tmp_path / "own.py").write_text("def f(prompt, text): return 1.0\ndef one(x): return 1.0\n")
    (tmp_path / "second.jsonl").write_text('{"prompt": "1+1", "label": "2"}\n{"prompt": \n')
    (tmp_path / "broken.py").write_text("1 / 0\n")
    (tmp_path / "empty").mkdir()
    shutil.copytree(configs.CONFIGS / "qwen3-4b", tmp_path / "m")
    done = fsdptrain(*MODEL, *flags, "--dry-run")
    assert (done.code, done.out) == (2, ""), done.err
    assert message in done.err
    assert done.err.count("\n") == 1


@pytest.mark.parametrize("first", [None, {"value": None}])
def test_a_key_may_be_null_in_the_first_row(first, tmp_path):
    """The checks before torch and those of the run agree on it."""
    path = tmp_path / "rows.parquet"
    rows = [{"prompt": "a", "answer": first}, {"prompt": "b", "answer": {"value": "2"}}]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    config = Config(hf_checkpoint="m", prompt_data=str(path), label_key="answer.value")
    check_inputs(config)
    assert load_rows(config.data, seed=0)[1].label == "2"


def test_a_dry_run_says_what_it_did_not_check(fsdptrain):
    done = fsdptrain(*MODEL, "--prompt-data", "openai/gsm8k?name=main", "--dry-run")
    assert (done.code, done.err) == (0, "")
    assert done.out.splitlines()[-3:] == [
        "not checked: --hf-checkpoint Qwen/Qwen3-4B, which is no local folder: on the Hub?",
        "not checked: --prompt-data openai/gsm8k?name=main, which is no local file: on the Hub?",
        "ok so far",
    ]


def test_the_version_names_what_results_depend_on(fsdptrain):
    done = fsdptrain("--version")
    assert re.match(r"fsdptrain \S+ \(torch \S+, transformers \S+, vllm .+, Python \S+\)\n$", done.out)


def test_recipes_are_listed_and_shown(fsdptrain):
    listed = fsdptrain("recipes")
    assert (listed.code, listed.err) == (0, "")
    assert [line.split()[0] for line in listed.out.splitlines()] == [path.stem for path in RECIPES]
    assert re.search(
        r"^spell_backward_demo +CPU +Train a model of 0.1 M parameters with .*\.$", listed.out, re.MULTILINE
    )
    shown = fsdptrain("recipes", "show", "spell_backward_demo")
    assert shown.out == (ROOT / "fsdptrain" / "recipes" / "spell_backward_demo.yaml").read_text()
    unknown = fsdptrain("recipes", "show", "spell_backwards_demo")
    assert unknown.code == 2
    assert "did you mean 'spell_backward_demo'?" in unknown.err


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        ([], "--hf-checkpoint is missing: the model to train, e.g. --hf-checkpoint Qwen/Qwen3-4B or a local folder"),
        ([*MODEL, "--global-batch-size", "100"], "--global-batch-size 100 must divide --rollout-batch-size 32 x "),
        (["export"], "--checkpoint is missing, e.g. fsdptrain export runs/Qwen3-4B-grpo, or one of its checkpoints"),
        (["export", "--chekpoint", "x"], "unknown flag --chekpoint; did you mean '--checkpoint'?"),
        (["--hf-checkpoint", "runs/x"], "--hf-checkpoint runs/x: there is no such local folder, and a name on the Hub"),
        (["eval", "runs/x/hf"], "--checkpoint runs/x/hf: there is no such local folder, and a name"),
        (["eval", *MODEL[1:], "--lr", "1e-5"], "--lr has no effect on fsdptrain eval: remove it"),
        (["watch", "runs"], "runs is not a run, it holds 2: pass one or more of runs/a, runs/b"),
        (["report", "runs"], "runs is not a run, it holds 2: pass one or more of runs/a, runs/b"),
        ([*MODEL, "--prompt-data", "x" * 300], f"{'x' * 300}: this name is too long for a file or folder: shorten it"),
        ([*MODEL, "--rollout-engine", "vlm"], "--rollout-engine: unknown name 'vlm'; did you mean 'vllm'? (use auto"),
        (["plan", *LOCAL, "--gpu-memory-gib", "0"], "--gpu-memory-gib must be above 0"),
        (["plan", *LOCAL, "--num-gpus", "6", "--fsdp-replicate-size", "4"], "--fsdp-replicate-size 4 must divide"),
        (["watch", "runs/other"], "runs/other holds no run: pass the --output-dir of a run"),
    ],
)
def test_a_mistake_is_one_line_on_stderr_and_exit_code_2(fsdptrain, argv, line, tmp_path):
    (tmp_path / "runs" / "other" / "x").mkdir(parents=True)
    for name in ("a", "b"):
        (tmp_path / "runs" / name).mkdir()
        (tmp_path / "runs" / name / "config.yaml").touch()
    done = fsdptrain(*argv)
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith(f"fsdptrain: {line}")
    assert done.err.count("\n") == 1


def test_the_process_ends_with_the_exit_code():
    done = subprocess.run([sys.executable, "-m", "fsdptrain", "--lr"], capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
