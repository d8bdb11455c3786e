"""A run from Python: objects in place of names, callbacks, the result, and an open run."""

import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from fsdptrain import Callback, Config, RunResult, Trainer, load_recipe
from fsdptrain.algo.losses import LOSSES
from fsdptrain.checkpoints import list_checkpoints, step_of
from fsdptrain.data.sources import load_rows
from fsdptrain.errors import ConfigError, FsdptrainError
from fsdptrain.fsdp.optimizers import adamw
from fsdptrain.fsdp.shards import local_shard
from fsdptrain.loggers import RunInfo
from fsdptrain.rollout.embedded.engine import build_hf_engine
from fsdptrain.types import Metrics, Sample, Turn
from tests.testing import spawn, tiny_run

ROWS = [{"prompt": f"say {i}", "label": str(i)} for i in range(16)]


def config(checkpoint: Path | str, folder: Path, **values: Any) -> Config:
    return tiny_run(checkpoint, folder, **{"num_rollout": 3, **values})


def vowels(prompt: Any, response: str) -> float:
    return sum(letter in "aeiou" for letter in response) + len(response) / 10


def consonants(prompt: Any, response: str) -> float:
    return -vowels(prompt, response)


class Speaker(Callback):
    """Generates and evaluates before the optimizer steps, and notes whether the engine has no weights then."""

    def __init__(self) -> None:
        self.engine: Any = None
        self.texts: list[list[list[str]]] = []
        self.asleep: list[bool] = []

    def make_engine(self, config: Config, *, checkpoint: Path, device: torch.device) -> Any:
        self.engine = build_hf_engine(config, checkpoint=checkpoint, device=device)
        return self.engine

    def on_rollout(self, trainer: Trainer, samples: Sequence[Sample]) -> None:
        self.texts.append(trainer.generate("tell 1"))
        self.asleep.append(all(p.is_meta for p in self.engine.model.parameters()))
        trainer.evaluate()
        self.asleep.append(all(p.is_meta for p in self.engine.model.parameters()))


@dataclass
class Recorder(Callback):
    stop_after: int | None = None
    calls: list[tuple] = field(default_factory=list)

    def on_rollout(self, trainer: Trainer, samples: Sequence[Sample]) -> None:
        self.calls.append(("rollout", len(samples), {type(sample.advantage) for sample in samples}))

    def on_step(self, trainer: Trainer, metrics: Metrics) -> None:
        self.calls.append(("step", trainer.step, metrics["progress/samples"]))
        if trainer.step == self.stop_after:
            trainer.stop("enough")

    def on_eval(self, trainer: Trainer, metrics: Metrics) -> None:
        self.calls.append(("eval", trainer.step, metrics["eval/heldout/reward_mean"]))

    def on_save(self, trainer: Trainer, folder: Path) -> None:
        self.calls.append(("save", trainer.step, folder.name))


class ConfigLogger:
    """Notes the running configuration, as tracking services get it."""

    configs: list[Config] = []  # noqa: RUF012 - the loop creates the logger

    def __init__(self, info: RunInfo) -> None:
        assert info.config is not None
        self.configs.append(info.config)

    def log(self, values: Metrics, step: int) -> None: ...

    def log_samples(self, rows: Sequence[Any], step: int) -> None: ...

    def close(self) -> None: ...


def test_config_yaml_holds_the_running_configuration_with_which_the_same_command_resumes(checkpoint, tmp_path, caplog):
    options = config(checkpoint, tmp_path, log_to=[f"{__name__}:ConfigLogger"], num_rollout=1)
    trainer = Trainer(options, reward=vowels, dataset=ROWS)
    trainer.fit()
    [running] = ConfigLogger.configs
    assert trainer.config == running
    assert (options.rollout.engine, running.rollout.engine) == ("auto", "hf")
    assert load_recipe(tmp_path / "config.yaml") == running
    assert running.reward.reward == [f"{__name__}:vowels"]  # what `fsdptrain eval` scores with, and a rerun logs
    with pytest.raises(ConfigError, match=r"^--prompt-data python:dataset: the run got these rows as a Python object"):
        load_rows(running.data, seed=0)
    assert (tmp_path / "config.yaml").stat().st_mode & 0o777 == 0o600
    caplog.clear()
    assert Trainer(options, reward=vowels, dataset=ROWS).fit().step == 1
    assert "in place of" not in caplog.text


def test_callbacks_see_every_rollout_step_evaluation_and_checkpoint_and_may_end_the_run(checkpoint, tmp_path):
    options = {"save_interval": 2, "eval_interval": 3, "eval_size": 2, "num_rollout": 9, "export": True}
    recorder = Recorder(stop_after=4)
    result = Trainer(config(checkpoint, tmp_path, **options), reward=vowels, dataset=ROWS, callbacks=[recorder]).fit()
    names = [name for name, *_ in recorder.calls]
    step = ["rollout", "step"]
    assert names == ["eval", *step, *step, "save", *step, "eval", *step, "eval", "save"]
    assert [call[1] for call in recorder.calls if call[0] == "save"] == [2, 4]
    assert (result.step, result.stopped, result.model) == (4, "enough", tmp_path / "hf")
    assert result.evaluation["eval/heldout/reward_mean"] == recorder.calls[-2][2]
    AutoModelForCausalLM.from_pretrained(result.model)
    resumed = Trainer(config(checkpoint, tmp_path, **options | {"num_rollout": 5}), reward=vowels, dataset=ROWS).fit()
    assert (resumed.step, resumed.stopped) == (5, "")


def test_a_callback_that_generates_or_evaluates_before_the_steps_leaves_the_engine_asleep(checkpoint, tmp_path):
    """And the run that it is in as it was."""
    speaker, options = Speaker(), {"eval_interval": 2, "eval_size": 2, "num_rollout": 2}
    run = config(checkpoint, tmp_path / "a", **options)
    found = Trainer(run, reward=vowels, dataset=ROWS, engine=speaker.make_engine, callbacks=[speaker]).fit()
    alone = Trainer(config(checkpoint, tmp_path / "b", **options), reward=vowels, dataset=ROWS).fit()
    assert len(speaker.texts) == 2
    assert speaker.asleep == [True] * 4
    numbers = [name for name in alone if name.startswith(("loss/", "optim/", "reward/"))]
    assert {name: found[name] for name in numbers} == {name: alone[name] for name in numbers}


def test_the_result_has_the_history_the_last_evaluation_and_the_model(checkpoint, tmp_path):
    rows = [{"prompt": f"tell {i}", "label": str(i)} for i in range(4)]
    run = config(checkpoint, tmp_path, export=True, eval_interval=2)
    result = Trainer(run, reward=vowels, dataset=ROWS, eval_dataset=rows).fit()
    assert list(result.history.index) == [0, 1, 2, 3]
    assert result.history["reward/mean"].notna().tolist() == [False, True, True, True]
    assert result.history["eval/heldout/reward_mean"].notna().tolist() == [True, False, True, True]
    assert result.evaluation["eval/heldout/reward_mean"] == result.history["eval/heldout/reward_mean"][3]
    assert result["progress/samples"] == result.metrics["progress/samples"] == 12
    assert result.model == tmp_path / "hf"
    AutoModelForCausalLM.from_pretrained(result.model)
    again = Trainer(run, reward=vowels, dataset=ROWS, eval_dataset=rows).fit()
    assert (again.model, again.evaluation, dict(again)) == (result.model, result.evaluation, dict(result))
    assert again.history.equals(result.history)
    assert "RunResult(step=3" in repr(result)


def test_an_open_run_generates_and_evaluates_with_the_weights_before_and_after_training(checkpoint, tmp_path):
    run = config(checkpoint, tmp_path, lr=1e-2, eval_size=2, eval_interval=1000)
    with Trainer(run, reward=consonants, dataset=ROWS) as trainer:
        greedy = {"max_tokens": 6, "temperature": 0.0}
        before = trainer.generate("hello", **greedy)
        assert trainer.generate(["hello", [{"role": "user", "content": "hello"}]], **greedy) == [*before, *before]
        assert [len(texts) for texts in trainer.generate(["a", "b"], num_samples=3)] == [3, 3]
        result = trainer.fit()
        assert trainer.step == 3
        assert trainer.generate("hello", **greedy) != before
        assert trainer.evaluate() == result.evaluation
        assert trainer.tokenizer.chat_template
        weights = {name: local_shard(weight).detach().clone() for name, weight in trainer.model.named_parameters()}
    closed = Trainer(run, reward=consonants, dataset=ROWS)  # opens with the checkpoint that the run has left
    again = {name: local_shard(weight) for name, weight in closed.model.named_parameters()}
    assert weights.keys() == again.keys()
    assert all(torch.equal(weights[name], again[name]) for name in weights)
    closed.close()


def failing_once(batch, logprobs, config):
    if os.environ["RANK"] == "1":
        raise ValueError("only here")
    return LOSSES["grpo"](batch, logprobs, config)


def failed(checkpoint: Path, folder: Path) -> str:
    dist.destroy_process_group()
    with pytest.raises((FsdptrainError, ValueError)) as caught:
        Trainer(config(checkpoint, folder), reward=vowels, dataset=ROWS, loss=failing_once).fit()
    return str(caught.value)


@pytest.mark.slow
def test_an_error_of_one_rank_is_one_line_on_the_others(checkpoint, tmp_path):
    [first, second] = spawn(2, failed, checkpoint, tmp_path)
    assert first == "another rank has ended, hangs or is cut off (--dist-timeout)"
    assert "only here" in second


def test_a_loss_that_returns_something_else_is_an_error_that_names_it(checkpoint, tmp_path):
    with pytest.raises(ConfigError, match=r"^--loss returned Tensor, not LossOutput: return policy_loss"):
        Trainer(config(checkpoint, tmp_path), dataset=ROWS, loss=lambda *_: torch.zeros(())).fit()


def grpo_again(batch, logprobs, config):
    return LOSSES["grpo"](batch, logprobs, config)


def centered(rewards, lengths):
    return [reward - sum(rewards) / len(rewards) for reward in rewards]


class Echo:
    def reset(self, prompt: Any, seed: int) -> list[str]:
        return []

    def step(self, state: list[str], response: str) -> Turn:
        state.append(response)
        return Turn(observation="go on", reward=float(len(response)), done=len(state) == 2)


def test_objects_stand_in_for_names(checkpoint, tmp_path):
    """A run with objects is bitwise the run with the names of the same things."""
    used = set()

    def noted(function):
        def called(*args, **kwargs):
            used.add(function)
            return function(*args, **kwargs)

        called.__qualname__ += f".{function.__name__}"  # objects are told apart by it
        return called

    more = {"lr": 1e-3, "eval_interval": 0}
    functions = {"loss": grpo_again, "advantage": centered, "engine": build_hf_engine, "optimizer": adamw}
    noting: dict[str, Any] = {name: noted(function) for name, function in functions.items()}
    objects = config(checkpoint, tmp_path / "objects", **more)
    found = Trainer(objects, dataset=ROWS, environment=Echo(), **noting).fit()
    assert used == set(functions.values())
    named = config(
        checkpoint, tmp_path / "names", environment="tests.e2e.test_python_api:Echo",
        loss="tests.e2e.test_python_api:grpo_again", advantage_estimator="tests.e2e.test_python_api:centered",
        rollout_engine="hf", **more,
    )  # fmt: skip
    expected = Trainer(named, dataset=ROWS).fit()
    numbers = [name for name in expected if not name.startswith(("perf/", "memory/"))]
    assert {name: found[name] for name in numbers} == {name: expected[name] for name in numbers}
    written = (tmp_path / "objects" / "config.yaml").read_text()
    assert f"{__name__}:test_objects_stand_in_for_names.<locals>.noted.<locals>.called.grpo_again" in written


@pytest.mark.parametrize(
    ("values", "arguments", "line"),
    [
        ({"loss": "gspo"}, {"loss": LOSSES["grpo"]}, r"--loss gspo and Trainer\(loss=...\) are both given"),
        ({"rollout_engine": "hf"}, {"engine": build_hf_engine}, r"--rollout-engine hf and Trainer\(engine=...\)"),
        ({"eval_prompt_data": "x.jsonl"}, {"eval_dataset": ROWS}, r"--eval-prompt-data x.jsonl and Trainer"),
        ({"eval_interval": 0}, {"eval_dataset": ROWS}, r"Trainer\(eval_dataset=...\) has no effect"),
    ],
)
def test_an_argument_that_contradicts_the_configuration_is_refused(checkpoint, tmp_path, values, arguments, line):
    with pytest.raises(ConfigError, match=line):
        Trainer(config(checkpoint, tmp_path, **values), dataset=ROWS, **arguments)


@pytest.mark.parametrize(
    ("arguments", "lines"),
    [
        ({"dataset": "rows.jsonl"}, ["Trainer(dataset='rows.jsonl') takes rows, not a name: give it to "]),
        (
            {"reward_funcs": len, "train_dataset": ROWS, "peft_config": None, "lr": 1e-5, "args": None},
            [
                "Trainer(reward_funcs=...) is unknown: it is reward here",
                "Trainer(train_dataset=...) is unknown: it is dataset here",
                "Trainer(peft_config=...) is unknown: it is --lora-rank here (with --lora-alpha and --lora-targets)",
                "Trainer(lr=...) is unknown: it is an option, Config takes it",
                "Trainer(args=...) is unknown: options are keywords of Config",
            ],
        ),
        ({"config": None, "model": "x"}, ["Trainer(model=...) is unknown: it is --hf-checkpoint", "Trainer takes"]),
        ({"config": "Qwen/Qwen3-4B"}, ["Trainer takes a Config first, got 'Qwen/Qwen3-4B': Trainer(Config(hf_che"]),
    ],
)
def test_an_argument_of_another_trainer_gets_a_hint(arguments, lines, tmp_path):
    with pytest.raises(ConfigError) as caught:
        Trainer(**{"config": config("x", tmp_path), **arguments})
    assert len(caught.value.lines) == len(lines)
    for line, begin in zip(caught.value.lines, lines, strict=True):
        assert line.startswith(begin)


def fit(checkpoint: Path, run: Path, *callbacks: Callback, **values: Any) -> tuple[RunResult, list[int]]:
    """Also return the steps of the checkpoints that remain."""
    values = {"eval_size": 2, "eval_interval": 1, "save_interval": 0, "keep_last": 1, **values}
    result = Trainer(config(checkpoint, run, **values), reward=vowels, dataset=ROWS, callbacks=callbacks).fit()
    return result, [step_of(path) for path in list_checkpoints(run)]


def test_the_best_checkpoints_stay_also_over_a_resume_and_a_step_back_forgets_later_ones(checkpoint, tmp_path):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    options = {"keep_best": 2, "eval_metric": "eval/heldout/reward_mean", "num_rollout": 5, "lr": 1e-2}
    result, steps = fit(checkpoint, whole, **options)
    values = result.history["eval/heldout/reward_mean"].tolist()
    order = sorted(range(6), key=lambda step: (-values[step], step))
    assert result.best == (order[0], values[order[0]])
    assert steps == sorted({5, *[step for step in order if step][:2]})
    fit(checkpoint, parts, Recorder(stop_after=2), **options)
    for run in (parts, whole):
        again, found = fit(checkpoint, run, **options)
        assert (again.best, found) == (result.best, steps)
    back, _ = fit(checkpoint, whole, **{**options, "resume": str(list_checkpoints(whole)[0]), "num_rollout": steps[0]})
    assert back.best == max(enumerate(values[: steps[0] + 1]), key=lambda pair: pair[1])


def test_patience_ends_a_run_and_each_resume_until_it_is_raised(checkpoint, tmp_path):
    for patience, end in ((2, 2), (2, 2), (3, 3), (0, 4)):
        result, steps = fit(checkpoint, tmp_path, early_stop_evals=patience, num_rollout=4, pass_threshold=99.0)
        assert (result.step, result.best, steps) == (end, (0, 0.0), [end]), "the model is never right"
        reason = f"--early-stop-evals {patience} (best eval/heldout/accuracy: 0 at step 0)"
        assert result.stopped == (reason if patience else "")


def stop(checkpoint: Path, folder: Path) -> tuple[Any, ...]:
    errors = []
    for values in ({"eval_metric": "eval/heldout/pass@2"}, {"stop_when": "reward/men>1"}):
        with pytest.raises(ConfigError) as caught:
            fit(checkpoint, folder / "other", **values)
        errors.append(str(caught.value))
    options = {"stop_when": "progress/samples>=8", "export": True, "export_every_save": True, "eval_interval": 9}
    result, steps = fit(checkpoint, folder / "run", **options)
    return result.stopped, steps, list(result.history["eval/heldout/accuracy"].dropna().index), errors


def test_ranks_stop_at_the_same_step_with_an_evaluation_a_checkpoint_and_its_export(checkpoint, tmp_path):
    first, second = spawn(2, stop, checkpoint, tmp_path)
    assert first == second
    assert first[:3] == ("--stop-when progress/samples>=8 (it is 8)", [2], [0, 2])
    of_evaluation, of_step = first[3]
    line = "--eval-metric: no metric eval/heldout/pass@2; did you mean 'eval/heldout/pass@1'?; evaluations have eval/"
    assert of_evaluation.startswith(line)
    assert of_step.startswith("--stop-when: no metric reward/men; did you mean 'reward/mean'?; steps have completion/")
    [saved], run = list_checkpoints(tmp_path / "run"), tmp_path / "run"
    exported, last = (AutoModelForCausalLM.from_pretrained(at).state_dict() for at in (saved / "hf", run / "hf"))
    assert all(torch.equal(exported[name], weight) for name, weight in last.items())
    shutil.rmtree(saved / "hf")  # no part of what a resume needs
    assert fit(checkpoint, run, eval_interval=9)[1] == [3]
