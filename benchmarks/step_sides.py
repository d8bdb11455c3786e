"""The sides of train_step.py: one training step of fsdptrain and of TRL's GRPOTrainer on the same canned samples."""

import argparse
import math
import os
import random
import statistics
import tempfile
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch
from transformers import Qwen3ForCausalLM

from fsdptrain import Config
from fsdptrain.algo.losses import LOSSES
from fsdptrain.features.lora.feature import LoraFeature
from fsdptrain.fsdp.backend import FSDPBackend
from fsdptrain.fsdp.shards import local_shard
from fsdptrain.platform import process_group
from fsdptrain.trainer.batches import PackingRules, make_batches
from fsdptrain.trainer.logprobs import compute_logprobs
from fsdptrain.types import LossConfig, LossOutput, Sample
from tests.testing import no_checkpointing, tiny_tokenizer

SIDES = ("ours", "packed", "stock", "compact", "async")
Step = Callable[[], dict[str, float]]


@dataclass(frozen=True)
class Case:
    """One model and one rollout."""

    folder: str  # holds two models of the same shape: policy and reference
    vocab: int
    lengths: str  # ragged or equal
    options: argparse.Namespace

    @property
    def name(self) -> str:
        return f"{self.lengths}, vocabulary {self.vocab}"

    @property
    def policy(self) -> str:
        return f"{self.folder}/policy"

    @property
    def reference(self) -> str:
        return f"{self.folder}/reference"


def make_samples(case: Case) -> list[Sample]:
    """Create groups of one prompt each, with lognormal completion lengths and uniform prompt lengths.

    The engine's logprobs, used as the old ones, are those of a uniform distribution plus noise. They are close to those
    of random weights, but different enough that ratios differ from 1 and some are clipped.
    """
    options, draw, noise = case.options, random.Random(case.options.seed), random.Random(case.options.seed + 1)
    shortest, longest = options.prompt
    mu = math.log(options.completion) - options.sigma**2 / 2
    samples = []
    for group in range(options.groups):
        width = (shortest + longest) // 2 if case.lengths == "equal" else draw.randint(shortest, longest)
        prompt = [draw.randrange(case.vocab) for _ in range(width)]
        for reward in [float(draw.randrange(2)) for _ in range(options.group_size)]:
            length = options.completion
            if case.lengths == "ragged":
                length = min(options.longest, max(1, round(draw.lognormvariate(mu, options.sigma))))
            tokens = [*prompt, *(draw.randrange(case.vocab) for _ in range(length))]
            mask = [False] * width + [True] * length
            old = [0.0] * width + [noise.gauss(-math.log(case.vocab), 0.1) for _ in range(length)]
            samples.append(Sample(str(group), tokens, mask, old, reward=reward))
    size = compared(options)
    for start in range(0, len(samples), size):
        together = samples[start : start + size]
        mean = statistics.fmean(sample.reward or 0.0 for sample in together)
        samples[start : start + size] = [replace(s, advantage=(s.reward or 0.0) - mean) for s in together]
    return samples


def compared(options: argparse.Namespace) -> int:
    """Return the number of samples over which the mean reward is computed.

    It is the group size, or the number of groups if groups have one sample, whose advantage would be 0.
    """
    return options.group_size if options.group_size > 1 else options.groups


class Phases:
    """Seconds by phase of one step."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._mark = time.perf_counter()

    def __call__(self, name: str) -> None:
        """Add the time since the last call to phase `name`."""
        now = time.perf_counter()
        self.seconds[name] = self.seconds.get(name, 0.0) + now - self._mark
        self._mark = now


@contextmanager
def our_side(case: Case, samples: list[Sample], *, sharing: bool) -> Iterator[Step]:
    options = case.options
    config = Config(
        hf_checkpoint=case.policy,
        bf16=options.bf16,
        lr=1e-30,
        clip_grad=0.0,
        max_tokens_per_gpu=options.max_tokens,
        rollout_max_response_len=options.longest,
        gradient_checkpointing=options.checkpointing,
        kl_loss_coef=options.kl,
        ref_load=case.reference if options.kl and not options.lora else None,
        use_rollout_logprobs=True,
        prefix_sharing=sharing,
        lora_rank=options.lora,
    )
    settings = LossConfig(kl_loss_coef=options.kl, use_rollout_logprobs=True)
    with process_group(600):
        backend = FSDPBackend(config, total_steps=10**6)
        lora = next((feature for feature in backend.features if isinstance(feature, LoraFeature)), None)
        if lora is not None:
            fill_adapter(lora.adapters.parameters().items())
        layout = backend.layout_probe.layout
        rules = PackingRules.of(config, layout=layout, features=backend.features)

        def step() -> dict[str, float]:
            phases = Phases()

            def loss(*args: Any) -> LossOutput:
                phases("forward")
                return LOSSES["grpo"](*args)

            (batches,) = make_batches(samples, rules, rollout=0)
            phases("prepare")
            (batches,) = compute_logprobs(config, backend, [batches])
            phases("logprobs")
            hook = backend.model.register_forward_pre_hook(lambda *_: phases("backward and optimizer"))
            metrics = backend.train_step(batches.packs, loss, settings)
            hook.remove()
            phases("backward and optimizer")
            computed = sum(p.num_tokens if p.shared is None else p.shared.num_tokens for p in batches.packs)
            return {
                "loss": metrics["loss/total"],
                "grad_norm": metrics["optim/grad_norm"],
                "clipped": sum(metrics.get(f"policy/clip_fraction_{side}", 0.0) for side in ("low", "high")),
                "reference_kl": metrics.get("policy/ref_kl", 0.0),
                "computed_tokens": computed,
                **{f"{name}_s": seconds for name, seconds in phases.seconds.items()},
            }

        yield step


@contextmanager
def trl_side(case: Case, samples: list[Sample], *, compact: bool) -> Iterator[Step]:
    options, trainer = case.options, _trl_trainer(case, samples, compact=compact)
    num_micro = len(samples) // options.micro
    trainer._last_loaded_step = trainer.state.global_step
    trainer.current_gradient_accumulation_steps = num_micro  # otherwise set by transformers' training loop
    trainer.model.train()
    trained = [p for p in trainer.model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=0.0, weight_decay=0.0, fused=True)  # also TRL's default

    def step() -> dict[str, float]:
        phases, value = Phases(), 0.0
        for trainer._step in range(num_micro):
            inputs = trainer._prepare_inputs([{"prompt": "", "number": number} for number in range(len(samples))])
            inputs["old_per_token_logps"] = inputs["sampling_per_token_logps"]  # as --use-rollout-logprobs does
            phases("prepare")  # the first call pads, shuffles and, with a KL term, scores
            with torch.autocast(trainer.model.device.type, torch.bfloat16, enabled=options.bf16):
                loss = trainer._compute_loss(trainer.model, inputs)
            phases("forward")
            loss.backward()
            value += loss.item()
            phases("backward and optimizer")
        width = inputs["prompt_ids"].shape[1] + inputs["completion_ids"].shape[1]
        norm = torch.nn.utils.clip_grad_norm_(trained, math.inf)
        optimizer.step()
        optimizer.zero_grad()
        phases("backward and optimizer")
        seconds = {f"{name}_s": seconds for name, seconds in phases.seconds.items()}
        return {"loss": value, "grad_norm": norm.item(), "computed_tokens": width * len(samples), **seconds}

    yield step


def _trl_trainer(case: Case, samples: list[Sample], *, compact: bool) -> Any:
    """Create a GRPOTrainer that uses `samples` instead of its own rollouts."""
    os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"  # silences the warning that rollout_func may change
    import trl
    import trl.trainer.utils
    from datasets import Dataset

    if compact:
        trl.trainer.utils._use_triton = lambda _: True  # makes TRL score completions only
    options = case.options

    def rollout(prompts: list[str], _: Any) -> dict[str, Any]:
        split = [sample.loss_mask.index(True) for sample in samples]
        assert len(prompts) == len(samples)
        return {
            "prompt_ids": [s.token_ids[:at] for s, at in zip(samples, split, strict=True)],
            "completion_ids": [s.token_ids[at:] for s, at in zip(samples, split, strict=True)],
            "logprobs": [s.rollout_logprobs[at:] for s, at in zip(samples, split, strict=True)],
        }

    adapter = {}
    if options.lora:
        from peft import LoraConfig

        adapter["peft_config"] = LoraConfig(r=options.lora, lora_alpha=32, target_modules="all-linear")
    with tempfile.TemporaryDirectory() as folder:
        trainer = trl.GRPOTrainer(
            model=Qwen3ForCausalLM.from_pretrained(case.policy, dtype=torch.float32),
            reward_funcs=lambda number, **_: [samples[i].reward for i in number],
            args=trl.GRPOConfig(
                output_dir=folder,
                loss_type="dapo",
                scale_rewards="none",
                beta=options.kl,
                use_bias_correction_kl=False,
                max_completion_length=options.longest,
                num_generations=compared(options),
                per_device_train_batch_size=options.micro,
                gradient_accumulation_steps=len(samples) // options.micro,
                use_cpu=not torch.cuda.is_available(),
                bf16=options.bf16,
                report_to="none",
                **no_checkpointing(),
            ),
            train_dataset=Dataset.from_dict({"prompt": [""] * len(samples)}),
            processing_class=tiny_tokenizer(),
            rollout_func=rollout,
            **adapter,
        )
    fill_adapter((name, p) for name, p in trainer.model.named_parameters() if p.requires_grad and options.lora)
    if trainer.ref_model is not None:  # TRL can only use the policy's initial weights
        other = Qwen3ForCausalLM.from_pretrained(case.reference, dtype=torch.float32)
        trainer.ref_model.load_state_dict(other.state_dict())
    if options.checkpointing:
        trainer.model.gradient_checkpointing_enable({"use_reentrant": False})
    return trainer


@contextmanager
def trl_async_side(case: Case, samples: list[Sample]) -> Iterator[Step]:
    """TRL's AsyncGRPOTrainer, with packs as large as ours. It has no adapter, reference or checkpointing here."""
    from trl.experimental.async_grpo.async_grpo_trainer import DataCollatorForRollout, TokenBudgetBatcher

    options, trainer = case.options, _trl_async_trainer(case)
    trainer.current_gradient_accumulation_steps = 1  # otherwise set by transformers' training loop
    trainer.model.train()
    optimizer = torch.optim.AdamW(trainer.model.parameters(), lr=0.0, weight_decay=0.0, fused=True)
    rows = [_trl_row(s.token_ids, s.loss_mask, s.rollout_logprobs, s.advantage, s.group_id) for s in samples]
    num_trained = sum(sum(sample.loss_mask) for sample in samples)
    # TRL closes a pack when the next sample does not fit
    unused = [0] * options.max_tokens
    rows.append(_trl_row(unused, unused, unused, 0.0, "none"))

    def step() -> dict[str, float]:
        phases, value, computed = Phases(), 0.0, 0
        batcher = TokenBudgetBatcher(rows, 1, options.max_tokens, trainer._metrics["train"])
        collate = DataCollatorForRollout(trainer.processing_class.pad_token_id)
        batches = [collate([packs]) for packs in batcher]
        phases("prepare")
        for batch in batches:
            inputs = {name: tensor.to(trainer.model.device) for name, tensor in batch.items()}
            share = int((inputs["token_index"] >= 0).sum()) / num_trained
            with torch.autocast(trainer.model.device.type, torch.bfloat16, enabled=options.bf16):
                loss = trainer.compute_loss(trainer.model, inputs) * share  # it averages over the tokens of a pack
            phases("forward")
            loss.backward()
            value += loss.item()
            computed += inputs["input_ids"].numel()
            phases("backward and optimizer")
        norm = torch.nn.utils.clip_grad_norm_(trainer.model.parameters(), math.inf)
        optimizer.step()
        optimizer.zero_grad()
        phases("backward and optimizer")
        seconds = {f"{name}_s": seconds for name, seconds in phases.seconds.items()}
        return {"loss": value, "grad_norm": norm.item(), "computed_tokens": computed, **seconds}

    yield step


def _trl_row(tokens: list[int], mask: list[Any], logprobs: list[Any], advantage: float, group: str) -> dict[str, Any]:
    """Return a sample as TRL's queue holds it."""
    tensors = {"input_ids": torch.tensor(tokens), "completion_mask": torch.tensor(mask).long()}
    old = torch.tensor(logprobs, dtype=torch.float32)
    return {**tensors, "old_log_probs": old, "advantage": advantage, "group_id": group, "metrics": {}}


def _trl_async_trainer(case: Case) -> Any:
    """Create an AsyncGRPOTrainer without rollouts and weight sync. Without a GPU, attention is computed by torch."""
    os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
    import trl.experimental.async_grpo.packing
    import trl.trainer.utils
    from datasets import Dataset
    from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer, async_grpo_trainer

    options = case.options
    if options.lora or options.kl or options.checkpointing:
        raise ValueError("--sides async has no --lora, --kl and --checkpointing")
    if not torch.cuda.is_available():
        trl.experimental.async_grpo.packing._flash_attn = lambda: TorchKernel
        trl.trainer.utils._use_triton = lambda _: True  # makes TRL score completions only
        async_grpo_trainer.get_peak_flops_per_device = lambda *_: None
    with tempfile.TemporaryDirectory() as folder:
        return AsyncGRPOTrainer(
            model=case.policy,
            args=AsyncGRPOConfig(
                output_dir=folder,
                max_steps=1,
                token_budget=options.max_tokens,
                per_device_train_batch_size=1,
                use_cpu=not torch.cuda.is_available(),
                bf16=options.bf16,
                report_to="none",
                **no_checkpointing(),
            ),
            train_dataset=Dataset.from_dict({"prompt": ["", ""]}),
            processing_class=tiny_tokenizer(),
            rollout_worker=SimpleNamespace(rollout_buffer=None),
            weight_transfer=SimpleNamespace(),
        )


class TorchKernel:
    """Replaces the attention kernel of AsyncGRPOTrainer, which needs a GPU, by torch's, one segment at a time."""

    @staticmethod
    def flash_attn_varlen_func(
        query: torch.Tensor,  # [T, heads, head size]
        key: torch.Tensor,  # [K, key heads, head size]: the path of each segment, which ends with the segment
        value: torch.Tensor,
        starts_q: torch.Tensor,
        starts_k: torch.Tensor,
        *_: Any,
        softmax_scale: float,
        **__: Any,
    ) -> torch.Tensor:
        parts, repeats = [], query.shape[1] // key.shape[1]
        bounds = zip(starts_q.tolist(), starts_q.tolist()[1:], starts_k.tolist(), starts_k.tolist()[1:], strict=False)
        for begin, end, begin_k, end_k in bounds:
            q = query[begin:end].transpose(0, 1)
            k, v = (x[begin_k:end_k].repeat_interleave(repeats, 1).transpose(0, 1) for x in (key, value))
            if end - begin == end_k - begin_k:
                causal: dict[str, Any] = {"is_causal": True}
            else:
                mask = torch.ones(end - begin, end_k - begin_k, dtype=torch.bool, device=q.device)
                causal = {"attn_mask": mask.tril(end_k - begin_k - (end - begin))}
            found = torch.nn.functional.scaled_dot_product_attention(
                q[None], k[None], v[None], scale=softmax_scale, **causal
            )
            parts.append(found[0].transpose(0, 1))
        return torch.cat(parts)


def fill_adapter(named: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Fill the adapter with the same nonzero values on every side.

    With the usual initialization (one half zero), only one half has gradients.
    """
    for name, parameter in named:
        name = name.removeprefix("base_model.model.").replace(".default", "")  # peft's
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        values = 0.02 * torch.randn(parameter.shape, generator=generator)
        with torch.no_grad():
            local_shard(parameter).copy_(values)
