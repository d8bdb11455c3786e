"""The real command in a process of its own: quick, quiet, and honest about every mistake."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import datasets
import pyarrow
import pyarrow.parquet
import pytest
import yaml

from fsdptrain.cli import COMMANDS
from fsdptrain.config import Config, DataConfig, load_recipe
from fsdptrain.config.flags import config_options
from fsdptrain.config.keys import all_keys
from fsdptrain.data.tables import load_table_rows
from fsdptrain.launch.inputs import check_inputs
from tests import configs

ROOT = Path(__file__).parents[2]
MODEL = ["--hf-checkpoint", "Qwen/Qwen3-4B"]
MEGATRON = ["--backend", "megatron", "--megatron-tensor-parallel"]
RECIPES = sorted((ROOT / "recipes").rglob("*.yaml"))


def fsdptrain(*argv, cwd=ROOT, **environment):
    """Run `python -m fsdptrain`, from the root of the repository by default."""
    command = [sys.executable, "-m", "fsdptrain", *argv]
    variables = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    return subprocess.run(command, env=variables, cwd=cwd, capture_output=True, text=True, timeout=300, check=False)


def test_help_all_shows_every_flag():
    done = fsdptrain("--help-all")
    assert (done.returncode, done.stderr) == (0, "")
    assert set(re.findall(r"--[a-z][a-z0-9-]+", done.stdout)).issuperset(o.flag for o in config_options().values())
    assert all(len(line) <= 80 for line in fsdptrain("--help-all", COLUMNS="80").stdout.splitlines())
    assert "\x1b" not in done.stdout


def test_help_fits_one_screen_and_names_what_exists():
    done = fsdptrain("--help")
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert 24 <= len(lines) <= 40
    assert all(len(line) <= 80 for line in lines)
    flags = {option.flag for option in config_options().values()} | {"--recipe", "--help", "--help-all", "--version"}
    assert set(re.findall(r"--[a-z][a-z0-9-]+", done.stdout)) <= flags
    assert all(any(line.startswith(f"  {name} ") for line in lines) for name in COMMANDS)
    assert "\x1b" not in done.stdout


def test_help_of_a_section_shows_its_options_and_a_word_searches():
    lora = fsdptrain("--help", "lora").stdout
    assert re.findall(r"^(--\S+)", lora, re.MULTILINE) == [
        key.flag for key in all_keys().values() if key.section == "lora"
    ]
    kl = re.findall(r"^(--\S+)", fsdptrain("--help", "kl").stdout, re.MULTILINE)
    assert kl[0].count("kl")
    assert {"--kl-loss-coef", "--kl-loss-type"} <= {*kl}
    assert "--lora-rank" not in kl
    unknown = fsdptrain("--help", "rolout")
    assert (unknown.returncode, unknown.stdout) == (2, "")
    assert unknown.stderr.endswith("did you mean 'rollout'?; --help-all prints all\n")


@pytest.mark.parametrize(
    "argv",
    [
        ["--help"],
        ["--help-all"],
        ["--help", "kl"],
        [*MODEL, "--dry-run"],
        ["export", "--help"],
        ["report", "--help"],
        ["--no-such-flag"],
        ["--version"],
        ["recipes"],
        [*MODEL, "--prompt-data", "none.jsonl"],
        [*MODEL, "--prompt-data", "tests/data/rows.csv", "--label-key", "lable"],
        [*MODEL, "--reward", "maths"],
        [*MODEL, "--reward", "tests.e2e.scripts:none"],
        [*MODEL, "--output-dir", "README.md/x"],
        ["eval", "tests", "--prompt-data", "none.jsonl"],
        ["export", "tests"],
    ],
)
def test_torch_is_not_imported_to_answer(argv):
    program = (
        "import sys; from fsdptrain.cli import run; run(sys.argv[1:]); "
        "heavy = {'torch', 'transformers', 'datasets'} & set(sys.modules); sys.exit(str(heavy) if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", program, *argv], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("argv", [["help"], ["-h"], ["--lr", "1", "--help"], ["train", "--help"]])
def test_help_has_many_names(argv):
    assert fsdptrain(*argv).stdout == fsdptrain("--help").stdout


def test_importing_the_package_does_not_import_torch():
    program = "import sys, fsdptrain; fsdptrain.Config, fsdptrain.load_recipe; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], cwd=ROOT, timeout=300).returncode == 0


def test_a_dry_run_prints_a_recipe_with_the_source_of_each_value(tmp_path):
    done = fsdptrain(*MODEL, "--fsdp-cpu-offload", "--lr", "2e-6", "--dry-run")
    assert (done.returncode, done.stderr) == (0, "")
    assert yaml.safe_load(done.stdout)["optim"]["lr"] == 2e-6
    lines = [line.split() for line in done.stdout.splitlines()]
    assert ["cpu_offload:", "true", "#", "flag"] in lines
    assert ["reshard_after_forward:", "true", "#", "default"] in lines
    assert "\x1b" not in done.stdout
    (tmp_path / "r.yaml").write_text(done.stdout)
    assert load_recipe(tmp_path / "r.yaml") == Config(hf_checkpoint="Qwen/Qwen3-4B", fsdp_cpu_offload=True, lr=2e-6)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--prompt-data", "none.jsonl"], "--prompt-data none.jsonl: file not found"),
        (["--eval-prompt-data", "none.jsonl"], "--eval-prompt-data none.jsonl: file not found"),
        (["--prompt-data", "rows.txt"], "--prompt-data rows.txt: its name must end in .jsonl"),
        (["--prompt-data", "empty.jsonl"], "--prompt-data empty.jsonl has no rows"),
        (["--prompt-data", "rows.jsonl", "--label-key", "answer"], "--label-key 'answer' is not a column of "),
        (["--prompt-data", "rows.csv", "--input-key", "promt"], "did you mean 'prompt'?"),
        (["--prompt-data", "rows.parquet", "--label-key", "answer"], "--label-key 'answer' is not a column of "),
        (["--prompt-data", "rows.jsonl", "--algorithm", "sft", "--input-key", "x"], "'x' is not a column"),
        (["--prompt-data", "reasoning_gym:spell_backwards"], "reasoning_gym has no task 'spell_backwards'"),
        (["--reward", "maths"], "--reward does not know 'maths'; did you mean 'math'?"),
        (["--reward", "own:none"], "--reward own:none: module 'own' has no attribute 'none'"),
        (["--reward", "broken:f"], "--reward broken:f cannot be imported: ZeroDivisionError"),
        (["--reward", "own:one"], "--reward own:one takes (x), which does not fit its calls"),
        (["--prompt-data", "rows.jsonl?foo=3", "--hf-checkpoint", "m"], "rows.jsonl: no option 'foo'"),
        (["--prompt-data", "second.jsonl", "--hf-checkpoint", "m"], "--prompt-data second.jsonl cannot be read: "),
        (["--environment", "nope", "--hf-checkpoint", "m"], "--environment does not know 'nope'"),
        (["--output-dir", "rows.txt/run"], "--output-dir rows.txt/run cannot be written: "),
        (["--hf-checkpoint", "./none"], "--hf-checkpoint ./none is not a local folder"),
        (["--hf-checkpoint", "empty"], "--hf-checkpoint empty has no config.json"),
        (["--hf-checkpoint", "m", "--tensor-parallel-size", "16"], "--tensor-parallel-size 16"),
        (["--hf-checkpoint", "m", "--nproc-per-node", "2", "--tensor-parallel-size", "4"], "must divide"),
        (["--hf-checkpoint", "m", *MEGATRON, "16"], "--megatron-tensor-parallel 16 must divide the 8 key-value heads"),
    ],
)
def test_a_dry_run_finds_what_would_end_the_run(flags, message, tmp_path):
    (tmp_path / "rows.txt").write_text("x")
    (tmp_path / "empty.jsonl").write_text("")
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1+1", "label": "2"}\n')
    (tmp_path / "rows.csv").write_text("prompt,label\n1+1,2\n")
    pyarrow.parquet.write_table(pyarrow.table({"prompt": ["1+1"], "label": ["2"]}), tmp_path / "rows.parquet")
    (tmp_path / "own.py").write_text("def f(prompt, text): return 1.0\ndef one(x): return 1.0\n")
    (tmp_path / "second.jsonl").write_text('{"prompt": "1+1", "label": "2"}\n{"prompt": \n')
    (tmp_path / "broken.py").write_text("1 / 0\n")
    (tmp_path / "empty").mkdir()
    shutil.copytree(configs.CONFIGS / "qwen3-4b", tmp_path / "m")
    done = fsdptrain(*MODEL, *flags, "--dry-run", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    assert message in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_dry_run_takes_a_slice_of_a_folder(tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "train.jsonl").write_text('{"prompt": "a", "label": "2"}\n')
    for data in (["folder", "--prompt-split", "train[:1]"], ["folder?split=train[:50%]"]):
        done = fsdptrain(*MODEL, "--prompt-data", *data, "--dry-run", cwd=tmp_path, HF_HUB_OFFLINE="1")
        assert (done.returncode, done.stderr) == (0, "")
        assert "# not checked: --prompt-data folder beyond its first row" in done.stdout.splitlines()


@pytest.mark.parametrize("first", [None, {"value": None}])
def test_a_key_may_be_null_in_the_first_row(first, tmp_path):
    """The checks before torch and those of the run agree on it."""
    path, data = tmp_path / "rows.parquet", DataConfig(label_key="answer.value")
    rows = [{"prompt": "a", "answer": first}, {"prompt": "b", "answer": {"value": "2"}}]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    check_inputs(Config(hf_checkpoint="m", prompt_data=str(path), label_key="answer.value"))
    assert load_table_rows(str(path), {}, data, flag="--prompt-data", image_key=None)[1].label == "2"


@pytest.mark.parametrize("made", ["file.arrow", "saved", "split", "files"])
def test_a_dry_run_checks_the_columns_of_folders_and_arrow_files(made, tmp_path):
    table, path = datasets.Dataset.from_dict({"prompt": ["a"], "label": ["2"]}), tmp_path / made
    if made == "saved":
        table.save_to_disk(path)
    elif made == "split":
        datasets.DatasetDict({"train": table}).save_to_disk(path)
    elif made == "files":
        path.mkdir()
        (path / "part.jsonl").write_text('{"prompt": "a", "label": "2"}\n')
    else:
        table.save_to_disk(tmp_path / "all")
        shutil.copy(tmp_path / "all" / "data-00000-of-00001.arrow", path)
    cache = {"HF_HOME": str(tmp_path / "hub"), "HF_HUB_OFFLINE": "1"}
    known, unknown = (
        fsdptrain(*MODEL, "--prompt-data", made, "--label-key", key, "--dry-run", cwd=tmp_path, **cache)
        for key in ("label", "answer")
    )
    assert (known.returncode, known.stderr) == (0, "")
    assert (unknown.returncode, unknown.stdout, unknown.stderr.count("\n")) == (2, "", 1)
    assert f"--label-key 'answer' is not a column of --prompt-data {made}" in unknown.stderr


def test_a_dry_run_says_what_it_did_not_check(tmp_path):
    done = fsdptrain(*MODEL, "--prompt-data", "openai/gsm8k?name=main=0.5", "a/b=0.5", "--dry-run", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert [line for line in done.stdout.splitlines() if line.startswith("# not checked: ")] == [
        "# not checked: --hf-checkpoint Qwen/Qwen3-4B, which is no local folder: on the Hub?",
        "# not checked: --prompt-data openai/gsm8k, which is no local file or folder: on the Hub?",
        "# not checked: --prompt-data a/b, which is no local file or folder: on the Hub?",
    ]


def test_the_version_names_what_results_depend_on():
    done = fsdptrain("--version")
    assert re.match(r"fsdptrain \S+ \(torch \S+, transformers \S+, vllm .+, Python \S+\)\n$", done.stdout)


def test_recipes_are_listed_and_shown(tmp_path):
    listed = fsdptrain("recipes", cwd=tmp_path)
    assert (listed.returncode, listed.stderr) == (0, "")
    assert [line.split()[0] for line in listed.stdout.splitlines()] == [path.stem for path in RECIPES]
    assert re.search(
        r"^spell_backward_demo +CPU +GRPO of a model of 0.1 M parameters .*\.$", listed.stdout, re.MULTILINE
    )
    shown = fsdptrain("recipes", "show", "spell_backward_demo", cwd=tmp_path)
    assert shown.stdout == (ROOT / "recipes" / "spell_backward_demo.yaml").read_text()
    unknown = fsdptrain("recipes", "show", "spell_backwards_demo", cwd=tmp_path)
    assert unknown.returncode == 2
    assert "did you mean 'spell_backward_demo'?" in unknown.stderr


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        ([], "--hf-checkpoint is missing: the model to train, e.g. --hf-checkpoint Qwen/Qwen3-4B or a local folder"),
        (["--hf-chekpoint", "x"], "unknown flag --hf-chekpoint; did you mean '--hf-checkpoint'?"),
        ([*MODEL, "--global-batch-size", "100"], "--global-batch-size 100 must divide --rollout-batch-size 32 x "),
        (["--recipe", "none.yaml"], "--recipe none.yaml cannot be read: No such file or directory"),
        (["export"], "--checkpoint is missing, e.g. fsdptrain export runs/Qwen3-4B-grpo, or one of its checkpoints"),
        (["export", "--chekpoint", "x"], "unknown flag --chekpoint; did you mean '--checkpoint'?"),
    ],
)
def test_a_mistake_is_one_line_on_stderr_and_exit_code_2(argv, line):
    done = fsdptrain(*argv)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"fsdptrain: {line}")
    assert done.stderr.count("\n") == 1
