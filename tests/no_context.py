"""Import torchao without CUDA, which no process that the fork server forks could use after its first call.

The fork server of the tests imports this module before transformers, which imports torchao where it is installed.
torchao asks for the number of GPUs and their capability then.
"""

import importlib
from importlib.util import find_spec
from unittest import mock

import torch

if torch.accelerator.current_accelerator() is not None and find_spec("torchao") is not None:
    answers = {"is_available": False, "device_count": 64}  # torch registers one name per GPU: spare ones do no harm
    with mock.patch.multiple("torch.cuda", **{name: mock.Mock(return_value=value) for name, value in answers.items()}):
        importlib.import_module("torchao.prototype.mx_formats")
    importlib.import_module("torch.utils._triton").has_triton.cache_clear()
