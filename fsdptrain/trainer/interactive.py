"""Responses to prompts from Python, with the engine of an open run."""

from collections.abc import Mapping, Sequence
from typing import Any

from fsdptrain.data.prompts import make_prompt
from fsdptrain.data.rows import Row
from fsdptrain.distributed import gather, raise_on_all_ranks
from fsdptrain.errors import ConfigError, RolloutError
from fsdptrain.rollout.sampling import sampling_params
from fsdptrain.trainer.loop import TrainingLoop
from fsdptrain.trainer.samples.single_turn import text_of
from fsdptrain.trainer.samples.source import own_share


def generate_texts(
    loop: TrainingLoop,
    prompts: Sequence[str | Sequence[Mapping[str, Any]]],
    *,
    num_samples: int,
    max_tokens: int | None,
    temperature: float | None,
    seed: int,
) -> list[list[str]]:
    """Generate `num_samples` texts per prompt. Each rank generates for its share of the prompts. Collective."""
    config = loop.config
    assert loop.weight_sync is not None
    engine = loop.weight_sync.engine
    if num_samples < 1:
        raise ConfigError(f"generate(num_samples={num_samples}) must be 1 or more")
    with raise_on_all_ranks(ConfigError, "generate"):
        options = {"max_tokens": max_tokens, "temperature": temperature}
        changes = {name: value for name, value in options.items() if value is not None}
        sampling = sampling_params(config, num_samples=num_samples, seed=seed, **changes)
        rows = [
            Row(str(number), prompt if isinstance(prompt, str) else [dict(message) for message in prompt])
            for number, prompt in enumerate(prompts)
        ]
        data = loop.stream.data  # with the system prompt of the run
        made = [make_prompt(row, loop.tokenizer, data=data) for row in rows]
    with raise_on_all_ranks(RolloutError, "generate"):
        completions = engine.generate(own_share(made), sampling)
        texts = [text_of(completion, loop.tokenizer) for completion in completions]
    everywhere = [text for of_rank in gather(texts) for text in of_rank]
    return [everywhere[i : i + num_samples] for i in range(0, len(everywhere), num_samples)]
