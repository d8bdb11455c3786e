"""Masks are created once for each kind of pass. A mask with another pattern is refused."""

import pytest
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from fsdptrain.errors import NumericsError
from fsdptrain.model.attention.attention import PACKAGE_ATTENTION, SEGMENTS, register_attention
from fsdptrain.model.attention.masks import SkipMaskCreation, no_mask


def is_asked() -> bool:
    """As transformers decides it, before it looks at position ids."""
    return SEGMENTS in ALL_MASK_ATTENTION_FUNCTIONS._global_mapping


def test_a_mask_with_another_pattern_is_refused() -> None:
    no_mask(use_vmap=False)
    with pytest.raises(NumericsError, match="pattern over the causal mask"):
        no_mask(use_vmap=True)


def test_masks_are_created_once_for_each_kind_of_pass() -> None:
    register_attention()
    masks, another_model = SkipMaskCreation(PACKAGE_ATTENTION), SkipMaskCreation(PACKAGE_ATTENTION)
    found = []
    for kind in ("text", "text", "images", "text", "images"):
        with masks(kind):
            found.append(is_asked())
        assert is_asked()
    assert found == [True, False, True, False, False]
    with another_model("text"):
        assert is_asked()


def test_a_failed_pass_does_not_count() -> None:
    register_attention()
    masks = SkipMaskCreation(PACKAGE_ATTENTION)
    for _ in range(2):
        with pytest.raises(NumericsError), masks("text"):
            assert is_asked()
            raise NumericsError("a pattern")
    with masks("text"):
        pass
    with pytest.raises(NumericsError), masks("text"):
        assert not is_asked()
        raise NumericsError("something else")
    assert is_asked()
