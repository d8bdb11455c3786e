"""`--dry-run --probe` needs config.json alone."""

from pathlib import Path

import pytest

from tests import zoo
from tests.e2e import command


@pytest.mark.parametrize(("name", "layout"), [("qwen3", "packed"), ("qwen3_next", "padded")])
def test_the_layout_is_known_without_weights(name: str, layout: str, tmp_path: Path) -> None:
    zoo.config(name).save_pretrained(tmp_path / "model")

    result = command.run(["--hf-checkpoint", str(tmp_path / "model"), "--dry-run", "--probe"], tmp_path)

    assert result.code == 0, result.err
    [line] = [line for line in result.out.splitlines() if line.startswith("# layout: ")]
    assert line.startswith(f"# layout: {layout}, ")
    assert "backward" in result.out
