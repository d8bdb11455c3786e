"""Time of the logprobs of a pack, forward and backward: torch's operations against the Triton kernels.

    python benchmarks/logprob_kernels.py --json benchmarks/results/logprob_kernels.json    # on a GPU
    python benchmarks/logprob_kernels.py --quick          # on a CPU: torch's operations only, checks that it runs

One row for each implementation and chunk size [tokens]; `products` are the three matrix products alone, the least time
that is possible. The sides alternate. Logprobs and gradients of all rows must agree.
"""

import argparse
import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from record import TOLERANCES, header, peak_mib, spread, start_peak, table, wait_for_device, write

from fsdptrain.model.logit_passes import LogitPasses, TorchPasses
from fsdptrain.model.logprobs import chunked_logprobs

Side = Callable[[], list[torch.Tensor]]


def sides(options: argparse.Namespace) -> dict[str, Side]:
    on_gpu = torch.cuda.is_available()
    device, dtype = ("cuda", torch.bfloat16) if on_gpu else ("cpu", torch.float32)
    torch.manual_seed(0)
    hidden = torch.randn(options.tokens, options.hidden, device=device, dtype=dtype, requires_grad=True)
    weight = torch.empty(options.vocab, options.hidden, device=device, dtype=dtype).uniform_(-0.03, 0.03)
    weight.requires_grad_()
    labels = torch.randint(options.vocab, (options.tokens,), device=device)
    upstream = torch.randn(options.tokens, device=device)
    kinds: dict[str, LogitPasses] = {"eager": TorchPasses()}
    if on_gpu:
        from fsdptrain.features.fused_logprobs.kernels import TritonPasses

        kinds["triton"] = TritonPasses()

    def logprobs(passes: LogitPasses, chunk: int) -> list[torch.Tensor]:
        hidden.grad = weight.grad = None
        values, _ = chunked_logprobs(hidden, weight, labels, chunk_size=chunk, passes=passes)
        values.backward(upstream)
        return [values.detach(), *(x.grad for x in (hidden, weight) if x.grad is not None)]

    def products() -> list[torch.Tensor]:
        with torch.no_grad():
            for part in hidden.split(2048):
                raw = part @ weight.T
                torch.mm(raw, weight)
                torch.mm(raw.T, part)
        return []

    found: dict[str, Side] = {"products": products}
    for name, passes in kinds.items():
        for chunk in options.chunks:
            found[f"{name}, chunks of {chunk}"] = partial(logprobs, passes, chunk)
    return found


def require_agreement(name: str, results: list[torch.Tensor], wanted: list[torch.Tensor]) -> None:
    for one, other in zip(results, wanted, strict=True):
        error = ((one - other).float().norm() / other.float().norm()).item()
        if not error <= TOLERANCES[one.is_cuda]:
            sys.exit(f"{name} differs by {error:.2g} from the first side")


def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    times: dict[str, list[float]] = {}
    peaks: dict[str, float] = {}
    measured, wanted = sides(options), []
    for number in range(options.rounds + 1):
        for name, side in measured.items():
            start_peak()
            wait_for_device()
            start = perf_counter()
            results = side()
            wait_for_device()
            if number:  # the first round compiles
                times.setdefault(name, []).append(1000 * (perf_counter() - start))
                peaks[name] = peak_mib()
            elif results:
                wanted = wanted or results
                require_agreement(name, results, wanted)
    return [{"what": name, "ms": spread(found), "peak_mib": round(peaks[name])} for name, found in times.items()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--quick", action="store_true", help="tiny sizes")
    add("--json", type=Path, help="path of the report")
    add("--tokens", type=int, default=12_288, help="trained tokens")
    add("--hidden", type=int, default=2560)
    add("--vocab", type=int, default=151_936)
    add("--chunks", nargs="+", type=int, default=[512, 2048, 12_288])
    add("--rounds", type=int, default=5)
    options = parser.parse_args()
    if options.quick:
        options.tokens, options.hidden, options.vocab, options.chunks, options.rounds = 64, 32, 512, [16, 64], 2
    begin = header()
    rows = measure(options)
    write(options.json, {**begin, "results": rows})
    print(table([{"what": row["what"], "ms": row["ms"]["median"], "peak MiB": row["peak_mib"]} for row in rows]))
    print(json.dumps({row["what"]: row["ms"] for row in rows}))


if __name__ == "__main__":
    main()
