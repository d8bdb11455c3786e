"""Run `fsdptrain [flags]` until its first optimizer step and write the wall and CPU seconds of each part as JSON.

    python benchmarks/timed_run.py REPORT BEGIN [flags]     # BEGIN: time.monotonic() when the command was given

Called by `startup.py`. Runs the real command and times its functions from outside. A nested part is not counted in the
outer one. One process, one device.
"""

import functools
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


def now() -> tuple[float, float]:
    return time.monotonic(), time.process_time()


class Parts:
    """Seconds (wall, CPU) by part, in the order of their start. `rest` is the time outside all parts."""

    def __init__(self, begin: float) -> None:
        self.seconds = {"interpreter": (time.monotonic() - begin, time.process_time())}
        self._begin = begin
        self._inner = [(0.0, 0.0)]  # seconds of nested parts, for each open part

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        before = self.seconds.setdefault(name, (0.0, 0.0))
        start = now()
        self._inner.append((0.0, 0.0))
        try:
            yield
        finally:
            took = _minus(now(), start)
            self.seconds[name] = _plus(before, _minus(took, self._inner.pop()))
            self._inner[-1] = _plus(self._inner[-1], took)

    def around(self, owner: Any, attribute: str, name: str) -> None:
        """Time every call of `owner.attribute` as part `name`."""
        inner: Callable[..., Any] = vars(owner)[attribute]

        @functools.wraps(inner)
        def timed(*args: Any, **kwargs: Any) -> Any:
            with self(name):
                return inner(*args, **kwargs)

        setattr(owner, attribute, timed)

    def report(self) -> dict[str, dict[str, float]]:
        """Return clock -> part -> seconds."""
        totals = {"wall": time.monotonic() - self._begin, "cpu": time.process_time()}
        found = {}
        for place, (clock, total) in enumerate(totals.items()):
            own = {name: seconds[place] for name, seconds in self.seconds.items()}
            found[clock] = {**own, "rest": total - sum(own.values()), "total": total}
        return found


def _plus(a: tuple[float, float], b: tuple[float, float]) -> tuple[float, float]:
    return a[0] + b[0], a[1] + b[1]


def _minus(a: tuple[float, float], b: tuple[float, float]) -> tuple[float, float]:
    return a[0] - b[0], a[1] - b[1]


def main() -> None:
    target, begin, argv = Path(sys.argv[1]), float(sys.argv[2]), sys.argv[3:]
    part = Parts(begin)
    with part("import the command line"):
        from fsdptrain import cli
    part.around(cli, "resolve", "read flags")
    with part("import torch"):
        import torch.distributed  # noqa: F401
    with part("import transformers"):
        import transformers  # noqa: F401
    with part("import the trainer"):
        from fsdptrain import platform
        from fsdptrain.fsdp import backend as fsdp
        from fsdptrain.launch import ranks  # noqa: F401
        from fsdptrain.trainer import components as build
        from fsdptrain.trainer import loop as training
        from fsdptrain.trainer import speed
    part.around(build, "load_tokenizer", "open the tokenizer")
    part.around(build, "build_reward", "import the reward")
    part.around(build, "build_data", "make the prompts")
    part.around(build, "plan_memory", "plan the memory")
    part.around(fsdp, "build_meshes", "build the mesh")
    part.around(fsdp, "load_model", "load the model")
    part.around(fsdp.FSDPBackend, "_verify_model", "probe the model")
    part.around(fsdp, "Optimizer", "make the optimizer")
    part.around(build, "report_fallbacks", "look for fallbacks")
    part.around(speed, "peak_tflops", "measure the device")
    part.around(platform, "seed_everything", "seed")
    loop = training.TrainingLoop
    part.around(loop, "_push_weights", "sync the weights")
    part.around(loop, "_evaluate", "evaluate")
    part.around(loop, "_collect", "first rollout")
    part.around(training, "make_batches", "plan and pack")
    part.around(loop, "_compute_logprobs", "logprobs")
    step = fsdp.FSDPBackend.train_step

    def first_step(*args: Any, **kwargs: Any) -> None:
        with part("first step"):
            step(*args, **kwargs)
        target.write_text(json.dumps(part.report()))
        os._exit(0)  # the report is complete

    fsdp.FSDPBackend.train_step = first_step
    sys.exit(cli.run(argv))


if __name__ == "__main__":
    main()
