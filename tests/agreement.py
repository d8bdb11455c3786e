"""Compare the logprobs of an engine with those of the trainer, on the tokens that the engine sampled."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import MappingProxyType

import torch.distributed as dist

from fsdptrain import platform
from fsdptrain.algo.weights import Totals
from fsdptrain.config import Config
from fsdptrain.data.packing.pack import pack
from fsdptrain.fsdp.backend import FSDPBackend
from fsdptrain.protocols import RolloutEngine
from fsdptrain.rollout import choose_engine, engine_factory
from fsdptrain.types import Completion, Images, Prompt, Sample, SamplingParams

_MAX_RESPONSE_LEN = 1024


def build(config: Config) -> tuple[FSDPBackend, RolloutEngine]:
    """Build a trainer and its engine, which has no weights yet."""
    backend = FSDPBackend(config, total_steps=1)
    make_engine = engine_factory(choose_engine(config.rollout.engine, device_type=platform.device_type()))
    engine = make_engine(config, checkpoint=backend.checkpoint_path, device=backend.device)
    if config.rollout.engine == "hf":
        engine.use_features(backend.features)  # pyright: ignore[reportAttributeAccessIssue]
    return backend, engine


def of_this_rank(prompts: Sequence[Prompt]) -> list[Prompt]:
    return list(prompts[dist.get_rank() :: dist.get_world_size()])


def push_and_compare(
    backend: FSDPBackend,
    engine: RolloutEngine,
    prompts: Sequence[Prompt],
    sampling: SamplingParams,
    *,
    images: Mapping[str, Images] = MappingProxyType({}),
    mode: Callable[[], AbstractContextManager[object]] = nullcontext,
) -> float:
    """Push the weights, generate under `mode`, and return the largest difference of a logprob.

    `images`: by the id of a prompt.
    """
    engine.update_weights(backend.hf_weights(engine.weight_naming), 1)
    with mode():
        return difference(backend, prompts, engine.generate(prompts, sampling), images=images)


def difference(
    backend: FSDPBackend,
    prompts: Sequence[Prompt],
    completions: Sequence[Completion],
    *,
    images: Mapping[str, Images] = MappingProxyType({}),
) -> float:
    """Return the largest difference of a logprob between `completions` and the trainer."""
    tokens = {prompt.id: prompt.token_ids for prompt in prompts}
    samples = []
    for made in completions:
        prompt = tokens[made.prompt_id]
        mask = [False] * len(prompt) + [True] * len(made.token_ids)
        logprobs = [0.0] * len(prompt) + made.logprobs
        samples.append(Sample(made.prompt_id, prompt + made.token_ids, mask, logprobs))
    return difference_of_samples(backend, samples, images=images)


def difference_of_samples(
    backend: FSDPBackend, samples: Sequence[Sample], *, images: Mapping[str, Images] = MappingProxyType({})
) -> float:
    """The same for samples that hold the engine's logprobs. 0 without samples: the other ranks need this one."""
    packed = list(samples) or [Sample("", [5, 6], [False, True], [0.0, 0.0])]
    totals = Totals(num_tokens=10_000, num_sequences=100)
    batch = pack(packed, aggregation="token_mean", totals=totals, max_response_len=_MAX_RESPONSE_LEN, images=images)
    [logprobs] = backend.compute_logprobs([batch], "policy")
    found = (logprobs.values - batch.rollout_logprobs)[batch.loss_mask].abs().max().item()
    return found if samples else 0.0
