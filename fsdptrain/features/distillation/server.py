"""A teacher behind a vLLM server: logprobs of the tokens of a prompt, by `prompt_logprobs`.

The client of the rollout servers is not used: a teacher is any server, without weight updates, health rules or tags.
"""

import asyncio
import math
import os
from collections.abc import Sequence
from typing import Any

import httpx
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from fsdptrain.config import Config
from fsdptrain.distributed import raise_on_all_ranks
from fsdptrain.errors import ConfigError, RolloutError
from fsdptrain.features.distillation.teacher import LOGPROBS, TOP_IDS, TOP_LOGPROBS
from fsdptrain.features.sections import DistillationConfig
from fsdptrain.model.logit_passes import EXCLUDED
from fsdptrain.types import PackedBatch

CONCURRENCY = 64  # requests of a rank in flight; the server queues them
API_KEY = "TEACHER_API_KEY"  # environment variable
TIMEOUT = 600.0  # of one request [s]
RETRIES = 3  # of a connection
LOWEST = -9999.0  # vLLM's value for -inf
SMALLEST_REST = 1e-7  # probability of all tokens but the k most likely, which the server rounds to float32
_ERRORS = (httpx.HTTPError, ValueError, LookupError, TypeError)  # of a request, or of an answer of another form
PROBE = 'The 2 answers: {"x": [1, 2.5]}\n\n\tÄ 世界 <|im_end|> def f(): return x**2  # 10,000'


class ServerTeacher:
    """Asks the server for each sequence of a pack once."""

    def __init__(self, config: Config, tokenizer: PreTrainedTokenizerBase, *, vocab_size: int) -> None:
        """Reach the server, compare tokenizers on a probe text, and ask for its logprobs. Raises ConfigError.

        vocab_size: of the policy's head.
        """
        options = config.section(DistillationConfig)
        assert options.teacher is not None
        key = os.environ.get(API_KEY, "").strip()  # a file's last line break would be shown in an error
        self._headers = {} if not key else {"Authorization": f"Bearer {key}"}
        self._url, self._vocab_size = options.teacher.rstrip("/"), vocab_size
        self._top_k = options.top_k if options.loss == "jsd" else 0
        try:
            with httpx.Client(headers=self._headers, timeout=60.0, trust_env=False) as client:
                served = _json(client.get(f"{self._url}/v1/models"))["data"][0]
                self._model, limit = served["id"], served["max_model_len"]
                body = {"model": self._model, "prompt": PROBE, "add_special_tokens": False}
                theirs = _json(client.post(f"{self._url}/tokenize", json=body))["tokens"]
                _json(client.post(f"{self._url}/v1/completions", json=self._body(theirs)))
        except _ERRORS as error:
            raise ConfigError(
                f"--opd-teacher {self._url} is no vLLM server that can be reached: {type(error).__name__}: {error}"
            ) from error
        ours = tokenizer(PROBE, add_special_tokens=False)["input_ids"]
        if list(theirs) != list(ours):
            raise ConfigError(
                f"--opd-teacher {self._url} serves {self._model} with another tokenizer than --hf-checkpoint: a probe "
                f"text has {len(theirs)} tokens there and {len(ours)} here, {theirs[:8]} and {ours[:8]}"
            )
        if limit <= config.longest_sequence:
            raise ConfigError(
                f"--opd-teacher {self._url} serves sequences of {limit} tokens, and this run may have "
                f"{config.longest_sequence} and one more: lower --rollout-max-prompt-len, or raise --max-model-len of "
                "the server"
            )

    @property
    def line(self) -> str:
        return f"teacher: {self._model} at {self._url}"

    def _body(self, ids: Sequence[int]) -> dict[str, Any]:
        return {"model": self._model, "prompt": ids, "max_tokens": 1, "prompt_logprobs": self._top_k}

    def score(self, packs: Sequence[PackedBatch]) -> list[dict[str, Tensor]]:
        """See `ModelTeacher.score`."""
        sequences = [ids.tolist() for pack in packs for ids in pack.input_ids.split(pack.seqlens)]
        with raise_on_all_ranks(RolloutError, "--opd-teacher"):
            answers = iter(asyncio.run(self._ask_all(sequences)))
            return [self._scores(pack, [next(answers) for _ in pack.seqlens]) for pack in packs]

    async def _ask_all(self, sequences: Sequence[list[int]]) -> list[list[Any]]:
        slots = asyncio.Semaphore(CONCURRENCY)
        async with httpx.AsyncClient(
            headers=self._headers,
            timeout=httpx.Timeout(TIMEOUT, connect=30.0, pool=None),
            trust_env=False,
            transport=httpx.AsyncHTTPTransport(retries=RETRIES, limits=httpx.Limits(max_connections=CONCURRENCY)),
        ) as client:
            return await asyncio.gather(*(self._ask(client, slots, ids) for ids in sequences))

    async def _ask(self, client: httpx.AsyncClient, slots: asyncio.Semaphore, ids: list[int]) -> list[Any]:
        """Return an entry for each token: None for the first one, then {token id: {logprob: ...}}."""
        if len(ids) < 2:  # the pack of a rank without samples
            return [None] * len(ids)
        async with slots:
            try:
                answer = _json(await client.post(f"{self._url}/v1/completions", json=self._body(ids)))
                found = answer["choices"][0]["prompt_logprobs"]
                if len(found) != len(ids):
                    raise ValueError(f"{len(found)} prompt_logprobs for {len(ids)} tokens")
                return found
            except _ERRORS as error:
                raise RolloutError(
                    f"--opd-teacher {self._url} gave no logprobs for {len(ids)} tokens: {type(error).__name__}: {error}"
                ) from error

    def _scores(self, pack: PackedBatch, answers: Sequence[list[Any]]) -> dict[str, Tensor]:
        following = [entry for answer in answers for entry in (*answer[1:], None)]  # of the label of each token
        labels, places = pack.labels.tolist(), pack.loss_positions.tolist()
        has_loss = pack.loss_mask[pack.loss_positions].tolist()  # False: the filler of a pack without loss tokens
        entries = [
            following[t] if loss else {str(labels[t]): {"logprob": 0.0}}
            for t, loss in zip(places, has_loss, strict=True)
        ]
        values = torch.tensor([_logprob(entry, labels[t]) for entry, t in zip(entries, places, strict=True)])
        if not self._top_k:
            return {LOGPROBS: values}
        likeliest = [
            sorted(((x["logprob"], int(i)) for i, x in e.items() if int(i) < self._vocab_size), reverse=True)[
                : self._top_k
            ]
            for e in entries
        ]
        width = max(map(len, likeliest))
        ids, logprobs = (torch.tensor(x) for x in zip(*(_padded(row, width) for row in likeliest), strict=True))
        rest = (1 - logprobs.double().exp().sum(1, keepdim=True)).clamp(min=SMALLEST_REST).log()
        with_rest = torch.cat([logprobs, rest.to(logprobs.dtype)], dim=1)  # [M, k + 1]
        return {LOGPROBS: values, TOP_IDS: ids, TOP_LOGPROBS: with_rest}


def _padded(row: list[tuple[float, int]], width: int) -> tuple[list[int], list[float]]:
    """Add other tokens with probability 0. [width] each"""
    ids, logprobs = [i for _, i in row], [x for x, _ in row]
    others = [i for i in range(width + len(ids)) if i not in ids][: width - len(ids)]
    return ids + others, logprobs + [EXCLUDED] * len(others)


def _logprob(entry: dict[str, Any], token: int) -> float:
    value = float(entry[str(token)]["logprob"])
    if not (math.isfinite(value) and value > LOWEST):
        raise RolloutError(f"--opd-teacher gave the logprob {value} for token {token}")
    return value


def _json(answer: httpx.Response) -> Any:
    if answer.is_error:
        raise ValueError(f"HTTP {answer.status_code}: {answer.text[:300]}")
    return answer.json()
