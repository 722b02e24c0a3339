"""Interconnects, the slice of one that a server occupies, and how long a collective takes on it.

A network cuts slices: `slice(n)` says for n chips how many hops the farthest two are apart, how many bytes a chip sends
per second in a ring collective, and how many array bytes the slice exchanges all-to-all per second. Latency and bandwidth
overlap: a collective takes the longer of the two (Scaling Book, chapter 3). Every network has a `hop_latency`, and an
`overhead` that each collective pays once (launch, synchronisation): 0 unless you set it, since no chip's is published."""

from dataclasses import dataclass, fields, replace
from functools import cache
from math import prod

from .breakdown import slowest, term, total
from .elementwise import positive

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
        return self


@dataclass(frozen=True)
class Torus:
    """Chips on a grid with a link to each neighbour. `link_bandwidth` is one-way, B/s. An axis wraps around from length
    `wrap`; in three dimensions only where every axis is that long (the slice is made of whole cubes)."""

    link_bandwidth: float
    hop_latency: float
    axes: int
    wrap: int
    domain: int
    overhead: float = 0.0

    def grid(self, n):
        """The lengths of the most compact grid of n chips, shortest first."""
        return compact(_within(self, n), self.axes)

    def slice(self, n, shape=None):
        """The most compact grid of n chips, or the given `shape`. ValueError if the torus has no such slice."""
        shape = shape or self.grid(n)
        if prod(shape) != n or len(shape) > self.axes or not all(isinstance(x, int) and x > 0 for x in shape):
            raise ValueError(f"{shape} is no grid of {n} chips in {self.axes} dimensions")
        long = [length >= self.wrap for length in shape]
        wrapped = [all(long) if self.axes == 3 else one for one in long]
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
        return _sliced(self, _within(self, n), min(n - 1, 1), self.egress, n * self.egress)


@dataclass(frozen=True)
class Mesh:
    """A link between every two chips and no switch: a pair shares one link only. `link_bandwidth` is one-way, B/s."""

    link_bandwidth: float
    hop_latency: float
    domain: int
    overhead: float = 0.0

    def slice(self, n):
        links = max(_within(self, n) - 1, 1)
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
        hops = 0 if _within(self, n) == 1 else 1 if n <= 4 else 3 if n <= 32 else 7
        return _sliced(self, n, hops, self.egress, n * self.egress)


@dataclass(frozen=True)
class Tiered:
    """Domains of a `near` network that a slower `far` one joins, chip by chip. Both work at the same time, so the slower sets
    the rate; their latencies add. A slice beyond one domain takes the fewest equal parts of domains."""

    near: Torus | Switch | Mesh | Boardfly
    far: Switch

    @property
    def domain(self):
        """Chips that the far network joins."""
        return self.far.domain

    def slice(self, n):
        n = _within(self, n)
        domains = next(m for m in range(-(-n // self.near.domain), n + 1) if n % m == 0)
        inside, across = self.near.slice(n // domains), self.far.slice(domains)
        if domains == 1:
            return inside
        crossing, moved = 1 - 1 / domains, 1 - 1 / n        # parts of an array that leave their domain, their chip
        stays = 1 - domains / n
        gather = max(stays / inside.bandwidth, crossing * domains / (n * self.far.egress))
        exchange = max(stays / (domains * inside.exchange), crossing / (n * self.far.egress))
        return replace(inside, chips=n, bandwidth=moved / gather, exchange=moved / exchange, overhead=self.near.overhead,
                       far_hops=across.hops, far_latency=self.far.hop_latency)


def _sliced(network, n, hops, bandwidth, exchange):
    return Slice(n, hops, bandwidth, exchange, network.hop_latency, network.overhead if n > 1 else 0.0)


def cut(network, n):
    """The slice of n chips. For an array of counts a Slice of arrays, entry by entry."""
    if not getattr(n, "shape", ()) or isinstance(network, Slice):
        return network.slice(n)
    import numpy
    many = sizes(n)
    if not 1 <= min(many) <= max(many) <= network.domain:
        raise ValueError(f"chips must be whole numbers from 1 to {network.domain} on this network, everywhere")
    slices, found, columns = [network.slice(size) for size in many], numpy.zeros(max(many) + 1), []
    place = numpy.asarray(n).astype(int)
    for f in fields(Slice):
        found[list(many)] = [getattr(one, f.name) for one in slices]
        columns.append(found[place] if found.any() else 0)
    return Slice(*columns)


def sizes(n):
    """The counts of chips in n, a count or an array of them, in order. ValueError unless they are whole numbers."""
    if not getattr(n, "shape", ()):
        return (n,)
    import numpy
    counts = numpy.asarray(n)
    if not counts.size or not ((counts % 1 == 0) & (counts >= 0) & (counts <= MOST)).all():
        raise ValueError(f"chips must be whole numbers up to {MOST}, everywhere")
    return tuple(numpy.flatnonzero(numpy.bincount(counts.astype(int).ravel())).tolist())


def _within(network, n):
    if not hasattr(n, "__index__") or isinstance(n, bool) or not 1 <= n <= network.domain:
        raise ValueError(f"chips must be a whole number from 1 to {network.domain} on this network, got {n!r}")
    return int(n)


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

    "ring" is a reduce-scatter, then an all-gather; "one-shot" sends every partial sum to every chip: half the latency, n/2
    times the bytes. ValueError for another algorithm."""
    if algorithm == "one-shot":
        bytes, on = positive("bytes", bytes, zero=True), cut(network, n)
        return _longer("all-reduce", on, bytes * (n - 1) / on.bandwidth)
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
    bytes, on = positive("bytes", bytes, zero=True), network.slice(2)
    return _longer("send", on, bytes / on.bandwidth)


def _longer(name, on, seconds):
    latency = on.overhead + on.hops * on.hop_latency + on.far_hops * on.far_latency
    return slowest(name, term("latency", latency), term("bandwidth", on.overhead + seconds))
