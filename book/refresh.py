"""Run the notebooks of the book and store them in one normal form.

    make refresh                            all of them
    make refresh TIMINGS=1                  and measure the timings anew
    .venv/bin/python book/refresh.py decode     one of them

Running it twice gives the same bytes, so a diff shows what changed in the book and nothing else.
"""

import copy
import html
import os
import re
import sys
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError
from nbformat import NotebookNode

BOOK = Path(__file__).resolve().parent
WIDGET = "application/vnd.jupyter.widget-view+json"

# All metadata that a notebook may have. Whatever else an editor leaves there (versions, timings, scroll state)
# differs between machines and tells the reader nothing.
NOTEBOOK_METADATA = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}}
CELL_METADATA = ("mystnb", "tags")  # mystnb: alt text and captions of figures


def normalise(notebook: NotebookNode) -> NotebookNode:
    """The same notebook without what depends on who ran it, when, and with which editor.

    Raises ValueError for a widget that has no HTML beside it: without its kernel the site would show nothing.
    """
    notebook = copy.deepcopy(notebook)
    notebook.metadata = NotebookNode(copy.deepcopy(NOTEBOOK_METADATA))
    notebook.nbformat, notebook.nbformat_minor = 4, 5
    count = 0
    for cell in notebook.cells:
        cell.metadata = NotebookNode({key: cell.metadata[key] for key in CELL_METADATA if key in cell.metadata})
        cell.pop("attachments", None)
        if cell.cell_type != "code":
            continue
        # An empty cell is not run, so it takes no number.
        number = None
        if cell.source.strip():
            number = count = count + 1
        cell.execution_count = number
        cell.outputs = merge_streams(cell.outputs)
        for output in cell.outputs:
            if "execution_count" in output:
                output.execution_count = number
            # The view names a model that lives in the kernel that has just ended.
            if WIDGET in output.get("data", {}):
                if "text/html" not in output.data:
                    raise ValueError(f"cell {cell.id!r} shows a widget without a text/html for the site")
                del output.data[WIDGET]
            describe(cell, output)
    return notebook


def describe(cell: NotebookNode, output: NotebookNode) -> None:
    """Give the site the words that a figure carries: it shows an SVG as a picture, whose own label a browser ignores.

    The label is computed with the figure, so the words never fall behind it, as those typed by hand would.
    """
    svg = output.get("data", {}).get("image/svg+xml", "")
    label = re.search(r'<svg\b[^>]*?\baria-label="([^"]+)"', "".join(svg))
    if label:
        image = cell.metadata.setdefault("mystnb", NotebookNode()).setdefault("image", NotebookNode())
        image["alt"] = html.unescape(label[1])


def merge_streams(outputs: list[NotebookNode]) -> list[NotebookNode]:
    """Outputs where printed text that follows printed text is one output: how it was cut is up to the scheduler."""
    merged: list[NotebookNode] = []
    for output in outputs:
        last = merged[-1] if merged else None
        if last and output.output_type == last.output_type == "stream" and output.name == last.name:
            last.text += output.text
        else:
            merged.append(output)
    return merged


def dumps(notebook: NotebookNode) -> str:
    """The text of a notebook file: sorted keys, one space of indentation, a newline at the end."""
    return nbformat.writes(notebook).rstrip("\n") + "\n"


def run(notebook: NotebookNode, timings: bool = False) -> NotebookNode:
    """The notebook with fresh outputs, in normal form; a cell that raises stops it with the traceback.

    Cells tagged `timing` run too, because later cells may use what they define, but keep the outputs they have
    unless `timings`: a duration is new each time, and storing it would make every refresh a change.
    """
    fresh = copy.deepcopy(notebook)
    NotebookClient(
        fresh,
        kernel_name="python3",
        timeout=600,
        resources={"metadata": {"path": str(BOOK)}},  # where Jupyter and nbval run it too
        extra_arguments=["--IPKernelApp.log_level=ERROR"],  # it warns about TCP on every start, also on one machine
    ).execute()
    for old, new in zip(notebook.cells, fresh.cells, strict=True):
        if not timings and "timing" in new.metadata.get("tags", []) and old.outputs:
            new.outputs = old.outputs
    return normalise(fresh)


def main(names: list[str]) -> None:
    """Refresh the named notebooks of book/ (`decode` or `book/decode.ipynb`), or all of them."""
    timings = os.environ.get("TIMINGS", "") not in ("", "0")
    for path in [BOOK / f"{Path(name).stem}.ipynb" for name in names] or sorted(BOOK.glob("*.ipynb")):
        before = path.read_text(encoding="utf-8")
        try:
            after = dumps(run(nbformat.reads(before, as_version=4), timings))
        except CellExecutionError as error:  # it shows the cell and its traceback: ours around it would hide them
            sys.exit(f"book/{path.name} is left as it was, because a cell raised:\n{error}")
        if after != before:
            path.write_text(after, encoding="utf-8")
        print(f"book/{path.name}: {'changed' if after != before else 'unchanged'}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
