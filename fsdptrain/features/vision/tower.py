"""Encode the images of a pack with the vision tower and insert them at their token positions.

The tower runs outside the model's forward, through `get_image_features`, because the forward would pass it the
boundaries of the text. Its layers are sharded, so every rank must run it equally often: a pack without images encodes a
blank one. Its output reaches no token. If the tower is trained, it is added to the loss times zero, so that every rank
has gradients to reduce.

Image positions come from the prompt, through `Images.token_types`, and not from a token id: if the policy samples the
image token, that is a text token and not an image.
"""

import inspect
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel

from fsdptrain.data.images import join_images
from fsdptrain.errors import ConfigError
from fsdptrain.feature import Rows
from fsdptrain.model.rows import PackedRows, PaddedRows
from fsdptrain.model.structure import base_model, vision_parameters
from fsdptrain.types import Images, PackedBatch, Prompt

TYPES = ("mm_token_type_ids", "token_type_ids")  # argument names of different models
_ENCODED = "mm_encoder_outputs"  # the argument for the output of `get_image_features`
_MROPE = "get_rope_index"


class Vision:
    """The vision tower of one model. Create it before sharding, after parameters are frozen."""

    def __init__(self, model: PreTrainedModel, blank: Images) -> None:
        """blank: an image for packs without images. Raises ConfigError for a model without a usable tower."""
        refuse_blind(model)
        self._base: Any = base_model(model)
        self._blank = blank
        self._trained = any(p.requires_grad for p in vision_parameters(model).values())
        if self._trained:
            model.get_input_embeddings().register_forward_hook(_lead_to_the_tower)
        self._takes = inspect.signature(self._base.forward).parameters
        self._types: Tensor | None = None  # [R, S] of the current pack
        self._zero: Tensor | None = None  # added to the hidden states of a pack without images
        self._base.register_forward_hook(self._add_zero)
        image_token_id: int = model.config.image_token_id
        self._base.get_placeholder_mask = _by_types(
            self._base.get_placeholder_mask, lambda: self._types, image_token_id
        )

    def inputs(self, batch: PackedBatch, rows: Rows) -> dict[str, Any]:
        """Run the tower and return the additional arguments of the base model."""
        images, self._types, self._zero = batch.images, None, None
        shown = self._blank.map(lambda x: x.to(batch.input_ids.device)) if images is None else images
        with nullcontext() if self._trained else torch.no_grad():
            encoded = self._base.get_image_features(**shown.inputs, return_dict=True)
        if images is None:
            if self._trained:  # summed after the product: the sum of the features may overflow in fp16
                self._zero = torch.stack([(0.0 * x).sum() for x in tree_leaves(encoded)]).sum()
            return {}
        self._types = rows.scatter(images.token_types, fill=0).view(rows.shape)
        arguments: dict[str, Any] = {_ENCODED: {"image": encoded}}
        arguments |= {name: self._types for name in TYPES if name in self._takes}
        if isinstance(rows, PackedRows):
            positions = rope_positions(self._base, batch, images)
            if positions is not None:  # transformers reads the first of four as the text position
                arguments["position_ids"] = torch.cat([batch.position_ids[None], positions])[:, None]  # [4, 1, T]
        else:  # the model computes them, so the layout probe compares ours with these
            arguments |= _grids(self._base, images)
        return arguments

    def _add_zero(self, _: nn.Module, __: Any, output: Any) -> Any:
        if self._zero is not None:
            output.last_hidden_state = output.last_hidden_state + self._zero
        return output


def generation_inputs(
    model: PreTrainedModel, prompts: Sequence[Prompt], ids: Tensor, mask: Tensor, positions: Tensor
) -> dict[str, Tensor]:
    """Return the image arguments of an unsharded model for `prompts`, left-padded to [N, P]; empty without images.

    For a model with three position axes they include `position_ids` [4, N, P], with `positions` first.
    """
    base = base_model(model)
    images = join_images([(prompt.images, len(prompt.token_ids)) for prompt in prompts])
    if images is None:
        return {}
    refuse_blind(model)
    types = torch.zeros_like(ids)
    types[mask.bool()] = images.token_types.to(ids.device)
    takes = inspect.signature(base.forward).parameters
    found = {name: x.to(ids.device) for name, x in images.inputs.items()}
    found |= {name: types for name in TYPES if name in takes}
    three = prompt_positions(base, ids, mask, images, types)
    if three is not None:
        found["position_ids"] = torch.cat([positions[None], three.to(ids.device)])
    return found


def refuse_blind(model: PreTrainedModel) -> None:
    """Raise ConfigError for a model whose images cannot be encoded outside its forward."""
    base = base_model(model)
    if not vision_parameters(model) or _ENCODED not in inspect.signature(base.forward).parameters:
        raise ConfigError(
            f"--image-key: {type(model).__name__} takes no images here; name a checkpoint such as Qwen3.5, Qwen3-VL, "
            f"Qwen2.5-VL or Gemma 3, install transformers newer than {transformers.__version__}, or leave --image-key "
            "out"
        )


def prompt_positions(base: nn.Module, prompts: Tensor, mask: Tensor, images: Images, types: Tensor) -> Tensor | None:
    """Compute the time, height and width positions [3, N, P] of prompts [N, P]; None for a model with one axis.

    mask, types: [N, P]. Calls the model's own function, which handles the sequences one by one.
    """
    function = getattr(type(base), _MROPE, None)
    if function is None:
        return None
    grids = {name: x.cpu() for name, x in _grids(base, images).items()}
    found, _ = function(base, prompts.cpu(), mm_token_type_ids=types.cpu(), attention_mask=mask.cpu(), **grids)
    return found


def rope_positions(base: nn.Module, batch: PackedBatch, images: Images) -> Tensor | None:
    """Compute the positions [3, T] of the tokens of a pack."""
    tokens, rows = batch.input_ids, PaddedRows(batch, attention="")
    ids, types, mask = (
        rows.scatter(x, fill=0).view(rows.shape) for x in (tokens, images.token_types, torch.ones_like(tokens))
    )
    found = prompt_positions(base, ids, mask, images, types)
    return None if found is None else rows.gather(found.flatten(1).to(tokens).T).T  # of [3, N x S]


def _grids(base: nn.Module, images: Images) -> dict[str, Tensor]:
    """Return the additional inputs for rotary positions; empty for a model with one axis."""
    function = getattr(type(base), _MROPE, None)
    takes = inspect.signature(function).parameters if function is not None else ()
    return {name: x for name, x in images.inputs.items() if name in takes}


def _lead_to_the_tower(_: nn.Module, __: Any, output: Tensor) -> Tensor:
    """Make the embedding output require gradients, so that the first layer always has gradients to propagate.

    With images and a trained tower it always does. Otherwise, with a frozen embedding (LoRA), FSDP2 reduces the first
    layer before the tower's backward on ranks with images and after it on the others, which deadlocks.
    """
    return output.requires_grad_() if torch.is_grad_enabled() else output


def _by_types(stock: Callable[..., Any], types: Callable[[], Tensor | None], image_token_id: int) -> Callable[..., Any]:
    """Wrap `get_placeholder_mask` to treat a sampled image token as text."""
    other = int(image_token_id == 0)

    def mask(input_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
        known = types()
        if known is not None:
            input_ids = torch.where(known == 0, input_ids.masked_fill(input_ids == image_token_id, other), input_ids)
        return stock(input_ids, *args, **kwargs)

    return mask
