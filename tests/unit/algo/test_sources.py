"""Docstrings of public formulas name the source: a paper, an author with a year, or a code base."""

import re

import pytest

from fsdptrain.algo import kl
from fsdptrain.algo.advantages import ADVANTAGES
from fsdptrain.algo.batch_scales import divide_by_batch_std, whiten_tokens
from fsdptrain.algo.corrections import CORRECTIONS
from fsdptrain.algo.kl import KL_ESTIMATORS
from fsdptrain.algo.losses import LOSSES
from fsdptrain.algo.objective import off_policy_sequences
from fsdptrain.algo.shaping import overlong
from fsdptrain.algo.weights import AGGREGATIONS

SOURCE = re.compile(r"arXiv \d{4}\.\d{5}|[A-Z]\w+ \d{4}|prime-rl")
TEXTBOOK = {"sft", "sequence_sum", "none"}  # negative log-likelihood; REINFORCE as derived; 0
SCALES = (divide_by_batch_std, whiten_tokens, overlong, off_policy_sequences)
TABLES = {**LOSSES, **ADVANTAGES, **AGGREGATIONS, **{function.__name__: function for function in SCALES}}


@pytest.mark.parametrize("name", sorted(set(TABLES) - TEXTBOOK))
def test_a_formula_names_its_source(name: str) -> None:
    assert SOURCE.search(TABLES[name].__doc__ or "")


def test_estimators_and_corrections_name_their_sources() -> None:
    assert {function.__module__ for function in KL_ESTIMATORS.values()} == {"fsdptrain.algo.kl"}
    assert "John Schulman" in (kl.__doc__ or "")
    assert all(correction.source and correction.formula for correction in CORRECTIONS.values())
