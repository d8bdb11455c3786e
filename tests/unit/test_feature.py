"""The seam between the core and features stays small."""

from fsdptrain.feature import Feature

MOST_MEMBERS = 19


def test_a_feature_has_few_hooks() -> None:
    members = [name for name in vars(Feature) if not name.startswith("_")]
    assert len(members) <= MOST_MEMBERS, f"merge or remove hooks before adding one: {members}"
