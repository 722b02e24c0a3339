"""A table of a page: units in its head, numbers as the reader is to see them."""

import re
from dataclasses import dataclass
from html import escape

NUMBER = re.compile(r"–|[-+]?[\d.,]*\d(e\d+)?( ?[%a-zA-Zµ/()]+)?")     # a number, perhaps with its unit; or none


@dataclass(frozen=True)
class Table:
    """Columns by `head`, rows of text or numbers (shown to four significant digits). ValueError for a row of another length."""

    head: tuple
    rows: tuple

    def __post_init__(self):
        rows = tuple(tuple(map(_cell, row)) for row in self.rows)
        short = [row for row in rows if len(row) != len(self.head)]
        if short:
            raise ValueError(f"a row of {len(short[0])} cells under a head of {len(self.head)}: {short[0]}")
        object.__setattr__(self, "rows", rows)

    def __repr__(self):
        lines = [tuple(map(str, self.head)), *self.rows]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        return "\n".join("  ".join(cell.rjust(width) if i else cell.ljust(width)
                                   for i, (cell, width) in enumerate(zip(line, widths, strict=True))).rstrip() for line in lines)

    def _repr_html_(self):
        text = [any(not NUMBER.fullmatch(row[i]) for row in self.rows) for i in range(len(self.head))]
        kinds = [' class="text"' * words for words in text]

        def line(tag, cells, scope=""):
            return "".join(f"<{tag}{scope}{kind}>{escape(str(cell))}</{tag}>" for kind, cell in zip(kinds, cells, strict=True))

        head = line("th", self.head, ' scope="col"')
        body = "".join(f"<tr>{line('td', row)}</tr>" for row in self.rows)
        return f'<div class="table-box"><table class="numbers"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _cell(x):
    if isinstance(x, str):
        return x
    if x is None:
        return "–"
    return f"{x:,.0f}" if abs(x) >= 1000 or x == int(x) else f"{x:#.4g}"
