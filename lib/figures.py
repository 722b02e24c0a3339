"""Figures: one import for curves, their pictures, and the slider, which draws curves at every setting of its knobs.

With a kernel a slider is an ipywidget; the HTML beside it (slider.html) moves without one."""

import inspect
import json
import math
import re
import sys
from dataclasses import dataclass, replace
from html import escape
from itertools import product
from pathlib import Path

from .curves import INK, Curves, axes_of, looks, range_of
from .drawing import Picture, bars, panels, plot
from .elementwise import NUMBERS
from .units import rounded

__all__ = ["Curves", "Picture", "bars", "panels", "plot", "slider"]

FRAMES = 400
# 85 letters that mean nothing to HTML or JSON; three of them hold a number of four digits.
LETTERS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz!#$%()*+,-:;=?@[]^_{|}~"


@dataclass(frozen=True, repr=False)
class Slider:
    """Curves at every setting of some knobs: alive with a kernel, and as HTML that needs none. `frames` {values: Curves}."""

    knobs: dict
    frames: dict
    html: str

    def __repr__(self):
        return f"slider: {', '.join(self.knobs)} ({len(self.frames)} frames)"

    def _repr_html_(self):
        return self.html

    def _repr_mimebundle_(self, include=None, exclude=None):
        shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
        live = self.widget()._repr_mimebundle_() if getattr(shell, "kernel", None) else {}
        return {**live, "text/html": self.html, "text/plain": repr(self)}

    def widget(self):
        """The same control as an ipywidget, which redraws in Python."""
        import ipywidgets
        knobs = [ipywidgets.SelectionSlider(options=[(text, i) for i, text in enumerate(texts)], description=name, continuous_update=False,
                                            style={"description_width": "initial"}) for name, texts in self.knobs.items()]
        frames = dict(zip(product(*map(range, map(len, self.knobs.values()))), self.frames.values(), strict=True))
        picture = ipywidgets.HTML(plot(frames[(0,) * len(knobs)]).svg)

        def turn(_):
            picture.value = plot(frames[tuple(knob.value for knob in knobs)]).svg
        for knob in knobs:
            knob.observe(turn, "value")
        return ipywidgets.VBox([*knobs, picture])


def _packed(values):
    """Numbers of four significant digits, three letters each, of 1e-14 to 1e20 in size: slider.html unpacks them."""
    text = ""
    for v in values:
        digits, exponent = f"{abs(v):.3e}".split("e")
        if int(exponent) > 19:
            raise ValueError(f"{v:.3g} is too large to draw: use a larger unit")
        code = max(0, int(digits.replace(".", "")) - 1000 + 9000 * (v < 0) + 18000 * (int(exponent) + 14)) if v else 0
        text += LETTERS[code // 7225] + LETTERS[code // 85 % 85] + LETTERS[code % 85]
    return text


def _text(value):
    return value if isinstance(value, str) or not isinstance(value, NUMBERS) and not hasattr(value, "dtype") else \
        f"{int(value):,}" if value == int(value) else f"{value:.4g}"


def slider(f, **ranges):
    """What `f(**values)`, which returns `Curves`, looks like at every combination of the values that the knobs take.

    A knob is a keyword with the sequence of its values, numbers or names. Axes are those of all frames, so that what moves is the
    curve. ValueError for more than 400 frames, an empty range, a knob that f lacks, or frames that do not have the same curves."""
    count = math.prod(len(values) for values in ranges.values())
    empty = [name for name, values in ranges.items() if not len(values)]
    if empty or not ranges or count > FRAMES:
        raise ValueError(f"a slider has 1 to {FRAMES} frames, got {count}" + f": no values of {', '.join(empty)}" * bool(empty))
    try:
        inspect.signature(f).bind(**ranges)
    except TypeError as error:
        raise ValueError(f"the knobs {', '.join(ranges)} are not what {f.__name__}{inspect.signature(f)} takes: {error}") from None
    frames = {}
    for values in product(*ranges.values()):
        frames[values] = _rounded(f(**dict(zip(ranges, values, strict=True))))
    first, *others = frames.values()
    shape = lambda c: [*c.series, "|", *c.points, c.log, c.x_unit, c.y_unit, c.styles]  # noqa: E731
    if any(shape(other) != shape(first) for other in others):
        raise ValueError("every frame must have the same series, points, axes, units and styles")
    wide = {axis: getattr(first, f"{axis}_range") or range_of([v for c in frames.values() for v in c.all(axis)], axis in first.log, m)
            for axis, m in (("x", 0), ("y", 0.05))}
    frames = {values: replace(c, x_range=wide["x"], y_range=wide["y"]) for values, c in frames.items()}
    knobs = {name.replace("_", " "): [_text(v) for v in values] for name, values in ranges.items()}
    return Slider(knobs, frames, _html(knobs, list(frames.values())))


def _rounded(c):
    pairs = [{k: (tuple(v if v == int(v) else rounded(v, 6) for v in x), tuple(rounded(v, 4) for v in y)) for k, (x, y) in group.items()} for group in (c.series, c.points)]
    marks = [{k: rounded(float(v), 4) for k, v in group.items()} for group in (c.vertical, c.horizontal)]
    return replace(c, series=pairs[0], points=pairs[1], vertical=marks[0], horizontal=marks[1])


def _html(knobs, frames):
    """The control as HTML, CSS and a script of its own, with the first frame drawn for where scripts do not run."""
    first, pool = frames[0], {}
    look = looks(first)
    x, y, x_ticks, y_ticks = axes_of(first)

    def index(values):
        return pool.setdefault(_packed(values), len(pool))

    def drawn(label, **more):
        colour = "currentColor" if look[label].colour == INK else look[label].colour
        return {"label": label, "colour": colour, "dash": " ".join(map(str, look[label].dash)), **more}
    data = {
        "frames": [{"title": c.title, "says": c.says, "lines": [[index(v) for v in pair] for pair in c.series.values()],
                    "points": [[index(v) for v in pair] for pair in c.points.values()],
                    "marks": [["x", *m] for m in c.vertical.items()] + [["y", *m] for m in c.horizontal.items()]} for c in frames],
        "x": {"label": first.x_label, "low": x[0], "high": x[1], "log": "x" in first.log, "ticks": x_ticks},
        "y": {"label": first.y_label, "low": y[0], "high": y[1], "log": "y" in first.log, "ticks": y_ticks},
        "lines": [drawn(label) for label in first.series], "points": [drawn(label, marker=look[label].marker) for label in first.points],
        "knobs": [{"name": name, "values": texts} for name, texts in knobs.items()], "letters": LETTERS, "pool": list(pool)}
    rows = [f'<p class="slider-knob"><label><span>{escape(name)}</span><input type="range" min="0" max="{len(texts) - 1}" value="0" '
            f'aria-valuetext="{escape(texts[0])}" autocomplete="off"></label><output>{escape(texts[0])}</output></p>' for name, texts in knobs.items()]
    parts = {"knobs": "\n".join(rows), "title": escape(first.title), "picture": plot(replace(first, title="")).svg,
             "data": json.dumps(data, ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c"),
             "widths": f"--name:{0.55 * max(map(len, knobs)):.1f}em;--value:{0.65 * max(len(t) for v in knobs.values() for t in v):.1f}em"}
    return re.sub(r"{{(\w+)}}", lambda m: parts[m[1]], (Path(__file__).parent / "slider.html").read_text(encoding="utf-8"))
