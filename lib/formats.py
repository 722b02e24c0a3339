"""What a stored value weighs, its share of the scales included, and which values a server stores in which format."""

from dataclasses import dataclass
from functools import cache

from .facts import known, table

MODULES = ("attention", "ffn", "embedding", "head")
HARDWARE = ("f32", "bf16", "int8", "fp8", "int4", "fp4")    # what matmul units multiply


@dataclass(frozen=True)
class Format:
    """A number format: `bytes` of one stored value with its share of the scales, `math` the hardware format it
    multiplies as without a cast."""

    name: str
    bytes: float
    math: str


def format(name):
    """The format of that name ("int4g128" weighs 4.125 bits). KeyError lists the names; a Format passes as it is.

    Source: the formats' own specifications, in data/formats.csv."""
    return name if isinstance(name, Format) else _named(str(name))


@cache
def _named(name):
    rows = {row["format"]: row for row in table("formats")}
    row = rows[known("format", name, rows)]
    scale = float(row["scale_bits"]) / float(row["group"]) if row["group"] else 0
    return Format(name, (float(row["bits"]) + scale) / 8, row["multiplies_as"])


@dataclass(frozen=True)
class Precision:
    """The format of each kind of value, by name or as a Format; KeyError lists the names.

    `math` is what the matmul units multiply in, all of them: what is stored otherwise is cast to it after the read.
    `attention`, `ffn`, `embedding` and `head` are weights that may differ from `weights` (None: they do not)."""

    weights: Format = "bf16"
    kv: Format = "bf16"
    activations: Format = "bf16"
    math: str = "bf16"
    attention: Format | None = None
    ffn: Format | None = None
    embedding: Format | None = None
    head: Format | None = None

    def __post_init__(self):
        known("math format", self.math, HARDWARE)
        for field in ("weights", "kv", "activations", *MODULES):
            value = getattr(self, field)
            object.__setattr__(self, field, None if value is None and field in MODULES else format(value))

    def of(self, module):
        """The format that a module's weights ("attention", "ffn", "embedding" or "head") are stored in."""
        return getattr(self, module) or self.weights
