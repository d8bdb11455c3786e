"""Host memory while a model is loaded onto several ranks and exported again, held against what it may take.

    python benchmarks/saving_and_loading.py                    # 1.7 B parameters, 3.4 GB on disk; 20 GB of memory
    python benchmarks/saving_and_loading.py --quick            # seconds
    python benchmarks/saving_and_loading.py --ranks 8 --layers 40 --hidden 2560 --folder /scratch

It writes random weights of the shape of Qwen3-1.7B, in bfloat16 and several files, loads them in float32 on CPU ranks,
each its own shard, and exports them in bfloat16. Counted is anonymous memory (RssAnon of /proc, every millisecond),
all of the process: interpreter and libraries too. Pages of mapped files are not in it: the kernel takes them back.
The laws: no rank loads with more than its shard + 400 MB, none exports with more than its shard + the largest layer (or
the embedding, if that is larger) in the dtype of the export + 400 MB. The files that come out hold the same bits.
"""

import argparse
import json
import platform
import shutil
import sys
import tempfile
import threading
import time
from pathlib import Path

import psutil
import torch
import torch.distributed as dist
import transformers
from safetensors import safe_open
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3Config

from fsdptrain.fsdp.export import export_hf
from fsdptrain.fsdp.hub_files import HubWriter, plan_files, write_index
from fsdptrain.fsdp.mesh import build_mesh
from fsdptrain.fsdp.shards import local_shard, model_tensors
from fsdptrain.fsdp.wrap import shard_model
from fsdptrain.models.loading import build_meta_model, load_weights
from fsdptrain.models.structure import decoder_layers
from fsdptrain.testing import spawn, tiny_tokenizer

RESULTS = Path(__file__).parent / "results" / "saving_and_loading.json"
MB = 1_000_000
ALLOWED = 400 * MB  # beside what must be held
QUICK = {"ranks": 2, "layers": 2, "hidden": 128, "intermediate": 256, "heads": 4, "vocab": 4096}


class PeakMemory:
    """The most anonymous memory of this process between two moments. [bytes]"""

    def __enter__(self) -> "PeakMemory":
        self.peak = anonymous_memory()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        self._start = time.perf_counter()
        return self

    def _watch(self) -> None:
        while not self._done.wait(0.001):
            self.peak = max(self.peak, anonymous_memory())

    def __exit__(self, *_: object) -> None:
        self.seconds = time.perf_counter() - self._start
        self._done.set()
        self._thread.join()
        self.peak = max(self.peak, anonymous_memory())


def anonymous_memory() -> int:
    return status("RssAnon") + status("RssShmem")


def status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(name)).split()[1])


def write_random(folder: Path, config: Qwen3Config, max_bytes: int) -> None:
    """A checkpoint as a hub has it, without ever holding more than one tensor."""
    config.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    tensors = {name: parameter.detach() for name, parameter in model.named_parameters()}
    files = plan_files([tensors], [0], max_bytes=max_bytes)
    writer = HubWriter(folder, files)
    generator = torch.Generator().manual_seed(0)
    for name, tensor in tensors.items():
        writer.write({name: torch.empty(tensor.shape, dtype=tensor.dtype).uniform_(-0.05, 0.05, generator=generator)})
    writer.finish()
    write_index(folder, files)


def measure(source: Path, target: Path) -> dict:
    """On one rank: bytes and seconds."""
    before = anonymous_memory()
    with PeakMemory() as loading:
        model = build_meta_model(source, trust_remote_code=False, attn_implementation="sdpa")
        options = {"cpu_offload": False, "reshard_after_forward": True, "prefetch": True}
        shard_model(model, build_mesh(1), compute_dtype=torch.bfloat16, **options)
        load_weights(model, source, strategy="shard")
    loaded = anonymous_memory()
    with PeakMemory() as exporting:
        export_hf(model, source, target, dtype=torch.bfloat16)
    shard = sum(local_shard(tensor).nbytes for tensor in model_tensors(model).values())
    return {
        "rank": dist.get_rank(),
        "shard": shard,
        "before": before,
        "load_peak": loading.peak,
        "loaded": loaded,
        "export_peak": exporting.peak,
        "peak_with_file_pages": status("VmHWM"),
        "load_s": round(loading.seconds, 1),
        "export_s": round(exporting.seconds, 1),
        "load_allowed": shard + ALLOWED,
        "export_allowed": shard + largest_layer(model) + ALLOWED,
    }


def largest_layer(model: PreTrainedModel) -> int:
    """In bfloat16: of a decoder layer, or of what is gathered alone outside of them. [bytes]"""
    layers = decoder_layers(model)
    inside = {id(p) for layer in layers for p in layer.parameters()}
    outside = [p.numel() for p in model.parameters() if id(p) not in inside]
    return 2 * max(*outside, *(sum(p.numel() for p in layer.parameters()) for layer in layers))


def same_bits(source: Path, target: Path) -> bool:
    names, where = [], []
    for folder in (source, target):
        found = {}
        for file in sorted(folder.glob("*.safetensors")):
            with safe_open(file, framework="pt") as opened:
                found |= dict.fromkeys(opened.keys(), file)
        names.append(found.keys())
        where.append(found)
    return names[0] == names[1] and all(read(where[0][n], n).equal(read(where[1][n], n)) for n in names[0])


def read(file: Path, name: str) -> torch.Tensor:
    with safe_open(file, framework="pt") as opened:
        return opened.get_tensor(name)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a small model on two ranks, and no file of results")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--intermediate", type=int, default=6144)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--vocab", type=int, default=151_936)
    parser.add_argument("--folder", type=Path, default=None, help="where to write; default: the system's temporary one")
    chosen = parser.parse_args()
    return argparse.Namespace(**{**vars(chosen), **(QUICK if chosen.quick else {})})


def main() -> int:
    args = arguments()
    transformers.utils.logging.disable_progress_bar()
    config = Qwen3Config(
        vocab_size=args.vocab,
        hidden_size=args.hidden,
        intermediate_size=args.intermediate,
        num_hidden_layers=args.layers,
        num_attention_heads=args.heads,
        num_key_value_heads=args.heads // 2,
        head_dim=128,
        tie_word_embeddings=True,
        architectures=["Qwen3ForCausalLM"],
    )
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        source, target = Path(folder) / "source", Path(folder) / "exported"
        source.mkdir()
        write_random(source, config, max_bytes=1000 * MB)
        size = sum(file.stat().st_size for file in source.glob("*.safetensors"))
        if shutil.disk_usage(folder).free < 1.1 * size:
            sys.exit(f"{folder} has no room for another {size / MB:.0f} MB: name a --folder")
        rows = spawn(args.ranks, measure, source, target, timeout=3600.0)
        exact, num_files = same_bits(source, target), len(list(target.glob("*.safetensors")))
    for row in rows:
        print(json.dumps(row))
    laws = {
        "every rank loads with at most its shard + 400 MB": all(r["load_peak"] <= r["load_allowed"] for r in rows),
        "every rank exports with at most shard + largest layer + 400 MB": all(
            r["export_peak"] <= r["export_allowed"] for r in rows
        ),
        "the exported files hold the same bits": exact,
    }
    report = {
        "command": " ".join(["python", *sys.argv]),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "machine": f"{platform.machine()}, {psutil.cpu_count()} cores, {psutil.virtual_memory().total / 2**30:.0f} GiB",
        "shape": {key: value for key, value in vars(args).items() if isinstance(value, int) and key != "quick"},
        "checkpoint_bytes": size,
        "exported_files": num_files,
        "unit": "bytes; seconds on a machine that others used at the same time",
        "laws": laws,
        "ranks": rows,
    }
    print(json.dumps({key: value for key, value in report.items() if key != "ranks"}))
    if not args.quick:
        RESULTS.parent.mkdir(exist_ok=True)
        RESULTS.write_text(json.dumps(report, indent=2) + "\n")
    return 0 if all(laws.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
