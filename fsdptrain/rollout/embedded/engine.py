"""The embedded engine: an unsharded replica of the model on each rank, with its own decode loop.

docs/rollouts.md explains why a replica, and what it costs.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedConfig

from fsdptrain.config import Config, DataConfig
from fsdptrain.enabled_features import NO_FEATURES, Features
from fsdptrain.errors import RolloutError
from fsdptrain.rollout.embedded.decode import Row, decode, plan_chunks
from fsdptrain.rollout.embedded.replica import build_replica, copy_weights, materialize, release
from fsdptrain.rollout.sampling import uniform_stream
from fsdptrain.rollout.stop_tokens import engine_tokenizer, stop_tokens
from fsdptrain.types import Completion, Prompt, SamplingParams

if TYPE_CHECKING:
    from fsdptrain.data.routes import RouteRecorder
    from fsdptrain.protocols import Naming

_SYNC_INTERVAL = 8  # tokens between checks for finished rows, each of which waits for the GPU


class HFEngine:
    """Generates with transformers' model code on the device of this rank. No method waits for another rank.

    Has no weights before the first `update_weights` and after `sleep`.
    """

    weight_naming: "Naming" = "module"

    def __init__(
        self,
        checkpoint: Path,
        *,
        dtype: torch.dtype,
        device: torch.device,
        trust_remote_code: bool = False,
        max_batch_tokens: int = 262_144,
        data: DataConfig | None = None,
    ) -> None:
        """data: see `stop_tokens`."""
        self.model = build_replica(checkpoint, dtype=dtype, trust_remote_code=trust_remote_code)
        self.stop_token_ids = stop_tokens(checkpoint, self.model.config, trust_remote_code=trust_remote_code, data=data)
        self._source = checkpoint, trust_remote_code
        self._features = NO_FEATURES
        self._new_recorder: Callable[..., RouteRecorder] | None = None  # created by the first request for routes
        self.device = device
        self.max_batch_tokens = max_batch_tokens
        self.policy_version = 0
        self._has_weights = False

    def use_features(self, features: Features) -> None:
        """Generate with the hooks of `features`."""
        self._features = features

    def update_weights(self, weights: Iterable[tuple[str, Tensor]], policy_version: int) -> None:
        """Copy every parameter and persistent buffer, by module name. RolloutError if names or shapes differ."""
        self._has_weights = False  # also after half an update
        if self.model.device.type == "meta":
            materialize(self.model, self.device)
        copy_weights(self.model, weights)
        self.policy_version = policy_version
        self._has_weights = True

    def generate(self, prompts: Sequence[Prompt], sampling: SamplingParams) -> list[Completion]:
        """`num_samples` completions of each prompt, prompt by prompt, in order.

        A response ends at the model's end-of-text ids, at `sampling.stop_token_ids` and at `sampling.stop`.
        """
        if not self._has_weights:
            raise RolloutError("the embedded engine has no weights: call update_weights first, also after sleep()")
        limits = [sampling.limit_of(prompt) for prompt in prompts]
        for prompt, limit in zip(prompts, limits, strict=True):
            check_prompt(prompt, limit, self.model.config, max_batch_tokens=self.max_batch_tokens)
        stop = sorted({*self.stop_token_ids, *sampling.stop_token_ids})
        chunks = plan_chunks(
            [len(prompt.token_ids) for prompt in prompts],
            limits,
            num_samples=sampling.num_samples,
            max_batch_tokens=self.max_batch_tokens,
        )
        made: dict[Row, Completion] = {}
        for chunk in chunks:
            made.update(zip(chunk, self._generate_chunk(prompts, limits, chunk, sampling, stop), strict=True))
        return [made[Row(i, k)] for i in range(len(prompts)) for k in range(sampling.num_samples)]

    def sleep(self) -> None:
        """Free the weights. `generate` raises until the next `update_weights`."""
        self._has_weights = False
        release(self.model)

    def wake_up(self) -> None:
        """Nothing to do: the next `update_weights` allocates the weights."""

    def close(self) -> None:
        self.sleep()

    @torch.inference_mode()
    def _generate_chunk(
        self,
        prompts: Sequence[Prompt],
        limits: Sequence[int],
        chunk: Sequence[Row],
        sampling: SamplingParams,
        stop: Sequence[int],
    ) -> list[Completion]:
        distinct = list(dict.fromkeys(row.prompt for row in chunk))
        place = {prompt: i for i, prompt in enumerate(distinct)}
        prompt_of_row = [place[row.prompt] for row in chunk]
        limit_of_row = [limits[row.prompt] for row in chunk]
        num_steps = max(limit_of_row)
        streams = [uniform_stream(sampling.seed, prompts[row.prompt].id, row.sample, num_steps) for row in chunk]
        recorder = None
        if sampling.with_routes:
            recorder = self._recorder([len(prompts[prompt].token_ids) for prompt in distinct], prompt_of_row)
        stop_strings = None
        if sampling.stop:
            from fsdptrain.rollout.stop_strings import RowStops

            stop_strings = RowStops(sampling.stop, engine_tokenizer(*self._source), len(chunk))
        with recorder.recording() if recorder else nullcontext():
            tokens, logprobs = decode(
                self.model,
                [prompts[prompt] for prompt in distinct],
                prompt_of_row,
                limit_of_row,
                torch.from_numpy(np.stack(streams)).to(self.device),
                sampling=sampling,
                stop_token_ids=stop,
                sync_interval=1 if self.device.type == "cpu" else _SYNC_INTERVAL,
                recorder=recorder,
                stop_strings=stop_strings,
                features=self._features,
            )
        ends = [None] * len(chunk) if stop_strings is None else stop_strings.ends
        made = [
            self._completion(prompts[row.prompt], row_tokens[:limit][:end], row_logprobs[:limit][:end], stop, end)
            for row, limit, row_tokens, row_logprobs, end in zip(
                chunk, limit_of_row, tokens.tolist(), logprobs.tolist(), ends, strict=True
            )
        ]
        if recorder is None:
            return made
        routes = recorder.of_rows([len(completion.token_ids) for completion in made])
        return [replace(completion, routes=row) for completion, row in zip(made, routes, strict=True)]

    def _recorder(self, prompt_lengths: Sequence[int], prompt_of_row: Sequence[int]) -> "RouteRecorder":
        if self._new_recorder is None:
            self._new_recorder = self._features.first(lambda feature: feature.route_recorder(self.model))
        if self._new_recorder is None:
            raise RolloutError(f"{type(self.model).__name__} has no experts, so it cannot report routes")
        return self._new_recorder(prompt_lengths, prompt_of_row)

    def _completion(
        self, prompt: Prompt, tokens: list[int], logprobs: list[float], stop: Sequence[int], string_end: int | None
    ) -> Completion:
        end = next((i for i, token in enumerate(tokens) if token in stop), None)
        length = len(tokens) if end is None else end + 1
        if not np.isfinite(logprobs[:length]).all():
            fix = ", or use --bf16 instead of --fp16" if self.model.dtype == torch.float16 else ""
            raise RolloutError(
                f"logits of prompt {prompt.id!r} are not finite under policy version {self.policy_version}: "
                f"lower --lr{fix}"
            )
        reason = "length" if end is None and len(tokens) != string_end else "stop"
        return Completion(prompt.id, tokens[:length], logprobs[:length], reason, self.policy_version)


def check_prompt(prompt: Prompt, limit: int, config: PreTrainedConfig, *, max_batch_tokens: int) -> None:
    """Raise RolloutError unless the engine can continue `prompt` by `limit` tokens."""
    text = config.get_text_config(decoder=True)
    length, num_tokens = len(prompt.token_ids), getattr(text, "vocab_size", None)
    max_positions = getattr(text, "max_position_embeddings", None)  # other names are mapped to it; ALiBi has none
    if length == 0:
        raise RolloutError(f"prompt {prompt.id!r} has no tokens: a prompt needs at least one")
    if prompt.images is None and num_tokens is not None and max(prompt.token_ids) >= num_tokens:
        raise RolloutError(
            f"prompt {prompt.id!r} has token {max(prompt.token_ids)}, and the model has {num_tokens} tokens: the "
            "tokenizer has added tokens for which the model was not resized; leave them out of the row"
        )
    if length + limit > max_batch_tokens:
        raise RolloutError(
            f"--rollout-max-batch-tokens {max_batch_tokens} cannot hold prompt {prompt.id!r} of {length} "
            f"tokens and --rollout-max-response-len {limit}; raise it, or lower the others"
        )
    if max_positions is not None and length + limit > max_positions:
        raise RolloutError(
            f"prompt {prompt.id!r} of {length} tokens and --rollout-max-response-len {limit} "
            f"exceed the {max_positions} positions of the model; lower it, or --rollout-max-prompt-len"
        )


def build_hf_engine(config: Config, *, checkpoint: Path, device: torch.device) -> HFEngine:
    return HFEngine(
        checkpoint,
        dtype=getattr(torch, config.compute_dtype_name),
        device=device,
        trust_remote_code=config.model.trust_remote_code,
        max_batch_tokens=config.rollout.max_batch_tokens,
        data=config.data,
    )
