"""The notebook of examples/ runs from start to end: two runs in one kernel."""

from pathlib import Path

import pytest

NOTEBOOK = Path(__file__).parents[2] / "examples" / "notebook.ipynb"
ROOT = str(NOTEBOOK.parents[1])


@pytest.mark.matrix
@pytest.mark.filterwarnings("ignore")  # of Jupyter
def test_the_notebook_trains_twice_in_one_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    monkeypatch.setenv("PYTHONPATH", ROOT)
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    client = nbclient.NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}})
    client.execute()  # its last cell compares rewards
    assert (tmp_path / "runs" / "notebook" / "second" / "metrics.jsonl").is_file()
