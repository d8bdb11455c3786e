"""Every family of decoders: loaded, trained one step, exported exactly on two ranks; or refused before the first step.

One pair of processes for all of them. docs/models.md is the table of what is found here.
"""

import re
import runpy
from pathlib import Path

import pytest

from tests import families
from tests.sweep import Row, sweep

DOCS = Path(__file__).parents[2] / "docs"
MADE = runpy.run_path(str(DOCS.parent / "docgen" / "generate_models.py"))
PAGE = (DOCS / "models.md").read_text(encoding="utf-8")
AGAIN = "run: python -m docgen.generate_models"
TRAINED = [name for members in families.FAMILIES.values() for name in members]
KINDS = {name: kind for kind, members in families.FAMILIES.items() for name in members}
WHY = {  # in the line that refuses it
    "bert": "is not a causal language model: later tokens change a token's logprobs",
    "big_bird": "is not a causal language model",
    "cpmant": "is not a causal language model",
    "electra": "cannot score a single sequence",  # its head is behind a projection
    "modernbert-decoder": "it changes its logits in an unknown way",  # its head is behind a layer
    "prophetnet": "it changes its logits in an unknown way",
    "reformer": "cannot be trained",  # with dropout off
    "rembert": "cannot score a single sequence",
    "roberta": "is not a causal language model",
    "roformer": "is not a causal language model",
    "t5": "of which transformers has no causal language model",
    "xlm": "is not a causal language model",
    "xlnet": "is not a causal language model",
}


# One of each class: dense, learned positions, sliding windows, softcaps, scaled logits, sinks, experts, MLA; recurrent.
FEW_PACKED = ["llama", "gpt2", "gemma3_text", "gemma2", "granite", "gpt_oss", "qwen3_moe", "deepseek_v3"]
FEW_PADDED = ["qwen3_next", "mamba2", "lfm2"]
FEW = [*FEW_PACKED, *FEW_PADDED]
FEW_REFUSED = ["bert", "electra", "t5"]


@pytest.fixture(scope="module")
def few(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Row]:
    return {row.name: row for row in sweep([*FEW, *FEW_REFUSED], tmp_path_factory.mktemp("few"))}


def test_one_family_of_each_class_is_exact_or_refused_in_one_line(few: dict[str, Row]) -> None:
    for name in FEW:
        row = few[name]
        assert row.loaded, row
        assert row.exported, row
        assert row.streamed, row
        assert row.exact, row
    assert {row.name for row in few.values() if row.layout == "padded"} >= {*FEW_PADDED}
    assert {row.name for row in few.values() if row.layout == "packed"} >= {*FEW_PACKED} - {"gpt2"}
    assert {name: few[name].refusal for name in FEW_REFUSED if WHY[name] not in few[name].refusal} == {}
    assert not any("\n" in row.refusal for row in few.values())


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Row]:
    found = sweep([*TRAINED, *families.REFUSED], tmp_path_factory.mktemp("sweep"))
    return {row.name: row for row in found}


@pytest.mark.matrix
def test_no_family_crashes_and_only_those_are_refused_that_must_be(rows: dict[str, Row]) -> None:
    assert {name: row.crash for name, row in rows.items() if row.crash} == {}
    assert {name: rows[name].refusal for name in TRAINED if rows[name].refusal} == {}
    assert len(TRAINED) >= 100


@pytest.mark.matrix
def test_what_cannot_work_is_refused_at_start_in_one_line_with_the_reason(rows: dict[str, Row]) -> None:
    refusals = {name: rows[name].refusal for name in families.REFUSED}
    assert {name: text for name, text in refusals.items() if WHY[name] not in text or "\n" in text} == {}


@pytest.mark.matrix
@pytest.mark.parametrize("what", ["loaded", "exported", "streamed"])
def test_weights_are_those_of_the_files_bit_by_bit(rows: dict[str, Row], what: str) -> None:
    assert [name for name in TRAINED if not vars(rows[name])[what]] == []


@pytest.mark.matrix
def test_gradients_of_one_step_are_those_of_the_plain_model(rows: dict[str, Row]) -> None:
    errors = {name: (rows[name].gradient_error, rows[name].plain_error) for name in TRAINED if not rows[name].exact}
    assert errors == {}


@pytest.mark.matrix
def test_most_families_are_packed_and_those_that_cannot_be_say_why(rows: dict[str, Row]) -> None:
    padded = [rows[name] for name in TRAINED if rows[name].layout == "padded"]
    assert all(row.reason for row in padded)
    recurrent = {"linear attention", "Mamba", "short convolution"}
    without_kernels = [row for row in padded if KINDS[row.name] in recurrent]
    assert len(padded) - len(without_kernels) < len(TRAINED) / 4


@pytest.mark.matrix
def test_the_page_says_what_was_found(rows: dict[str, Row]) -> None:
    assert PAGE.startswith(MADE["HEAD"]), AGAIN
    lines = PAGE.splitlines()
    for name in TRAINED:
        start, _, end = MADE["row"](KINDS[name], rows[name], error="ERROR").partition("ERROR")
        assert [line for line in lines if re.fullmatch(re.escape(start) + r"[^|]+" + re.escape(end), line)], AGAIN
    for name in families.REFUSED:
        assert MADE["refused_row"](rows[name]) in lines, AGAIN
    assert len([line for line in lines if line.startswith("| ")]) == len(rows) + 2, AGAIN  # with the heads
