"""The readers of the package, each with what is drawn for it."""

import asyncio
import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import xxhash
from hypothesis import strategies as st

from campaigns.fuzzing.documents import broken, changed, damaged
from campaigns.fuzzing.failures import LawError, reads
from campaigns.fuzzing.options import check_values, command_lines, sets_of_options
from campaigns.fuzzing.supervised import SUPERVISED, build_supervised
from fsdptrain import platform
from fsdptrain.config import Config, DataConfig
from fsdptrain.config.flags import resolve
from fsdptrain.config.recipe import read_recipe
from fsdptrain.data.chat import TurnRenderer
from fsdptrain.data.prompts import make_prompts
from fsdptrain.data.rows import content_hash
from fsdptrain.data.sft import sft_sample
from fsdptrain.data.sources import load_rows
from fsdptrain.data.tables import as_rows
from fsdptrain.fsdp.checkpoint import read_state
from fsdptrain.loggers.jsonl import JsonlLogger
from fsdptrain.loggers.run_info import RunInfo
from fsdptrain.model.loading.files import weight_files
from fsdptrain.model.loading.meta import model_config, resolve_checkpoint
from fsdptrain.rank_variables import read_rank_variables
from fsdptrain.rollout.stop_tokens import stop_tokens
from fsdptrain.tools.report.report import report_rows, title
from fsdptrain.tools.report.timeline import read_bars
from fsdptrain.trainer.run_dir import PROGRESS_FILE, open_folder
from fsdptrain.vllm.server.checks import require_fitting
from fsdptrain.vllm.server.client import VLLMClient
from tests.testing import save_tiny_checkpoint, tiny_tokenizer


@dataclass(frozen=True)
class Target:
    values: st.SearchStrategy[Any]
    check: Callable[[Any], None]  # raises what breaks the law
    share: float = 1.0  # of the examples


def options(folder: Path) -> Target:
    return Target(sets_of_options(), lambda values: reads(lambda: check_values(values)))


def flags(folder: Path) -> Target:
    return Target(command_lines(), lambda words: reads(lambda: resolve(["--hf-checkpoint", "x", *words])))


RECIPE = b"model:\n  hf_checkpoint: x\noptim: {lr: 1.0e-6, adam_beta1: 0.9}\nreward: [math, exact=0.5]\nfp16: false\n"


def recipes(folder: Path) -> Target:
    path = folder / "recipe.yaml"

    def check(content: bytes) -> None:
        path.write_bytes(content)
        reads(lambda: Config(**read_recipe(path)), within=folder)

    return Target(damaged(RECIPE) | st.text(max_size=60).map(lambda text: text.encode(errors="replace")), check)


def queries(folder: Path) -> Target:
    """Options after the ? of --prompt-data."""
    part = st.sampled_from(["size", "max_word_len", "min_word_len", "seed", "x"])
    value = st.text(max_size=8) | st.sampled_from(
        ["3", "-1", "1e3", "[1]", "{a: 1}", "~", "2020-01-01", ".inf", "9" * 30]
    )
    query = st.lists(st.tuples(part, value).map("=".join), max_size=3).map("&".join) | st.text(max_size=12)

    def check(text: str) -> None:
        data = DataConfig(prompt_data=f"reasoning_gym:spell_backward?{text}")
        reads(lambda: load_rows(data, seed=0))

    return Target(query, check)


ROW = {"prompt": "1 + 1?", "label": "2", "meta": {"a": 1}}
CHAT = {"prompt": [{"role": "user", "content": "1 + 1?"}], "label": [{"role": "assistant", "content": "2"}], "meta": {}}
COLUMNS = DataConfig(prompt_data="rows.jsonl", metadata_key="meta", system_prompt="Be brief.")


def rows(folder: Path) -> Target:
    """Rows of Python, or as `datasets` gives them: prompts, labels and metadata of any type."""
    tokenizer = tiny_tokenizer()
    renderer = TurnRenderer(tokenizer, data=COLUMNS)

    def check(found: list[Any]) -> None:
        def read() -> None:
            table = as_rows(found, COLUMNS)
            for prompt in make_prompts([table[i] for i in range(len(found))], tokenizer, data=COLUMNS):
                sft_sample(prompt, tokenizer, renderer=renderer)

        reads(read)

    mapping = changed(ROW).filter(lambda row: isinstance(row, dict))
    return Target(st.lists(mapping | changed(CHAT).filter(lambda row: isinstance(row, dict)), max_size=2), check)


def supervised_rows(folder: Path) -> Target:
    """Supervised rows in each form, with columns of any type."""
    changes = st.one_of(*map(changed, SUPERVISED))
    return Target(changes.filter(lambda row: isinstance(row, dict)), lambda row: reads(lambda: build_supervised(row)))


def row_files(folder: Path) -> Target:
    """JSONL files. `datasets` takes a tenth of a second for each."""
    path = folder / "rows.jsonl"

    def check(content: bytes) -> None:
        path.write_bytes(content)
        (folder / "last").write_text(repr(content))

        def read() -> None:
            table = load_rows(DataConfig(prompt_data=str(path), label_key="", metadata_key=None), seed=0)
            for i in range(len(table)):
                content_hash(table[i])

        try:
            reads(read)
        finally:
            shutil.rmtree(folder.parent / "hub" / "datasets", ignore_errors=True)

    return Target(broken([ROW, ROW, CHAT], lines=True), check, share=0.05)


def config_files(folder: Path) -> Target:
    model = save_tiny_checkpoint(folder / "model")
    good = json.loads((model / "config.json").read_text())

    def check(content: bytes) -> None:
        (model / "config.json").write_bytes(content)
        reads(lambda: resolve_checkpoint(str(model)), within=folder)
        reads(lambda: model_config(model, trust_remote_code=False), within=folder)

    return Target(broken(good), check)


def generation_configs(folder: Path) -> Target:
    model = save_tiny_checkpoint(folder / "model")
    config = model_config(model, trust_remote_code=False)

    def check(content: bytes) -> None:
        (model / "generation_config.json").write_bytes(content)
        reads(lambda: stop_tokens(model, config, trust_remote_code=False), within=folder)

    return Target(broken({"eos_token_id": [1, 2], "temperature": 0.6, "top_k": 20, "do_sample": True}), check)


def indices(folder: Path) -> Target:
    """model.safetensors.index.json. A good file lies outside of the folder, and must not be named."""
    model = save_tiny_checkpoint(folder / "model")
    index = model / "model.safetensors.index.json"
    good = json.loads(index.read_text())
    shutil.copy(next(model.glob("*.safetensors")), folder / "x")
    small = {"metadata": {}, "weight_map": dict(list(good["weight_map"].items())[-3:])}

    def check(content: bytes) -> None:
        index.write_bytes(content)

        def read() -> None:
            outside = [file for file in weight_files(model) if not file.resolve().is_relative_to(model)]
            if outside:
                raise LawError(f"it names {outside[0]}")

        reads(read, within=folder)

    return Target(broken(small), check)


ENTRIES = {
    "__metadata__": {"format": "pt"},
    "a.weight": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]},
    "b.bias": {"dtype": "BF16", "shape": [4], "data_offsets": [16, 24]},
}


def shards(folder: Path) -> Target:
    """Headers of safetensors files."""
    model = save_tiny_checkpoint(folder / "model")
    for path in [*model.glob("*.safetensors"), model / "model.safetensors.index.json"]:
        path.unlink()
    file = model / "model.safetensors"

    def check(drawn: tuple[bytes, int, bytes]) -> None:
        header, error, data = drawn
        file.write_bytes((max(0, len(header) + error) % 2**64).to_bytes(8, "little") + header + data)
        reads(lambda: weight_files(model), within=folder)

    error = st.just(0) | st.sampled_from([1, -1, 100, 2**40, 2**63])
    return Target(st.tuples(broken(ENTRIES), error, st.just(bytes(24)) | st.binary(max_size=30)), check)


STATE = {
    "format": 2,
    "step": 3,
    "world_size": 1,
    "model": {"parameters": 5},
    "optimizer": {"num_updates": 3, "num_skipped": 0, "num_failed": 0, "scaler": {}},
}


def _checkpoint(folder: Path) -> Path:
    path = folder / "run" / "checkpoints" / "step_00000003"
    path.mkdir(parents=True)
    (path / "trainer.json").write_text(json.dumps(STATE))
    (path / PROGRESS_FILE).write_text(json.dumps(PROGRESS))
    _sign(path)
    platform.process_group(10).__enter__()  # of this process; until it ends
    return path


def _sign(path: Path) -> None:
    files = [file for file in path.iterdir() if file.name != "manifest.json"]
    digests = {file.name: [file.stat().st_size, xxhash.xxh3_128(file.read_bytes()).hexdigest()] for file in files}
    (path / "manifest.json").write_text(json.dumps(digests))


def manifests(folder: Path) -> Target:
    path = _checkpoint(folder)
    good = json.loads((path / "manifest.json").read_text())

    def check(content: bytes) -> None:
        (path / "manifest.json").write_bytes(content)
        reads(lambda: read_state(path, STATE["model"]), within=folder)

    return Target(broken(good), check)


def trainer_states(folder: Path) -> Target:
    path = _checkpoint(folder)

    def check(content: bytes) -> None:
        (path / "trainer.json").write_bytes(content)
        _sign(path)
        reads(lambda: read_state(path, STATE["model"]), within=folder)

    return Target(broken(STATE), check)


PROGRESS = {"step": 3, "totals": {"progress/samples": 1.0}, "stream": {"epoch": 0}, "kl_scale": 1.0}


def progress_files(folder: Path) -> Target:
    path = _checkpoint(folder)
    config = Config(hf_checkpoint="x", output_dir=str(folder / "run"))

    def check(content: bytes) -> None:
        (path / PROGRESS_FILE).write_bytes(content)
        reads(lambda: open_folder(config), within=folder)

    return Target(broken(PROGRESS), check)


def run_configs(folder: Path) -> Target:
    """config.yaml of an earlier run: the title of a report, and the comparison on resume."""
    path = _checkpoint(folder)
    config = Config(hf_checkpoint="x", output_dir=str(folder / "run"))
    run = path.parent.parent

    def check(content: bytes) -> None:
        (run / "config.yaml").write_bytes(content)
        reads(lambda: title(run), within=folder)
        reads(lambda: open_folder(config), within=folder)

    good = {"algorithm": {"algorithm": "grpo"}, "model": {"hf_checkpoint": "x"}, "data": {"prompt_data": "y.jsonl"}}
    return Target(damaged(RECIPE) | broken(good), check)


METRICS = [{"step": step, "time": 1.0, "reward/mean": 0.5, "eval/heldout/accuracy": 0.25} for step in (1, 2)]
SPANS = [{"step": step, "stage": "train", "rollout": step, "begin": 1.0, "end": 2.5} for step in (1, 2)]


def metrics(folder: Path) -> Target:
    def check(content: bytes) -> None:
        (folder / "metrics.jsonl").write_bytes(content)
        reads(lambda: report_rows(folder), within=folder)

    return Target(broken(METRICS, lines=True), check)


def timelines(folder: Path) -> Target:
    def check(content: bytes) -> None:
        (folder / "timeline.jsonl").write_bytes(content)
        reads(lambda: read_bars(folder), within=folder)

    return Target(broken(SPANS, lines=True), check)


def resumed_metrics(folder: Path) -> Target:
    """The logger of a resumed run reads the records of the run before."""

    def check(content: bytes) -> None:
        (folder / "metrics.jsonl").write_bytes(content)

        def read() -> None:
            logger = JsonlLogger(RunInfo(folder, "p", "r", 9, resumed_step=1))
            logger.log({"a": 1.0}, 2)
            logger.close()

        reads(read, within=folder)

    return Target(broken(METRICS, lines=True), check, share=0.2)


ANSWER = {
    "choices": [
        {
            "token_ids": [1, 2],
            "finish_reason": "stop",
            "logprobs": {"content": [{"logprob": -1.0}, {"logprob": -2.0}]},
            "weight_versions": [{"version": "run/1", "start": 0, "end": 2}],
            "routed_experts": None,
        }
    ],
    "usage": {"prompt_tokens_details": {"cached_tokens": 3}},
}
INFO = {
    "vllm_config": {
        "instance_id": "a",
        "model_config": {"dtype": "torch.bfloat16", "logprobs_mode": "processed_logprobs", "max_model_len": 9000},
        "parallel_config": {"worker_extension_cls": "x"},
        "scheduler_config": {"policy": "priority"},
    }
}


def _answers(target: Callable[[VLLMClient], Any], good: Any) -> Target:
    """Bodies and statuses of a server."""

    def check(drawn: tuple[int, bytes, str]) -> None:
        status, body, kind = drawn
        response = httpx.MockTransport(lambda _: httpx.Response(status, content=body, headers={"content-type": kind}))

        async def ask() -> None:
            client = VLLMClient("http://127.0.0.1:1")
            client._http = httpx.AsyncClient(transport=response)
            await target(client)

        reads(lambda: asyncio.run(ask()))

    status = st.just(200) | st.sampled_from([201, 204, 302, 401, 404, 500, 503])
    kind = st.sampled_from(["application/json", "text/html; charset=nothing", "", "application/json; charset=utf-16"])
    return Target(st.tuples(status, broken(good), kind), check, share=0.5)


def completions(folder: Path) -> Target:
    return _answers(lambda client: client.generate({"token_ids": [1]}, timeout=5.0), ANSWER)


def descriptions(folder: Path) -> Target:
    config = Config(hf_checkpoint="x", rollout_engine="vllm-server", rollout_urls=["http://127.0.0.1:1"])
    return _answers(lambda client: require_fitting(client, 5.0, config), INFO)


def rank_variables(folder: Path) -> Target:
    names = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"]
    value = st.text(max_size=4) | st.sampled_from(["0", "1", "2", "-1", "29500", "70000", "9" * 5000, "²", "1_0", " 1"])
    return Target(
        st.dictionaries(st.sampled_from(names), value), lambda found: reads(lambda: read_rank_variables(found))
    )


TARGETS: dict[str, Callable[[Path], Target]] = {
    target.__name__: target
    for target in (
        *(
            options,
            flags,
            recipes,
            queries,
            rows,
            supervised_rows,
            row_files,
            config_files,
            generation_configs,
            indices,
            shards,
        ),
        *(manifests, trainer_states, progress_files, run_configs, metrics, timelines, resumed_metrics),
        *(completions, descriptions, rank_variables),
    )
}
