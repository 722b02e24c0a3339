"""A figure in numbers and words, before anyone draws it: curves, their looks, ranges and ticks.

Colours mean resources everywhere, and a dash, a marker or a hatch repeats what a colour says."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from .elementwise import NUMBERS
from .units import COUNTS, rounded, show

INK = "#222222"


@dataclass(frozen=True)
class Look:
    """How a line, a point and a bar are told from others: colour, dash (on, off, ...), marker and hatch."""

    colour: str
    dash: tuple
    marker: str
    hatch: str


LOOKS = {"compute": Look("#0072B2", (), "o", "///"), "memory": Look("#D55E00", (7, 3), "s", "\\\\\\"),
         "bandwidth": Look("#009E73", (8, 3, 2, 3), "^", ".."), "latency": Look("#CC79A7", (2, 2), "D", "xx"),
         "other": Look("#999999", (12, 3), "v", "--")}
LOOKS["network"] = LOOKS["bandwidth"]
# For what is no resource, colours that no resource has: ink first.
PLAIN = (Look(INK, (), "o", ""), Look("#9A8500", (7, 3), "s", "++"), Look("#8A70DA", (2, 2), "D", "oo"),
         Look("#B0413E", (8, 3, 2, 3), "^", "--"), Look("#4F7F8B", (12, 3), "v", "||"),
         Look("#777777", (4, 1), "s", "**"))


@dataclass(frozen=True)
class Curves:
    """A figure in numbers and words; its title states the conclusion.

    `series` {label: y values over x, or one number, or a tuple (x values, y values)}; `points` {label: (x, y)} are
    measurements, numbers or sequences; `vertical` and `horizontal` {label: value} are lines to compare with; `log`
    names the logarithmic axes: "", "x", "y" or "xy"; `styles` {label: resource} where the label itself is none. Values
    are in the SI units that are named, which the ticks show; a range (low, high) is that of the data unless given.
    ValueError for lengths that differ, a number not finite or not above 0 on a log axis, an unknown resource."""

    title: str
    x_label: str
    y_label: str
    x: object
    series: Mapping
    log: str = "xy"
    points: Mapping = field(default_factory=dict)
    vertical: Mapping = field(default_factory=dict)
    horizontal: Mapping = field(default_factory=dict)
    styles: Mapping = field(default_factory=dict)
    x_unit: str = ""
    y_unit: str = ""
    x_range: tuple = ()
    y_range: tuple = ()

    def __post_init__(self):
        unknown = [f"{label!r}: {resource!r}" for label, resource in self.styles.items()
                   if resource not in LOOKS or label not in {**self.series, **self.points}]
        if unknown or not self.series or self.log not in ("", "x", "y", "xy"):
            raise ValueError(f"{self.title!r}: needs a series, log as x, y or xy, and styles of its labels among "
                             f"{', '.join(LOOKS)}; got log={self.log!r} {' '.join(unknown)}".rstrip())
        object.__setattr__(self, "x", _numbers(self.x))
        for name in ("series", "points"):
            pairs = {label: self._pair(label, values, name) for label, values in getattr(self, name).items()}
            object.__setattr__(self, name, pairs)
        for axis in "xy":
            for v in self.all(axis):
                if not math.isfinite(v) or axis in self.log and v <= 0:
                    rule = "finite and above 0" if axis in self.log else "finite"
                    raise ValueError(f"{self.title!r}: every {axis} must be {rule}, got {v}")

    def _pair(self, label, values, name):
        paired = name == "points" or isinstance(values, tuple) and not isinstance(values[0], NUMBERS)
        x, y = map(_numbers, values) if paired else (self.x, _numbers(values))
        y = y * len(x) if len(y) == 1 else y
        if len(x) != len(y) or not y:
            raise ValueError(f"{self.title!r}: {label!r} has {len(x)} x and {len(y)} y values")
        return x, y

    def all(self, axis):
        """Every "x" or every "y" that is drawn."""
        marks = self.vertical if axis == "x" else self.horizontal
        drawn = [*self.series.values(), *self.points.values()]
        return [v for pair in drawn for v in pair[axis == "y"]] + [float(v) for v in marks.values()]

    @property
    def says(self):
        """The curves in words: where each begins and ends."""
        ends = [f"{label} from {show(y[0], self.y_unit)} to {show(y[-1], self.y_unit)}"
                for label, (_, y) in self.series.items()]
        low, high = (show(extreme(self.all("x")), self.x_unit) for extreme in (min, max))
        return f"{self.y_label}, over {self.x_label} from {low} to {high}: {', '.join(ends)}."


def _numbers(values):
    try:
        return tuple(map(float, values))
    except TypeError:                                       # one number, perhaps an array without axes
        return (float(values),)


def looks(curves):
    """{label: Look} of a figure's series and points; measurements of a series look like it."""
    return {**looks_of(curves.points, curves.styles), **looks_of(curves.series, curves.styles)}


def looks_of(labels, styles=()):
    """{label: Look}: a resource's own, otherwise one of no resource; a dash is used twice only when all are used."""
    found, plain, styles = {}, iter(PLAIN * len(labels)), dict(styles)
    for label in labels:
        resource = styles.get(label, label)
        look = LOOKS[resource] if resource in LOOKS else next(plain)
        used = [other.dash for other in found.values()]
        spare = [other for other in PLAIN if other.dash not in used] if look.dash in used else []
        found[label] = replace(look, dash=spare[0].dash, marker=spare[0].marker) if spare else look
    return found


def range_of(values, log, margin):
    """(low, high) of an axis: linear ones start at 0 unless something is below; `margin` is a fraction of the axis."""
    low, high = min(values), max(values)
    if log:
        wider = (high / low) ** margin if high > low else 2
        return (low, high) if wider == 1 else (rounded(low / wider, 4), rounded(high * wider, 4))
    low = min(low, 0) if margin or low == high else low
    high = high if high > low else low + 1
    return low, rounded(high + margin * (high - low), 4) if margin else high


def ticks(low, high, log=False, unit=""):
    """[(value, text)] of at most seven round values of an axis, in people's units.

    A log axis of counts between powers of two is ticked in powers of two; other log axes in decades, or 1, 2, 5."""
    doubled = log and unit in COUNTS and 1 <= low <= high / 2
    if doubled and all(abs(math.remainder(math.log2(v), 1)) < 1e-6 for v in (low, high)):
        first, span = round(math.log2(low)), round(math.log2(high / low))
        found = [2.0**k for k in range(first, first + span + 1, max(1 if span < 5 else 2, math.ceil(span / 6)))]
    elif log:
        decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        for digits in ((1, 2, 5), (1, 3), (1,)):
            found = [v for k in decades for d in digits if low * 0.999 <= (v := float(f"{d}e{k}")) <= high * 1.001]
            if len(found) <= 7:
                break
        found = found[::math.ceil(len(found) / 7)]
    else:
        size = 10.0 ** math.floor(math.log10((high - low) / 5))
        step = next(size * d for d in (1, 2, 2.5, 5, 10) if size * d >= (high - low) / 5 * 0.999)
        found = [rounded(k * step, 6) for k in range(math.ceil(low / step - 1e-6), math.floor(high / step + 1e-6) + 1)]
    return [(v, show(v, "" if unit in COUNTS else unit)) for v in found]


def axes_of(curves):
    """(x range, y range, x ticks, y ticks) of a figure."""
    x = curves.x_range or range_of(curves.all("x"), "x" in curves.log, 0)
    y = curves.y_range or range_of(curves.all("y"), "y" in curves.log, 0.05)
    return x, y, ticks(*x, "x" in curves.log, curves.x_unit), ticks(*y, "y" in curves.log, curves.y_unit)
