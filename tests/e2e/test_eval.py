"""`fsdptrain eval` scores models and checkpoints as a run does, without training."""

import shutil
from pathlib import Path

import pytest

from fsdptrain.config.eval_sets import eval_sets
from fsdptrain.config.flags import resolve
from fsdptrain.config.written import to_yaml
from fsdptrain.tools.evaluate import ALL, run_arguments
from tests.e2e import command
from tests.e2e.command import metrics_of, rows_of
from tests.e2e.conftest import Finished
from tests.testing import write_rows


def evaluation(folder: Path) -> dict[str, float]:
    [*_, last] = [row for row in metrics_of(folder) if "eval/heldout/accuracy" in row]
    return {name: value for name, value in last.items() if name.startswith("eval/")}


@pytest.fixture
def run(finished: Finished) -> Path:
    return finished.folder


def test_a_checkpoint_has_the_scores_that_its_run_saw_on_other_ranks(run: Path, tmp_path: Path) -> None:
    checkpoint = max((run / "checkpoints").glob("step_*"))
    argv = ["eval", "--checkpoint", str(checkpoint), "--output-dir", str(tmp_path / "eval")]
    result = command.run(argv, tmp_path, num_ranks=2)
    assert result.code == 0, result.err
    assert "reference model" not in result.err  # the run has one
    assert evaluation(tmp_path / "eval") == pytest.approx(evaluation(run))
    assert len(rows_of(tmp_path / "eval" / "samples.jsonl")) == 4 * 2
    assert "heldout/pass@2" in result.out
    assert not list((tmp_path / "eval").glob("checkpoints/*"))


def test_a_finished_run_is_scored_on_all_rows_of_other_data_with_other_options(run: Path, tmp_path: Path) -> None:
    data = write_rows(tmp_path / "rows.jsonl", ({"prompt": f"{i}?", "label": str(i)} for i in range(11)))
    argv = ["eval", str(run), "--prompt-data", str(data), "--n-samples-per-eval-prompt", "4"]
    argv += ["--system-prompt", "brief", "--rollout-max-response-len", "6", "--reward", "tests.e2e.rewards:variety"]
    argv += ["--no-bf16", "--log-to"]
    argv += ["--overlong-penalty", "0", "--pass-threshold", "0.4", "--output-dir", str(tmp_path / "eval")]
    result = command.run(argv, tmp_path)
    assert result.code == 0, result.err
    rows, found = rows_of(tmp_path / "eval" / "samples.jsonl"), evaluation(tmp_path / "eval")
    assert [row["label"] for row in rows] == [str(i) for i in range(11) for _ in range(4)]
    rewards = [row["reward"] for row in rows]
    assert found["eval/heldout/reward_mean"] == pytest.approx(sum(rewards) / 44)
    assert found["eval/heldout/accuracy"] == pytest.approx(sum(reward >= 0.4 for reward in rewards) / 44)
    solved = [any(reward >= 0.4 for reward in rewards[i : i + 4]) for i in range(0, 44, 4)]
    assert 0 < found["eval/heldout/pass@4"] == pytest.approx(sum(solved) / 11)


@pytest.mark.parametrize("data", ["rows.jsonl", "reasoning_gym:spell_backward"])
def test_what_a_run_says_of_its_own_data_does_not_hinder_other_data(data: str, run: Path, tmp_path: Path) -> None:
    two = ["--eval-prompt-data", "a=a.jsonl", "b=b.jsonl", "--eval-set-options", "b.samples=2", "a.temperature=0"]
    trained_on = [
        ["--prompt-data", "x.csv", "--input-key", "question"],
        ["--prompt-data", "reasoning_gym:spell_backward?max_word_len=6&size=500"],
        ["--prompt-data", "a/b?split=train[:9]", "--input-key", "question"],
        [*two, "--eval-metric", "eval/b/accuracy", "--stop-when", "eval/b/accuracy>0.9"],
    ]
    for number, flags in enumerate(trained_on):
        shutil.copytree(run / "checkpoints", tmp_path / str(number) / "checkpoints")
        config = resolve(["--hf-checkpoint", "m", *flags]).config
        (tmp_path / str(number) / "config.yaml").write_text(to_yaml(config))
        arguments, _ = run_arguments([str(tmp_path / str(number)), "--prompt-data", data])
        assert resolve(arguments).config.data.prompt_data == data
    [only] = eval_sets(resolve(run_arguments([str(tmp_path / "3"), two[0], two[2]])[0]).config).values()
    assert only.run.n_samples_per_eval_prompt == 2
    mixed = ["--eval-prompt-data", "a=reasoning_gym:spell_backward", "b=b.jsonl"]
    sets = eval_sets(resolve(run_arguments([str(run / "hf"), *mixed])[0]).config)
    assert [sets[name].data.eval_size for name in "ab"] == [None, ALL]  # None: 128


def test_each_evaluation_has_a_folder_of_its_own(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    expected = {"org/model": "model-eval", str(run): "run-step_00000002-eval", str(run / "hf"): "run-hf-eval"}
    for model, name in expected.items():
        folders = []
        for _ in range(3):
            folders.append(run_arguments([model])[1])
            folders[-1].mkdir(parents=True)
        assert [str(folder) for folder in folders] == [f"runs/{name}", f"runs/{name}-2", f"runs/{name}-3"]


def test_a_run_without_checkpoints_stands_for_its_exported_model(run: Path, tmp_path: Path) -> None:
    shutil.copytree(run, tmp_path / "copy", ignore=shutil.ignore_patterns("checkpoints"))
    arguments, output = run_arguments([str(tmp_path / "copy")])
    model = [str(tmp_path / "copy" / name) for name in ("config.yaml", "hf")]
    assert arguments[:6] == ["--recipe", model[0], "--hf-checkpoint", model[1], "--resume", "never"]
    assert output.name == "copy-eval"


def test_export_takes_a_run_and_writes_into_it(run: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(run, tmp_path / "copy")
    before = (folder / "hf" / "model.safetensors").read_bytes()
    shutil.rmtree(folder / "hf")
    result = command.run(["export", str(folder)], tmp_path)
    assert result.code == 0, result.err
    newest = max((folder / "checkpoints").glob("step_*"))
    assert result.out == f"the model of {newest} is written to {folder / 'hf'}\n"
    assert (folder / "hf" / "model.safetensors").read_bytes() == before
    older = command.run(["export", str(newest)], tmp_path)
    assert (older.code, older.err[:30]) == (2, "fsdptrain: --output is missing"), older.err
    over_run = command.run(["export", str(newest), "--output", str(folder)], tmp_path)
    assert over_run.code == 2
    assert over_run.err.splitlines()[-1].startswith(f"fsdptrain: --output {folder}: the model cannot be written")
    assert newest.is_dir()
    shutil.rmtree(folder / "checkpoints")
    none = command.run(["export", str(folder)], tmp_path)
    assert none.code == 2
    assert none.err.endswith(f"has no checkpoint in {folder / 'checkpoints'}; its exported model is {folder / 'hf'}\n")


def test_sets_have_the_numbers_of_runs_with_one_each_by_their_own_settings(checkpoint: Path, tmp_path: Path) -> None:
    rows = {name: [{"prompt": f"{name} {i}", "q": f"{name} {i}", "label": str(i)} for i in range(6)] for name in "abc"}
    rows["c"] += [*rows["a"][:3], *rows["b"][:3]]
    files = {name: write_rows(tmp_path / f"{name}.jsonl", own) for name, own in rows.items()}
    settings = {
        "a": ["a.temperature=0", "a.size=3", "a.samples=2"],
        "b": ["b.samples=2", "b.max_response_len=9", "b.greedy=true"],
    }
    settings["b"] += ["b.input_key=q", "b.reward=tests.e2e.rewards:variety"]
    common = ["--no-bf16", "--log-to", "--reward-workers", "0", "--reward", "exact", "--rollout-max-response-len", "4"]

    def evaluations(names: str, folder: str, *argv: str) -> dict[str, float]:
        """Run on these sets. Returns the metrics of the first evaluation, of the model before training."""
        sets = ["--eval-prompt-data", *(f"{name}={files[name]}" for name in names), "--prompt-data", str(files["c"])]
        sets += ["--eval-set-options", *(word for name in names for word in settings[name]), *common]
        result = command.run([*argv, *sets, "--output-dir", str(tmp_path / folder)], tmp_path / "out")
        assert result.code == 0, result.err
        return {name: x for name, x in metrics_of(tmp_path / folder)[0].items() if name.startswith("eval/")}

    a, b, both = (evaluations(names, names, "eval", str(checkpoint)) for names in ("a", "b", "ab"))
    assert both == a | b
    assert {name.split("/")[1] for name in both} == {"a", "b", "b_greedy"}
    samples = rows_of(tmp_path / "ab" / "samples.jsonl")
    assert [sample["set"] for sample in samples] == ["a"] * 6 + ["b"] * 12
    pairs = [one["response"] == other["response"] for one, other in zip(samples[::2], samples[1::2], strict=True)]
    assert all(pairs[:3]) > any(pairs[3:])
    lengths = {name: max(len(sample["tokens"]) for sample in samples if sample["set"] == name) for name in "ab"}
    assert lengths["a"] == 4 < lengths["b"] <= 9
    assert both["eval/a/reward_mean"] == 0 < both["eval/b/reward_mean"]  # exact, and one that gives some to each

    train = ["--hf-checkpoint", str(checkpoint), "--rollout-batch-size", "2", "--n-samples-per-prompt", "2"]
    train += ["--keep-best", "1", "--num-rollout"]
    assert evaluations("ab", "run", *train, "3") == both
    assert "best eval/a/accuracy: 0 at step 0" in (tmp_path / "out" / "err").read_text()
    trained = [row["prompt"] for row in rows_of(tmp_path / "run" / "samples.jsonl") if row["set"] == "train"]
    assert all("c " in prompt for prompt in trained)
    write_rows(files["b"], [*rows["b"][:5], {"prompt": "new", "q": "new", "label": "1"}])
    with pytest.raises(AssertionError, match="this has changed: held-out rows of b; restore it"):
        evaluations("ab", "run", *train, "4")
