"""All ranks of a run read the same rows."""

from pathlib import Path

import pytest
import torch.distributed as dist

from fsdptrain.config import Config
from fsdptrain.errors import DataError
from fsdptrain.trainer.data import build_data, require_same_data
from tests.testing import spawn, tiny_tokenizer


def refusal_on_this_rank(counts: list[int], folder: Path) -> str:
    rank = dist.get_rank()
    path = folder / f"{rank}" / "rows.jsonl"
    path.parent.mkdir()
    path.write_text("".join(f'{{"prompt": "say {i}", "label": "{i}"}}\n' for i in range(counts[rank])))
    config = Config(hf_checkpoint="x", algorithm="sft", prompt_data=str(path), eval_size=2)
    try:
        require_same_data(build_data(config, tiny_tokenizer(), None, None).stream)
    except DataError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("counts", [[20, 20], [20, 13]])
def test_ranks_must_read_the_same_rows(counts: list[int], tmp_path: Path) -> None:
    first, second = spawn(2, refusal_on_this_rank, counts, tmp_path)
    assert first == second
    assert ("ranks read different rows" in first) == (counts[0] != counts[1])
