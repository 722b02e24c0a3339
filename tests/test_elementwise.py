"""The three helpers and the check at the door, for every kind of number."""

from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pint
import pytest
import sympy

from lib.elementwise import ceil, maximum, minimum, positive


def test_plain_numbers_stay_plain():
    """No array appears where none went in."""
    assert (3, 1, 2, 3) == (maximum(1, 3, 2), minimum(1, 3, 2), ceil(1.5), ceil(3))
    assert all(type(x) is int for x in (maximum(1, 3), minimum(1, 3), ceil(1.5)))


@pytest.mark.parametrize(
    "mix", [(1, np.array([1, 5]), np.array([[2], [3]])), (np.array([1, 5]), np.array([[2], [3]]), 1)]
)
def test_arrays_broadcast_with_numbers(mix):
    """Any order, any mixture of shapes."""
    np.testing.assert_array_equal([[2, 5], [3, 5]], maximum(*mix))
    np.testing.assert_array_equal([[1, 1], [1, 1]], minimum(*mix))
    np.testing.assert_array_equal([2, -1], ceil(np.array([1.2, -1.8])))


def test_jax_arrays_and_tracers_stay_in_jax():
    """Also beside NumPy arrays and numbers, and under jit."""
    x = jnp.array([1.0, 5.0])
    assert [2.0, 5.0] == maximum(2, x).tolist() and [1.0, 2.0] == minimum(x, np.array([2.0, 2.0])).tolist()
    assert isinstance(maximum(np.array([2.0, 2.0]), x), jax.Array)
    assert [2.0, 5.0] == jax.jit(lambda x: ceil(maximum(x, 1.5)))(x).tolist()


def test_symbols_give_symbolic_maxima():
    """Max, Min and ceiling of SymPy; numbers beside symbols too."""
    x, y = sympy.symbols("x y")
    assert (sympy.Max(x, y, 1), sympy.Min(x, 2), sympy.ceiling(x)) == (maximum(x, y, 1), minimum(2, x), ceil(x))


def test_quantities_keep_their_unit():
    """The largest of 1 s and 2 ms is 1 s; seconds and bytes do not compare."""
    units = pint.UnitRegistry()
    assert 1 * units.s == maximum(1 * units.s, 2 * units.ms)
    assert 2 * units.ms == minimum(1 * units.s, 2 * units.ms)
    with pytest.raises(pint.DimensionalityError):
        maximum(1 * units.s, 1 * units.byte)


def test_empty_arrays_pass_through_the_helpers():
    """Elementwise of nothing is nothing."""
    assert 0 == maximum(np.array([]), 3).size == ceil(np.array([])).size


@pytest.mark.parametrize(
    "x", [1, 0.5, 2**70, np.int32(3), np.float64(0.1), [1, 2], (1, 2.5), np.array([[1], [2]]), np.array(3)], ids=repr
)
def test_counts_and_sizes_pass(x):
    """As numbers or float arrays of the same values."""
    passed = positive("batch", x)
    np.testing.assert_array_equal(np.asarray(x, float), np.asarray(passed, float))


def test_whole_arrays_become_floats():
    """int32 and unsigned arrays would overflow in the products of the formulas."""
    assert [float] * 3 == [positive("x", np.array([1, 2], kind)).dtype for kind in ("int32", "uint8", "int64")]


@pytest.mark.parametrize("kind", ["float16", "float32"])
def test_narrow_floats_become_wide(kind):
    """A float16 of 8,192 x 64 is infinite: narrow floats are widened at the door."""
    assert [float, float] == [
        np.asarray(positive("x", x)).dtype for x in (np.array([64], kind), np.dtype(kind).type(64))
    ]


BAD = [
    0,
    -1,
    -0.5,
    float("nan"),
    float("inf"),
    -float("inf"),
    "64",
    b"64",
    None,
    True,
    False,
    [],
    [1, 0],
    [1, -1],
    [1, float("nan")],
    (1, float("inf")),
    ["a"],
    [1, None],
    [True],
    np.array([]),
    np.array([[1, np.nan]]),
    np.array(0),
    np.float64("nan"),
    np.int64(-3),
    np.bool_(True),
    np.array([1j]),
    np.array(["x"]),
    np.array([1, None]),
]


@pytest.mark.parametrize("x", BAD, ids=repr)
def test_what_is_no_count_or_size_is_refused(x):
    """ValueError names the input and the rule; one bad entry spoils an array."""
    with pytest.raises(ValueError, match="batch"):
        positive("batch", x)


@pytest.mark.parametrize("x", [{}, {1}, 1j, object(), [[1], [1, 2]], len, slice(3)], ids=lambda x: type(x).__name__)
def test_what_is_no_number_at_all_is_refused(x):
    """ValueError in the words of the domain, whatever the object."""
    with pytest.raises(ValueError, match="batch"):
        positive("batch", x)


def test_zero_passes_where_it_may():
    """A first prefill has no cached context; less than nothing stays refused."""
    assert 0 == positive("context", 0, zero=True)
    np.testing.assert_array_equal([0.0, 1.0], positive("context", [0, 1], zero=True))
    for bad in (-1, [0, -1], float("nan"), [float("nan")]):
        with pytest.raises(ValueError, match="context.*not negative"):
            positive("context", bad, zero=True)


def test_symbols_tracers_and_quantities_are_not_looked_at():
    """They have no value yet, or a unit: they pass as they are."""
    x, units = sympy.Symbol("x"), pint.UnitRegistry()
    assert x is positive("x", x)
    assert 2 * units.byte == positive("x", 2 * units.byte)
    assert 3.0 == jax.jit(lambda v: positive("x", v))(3.0)


def test_integers_of_jax_become_floats():
    """int32 of JAX would overflow without a word."""
    assert jnp.issubdtype(positive("x", jnp.array([1, 2])).dtype, jnp.floating)


def test_fractions_are_numbers():
    """An exact number of the standard library is as good as a float."""
    assert 0.5 == float(positive("x", Fraction(1, 2)))
    assert 1.5 == float(maximum(Fraction(3, 2), 1))
