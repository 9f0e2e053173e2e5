"""Executes the notebooks in this folder with Jupyter and stores what their cells show.

    pip install nbclient ipykernel
    python notebooks/execute.py            # all, or those that are named

`tests/test_docs.py` executes the cells without Jupyter and compares the texts that are stored here. Times, and pictures
but for their size, differ from one execution to the next and are not compared.
"""

from __future__ import annotations

import base64
import sys
import tempfile
from io import BytesIO
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient
from PIL import Image

HERE = Path(__file__).parent


def execute(path: Path) -> None:
    """Execute one notebook in an empty folder, and store it with its outputs."""
    notebook = nbformat.read(path, as_version=4)
    with tempfile.TemporaryDirectory() as folder:
        NotebookClient(notebook, timeout=300, resources={"metadata": {"path": folder}}).execute()
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)  # times
        if cell.cell_type == "code":
            cell.outputs = joined(cell.outputs)
        for output in cell.get("outputs", ()):
            if "image/png" in output.get("data", {}):
                output.data["image/png"] = smaller(output.data["image/png"])
    notebook.metadata = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }
    nbformat.write(notebook, path)
    print(path.name, f"{path.stat().st_size / 1000:.0f} kB")


def joined(outputs: list[Any]) -> list[Any]:
    """The outputs of a cell, in which texts to the same stream that come one after the other are one."""
    result: list[Any] = []
    for output in outputs:
        before = result[-1] if result else {}
        if output.output_type == before.get("output_type") == "stream" and output.name == before.name:
            before.text += output.text
        else:
            result.append(output)
    return result


def smaller(picture: str) -> str:
    """The same picture, a PNG in base64, in 64 colours."""
    buffer = BytesIO()
    image = Image.open(BytesIO(base64.b64decode(picture))).convert("RGB")
    image.quantize(64, dither=Image.Dither.NONE).save(buffer, "PNG", optimize=True)
    return base64.b64encode(buffer.getvalue()).decode()


if __name__ == "__main__":
    for path in [Path(name) for name in sys.argv[1:]] or sorted(HERE.glob("*.ipynb")):
        execute(path)
