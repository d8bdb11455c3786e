"""Options of computation in 8-bit floats."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Literal, Self

from pydantic import BeforeValidator, Field

from fsdptrain.config.rules import FSDP_ONLY, TUNING, Condition, Problem
from fsdptrain.config.section import Section

if TYPE_CHECKING:
    from fsdptrain.config.root import Config

Where = Literal["training", "rollout"]
_NOT_TESTED = ("lora_rank", "liger", "fp16", "tensor_parallel_size>1", "expert_parallel_size>1")
_LIST = BeforeValidator(lambda value: [value] if isinstance(value, str) else value)


class Fp8Config(Section):
    """Computation in 8-bit floats: docs/fp8.md."""

    NAME = "fp8"
    ON_RESUME = TUNING

    fp8: Annotated[list[Where], _LIST, FSDP_ONLY] = Field(default=[])
    """Where to compute linear layers in 8-bit floats. `training`: in the forward and backward pass, by torchao.
    `rollout`: vLLM quantizes the weights that it gets. Both: `--fp8 training rollout`."""

    @property
    def trains(self) -> bool:
        return "training" in self.fp8

    @property
    def generates(self) -> bool:
        return "rollout" in self.fp8

    def for_export(self) -> Self:
        return type(self)()  # the weights are stock, and the machine may have no such products

    def problems(self, config: "Config") -> Iterator[Problem]:
        if len(set(self.fp8)) < len(self.fp8):
            yield f"--fp8 {' '.join(self.fp8)} names a place twice: name it once"
        if self.trains:
            for condition in map(Condition.parse, _NOT_TESTED):
                if config.holds(condition):
                    flag = "--" + condition.key.replace("_", "-")
                    yield f"--fp8 training does not work with {flag}: leave one of them out"
        if self.generates:
            yield from self._rollout_problems(config)

    def _rollout_problems(self, config: "Config") -> Iterator[Problem]:
        if config.rollout.engine not in ("vllm", "vllm-server") or not config.generates:
            yield "--fp8 rollout is an option of vLLM: add --rollout-engine vllm or vllm-server, or remove it"
        elif config.value("rollout_urls"):
            yield "--fp8 rollout does not reach servers that run already: start them with --quantization fp8, remove it"
        elif "quantization" in config.value("rollout_engine_args"):
            yield "--fp8 rollout and --rollout-engine-args quantization set the same option: leave one of them out"
