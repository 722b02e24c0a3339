"""Interconnects, the slice of one that a server occupies, and how long a collective takes on it.

A network cuts slices: `slice(n)` says for n chips how many hops the farthest two are apart, how many bytes a chip sends
per second in a ring collective, and how many array bytes the slice exchanges all-to-all per second. Latency and bandwidth
overlap: a collective takes the longer of the two (Scaling Book, chapter 3). Every network has a `hop_latency`, and an
`overhead` that each collective pays once (launch, synchronisation): 0 unless you set it, since no chip's is published."""

from dataclasses import dataclass, fields, replace
from functools import cache
from math import prod
from numbers import Real
from operator import index

from .breakdown import slowest, term, total
from .elementwise import NUMBERS, maximum, positive

ALGORITHMS = ("ring", "one-shot")
MOST = 10**6            # chips that any network joins


@dataclass(frozen=True)
class Slice:
    """`chips` that take part in a collective. It is a network of its own: it cuts itself.

    `far_hops` lead from one domain to another, at `far_latency` each; inside one domain there are none."""

    chips: int
    hops: int
    bandwidth: float                    # B/s that a chip sends in an all-gather
    exchange: float                     # B/s at which the part of an array that must move is exchanged all-to-all
    hop_latency: float                  # s
    overhead: float = 0.0               # s
    far_hops: int = 0
    far_latency: float = 0.0            # s

    def slice(self, n):
        if isinstance(n, Real) and isinstance(self.chips, Real) and n != self.chips:
            raise ValueError(f"this slice has {self.chips} chips: a collective on it is among {self.chips}, not {n}")
        return self


@dataclass(frozen=True)
class Torus:
    """Chips on a grid with a link to each neighbour. `link_bandwidth` is one-way, B/s. An axis wraps around where its length is
    a multiple of `wrap`; in three dimensions only where all are (the slice is made of whole cubes). A pod of wrap x wrap chips
    has no longer axis."""

    link_bandwidth: float
    hop_latency: float
    axes: int
    wrap: int
    domain: int
    overhead: float = 0.0

    def grid(self, n):
        """The lengths of the most compact grid of n chips, shortest first."""
        if self.axes not in (1, 2, 3):
            raise ValueError(f"a torus has 1, 2 or 3 axes, got {self.axes!r}")
        return compact(_within(self, n), self.axes)

    def slice(self, n, shape=None):
        """The most compact grid of n chips, or the given `shape`. ValueError if the torus has no such slice."""
        n, compactest = _within(self, n), self.grid(n)
        shape = compactest if shape is None else tuple(shape)
        if len(shape) > self.axes or not all(hasattr(x, "__index__") and x > 0 for x in shape) or prod(shape) != n:
            raise ValueError(f"{shape} is no grid of {n} chips in {self.axes} dimensions")
        if self.wrap**self.axes == self.domain and max(shape) > self.wrap:
            raise ValueError(f"no slice of {n} chips: its most compact grid, {'x'.join(map(str, shape))}, is longer than the "
                             f"pod, which has {self.wrap} chips a side")
        shape = (*[1] * (self.axes - len(shape)), *map(index, shape))
        whole = [length % self.wrap == 0 for length in shape]
        wrapped = [all(whole) if self.axes == 3 else one for one in whole]
        axes = [(length, 2 if ring else 1) for length, ring in zip(shape, wrapped, strict=True) if length > 1]
        hops = sum(length // 2 if ways == 2 else length - 1 for length, ways in axes)
        # Of an array exchanged all-to-all, the busiest link along an axis passes this part (brute force in test_network).
        busiest = max([(length**2 - length % 2) / (4 * ways * length * n) for length, ways in axes], default=1)
        used = sum(ways for _, ways in axes) or 1
        return _sliced(self, n, hops, used * self.link_bandwidth, (1 - 1 / max(n, 2)) * self.link_bandwidth / busiest)


@dataclass(frozen=True)
class Switch:
    """Every chip one hop from every other, through switches. `egress` is one-way per chip, B/s."""

    egress: float
    hop_latency: float
    domain: int
    overhead: float = 0.0

    def slice(self, n):
        n = _within(self, n)
        return _sliced(self, n, min(n - 1, 1), self.egress, n * self.egress)


@dataclass(frozen=True)
class Mesh:
    """A link between every two chips and no switch: a pair shares one link only. `link_bandwidth` is one-way, B/s."""

    link_bandwidth: float
    hop_latency: float
    domain: int
    overhead: float = 0.0

    def slice(self, n):
        n = _within(self, n)
        links = max(n - 1, 1)
        return _sliced(self, n, min(n - 1, 1), links * self.link_bandwidth, n * links * self.link_bandwidth)


@dataclass(frozen=True)
class Boardfly:
    """TPU 8i: boards of 4 chips, groups of 8 boards, 36 groups. At most one hop on a board, 3 in a group, 7 in all. How the
    links divide between the tiers is not published: all of a chip's `egress` is taken as usable, an upper bound."""

    egress: float
    hop_latency: float
    domain: int
    overhead: float = 0.0

    def slice(self, n):
        n = _within(self, n)
        hops = 0 if n == 1 else 1 if n <= 4 else 3 if n <= 32 else 7
        return _sliced(self, n, hops, self.egress, n * self.egress)


@dataclass(frozen=True)
class Tiered:
    """Domains of a `near` network that a slower `far` one joins, chip by chip. Both work at the same time, so the slower sets
    the rate; their latencies and overheads add. A slice beyond one domain takes the fewest equal parts of domains."""

    near: Torus | Switch | Mesh | Boardfly
    far: Switch

    @property
    def domain(self):
        """Chips that both networks together join."""
        return max(self.near.domain, self.far.domain)

    def slice(self, n):
        n = _within(self, n)
        domains = next(m for m in range(-(-n // self.near.domain), n + 1) if n % m == 0)
        inside = self.near.slice(n // domains)
        if domains == 1:
            return inside
        across = self.far.slice(domains)
        crossing, moved, stays = 1 - 1 / domains, 1 - 1 / n, 1 - domains / n    # out of the domain, the chip; within the domain
        gather = maximum(stays / inside.bandwidth, crossing * domains / (n * self.far.egress))
        exchange = maximum(stays / (domains * inside.exchange), crossing / (n * self.far.egress))
        return replace(inside, chips=n, bandwidth=moved / gather, exchange=moved / exchange,
                       overhead=self.near.overhead + self.far.overhead, far_hops=across.hops, far_latency=self.far.hop_latency)


def _sliced(network, n, hops, bandwidth, exchange):
    return Slice(n, hops, bandwidth, exchange, network.hop_latency, network.overhead if n > 1 else 0.0)


def cut(network, n):
    """The slice of n chips. For an array of counts a Slice of arrays, entry by entry."""
    if not isinstance(network, Torus | Switch | Mesh | Boardfly | Tiered | Slice):
        raise ValueError(f"a collective takes a network or a slice of one, got {network!r}")
    if not getattr(n, "shape", ()) or isinstance(network, Slice):
        return network.slice(n)
    import numpy
    many = sizes(n)
    if not 1 <= min(many) <= max(many) <= network.domain:
        raise ValueError(f"chips must be whole numbers from 1 to {network.domain} on this network, everywhere")
    slices, found, columns = [network.slice(size) for size in many], numpy.zeros(max(many) + 1), []
    place = numpy.asarray(n).astype(int)
    for f in fields(Slice):
        values = [getattr(one, f.name) for one in slices]
        if not all(isinstance(x, NUMBERS) for x in values):
            raise ValueError("an array of chips takes a network of plain numbers, so that one axis is swept at a time")
        found[list(many)] = values
        columns.append(found[place] if found.any() else 0)
    return Slice(*columns)


def sizes(n):
    """The counts of chips in n, a count or an array of them, in order. ValueError unless they are whole numbers."""
    if not getattr(n, "shape", ()):
        return (n,)
    import numpy
    counts = numpy.asarray(n)
    if counts.dtype.kind not in "iuf" or not counts.size or not ((counts % 1 == 0) & (counts >= 0) & (counts <= MOST)).all():
        raise ValueError(f"chips must be whole numbers up to {MOST}, everywhere")
    return tuple(numpy.flatnonzero(numpy.bincount(counts.astype(int).ravel())).tolist())


def _within(network, n):
    for name in ("link_bandwidth", "egress", "hop_latency", "overhead"):
        if hasattr(network, name):
            positive(name, getattr(network, name), zero=name in ("hop_latency", "overhead"))
    try:
        if not isinstance(n, bool) and 1 <= index(n) <= network.domain:
            return index(n)
    except TypeError:
        pass
    raise ValueError(f"chips must be a whole number from 1 to {network.domain} on this network, got {n!r} "
                     f"(a chip's `interconnect` joins its domains)")


@cache
def compact(n, axes):
    """The lengths of the most compact grid of n chips (the smallest sum), shortest first."""
    if axes == 1:
        return (n,)
    grids = [(first, *compact(n // first, axes - 1)) for first in range(1, n + 1) if n % first == 0]
    return tuple(sorted(min(grids, key=lambda grid: (sum(grid), grid))))


def all_gather(bytes, n, network):
    """Seconds until each of n chips, holding bytes/n each, holds all `bytes`."""
    bytes, on = positive("bytes", bytes, zero=True), cut(network, n)
    return _longer("all-gather", on, bytes * (1 - 1 / n) / on.bandwidth)


def reduce_scatter(bytes, n, network):
    """Seconds until each of n chips, holding a partial sum of all `bytes`, holds a share of the sum: an all-gather backwards."""
    return slowest("reduce-scatter", *all_gather(bytes, n, network).parts)


def all_reduce(bytes, n, network, algorithm="ring"):
    """Seconds until each of n chips, holding a partial sum of all `bytes`, holds the sum.

    "ring" is a reduce-scatter, then an all-gather; "one-shot" gathers every partial sum everywhere, where it is added: half the
    latency, n/2 times the bytes. ValueError for another algorithm."""
    if algorithm == "one-shot":
        return slowest("all-reduce", *all_gather(positive("bytes", bytes, zero=True) * n, n, network).parts)
    if algorithm != "ring":
        raise ValueError(f"algorithm must be one of {', '.join(ALGORITHMS)}, got {algorithm!r}")
    return total("all-reduce", reduce_scatter(bytes, n, network), all_gather(bytes, n, network))


def all_to_all(bytes, n, network):
    """Seconds until an array of `bytes`, cut one way over n chips, is cut another way.

    V / (4 W_ici) on a wrapped ring of even n, both links counted; twice that on a line."""
    bytes, on = positive("bytes", bytes, zero=True), cut(network, n)
    return _longer("all-to-all", on, bytes * (1 - 1 / n) / on.exchange)


def send(bytes, network):
    """Seconds until a chip's neighbour has its `bytes`."""
    bytes, on = positive("bytes", bytes, zero=True), cut(network, 2)
    return _longer("send", on, bytes / on.bandwidth)


def _longer(name, on, seconds):
    latency = on.hops * on.hop_latency + on.far_hops * on.far_latency
    return slowest(name, term("latency", on.overhead + latency), term("bandwidth", on.overhead + seconds))
