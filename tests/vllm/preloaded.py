"""What the fork server imports for ranks that hold vLLM: to import vLLM takes 5 s of CPU time."""

import tests.preloaded  # noqa: F401
from fsdptrain.vllm.in_process import _import_vllm

_import_vllm()
import vllm.model_executor.models.qwen3  # noqa: E402  # pyright: ignore[reportMissingImports]
import vllm.v1.worker.cpu_worker  # noqa: E402, F401  # pyright: ignore[reportMissingImports]
