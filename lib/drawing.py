"""Drawings of curves, and of what a time waits for, as SVG text: the same figure gives the same bytes.

Texts stay texts, laid out for the widest font that a reader may have."""

import hashlib
import math
import re
from dataclasses import dataclass
from html import escape
from io import StringIO
from textwrap import wrap

from .curves import INK, LOOKS, axes_of, looks, looks_of, ticks
from .units import show

WIDTH, SIZE = 480, 13           # of a drawing and its letters: on a page somewhat larger, on a phone about 70 %
NETWORK = {"bandwidth": "network bandwidth", "latency": "network latency"}     # what these resources are called on a page
# Behind words that may lie on lines.
CARD = {"facecolor": "white", "edgecolor": "none", "alpha": 0.85, "pad": 1.5}


@dataclass(frozen=True, repr=False)
class Picture:
    """A drawing as SVG text, the same bytes for the same figure."""

    title: str
    svg: str

    def _repr_svg_(self):
        return self.svg

    def __repr__(self):
        return f"figure: {self.title}"


def _spread(wanted, gap, top, bottom):
    """Heights near the wanted ones, at least a gap apart."""
    placed, order = {}, sorted(range(len(wanted)), key=wanted.__getitem__)
    for rank, i in enumerate(order):
        placed[i] = max(wanted[i], placed[order[rank - 1]] + gap if rank else top)
    for rank, i in enumerate(reversed(order)):
        placed[i] = min(placed[i], placed[order[-rank]] - gap if rank else bottom)
    return [placed[i] for i in range(len(wanted))]


def _chars(texts, size=SIZE):
    """The width that the longest text takes in any of the fonts."""
    return max(map(len, texts), default=0) * size * 0.6


def _heading(title):
    """A title in as few lines as it needs, all of about one length."""
    needed = len(wrap(title, 54))
    return next(lines for width in range(1, 55) if len(lines := wrap(title, width)) == needed or width == 54)


def _short(number):
    return f"{float(number[0]):.2f}".rstrip("0").rstrip(".")


def _svg(title, says, height, draw):
    """The SVG text of `draw(figure, height)`: no date, ids from the content, text as text, numbers to 2 decimals."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure
    salt = hashlib.sha256(f"{title}{says}".encode()).hexdigest()[:8]
    settings = {"svg.hashsalt": salt, "svg.fonttype": "none", "font.family": "DejaVu Sans", "font.size": SIZE,
                "text.color": INK, "hatch.linewidth": 0.7, "text.parse_math": False,
                "path.simplify": False, "lines.scale_dashes": False}
    with rc_context(settings):
        figure, text = Figure((WIDTH / 72, height / 72), dpi=72), StringIO()
        draw(figure, height)
        figure.savefig(text, format="svg", metadata=dict.fromkeys(("Date", "Creator", "Type", "Format")))
    svg = text.getvalue()
    for pattern in (r"<!--.*?-->", r"<metadata>.*?</metadata>", r"<defs>\s*<style.*?</defs>", r"(?<=<g) id=\"[\w.]+\"",
                    r" transform=\"rotate\(-0 [^\"]*\"", r"<g ?/>"):
        svg = re.sub(pattern, "", svg, flags=re.S)
    svg = svg[svg.index("<svg"):].replace("'DejaVu Sans'", "Helvetica, Arial, 'DejaVu Sans', sans-serif")
    svg = re.sub(r"<[^>]*>", lambda tag: re.sub(r"-?\d+\.\d{3,}", _short, tag[0]), svg)
    label = escape(". ".join(filter(None, (title, says))))
    head = (f'<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" '
            f'viewBox="0 0 {WIDTH} {height}" width="580" height="{height * 580 // WIDTH}" stroke-linejoin="round" '
            f'role="img" aria-label="{label}">')
    svg = head + svg[svg.index(">") + 1:]
    return Picture(title, re.sub(r"\s*\n\s*", "\n", svg).strip() + "\n")


def _frame(figure, height, base, tall, margins, heading, x_label, y_label=""):
    """Axes between the given margins of a strip, with its words; the y label lies on top, to be read easily."""
    left, right, top, bottom = margins
    axes = figure.add_axes((left / WIDTH, (base + bottom) / height,
                            (WIDTH - left - right) / WIDTH, (tall - top - bottom) / height))
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(which="both", length=0, colors=INK, pad=6)
    axes.grid(color="#DDDDDD", linewidth=0.8)
    axes.set_axisbelow(True)
    for rank, line in enumerate(heading):
        figure.text(6 / WIDTH, (base + tall - 19 - 19 * rank) / height, line, weight="bold", size=SIZE + 1)
    figure.text(1 - right / WIDTH, (base + 9) / height, x_label, ha="right")
    figure.text(6 / WIDTH, (base + tall - top + 12) / height, y_label)
    return axes


def _curves(figure, height, base, tall, curves):
    """Draw one figure into the strip of a drawing from `base` on, `tall` high."""
    (x_low, x_high), (y_low, y_high), x_ticks, y_ticks = axes_of(curves)
    heading, look = _heading(curves.title), looks(curves)
    left, right = _chars([text for _, text in y_ticks]) + 14, _chars(curves.series) + 26
    top, bottom = 32 + 19 * len(heading), 50
    axes = _frame(figure, height, base, tall, (left, right, top, bottom), heading, curves.x_label, curves.y_label)
    axes.set(xscale="log" if "x" in curves.log else "linear", yscale="log" if "y" in curves.log else "linear")
    axes.set(xlim=(x_low, x_high), ylim=(y_low, y_high))
    for axis, marked in ((axes.xaxis, x_ticks), (axes.yaxis, y_ticks)):
        axis.set_ticks([], minor=True)
        axis.set_ticks([v for v, _ in marked], [text for _, text in marked])
    for label, v in curves.vertical.items():
        axes.axvline(v, color=INK, linewidth=1, linestyle=(0, (2, 3)))
        late = axes.transLimits.transform(axes.transScale.transform((v, y_high)))[0] > 0.5
        axes.annotate(label, (v, 0), (-6 if late else 6, 8), ("data", "axes fraction"), "offset points",
                      ha="right" if late else "left", bbox=CARD)
    for label, v in curves.horizontal.items():
        axes.axhline(v, color=INK, linewidth=1, linestyle=(0, (2, 3)))
        axes.annotate(label, (0, v), (6, 7), ("axes fraction", "data"), "offset points", bbox=CARD)
    for label, (x, y) in curves.series.items():
        dash = (0, look[label].dash) if look[label].dash else "-"
        axes.plot(x, y, color=look[label].colour, linestyle=dash, linewidth=2.2)
    for label, (x, y) in curves.points.items():
        axes.plot(x, y, look[label].marker, color=look[label].colour, mec=INK, markersize=8, zorder=3, label=label)
    if curves.points:                                       # named beside the y label, where no line passes
        figure.legend(*axes.get_legend_handles_labels(), loc="lower right", ncols=len(curves.points),
                      bbox_to_anchor=(1 - right / WIDTH, (base + tall - top + 5) / height),
                      frameon=False, borderaxespad=0, borderpad=0, handletextpad=0.1)
    ends = [axes.transData.transform((x[-1], y[-1])) for x, y in curves.series.values()]
    bounds = [base + bottom + 5, base + tall - top - 5]
    for label, end, y in zip(curves.series, ends, _spread([end[1] for end in ends], SIZE + 3, *bounds), strict=True):
        axes.annotate(label, end, (WIDTH - right + 16, y), "figure pixels", "figure pixels", va="center_baseline",
                      arrowprops={"arrowstyle": "-", "color": look[label].colour, "alpha": 0.6, "shrinkA": 1,
                                  "shrinkB": 1, "relpos": (0, 0.5)})


def plot(curves):
    """The `Picture` of one figure: lines named at their ends, measurements as markers."""
    return _svg(curves.title, curves.says, 360, lambda figure, height: _curves(figure, height, 0, height, curves))


def panels(*curves):
    """The `Picture` of figures one under the other: side by side, their words would be too small on a phone.

    ValueError without a figure."""
    if not curves:
        raise ValueError("panels need a figure")

    def draw(figure, height):
        for rank, each in enumerate(reversed(curves)):
            _curves(figure, height, 280 * rank, 270, each)
    titles, says = ("; ".join(each.title for each in curves), " ".join(each.says for each in curves))
    return _svg(titles, says, 280 * len(curves), draw)


def bars(breakdowns, labels, title, x_label):
    """The `Picture` of one bar a breakdown, cut by what it waits for: the longest-awaited resource stands out.

    ValueError unless there is one label a breakdown, all are of one unit, and each is one finite number."""
    waits = [{name: float(v) for name, v in each.waits.items() if getattr(v, "size", 1) == 1} for each in breakdowns]
    names = list(dict.fromkeys(name for each in waits for name, v in each.items() if v))
    names = [name for name in LOOKS if name in names] + [name for name in names if name not in LOOKS]
    units, totals, look = {each.unit for each in breakdowns}, [sum(each.values()) for each in waits], looks_of(names)
    if len(labels) != len(waits) or len(units) != 1 or not all(v > 0 and math.isfinite(v) for v in totals):
        raise ValueError(f"bars need a label a breakdown, one unit and a finite number above 0 each; got {len(labels)} "
                         f"labels, units {', '.join(sorted(units))} and {', '.join(map(str, totals))}")
    [unit] = units
    says = "; ".join(f"{label}: " + ", ".join(f"{NETWORK.get(name, name)} {show(v, unit)}" for name, v in each.items() if v)
                     for label, each in zip(labels, waits, strict=True))

    def draw(figure, height):
        heading, left, right = _heading(title), _chars(labels) + 14, _chars([show(v, unit) for v in totals]) + 14
        axes = _frame(figure, height, 0, height, (left, right, 46 + 19 * len(heading), 50), heading, x_label)
        axes.set(xlim=(0, max(totals)), ylim=(len(waits) - 0.5, -0.5))
        axes.set_yticks(range(len(waits)), labels)
        marked = ticks(0, max(totals), unit=unit)
        axes.set_xticks([v for v, _ in marked], [text for _, text in marked])
        axes.grid(axis="y", visible=False)
        kinds, pixel = {}, max(totals) / (WIDTH - left - right)
        for row, each in enumerate(waits):
            start = 0
            for name in filter(each.get, names):
                kinds[name] = axes.barh(row, each[name], 0.62, start, color=look[name].colour, hatch=look[name].hatch,
                                        edgecolor="white", linewidth=0.7)
                if each[name] > pixel * (_chars([show(each[name], unit)]) + 12):
                    axes.text(start + each[name] / 2, row, show(each[name], unit), ha="center", va="center_baseline",
                              bbox=CARD)
                start += each[name]
            axes.text(start + 6 * pixel, row, show(start, unit), va="center_baseline", weight="bold")
        called = [NETWORK.get(name, name) for name in names]
        figure.legend([kinds[name] for name in names], called, loc="upper left", ncols=len(names), frameon=False,
                      bbox_to_anchor=(0, 1 - (12 + 19 * len(heading)) / height), borderaxespad=0,
                      handlelength=1.6, handleheight=1.1, columnspacing=1.4)
    return _svg(title, says, 118 + 19 * len(_heading(title)) + 46 * len(waits), draw)
