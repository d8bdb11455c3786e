"""A requested device, and an installed package with a kernel for it, on the real command line."""

from pathlib import Path

from fsdptrain.overrides import GROUP
from tests.e2e import command
from tests.packages import install

KERNEL = """
from fsdptrain.model.attention.attention import segment_attention
from pathlib import Path

def attention(q, k, v, *, scale, dropout, window, softcap, sinks):
    (Path(__file__).parent / "called").touch()
    options = {"scale": scale, "dropout": dropout, "window": window, "softcap": softcap, "sinks": sinks}
    return segment_attention.original(q, k, v, **options)
"""
KEY = "fsdptrain.model.attention.attention.segment_attention"


def test_a_run_trains_with_the_kernel_of_an_installed_package_and_says_so(tmp_path: Path, checkpoint: Path):
    install(tmp_path, "acme", GROUP, [f"cpu.{KEY} = acme_kernels:attention"], {"acme_kernels": KERNEL})
    flags = ["--hf-checkpoint", str(checkpoint), *command.TINY_RUN, "console", "--num-rollout", "1"]
    result = command.run_with_path([*flags, "--output-dir", str(tmp_path / "run")], tmp_path / "log", tmp_path)
    assert result.code == 0, result.err
    assert f"override: {KEY}: acme_kernels:attention of acme 1.0" in result.err
    assert (tmp_path / "called").exists()


LOGPROBS = """
from fsdptrain.model.logprobs import chunked_logprobs

def logprobs(hidden, weight, labels, *, bias, temperature, softcap, logit_scale, truncation, chunk_size, with_entropy,
             passes):
    raise NotImplementedError
"""


def test_kernels_are_not_compared_with_a_function_that_a_package_replaces(tmp_path: Path, checkpoint: Path):
    """Overrides are installed before features."""
    point = "cpu.fsdptrain.model.logprobs.chunked_logprobs = acme_kernels:logprobs"
    install(tmp_path, "acme", GROUP, [point], {"acme_kernels": LOGPROBS})
    flags = ["--hf-checkpoint", str(checkpoint), *command.TINY_RUN, "--logprob-kernel", "triton"]
    result = command.run_with_path([*flags, "--output-dir", str(tmp_path / "run")], tmp_path / "log", tmp_path)
    assert result.code == 2
    assert "--logprob-kernel triton cannot be used: a plug-in replaces chunked_logprobs; use" in result.err
