"""Sections of optional folders and of installed packages, and what the options of all sections add up to."""

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import fsdptrain
from fsdptrain.config import Config, resolve
from fsdptrain.config.keys import CORE_SECTIONS, all_keys, all_sections
from fsdptrain.config.rules import Condition, RankGroup
from fsdptrain.errors import ConfigError
from fsdptrain.feature import Feature
from fsdptrain.features import FEATURES
from fsdptrain.features.sections import LoraConfig, ModelParallelConfig
from tests.packages import install

POINTS = ["sections.acme = acme:AcmeConfig"]
ACME = """
from typing import Annotated
from fsdptrain.config import Section
from fsdptrain.config.rules import Excludes

class AcmeConfig(Section):
    "Options of Acme."
    NAME = {name!r}
    {option}: Annotated[int, Excludes("lora_rank")] = 0
    "Number."
"""


@pytest.fixture
def fresh() -> Iterator[None]:
    """Sections are discovered again, before and after."""
    for cached in (all_sections, all_keys):
        cached.cache_clear()
    yield
    for cached in (all_sections, all_keys):
        cached.cache_clear()
    sys.modules.pop("acme", None)


def test_an_installed_package_adds_an_option_with_a_rule(fresh, tmp_path, monkeypatch):
    install(tmp_path, "acme", "fsdptrain.plugins", POINTS, {"acme": ACME.format(name="acme", option="anvils")})
    monkeypatch.syspath_prepend(tmp_path)
    resolved = resolve(["--hf-checkpoint", "x", "--anvils", "3"])
    assert (resolved.config.value("anvils"), resolved.sources["anvils"]) == (3, "flag")
    with pytest.raises(ConfigError, match="--anvils 3 does not work with --lora-rank 8: leave one of them out"):
        resolve(["--hf-checkpoint", "x", "--anvils", "3", "--lora-rank", "8"])


@pytest.mark.parametrize(
    ("name", "option", "message"),
    [
        ("acme", "lr", "acme: --lr is an option of section optim too"),
        ("lora", "anvils", "section 'lora' of acme needs a NAME that no other section has"),
    ],
)
def test_an_installed_package_cannot_replace_options(fresh, tmp_path, monkeypatch, name, option, message):
    install(tmp_path, "acme", "fsdptrain.plugins", POINTS, {"acme": ACME.format(name=name, option=option)})
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match=message):
        Config(hf_checkpoint="x")


def test_the_core_comes_first_and_sections_are_typed():
    assert tuple(all_sections().values())[: len(CORE_SECTIONS)] == CORE_SECTIONS
    assert Config(hf_checkpoint="x", lora_rank=4).section(LoraConfig) == LoraConfig(rank=4)
    assert Config(hf_checkpoint="x").section(LoraConfig) == LoraConfig()


def test_what_ranks_share_follows_from_all_sections():
    split = {"tensor_parallel_size": 2, "context_parallel_size": 4, "expert_parallel_size": 8}
    config = Config(hf_checkpoint="x", **split)
    assert (config.pack_copies, config.max_tokens_per_pack) == (8, 4 * 8192)
    assert config.pack_budget == "--max-tokens-per-gpu 8192 x --context-parallel-size 4"
    assert [config.ranks_along(kind) for kind in ("tensor", "context", "experts", "stages")] == [2, 4, 8, 1]
    assert [group.stride for group in config.rank_groups if group.size > 1] == [1, 1, 2]
    assert config.with_values(**{group.key: 1 for group in config.rank_groups}) == Config(hf_checkpoint="x")


def test_a_copy_with_other_values_changes_nothing_else():
    config = Config(hf_checkpoint="x", lora_rank=4)
    changed = config.with_values(lr=1.0, tensor_parallel_size=2)
    assert (changed.optim.lr, changed.section(ModelParallelConfig).tensor_parallel_size) == (1.0, 2)
    assert changed.with_values(lr=config.optim.lr, tensor_parallel_size=1) == config


PACKAGE = Path(fsdptrain.__file__).parent
OF_CONFIG = ("root.py", "algorithm.py")  # whose properties combine options


def test_every_option_is_read() -> None:
    readers = [path for path in PACKAGE.rglob("*.py") if path.parent != PACKAGE / "config" or path.name in OF_CONFIG]
    code = "\n".join(path.read_text(encoding="utf-8") for path in readers)
    read = set(re.findall(r"(?<!torch)\.([a-z_0-9]+)\b(?!\()", code))
    conditions = [text for entry in FEATURES for text in entry.conditions]
    conditions += [text for section in Config(hf_checkpoint="x").sections for _, text in section.FACTS]
    read |= {Condition.parse(text).key for text in conditions}
    unread = {flat for flat, key in all_keys().items() if key.name not in read and flat not in read}
    assert not {flat for flat in unread if not all_keys()[flat].marks(RankGroup)}  # `Config.rank_groups` reads these


MOST_MEMBERS = 19


def test_a_feature_has_few_hooks() -> None:
    members = [name for name in vars(Feature) if not name.startswith("_")]
    assert len(members) <= MOST_MEMBERS, f"merge or remove hooks before adding one: {members}"
