"""The embedded engine generates the same tokens as the stock model, regardless of the rest of the batch."""

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from fsdptrain.errors import RolloutError
from fsdptrain.model.sizes import expert_choice
from fsdptrain.rollout.embedded.engine import HFEngine
from fsdptrain.rollout.stop_strings import cut_at_stop
from fsdptrain.types import Completion, Prompt, SamplingParams
from tests import zoo
from tests.exact import Exact, in_float64
from tests.matrix import only
from tests.testing import allocated_on_device, tiny_qwen3, tiny_tokenizer

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
SAMPLING = SamplingParams(num_samples=4, max_tokens=24, seed=5)
ENDING = replace(SAMPLING, stop_token_ids=tuple(range(5, 25)))  # rows end often, and are dropped from the cache
GREEDY = replace(SAMPLING, num_samples=1, temperature=0.0)


def make_prompts(lengths: list[int]) -> list[Prompt]:
    generator = torch.Generator().manual_seed(7)
    return [
        Prompt(f"p{i}", torch.randint(5, zoo.VOCAB_SIZE, (length,), generator=generator).tolist(), "")
        for i, length in enumerate(lengths)
    ]


PROMPTS = make_prompts([7, 30, 1, 18, 30, 3])


def make_engine(model: PreTrainedModel, folder: Path, *, dtype: torch.dtype = torch.float32) -> HFEngine:
    model.save_pretrained(folder)
    engine = HFEngine(folder, dtype=dtype, device=CPU)
    engine.update_weights(model.state_dict().items(), 1)
    return engine


def exact_engine(model: PreTrainedModel, folder: Path) -> HFEngine:
    """Convert `model` to float64 and return an engine with it. Compute under `Exact`."""
    engine = make_engine(in_float64(model), folder, dtype=torch.float64)
    if expert_choice(model.config):
        engine.model.set_experts_implementation("eager")
    for buffer, exact in zip(model.buffers(), engine.model.buffers(), strict=True):
        buffer.copy_(exact)  # `model` computed its own in float32
    return engine


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny_qwen3().eval()


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("checkpoint")


@pytest.fixture
def engine(model, folder) -> HFEngine:
    return make_engine(model, folder)


@pytest.fixture
def exact() -> Iterator[None]:
    with Exact():
        yield


@torch.no_grad()
def plain_logprobs(model: PreTrainedModel, prompt: Prompt, completion: Completion, temperature: float) -> torch.Tensor:
    """Return logprobs of the response from one forward pass over the whole sequence, without cache and padding."""
    ids = torch.tensor([prompt.token_ids + completion.token_ids])
    logprobs = (model(ids, use_cache=False).logits[0, :-1].float() / temperature).log_softmax(-1)
    return logprobs.gather(-1, ids[0, 1:, None]).squeeze(-1)[len(prompt.token_ids) - 1 :]


def assert_same(ours: list[Completion], theirs: list[Completion]) -> None:
    """Assert equal tokens, and equal logprobs within rounding."""
    for one, other in zip(ours, theirs, strict=True):
        assert one == replace(other, logprobs=one.logprobs)
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-11)


@pytest.mark.parametrize("name", only(["qwen3_next", "gpt_oss"], zoo.ARCHITECTURES))
def test_every_architecture_generates_what_the_stock_model_does(name, tmp_path):
    model = zoo.build(name)
    engine = make_engine(model, tmp_path)
    ours, theirs = ([*x.named_parameters(), *x.named_buffers()] for x in (engine.model, model))
    assert [key for key, _ in ours] == [key for key, _ in theirs]
    assert all(torch.equal(tensor, expected) for (_, tensor), (_, expected) in zip(ours, theirs, strict=True))

    for prompt, completion in zip(PROMPTS, engine.generate(PROMPTS, GREEDY), strict=True):
        output = model.generate(torch.tensor([prompt.token_ids]), do_sample=False, max_new_tokens=24, pad_token_id=0)
        assert completion.token_ids == output[0, len(prompt.token_ids) :].tolist()

    asked = [prompt for prompt in PROMPTS for _ in range(4)]
    with Exact():
        made = exact_engine(model, tmp_path).generate(PROMPTS, replace(ENDING, temperature=0.7))
        for prompt, completion in zip(asked, made, strict=True):
            expected = plain_logprobs(model, prompt, completion, temperature=0.7)
            assert completion.logprobs == pytest.approx(expected.tolist(), abs=1e-11)


@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize("name", only(["gemma3", "qwen3_next"], ["qwen3", "gemma3", "qwen3_next"]))
def test_completion_does_not_depend_on_what_is_generated_beside_it(name, tmp_path):
    engine, few = exact_engine(zoo.build(name), tmp_path), replace(ENDING, max_tokens=12)
    together = engine.generate(PROMPTS, few)
    alone = [completion for prompt in PROMPTS for completion in engine.generate([prompt], few)]
    assert_same(together, alone)
    backward = engine.generate(PROMPTS[::-1], few)[::-1]
    assert_same(together, [c for prompt in range(len(PROMPTS)) for c in backward[4 * prompt : 4 * prompt + 4][::-1]])
    engine.max_batch_tokens = 42  # one row of the longest prompt: chunks of one to two rows, within a group too
    assert_same(together, engine.generate(PROMPTS, few))


def test_completions_depend_on_the_seed_and_the_number_of_the_sample_only(engine):
    few = engine.generate(PROMPTS, SAMPLING)
    assert few == engine.generate(PROMPTS, SAMPLING)
    others = engine.generate(PROMPTS, replace(SAMPLING, seed=6))
    assert all(one.token_ids != other.token_ids for one, other in zip(few, others, strict=True))
    assert engine.generate([], SAMPLING) == []
    assert len({tuple(completion.token_ids) for completion in few}) == len(few)
    more = engine.generate(PROMPTS, replace(SAMPLING, num_samples=6, max_tokens=30))
    for i, prompt in enumerate(PROMPTS):
        for k in range(4):
            short, long = few[4 * i + k], more[6 * i + k]
            assert short.prompt_id == long.prompt_id == prompt.id
            assert long.token_ids[: len(short.token_ids)] == short.token_ids


@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize(("name", "changes"), [("qwen3", {}), ("gpt2", {"n_positions": 33})])
def test_the_limit_of_a_prompt_cuts_its_completions_only(name, changes, tmp_path):
    """The longest prompt ends at the last position of gpt2 and stays in the cache while others continue."""
    engine = exact_engine(zoo.build(name, **changes), tmp_path)
    prompts = [replace(PROMPTS[i], max_tokens=limit) for i, limit in ((0, 20), (1, 3), (2, None), (3, 15), (5, 24))]
    sampling = replace(SAMPLING, max_tokens=10)
    for i, one in enumerate(engine.generate(prompts, sampling)):
        prompt = prompts[i // 4]
        limit = min(10, prompt.max_tokens or 10)
        alone = engine.generate([replace(prompt, max_tokens=None)], replace(sampling, max_tokens=limit))
        assert_same([one], [alone[i % 4]])


def test_completions_stop_at_eos_and_at_stop_ids(engine, model):
    free = engine.generate(PROMPTS, replace(SAMPLING, max_tokens=64))
    assert {completion.finish_reason for completion in free} == {"stop", "length"}
    for completion in free:
        ended = 1 in completion.token_ids  # eos_token_id of the tiny model
        assert completion.finish_reason == ("stop" if ended else "length")
        assert completion.token_ids.index(1) == len(completion.token_ids) - 1 if ended else True
        assert len(completion.token_ids) == len(completion.logprobs) == (len(completion.token_ids) if ended else 64)

    extra = tuple(range(50, 80))
    stopped = engine.generate(PROMPTS, replace(SAMPLING, max_tokens=64, stop_token_ids=extra))
    for whole, cut in zip(free, stopped, strict=True):
        ends = [i for i, token in enumerate(whole.token_ids) if token in {1, *extra}]
        assert cut.token_ids == whole.token_ids[: ends[0] + 1 if ends else None]
        assert cut.finish_reason == ("stop" if ends else "length")


def test_completions_stop_at_stop_strings(engine, folder):
    tokenizer, long = tiny_tokenizer(), replace(SAMPLING, max_tokens=64)
    tokenizer.save_pretrained(folder)
    free = engine.generate(PROMPTS, long)
    pair = next(x for c in free for x in re.findall("[!-~]{2}", tokenizer.decode(c.token_ids)))
    stop = ("a", "e", "?", pair)
    stopped = engine.generate(PROMPTS, replace(long, stop=stop))
    for whole, one in zip(free, stopped, strict=True):
        cut = cut_at_stop(whole, stop, tokenizer)
        assert (one.token_ids, one.finish_reason) == (cut.token_ids, cut.finish_reason)
    assert any(tokenizer.decode(c.token_ids).endswith(pair) for c in stopped)


@pytest.mark.parametrize("where", ["generation_config", "config list", "tokenizer", "nowhere"])
def test_stop_ids_come_from_the_checkpoint(where, tmp_path):
    model = tiny_qwen3(eos_token_id=[9, 11] if where == "config list" else None)
    model.save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").unlink()
    if where == "generation_config":
        model.generation_config.eos_token_id = [9, 10]
        model.generation_config.save_pretrained(tmp_path)
    if where == "tokenizer":
        tiny_tokenizer().save_pretrained(tmp_path)
    engine = HFEngine(tmp_path, dtype=torch.float32, device=CPU)
    expected = {"generation_config": (9, 10), "config list": (9, 11), "tokenizer": (1,), "nowhere": ()}
    assert engine.stop_token_ids == expected[where]


def test_weights_that_do_not_fit_are_named_after_reading_all(engine, model):
    weights = model.state_dict()
    del weights["model.norm.weight"]
    weights["model.extra"] = torch.zeros(1)
    weights["model.layers.0.mlp.up_proj.weight"] = torch.zeros(2, 2)
    stream = iter(weights.items())
    with pytest.raises(RolloutError) as caught:
        engine.update_weights(stream, 2)
    message = str(caught.value)
    assert "1 missing: model.norm.weight" in message
    assert "1 unknown: model.extra" in message
    assert "model.layers.0.mlp.up_proj.weight [2, 2] for [128, 64]" in message
    assert "\n" not in message
    assert next(stream, None) is None  # iterating is collective
    with pytest.raises(RolloutError, match="no weights"):
        engine.generate(PROMPTS, SAMPLING)


@pytest.mark.parametrize("is_new", [False, True])
def test_a_new_or_sleeping_engine_has_no_weights_and_refuses_until_they_come(engine, model, folder, is_new):
    expected = engine.generate(PROMPTS, SAMPLING)
    if is_new:
        engine = HFEngine(folder, dtype=torch.float32, device=CPU)
    else:
        engine.sleep()
        assert all(buffer.is_meta for buffer in engine.model.buffers())
    assert all(parameter.is_meta for parameter in engine.model.parameters())
    for wake in [lambda: None, engine.wake_up]:
        wake()
        with pytest.raises(RolloutError, match="update_weights"):
            engine.generate(PROMPTS, SAMPLING)
    engine.update_weights(model.state_dict().items(), 1)
    assert engine.generate(PROMPTS, SAMPLING) == expected


@pytest.mark.parametrize(
    ("prompt", "sampling", "message"),
    [
        (Prompt("void", [], ""), SAMPLING, "'void' has no tokens"),
        (Prompt("added", [5, 5000], ""), SAMPLING, "'added' has token 5000, and the model has .* leave them out"),
        (Prompt("long", [5] * 1001, ""), SAMPLING, "1024 positions.*--rollout-max-prompt-len"),
        (Prompt("wide", [5] * 300, ""), SAMPLING, "--rollout-max-batch-tokens 320.*--rollout-max-response-len 24"),
    ],
)
def test_impossible_requests_are_one_line_with_the_flag(engine, prompt, sampling, message):
    if prompt.id == "wide":
        engine.max_batch_tokens = 320
    with pytest.raises(RolloutError, match=message) as caught:
        engine.generate([prompt], sampling)
    assert "\n" not in str(caught.value)


def test_logits_that_are_not_finite_stop_the_run(engine, model):
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    weights["model.norm.weight"].fill_(torch.nan)
    engine.update_weights(weights.items(), 3)
    with pytest.raises(RolloutError, match="not finite under policy version 3"):
        engine.generate(PROMPTS, SAMPLING)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_completions_agree_and_sleep_frees_the_memory(model, folder):
    model.save_pretrained(folder)
    engine = HFEngine(folder, dtype=torch.float32, device=torch.device("cuda"))
    before = allocated_on_device()
    engine.update_weights(model.state_dict().items(), 1)
    asked = [prompt for prompt in PROMPTS for _ in range(4)]
    for prompt, completion in zip(asked, engine.generate(PROMPTS, ENDING), strict=True):
        expected = plain_logprobs(model, prompt, completion, temperature=1.0)
        torch.testing.assert_close(torch.tensor(completion.logprobs), expected, rtol=0.0, atol=1e-4)
    engine.sleep()
    assert allocated_on_device() <= before
