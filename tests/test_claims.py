"""The ledger and the book hold each other: every claim has its check, and a changed fact fails the checks that use it."""

import json
import re
from pathlib import Path

import pytest

import lib.chips
import lib.models
from lib import claims
from lib.claims import Check, Checks, _wrong, check, checks, half_digit, stated
from lib.facts import nested, table
from lib.units import factor

BOOK = Path(__file__).parent.parent / "book"
PENDING = ()                    # chapters to be written
ID = re.compile(r"\b(?:S|B\d|X)-\d{3}\b")


def cells(path):
    return json.loads(path.read_text(encoding="utf-8"))["cells"]


def source(cell):
    return "".join(cell["source"])


def checked():
    """Claim ids in the stored outputs of the cells that check something; nbval proves those outputs."""
    text = [json.dumps(cell["outputs"]) for path in BOOK.glob("*.ipynb") for cell in cells(path)
            if cell["cell_type"] == "code" and re.search(r"\bchecks?\(", source(cell))]
    return set(ID.findall("\n".join(text)))


def test_every_claim_of_a_written_chapter_is_checked():
    """Claims and checks match both ways; the claims of chapters to be written are pending by topic."""
    assert checked() <= set(claims())
    owed = {id for id, row in claims().items() if row["topic"] not in PENDING}
    assert owed - checked() == set()


def test_pending_topics_are_topics():
    """The pending list names topics of the ledger, so that it cannot hide a claim by a typing error."""
    assert set(PENDING) <= {row["topic"] for row in claims().values()}


def test_prose_states_what_the_next_cell_checks():
    """Before a chapter checks a claim by name, its text states the printed number ("8.5 billion" for 8.5e9). The evidence
    page prints what is stated from the ledger itself, except where it checks a claim alone."""
    silent = []
    for path in BOOK.glob("*.ipynb"):
        named = r'check\("([SBX]\d?-\d+)' if path.stem == "evidence" else r'"([SBX]\d?-\d+)":?'
        prose = ""
        for cell in cells(path):
            prose += source(cell).replace(",", "") if cell["cell_type"] == "markdown" else ""
            for id in re.findall(named, source(cell)) if cell["cell_type"] == "code" else ():
                silent += [id] if claims()[id]["stated"].partition("e")[0] not in prose else []
    assert silent == []


def run(path, namespace):
    """Run a notebook's code up to its last check, or to the demos that compile and measure; the referee's record does neither."""
    code = [cell for cell in cells(path) if cell["cell_type"] == "code"]
    last = max(i for i, cell in enumerate(code) if re.search(r"\bchecks?\(", source(cell)))
    for cell in code[: last + 1]:
        if "lib.demos" in source(cell) and "import referee" not in source(cell):
            return
        exec(compile(source(cell), path.name, "exec"), namespace)


CHAPTERS = "decode prefill sharding quantization speculation moe disaggregation evidence".split()


def recorded():
    """{id: value} of what the book checks when its code is run on the data as it is now, right or wrong."""
    values = {}

    def note(id, value):
        values[id] = float(getattr(value, "value", value))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lib, "check", note)
        patch.setattr(lib, "checks", lambda many: [note(*item) for item in many.items()])
        forget()
        try:
            for name in CHAPTERS:
                run(BOOK / f"{name}.ipynb", {})
        finally:
            forget()
    return values


@pytest.fixture(scope="module")
def before():
    """What the book checks on the data as they are in the repository."""
    return recorded()


def forget():
    """What was read from the data files is read again."""
    for cached in (lib.chips._read, lib.models._read):
        cached.cache_clear()


FACTS = [("v5e", "hbm_bandwidth"), ("v5e", "bf16"), ("v5e", "hbm_bytes"), ("v5e", "int8"), ("ironwood", "hbm_bandwidth"),
         ("ironwood", "link_bandwidth"), ("h100", "hbm_bandwidth"), ("v4", "hbm_bandwidth"), ("v5p", "bf16"),
         ("v6e", "hbm_bytes"), ("v5e", "link_bandwidth"), ("v5e", "hop_latency"), ("v5p", "link_bandwidth")]


@pytest.mark.parametrize(("name", "field"), FACTS)
def test_a_changed_chip_fails_the_checks_that_use_it(before, monkeypatch, name, field):
    """Three per cent more of a chip's fact, in every reading, fails every check whose value it moves."""
    for row in table("chips"):
        if (row["chip"], row["field"]) == (name, field) and row["value"]:
            monkeypatch.setitem(row, "value", str(1.03 * float(row["value"])))
    assert_moved_checks_fail(before, recorded())


@pytest.mark.parametrize("name", ["llama-2-13b", "llama-3.1-70b", "llama-3.1-405b", "llama-3.1-8b"])
def test_a_changed_model_fails_the_checks_that_use_it(before, monkeypatch, name):
    """Three per cent more layers of a model fail every check whose value they move."""
    block = nested("models")[name]["blocks"][0]
    monkeypatch.setitem(block, "layers", round(1.03 * block["layers"] + 0.5))
    assert_moved_checks_fail(before, recorded())


def assert_moved_checks_fail(before, after):
    moved = {id for id in before if abs(after[id] - before[id]) > 0.01 * abs(before[id])}
    assert moved, "no check uses this fact"
    for id in sorted(moved):
        with pytest.raises(AssertionError):
            check(id, after[id])


def test_a_match_holds_to_half_its_last_printed_digit():
    """7.0 ms is matched by what rounds to it, if the ledger's own recomputation says the same."""
    assert check("S-026", 7.01475e-3).verdict == "match"
    with pytest.raises(AssertionError, match="S-026"):
        check("S-026", 7.06e-3)


def test_a_rounding_may_have_been_cut_off_but_not_padded():
    """4.769 printed as 4 is cut off. 3.231, as far away on the other side, is no rounding; nor is 5.0, a whole digit more."""
    row = {"verdict": "rounding", "stated": "4", "recomputed": ""}
    assert [None, "more than rounding", "more than rounding"] == [_wrong(row, x, x / 4 - 1) for x in (4.769, 3.231, 5.0)]


def test_a_disagreement_must_stay_one():
    """A claim recorded as wrong fails when the computed value comes to agree with it."""
    assert check("B8-073", 76.5944).error == pytest.approx(-0.234, abs=1e-3)
    with pytest.raises(AssertionError):
        check("B8-073", 100.0)


def test_all_failing_checks_of_a_cell_are_named():
    """A changed fact shows every claim it moves, each marked as failed."""
    with pytest.raises(AssertionError) as failure:
        checks({"S-025": 15e-3, "S-026": 7.01475e-3, "B8-073": 100.0})
    assert [line.split(":")[0] for line in str(failure.value).splitlines()] == ["✗ S-025", "✗ B8-073"]


def test_unknown_claim():
    """An id that is not in the ledger is refused with the ids there are."""
    with pytest.raises(KeyError, match="unknown claim 'S-999'.*S-001"):
        check("S-999", 1.0)


@pytest.mark.parametrize("value", [None, "fast", [1.0, 2.0], float("nan"), float("inf")])
def test_a_check_takes_one_number(value):
    """Anything but one finite number is refused or fails; it never passes."""
    with pytest.raises((ValueError, AssertionError)):
        check("S-026", value)


def test_half_digit():
    """Half a unit of the last printed digit, exponents and trailing zeros included."""
    found = [half_digit(text) for text in ("7.0", "240", "8.5e9", "0.27", "20.30")]
    assert found == pytest.approx([0.05, 0.5, 5e7, 0.005, 0.005])


def test_stated_is_in_si():
    """A stated value comes out in SI base units; a claim that states nothing says so."""
    assert stated("S-026") == pytest.approx(7.0e-3)
    with pytest.raises(ValueError, match="states no value"):
        stated("S-005")


def test_every_unit_of_the_ledger_is_known():
    """Each claim's unit converts to SI."""
    assert all(factor(row["unit"]) > 0 for row in claims().values())


def test_views():
    """A check prints stated, computed, error and source; several stand one below the other."""
    one, many = check("S-026", 7.01475e-3), checks({"S-025": 14.0295e-3, "S-026": 7.01475e-3})
    assert isinstance(one, Check) and isinstance(many, Checks)
    assert all(text in repr(one) for text in ("S-026", "stated 7.0 ms", "computed 7.015 ms", "+0.2%", "SEED"))
    assert repr(many).count("\n") == 1 and many._repr_html_().count('class="check match"') == 2


def test_markup_in_a_claim_is_escaped():
    """What a source writes cannot become markup of the page."""
    assert "&lt;b&gt;" in Check("X-1", "<b>", "s", "x", "x", "match", "1", 1.0)._repr_html_()
