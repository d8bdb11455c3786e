"""A vLLM server as a teacher gives the logprobs of its model, and its most likely tokens."""

from collections.abc import Callable, Iterator, Sequence
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


@pytest.fixture(scope="module")
def url(models, tmp_path_factory) -> Iterator[str]:
    model = models["untied"].first
    arguments = ["--model", str(model), "--dtype", "float32", "--enforce-eager", "--max-model-len", "300"]
    arguments += ["--no-enable-chunked-prefill", "--kv-cache-memory-bytes", str(2**26)]
    process = ServerProcess(str(PYTHON), arguments, tmp_path_factory.mktemp("teacher") / "log", api_key=cases.KEY)
    try:
        wait_until_up(process)
        yield process.client.url
    finally:
        process.close()


@pytest.fixture
def teach(models, url: str, monkeypatch: pytest.MonkeyPatch) -> Callable[..., ServerTeacher]:
    """Asks the server to teach: with a key, for a tokenizer with more tokens than the model's, with options."""

    def build(key: str = cases.KEY + "\n", tokens: Sequence[str] = (), **options: Any) -> ServerTeacher:
        monkeypatch.setenv("TEACHER_API_KEY", key)
        path, limits = models["untied"].first, {"max_tokens_per_gpu": 256, "rollout_max_response_len": 64}
        values: dict[str, Any] = {"hf_checkpoint": str(path), "algorithm": "opd", "opd_teacher": url, **limits}
        config = Config(**{**values, **options})
        tokenizer = load_tokenizer(path, trust_remote_code=False)
        tokenizer.add_tokens(list(tokens))
        return ServerTeacher(config, tokenizer, vocab_size=264)

    return build


def test_its_scores_are_those_of_the_model(models, teach: Callable[..., ServerTeacher], alone: None) -> None:
    pack = plain_batch(SEGMENTS, device=torch.device("cpu"))
    [scores] = teach(opd_loss="jsd", opd_top_k=4).score([pack])
    model = AutoModelForCausalLM.from_pretrained(models["untied"].first)
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
        ({"key": "another"}, "HTTP 401"),
        ({"max_tokens_per_gpu": 512}, "serves sequences of 300 tokens"),
        ({"opd_loss": "jsd", "opd_top_k": 200}, "HTTP 400"),  # more than the server's --max-logprobs
        ({"tokens": ["def f"]}, "with another tokenizer"),
    ],
)
def test_a_server_that_cannot_teach_is_refused(
    teach: Callable[..., ServerTeacher], options: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        teach(**options)
