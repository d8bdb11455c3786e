"""Whether a run shares prompts, by its options and its device."""

import pytest

from fsdptrain import platform
from fsdptrain.config import Config
from fsdptrain.features import FEATURES


@pytest.mark.parametrize(
    ("prefix_sharing", "has_accelerator", "shares"),
    [("auto", False, True), ("auto", True, False), ("on", True, True), ("off", False, False)],
)
def test_auto_shares_prompts_on_cpus_only(prefix_sharing: str, has_accelerator: bool, shares: bool, monkeypatch):
    monkeypatch.setattr(platform, "has_accelerator", lambda: has_accelerator)
    (entry,) = (entry for entry in FEATURES if entry.target.startswith("prefix_sharing:"))
    assert entry.enabled(Config(hf_checkpoint="x", prefix_sharing=prefix_sharing)) is shares
