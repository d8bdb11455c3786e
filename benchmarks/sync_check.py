"""Cost of --verify-weight-sync every: its share of a step, for each engine, on a rollout of realistic size.

    python benchmarks/sync_check.py --vllm-python .venv-vllm/bin/python     # hf, vllm, vllm-server
    python benchmarks/sync_check.py --quick --engines hf                    # seconds; writes no file

The cost of a check grows with the weights (checksums on both sides), not with the rollout: its probe always has 208
prompt tokens and 16 response tokens. Its share therefore depends on the tokens of a step: here about 30,000, with 2 M
random parameters on a CPU; a GPU trains on hundreds of thousands. Both times are from the same step
(`perf/verify_weight_sync_s`, which includes the checksums computed during the sync, and `perf/step_s`), so that load on
the machine affects both. The result is the median over steps, except the first. With --staleness above 0, generation
continues while the probe runs, and the probe waits in the queue.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from record import ROOT, header, spread, write
from throughput import ENGINES, SIZES

from fsdptrain.tools.report.report import read_metrics
from tests.testing import save_tiny_checkpoint

RESULTS = ROOT / "benchmarks" / "results" / "sync_check.json"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--engines", nargs="+", default=list(ENGINES), choices=ENGINES)
    parser.add_argument("--vllm-python", help="Python of an environment with vLLM and fsdptrain's dependencies")
    parser.add_argument("--staleness", type=int, nargs="+", default=[0, 1], metavar="K")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--quick", action="store_true", help="a small model and rollout; writes no file")
    args = parser.parse_args()
    if args.vllm_python is None and any(engine != "hf" for engine in args.engines):
        parser.error("--vllm-python is missing: without vLLM use --engines hf")
    begin = header()
    rows = [measure(engine, age, args) for engine in args.engines for age in args.staleness]
    if not args.quick:
        write(RESULTS, {**begin, "results": rows})


def measure(engine: str, age: int, args: argparse.Namespace) -> dict[str, Any]:
    """Run one configuration."""
    steps, samples, length, size = (3, 2, 16, "0.1M") if args.quick else (args.steps, 16, 64, "2M")
    with tempfile.TemporaryDirectory() as folder:
        model = save_tiny_checkpoint(Path(folder) / "model", **SIZES[size], max_position_embeddings=512)
        flags: dict[str, Any] = {
            "hf-checkpoint": model, "prompt-data": "reasoning_gym:spell_backward?size=500", "system-prompt": "",
            "reward": "exact", "num-rollout": steps, "rollout-batch-size": 16, "n-samples-per-prompt": samples,
            "rollout-max-response-len": length, "rollout-max-prompt-len": 128, "max-tokens-per-gpu": 2048,
            "lr": 1e-4, "eval-interval": 0,
            "rollout-engine": engine, "verify-weight-sync": "every", "max-staleness": age,
            "output-dir": Path(folder) / "run", "keep-last": 0,
        }  # fmt: skip
        if age:
            flags |= {"mismatch-correction": "icepop"}
        if engine != "hf":
            flags |= {"rollout-kv-cache-gib": 0.25}
        if engine == "vllm-server":
            flags |= {"rollout-num-servers": 1, "rollout-server-python": args.vllm_python}
        argv = [str(part) for name, value in flags.items() for part in (f"--{name}", value)]
        python = args.vllm_python if engine == "vllm" else sys.executable
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "TOKENIZERS_PARALLELISM": "false"}
        command = [str(python), "-m", "fsdptrain", *argv, "--no-bf16", "--no-export", "--log-to"]
        subprocess.run(command, check=True, env=environment)
        rows = [row for row in read_metrics(Path(folder) / "run") if row.get("perf/verify_weight_sync_s")][1:]
    row = {
        "engine": engine,
        "max_staleness": age,
        "model": size,
        "share": spread(r["perf/verify_weight_sync_s"] / r["perf/step_s"] for r in rows),
        "verify_s": round(statistics.median(r["perf/verify_weight_sync_s"] for r in rows), 3),
        "step_s": round(statistics.median(r["perf/step_s"] for r in rows), 2),
        "runs": [{"verify_s": r["perf/verify_weight_sync_s"], "step_s": r["perf/step_s"]} for r in rows],
        "load_average": round(os.getloadavg()[0], 1),
    }
    print(json.dumps(row), flush=True)
    return row


if __name__ == "__main__":
    main()
