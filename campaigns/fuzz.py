"""Random bytes in the files that the package reads, by Hypothesis: each is accepted, or refused in one line.

Law: a reader returns, or raises FsdptrainError with a line per mistake and at most 5,000 characters, in at most 5 s of
processor time. Options and losses have property tests in tests/properties.

    python -m campaigns.fuzz [TARGET ...] [--examples 2000] [--seed 0]
"""

import argparse
import copy
import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

from campaigns.report import Report
from fsdptrain.config import Config, DataConfig
from fsdptrain.config.flags import resolve
from fsdptrain.config.recipe import read_recipe
from fsdptrain.data.sources import load_rows
from fsdptrain.errors import FsdptrainError
from fsdptrain.launch.failures import failure_of
from fsdptrain.loggers import RunInfo
from fsdptrain.loggers.jsonl import JsonlLogger
from fsdptrain.model.loading.files import weight_files
from fsdptrain.model.loading.meta import model_config
from fsdptrain.rollout.stop_tokens import stop_tokens
from fsdptrain.trainer.run_dir import open_folder
from tests.testing import save_tiny_checkpoint

MOST_S = 5.0
LONGEST = 5000  # characters of a message
SCALARS = st.none() | st.booleans() | st.integers(-3, 3) | st.floats() | st.text(max_size=6)
SCALARS |= st.sampled_from([2**63, 10**30, 1e300, "", "../x", "/etc/passwd", "a\0b", "x" * 300, "\ud800"])
JSON = st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner))
RECIPE = "model:\n  hf_checkpoint: x\noptim: {lr: 1.0e-6, adam_beta1: 0.9}\nreward: [math, exact=0.5]\nfp16: false\n"
ROWS = [{"prompt": "1 + 1?", "label": "2"}, {"prompt": [{"role": "user", "content": "1 + 1?"}], "label": "2"}]
METRICS = [{"step": step, "time": 1.0, "reward/mean": 0.5} for step in (1, 2)]


@st.composite
def damaged(draw: st.DrawFn, good: Any) -> bytes:
    """Draw the bytes of a text, of a JSON document, or of JSON lines, with other values and other bytes in it."""
    if not isinstance(good, str):
        good = copy.deepcopy(good)
        holder = good
        while isinstance(holder, dict | list) and holder:
            key = draw(st.sampled_from(list(holder) if isinstance(holder, dict) else range(len(holder))))
            if draw(st.booleans()):
                holder[key] = draw(JSON)
            holder = holder[key]
        good = "".join(json.dumps(row) + "\n" for row in good) if isinstance(good, list) else json.dumps(good)
    content = good.encode()
    at = draw(st.integers(0, len(content)))
    inserted = draw(st.just(b"") | st.binary(max_size=8) | st.just(b"[" * 9000))
    return content[:at] + inserted + content[draw(st.sampled_from([at, at, at + 1, len(content)])) :]


def targets(folder: Path) -> dict[str, tuple[Path, Any, Callable[[Path], Any]]]:
    """Return for each target a file, its good content, and what reads it."""
    model = save_tiny_checkpoint(folder / "model")
    config = model_config(model, trust_remote_code=False)
    index, run = model / "model.safetensors.index.json", folder / "run"
    run.mkdir()

    def log_again(path: Path) -> None:
        logger = JsonlLogger(RunInfo(path.parent, "p", "r", 9, resumed_step=1))
        logger.log({"a": 1.0}, 2)
        logger.close()

    def read_rows(path: Path) -> list[Any]:
        table = load_rows(DataConfig(prompt_data=str(path), label_key=""), seed=0)
        return [table[i] for i in range(len(table))]

    return {
        "recipe": (folder / "recipe.yaml", RECIPE, lambda path: Config(**read_recipe(path))),
        "flags": (
            folder / "words",
            "--lr 1e-6 --reward math --no-bf16",
            lambda path: resolve(["--hf-checkpoint", "x", *path.read_text(errors="replace").split(" ")]),
        ),
        "rows": (folder / "rows.jsonl", ROWS, read_rows),
        "config": (
            model / "config.json",
            json.loads((model / "config.json").read_text()),
            lambda path: model_config(path.parent, trust_remote_code=False),
        ),
        "generation": (
            model / "generation_config.json",
            {"eos_token_id": [1, 2], "top_k": 20},
            lambda path: stop_tokens(path.parent, config, trust_remote_code=False),
        ),
        "index": (index, json.loads(index.read_text()), lambda path: weight_files(path.parent)),
        "run": (
            run / "config.yaml",
            RECIPE,
            lambda path: open_folder(Config(hf_checkpoint="x", output_dir=str(path.parent))),
        ),
        "metrics": (run / "metrics.jsonl", METRICS, log_again),
    }


def attack(path: Path, good: Any, read: Callable[[Path], Any], examples: int, number: int) -> str | None:
    """Read `examples` damaged versions of a file. Returns the smallest that breaks the law, and how."""
    last: list[bytes] = []

    def check(content: bytes) -> None:
        path.write_bytes(content)
        last[:], start, shown = [content], time.process_time(), ""
        try:
            read(path)
        except FsdptrainError as error:
            shown = failure_of(error, rank=0).text
        assert all(line.startswith("fsdptrain: ") for line in shown.splitlines()[1:]), shown  # one for each mistake
        assert len(shown) <= LONGEST, shown
        assert time.process_time() - start < MOST_S, "slow"

    options = settings(
        max_examples=examples, database=None, deadline=None, suppress_health_check=list(HealthCheck), print_blob=False
    )
    before = path.read_bytes() if path.exists() else None
    try:
        seed(number)(options(given(damaged(good))(check)))()
    except Exception as error:  # noqa: BLE001  # whatever breaks the law is a row
        return f"{type(error).__name__}: {' '.join(str(error).split())[:160]}, with {last[0]!r:.100}"
    finally:
        path.unlink() if before is None else path.write_bytes(before)
    return None


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("targets", nargs="*", help="default: all")
    parser.add_argument("--examples", type=int, default=2000, help="per target")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="path of the report")
    args = parser.parse_args()
    report = Report(" ".join((__doc__ or "").split("\n\n")[1].split()), args.json)
    with tempfile.TemporaryDirectory(prefix="fuzz-") as folder:
        for name, target in targets(Path(folder)).items():
            if not args.targets or name in args.targets:
                examples = args.examples // 20 if name == "rows" else args.examples  # `datasets` takes a tenth of a s
                report.add(name, attack(*target, examples, args.seed), examples=examples)
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
