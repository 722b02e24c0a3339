"""Numbers from outside, kept as data: the value and the unit as printed, and who printed it."""

import csv
import tomllib
from functools import cache
from math import inf, nan
from pathlib import Path

from .units import dimension, si

DATA = Path(__file__).parent / "data"


@cache
def table(name):
    """Rows of `data/<name>.csv` as dicts. ValueError names the first row without a source."""
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
    if not isinstance(source, str) or not source.strip():
        raise ValueError(f"{where} has no source; every fact names the page it was read from")
    return source


def quantity(text, like):
    """A number with its unit ("989 TFLOP/s") in SI base units. ValueError when it is not one of the kind of `like` ("FLOP/s")."""
    value, _, unit = str(text).partition(" ")
    try:
        found = si(value, unit)
    except ValueError:
        found = nan
    if dimension(unit) != like or not 0 < found < inf:
        raise ValueError(f"{text!r} is not a positive number with a unit of {like}, such as '3350 G{like}'")
    return found


def known(what, name, names):
    """`name` if it is one of `names`, else KeyError that lists them."""
    if name not in names:
        raise KeyError(f"unknown {what} {name!r}; known: {', '.join(sorted(names))}")
    return name
