"""What every notebook of the book keeps to, and nbval does not see. nbval itself is its own step of `make test`."""

import importlib.util
import re
from pathlib import Path

import nbformat
import pytest
import yaml

ROOT = Path(__file__).resolve().parent.parent
BOOK = ROOT / "book"

TAGS = {
    "nbval-ignore-output",  # the output is not compared: figures and timings
    "timing",  # the output is kept by `make refresh` unless TIMINGS=1
    "hide-input",
    "remove-input",
    "hide-output",
    "raises-exception",
    "remove-cell",
}
LINES = 15  # a code cell is read in one look
FORBIDDEN = {
    "a magic or a shell command": r"^\s*[%!]",
    "sys.path": r"\bsys\.path\b",
    "pip": r"\bpip\b",
    "the network": r"^\s*(import|from)\s+(urllib|requests|httpx|aiohttp|socket)\b|\burlopen\(",
    # nbval runs cells without storing history, so that neither a trailing `;` nor Out[1] does what it does in Jupyter.
    "a trailing ;": r";\s*(#.*)?$",
    "an output by its number": r"\b(Out|In)\[\d+\]",
}

# book/ holds pages and is no package, so its one program is loaded by its path.
_spec = importlib.util.spec_from_file_location("refresh", BOOK / "refresh.py")
refresh = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(refresh)


def toc_files():
    """The pages of _toc.yml in reading order."""
    toc = yaml.safe_load((ROOT / "_toc.yml").read_text(encoding="utf-8"))
    chapters = [chapter["file"] for part in toc["parts"] for chapter in part["chapters"]]
    return [toc["root"], *chapters]


NOTEBOOKS = [ROOT / f"{name}.ipynb" for name in toc_files() if (ROOT / f"{name}.ipynb").exists()]


@pytest.fixture(params=NOTEBOOKS, ids=lambda path: path.stem, scope="module")
def path(request):
    return request.param


@pytest.fixture(scope="module")
def notebook(path):
    return nbformat.read(path, as_version=4)


@pytest.fixture(scope="module")
def code(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def tags(cell):
    return set(cell.metadata.get("tags", []))


def data(cell):
    """The MIME bundles among a cell's outputs."""
    return [output.data for output in cell.outputs if "data" in output]


def text(value):
    return "".join(value) if isinstance(value, list) else str(value)


def printed(cell):
    """All that a cell shows as text, streams and MIME types alike."""
    streams = [output.text for output in cell.outputs if output.output_type == "stream"]
    return "\n".join(streams + [text(value) for bundle in data(cell) for value in bundle.values()])


def test_every_page_of_the_contents_exists():
    """Each entry of _toc.yml is one file, a notebook or Markdown, and no notebook is left out of the contents."""
    for name in toc_files():
        assert [(ROOT / f"{name}{suffix}").exists() for suffix in (".ipynb", ".md")].count(True) == 1, name
    assert set(BOOK.glob("*.ipynb")) == set(NOTEBOOKS)


def test_cells_ran_once_from_top_to_bottom(code):
    """Execution counts are 1, 2, 3 ...: what is shown is what a reader gets from Run All."""
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))


def test_cell_ids_are_unique_words(notebook):
    """Ids say what a cell is about, because failures and diffs name it by them."""
    ids = [cell.id for cell in notebook.cells]
    assert len(set(ids)) == len(ids)
    assert [name for name in ids if not re.fullmatch(r"[a-z][a-z0-9]*(-[a-z0-9]+)*", name)] == []
    # What Jupyter makes up for a new cell looks like 4f1c09ab or 550e8400-e29b-...
    assert [name for name in ids if re.match(r"[0-9a-f]{8}(-|$)", name) and re.search(r"\d", name)] == []


def test_tags_are_known(notebook):
    """A mistyped tag does nothing and says nothing; a timing is also hidden from nbval."""
    for cell in notebook.cells:
        assert tags(cell) <= TAGS, cell.id
        if "timing" in tags(cell):
            assert "nbval-ignore-output" in tags(cell), cell.id


def test_code_is_short_and_self_contained(code):
    """Cells have at most 15 lines, use Python and nothing else, and touch neither the path nor the network."""
    for cell in code:
        assert len(cell.source.splitlines()) <= LINES, cell.id
        for what, pattern in FORBIDDEN.items():
            assert not re.search(pattern, cell.source, re.MULTILINE), f"{cell.id} uses {what}"


def test_nothing_went_wrong_in_the_outputs(code):
    """No warnings on stderr, and no errors but the announced."""
    for cell in code:
        for output in cell.outputs:
            assert output.get("name") != "stderr", cell.id
            assert output.output_type != "error" or "raises-exception" in tags(cell), cell.id


def test_outputs_name_neither_machine_nor_moment(code):
    """No memory address, no home directory, and no date within a figure: each would make every refresh a change."""
    for cell in code:
        assert not re.search(r"\b0x[0-9a-f]{6,}|/(home|root|Users|tmp|work)/|<dc:date>", printed(cell)), cell.id


def test_figures_have_a_text_for_those_who_do_not_see_them(code):
    """A picture file has `mystnb: {image: {alt: ...}}` in its cell's metadata, an inline one a label or a title.

    Figures of `lib` carry a label, from which `make refresh` fills the metadata.
    """
    for cell in code:
        for bundle in data(cell):
            html = text(bundle.get("text/html", ""))
            for tag in re.findall(r"<(?:svg|img)\b.*?>(?:\s*<title>)?", html, re.DOTALL):
                assert re.search(r"aria-label=|aria-labelledby=|aria-hidden=|alt=|<title>", tag), f"{cell.id}: {tag}"
            if not html and any(mime.startswith("image/") for mime in bundle):
                assert len(data(cell)) == 1, f"{cell.id}: one figure a cell, as the text belongs to the cell"
                assert cell.metadata.get("mystnb", {}).get("image", {}).get("alt", "").strip(), cell.id


def test_a_check_is_always_compared(code):
    """A cell whose output is ignored holds no check: it could say anything."""
    for cell in code:
        if "nbval-ignore-output" in tags(cell):
            assert "check(" not in cell.source, cell.id


def test_files_are_in_normal_form(path, notebook):
    """A notebook is stored as `make refresh` would store it, so that diffs show changes of content only."""
    assert path.read_text(encoding="utf-8") == refresh.dumps(refresh.normalise(notebook)), "run make refresh"


# The normal form itself, on a notebook made for it.


def notebook_of(*outputs, tag=()):
    cell = nbformat.v4.new_code_cell("pass", id="cell", execution_count=7, outputs=list(outputs))
    cell.metadata = nbformat.from_dict({"tags": list(tag), "execution": {"iopub.execute_input": "2026-11-29"}})
    return nbformat.v4.new_notebook(cells=[cell], metadata={"language_info": {"name": "python", "version": "3"}})


def test_normal_form_forgets_the_run():
    """Kernel version, timestamps and counts go; ids and tags stay."""
    [cell] = (normal := refresh.normalise(notebook_of(tag=["hide-input"]))).cells
    assert dict(normal.metadata) == refresh.NOTEBOOK_METADATA
    assert (cell.id, cell.execution_count, dict(cell.metadata)) == ("cell", 1, {"tags": ["hide-input"]})


def test_normal_form_merges_printed_text():
    """Two prints in a row are one output, but not across a picture or another stream."""
    out = nbformat.v4.new_output
    before, after = ([out("stream", name="stdout", text=word) for word in "ab"] for _ in range(2))
    [cell] = refresh.normalise(notebook_of(*before, out("display_data", data={"text/plain": "x"}), *after)).cells
    assert [output.get("text") for output in cell.outputs] == ["ab", None, "ab"]


def test_normal_form_keeps_the_html_of_a_widget():
    """The view of a dead kernel goes, the HTML beside it stays; a widget that has none is refused."""
    view = {refresh.WIDGET: {"model_id": "1"}, "text/plain": "slider"}
    [cell] = refresh.normalise(
        notebook_of(nbformat.v4.new_output("display_data", data=view | {"text/html": "x"}))
    ).cells
    assert dict(cell.outputs[0].data) == {"text/html": "x", "text/plain": "slider"}
    with pytest.raises(ValueError, match="'cell' shows a widget"):
        refresh.normalise(notebook_of(nbformat.v4.new_output("display_data", data=view)))


def test_normal_form_takes_the_words_of_a_figure():
    """The label that a figure computes for itself becomes its text on the site, entities resolved."""
    figure = nbformat.v4.new_output(
        "display_data", data={"image/svg+xml": '<svg role="img" aria-label="a &lt; b"></svg>'}
    )
    [cell] = refresh.normalise(notebook_of(figure)).cells
    assert cell.metadata.mystnb.image.alt == "a < b"


def test_normal_form_is_final():
    """Normalising twice is normalising once, and changes nothing in its argument."""
    notebook = notebook_of(nbformat.v4.new_output("execute_result", data={"text/plain": "1"}, execution_count=7))
    once = refresh.normalise(notebook)
    assert refresh.dumps(refresh.normalise(once)) == refresh.dumps(once)
    assert notebook.cells[0].execution_count == 7


def test_a_refresh_keeps_timings_unless_asked(monkeypatch):
    """A timing cell runs, but shows the stored duration until TIMINGS=1."""
    fresh, stored = (nbformat.v4.new_output("stream", name="stdout", text=text) for text in ("new", "old"))

    def execute(client):
        client.nb.cells[0].outputs = [fresh]

    monkeypatch.setattr(refresh.NotebookClient, "execute", execute)
    for timings, expected in [(False, "old"), (True, "new")]:
        [cell] = refresh.run(notebook_of(stored, tag=["timing"]), timings).cells
        assert cell.outputs[0].text == expected
    assert refresh.run(notebook_of(stored)).cells[0].outputs[0].text == "new"
