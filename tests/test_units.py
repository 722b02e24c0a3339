"""SI base units in, human units out."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lib.units import factor, rounded, show, si

PRINTED = [
    (7380, "GB/s", 7.38e12),
    (197, "TFLOP/s", 1.97e14),
    (394, "TOP/s", 3.94e14),
    (16, "GiB", 17_179_869_184),
    (80, "GB", 80e9),
    (288, "MiB", 288 * 1024 * 1024),
    (1, "us", 1e-6),
    (1, "µs", 1e-6),
    (19.5, "ms", 0.0195),
    (400, "Gbit/s", 50e9),
    (160, "kB", 160e3),
    (160, "KiB", 163_840),
    (3.6, "USD/h", 0.001),
    (2, "h", 7200),
    (700, "W", 700),
    (240, "sequences", 240),
    (0.4, "fraction", 0.4),
    (5, "", 5),
    (1, "tok/ms", 1000),
    (2, "TFLOP/s/chip", 2e12),
]


@pytest.mark.parametrize(("number", "unit", "expected"), PRINTED)
def test_a_printed_number_becomes_si_base_units(number, unit, expected):
    """GB are 10^9 bytes, GiB 2^30; per hour is divided by 3,600; bits are eighths of a byte."""
    assert expected == si(number, unit)


def test_binary_and_decimal_prefixes_are_kept_apart():
    """A GiB is 7.4 % more than a GB: the slip of the source's tables."""
    assert 1024**3 / 1000**3 == si(1, "GiB") / si(1, "GB")


@pytest.mark.parametrize("unit", ["foo", "gb", "KB", "kk", "/s", "GB /s", "G", "GB/fortnight", "ß"])
def test_an_unknown_unit_is_refused_with_the_known_ones(unit):
    """The message names the unit and those there are."""
    with pytest.raises(ValueError, match="unknown unit.*FLOP"):
        si(1, unit)


@pytest.mark.parametrize("unit", ["GB/", "GB//s"])
def test_an_unfinished_ratio_is_refused(unit):
    """Something must stand below the stroke."""
    with pytest.raises(ValueError, match="unknown unit"):
        si(1, unit)


@pytest.mark.parametrize("text", ["", "abc", "1,000"])
def test_what_is_no_number_is_refused(text):
    """A cell of a data file that does not parse raises ValueError."""
    with pytest.raises(ValueError, match="could not convert"):
        si(text, "GB")


SHOWN = [
    (7.38e12, "B/s", "7.38 TB/s"),
    (0.01403, "s", "14.0 ms"),
    (1.6e-5, "s", "16 µs"),
    (0, "s", "0 s"),
    (1, "s", "1 s"),
    (-0.005, "s", "-5 ms"),
    (0.0009999, "s", "1.00 ms"),
    (0.001, "s", "1 ms"),
    (0.99999, "s", "1.00 s"),
    (90, "s", "90 s"),
    (240.2, "sequences", "240 sequences"),
    (21_994.4, "tok/s", "21,994 tok/s"),
    (3.2, "x", "3.20 x"),
    (8.0, "FLOP/B", "8 FLOP/B"),
    (1.97e14, "FLOP/s", "197 TFLOP/s"),
    (17_179_869_184, "B", "17.2 GB"),
    (0.53125, "B", "0.531 B"),  # a byte has no thousandth
]


@pytest.mark.parametrize(("value", "unit", "expected"), SHOWN)
def test_a_value_is_shown_with_three_digits_and_a_prefix(value, unit, expected):
    """Counts and throughputs get no prefix; a value that rounds up to the next prefix takes it."""
    assert expected == show(value, unit)


def test_digits_are_chosen():
    """The number of significant digits is an argument."""
    assert "14.03 ms" == show(0.014029, "s", digits=4)


def test_an_array_shows_its_range():
    """A sweep is summarised by its smallest and largest value."""
    assert "1 ms … 2 s" == show(np.array([[2.0, 1e-3]]), "s")


def test_a_single_number_of_numpy_shows_as_a_number():
    """0-d arrays and NumPy scalars are numbers, not ranges."""
    assert ["1 ms", "1 ms"] == [show(np.array(1e-3), "s"), show(np.float64(1e-3), "s")]


def test_a_symbol_shows_as_itself():
    """What is no number is printed as it is."""
    import sympy

    assert "B*S" == show(sympy.Symbol("B") * sympy.Symbol("S"), "s")


def test_rounding_to_significant_digits():
    """The inputs of a source that computes with rounded numbers."""
    assert [8.2e11, 0.0195, 70e9] == [rounded(8.19e11, 2), rounded(0.019499, 3), rounded(70.55e9, 1)]


@given(st.floats(1e-9, 0.9e18), st.sampled_from(["s", "B", "B/s", "FLOP/s"]))
def test_what_is_shown_reads_back(x, unit):
    """show then si returns the value to three digits, whatever the prefix; the number shown is below a thousand.

    Values from 10^18 on have no prefix of their own and those below a nanosecond keep it."""
    number, printed = show(x, unit).split(" ")
    read = si(number.replace(",", ""), printed)
    assert math.isclose(x, read, rel_tol=0.0051)
    assert float(number.replace(",", "")) < 1000 or x >= 999e15


@given(st.sampled_from([row[1] for row in PRINTED]), st.floats(-1e6, 1e6))
def test_conversion_is_proportional(unit, x):
    """Twice the number is twice the quantity, and `factor` is what one unit is."""
    assert math.isclose(si(2 * x, unit), 2 * si(x, unit), abs_tol=1e-30)
    assert math.isclose(si(x, unit), x * factor(unit), rel_tol=1e-12, abs_tol=1e-30)
