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
    """Curves at every setting of some knobs: alive with a kernel, and as HTML that needs none.

    `knobs` {name: texts of its values}; `frames`: Curves, the last knob turning fastest."""

    knobs: dict
    frames: tuple
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
        style = {"description_width": "initial"}
        knobs = [ipywidgets.SelectionSlider(options=[(text, i) for i, text in enumerate(texts)], description=name,
                                            continuous_update=False, style=style) for name, texts in self.knobs.items()]
        frames = dict(zip(product(*map(range, map(len, self.knobs.values()))), self.frames, strict=True))
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
    if isinstance(value, str | bool) or not isinstance(value, NUMBERS) and not hasattr(value, "dtype"):
        return str(value)
    return f"{int(value):,}" if value == int(value) else f"{value:.4g}"


def slider(f, **ranges):
    """What `f(**values)`, which returns `Curves`, looks like at every combination of the values that the knobs take.

    A knob is a keyword with the sequence of its values, numbers or names. The axes hold all frames, so that what moves
    is the curve. Values are rounded to 4 digits. ValueError for more than 400 frames, an empty range, a knob that f
    lacks, frames that do not have the same curves, and values that cannot be drawn."""
    ranges = {name: list(values) for name, values in ranges.items()}
    count, empty = math.prod(map(len, ranges.values())), [name for name, values in ranges.items() if not values]
    if empty or not ranges or count > FRAMES:
        wanted = f"values of {', '.join(empty)}" if empty else "a knob" if not ranges else f"at most {FRAMES} frames"
        raise ValueError(f"a slider needs {wanted}, got {count if count > FRAMES else 'none'}")
    signature = inspect.signature(f)
    try:
        signature.bind(**ranges)
    except TypeError as error:
        raise ValueError(f"the figure takes {signature}, the knobs are {', '.join(ranges)}: {error}") from None
    frames = [_rounded(f(**dict(zip(ranges, values, strict=True)))) for values in product(*ranges.values())]
    first, *others = frames
    if any(_kind(other) != _kind(first) for other in others):
        raise ValueError("every frame must have the same series, points, axes, units and styles")
    x, y = ([v for frame in frames for v in frame.all(axis)] for axis in "xy")
    x, y = first.x_range or range_of(x, "x" in first.log, 0), first.y_range or range_of(y, "y" in first.log, 0.05)
    frames = tuple(replace(frame, x_range=x, y_range=y) for frame in frames)
    knobs = {name.replace("_", " "): [_text(v) for v in values] for name, values in ranges.items()}
    return Slider(knobs, frames, _html(knobs, frames))


def _kind(c):
    return list(c.series), list(c.points), c.log, c.x_label, c.y_label, c.x_unit, c.y_unit, dict(c.styles)


def _rounded(c):
    def pairs(group):
        return {label: (tuple(v if v == int(v) else rounded(v, 6) for v in x), tuple(rounded(v, 4) for v in y))
                for label, (x, y) in group.items()}
    marks = [{k: rounded(float(v), 4) for k, v in group.items()} for group in (c.vertical, c.horizontal)]
    return replace(c, series=pairs(c.series), points=pairs(c.points), vertical=marks[0], horizontal=marks[1])


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
        "frames": [{"title": c.title, "says": c.says,
                    "lines": [[index(v) for v in pair] for pair in c.series.values()],
                    "points": [[index(v) for v in pair] for pair in c.points.values()],
                    "marks": [["x", *m] for m in c.vertical.items()] + [["y", *m] for m in c.horizontal.items()]}
                   for c in frames],
        "x": {"label": first.x_label, "low": x[0], "high": x[1], "log": "x" in first.log, "ticks": x_ticks},
        "y": {"label": first.y_label, "low": y[0], "high": y[1], "log": "y" in first.log, "ticks": y_ticks},
        "lines": [drawn(label) for label in first.series],
        "points": [drawn(label, marker=look[label].marker) for label in first.points],
        "knobs": [{"name": name, "values": texts} for name, texts in knobs.items()],
        "letters": LETTERS, "pool": list(pool)}
    rows = [f'<p class="slider-knob"><label><span>{escape(name)}</span><input type="range" min="0" value="0" '
            f'max="{len(texts) - 1}" aria-valuetext="{escape(texts[0])}" autocomplete="off"></label>'
            f'<output>{escape(texts[0])}</output></p>' for name, texts in knobs.items()]
    longest = max(len(text) for texts in knobs.values() for text in texts)
    parts = {"knobs": "\n".join(rows), "title": escape(first.title), "picture": plot(replace(first, title="")).svg,
             "widths": f"--name:{0.55 * max(map(len, knobs)):.1f}em;--value:{0.65 * longest:.1f}em",
             "data": json.dumps(data, ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c")}
    template = (Path(__file__).parent / "slider.html").read_text(encoding="utf-8")
    return re.sub(r"{{(\w+)}}", lambda found: parts[found[1]], template)
