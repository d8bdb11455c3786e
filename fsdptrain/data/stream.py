"""What a run reads prompts from: one stream, or several. All ranks make the same calls."""

from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from fsdptrain.data.mixture import MixedPrompts
    from fsdptrain.data.prompts import PromptStream

PromptSource: TypeAlias = "PromptStream | MixedPrompts"  # `MixedPrompts` is imported for several sources only
