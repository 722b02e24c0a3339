"""The three helpers that formulas may use beside operators, and the check at the door.

They take floats, NumPy arrays, JAX arrays and tracers, SymPy symbols and Pint quantities. Whichever library an input comes
from is imported already, so none is imported here."""

import math
import sys
from decimal import Decimal
from functools import reduce
from numbers import Rational

NUMBERS = (int, float)
LARGEST = 1e30          # beyond every size here, and its products stay finite


def _library(xs):
    """The module whose `maximum` fits the inputs; None for plain numbers."""
    for x in xs:
        if isinstance(x, NUMBERS):
            continue
        for name, kind, namespace in (("sympy", "Basic", "sympy"), ("jax", "Array", "jax.numpy")):
            if name in sys.modules and isinstance(x, getattr(sys.modules[name], kind)):
                return sys.modules[namespace]
    return None if all(isinstance(x, NUMBERS) for x in xs) else sys.modules["numpy"]


def _joined(xs, plain, symbolic, elementwise):
    library = _library(xs)
    if library is None:
        return plain(xs)
    if library.__name__ == "sympy":
        return getattr(library, symbolic)(*xs)
    return reduce(getattr(library, elementwise), xs)


def maximum(*xs):
    """The largest of its inputs, elementwise; all of one unit."""
    return _joined(xs, max, "Max", "maximum")


def minimum(*xs):
    """The smallest of its inputs, elementwise; all of one unit."""
    return _joined(xs, min, "Min", "minimum")


def ceil(x):
    """`x` rounded up, elementwise."""
    library = _library((x,))
    return math.ceil(x) if library is None else getattr(library, "ceiling" if library.__name__ == "sympy" else "ceil")(x)


def positive(name, x, zero=False, most=LARGEST):
    """`x` if it can be a count or a size of at most `most`, in double precision; ValueError naming the rule otherwise.

    Numbers, lists and arrays are looked at; tracers, symbols and quantities, which have no value yet, pass as they are."""
    if isinstance(x, Rational) and not isinstance(x, int):
        x = float(x)
    rule = f"{name} must be finite and {'not negative' if zero else 'positive'}"
    if not isinstance(most, NUMBERS):
        most = LARGEST                                      # no number to compare with yet
    elif most < LARGEST:
        rule += f", at most {most}"
    if isinstance(x, NUMBERS) and not isinstance(x, bool):
        if not (x > 0 or zero and x == 0) or x > most:
            raise ValueError(f"{rule}, got {x}")
        return x
    if isinstance(x, list | tuple):
        x = _array(name, x)
    if isinstance(x, bool | str | bytes | bytearray | complex | Decimal) or not hasattr(x, "__rmul__"):
        raise ValueError(f"{name} must be a positive number or an array of them, got {x!r}")
    if type(x).__module__.partition(".")[0] in ("numpy", "xarray", "jaxlib"):
        if x.dtype.kind not in "iuf":
            raise ValueError(f"{name} must hold numbers, got an array of {x.dtype}")
        x = x.astype(float)
        if not x.size or not (x >= 0 if zero else x > 0).all() or (x > most).any():
            raise ValueError(f"{rule}, everywhere")
    return x.astype(float) if hasattr(x, "astype") else x


def _array(name, x):
    import numpy
    try:
        return numpy.asarray(x)
    except ValueError:
        raise ValueError(f"{name} must be a number or an array, got {x!r}") from None
