"""A number that explains itself: terms, joined by sum or by max, and their formulas in the field's letters."""

from __future__ import annotations

import re
from copy import copy
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cache
from html import escape

from .elementwise import NUMBERS, maximum
from .facts import table
from .units import show


@dataclass(frozen=True, eq=False, repr=False)
class Breakdown:
    """A value and the parts it is the sum or the maximum of.

    `value` is a number in the SI unit `unit`, or an array when swept; `join` is "term", "sum" or "max"; `note` is what
    the value does not say (that the server does not fit); `fits` is False, or a mask, where memory is too small;
    `formula` and `legend` are filled in by `explain`."""

    name: str
    value: object
    unit: str = "s"
    join: str = "term"
    parts: tuple[Breakdown, ...] = ()
    fits: object = True
    note: str = ""
    formula: object = None
    legend: tuple = ()

    def __getitem__(self, path):
        """The part at "a/b". KeyError names the parts there are."""
        node = self
        for name in path.split("/"):
            found = [part for part in node.parts if part.name == name]
            if not found:
                raise KeyError(f"{node.name!r} has no part {name!r}; it has: {', '.join(p.name for p in node.parts)}")
            node = found[0]
        return node

    def __mul__(self, k):
        """The same work k times."""
        parts = tuple([part * k for part in self.parts])
        return Breakdown(self.name, self.value * k, self.unit, self.join, parts, self.fits, self.note)

    @property
    def serial(self):
        """The same work with nothing overlapped: every maximum becomes a sum."""
        return sum(part.serial for part in self.parts) if self.parts else self.value

    @property
    def waits(self):
        """{resource: seconds} that add up to the value: through each maximum, what its slowest part waits for."""
        if not self.parts:
            return {self.name: self.value}
        found = {}
        slower = 1                                          # 1 where no earlier part was the slowest
        for part in self.parts:
            here = 1 if self.join == "sum" else slower * (part.value >= self.value)
            slower = slower - here if self.join == "max" else slower
            for name, value in part.waits.items():
                found[name] = found.get(name, 0) + here * value
        return found

    @property
    def bound(self):
        """Name of the resource that the value waits for most: "compute", "memory", "bandwidth" or "latency"."""
        waits = self.waits
        names = list(waits)
        if not getattr(self.value, "shape", ()):
            return max(names, key=lambda name: float(waits[name]))
        import numpy
        shape = numpy.shape(self.value)
        return numpy.array(names)[numpy.array([numpy.broadcast_to(waits[name], shape) for name in names]).argmax(0)]

    def rows(self, depth=0):
        """(depth, join, name, value, note, formula) of every node, outermost first: what every view draws."""
        swept = getattr(self.value, "shape", ())
        note = self.note or (f"{self.bound}-bound" if self.join == "max" and not swept and self.value else "")
        yield depth, self.join, self.name, show(self.value, self.unit), note, self.formula
        for part in self.parts:
            yield from part.rows(depth + 1)

    def __repr__(self):
        lines = [f"{'' if join == 'term' else join:<4}{'  ' * depth + name:<28}{value:>10}  {note or formula or ''}".rstrip()
                 for depth, join, name, value, note, formula in self.rows()]
        width = max((len(symbol) for symbol, *_ in self.legend), default=0)
        legend = [f"{symbol:<{width}}  {meaning}: {value}" for symbol, meaning, value in self.legend]
        return "\n".join(lines + [""] * bool(legend) + legend)

    def _repr_html_(self):
        last = "waits for, or formula" if self.legend else "waits for"
        nodes = [(depth, name, value, note or formula or "") for depth, _, name, value, note, formula in self.rows()]
        letters = [(0, symbol, value, meaning) for symbol, meaning, value in self.legend]
        tables = [(("part", "value", last), nodes), (("letter", "value", "meaning"), letters)]
        return "".join(_html_table(head, rows) for head, rows in tables if rows)

    def _repr_latex_(self):
        if not any(formula is not None for *_, formula in self.rows()):
            return None
        from sympy import latex
        terms = [(name, value, formula) for _, _, name, value, _, formula in self.rows() if formula is not None]
        names = {symbol: _latex(symbol.name) for *_, formula in terms for symbol in formula.free_symbols}
        lines = [rf"\text{{{name}}} &= {latex(formula, symbol_names=names)} &&= \text{{{value}}}"
                 for name, value, formula in terms]
        return r"$$\begin{aligned}" + r" \\ ".join(lines) + r"\end{aligned}$$"


def _html_table(head, rows):
    """Rows of (depth, first, second, third cell); depth indents the first."""
    top = "".join(f'<th scope="col">{name}</th>' for name in head)
    body = "".join(f'<tr><td style="padding-left:{0.5 + 1.2 * depth:.1f}em">{_typeset(first)}</td><td>{escape(second)}</td>'
                   f"<td>{_typeset(str(third))}</td></tr>" for depth, first, second, third in rows)
    return f'<div class="table-box"><table class="breakdown"><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>'


def _typeset(text):
    """A formula or a name as HTML: powers raised, indices lowered, products with a dot."""
    text = re.sub(r"\*\*(?:(\w+)|\(([^()]*)\))", r"<sup>\1\2</sup>", escape(text)).replace("**", "^")
    return re.sub(r"\b([a-zA-Z]+)_(\w+)", r"\1<sub>\2</sub>", text).replace("*", "·")


def _latex(letter):
    """A letter as LaTeX: its index upright where it is a word."""
    letter, primes = letter.rstrip("'").replace("α", r"\alpha"), "'" * letter.count("'")
    base, _, below = letter.partition("_")
    return base + primes + (rf"_{{\text{{{below}}}}}" if below else "")


def term(name, value, unit="s"):
    """A leaf: one resource's time, or one thing's bytes."""
    return Breakdown(name, value, unit)


def total(name, *parts):
    """Parts one after the other: the value is their sum."""
    value = parts[0].value
    for part in parts[1:]:
        value = value + part.value
    return Breakdown(name, value, parts[0].unit, "sum", parts)


def slowest(name, *parts):
    """Parts at the same time, perfectly overlapped: the value is the largest."""
    return Breakdown(name, maximum(*[part.value for part in parts]), parts[0].unit, "max", parts)


@cache
def notation():
    """{field, or path of fields: row of notation.csv}: the field's letters, each with its meaning and unit."""
    return {row["field"]: row for row in table("notation")}


def symbolic(x, path, seen):
    """`x` with each number in it replaced by its letter; `seen` collects {letter: (symbol, field, value)}.

    0 and 1 stay: they are the degenerate cases (dense, one chip, no bias) and vanish from the formula."""
    if is_dataclass(x):
        letters = copy(x)                                   # not built anew: what it checks and derives, numbers have passed
        for f in fields(x):
            object.__setattr__(letters, f.name, symbolic(getattr(x, f.name), (*path, f.name), seen))
        return letters
    if isinstance(x, tuple):
        return tuple(symbolic(y, path, seen) for y in x)
    if getattr(x, "shape", ()):
        raise ValueError(f"explain takes one configuration, got an array of {path[-1]}")
    if not isinstance(x, NUMBERS) or isinstance(x, bool) or x == 0 or x == 1 and path[-1] != "bytes":
        return x
    import sympy
    field = next((key for key in (".".join(path[-2:]), path[-1]) if key in notation()), path[-1])
    letter, count = (notation()[field]["symbol"], notation()[field]["count"]) if field in notation() else (field, "")
    while letter in seen and seen[letter][1:] != (field, x):
        letter += "'"
    seen.setdefault(letter, (sympy.Symbol(letter, positive=True, integer=True if count else None), field, x))
    return seen[letter][0]


def explain(f, /, **inputs):
    """The breakdown `f(**inputs)` of one configuration with the formula of every term, and a legend of its letters.

    The formulas come from calling `f` on SymPy symbols: they are the code. ValueError if an input is an array."""
    import sympy
    for name, x in inputs.items():
        if getattr(x, "shape", ()) or isinstance(x, list | tuple):
            raise ValueError(f"explain takes one configuration, got an array of {name}")
    inputs = {name: x.item() if hasattr(x, "item") else x for name, x in inputs.items()}
    if "network" in inputs:                                 # the slice has numbers, where a network has rules
        inputs["network"] = inputs["network"].slice(inputs.get("n", 2))
    seen = {}
    numbers = f(**inputs)
    if not isinstance(numbers, Breakdown):
        raise ValueError(f"explain takes a function that returns a Breakdown; {f.__name__} returns {numbers!r}")
    letters = f(**{name: symbolic(x, (name,), seen) for name, x in inputs.items()})
    used = set().union(*(getattr(leaf.value, "free_symbols", ()) for leaf in leaves(letters)))
    taken, names, legend = set(), {}, []
    for symbol, field, x in seen.values():                  # a prime is only for a letter that is really used twice
        if symbol in used:
            name = symbol.name.rstrip("'")
            while name in taken:
                name += "'"
            taken.add(name)
            names[symbol] = sympy.Symbol(name, **symbol.assumptions0)
            row = notation().get(field, {"meaning": field.replace("_", " "), "unit": ""})
            legend.append((name, row["meaning"], show(x, row["unit"])))

    def zipped(number, letter):
        if number.parts:
            return replace(number, parts=tuple(map(zipped, number.parts, letter.parts)))
        formula = sympy.sympify(letter.value).xreplace(names)
        return replace(number, formula=formula.xreplace({x: sympy.Rational(float(x)) for x in formula.atoms(sympy.Float)}))

    return replace(zipped(numbers, letters), legend=tuple(sorted(legend)))


def leaves(tree):
    """The terms of a breakdown, in order."""
    return [leaf for part in tree.parts for leaf in leaves(part)] if tree.parts else [tree]
