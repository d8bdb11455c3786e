"""Responses to prompts and evaluations from Python, with the engine of an open run."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import cast

from fsdptrain.data.prompts import make_prompt
from fsdptrain.data.rows import Row
from fsdptrain.distributed import gather, raise_on_all_ranks
from fsdptrain.errors import ConfigError, RolloutError
from fsdptrain.rollout.sampling import sampling_params
from fsdptrain.trainer.loop import TrainingLoop
from fsdptrain.trainer.samples.single_turn import generate_with, text_of
from fsdptrain.trainer.samples.source import own_share
from fsdptrain.trainer.trainer import Messages
from fsdptrain.types import Metrics


def generate_texts(
    loop: TrainingLoop,
    prompts: str | Messages | Sequence[str | Messages],
    *,
    num_samples: int,
    max_tokens: int | None,
    temperature: float | None,
    seed: int,
) -> list[list[str]]:
    """Generate `num_samples` texts per prompt. Each rank generates for its share of the prompts. Collective."""
    config = loop.config
    if loop.weight_sync is None:
        raise ConfigError("generate() needs an engine, which --algorithm sft and --replay-rollouts have not")
    engine = loop.weight_sync.engine
    if num_samples < 1:
        raise ConfigError(f"generate(num_samples={num_samples}) must be 1 or more")
    with raise_on_all_ranks(ConfigError, "generate"):
        options = {"max_tokens": max_tokens, "temperature": temperature}
        changes = {name: value for name, value in options.items() if value is not None}
        sampling = sampling_params(config, num_samples=num_samples, seed=seed, **changes)
        single = isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], Mapping))
        rows = [
            Row(str(number), prompt if isinstance(prompt, str) else [dict(message) for message in prompt])
            for number, prompt in enumerate(cast("Sequence[str | Messages]", [prompts] if single else prompts))
        ]
        data = loop.stream.data  # with the system prompt of the run
        made = [make_prompt(row, loop.tokenizer, data=data) for row in rows]
    with _current_weights(loop), loop.phases("eval"), raise_on_all_ranks(RolloutError, "generate"):
        completions = generate_with(engine, loop.tokenizer, in_flight=False)(own_share(made), sampling)
        texts = [text_of(completion, loop.tokenizer, sampling.stop) for completion in completions]
    everywhere = [text for of_rank in gather(texts) for text in of_rank]
    return [everywhere[i : i + num_samples] for i in range(0, len(everywhere), num_samples)]


def evaluate(loop: TrainingLoop) -> Metrics:
    """Evaluate the current weights. Returns the metrics. Raises ConfigError if there are no held-out rows."""
    if loop.evaluation is None:
        raise ConfigError("evaluate() needs --eval-size or --eval-prompt-data, --eval-interval, no --replay-rollouts")
    with _current_weights(loop):
        loop.evaluate()
    return {name: value for name, value in loop.metrics.items() if name.startswith("eval/")}


@contextmanager
def _current_weights(loop: TrainingLoop) -> Iterator[None]:
    """Push the weights to the engine, if there is one. On exit it sleeps again if it slept before."""
    if loop.weight_sync is not None:
        loop.weight_sync.push(loop.step, loop.phases)
    yield
    if loop.asleep and loop.weight_sync is not None:
        loop.weight_sync.engine.sleep()
