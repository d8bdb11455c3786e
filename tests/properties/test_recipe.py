"""`load_recipe` reads the configuration that `to_yaml` writes."""

import tempfile
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from fsdptrain.config import Config, to_yaml
from fsdptrain.config.keys import all_keys
from fsdptrain.config.recipe import load_recipe

YAML = ["null", "true", "1e-6", "1", "a:b", "#", "'", '"', "~", "{", "=", "0x1F", "2020-01-01"]
SPECIAL = [*YAML, "- a", "a: b", "# x", "a\nb", " a ", "é\x01\x85\ufeff"]
TEXTS = st.text(
    st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1, max_size=30
) | st.sampled_from(SPECIAL)
SMALL = st.floats(1e-12, 0.9)
VALUES = {
    "hf_checkpoint": TEXTS,
    "output_dir": TEXTS,
    "system_prompt": TEXTS,
    "resume": TEXTS,
    "reward": st.lists(TEXTS, min_size=1, max_size=3),
    "chat_template_kwargs": st.dictionaries(TEXTS, st.booleans() | st.integers() | TEXTS, max_size=3),
    "fp16": st.booleans(),
    "trust_remote_code": st.booleans(),
    "fsdp_cpu_offload": st.booleans(),
    "fsdp_reshard_after_forward": st.booleans(),
    "rollout_seed": st.integers(-(2**61), 2**61),
    "num_rollout": st.integers(0, 10**12),
    "lr": st.floats(1e-9, 1e9),
    "weight_decay": st.floats(0, 1e300),
    "adam_eps": SMALL,
    "adam_beta2": SMALL,
    "entropy_coef": SMALL,
    "kl_loss_coef": SMALL,
    "kl_loss_type": st.sampled_from(["k1", "k2", "k3"]),
    "global_batch_size": st.sampled_from([32, 64, 128]),
    "eps_clip": SMALL,
    "eps_clip_high": st.none() | SMALL,
    "layout": st.sampled_from(["auto", "packed", "padded"]),
    "log_to": st.sampled_from([[], ["console"], ["wandb", "trackio"]]),
}


@st.composite
def configs(draw):
    names = draw(st.sets(st.sampled_from(sorted(set(VALUES) - {"hf_checkpoint", "kl_loss_coef", "global_batch_size"}))))
    needed = {"hf_checkpoint", "kl_loss_coef", "global_batch_size"}  # others have no effect without them
    return Config(**{name: draw(VALUES[name]) for name in sorted(names | needed)})


@given(config=configs(), with_sources=st.booleans())
def test_a_written_recipe_is_the_same_configuration(config, with_sources):
    sources = dict.fromkeys(all_keys(), "default") if with_sources else None
    text = to_yaml(config, sources)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.yaml"
        path.write_text(text, encoding="utf-8")
        assert load_recipe(path) == config
