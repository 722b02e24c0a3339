"""Numbers from outside, kept as data: the value and the unit as printed, and who printed it."""

import csv
import tomllib
from functools import cache
from pathlib import Path

from .units import si

DATA = Path(__file__).parent / "data"


@cache
def table(name):
    """Rows of `data/<name>.csv` as dicts. ValueError names the first row whose source is missing or unknown."""
    with open(DATA / f"{name}.csv", newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    for number, row in enumerate(rows, start=2):
        sourced(row.get("source"), f"{name}.csv line {number}")
    return rows


@cache
def nested(name):
    """Entries of `data/<name>.toml` by name. ValueError names the first entry without a source."""
    entries = tomllib.loads((DATA / f"{name}.toml").read_text(encoding="utf-8"))
    for entry, fields in entries.items():
        sourced(fields.get("source"), f"{name}.toml [{entry}]")
    return entries


def sourced(source, where):
    """The source, or ValueError: a number that nobody answers for does not load."""
    if not (source or "").strip():
        raise ValueError(f"{where} has no source; every fact names the page it was read from")
    return source


def quantity(text):
    """A number with its unit ("989 TFLOP/s") in SI base units. ValueError when it is not of that form."""
    value, _, unit = str(text).partition(" ")
    try:
        return si(value, unit.strip())
    except ValueError as error:
        raise ValueError(f"{text!r} is not a number with a unit such as '3350 GB/s': {error}") from None


def known(what, name, names):
    """`name` if it is one of `names`, else KeyError that lists them."""
    if name not in names:
        raise KeyError(f"unknown {what} {name!r}; known: {', '.join(sorted(names))}")
    return name
