"""Figures: the same bytes each time, words for those who do not see them, and a control that carries its numbers."""

import json
import math
import re
from dataclasses import replace

import pytest

from lib.breakdown import slowest, term, total
from lib.curves import LOOKS, looks, looks_of, ticks
from lib.figures import LETTERS, Curves, bars, panels, plot, slider

X = (1, 4, 16, 64, 256)


def roofline(batch_limit=64, scale=1.0):
    """A step that waits for memory until the batch is large."""
    return Curves(f"Below {batch_limit} sequences memory decides", "batch", "time of a step", X,
                  {"compute": [scale * x / 3e4 for x in X], "memory": 2.3e-3,
                   "both <sum>": [0.0023 + x / 3e4 for x in X]},
                  y_unit="s", points={"measured": ([4, 64], [3e-3, 5e-3])}, vertical={"critical batch": batch_limit})


def data_of(html):
    return json.loads(re.search(r'<script type="application/json">(.*?)</script>', html, re.S)[1])


def unpacked(text):
    """Numbers from three letters each, read as slider.html reads them."""
    codes = [sum(LETTERS.index(c) * 85**k for c, k in zip(text[i:i + 3], (2, 1, 0), strict=True))
             for i in range(0, len(text), 3)]
    return [(-1) ** (c % 18000 >= 9000) * float(f"{c % 9000 + 1000}e{c // 18000 - 17}") if c else 0 for c in codes]


PICTURES = {
    "plot": lambda: plot(roofline()),
    "panels": lambda: panels(roofline(), roofline(128)),
    "bars": lambda: bars([slowest("step", term("compute", 1e-3), term("memory", 2e-3))], ["v5e"],
                         "Memory <decides>", "s"),
}


@pytest.mark.parametrize("draw", PICTURES.values(), ids=PICTURES)
def test_a_picture_is_the_same_bytes_each_time(draw):
    """No date, no random id, nothing of the machine."""
    svg = draw().svg
    assert svg == draw().svg
    assert svg == draw()._repr_svg_()
    assert not re.search(r"<metadata|<!--|<dc:|\b20\d\d-\d\d-\d\d|<style", svg)


@pytest.mark.parametrize("draw", PICTURES.values(), ids=PICTURES)
def test_a_picture_speaks(draw):
    """It has a role and a label that begins with its title, its words are text, and its repr is one line."""
    picture = draw()
    assert re.search(r'role="img" aria-label="[^"<]{20,}"', picture.svg)
    assert "<text" in picture.svg and "viewBox" in picture.svg
    assert picture.title in repr(picture) and "\n" not in repr(picture)


def test_lines_are_named_on_the_picture():
    """Direct labels, axis labels and marks are words in the picture."""
    svg = plot(roofline()).svg
    for word in ("compute", "memory", "both &lt;sum&gt;", "measured", "critical batch", "batch", "time of a step"):
        assert f">{word}</text>" in svg


def test_shortened_numbers_are_coordinates():
    """Coordinates have two decimals, words keep what they say."""
    svg = plot(Curves("At 0.1234", "x", "y", [0, 1], {"a": [0, 0.6]}, log="", horizontal={"0.0625": 0.1})).svg
    assert ">0.0625</text>" in svg and ">At 0.1234</text>" in svg
    assert not re.search(r' (?:d|x|y)="[^"]*\.\d{3}', svg)


def test_colours_are_those_of_the_resources():
    """Okabe and Ito's, in lines and bars alike."""
    assert {name: look.colour for name, look in LOOKS.items()} == {
        "compute": "#0072B2", "memory": "#D55E00", "bandwidth": "#009E73", "network": "#009E73", "latency": "#CC79A7",
        "other": "#999999"}
    svg = plot(roofline()).svg
    assert "#0072b2" in svg and "#d55e00" in svg
    assert "#d55e00" in PICTURES["bars"]().svg


def test_colour_is_never_the_only_difference():
    """Series on one picture differ in dash, even of one resource; resources differ in hatch and marker too."""
    styles = {"v5e": "memory", "h100": "memory", "b200": "latency"}
    found = looks(Curves("t", "x", "y", X, dict.fromkeys([*styles, "any"], 1), styles=styles))
    assert len({look.dash for look in found.values()}) == 4
    assert [found[name].colour for name in ("v5e", "h100")] == ["#D55E00"] * 2
    resources = looks_of(["compute", "memory", "bandwidth", "latency", "other"]).values()
    for what in ("colour", "dash", "hatch", "marker"):
        assert len({getattr(look, what) for look in resources}) == 5


def test_ticks_are_round_in_peoples_units():
    """Batches in powers of two, times in decades with prefixes, linear axes in round steps."""
    assert [text for _, text in ticks(1, 512, log=True)] == ["1", "4", "16", "64", "256"]
    times = ["300 µs", "1 ms", "3 ms", "10 ms", "30 ms", "100 ms"]
    assert [text for _, text in ticks(2e-4, 0.2, log=True, unit="s")] == times
    assert [text for _, text in ticks(0, 2.1e10, unit="B")] == ["0 B", "5 GB", "10 GB", "15 GB", "20 GB"]
    assert [text for _, text in ticks(1, 1000, log=True)] == ["1", "3", "10", "30", "100", "300", "1,000"]


def test_a_line_may_have_its_own_x():
    """A frontier has: a pair (x, y). A single number is a level line."""
    curves = Curves("t", "x", "y", X, {"level": 3, "frontier": ([1, 2], [5, 4])})
    assert curves.series == {"level": (X, (3,) * 5), "frontier": ((1, 2), (5, 4))}


@pytest.mark.parametrize(("change", "message"), [
    ({"series": {"a": [1, 2]}}, "'a' has 5 x and 2 y"),
    ({"series": {"a": math.nan}}, "finite"),
    ({"series": {"a": 0}}, "above 0"),
    ({"series": {}}, "needs a series"),
    ({"log": "z"}, "log='z'"),
    ({"series": {"a": 1}, "styles": {"a": "magic"}}, "'a': 'magic'"),
    ({"series": {"a": 1}, "styles": {"b": "memory"}}, "'b': 'memory'"),
])
def test_curves_that_cannot_be_drawn(change, message):
    """They are refused before anything is drawn."""
    with pytest.raises(ValueError, match=message):
        replace(roofline(), **change)


def test_bars_show_what_a_time_waits_for():
    """Each bar is cut into the resources it waits for, with its total beside it."""
    step = total("step", slowest("a", term("compute", 3e-3), term("memory", 1e-3)), term("latency", 1e-3))
    svg = bars([step, step * 2], ["one", "two"], "Compute decides", "time").svg
    for word in ("compute", "network latency", "one", "two", "4 ms", "8 ms", "6 ms"):
        assert f">{word}</text>" in svg
    assert ">memory</text>" not in svg
    with pytest.raises(ValueError, match="1 labels"):
        bars([step, step], ["one"], "t", "x")
    with pytest.raises(ValueError, match="units B, s"):
        bars([step, term("weights", 1, "B")], ["one", "two"], "t", "x")


def test_a_slider_carries_the_values_of_its_function():
    """Every frame, in the order of the knobs, to 4 digits; one range of the axes for all."""
    control = slider(roofline, batch_limit=[64, 1000], scale=[0.5, 1, 2])
    data = data_of(control.html)
    settings = [(limit, scale) for limit in (64, 1000) for scale in (0.5, 1, 2)]
    assert len(data["frames"]) == 6
    for (limit, scale), frame in zip(settings, data["frames"], strict=True):
        expected = roofline(limit, scale)
        assert frame["title"] == expected.title
        assert frame["marks"] == [["x", "critical batch", limit]]
        for indices, (x, y) in zip(frame["lines"], expected.series.values(), strict=True):
            assert unpacked(data["pool"][indices[0]]) == list(x)
            assert unpacked(data["pool"][indices[1]]) == [float(f"{v:.3e}") for v in y]
    assert data["y"]["low"] <= 0.5 / 3e4 and data["y"]["high"] >= 2 * 256 / 3e4
    assert data["knobs"] == [{"name": "batch limit", "values": ["64", "1,000"]},
                             {"name": "scale", "values": ["0.5", "1", "2"]}]
    assert [line["label"] for line in data["lines"]] == ["compute", "memory", "both <sum>"]


def test_packing_keeps_sign_size_and_zero():
    """Four digits from 1e-14 to 1e20, zero as zero."""
    values = [0, -1.5, 1e-13, 9.999e19, 1234, -4.321e-9]
    control = slider(lambda knob: Curves("t", "x", "y", [1, 2, 3, 4, 5, 6], {"a": values}, log=""), knob=[1])
    data = data_of(control.html)
    assert unpacked(data["pool"][data["frames"][0]["lines"][0][1]]) == values
    with pytest.raises(ValueError, match="too large"):
        slider(lambda knob: Curves("t", "x", "y", [1, 2], {"a": [1, 1e25]}), knob=[1])


def test_a_slider_is_html_on_its_own():
    """Labelled range inputs, a first picture without scripts, nothing from elsewhere, no ids that could collide."""
    html = slider(roofline, batch_limit=[64, 128], scale=[1, 2]).html
    assert html.count('<input type="range"') == html.count("<label>") == 2
    assert re.search(r'<svg [^>]*role="img" aria-label="[^"]+"', html) and "<noscript>" in html
    assert not re.search(r"""(?:src|href)\s*=\s*["']?(?:https?:|//)""", html)
    assert not re.search(r"""@import|url\(\s*['"]?(?!#)|\bfetch\(|\bimport\(|require""", html)
    assert "{{" not in html.replace(LETTERS, "")


def test_two_sliders_do_not_meet():
    """Ids come from the content: stable for one slider, apart for two."""
    one, again, other = (slider(roofline, scale=scales).html for scales in ([1, 2], [1, 2], [3, 4]))
    assert one == again
    ids = [set(re.findall(r'\bid="([^"]+)"', html)) for html in (one, other)]
    assert ids[0].isdisjoint(ids[1])


def test_a_slider_without_a_kernel_is_html_and_one_line():
    """No widget is made where nothing could move it."""
    bundle = slider(roofline, scale=[1, 2])._repr_mimebundle_()
    assert set(bundle) == {"text/html", "text/plain"}
    assert bundle["text/plain"] == "slider: scale (2 frames)"


def test_the_widget_redraws_in_python():
    """With a kernel the same frames are drawn by `plot`."""
    widget = slider(roofline, batch_limit=[64, 128], scale=[1, 2]).widget()
    limit, scale, picture = widget.children
    before = picture.value
    limit.value, scale.value = 1, 1
    assert "Below 64" in before and "Below 128" in picture.value
    assert (limit.description, limit.label) == ("batch limit", "128")


def test_a_large_slider_stays_small():
    """40 frames of 4 curves of 60 points weigh less than 60 kB."""
    x = [2 ** (k / 6) for k in range(60)]
    curves = lambda knob: Curves("t", "x", "y", x, {f"s{i}": [knob * (i + v) for v in x] for i in range(4)})  # noqa: E731
    assert len(slider(curves, knob=[1 + k / 7 for k in range(40)]).html.encode()) < 60_000


@pytest.mark.parametrize(("ranges", "message"), [
    ({"scale": range(1, 402)}, "got 401"),
    ({"scale": range(1, 22), "batch_limit": range(1, 22)}, "got 441"),
    ({"scale": []}, "needs values of scale"),
    ({}, "needs a knob"),
    ({"speed": [1]}, "speed"),
    ({"scale": [1, -1]}, "above 0"),
    ({"scale": [1, math.inf]}, "finite"),
])
def test_ranges_that_make_no_slider(ranges, message):
    """The message says which, or how many."""
    with pytest.raises(ValueError, match=message):
        slider(roofline, **ranges)


def test_frames_must_have_the_same_curves():
    """What appears and vanishes cannot be followed."""
    with pytest.raises(ValueError, match="same series"):
        slider(lambda k: Curves("t", "x", "y", [1, 2], {f"chip {k}": [1, 2]}), k=[1, 2])
