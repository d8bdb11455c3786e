"""Train the demo task to a target accuracy, fsdptrain against TRL's GRPOTrainer: wall time by stage.

    python benchmarks/end_to_end.py --json benchmarks/results/end_to_end.json     # 3 seeds: ten minutes
    python benchmarks/end_to_end.py --quick                                       # check that both sides run

The task, model and warm-up are those of the quickstart (`make demo`): spelling words backward, 0.1 M parameters, on a
CPU. Both sides use the same initial weights, prompts in the same order, reward, and the options of
recipes/spell_backward_demo.yaml:
256 completions per rollout, two optimizer steps, clip bounds 0.2 and 0.28, no KL term. TRL trains 128 rows at a time.
The warm-up runs once; each round uses another GRPO seed, for sampling and prompts. Only one side runs at a time, and
the side that goes first alternates.

Every --every rollouts, the embedded engine evaluates both sides on the same held-out words (sampled at temperature 1,
with the same seeds). Times exclude evaluations and everything before the first rollout, because the model is tiny
compared with imports; see `startup.py` for those. The result is the rollout time until the first evaluation that
reaches the target. `generate`, `reward` and `sync` are measured by timing the corresponding functions on both sides;
`train` is the rest of the rollout.
"""

import argparse
import json
import multiprocessing
import os
import shutil
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # set before importing torch: a model this small is faster on one thread
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

import torch
from algorithms import warm_start
from record import ROOT, header, rounded, spread, table, write
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

from fsdptrain import Config, load_recipe
from fsdptrain.rewards.gym import reasoning_gym_strict
from fsdptrain.rollout.embedded.engine import HFEngine
from fsdptrain.rollout.evaluate import eval_sampling
from fsdptrain.trainer.data import build_data
from fsdptrain.types import Prompt
from tests.testing import no_checkpointing  # found after `record` is imported

SIDES = ("ours", "trl")
STAGES = ("generate", "reward", "sync")


class Clock:
    """Wall and CPU seconds of the rollouts so far, in total and by stage. Evaluations are points on it."""

    def __init__(self, evaluate: Callable[[], float]) -> None:
        self.evaluate = evaluate
        self.wall = self.cpu = 0.0
        self._runs = False
        self.stages = dict.fromkeys(STAGES, 0.0)
        self.points = [{"rollout": 0, "accuracy": evaluate(), "wall_s": 0.0, "cpu_s": 0.0, **self.stages}]

    @contextmanager
    def running(self) -> Iterator[None]:
        wall, cpu, self._runs = time.perf_counter(), time.process_time(), True
        yield
        self._runs = False
        self.wall += time.perf_counter() - wall
        self.cpu += time.process_time() - cpu

    def around(self, owner: Any, attribute: str, stage: str) -> None:
        """Count calls of `owner.attribute` during a rollout as this stage."""
        inner = getattr(owner, attribute)

        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            found = inner(*args, **kwargs)
            self.stages[stage] += self._runs * (time.perf_counter() - start)
            return found

        setattr(owner, attribute, timed)

    def mark(self, rollout: int) -> None:
        seconds = {"wall_s": self.wall, "cpu_s": self.cpu, **self.stages}
        self.points.append({"rollout": rollout, "accuracy": self.evaluate(), **seconds})


class Judge:
    """Compute the accuracy of weights on the held-out words."""

    def __init__(self, config: Config, start: Path, held_out: list[Prompt]) -> None:
        self.sampling, self.prompts = eval_sampling(config), held_out
        self.engine = HFEngine(start, dtype=torch.float32, device=torch.device("cpu"))
        self.tokenizer = AutoTokenizer.from_pretrained(start)

    def __call__(self, weights: Iterable[tuple[str, torch.Tensor]]) -> float:
        self.engine.update_weights(weights, 0)
        asked = [prompt for prompt in self.prompts for _ in range(self.sampling.num_samples)]
        made = self.engine.generate(self.prompts, self.sampling)
        texts = self.tokenizer.batch_decode([m.token_ids for m in made], skip_special_tokens=True)
        return statistics.fmean(reasoning_gym_strict(p, text) for p, text in zip(asked, texts, strict=True))


def config_of(start: Path, seed: int, run: Path, args: argparse.Namespace) -> Config:
    return load_recipe(
        ROOT / "recipes" / "spell_backward_demo.yaml",
        hf_checkpoint=str(start),
        seed=seed,
        rollout_seed=seed,
        output_dir=str(run),
        resume="never",
        num_rollout=args.rollouts,
        save_interval=args.rollouts,
        eval_interval=args.rollouts,
        n_samples_per_eval_prompt=2,
        export=False,
        eval_greedy=False,
        eval_size=args.eval_size,
        data_size=args.data_size,
        log_to=[],
        log_num_samples=0,
    )


def run_ours(config: Config, start: Path, args: argparse.Namespace) -> list[dict[str, float]]:
    from fsdptrain import Trainer
    from fsdptrain.trainer import loop as training
    from fsdptrain.trainer.samples import single_turn as experience

    held_out = build_data(config, AutoTokenizer.from_pretrained(start), None, None).prompts
    judge = Judge(config, start, held_out)
    loop: Any = training.TrainingLoop
    run, rollout = loop.run, loop._train_on_rollout
    clocks: list[Clock] = []

    def first(self: Any) -> Any:
        clock = Clock(lambda: judge(self._backend.hf_weights()))
        clock.around(self._engine, "generate", "generate")
        clock.around(experience, "compute_rewards", "reward")
        clock.around(self, "_push_weights", "sync")
        clocks.append(clock)
        return run(self)

    def timed(self: Any) -> None:
        [clock] = clocks
        with clock.running():
            rollout(self)
        if self.step % args.every == 0:
            clock.mark(self.step)

    loop.run, loop._train_on_rollout = first, timed
    Trainer(config).fit()
    return clocks[0].points


def run_trl(config: Config, start: Path, args: argparse.Namespace) -> list[dict[str, float]]:
    import trl
    from datasets import Dataset

    tokenizer = AutoTokenizer.from_pretrained(start)
    data = build_data(config, tokenizer, None, None)
    size, group = config.rollout.batch_size, config.algorithm.n_samples_per_prompt
    prompts = [prompt for _ in range(args.rollouts) for prompt in data.stream.next(size)]
    assert all(tokenizer(p.text, add_special_tokens=False)["input_ids"] == p.token_ids for p in prompts)
    judge = Judge(config, start, data.prompts)

    def reward(completions: list[str], number: list[int], **_: Any) -> list[float]:
        return [reasoning_gym_strict(prompts[i], text) for i, text in zip(number, completions, strict=True)]

    steps = config.steps_per_rollout
    options = trl.GRPOConfig(
        output_dir=str(Path(config.run.output_dir)),
        per_device_train_batch_size=size * group // steps,
        steps_per_generation=steps,
        max_steps=steps * args.rollouts,
        num_generations=group,
        max_completion_length=config.rollout.max_response_len,
        shuffle_dataset=False,
        temperature=config.rollout.temperature,
        top_k=0,
        learning_rate=config.optim.lr,
        warmup_steps=config.optim.lr_warmup_iters,
        lr_scheduler_type="constant_with_warmup",
        adam_beta1=config.optim.adam_beta1,
        adam_beta2=config.optim.adam_beta2,
        max_grad_norm=config.optim.clip_grad,
        loss_type="dapo",
        scale_rewards="group",
        epsilon=config.algorithm.eps_clip,
        epsilon_high=config.algorithm.eps_clip_high,
        beta=0.0,
        **no_checkpointing(),
        bf16=False,
        use_cpu=True,
        seed=config.run.seed,
        report_to="none",
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
    )
    trainer = trl.GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(start, dtype=torch.float32),
        reward_funcs=reward,
        args=options,
        train_dataset=Dataset.from_list([{"prompt": p.text, "number": i} for i, p in enumerate(prompts)]),
        processing_class=tokenizer,
    )
    clock = Clock(lambda: judge((name, p.detach()) for name, p in trainer.model.named_parameters()))
    clock.around(trainer, "_generate", "generate")
    clock.around(trainer, "_calculate_rewards", "reward")

    class Timed(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            self.running = clock.running()
            self.running.__enter__()

        def on_step_end(self, _: Any, state: Any, *__: Any, **___: Any) -> None:
            self.running.__exit__(None, None, None)
            if state.global_step % (steps * args.every) == 0:
                clock.mark(state.global_step // steps)

    trainer.add_callback(Timed())
    trainer.train()
    return clock.points


def work(side: str, start: Path, seed: int, folder: Path, args: argparse.Namespace, pipe: Any) -> None:
    torch.manual_seed(seed)
    config = config_of(start, seed, folder, args)
    pipe.send({"ours": run_ours, "trl": run_trl}[side](config, start, args))


def one_run(side: str, start: Path, seed: int, args: argparse.Namespace) -> dict[str, Any]:
    """Run one side in a new process."""
    folder = args.folder / f"{side}{seed}"
    shutil.rmtree(folder, ignore_errors=True)
    ours, theirs = multiprocessing.get_context("fork").Pipe(duplex=False)
    process = multiprocessing.get_context("fork").Process(target=work, args=(side, start, seed, folder, args, theirs))
    process.start()
    theirs.close()
    try:
        points = ours.recv()
    except EOFError:
        sys.exit(f"{side} with seed {seed} ended without a result")
    process.join()
    reached = next((point for point in points if point["accuracy"] >= args.target), None)
    print(
        f"  {side} {seed}: {[round(p['accuracy'], 3) for p in points]}, {points[-1]['wall_s']:.1f} s", file=sys.stderr
    )
    return {"side": side, "seed": seed, "reached": reached, "points": [_rounded(point) for point in points]}


def _rounded(point: dict[str, float]) -> dict[str, float]:
    return {name: rounded(value) for name, value in point.items()}


def summary(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Summarize each side, and the ratio of TRL to fsdptrain for seeds where both reached the target."""
    by = {(run["side"], run["seed"]): run for run in runs}
    seeds = sorted({run["seed"] for run in runs})
    found: dict[str, Any] = {}
    for side in SIDES:
        ends = [by[side, seed]["points"][-1] for seed in seeds]
        rollouts = [end["rollout"] for end in ends]
        named = {name: [end[name] for end in ends] for name in ("wall_s", "cpu_s", *STAGES)}
        named["train"] = [end["wall_s"] - sum(end[stage] for stage in STAGES) for end in ends]
        found[side] = {
            f"{n}_of_rollout": spread(v / r for v, r in zip(vs, rollouts, strict=True)) for n, vs in named.items()
        }
        found[side]["accuracy_before"] = spread(by[side, seed]["points"][0]["accuracy"] for seed in seeds)
        found[side]["accuracy_after"] = spread(end["accuracy"] for end in ends)
        found[side]["reached_target"] = sum(by[side, seed]["reached"] is not None for seed in seeds)
    both = [seed for seed in seeds if all(by[side, seed]["reached"] for side in SIDES)]
    for clock in ("wall_s", "cpu_s"):
        if both:
            pairs = [(by["trl", s]["reached"][clock], by["ours", s]["reached"][clock]) for s in both]
            found[f"trl_over_ours_{clock}_to_target"] = spread(a / max(b, 1e-9) for a, b in pairs)
        whole = [(by["trl", s]["points"][-1][clock], by["ours", s]["points"][-1][clock]) for s in seeds]
        found[f"trl_over_ours_{clock}_of_all"] = spread(a / b for a, b in whole)
    return found


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--quick", action="store_true", help="two rollouts after two warm-up steps: checks that both sides run")
    add("--json", type=Path, help="path of the report")
    add("--target", type=float, default=0.85, help="held-out accuracy, sampled at temperature 1")
    add("--rollouts", type=int, default=30)
    add("--every", type=int, default=3, help="rollouts between evaluations")
    add("--seeds", type=int, nargs="+", default=[0, 1, 2], help="GRPO seeds, one per round")
    add("--warm-up-seed", type=int, default=0)
    add("--eval-size", type=int, default=256, help="held-out words, with two samples each")
    add("--data-size", type=int, default=50_000)
    add("--folder", type=Path, default=Path("runs/end_to_end"), help="folder of warm-ups, which are reused, and runs")
    args = parser.parse_args()
    if args.quick:
        args.rollouts, args.every, args.seeds, args.eval_size, args.data_size = 2, 1, [0], 16, 500
    return args


def main() -> None:
    args = arguments()
    begin = header()
    runs: list[dict[str, Any]] = []
    found: dict[str, Any] = {}
    start = warm_start(args.warm_up_seed, args.folder / ("quick" if args.quick else "full"), quick=args.quick)
    for number, seed in enumerate(args.seeds):
        runs += [one_run(side, start, seed, args) for side in (SIDES if number % 2 else reversed(SIDES))]
        found = summary(runs)
        write(args.json, {**begin, "target": args.target, "results": found, "runs": runs})  # survives a failure
    medians = {side: {k: v["median"] for k, v in found[side].items() if isinstance(v, dict)} for side in SIDES}
    print(table([{"": name, **{side: round(medians[side][name], 3) for side in SIDES}} for name in medians["ours"]]))
    print(json.dumps({key: value for key, value in found.items() if key not in SIDES}))


if __name__ == "__main__":
    main()
