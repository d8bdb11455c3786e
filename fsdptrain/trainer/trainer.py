"""`Trainer`: a run from Python."""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, Never, Self

import torch.distributed as dist
from torch import nn
from transformers import PreTrainedTokenizerBase

from fsdptrain import platform, registry
from fsdptrain.config import Config, check_processes
from fsdptrain.distributed import naming_lost_ranks
from fsdptrain.trainer.build import build_loop
from fsdptrain.trainer.loop import TrainingLoop
from fsdptrain.trainer.result import RunResult
from fsdptrain.trainer.run_dir import EXPORT
from fsdptrain.trainer.run_lock import lock_folder
from fsdptrain.trainer.stopping import StopRequest
from fsdptrain.types import Metrics

if TYPE_CHECKING:
    from fsdptrain.protocols import Loss, RewardFunction, RolloutEngine
    from fsdptrain.trainer.callbacks import Callback

Rows = Sequence[Mapping[str, Any]]  # a `datasets.Dataset`, or a list of mappings
Messages = Sequence[Mapping[str, Any]]  # [{"role": "user", "content": "..."}, ...]


class Trainer:
    """A run: `Trainer(config).fit()`.

    Args:
        config: every option; see fsdptrain.config.
        reward: a function that replaces `--reward`: (prompt, response text) -> float or {name: float}.
        dataset: rows that replace `--prompt-data`.
        eval_dataset: rows that replace `--eval-prompt-data`.
        environment: replaces `--environment`: an object with `reset` and `step`, its class, or a function.
        loss: a function that replaces `--loss`: (batch, logprobs, config) -> fsdptrain.protocols.LossOutput.
        advantage: a function that replaces `--advantage-estimator`: (rewards, lengths) -> advantages.
        engine: replaces `--rollout-engine`: an engine, or a function (config, *, checkpoint, device) -> engine.
        optimizer: a function that replaces `--optimizer`: (parameter groups, options) -> torch.optim.Optimizer.
        callbacks: called during the run; see fsdptrain.Callback.

    Under torchrun every rank creates a Trainer with the same arguments; otherwise the run has one process. A rank that
    fails must exit: if it catches the error and continues, the others wait for it until --dist-timeout.

    `fit` opens the run and closes it when done. In `with Trainer(config) as trainer:` the run stays open until the
    end of the block. `model`, `tokenizer`, `generate` and `evaluate` open the run with its newest checkpoint if it is
    not open; `close` then frees its memory.

    Raises ConfigError if an argument contradicts `config`.
    """

    def __init__(
        self,
        config: Config | None = None,
        *,
        reward: "RewardFunction | None" = None,
        dataset: Rows | None = None,
        eval_dataset: Rows | None = None,
        environment: Any = None,
        loss: "Loss | None" = None,
        advantage: Callable[..., Any] | None = None,
        engine: "RolloutEngine | Callable[..., RolloutEngine] | None" = None,
        optimizer: Callable[..., Any] | None = None,
        callbacks: "Sequence[Callback]" = (),
        **unknown: Never,
    ) -> None:
        if (
            not isinstance(config, Config)
            or unknown
            or any(isinstance(given, str | os.PathLike) for given in (dataset, eval_dataset))
        ):
            from fsdptrain.trainer.objects import wrong_arguments

            raise wrong_arguments(config, unknown, dataset=dataset, eval_dataset=eval_dataset)
        objects = {
            "environment": environment,
            "reward": reward,
            "loss": loss,
            "advantage_estimator": advantage,
            "rollout_engine": engine,
            "optimizer": optimizer,
        }
        self.config, self._objects = config, {}
        if any(value is not None for value in (*objects.values(), dataset, eval_dataset)):
            from fsdptrain.trainer.objects import config_naming

            self.config, self._objects = config_naming(config, objects, dataset, eval_dataset)
        self.callbacks = list(callbacks)
        self._rows = {"dataset": dataset, "eval_dataset": eval_dataset}
        self._loop: TrainingLoop | None = None
        self._resources = ExitStack()
        self._stop = StopRequest()

    def __enter__(self) -> Self:
        self._opened()
        return self

    def __exit__(self, *error: Any) -> None:
        self._loop = None
        self._resources.__exit__(*error)

    def close(self) -> None:
        """Close an open run: free the model and the engine, release the folder. Collective."""
        self.__exit__(None, None, None)

    def fit(self) -> RunResult:
        """Train to the end, from the start or the newest checkpoint.

        The first Ctrl-C or SIGTERM ends training after the current step and saves a checkpoint; `RunResult.stopped` is
        the reason. A second Ctrl-C raises KeyboardInterrupt.
        """
        with naming_lost_ranks(), ExitStack() as stack:
            if self._loop is None:
                stack.push(self.__exit__)
            loop = self._opened()
            trains = self.config.run.num_rollout > 0  # else a signal ends the evaluation immediately
            with self._stop.from_signals() if trains else nullcontext():
                loop.run()
            if self.config.run.push_to_hub is not None and loop.exported and dist.get_rank() == 0:
                from fsdptrain.trainer.hub import push

                push(self.config.run.push_to_hub, loop.folder / EXPORT)
            metrics = dict(loop.metrics)
            return RunResult(loop.step, loop.folder, loop.exported, loop.stopped, metrics, loop.stop_signal, loop.best)

    @property
    def model(self) -> nn.Module:
        """The policy, sharded over the ranks. Opens the run."""
        return self._opened().backend.model

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer of the run, with its chat template. Opens the run."""
        return self._opened().tokenizer

    @property
    def step(self) -> int:
        """Number of finished rollouts. Opens the run."""
        return self._opened().step

    @property
    def folder(self) -> Path:
        """The folder of the run, --output-dir."""
        return Path(self.config.run.output_dir)

    def generate(
        self,
        prompts: str | Messages | Sequence[str | Messages],
        *,
        num_samples: int = 1,
        max_tokens: int | None = None,
        temperature: float | None = None,
        seed: int = 0,
    ) -> list[list[str]]:
        """Generate responses with the engine and the current weights. Opens the run. Collective.

        prompts: one prompt or more, as text or messages. The system prompt of the run is added.
        max_tokens, temperature: by default as in rollouts.
        Returns `num_samples` texts per prompt, without the tokens that ended them.
        Raises ConfigError if the run has no engine.
        """
        from fsdptrain.trainer.interactive import generate_texts

        return generate_texts(
            self._opened(), prompts, num_samples=num_samples, max_tokens=max_tokens, temperature=temperature, seed=seed
        )

    def evaluate(self) -> Metrics:
        """Evaluate the current weights on the held-out rows, and log it. Opens the run. Collective.

        Raises ConfigError if the run has no held-out rows.
        """
        from fsdptrain.trainer.interactive import evaluate

        return evaluate(self._opened())

    def stop(self, reason: str = "a callback") -> None:
        """End training after the current step, with an evaluation, a checkpoint and the exported model.

        For callbacks. One rank is enough.
        """
        self._stop.ask(reason)

    def _opened(self) -> TrainingLoop:
        if self._loop is None:
            with ExitStack() as stack:
                self._loop = stack.enter_context(self._built())
                self._resources = stack.pop_all()
        return self._loop

    @contextmanager
    def _built(self) -> Iterator[TrainingLoop]:
        """Open the process group, the folder, the data, the model and the engine; close them on exit. Collective."""
        with platform.process_group(self.config.launch.dist_timeout):
            local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
            check_processes(self.config, world_size=dist.get_world_size(), local_world_size=local_world_size)
            platform.seed_everything(self.config.run.seed + dist.get_rank())
            platform.set_deterministic(self.config.model.deterministic_mode)
            with lock_folder(self.config), ExitStack() as stack:
                with registry.given_objects(self._objects):
                    loop = stack.enter_context(build_loop(self.config, **self._rows, trainer=self, stop=self._stop))
                yield loop
