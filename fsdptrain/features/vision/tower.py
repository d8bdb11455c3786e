"""The images of a pack: through the vision tower of a model, and to the places that they hold among the tokens.

The tower runs outside of the model's own forward, by `get_image_features`, because there it would be handed the
boundaries of the text. Its layers are sharded, so every rank must run it as often as all others: a pack without an
image sends a blank one through it. That one reaches no token; where the tower is trained, it joins the loss times
zero, so that every rank has gradients to reduce.

The places of images are those of the prompt, by `Images.token_types`, and not those of a token id: the policy may
sample that token, and has then said a word and not shown an image.
"""

import inspect
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel

from fsdptrain.errors import ConfigError
from fsdptrain.model.inputs import Layout, from_rows, to_rows, tokens_here
from fsdptrain.model.structure import base_model, vision_parameters
from fsdptrain.types import Images, PackedBatch, Prompt, join_images

_TYPES = ("mm_token_type_ids", "token_type_ids")  # how models call them
_ENCODED = "mm_encoder_outputs"  # the argument that takes what `get_image_features` has made
_MROPE = "get_rope_index"


class Vision:
    """The tower of one model. Made before sharding, when it is known what is trained."""

    def __init__(self, model: PreTrainedModel, blank: Images) -> None:
        """blank: an image that stands in where a pack has none. ConfigError for a model that cannot see."""
        refuse_blind(model)
        self._base: Any = base_model(model)
        self._blank = blank
        self._trained = any(p.requires_grad for p in vision_parameters(model).values())
        if self._trained:
            model.get_input_embeddings().register_forward_hook(_lead_to_the_tower)
        self._takes = inspect.signature(self._base.forward).parameters
        self._types: Tensor | None = None  # [R, S] of the pack that is in the model
        image_token_id: int = model.config.image_token_id
        self._base.get_placeholder_mask = _by_types(
            self._base.get_placeholder_mask, lambda: self._types, image_token_id
        )

    def see(self, batch: PackedBatch, layout: Layout) -> tuple[dict[str, Any], Tensor | None]:
        """Arguments for the base model, beside those of the text; and a zero to add to what it makes, or None."""
        images, self._types = batch.images, None
        shown = self._blank.map(lambda x: x.to(batch.input_ids.device)) if images is None else images
        with nullcontext() if self._trained else torch.no_grad():
            encoded = self._base.get_image_features(**shown.inputs, return_dict=True)
        if images is None:
            nothing = torch.stack([(0.0 * x).sum() for x in tree_leaves(encoded)]).sum()  # a sum may overflow in fp16
            return {}, nothing if self._trained else None
        rows = (1, batch.num_tokens) if layout == "packed" else (len(batch.seqlens), batch.max_seqlen)
        self._types = to_rows(images.token_types, batch, layout, fill=0).view(rows)
        arguments: dict[str, Any] = {_ENCODED: {"image": encoded}}
        arguments |= {name: self._types for name in _TYPES if name in self._takes}
        if layout == "packed":
            positions = rope_positions(self._base, batch, images)
            if positions is not None:  # transformers reads the first of four as the place in the text
                arguments["position_ids"] = torch.cat([batch.position_ids[None], positions])[:, None]  # [4, 1, T]
        else:  # the model finds them itself: so the layout probe holds ours against its own
            arguments |= _grids(self._base, images)
        return arguments, None


def shown(
    model: PreTrainedModel, prompts: Sequence[Prompt], ids: Tensor, mask: Tensor, positions: Tensor
) -> dict[str, Tensor]:
    """Arguments of a plain model that reads `prompts`, at the right of their rows [N, P]; empty without an image.

    `position_ids` [4, N, P] among them, the first of them `positions`, where the model has three axes.
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
    found |= {name: types for name in _TYPES if name in takes}
    three = prompt_positions(base, ids, mask, images, types)
    if three is not None:
        found["position_ids"] = torch.cat([positions[None], three.to(ids.device)])
    return found


def refuse_blind(model: PreTrainedModel) -> None:
    """ConfigError for a model whose images cannot be encoded apart from its forward."""
    base = base_model(model)
    if not vision_parameters(model) or _ENCODED not in inspect.signature(base.forward).parameters:
        raise ConfigError(
            f"--image-key: {type(model).__name__} takes no images here; name a checkpoint such as Qwen3.5, Qwen3-VL, "
            "Qwen2.5-VL or Gemma 3, or leave --image-key out"
        )


def prompt_positions(base: nn.Module, prompts: Tensor, mask: Tensor, images: Images, types: Tensor) -> Tensor | None:
    """[3, N, P]: where the tokens of prompts [N, P] are in time, height and width; None for a model of one axis.

    mask, types: [N, P]. By the model's own function, sequence by sequence.
    """
    function = getattr(type(base), _MROPE, None)
    if function is None:
        return None
    grids = {name: x.cpu() for name, x in _grids(base, images).items()}
    found, _ = function(base, prompts.cpu(), mm_token_type_ids=types.cpu(), attention_mask=mask.cpu(), **grids)
    return found


def rope_positions(base: nn.Module, batch: PackedBatch, images: Images) -> Tensor | None:
    """[3, T] of the tokens of a pack."""
    tokens, shape = batch.input_ids, (len(batch.seqlens), batch.max_seqlen)
    ids, types, mask = (
        to_rows(x, batch, "padded", fill=0).view(shape) for x in (tokens, images.token_types, torch.ones_like(tokens))
    )
    found = prompt_positions(base, ids, mask, images, types)
    if found is None:
        return None
    flat = found.flatten(1).to(tokens)  # [3, N x S]
    return from_rows(flat.T, batch, "padded", tokens_here(batch, "padded", None)).T


def _grids(base: nn.Module, images: Images) -> dict[str, Tensor]:
    """What the model asks for besides tokens to find rotary positions; nothing for a model of one axis."""
    function = getattr(type(base), _MROPE, None)
    takes = inspect.signature(function).parameters if function is not None else ()
    return {name: x for name, x in images.inputs.items() if name in takes}


def _lead_to_the_tower(_: nn.Module, __: Any, output: Tensor) -> Tensor:
    """The first layer has gradients to hand on in every pack, as it has where an image comes from a trained tower.

    Else, under a frozen embedding (LoRA), FSDP2 reduces that layer before the tower's backward on ranks with images and
    after it on the others, and they wait for each other.
    """
    return output.requires_grad_() if torch.is_grad_enabled() else output


def _by_types(stock: Callable[..., Any], types: Callable[[], Tensor | None], image_token_id: int) -> Callable[..., Any]:
    """`get_placeholder_mask` that takes a sampled image token for the word that it is."""
    other = int(image_token_id == 0)

    def mask(input_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
        known = types()
        if known is not None:
            input_ids = torch.where(known == 0, input_ids.masked_fill(input_ids == image_token_id, other), input_ids)
        return stock(input_ids, *args, **kwargs)

    return mask
