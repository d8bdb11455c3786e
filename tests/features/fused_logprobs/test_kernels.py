"""The fused kernels: values in Triton's interpreter, and compilation by ptxas for an H100."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from fsdptrain.config import Config
from fsdptrain.errors import ConfigError
from fsdptrain.features.fused_logprobs.config import FusedLogprobsConfig
from fsdptrain.features.fused_logprobs.feature import compare, load_passes

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton: Linux only")


@pytest.mark.slow
def test_the_kernels_compute_what_torch_does() -> None:
    """The cases of interpreter_cases.py."""
    cases = Path(__file__).with_name("interpreter_cases.py")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(cases)]
    ran = subprocess.run(
        command, env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True, timeout=300
    )
    assert ran.returncode == 0, ran.stdout


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_device_computes_what_torch_does(dtype: torch.dtype) -> None:
    compare(load_passes(), torch.device("cuda"), dtype)


def test_a_split_head_and_megatron_use_no_kernels() -> None:
    with pytest.raises(ConfigError, match="--logprob-kernel"):
        Config(hf_checkpoint="any", logprob_kernel="triton", tensor_parallel_size=2)
    config = Config(hf_checkpoint="any", tensor_parallel_size=2)
    assert not config.section(FusedLogprobsConfig).tries(config, on_gpu=True)
    config = Config(hf_checkpoint="any", backend="megatron")
    assert not config.section(FusedLogprobsConfig).tries(config, on_gpu=True)
    config = Config(hf_checkpoint="any")
    assert config.section(FusedLogprobsConfig).tries(config, on_gpu=True)
    assert not config.section(FusedLogprobsConfig).tries(config, on_gpu=False)


COMMON = {"FIRST": 1.4, "SECOND": 1.0, "CAPPED": False, "BLOCK": 4096}


@pytest.mark.parametrize("capped", [False, True])
@pytest.mark.parametrize("truncated", [False, True])
def test_the_kernels_are_compiled_for_hopper_without_spills(
    capped: bool, truncated: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    import triton.language as tl

    from fsdptrain.features.fused_logprobs import kernels

    more = {**COMMON, "CAPPED": capped, "EXACT": tl.float32, "TRUNCATED": truncated}
    row = dict.fromkeys(("floors", "logprobs", "logsumexps", "entropies", "grads_logprobs", "grads_entropy"), "*fp32")
    types = {"raw": "*bf16", "labels": "*i64", "stride": "i32", "num_columns": "i32", "z": "*fp32", **row}
    for kernel, constants in (
        (kernels.forward_kernel, {**more, "WITH_ENTROPY": True}),
        (kernels.backward_kernel, {**more, "OF_LOGPROBS": True, "OF_ENTROPY": True}),
        (kernels.transform_kernel, {name: more[name] for name in (*COMMON, "EXACT")}),
    ):
        said = compile_for_hopper(kernel, types, constants, tmp_path)
        assert "0 bytes spill stores, 0 bytes spill loads" in said, said


def compile_for_hopper(kernel: Any, types: dict[str, str], constants: dict[str, Any], folder: Path) -> str:
    """Compile a kernel for sm_90a with the ptxas of the triton package, and return its report on registers."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = kernel.arg_names
    source = ASTSource(
        fn=kernel,
        signature={name: "constexpr" if name in constants else types[name] for name in names},
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in ("raw", "stride", "num_columns")},
    )
    built = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 8})
    ptx = folder / "kernel.ptx"
    ptx.write_text(str(built.asm["ptx"]))
    ptxas = Path(str(triton.__file__)).parent / "backends/nvidia/bin/ptxas"
    command = [str(ptxas), "-v", "--gpu-name=sm_90a", str(ptx), "-o", str(folder / "kernel.cubin")]
    return subprocess.run(command, capture_output=True, text=True, check=True).stderr
