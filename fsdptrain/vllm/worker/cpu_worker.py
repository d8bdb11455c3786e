"""vLLM's worker on a CPU, for an engine that is spread over the trainer's own ranks (vLLM's external launcher).

Imported by vLLM, by its name.
"""

from typing import Any

from vllm.v1.worker.cpu_worker import CPUWorker  # pyright: ignore[reportMissingImports] - an extra


class Worker(CPUWorker):
    """Speaks with the others over gloo, which has deadlines.

    vLLM's own way through shared memory takes its name from the address at which workers meet. Workers of an external
    launcher all have `env://`, which is no name; where names differ vLLM leaves shared memory alone. [vLLM 0.32]
    """

    def __init__(self, **given: Any) -> None:
        super().__init__(**given | {"distributed_init_method": f"env://:rank-{given['rank']}"})
