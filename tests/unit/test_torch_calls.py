"""The package calls torch and transformers as the installed versions define. The null GPU has the oldest ones."""

import torch.distributed as dist
import transformers

from tests.torch_calls import mismatches

NEWER = "fsdptrain/features/model_parallel/"  # needs transformers 5.23 and says so


def test_calls_match_the_signatures_of_the_installed_versions() -> None:
    found, bound = mismatches()
    minor = tuple(int(part) for part in transformers.__version__.split(".")[:2])
    expected = [line for line in found if line.startswith(NEWER) and minor < (5, 23)]
    if not dist.is_nccl_available():
        expected += [line for line in found if line.endswith("dist.ProcessGroupNCCL does not exist")]
    assert [line for line in found if line not in expected] == []
    assert bound > 250
