"""vLLM's worker on a CPU, for an engine over several ranks of the trainer. vLLM imports it by name."""

from typing import Any

from vllm.v1.worker.cpu_worker import CPUWorker  # pyright: ignore[reportMissingImports] - an extra


class Worker(CPUWorker):
    """Communicates over gloo, which has timeouts.

    vLLM would use shared memory named after the workers' init method, which is `env://` for every external launcher.
    With a different name per worker it does not use shared memory. [vLLM 0.32]
    """

    def __init__(self, **given: Any) -> None:
        super().__init__(**given | {"distributed_init_method": f"env://:rank-{given['rank']}"})
