"""The notebook runs from its first cell to its last, and is stored as it was written."""

from pathlib import Path

import pytest
from waiting import CEILING_SECONDS

nbformat = pytest.importorskip("nbformat")
NOTEBOOK = Path(__file__).parents[2] / "examples" / "notebook.ipynb"


def test_it_is_stored_without_outputs():
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    assert all(not cell.outputs for cell in notebook.cells if cell.cell_type == "code")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # Jupyter's own, about event loops
def test_it_runs(tmp_path):
    from nbclient import NotebookClient

    notebook = nbformat.read(NOTEBOOK, as_version=4)
    client = NotebookClient(
        notebook, timeout=int(CEILING_SECONDS), resources={"metadata": {"path": str(tmp_path)}}
    )
    client.execute()
    text = "".join(str(cell.get("outputs")) for cell in notebook.cells)
    assert "finished, 4 trials + 2 repeats" in text
    assert "-differentially private" in text
    assert "application/vnd.plotly" in text
    assert len(list((tmp_path / "best").glob("*.pt"))) == 1
