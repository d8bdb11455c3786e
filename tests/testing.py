"""Real ranks, tiny real models and a scripted engine for tests and benchmarks."""

import faulthandler
import fcntl
import io
import json
import multiprocessing
import os
import socket
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from fsdptrain import platform
from fsdptrain.config import Config
from fsdptrain.protocols import Naming
from fsdptrain.types import Completion, Prompt, SamplingParams

# Modules that the fork server imports once. Forked ranks and commands inherit them.
_PRELOADED = ("tests.no_context", "tests.testing", "fsdptrain.trainer.trainer", "reasoning_gym", "math_verify")
PRELOAD = "FSDPTRAIN_TEST_PRELOAD"  # environment variable: additional modules, separated by spaces

CHAT_TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """Return a lossless byte-level tokenizer: 256 bytes, a few special tokens and a chat template."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {
        token: i for i, token in enumerate(["<|pad|>", "<|end|>", "<|user|>", "<|assistant|>", "<|system|>", *alphabet])
    }
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<|pad|>",
        eos_token="<|end|>",
        additional_special_tokens=["<|user|>", "<|assistant|>", "<|system|>"],
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def merging_tokenizer() -> PreTrainedTokenizerFast:
    """Return a byte-level BPE tokenizer with some merges and the special tokens of ChatML, without a chat template."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>", "<tool_call>", "</tool_call>"]
    corpus = ["What is the sum? It is four, I think.\n\n", "Hello there! Hi! assistant user system\n", "The cat sat on"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=330, special_tokens=special, initial_alphabet=alphabet, show_progress=False, min_frequency=1
    )
    backend.train_from_iterator(corpus * 20, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token=special[0], eos_token="<|im_end|>", additional_special_tokens=special
    )


def splitting_tokenizer(text: str) -> PreTrainedTokenizerFast:
    """Return a tokenizer whose tokens are the runs of 1 to 3 bytes of `text`: they begin and end within characters."""
    letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(text)[0][0]
    runs = sorted({letters[i : i + size] for i in range(len(letters)) for size in (1, 2, 3)})
    backend = Tokenizer(models.BPE(vocab={run: i for i, run in enumerate(runs)}, merges=[]))
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend)


def tiny_qwen3(seed: int = 0, **overrides: Any) -> Qwen3ForCausalLM:
    """Return a random float32 Qwen3 with about 0.1 M parameters and the vocabulary of `tiny_tokenizer`."""
    config = Qwen3Config(
        **{
            "vocab_size": 264, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
            "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 1024,
            "tie_word_embeddings": True, "eos_token_id": 1, "pad_token_id": 0, **overrides,
        }
    )  # fmt: skip
    torch.manual_seed(seed)
    return Qwen3ForCausalLM(config).float()


def save_tiny_checkpoint(
    directory: Path, seed: int = 0, *, dtype: torch.dtype = torch.float32, **overrides: Any
) -> Path:
    """Save `tiny_qwen3` and `tiny_tokenizer` as a sharded Hugging Face checkpoint and return `directory`."""
    return save_hub(tiny_qwen3(seed, **overrides).to(dtype), directory, max_shard_size="200KB")


def save_hub(model: PreTrainedModel, directory: Path, **options: Any) -> Path:
    """Save `model` and `tiny_tokenizer` as a Hugging Face checkpoint and return `directory`."""
    model.save_pretrained(directory, **options)
    tiny_tokenizer().save_pretrained(directory)
    return directory


def write_rows(path: Path, rows: Iterable[Any]) -> Path:
    """Write a JSONL file and return `path`."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def tiny_run(checkpoint: Path | str, folder: Path | str, **values: Any) -> Config:
    """The configuration of a run of seconds in this process, in float32."""
    files = {"hf_checkpoint": str(checkpoint), "output_dir": str(folder), "log_to": [], "export": False, "bf16": False}
    sizes = {"rollout_batch_size": 2, "n_samples_per_prompt": 2, "rollout_max_response_len": 4}
    return Config(**{**files, **sizes, "reward_workers": 0, **values})  # reward processes take seconds to start


def wait_until(condition: Callable[[], object], seconds: float = 60.0, *, alive: Callable[[], bool] = lambda: True):
    """Return when `condition` holds. Fails after `seconds`, and where `alive` no longer holds."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert alive(), "it has ended before"
        assert time.monotonic() < deadline, f"not within {seconds:g} s"
        time.sleep(0.01)


class FakeRolloutEngine:
    """Scripted rollout engine for tests. Records the weights that it receives."""

    weight_naming: Naming = "hub"

    def __init__(self, respond: Callable[[Prompt, int], Sequence[int]]) -> None:
        self.respond = respond  # (prompt, sample index) -> response tokens
        self.policy_version = 0
        self.weights: dict[str, Tensor] = {}

    def generate(self, prompts: Sequence[Prompt], sampling: SamplingParams) -> list[Completion]:
        completions: list[Completion] = []
        for prompt in prompts:
            for index in range(sampling.num_samples):
                tokens = list(self.respond(prompt, index))[: sampling.limit_of(prompt)]
                stopped = bool(tokens) and tokens[-1] in sampling.stop_token_ids
                reason = "stop" if stopped else "length"
                completions.append(Completion(prompt.id, tokens, [-1.0] * len(tokens), reason, self.policy_version))
        return completions

    def update_weights(self, weights: Iterable[tuple[str, Tensor]], policy_version: int) -> None:
        self.weights = {name: tensor.detach().cpu().clone() for name, tensor in weights}
        self.policy_version = policy_version

    def sleep(self) -> None: ...

    def wake_up(self) -> None: ...

    def close(self) -> None: ...


def spawn(world_size: int, fn: Callable[..., Any], *args: Any, timeout: float = 600.0) -> list[Any]:
    """Run `fn(*args)` on `world_size` real ranks (gloo, or the device's backend) and return the results by rank.

    `fn` must be importable: a top-level function of a module. `timeout` [s] limits the whole run and each collective.
    Raises RuntimeError with the traceback of the first rank that fails, or on timeout. Leaves no process behind. Groups
    of more than two ranks run one at a time per machine.
    """
    with machine_lock() if world_size > 2 else nullcontext(), reserved_port() as port:
        return _spawn(world_size, fn, args, port, timeout)


@contextmanager
def machine_lock() -> Iterator[None]:
    """Hold a lock that is exclusive among this user's processes on this machine."""
    with open(Path(tempfile.gettempdir()) / f"fsdptrain-ranks-{os.getuid()}.lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # released when the file is closed
        yield


def _spawn(world_size: int, fn: Callable[..., Any], args: tuple[Any, ...], port: int, timeout: float) -> list[Any]:
    context = preloaded_context()
    pipes: list[Connection] = []
    processes = []
    for rank in range(world_size):
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(
            target=_run_rank, args=(theirs, rank, world_size, port, timeout, fn, args), daemon=True
        )
        process.start()
        theirs.close()
        pipes.append(ours)
        processes.append(process)
    try:
        return _collect(pipes, processes, deadline=time.monotonic() + timeout)
    finally:
        for process in processes:
            process.kill()
            process.join()


def preloaded_context() -> ForkServerContext:
    """Return a fork-server context whose processes start in 0.1 s, with torch already imported."""
    context = multiprocessing.get_context("forkserver")
    # only read when the first process starts
    context.set_forkserver_preload([*_PRELOADED, *os.environ.get(PRELOAD, "").split()])
    return context


def no_checkpointing() -> dict[str, bool]:
    """Return the argument of transformers' TrainingArguments that turns checkpointing off, renamed after 5.17."""
    from transformers import TrainingArguments  # takes seconds

    names = ("activation_checkpointing", "gradient_checkpointing")
    return {next(name for name in names if name in TrainingArguments.__dataclass_fields__): False}


def allocated_on_device() -> int:
    """Return the memory of tensors on the device, without the workspaces of cuBLAS, 32 MiB per thread. [bytes]"""
    torch._C._cuda_clearCublasWorkspaces()
    return torch.accelerator.memory_allocated()


@contextmanager
def reserved_port() -> Iterator[int]:
    """Yield an unused TCP port of the loopback interface.

    Nobody else gets it meanwhile, but a server that binds it with SO_REUSEADDR, as torch's store, may listen there.
    """
    with socket.socket() as reserved:
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reserved.bind(("127.0.0.1", 0))
        yield reserved.getsockname()[1]


def rank_variables(rank: int, world_size: int, port: int) -> dict[str, str]:
    """Return the environment variables that torchrun sets for a rank on one machine."""
    return {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
    }  # fmt: skip


def _collect(pipes: list[Connection], processes: Sequence[BaseProcess], deadline: float) -> list[Any]:
    results: dict[int, Any] = {}
    while len(results) < len(pipes):
        waiting = [pipe for rank, pipe in enumerate(pipes) if rank not in results]
        ready = wait(waiting, timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            missing = [rank for rank in range(len(pipes)) if rank not in results]
            raise RuntimeError(f"ranks {missing} did not finish before the deadline")
        for pipe in ready:
            rank = pipes.index(pipe)  # type: ignore[arg-type]
            try:
                ok, payload = pipes[rank].recv()
            except EOFError:
                processes[rank].join(10.0)
                code = processes[rank].exitcode  # negative: of the signal
                raise RuntimeError(f"rank {rank} died with exit code {code}") from None
            if not ok:
                raise RuntimeError(f"rank {rank} failed:\n{payload}")
            results[rank] = torch.load(io.BytesIO(payload), weights_only=False)
    return [results[rank] for rank in range(len(pipes))]


def _run_rank(
    pipe: Connection, rank: int, world_size: int, port: int, timeout: float, fn: Callable[..., Any], args: tuple
) -> None:
    os.environ.update(rank_variables(rank, world_size, port))
    torch.set_num_threads(1)  # ranks share the cores; spinning threads slow each other down
    faulthandler.enable()  # where a rank stood that a library aborts
    try:
        dist.init_process_group(platform.distributed_backend(), timeout=timedelta(seconds=timeout))
        buffer = io.BytesIO()
        torch.save(fn(*args), buffer)
        pipe.send((True, buffer.getvalue()))
        if dist.is_initialized():  # else `fn` has closed it
            dist.destroy_process_group()
    except BaseException:
        pipe.send((False, traceback.format_exc()))
        raise
