"""Export the adapter of a sharded model as a folder for peft's `from_pretrained`."""

import shutil
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from fsdptrain import platform
from fsdptrain.distributed import raise_on_all_ranks
from fsdptrain.errors import CheckpointError
from fsdptrain.features.lora.adapters import Adapters
from fsdptrain.fsdp.export import copy_rest
from fsdptrain.fsdp.export_folder import publish_folder, temporary_of
from fsdptrain.model.loading.materialize import moved
from fsdptrain.model.structure import reshard

WEIGHTS_FILE = "adapter_model.safetensors"  # file name of peft
_OF_THE_WHOLE = frozenset({"generation_config.json"})


@torch.no_grad()
def export_adapter(model: PreTrainedModel, adapters: Adapters, target: Path, *, source: Path, base: str) -> None:
    """Write a peft folder with the tokenizer of `source` and the base model name `base`. Collective.

    The complete folder is renamed to `target`. Raises CheckpointError on every rank.
    """
    reshard(model)
    tensors = {}
    for name, parameter in adapters.parameters().items():
        tensor = moved(parameter, platform.local_device(), torch.float32)
        tensors[name] = (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).cpu().contiguous()
    with raise_on_all_ranks(CheckpointError, f"the adapter cannot be exported to {target}"):
        if dist.get_rank() == 0:
            temporary = temporary_of(target)
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir(parents=True)
            save_file(tensors, temporary / WEIGHTS_FILE, metadata={"format": "pt"})
            adapters.write_config(temporary, base=base)
            copy_rest(source, temporary, but=_OF_THE_WHOLE)
            publish_folder(target)
