"""SmolLM2-135M-Instruct of `make smollm2`: a pad token that ends text, a default system prompt, tied embeddings."""

from contextlib import nullcontext
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, AutoTokenizer

from fsdptrain.features.sections import PrefixSharingConfig
from fsdptrain.fsdp.backend import FSDPBackend
from fsdptrain.types import LossConfig, Sample
from tests import sweep
from tests.distributed.lora_cases import backend_of, fill, objective, plain_gradients, plain_peft
from tests.distributed.test_fsdp_backend import keep_gradients, make_steps, packs_of_this_rank
from tests.distributed.test_lora import distance
from tests.e2e import command
from tests.exact import Exact, backends_in_float64
from tests.matrix import REAL_MODEL
from tests.tensors import load_files, same
from tests.testing import spawn, wait_until, write_rows

pytestmark = [pytest.mark.matrix, pytest.mark.usefixtures("real_model")]

QUESTIONS = ("What is 3 + 4? Reply with only the number.", "Name three colors.")
ANSWERS = ("7", "The sum of 3 and 4 is 7.", "Red, green and blue.", "Colors, three of them: red, red, and again red.")
SHARED = {"prefix_sharing": True}


def samples() -> list[Sample]:
    tokenizer: Any = AutoTokenizer.from_pretrained(REAL_MODEL)
    made = []
    for question in QUESTIONS:
        turn = [{"role": "user", "content": question}]
        prompt = tokenizer.apply_chat_template(turn, add_generation_prompt=True, return_dict=False)
        for index, answer in enumerate(ANSWERS):
            response = [*tokenizer(answer).input_ids, tokenizer.eos_token_id]
            mask = [False] * len(prompt) + [True] * len(response)
            old = [-1.5 * trained for trained in mask]
            made.append(
                Sample(question, [*prompt, *response], mask, old, advantage=(-1.0) ** index * (1 + 0.3 * index))
            )
    return made


def errors(values: dict[str, Any], exact: bool) -> tuple[float, float]:
    """Errors of the gradients of a GRPO step against plain transformers in float64, one sample at a time.

    Of ours on these ranks, and of plain transformers in float32.
    """
    sweep.RANKS, sweep._samples = dist.get_world_size(), samples
    if exact:
        backends_in_float64()
    with Exact() if exact else nullcontext():
        backend = FSDPBackend(sweep._config(REAL_MODEL, values | {"loss_aggregation": "sequence_mean"}), total_steps=2)
        [step] = make_steps(backend, samples(), max_tokens=256)
        assert step.shared > 0 or not backend._config.section(PrefixSharingConfig).prefix_sharing
        packs = [replace(pack, old_logprobs=pack.rollout_logprobs) for pack in step.packs]
        sweep._packs = lambda copies: packs
        found = sweep._gradients(backend)
    with Exact():  # else norms are in float32
        wanted = sweep._plain_gradients(sweep._plain(REAL_MODEL, torch.float64))
    plain = found if exact else sweep._plain_gradients(sweep._plain(REAL_MODEL, torch.float32))
    return sweep._error(found, wanted), sweep._error(plain, wanted)


@pytest.mark.parametrize(
    ("ranks", "values", "exact"),
    [
        (2, SHARED, True),
        (1, {}, False),
        (2, SHARED | {"fsdp_cpu_offload": True}, False),
        (2, {"layout": "padded", "gradient_checkpointing": True}, False),
    ],
)
def test_gradients_of_a_step_are_those_of_plain_transformers(ranks: int, values: dict[str, Any], exact: bool) -> None:
    error, error_of_plain = spawn(ranks, errors, values, exact)[0]
    assert error < (1e-10 if exact else 3 * error_of_plain)


def adapter_errors() -> tuple[float, float]:
    """The same of adapters on every linear layer, against peft."""
    backend = backend_of(str(REAL_MODEL.parent), "dense", REAL_MODEL.name)
    fill(backend)
    found = keep_gradients(backend._optimizer)
    backend.train_step(packs_of_this_rank(samples(), 256), objective, LossConfig())
    theirs = plain_peft(REAL_MODEL, "dense")
    with Exact():
        _, wanted = plain_gradients(theirs, samples())
    theirs.zero_grad()
    _, plain = plain_gradients(theirs.float(), samples())
    return distance(found, wanted), distance(plain, wanted)


def test_gradients_of_adapters_are_those_of_peft() -> None:
    error, error_of_plain = spawn(1, adapter_errors)[0]
    assert error < 3 * error_of_plain


def test_a_killed_run_resumes_bitwise_and_the_engine_agrees_after_each_update(tmp_path: Path) -> None:
    rows = [{"prompt": f"What is {i} + {7 - i}? Reply with only the number.", "label": "7"} for i in range(8)]
    argv = ["--hf-checkpoint", str(REAL_MODEL), "--prompt-data", str(write_rows(tmp_path / "rows.jsonl", rows))]
    argv += ["--reward", "fsdptrain.tools.demo.sums:last_number", "--reward-workers", "0", "--num-rollout", "5"]
    argv += ["--rollout-batch-size", "2", "--rollout-max-response-len", "12", "--eval-interval", "0", "--no-bf16"]
    argv += ["--lr", "1e-5", "--save-interval", "2", "--log-to"]
    runs = tmp_path / "killed", tmp_path / "whole"
    process = command.start([*argv, "--output-dir", str(runs[0])], tmp_path / "1")
    wait_until((runs[0] / "checkpoints" / "step_00000002").exists, 300, alive=process.is_alive)
    process.kill()
    process.join()
    for number, run in enumerate(runs):
        result = command.run([*argv, "--output-dir", str(run)], tmp_path / f"log {number}")
        assert result.code == 0, result.err
        steps = command.trained(command.metrics_of(run))
        assert [row["step"] for row in steps] == [1, 2, 3, 4, 5]
        assert all(row["mismatch/abs_max"] < 1e-3 for row in steps)
    killed, whole = (load_files(run / "hf") for run in runs)
    assert same(killed, whole)
    assert not same({name: x.bfloat16() for name, x in whole.items()}, load_files(REAL_MODEL))
    if find_spec("lm_eval"):  # brings 33 packages; pip install lm-eval
        check_lm_eval(runs[1] / "hf")


def check_lm_eval(exported: Path) -> None:
    """lm-eval finds the likelihood of an answer that plain transformers finds."""
    from lm_eval.api.instance import Instance  # pyright: ignore
    from lm_eval.models.huggingface import HFLM  # pyright: ignore

    context, answer = "What is 3 + 4?", " The sum of 3 and 4 is 7."
    theirs = HFLM(pretrained=str(exported), dtype="float32", device="cpu", batch_size=1)
    [(found, _)] = theirs.loglikelihood([Instance("loglikelihood", {}, (context, answer), 0)])
    tokenizer: Any = AutoTokenizer.from_pretrained(exported)
    ids, start = tokenizer(context + answer, return_tensors="pt").input_ids, len(tokenizer(context).input_ids)
    logits = AutoModelForCausalLM.from_pretrained(exported, dtype=torch.float32)(ids).logits[0, :-1]
    wanted = logits.log_softmax(-1).gather(1, ids[0, 1:, None])[start - 1 :].sum().item()
    assert found == pytest.approx(wanted, abs=1e-3)
