"""SI base units in, human units out: the only file where a prefix is spelled."""

from math import inf

BINARY = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}
DECIMAL = {"P": 1e15, "T": 1e12, "G": 1e9, "M": 1e6, "k": 1e3, "m": 1e-3, "u": 1e-6, "µ": 1e-6, "n": 1e-9}
BASE = {"s": 1, "h": 3600, "B": 1, "bit": 1 / 8, "b": 1 / 8, "FLOP": 1, "OP": 1, "USD": 1, "W": 1, "tok": 1, "req": 1}
COUNTS = ("", "x", "fraction", "P/G", "sequences", "tokens", "params", "layers", "heads", "experts", "chips", "hops", "ways")


def factor(unit):
    """What one `unit` is in SI base units ("GB/s" -> 1e9). Counted things are themselves; ValueError if unknown."""
    if unit in COUNTS:
        return 1
    if unit.endswith(")"):
        over, _, below = unit[:-1].partition("/(")
        return factor(over) / factor(below)
    top, *below = unit.split("/")
    value = _plain(top, unit)
    for part in below:
        value /= 1 if part in (*COUNTS[1:], "chip") else _plain(part, unit)
    return value


def dimension(unit):
    """`unit` without its prefixes ("TB/s" -> "B/s", "GiB" -> "B"), to tell one kind of quantity from another."""
    plain = [next((base for base in BASE if part.endswith(base) and part[:-len(base)] in ("", *BINARY, *DECIMAL)), part)
             for part in unit.split("/")]
    return "/".join({"OP": "FLOP", "bit": "B", "b": "B", "h": "s"}.get(part, part) for part in plain)


def _plain(part, unit):
    if part in BASE:
        return BASE[part]
    for prefixes in (BINARY, DECIMAL):
        for prefix, scale in prefixes.items():
            if part.startswith(prefix) and part[len(prefix):] in BASE:
                return scale * BASE[part[len(prefix):]]
    raise ValueError(f"unknown unit {unit!r}; known: {', '.join(BASE)} with a prefix, their ratios, and counts of "
                     f"{', '.join(filter(None, COUNTS))}")


def si(value, unit):
    """The number a source prints, in SI base units: si(7380, "GB/s") is 7.38e12 (bytes per second)."""
    scale = factor(unit)
    return float(value) * scale if scale >= 1 else float(value) / (1 / scale)


def show(x, unit="", digits=3):
    """`x`, in SI base units, for a reader: `digits` significant digits and a prefix; an array shows its range."""
    if getattr(x, "shape", ()):
        return f"{show(x.min(), unit, digits)} … {show(x.max(), unit, digits)}"
    try:
        x = float(x)
    except TypeError:
        return str(x)
    if unit in COUNTS or unit == "FLOP/B" or unit.startswith(("tok", "req")):
        return f"{_digits(x, digits)} {unit}".strip()
    prefix = next((p for p, scale in DECIMAL.items() if p != "u" and abs(x) < inf and abs(x) >= 0.9995 * scale
                   and (scale > 1 or abs(x) < 0.9995 and unit != "B")), "n" if 0 < abs(x) < 1e-6 else "")
    return f"{_digits(x / DECIMAL.get(prefix, 1), digits)} {prefix}{unit}"


def _digits(x, digits):
    """`digits` significant digits, zeros included unless it is whole; never fewer than the integer part has, no exponent."""
    if 0 < abs(x) < 1e-4 or abs(x) == inf:
        return f"{x:.{digits - 1}e}"
    if "e" in f"{x:.{digits}g}" or abs(x) >= 1000 or abs(x - round(x)) <= 1e-9 * abs(x):
        return f"{x:,.0f}"
    return f"{x:#.{digits}g}".rstrip(".")


def rounded(x, digits):
    """`x` to so many significant digits: the inputs of a source that computes with rounded numbers."""
    return float(f"{x:.{digits - 1}e}")
