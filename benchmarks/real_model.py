"""fsdptrain against TRL on a real model, SmolLM2-135M-Instruct of `make smollm2`: whole steps of real runs, in float32.

    python benchmarks/real_model.py --json benchmarks/results/real_model.json    # every case, on two quiet cores
    python benchmarks/real_model.py --cases middle learn --sides ours trl
    python benchmarks/real_model.py --quick                                      # checks agreement, not speed

Each side is a process that runs `fit()` or `train()`, and waits after each step for its next turn. A step is all that
happens until the next one: generation, rewards, training, weight sync and logs. Sides alternate. The first step is a
warm-up in which TRL gets the samples of ours: loss and gradient norm must agree. `peak_gib` is the largest
resident size of the process from its start, loading included.

    ours                    fsdptrain with the options of the recipe sums_smollm2_135m
    ours-all                the same, with samples of advantage 0 in the packs
    trl                     TRL's GRPOTrainer or SFTTrainer, 16 rows at a time, with gradient checkpointing, its default
    trl-no-checkpointing    the same without

The cases low and middle differ in the share of right answers: sums of two numbers of two digits, and sums of two
digits. For a high share, train first: `fsdptrain demo --model build/smollm2 --output-dir build/sums`, and then `--cases
middle --model build/sums/grpo/hf`. kl has a reference model and lora an adapter of rank 16, both on sums of two digits.
sft learns the answers of low. kl and sft pack 512 tokens, not 1024, to need less memory than TRL. In learn each side
learns sums of two digits; its curve has the reward of each step, the seconds so far, of all steps but not of
evaluations, and now and then the accuracy on held-out sums.

On both sides: the same rows in the same order, advantages divided by the standard deviation of the group + 1e-4 (TRL's
number; ours is 1e-6), AdamW with beta2 0.999 (TRL's; ours is 0.95), gradients clipped to a norm of 1, a constant
learning rate, temperature 1, the KL estimator k3, rewards computed in the process. TRL generates with the weights
that it trains; ours copies them to its engine, and verifies the first copy.
"""

import argparse
import multiprocessing
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from record import ROOT, TOLERANCES, header, require_agreement, rounded, spread, status, table, write

from fsdptrain.tools.demo.sums import last_number
from fsdptrain.types import Prompt, Sample

SIDES = ("ours", "ours-all", "trl", "trl-no-checkpointing")


@dataclass(frozen=True)
class Case:
    task: str = "digits"
    prompts: int = 16  # per step
    group: int = 8  # samples per prompt
    tokens: int = 32  # longest response
    pack: int = 1024  # tokens of ours per forward pass
    lr: float = 2e-6
    kl: float = 0.0
    lora: int = 0  # adapter rank
    sft: bool = False
    steps: int = 0  # 0: a warm-up and --rounds
    evaluate: int = 0  # steps between evaluations
    sides: tuple[str, ...] = ("ours", "trl", "trl-no-checkpointing")

    @property
    def samples(self) -> int:
        return self.prompts * self.group

    def rows(self, seed: int) -> tuple[list[dict[str, str]], list[dict[str, str]]]:
        """Return the rows to train on, whole steps of them (one in sft), and 20 held out."""
        span = range(10) if self.task == "digits" else range(10, 100)
        pairs = random.Random(seed).sample([(a, b) for a in span for b in span], 180 if len(span) > 10 else 100)
        asked = "What is {} + {}? Reply with only the number."
        found = [{"prompt": asked.format(a, b), "label": str(a + b)} for a, b in pairs]
        return found[20 : 20 + self.samples] if self.sft else found[20:], found[:20]


CASES = {
    "low": Case("two-digit", sides=SIDES),
    "middle": Case(sides=SIDES),
    "kl": Case(kl=0.04, pack=512),
    "lora": Case(lora=16),
    "sft": Case("two-digit", sft=True, pack=512),
    "learn": Case(prompts=8, tokens=16, lr=1e-5, steps=30, evaluate=10),
}


@dataclass
class Side:
    """A process: it waits for its turn, takes a step, and reports it."""

    name: str
    case: Case
    options: argparse.Namespace
    pipe: Connection
    folder: str = ""
    start: float = 0.0

    def wait(self) -> Any:
        received = self.pipe.recv()
        self.start = time.perf_counter()
        return received

    def report(self, number: int, step: dict[str, Any], generate: Callable[[list[str]], list[str]]) -> bool:
        """Send a step with its seconds, evaluate if it is due, and wait for the next turn. False: the end."""
        step["step_s"] = time.perf_counter() - self.start
        if self.case.evaluate and number % self.case.evaluate == 0:
            asked = [row for row in self.case.rows(self.options.seed)[1] for _ in range(self.case.group)]
            texts = generate([row["prompt"] for row in asked])
            step["accuracy"] = statistics.fmean(score(t, row["label"]) for t, row in zip(texts, asked, strict=True))
        self.pipe.send({**step, "peak_gib": status("VmHWM") / 2**30})
        return self.wait() is not None


def score(text: str, label: str) -> float:
    return last_number(Prompt("", [], "", label=label), text)


def work(name: str, case: Case, options: argparse.Namespace, pipe: Connection) -> None:
    os.dup2(2, 1)  # what libraries print
    with tempfile.TemporaryDirectory() as folder:
        run = run_ours if name.startswith("ours") else run_trl
        run(Side(name, case, options, pipe, folder))


def run_ours(side: Side) -> None:
    from fsdptrain import Callback, Config, Trainer
    from fsdptrain.algo import advantages
    from fsdptrain.algo.losses import LOSSES

    case, options, first = side.case, side.options, []
    advantages.STD_EPSILON = 1e-4

    class Reporting(Callback):
        def on_rollout(self, trainer: Trainer, samples: Sequence[Sample]) -> None:
            first[:] = [] if trainer.step else [(s.token_ids, s.loss_mask.index(True)) for s in samples]

        def on_step(self, trainer: Trainer, metrics: Any) -> None:
            phases = ("generate", "train", "logprobs", "sync")
            step = {f"{name}_s": metrics.get(f"perf/{name}_s", 0.0) for name in phases}
            step["train_s"] += step.pop("logprobs_s")  # of the reference
            step |= {"loss": metrics["loss/total"], "grad_norm": metrics["optim/grad_norm"], "samples": [*first]}
            step |= {"reward": metrics.get("reward/mean"), "skipped": metrics.get("perf/skipped_tokens")}
            if not side.report(trainer.step, step, lambda asked: [text for (text,) in trainer.generate(asked)]):
                trainer.stop()

    config: dict[str, Any] = {"algorithm": "sft", "rollout_batch_size": case.samples}
    if not case.sft:
        config = {"rollout_batch_size": case.prompts, "n_samples_per_prompt": case.group, "prefix_sharing": True}
        config |= {"rollout_max_response_len": case.tokens, "rollout_seed": options.seed, "reward_workers": 0}
        config |= {"kl_loss_coef": case.kl, "lora_rank": case.lora}
    config |= {"hf_checkpoint": str(options.model), "bf16": False, "seed": options.seed, "rollout_shuffle": False}
    config |= {"lr": case.lr, "adam_beta2": 0.999, "num_rollout": case.steps + 1, "output_dir": f"{side.folder}/run"}
    config |= {"max_tokens_per_gpu": case.pack, "eval_interval": 0, "keep_last": 0, "export": False, "log_to": []}
    given: dict[str, Any] = {} if case.sft else {"reward": last_number}
    if side.name == "ours-all":
        given["loss"] = LOSSES["grpo"]  # a loss of the user: no sample is skipped
    rows = case.rows(options.seed)[0]
    with Trainer(Config(**config), dataset=rows, callbacks=[Reporting()], **given) as trainer:
        fill_adapter(trainer.model)
        side.wait()
        trainer.fit()


def run_trl(side: Side) -> None:
    os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"  # silences the warning that rollout_func may change
    from datasets import Dataset
    from transformers import AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

    from tests.testing import no_checkpointing

    case, options, seconds, canned = side.case, side.options, {}, []

    def message(text: str) -> list[dict[str, str]]:
        return [{"role": "user", "content": text}]

    def reward(completions: list[Any], label: list[str], **_: Any) -> list[float | None]:
        return [score(found[0]["content"], wanted) for found, wanted in zip(completions, label, strict=True)]

    class Reporting(TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
            if "loss" in logs:  # not the summary at the end
                step = {name: logs.get(name) for name in ("loss", "grad_norm", "reward")}
                trainer.rollout_func = None  # generate from now on
                side.report(state.global_step, {**step, **seconds}, texts_of)

    def texts_of(asked: list[str]) -> list[str]:
        return [found[0]["content"] for found in trainer._generate(list(map(message, asked)))[3]]

    def rollout(prompts: list[Any], _: Any) -> dict[str, Any]:
        """Return the samples of ours, after a check that their prompts have the same tokens."""
        made = [ids[:start] for ids, start in canned]
        if (tokens := trainer._tokenize_prompts(prompts)[0]) != made:
            sys.exit(f"the prompts differ: {tokens[0]} and {made[0]}")
        return {"prompt_ids": made, "completion_ids": [ids[start:] for ids, start in canned], "logprobs": None}

    rows_at_once = min(16, case.samples)
    config: dict[str, Any] = {"output_dir": side.folder, "model_init_kwargs": {"dtype": "float32"}, "bf16": False}
    config |= {"per_device_train_batch_size": rows_at_once, "gradient_accumulation_steps": case.samples // rows_at_once}
    config |= {"learning_rate": case.lr, "lr_scheduler_type": "constant", "seed": options.seed}
    config |= {"max_steps": case.steps, "use_cpu": True, "logging_steps": 1, "save_strategy": "no"}
    config |= {"report_to": "none", "disable_tqdm": True}
    config |= no_checkpointing() if side.name == "trl-no-checkpointing" else {}
    given: dict[str, Any] = {"model": str(options.model), "callbacks": [Reporting()]}
    rows = case.rows(options.seed)[0]
    if case.sft:
        tokenizer = AutoTokenizer.from_pretrained(options.model)  # in messages TRL trains the newline after a turn too
        as_text = partial(tokenizer.apply_chat_template, add_generation_prompt=True, tokenize=False)
        rows = [{"prompt": as_text(message(r["prompt"])), "completion": r["label"] + tokenizer.eos_token} for r in rows]
        data = Dataset.from_list(rows)
        trainer: Any = SFTTrainer(args=SFTConfig(**config), train_dataset=data, **given)
    else:
        config |= {"num_generations": case.group, "max_completion_length": case.tokens, "shuffle_dataset": False}
        config |= {"beta": case.kl, "use_bias_correction_kl": False}
        if case.lora:
            from peft import LoraConfig

            given["peft_config"] = LoraConfig(r=case.lora, lora_alpha=32, target_modules="all-linear")
        given["train_dataset"] = Dataset.from_list([{**row, "prompt": message(row["prompt"])} for row in rows])
        trainer = GRPOTrainer(args=GRPOConfig(**config), reward_funcs=reward, **given)
        fill_adapter(trainer.model)
        generate = trainer._generate

        def timed(prompts: list[Any]) -> Any:
            begin = time.perf_counter()
            found = generate(prompts)
            seconds["generate_s"] = time.perf_counter() - begin
            return found

        trainer._generate = timed
    canned += side.wait()
    trainer.rollout_func = rollout if canned else None
    trainer.train()


def fill_adapter(model: torch.nn.Module) -> None:
    """Give the random half of an adapter the same values on every side. The other half is 0, as usual."""
    named = [(name, parameter) for name, parameter in model.named_parameters() if "lora_A" in name]
    if named:
        from step_sides import fill_adapter as fill

        fill(named)


def measure(name: str, case: Case, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Run all sides of a case, one at a time. Returns a row for each."""
    context: Any = multiprocessing.get_context("forkserver" if options.quick else "spawn")
    pipes: dict[str, Connection] = {}
    context.set_forkserver_preload(["trl.trainer.grpo_trainer", "trl.trainer.sft_trainer", "fsdptrain.fsdp.backend"])
    for side in [side for side in case.sides if side in options.sides]:
        pipes[side], theirs = context.Pipe()
        context.Process(target=work, args=(side, case, options, theirs)).start()
        theirs.close()
    steps: dict[str, list[dict[str, Any]]] = {side: [] for side in pipes}
    given: list[Any] = []  # the samples of ours, to the others in the first step
    try:
        for number in range(case.steps):
            for side in pipes if number % 2 == 0 else reversed(pipes):
                pipes[side].send(given)
                steps[side].append(pipes[side].recv())
                samples = steps[side][-1].pop("samples", [])
                given = samples if number == 0 and side == "ours" and not case.evaluate else given
            given = []
            print(name, number, {side: rounded(rows[-1]["step_s"]) for side, rows in steps.items()}, file=sys.stderr)
            if number == 0 and not case.evaluate and "ours" in steps:
                require_agreement({side: rows[0] for side, rows in steps.items()}, TOLERANCES[False], case=name)
        for pipe in pipes.values():
            pipe.send(None)  # the end
    finally:
        for pipe in pipes.values():
            pipe.close()  # after an error too
    return [summary(name, case, side, steps) for side in steps]


def summary(name: str, case: Case, side: str, steps: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Summarize a side. Ratios compare the same round of this side and `ours`."""
    begin = 0 if case.evaluate else 1
    own, ours = (steps.get(each, [])[begin:] for each in (side, "ours"))
    row: dict[str, Any] = {"case": name, "side": side, "step_s": spread(step["step_s"] for step in own)}
    for key in ("generate_s", "train_s", "sync_s", "reward", "skipped"):
        values = [step[key] for step in own if step.get(key) is not None]
        row[key] = rounded(statistics.median(values)) if values else None
    ratios = [step["step_s"] / other["step_s"] for step, other in zip(own, ours, strict=False)]
    row["times_ours"] = spread(ratios) if ratios else None
    row["peak_gib"] = rounded(max(step["peak_gib"] for step in steps[side]))
    if case.evaluate:
        seconds = accumulate(step["step_s"] for step in own)
        kept = [{key: step[key] for key in ("reward", "accuracy") if key in step} for step in own]
        row["curve"] = [{"step": i, "s": rounded(s), **kept[i - 1]} for i, s in enumerate(seconds, 1)]
    return {**row, "steps": steps[side]}


def shown(row: dict[str, Any]) -> dict[str, Any]:
    """Return the cells of a row of the table."""
    step, ratio = row["step_s"], row["times_ours"]
    cells = {"case": row["case"], "side": row["side"]}
    cells["step [s]"] = "{median} ({least}, {most})".format(**step)
    cells["step / ours"] = "{median:.2f} ({least:.2f}, {most:.2f})".format(**ratio) if ratio else None
    for key in ("generate_s", "train_s", "sync_s"):
        cells[key.replace("_s", " [s]")] = row[key]
    return {**cells, "reward": row["reward"], "skipped": row["skipped"], "peak [GiB]": row["peak_gib"]}


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--cases", nargs="+", choices=CASES, default=list(CASES))
    add("--sides", nargs="+", choices=SIDES, default=list(SIDES))
    add("--rounds", type=int, default=3, help="timed steps of each side; not of learn")
    add("--threads", type=int, default=torch.get_num_threads(), help="of torch, in each process; default: torch's")
    add("--model", type=Path, default=ROOT / "build" / "smollm2")
    add("--seed", type=int, default=0)
    add("--json", type=Path, help="path of the report, written after each case")
    add("--quick", action="store_true", help="tiny steps, of ours and trl in most cases: checks agreement, not speed")
    options = parser.parse_args()
    if not (options.model / "config.json").exists():
        parser.error(f"--model {options.model} does not exist: `make smollm2` makes it")
    return options


def main() -> None:
    options, results = parsed(), []
    os.environ["OMP_NUM_THREADS"] = str(options.threads)  # of the processes to start
    torch.set_num_threads(options.threads)
    begin = header()
    for name in options.cases:
        case = replace(CASES[name], steps=CASES[name].steps or 1 + options.rounds)
        if options.quick:
            small = {"prompts": 2, "tokens": 16, "steps": 2, "evaluate": 2 * (case.evaluate > 0)}
            case = replace(case, **small, sides=SIDES if name == "low" else SIDES[::2])
        results += measure(name, case, options)
        write(options.json, {**begin, "results": results})
        print(table([shown(row) for row in results if row["case"] == name]), flush=True)
    print(table([shown(row) for row in results]))
    curves = [
        {"side": row["side"], **point} for row in results for point in row.get("curve", ()) if "accuracy" in point
    ]
    if curves:
        print(table(curves))


if __name__ == "__main__":
    main()
