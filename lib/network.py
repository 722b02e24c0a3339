"""Interconnects, the slice of one that a server occupies, and how long a collective takes on it.

A network cuts slices: `slice(n)` says for n chips how many hops the farthest two are apart, how many bytes a chip sends
per second in a ring collective, and how many array bytes the slice exchanges all-to-all per second. Latency and bandwidth
overlap: a collective takes the longer of the two (Scaling Book, chapter 3)."""

from dataclasses import dataclass
from functools import cache
from math import prod

from .breakdown import slowest, term, total
from .elementwise import positive


@dataclass(frozen=True)
class Slice:
    """`chips` that take part in a collective. It is a network of its own: it cuts itself."""

    chips: int
    hops: int
    bandwidth: float                    # B/s that a chip sends in an all-gather
    exchange: float                     # B/s at which the part of an array that must move is exchanged all-to-all
    hop_latency: float                  # s

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

    def slice(self, n, shape=None):
        """The most compact grid of n chips, or the given `shape`. ValueError if the torus has no such slice."""
        shape = shape or compact(_within(self, n), self.axes)
        if prod(shape) != n or len(shape) > self.axes or not all(isinstance(x, int) and x > 0 for x in shape):
            raise ValueError(f"{shape} is no grid of {n} chips in {self.axes} dimensions")
        long = [length >= self.wrap for length in shape]
        wrapped = [all(long) if self.axes == 3 else one for one in long]
        ways = [2 if ring else 1 for ring in wrapped]
        used = sum(way for way, length in zip(ways, shape, strict=True) if length > 1) or 1
        hops = sum(length // 2 if ring else length - 1 for length, ring in zip(shape, wrapped, strict=True))
        cut = [way * n // length for way, length in zip(ways, shape, strict=True) if length > 1]
        middle = min(cut, default=1)                        # links through which a quarter of an array passes, each way
        exchange = 4 * middle * (1 - 1 / max(n, 2)) * self.link_bandwidth
        return Slice(n, hops, used * self.link_bandwidth, exchange, self.hop_latency)


@dataclass(frozen=True)
class Switch:
    """Every chip one hop from every other, through switches. `egress` is one-way per chip, B/s."""

    egress: float
    hop_latency: float
    domain: int

    def slice(self, n):
        return Slice(_within(self, n), min(n - 1, 1), self.egress, n * self.egress, self.hop_latency)


@dataclass(frozen=True)
class Mesh:
    """A link between every two chips and no switch: a pair shares one link only. `link_bandwidth` is one-way, B/s."""

    link_bandwidth: float
    hop_latency: float
    domain: int

    def slice(self, n):
        links = max(_within(self, n) - 1, 1)
        return Slice(n, min(n - 1, 1), links * self.link_bandwidth, n * links * self.link_bandwidth, self.hop_latency)


@dataclass(frozen=True)
class Boardfly:
    """TPU 8i: boards of 4 chips, groups of 8 boards, 36 groups. At most one hop on a board, 3 in a group, 7 in all. How the
    links divide between the tiers is not published: all of a chip's `egress` is taken as usable, an upper bound."""

    egress: float
    hop_latency: float
    domain: int

    def slice(self, n):
        hops = 0 if _within(self, n) == 1 else 1 if n <= 4 else 3 if n <= 32 else 7
        return Slice(n, hops, self.egress, n * self.egress, self.hop_latency)


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
    bytes, on = positive("bytes", bytes, zero=True), network.slice(n)
    return slowest("all-gather", term("latency", on.hops * on.hop_latency), term("bandwidth", bytes * (1 - 1 / n) / on.bandwidth))


def reduce_scatter(bytes, n, network):
    """Seconds until each of n chips, holding a partial sum of all `bytes`, holds a share of the sum: an all-gather backwards."""
    return slowest("reduce-scatter", *all_gather(bytes, n, network).parts)


def all_reduce(bytes, n, network):
    """Seconds until each of n chips, holding a partial sum of all `bytes`, holds the sum: reduce-scatter, then all-gather."""
    return total("all-reduce", reduce_scatter(bytes, n, network), all_gather(bytes, n, network))


def all_to_all(bytes, n, network):
    """Seconds until an array of `bytes`, cut one way over n chips, is cut another way."""
    bytes, on = positive("bytes", bytes, zero=True), network.slice(n)
    return slowest("all-to-all", term("latency", on.hops * on.hop_latency), term("bandwidth", bytes * (1 - 1 / n) / on.exchange))
