"""Options of the algorithms, by the real command line: two stages of megatron-core learn what FSDP learns from them."""

import json
from pathlib import Path

import pytest

from tests.e2e import command
from tests.megatron import cases, runs

TINY = [*command.TINY_RUN, "console", "--no-export", "--keep-last", "0"]
SUPERVISED = [
    *("--algorithm", "sft", "--prompt-data", "{hub}/rows.jsonl", "--rollout-batch-size", "4", "--num-rollout", "2"),
    *("--max-tokens-per-gpu", "512", "--lr", "1e-3", "--no-bf16", "--eval-interval", "0", "--no-export"),
]
STAGES = ["--backend", "megatron", "--megatron-pipeline-parallel", "2"]


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, and another one of its shape."""
    folder = tmp_path_factory.mktemp("hub")
    for seed, name in enumerate(("model", "reference")):
        cases.save("qwen3", folder / name, seed=seed, tie_word_embeddings=True)
    rows = [{"prompt": f"spell {word}", "label": " ".join(word)} for word in ("cat", "horse", "bee", "elephant") * 4]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


OPTIONS = {
    "supervised": SUPERVISED,
    "a loss of one's own, groups that teach, epochs": [
        *TINY,
        *("--loss", "tests.e2e.losses:doubled", "--dynamic-sampling", "--epochs-per-rollout", "2"),
        *(
            "--entropy-coef",
            "0.01",
            "--deterministic-mode",
            "--clip-grad",
            "0.5",
            "--weight-decay",
            "0.1",
            "--lr-warmup-iters",
            "2",
        ),
    ],
    "a reference of its own": [
        *TINY,
        *("--kl-loss-coef", "0.1", "--ref-load", "{hub}/reference"),
        *("--rollout-top-k", "20", "--rollout-temperature", "0.7", "--global-batch-size", "8"),
    ],
    "gspo, corrected, recomputed": [
        *TINY,
        *("--algorithm", "gspo", "--global-batch-size", "8", "--mismatch-correction", "tis"),
        *("--gradient-checkpointing", "--logprob-chunk-size", "7", "--overlong-penalty", "1"),
    ],
}


def metrics(hub: Path, folder: Path, flags: list[str], num_ranks: int) -> list[dict[str, float]]:
    argv = ["--hf-checkpoint", str(hub / "model"), *(flag.format(hub=hub) for flag in flags)]
    return runs.metrics(argv, folder, num_ranks=num_ranks)


@pytest.mark.matrix
@pytest.mark.parametrize("name", OPTIONS)
def test_options_do_on_two_stages_what_they_do_on_fsdp(name: str, hub: Path, tmp_path: Path) -> None:
    wanted = metrics(hub, tmp_path / "fsdp", OPTIONS[name], 1)
    found = metrics(hub, tmp_path / "megatron", [*OPTIONS[name], *STAGES], 2)
    assert len(wanted) == 2
    runs.assert_same(found, wanted)
