"""A number that explains itself: sums, maxima, waits, views and formulas."""

import numpy as np
import pytest
import sympy
from strategies import server

from lib.bounds import attention_intensity, evicted_tokens, exact_critical_batch, server_ratio, step_time
from lib.breakdown import explain, notation, slowest, symbolic, term, total
from lib.chips import chip
from lib.forward import decode_step
from lib.queueing import wait


def tree():
    """3 s of matmul (compute-bound) and 5 s of copy (latency): by hand 8 s, 10 s when nothing overlaps."""
    matmul = slowest("matmul", term("compute", 3.0), term("memory", 2.0))
    return total("step", matmul, slowest("copy", term("latency", 5.0), term("bandwidth", 0.0)))


def test_a_sum_adds_and_a_maximum_takes_the_slowest():
    """max(3, 2) + max(5, 0) = 8 s; with nothing overlapped 3 + 2 + 5 + 0 = 10 s."""
    assert (8.0, 10.0, 3.0, 5.0) == (tree().value, tree().serial, tree()["matmul"].value, tree()["copy/latency"].value)


def test_waits_name_what_each_second_is_spent_on():
    """Through every maximum, only its slowest part counts."""
    assert {"compute": 3.0, "memory": 0.0, "latency": 5.0, "bandwidth": 0.0} == tree().waits
    assert ("latency", "compute") == (tree().bound, tree()["matmul"].bound)


def test_a_tie_is_counted_once():
    """When two parts are equally slow the first is waited for."""
    assert {"compute": 2, "memory": 0} == slowest("m", term("compute", 2), term("memory", 2)).waits


def test_waits_add_up_in_a_sweep():
    """Entry by entry, in a broadcast shape; `bound` is an array of names."""
    swept = total(
        "t",
        slowest("a", term("compute", np.array([1.0, 4.0])), term("memory", np.array([[2.0], [3.0]]))),
        slowest("b", term("latency", 3.5)),
    )
    np.testing.assert_array_equal(swept.value, sum(np.broadcast_to(w, (2, 2)) for w in swept.waits.values()))
    assert [["latency", "compute"], ["latency", "compute"]] == swept.bound.tolist()


def test_work_repeats():
    """Three times the work: every part, and the value."""
    assert (24.0, 9.0, "max") == ((tree() * 3).value, (tree() * 3)["matmul/compute"].value, (tree() * 3)["matmul"].join)


@pytest.mark.parametrize("path", ["matmul/flops", "nothing", "", "matmul/compute/x"])
def test_an_unknown_part_names_the_parts(path):
    """KeyError says what there is."""
    with pytest.raises(KeyError, match="has no part.*it has:"):
        tree()[path]


def test_text_shows_the_tree():
    """One line a node: join, name, value, what it waits for."""
    lines = str(tree()).splitlines()
    assert 7 == len(lines)
    assert ["sum", "step", "8", "s"] == lines[0].split()
    assert ["max", "matmul", "3", "s", "compute-bound"] == lines[1].split()
    assert [(0, "sum", "step"), (1, "max", "matmul"), (2, "term", "compute")] == [row[:3] for row in tree().rows()][:3]


def test_a_name_that_is_markup_is_escaped():
    """HTML shows a part named <b> as it is named."""
    assert "&lt;b&gt;" in total("t", term("<b>", 1.0))._repr_html_()


def test_powers_are_raised_on_a_page():
    """An exponent of one letter or of several stands above the line, never as two dots."""
    page = explain(lambda acceptance, k: term("t", acceptance**k + acceptance ** (k + 1)), acceptance=0.5, k=3)
    assert all(power in page._repr_html_() for power in ("a<sup>k<sub>d</sub></sup>", "a<sup>k<sub>d</sub> + 1</sup>"))


def test_latex_only_with_formulas():
    """Numbers alone have no LaTeX view; explained ones have one line a term."""
    assert tree()._repr_latex_() is None
    text = explain(decode_step, server=server(), batch=64, context=8192)._repr_latex_()
    assert text.startswith("$$") and r"\text{compute}" in text and text.count("{") == text.count("}")


def test_latex_keeps_the_letters():
    """W_ici is W with the index ici: SymPy reads the end of some names as a typeface (W_hbm as a bold h)."""
    text = explain(decode_step, server=server("llama-3-70b", "ironwood", 8), batch=64, context=8192)._repr_latex_()
    assert r"\boldsymbol" not in text
    assert all(rf"{letter}_{{\text{{{index}}}}}" in text for letter, index in [("W", "ici"), ("b", "kv")])


def test_every_letter_has_a_meaning():
    """The legend of the closed forms explains each letter in words of the notation table, not by the name of an argument."""
    for f, inputs in (
        (attention_intensity, dict(group=8, context=8192)),
        (exact_critical_batch, dict(chip=chip("v5e"), d_in=8192, d_out=28672)),
        (step_time, dict(chip=chip("v5e"), n=8, params=13e9, kv=6.7e9, batch=16)),
        (server_ratio, dict(prefill=0.91, step=0.019, batch=32, output=512)),
        (evicted_tokens, dict(batch=32, prompt=8192, output=4096)),
        (wait, dict(rate=2.0, service=0.3, variation=0.5)),
    ):
        meant = {row["symbol"] for row in notation().values()}
        assert {letter.rstrip("'") for letter, *_ in explain(f, **inputs).legend} <= meant


def test_a_breakdown_is_frozen():
    """A result cannot be edited."""
    with pytest.raises(AttributeError):
        tree().value = 1


def linear(chip, batch):
    """A term for the tests of `explain`: 2 B over C."""
    return slowest("line", term("compute", 2 * batch / chip.bf16))


def test_explain_gives_value_formula_and_legend():
    """The formula is the code, in the field's letters: 2 B / C with B = 64 sequences and C = 197 TFLOP/s."""
    told = explain(linear, chip=chip("v5e"), batch=64)
    assert "2*B/C" == str(told["compute"].formula)
    assert 128 / 1.97e14 == told["compute"].value
    assert {("B", "64 sequences"), ("C", "197 TFLOP/s")} == {(letter, value) for letter, _, value in told.legend}


def test_degenerate_counts_vanish_from_the_formula():
    """1 sequence: the letter B does not appear."""
    assert {"C"} == set(map(str, explain(linear, chip=chip("v5e"), batch=1)["compute"].formula.free_symbols))


def test_one_byte_is_no_degenerate_case():
    """int8 weights and fp8 caches weigh 1 byte: their letters stay in the formula, only counts of 0 and 1 vanish."""
    told = explain(decode_step, server=server(weights="int8", kv="fp8"), batch=64, context=8192)
    assert "b" in map(str, told["layers/ffn/memory"].formula.free_symbols)
    assert "b_kv" in map(str, told["layers/attention/memory"].formula.free_symbols)


def test_formulas_give_the_values_back():
    """Substituting the legend's numbers into each formula returns the term, for every leaf of a decode step."""
    inputs, seen = dict(server=server("gpt-oss-120b", "v5e", 8), batch=16, context=4096), {}
    for name, x in inputs.items():
        symbolic(x, (name,), seen)
    values = {symbol: value for symbol, _, value in seen.values()}

    def check(node):
        for part in node.parts:
            check(part)
        if not node.parts:
            assert float(sympy.sympify(node.formula).subs(values)) == pytest.approx(node.value, rel=1e-12)

    check(explain(decode_step, **inputs))


@pytest.mark.parametrize("batch", [np.array([1, 2]), [1, 2], (1, 2)], ids=repr)
def test_explain_takes_one_configuration(batch):
    """ValueError for a sweep, however it is given."""
    with pytest.raises(ValueError, match="one configuration"):
        explain(decode_step, server=server(), batch=batch, context=8192)


def test_explain_checks_its_inputs_first():
    """A bad batch is refused as without explain."""
    with pytest.raises(ValueError, match="batch"):
        explain(decode_step, server=server(), batch=0, context=8192)


@pytest.mark.parametrize("number", [np.int64(64), np.float64(64), np.array(64)], ids=repr)
def test_numbers_of_numpy_get_their_letter(number):
    """The batch of a NumPy scalar is B in the formula like any other."""
    told = explain(decode_step, server=server(), batch=number, context=8192)
    assert "B" in map(str, told["unembed/compute"].formula.free_symbols)


def test_two_values_of_one_field_get_two_letters():
    """Windowed and full layers of different number: L and L'."""
    letters = {
        letter for letter, *_ in explain(decode_step, server=server("gemma-3-27b"), batch=2, context=8192).legend
    }
    assert {"L", "L'"} <= letters


def test_a_breakdown_in_bytes_says_bytes():
    """The unit is the parts' unit."""
    two = total("HBM", term("weights", 1e9, "B"), term("KV cache", 2e9, "B"))
    assert ("B", "3 GB") == (two.unit, next(two.rows())[3])
