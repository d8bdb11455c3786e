"""A vLLM server as a teacher gives the logprobs of its model, and its most likely tokens."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from fsdptrain.config import Config
from fsdptrain.errors import ConfigError
from fsdptrain.features.distillation.divergence import with_rest
from fsdptrain.features.distillation.server import ServerTeacher
from fsdptrain.features.distillation.teacher import LOGPROBS, TOP_IDS, TOP_LOGPROBS
from fsdptrain.model.policy import plain_batch
from fsdptrain.trainer.tokenizer import load_tokenizer
from fsdptrain.vllm.server.process import ServerProcess
from tests.vllm.servers import cases
from tests.vllm.servers.conftest import PYTHON, wait_until_up

pytestmark = pytest.mark.matrix
SEGMENTS = [[7, 8, 9, 10, 11], [30, 31], [200, 100, 50, 25, 12, 6, 3]]
ENV, VOCAB = "TEACHER_API_KEY", 264


@pytest.fixture(scope="module")
def url(models, tmp_path_factory) -> Iterator[str]:
    model = models["untied"].first
    arguments = ["--model", str(model), "--dtype", "float32", "--enforce-eager", "--max-model-len", "300"]
    arguments += ["--no-enable-chunked-prefill", "--kv-cache-memory-bytes", str(2**26)]
    process = ServerProcess(str(PYTHON), arguments, tmp_path_factory.mktemp("teacher") / "log", api_key=cases.KEY)
    try:
        wait_until_up(process)
        yield process.url
    finally:
        process.close()


def config_of(model: Path, url: str, **options: Any) -> Config:
    limits: dict[str, Any] = {"max_tokens_per_gpu": 256, "rollout_max_response_len": 64}
    teacher = {"opd_teacher": url}
    return Config(**{"hf_checkpoint": str(model), "algorithm": "opd", **teacher, **limits, **options})


def test_its_scores_are_those_of_the_model(models, url: str, alone: None, monkeypatch: pytest.MonkeyPatch) -> None:
    path = models["untied"].first
    monkeypatch.setenv(ENV, cases.KEY + "\n")
    config = config_of(path, url, opd_loss="jsd", opd_top_k=4)
    teacher = ServerTeacher(config, load_tokenizer(path, trust_remote_code=False), vocab_size=VOCAB)
    pack = plain_batch(SEGMENTS, device=torch.device("cpu"))
    [scores] = teacher.score([pack])
    model = AutoModelForCausalLM.from_pretrained(path)
    with torch.no_grad():
        logits = torch.cat([model(torch.tensor([ids])).logits[0, :-1] for ids in SEGMENTS])
    labels = pack.labels[pack.loss_positions]
    wanted = logits.log_softmax(-1).gather(1, labels[:, None])[:, 0]
    torch.testing.assert_close(scores[LOGPROBS], wanted, rtol=0, atol=1e-4)
    torch.testing.assert_close(scores[TOP_LOGPROBS], with_rest(logits, scores[TOP_IDS]), rtol=0, atol=1e-4)
    torch.testing.assert_close(scores[TOP_LOGPROBS][:, :4], logits.log_softmax(-1).topk(4).values, atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "HTTP 401"),
        ({"max_tokens_per_gpu": 512}, "serves sequences of 300 tokens"),
        ({"opd_loss": "jsd", "opd_top_k": 200}, "HTTP 400"),  # more than the server's --max-logprobs
    ],
)
def test_a_server_that_cannot_teach_is_refused(
    models, url: str, options: dict, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = models["untied"].first
    monkeypatch.setenv(ENV, "another" if words == "HTTP 401" else cases.KEY)
    config = config_of(path, url, **options)
    with pytest.raises(ConfigError, match=words):
        ServerTeacher(config, load_tokenizer(path, trust_remote_code=False), vocab_size=VOCAB)


def test_a_server_with_another_tokenizer_is_refused(models, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path = models["untied"].first
    monkeypatch.setenv(ENV, cases.KEY)
    config = config_of(path, url)
    tokenizer = load_tokenizer(path, trust_remote_code=False)
    tokenizer.add_tokens(["def f"])
    with pytest.raises(ConfigError, match="with another tokenizer"):
        ServerTeacher(config, tokenizer, vocab_size=VOCAB)
