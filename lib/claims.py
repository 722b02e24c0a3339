"""The ledger: claims of the sources, each recomputed in front of the reader and compared with what was printed."""

from dataclasses import dataclass
from html import escape

from .breakdown import Breakdown
from .facts import known, table
from .units import factor, si

RECOMPUTED = 1e-3       # two computations of the same formula agree to this; the ledger prints four to six digits


@dataclass(frozen=True)
class Check:
    """A claim and the value computed for it, in the unit it is meant in; `printed_unit` is what the source calls that unit."""

    id: str
    claim: str
    source: str
    unit: str
    printed_unit: str
    verdict: str
    stated: str
    computed: float
    note: str = ""

    @property
    def error(self):
        """Computed over stated, less one; None where nothing is stated."""
        return self.computed / float(self.stated) - 1 if self.stated else None

    @property
    def cells(self):
        """What its views show: mark and id, claim, stated, computed, error."""
        stated = f"{self.stated} {self.printed_unit}" if self.stated else "nothing"
        error = "" if self.error is None else f"{self.error:+.1%}".replace("-0.0%", "+0.0%")
        mark = {"match": "✓", "rounding": "≈", "disagrees": "≠", "derived": "→", "input": "="}[self.verdict]
        return f"{mark} {self.id}", self.claim, stated, f"{self._digits()} {self.unit}", error

    def _digits(self):
        """One digit more than the source prints, and at least four."""
        digits = max(4, 1 + len(self.stated.partition("e")[0].replace(".", "").lstrip("0")))
        text = f"{self.computed:,.{digits}g}".replace("e+", "e")
        return f"{self.computed:,.0f}" if "e" in text and self.computed < 1e7 else text

    def __repr__(self):
        id, claim, stated, computed, error = self.cells
        error = f" ({error})" if error else ""
        return f"{id}: {claim}: stated {stated}, computed {computed}{error} [{self.source}] {self._why()}".strip()

    def _repr_html_(self):
        id, claim, stated, computed, error = map(escape, self.cells)
        return (f'<div class="check {self.verdict}"><b>{id}</b> {claim}: stated <b>{stated}</b>, computed <b>{computed}</b> '
                f"{error} <small>[{escape(self.source)}] {escape(self._why())}</small></div>")

    def _why(self):
        return self.note if self.verdict in ("disagrees", "rounding") else ""


@dataclass(frozen=True)
class Checks:
    """Several checks, one below the other."""

    rows: tuple[Check, ...]

    def __repr__(self):
        return "\n".join(map(repr, self.rows))

    def _repr_html_(self):
        return "".join(row._repr_html_() for row in self.rows)


def check(id, value):
    """Compare a computed value (a number in SI base units, or a Breakdown) with the claim of that id and return the Check.

    AssertionError when they differ otherwise than the ledger says: a `match` by more than half the last printed digit, a
    `rounding` by more than 10 %, unless digits were cut off (4.77 printed as 4), a `disagrees` by less than half a digit, or any
    of them by more than 0.1 % from the ledger's own independent recomputation. KeyError for an unknown id, ValueError for
    no number."""
    rows = claims()
    row = rows[known("claim", id, rows)]
    value = value.value if isinstance(value, Breakdown) else value
    try:
        computed = float(value) / factor(row["unit"])
    except (TypeError, ValueError):
        raise ValueError(f"{id}: a check takes one number, got {value!r}") from None
    result = Check(id, row["claim"], row["source"], row["unit"], row["printed_unit"] or row["unit"], row["verdict"],
                   row["stated"], computed, row["note"])
    wrong = _wrong(row, computed, result.error)
    if wrong:
        raise AssertionError(f"✗ {repr(result).partition(' ')[2]}: {wrong}")
    return result


def checks(values):
    """Check each {claim id: value}. AssertionError names all that fail as `check` would."""
    passed, failed = [], []
    for id, value in values.items():
        try:
            passed.append(check(id, value))
        except AssertionError as error:
            failed.append(str(error))
    if failed:
        raise AssertionError("\n".join(failed))
    return Checks(tuple(passed))


def _wrong(row, computed, error):
    """What contradicts the ledger's verdict, or None."""
    if row["recomputed"] and not abs(computed - float(row["recomputed"])) <= RECOMPUTED * abs(float(row["recomputed"])):
        return f"the ledger's own recomputation gives {row['recomputed']} {row['unit']}"
    if error is None:
        return None
    off, half = abs(computed - float(row["stated"])), half_digit(row["stated"])
    if row["verdict"] in ("match", "input") and not off <= half:
        return f"off by {off:.3g}, more than half its last printed digit ({half:.3g})"
    truncated = 0 <= (computed - float(row["stated"])) * (1 if computed > 0 else -1) < 2 * half
    if row["verdict"] == "rounding" and not (truncated or off <= max(half, 0.1 * abs(float(row["stated"])))):
        return "more than rounding"
    if row["verdict"] == "disagrees" and off <= half:
        return "the disagreement is gone; the ledger must be told"
    return None


def half_digit(printed):
    """Half a unit of the last digit of a printed number: 0.05 for "7.0", 5e7 for "8.5e9"."""
    digits, _, exponent = printed.lower().partition("e")
    return 0.5 * 10.0 ** (int(exponent or 0) - len(digits.partition(".")[2]))


def claims(topic=None):
    """{id: row} of all claims, or of one topic, as data/claims.csv has them."""
    return {row["id"]: row for row in table("claims") if topic in (None, row["topic"])}


def stated(id):
    """The printed value of a claim in SI base units. ValueError if none was stated."""
    row = claims()[known("claim", id, claims())]
    if not row["stated"]:
        raise ValueError(f"{id} states no value")
    return si(row["stated"], row["unit"])
