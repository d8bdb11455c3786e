"""Strategies of the property tests."""

from random import Random

from hypothesis import strategies as st

from fsdptrain.types import Sample

REWARD_NAMES = ("math", "format", "länge")


@st.composite
def samples(draw: st.DrawFn, max_length: int = 24) -> Sample:
    """Any sample: several turns, token ids that are 0 at any place, the loss on any tokens or on none.

    Hypothesis draws the shape, a seeded generator the many numbers in it: drawing each would take minutes.
    """
    length = draw(st.integers(1, max_length))
    loss_bits = draw(st.integers(0, 2**length - 1))
    numbers = Random(draw(st.integers(0, 1000)))
    return random_sample(numbers, length, numbers.choice(["a:0", "a:1", "b:0@1", "ü"]), loss_bits)


def random_sample(numbers: Random, length: int, group_id: str, loss_bits: int | None = None) -> Sample:
    """`loss_bits`: bit t says whether token t has a loss; by default the numbers do, but for the first token."""
    bits = numbers.randrange(2**length) & ~1 if loss_bits is None else loss_bits
    loss_mask = [bool(bits >> t & 1) for t in range(length)]
    return Sample(
        group_id=group_id,
        token_ids=[numbers.choice([0, 0, numbers.randrange(1, 4), numbers.randrange(2**31)]) for _ in range(length)],
        loss_mask=loss_mask,
        rollout_logprobs=[-9 * numbers.random() if m else 0.0 for m in loss_mask],
        reward=numbers.choice([None, -0.0, numbers.uniform(-5, 5)]),
        rewards={name: numbers.uniform(-5, 5) for name in REWARD_NAMES[: numbers.randrange(4)]},
        advantage=numbers.choice([0.0, numbers.uniform(-5, 5)]),
        policy_version=numbers.randrange(2**31),
        versions=numbers.choice([None, [numbers.randrange(2**31) for _ in range(length)]]),
        truncated=numbers.random() < 0.5,
    )


def sample_lists(min_size: int = 0, max_size: int = 12) -> st.SearchStrategy[list[Sample]]:
    return st.lists(samples(), min_size=min_size, max_size=max_size)
