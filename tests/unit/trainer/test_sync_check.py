"""Which engines are checked, and what is said where one cannot be."""

import logging
import threading

import pytest
import torch

from fsdptrain.config import Config
from fsdptrain.errors import ConfigError
from fsdptrain.rollout.weight_sync.checksum import checksum
from fsdptrain.rollout.weight_sync.verify import SyncCheck, build_sync_check, make_probe, tolerance
from fsdptrain.testing import FakeRolloutEngine, tiny_tokenizer
from fsdptrain.types import LogProbs


def config(**values) -> Config:
    return Config(hf_checkpoint="any", **values)


def build(given: Config):
    return build_sync_check(given, FakeRolloutEngine(lambda prompt, index: [5]), None, tiny_tokenizer())  # pyright: ignore


def test_an_engine_without_checksums_is_left_alone_with_one_line(caplog):
    with caplog.at_level(logging.WARNING):
        assert build(config()) is None
    assert [record.message.count("--sync-check: nothing is checked") for record in caplog.records] == [1]


def test_a_check_that_was_asked_for_and_cannot_be_made_is_refused():
    with pytest.raises(ConfigError, match=r"--sync-check every: .*`checksums`"):
        build(config(sync_check="every"))
    assert build(config(sync_check="off")) is None


@pytest.mark.parametrize("positions", [None, 32, 128])
@pytest.mark.parametrize("max_tokens", [64, 512, 8192])
def test_the_probe_fits_into_a_pack_and_the_model_and_is_the_same_each_time(max_tokens, positions):
    given = config(max_tokens_per_gpu=max_tokens, rollout_max_response_len=8)
    probe = make_probe(given, tiny_tokenizer(), max_positions=positions)
    assert probe == make_probe(given, tiny_tokenizer(), max_positions=positions)
    assert max(len(p.token_ids) for p in probe.prompts) + probe.sampling.max_tokens <= (positions or 10_000)
    longest = max(len(prompt.token_ids) for prompt in probe.prompts)
    assert len(probe.prompts) * (longest + probe.sampling.max_tokens) <= max(max_tokens, 4 * 164)
    assert sum(len(p.token_ids) + probe.sampling.max_tokens for p in probe.prompts) <= max_tokens
    assert longest <= given.prompt_budget


def test_tolerance_follows_from_the_dtype():
    assert tolerance(torch.float32) == 1e-4
    assert tolerance(torch.bfloat16) == 0.25
    assert tolerance(torch.float16) == pytest.approx(0.031, abs=1e-3)


class Waiting(FakeRolloutEngine):
    """An engine of three copies, none of which answers before all have been asked."""

    def __init__(self) -> None:
        super().__init__(lambda prompt, index: [5])
        self.name = "a copy"
        self._all_asked = threading.Barrier(3)

    def copies(self):
        return [self] * 3

    def checksums(self, names, kind="bits"):
        self._all_asked.wait(timeout=60)
        return {name: checksum(self.weights[name], kind) for name in names}

    def generate(self, prompts, sampling):
        self._all_asked.wait(timeout=60)
        return super().generate(prompts, sampling)

    def cached_tokens(self) -> int:
        return 0


class Agreeing:
    """Scores what an engine has sampled as the engine does."""

    def score(self, batches, model):
        return [LogProbs(batch.rollout_logprobs, None) for batch in batches]


def test_copies_are_looked_at_side_by_side_so_that_waits_do_not_add_up():
    engine, probe = Waiting(), make_probe(config(), tiny_tokenizer())
    check = SyncCheck(engine, Agreeing(), probe, dtype=torch.float32, first_only=False)  # pyright: ignore
    engine.update_weights(check.watch([("weight", torch.ones(2))]), 1)
    check.check(1)
    assert check.metrics() == {"sync/probe_abs_mean": 0.0}


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"lora_sync": "adapter"}, "--lora-sync has no effect"),
        ({"lora_sync": "adapter", "lora_rank": 8}, "needs --rollout-engine vllm"),
        (
            {"lora_sync": "adapter", "lora_rank": 8, "rollout_engine": "vllm", "lora_use_dora": True},
            "vLLM has no DoRA",
        ),
        (
            {
                "lora_sync": "adapter",
                "lora_rank": 8,
                "rollout_engine": "vllm-server",
                "rollout_urls": ["http://1.1.1.1"],
            },
            "needs servers that the run starts",
        ),
    ],
)
def test_adapters_that_no_engine_takes_are_refused(values, said):
    with pytest.raises(ConfigError, match=said):
        config(**values)
