"""What is asked of a server: how long prompts and answers are, how often requests come; and lists of requests to play."""

import csv
from dataclasses import dataclass
from io import StringIO
from math import exp, floor, log1p, sqrt
from numbers import Integral, Real
from pathlib import Path
from statistics import NormalDist

from .elementwise import LARGEST, NUMBERS, positive
from .routing import whole

COLUMNS = ("arrival", "prompt", "output", "cached")        # of a trace; the last may be missing


@dataclass(frozen=True)
class Lengths:
    """Token counts and the chance of each: a histogram of prompts or answers. No chances: all alike.

    ValueError unless counts are whole and positive, and chances as many, not negative, and add up to 1."""

    counts: tuple
    chances: tuple = ()

    def __post_init__(self):
        try:
            counts = tuple(positive("a length", whole("a length", count)) for count in self.counts)
            chances = tuple(float(p) for p in self.chances if isinstance(p, Real) and not isinstance(p, bool))
            if len(chances) == len(self.chances) == 0:
                chances = (1 / max(len(counts), 1),) * len(counts)
            every = sum(positive("a chance", p, zero=True) for p in chances)
        except TypeError:
            counts = chances = ()
        if not counts or len(chances) != len(counts) or abs(every - 1) > 2**-30:
            raise ValueError(f"lengths are counts, and as many chances that add up to 1; got {self.counts!r}, {self.chances!r}")
        object.__setattr__(self, "counts", counts)
        object.__setattr__(self, "chances", chances)

    def mean(self, f=float):
        """The mean of f(count)."""
        return sum(p * f(count) for count, p in zip(self.counts, self.chances, strict=True))

    def variation(self, f=float):
        """The standard deviation of f(count) over its mean."""
        return max(self.mean(lambda count: f(count) ** 2) / self.mean(f) ** 2 - 1, 0) ** 0.5


def lognormal(mean, variation, points=64):
    """Lengths of many short and a few long: `variation` is the standard deviation over the mean, before rounding to tokens.

    So many equally likely lengths stand for the distribution, each the middle of its part. The far tail is cut off, so that they
    vary less (0.92 instead of 1, 2 instead of 3); the mean is restored, but for lengths below a token, which count as one.
    ValueError unless all are positive numbers."""
    mean, variation = _one("mean", mean), _one("variation", variation)
    sigma = sqrt(log1p(variation**2))
    middles = [exp(sigma * NormalDist().inv_cdf((i + 0.5) / points)) for i in range(positive("points", whole("points", points)))]
    return Lengths(tuple(max(round(mean * x * points / sum(middles)), 1) for x in middles))


@dataclass(frozen=True)
class Workload:
    """Requests as a server sees them: `prompt` and `output` tokens (a count or `Lengths`), `rate` requests per second, and
    the share `cached` of every prompt, from its beginning, whose keys and values are still there from an earlier request.

    ValueError unless lengths are whole and positive, the rate positive, and the share at least 0 and below 1."""

    prompt: int | Lengths
    output: int | Lengths
    rate: float
    cached: float = 0.0

    def __post_init__(self):
        for name in ("prompt", "output"):
            given = getattr(self, name)
            object.__setattr__(self, name, given if isinstance(given, Lengths) else Lengths((_tokens(name, given),)))
        for name, zero in (("rate", False), ("cached", True)):
            given = getattr(self, name)
            if not isinstance(given, Real) or isinstance(given, bool):
                raise ValueError(f"{name} of a workload is one number, got {given!r}")
            given = positive(name, given if isinstance(given, NUMBERS) else float(given), zero=zero)
            object.__setattr__(self, name, float(given))
        if self.cached >= 1:
            raise ValueError(f"cached is the share of a prompt that need not be read, below 1; got {self.cached}")

    def kept(self, prompt):
        """Tokens of a prompt whose keys and values are there already: whole tokens, and never the last one."""
        return min(floor(self.cached * prompt * (1 + 2**-50)), prompt - 1)     # a share has no exact binary

    @property
    def longest(self):
        """Tokens of the longest prompt and of the longest answer."""
        return tuple(max(count for count, p in zip(each.counts, each.chances, strict=True) if p)
                     for each in (self.prompt, self.output))

    @property
    def context(self):
        """Mean cached tokens of a sequence while it decodes: its prompt and half its answer, long answers counting more."""
        return self.prompt.mean() + (self.output.mean(lambda g: g * g) / self.output.mean() - 1) / 2

    @property
    def length(self):
        """Tokens of a mean request at its end."""
        return self.prompt.mean() + self.output.mean()


def _one(name, x):
    """One positive number, of which 2^40 times as much or as little is still a sensible one."""
    if not isinstance(x, Real) or isinstance(x, bool) or not 2**-40 <= x <= 2**40:
        raise ValueError(f"{name} is one positive number between 2^-40 and 2^40, got {x!r}")
    return float(x)


def _tokens(name, count):
    if isinstance(count, Integral) and not isinstance(count, bool) and count > 0:
        return int(count)
    raise ValueError(f"{name} is a whole and positive number of tokens, or Lengths; got {count!r}")


@dataclass(frozen=True, eq=False)
class Requests:
    """Requests in the order in which they arrive: seconds of `arrival`, tokens of `prompt` and `output`, tokens of the prompt
    that are `cached` already (all 0 by default). Arrays, one entry a request.

    ValueError unless they are equally long, arrivals do not decrease, lengths are whole and positive, and cached < prompt."""

    arrival: object
    prompt: object
    output: object
    cached: object = 0

    def __post_init__(self):
        import numpy
        arrival = positive("arrival", numpy.atleast_1d(numpy.asarray(self.arrival)), zero=True)
        columns = {"prompt": self.prompt, "output": self.output, "cached": self.cached}
        for name, values in columns.items():
            values = positive(name, numpy.broadcast_to(values, arrival.shape), zero=name == "cached", most=2**30)
            if (values % 1).any():
                raise ValueError(f"{name} must be whole numbers of tokens, everywhere")
            columns[name] = values.astype(int)
        if arrival.ndim != 1 or (numpy.diff(arrival) < 0).any() or (columns["cached"] >= columns["prompt"]).any():
            raise ValueError("requests are listed in the order of their arrival, each with fewer cached than prompt tokens")
        for name, values in {"arrival": arrival, **columns}.items():
            object.__setattr__(self, name, values)

    def __len__(self):
        return len(self.arrival)


def poisson(workload, count, seed=0):
    """So many `Requests` of a workload that arrive independently of each other.

    The same seed gives the same lengths, and the same gaps in units of the mean gap, at every rate. ValueError unless count and
    seed are whole numbers, and for what is no Workload."""
    return bursty(workload, count, seed, variation=1.0)


def bursty(workload, count, seed=0, variation=3.0):
    """So many `Requests` of a workload whose gaps are gamma-distributed: `variation` is their standard deviation over their
    mean: 1 is Poisson, more comes in bursts, less is more regular. Raises as `poisson`, and for a variation not positive."""
    from numpy.random import default_rng
    count, shape = positive("count", whole("count", count)), _one("variation", variation) ** -2
    gaps = default_rng([whole("seed", seed), 0]).gamma(shape, 1 / shape, count)
    drawn = _drawn(workload, count, seed)
    return Requests(gaps.cumsum() / workload.rate, *drawn)


def backlog(workload, count, seed=0):
    """So many `Requests` of a workload that all wait at time 0: they show what a server can do at most. Raises as `poisson`."""
    return Requests([0.0] * positive("count", whole("count", count)), *_drawn(workload, count, seed))


def _drawn(workload, count, seed):
    """Prompts, outputs and cached tokens of so many requests."""
    from numpy import array
    from numpy.random import default_rng
    if not isinstance(workload, Workload):
        raise ValueError(f"requests are drawn from a Workload, got {workload!r}")
    rng = default_rng([whole("seed", seed), 1])
    prompt, output = (rng.choice(each.counts, count, p=each.chances) for each in (workload.prompt, workload.output))
    return prompt, output, array([workload.kept(tokens) for tokens in prompt.tolist()])


def trace(path):
    """`Requests` from a CSV file with the columns arrival (s), prompt, output and perhaps cached (tokens).

    ValueError names the line that is malformed, out of order, or longer or shorter than the head."""
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        line = Path(path).read_bytes()[:error.start].count(b"\n") + 1
        raise ValueError(f"{path} line {line}: {error.reason}, a trace is UTF-8 text") from None
    with StringIO(text, newline="") as lines:
        reader = csv.reader(lines)
        head = tuple(name.strip() for name in next(reader, ()))
        if head not in (COLUMNS, COLUMNS[:3]):
            raise ValueError(f"{path} line 1: the columns of a trace are {', '.join(COLUMNS)} (cached may be missing), "
                             f"got {', '.join(head) or 'nothing'}")
        found, before = [], 0.0
        for row in filter(None, reader):
            where = f"{path} line {reader.line_num}"
            if len(row) != len(head):
                raise ValueError(f"{where}: {len(row)} values under {len(head)} columns")
            values = [_parsed(where, name, text) for name, text in zip(head, row, strict=True)]
            if values[0] < before or len(values) > 3 and values[3] >= values[1]:
                raise ValueError(f"{where}: {', '.join(row)}: an arrival is not before the last one, and cached < prompt")
            before = values[0]
            found.append(values)
    if not found:
        raise ValueError(f"{path} line 2: a trace has at least one request")
    return Requests(*zip(*found, strict=True))


def _parsed(where, name, text):
    try:
        value = float(text) if name == "arrival" else int(text)
    except ValueError:
        value = -1
    if not (name in ("prompt", "output")) <= value <= (LARGEST if name == "arrival" else 2**30):
        least = int(name in ("prompt", "output"))
        kind = "a time in seconds, not negative" if name == "arrival" else f"a whole number of tokens from {least} to 2^30"
        raise ValueError(f"{where}: {name} is {kind}; got {text!r}")
    return value
