"""Numbers from outside: none loads without its source."""

import pytest

from lib import facts


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty data folder in place of lib/data; what was read before does not leak in or out."""
    monkeypatch.setattr(facts, "DATA", tmp_path)
    facts.table.cache_clear()
    facts.nested.cache_clear()
    yield tmp_path
    facts.table.cache_clear()
    facts.nested.cache_clear()


def test_rows_come_as_dicts(folder):
    """A CSV file is a list of rows by column."""
    (folder / "t.csv").write_text("chip,value,source\nv5e,197,DOC\n")
    assert [{"chip": "v5e", "value": "197", "source": "DOC"}] == list(facts.table("t"))


@pytest.mark.parametrize("cell", ["", "   "])
def test_a_row_without_source_does_not_load(folder, cell):
    """ValueError names file and line."""
    (folder / "t.csv").write_text(f"chip,value,source\nv5e,197,DOC\nv5p,459,{cell}\n")
    with pytest.raises(ValueError, match="t.csv line 3 has no source"):
        facts.table("t")


def test_a_short_row_does_not_load(folder):
    """A line that ends before the source has none."""
    (folder / "t.csv").write_text("chip,value,source\nv5e,197\n")
    with pytest.raises(ValueError, match="t.csv line 2 has no source"):
        facts.table("t")


def test_a_table_without_a_source_column_does_not_load(folder):
    """No column, no source."""
    (folder / "t.csv").write_text("chip,value\nv5e,197\n")
    with pytest.raises(ValueError, match="t.csv line 2 has no source"):
        facts.table("t")


@pytest.mark.parametrize("line", ["", 'source = ""', 'source = "  "'])
def test_an_entry_without_source_does_not_load(folder, line):
    """ValueError names file and entry."""
    (folder / "t.toml").write_text(f'["a"]\nsource = "x"\n["b"]\nvalue = 1\n{line}\n')
    with pytest.raises(ValueError, match=r"t.toml \[b\] has no source"):
        facts.nested("t")


def test_entries_come_by_name(folder):
    """A TOML file is a dict of entries."""
    (folder / "t.toml").write_text('["a-1.5"]\nsource = "x"\nwidth = 3\n')
    assert {"a-1.5": {"source": "x", "width": 3}} == dict(facts.nested("t"))


@pytest.mark.parametrize(
    ("text", "like", "expected"),
    [
        ("989 TFLOP/s", "FLOP/s", 9.89e14),
        ("394 TOP/s", "FLOP/s", 3.94e14),
        ("80 GB", "B", 80e9),
        ("96 GiB", "B", 96 * 2**30),
        ("0.6 us", "s", 6e-7),
        ("3.6 USD/h", "USD/s", 0.001),
    ],
)
def test_a_quantity_is_a_number_and_a_unit(text, like, expected):
    """In SI base units."""
    assert expected == facts.quantity(text, like)


@pytest.mark.parametrize(("text", "like"), [("80 GB/s", "B"), ("80 GB", "B/s"), ("5 us", "B/s"), ("989 TFLOP", "FLOP/s")])
def test_a_quantity_of_another_kind_is_refused(text, like):
    """A capacity is no bandwidth."""
    with pytest.raises(ValueError, match=f"'{text}' is not a positive number with a unit of {like}"):
        facts.quantity(text, like)


@pytest.mark.parametrize("text", ["", "GB/s", "5GB/s", "five GB/s", "5 GB/s extra", "5 gb", "GB 5", None, [5, "GB"]])
def test_a_malformed_quantity_is_refused(text):
    """ValueError shows the text and an example of the form."""
    with pytest.raises(ValueError, match="is not a positive number with a unit of B/s, such as '3350 GB/s'"):
        facts.quantity(text, "B/s")


@pytest.mark.parametrize("text", ["5", 5, 3.35e12])
def test_a_number_without_a_unit_is_no_quantity(text):
    """3350 of what? A bandwidth given as "3350" must not load as 3,350 bytes per second."""
    with pytest.raises(ValueError, match="is not a positive number with a unit"):
        facts.quantity(text, "B/s")


@pytest.mark.parametrize("text", ["nan GB/s", "inf GB/s", "-inf GB"])
def test_a_quantity_is_finite(text):
    """Nothing outside gives NaN or infinity in."""
    with pytest.raises(ValueError):
        facts.quantity(text, "B/s")


def test_an_unknown_name_lists_the_known():
    """KeyError in the words of the domain."""
    with pytest.raises(KeyError, match="unknown chip 'x'; known: a, b"):
        facts.known("chip", "x", {"b": 1, "a": 2})
    assert "a" == facts.known("chip", "a", {"a"})
