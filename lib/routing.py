"""Which experts the tokens of a pass reach, and how unevenly: plain counts, from which mixtures are priced."""

from math import ceil, exp, expm1, lgamma, log, log1p, prod, sqrt
from operator import index

from .elementwise import NUMBERS, positive

STEEPEST = 16           # beyond, the popularity of most experts is no number any more


def experts_touched(experts, top_k, tokens):
    """Distinct experts that uniformly routed tokens reach: E (1 - (1 - k/E)^tokens). Numbers or arrays.

    Each token uses top_k different experts, whatever the others use. ValueError unless 1 <= top_k <= experts, and for negative
    tokens. Source: the chance that all tokens miss an expert; in neither the source chapter nor the Scaling Book."""
    experts, tokens = positive("experts", experts), positive("tokens", tokens, zero=True)
    top_k = positive("top_k", top_k, most=experts)
    positive("top_k - 1", top_k - 1, zero=True)
    positive("experts - top_k", experts - top_k, zero=True)         # `most` is for numbers
    return experts * (1 - (1 - top_k / experts) ** tokens)


def skewed_touched(chances, tokens):
    """Distinct experts that tokens reach, each of which uses expert e with chance chances[e], whatever the others use."""
    tokens = positive("tokens", tokens, zero=True)
    return sum(1 - (1 - p) ** tokens for p in chances)


def popularity(experts, top_k, skew):
    """The chance that a token uses each expert, the most popular first, where popularity falls as 1 / rank^skew. A tuple.

    A token draws its top_k experts one after the other, each in proportion to the popularity of those left. The chance to be
    among them is close to 1 - exp(-c w), with c such that the chances add up to top_k: within 6 % for the popular experts;
    exact for one draw. ValueError for a skew that is negative or above 16, and unless 1 <= top_k <= experts.
    Source: Rosen 1972 on successive sampling."""
    experts, top_k = whole("experts", experts), whole("top_k", top_k)
    if not isinstance(skew, NUMBERS) or not 1 <= top_k <= experts:
        raise ValueError(f"skew is a number, and top_k from 1 to the {experts} experts there are; got {skew!r} and {top_k}")
    weights = [rank ** -positive("skew", skew, zero=True, most=STEEPEST) for rank in range(1, experts + 1)]
    if top_k in (1, experts):
        every = sum(weights)
        return tuple(w / every if top_k == 1 else 1.0 for w in weights)

    def drawn(c):
        return [-expm1(-c * w) for w in weights]
    low, high = 0.0, 1.0
    while sum(drawn(high)) < top_k:
        high *= 2
    while high - low > 2**-50 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if sum(drawn(middle)) < top_k else (low, middle)
    return tuple(drawn(high))


def known_chances(chances, experts, top_k):
    """The chances that a token uses each expert as a tuple, if they are that. ValueError unless there is one for each of the
    experts, from 0 to 1, and they add up to top_k."""
    found = _chances(chances)
    if len(found) != experts or abs(sum(found) - top_k) > 2**-20 * experts:
        raise ValueError(f"chances are {experts} numbers from 0 to 1 that add up to {top_k}, not {chances!r}")
    return found


def expected_max(count, shares):
    """Mean of the largest of several binomial counts: of `count` things, how many the bin that gets most of them gets.

    shares: the chance of each bin. Bins are taken as independent, though their sum is fixed, which gives too little: up to 8 %
    for two to eight bins with few things, within 3 % from 16 bins with two things each. ValueError for a count or shares that
    are none. Source: the distribution of a maximum is the product of the distributions."""
    count, found = whole("count", count), _chances(shares)
    if not found:
        raise ValueError(f"shares are the chances of the bins, numbers from 0 to 1 and one at least, not {shares!r}")
    low, high = max(_start(count, p) for p in found), max(count - _start(count, 1 - p) for p in found)
    sums, mean = {p: _cumulated(count, p, low) for p in set(found)}, float(low)
    for _ in range(low, min(count, high)):
        here = {p: next(below) for p, below in sums.items()}
        beyond = 1 - prod(here[p] for p in found)
        mean += beyond
    return mean


def _start(n, p):
    """A count that a binomial one is hardly ever below: ten standard deviations under its mean."""
    return max(0, int(n * p - 10 * sqrt(n * p * (1 - p)) - 10))


def _cumulated(n, p, low):
    """The chances that a binomial count is at most low, low + 1, ..."""
    total = 0.0
    for m in range(_start(n, p), n):
        ways = lgamma(n + 1) - lgamma(m + 1) - lgamma(n - m + 1)
        total += exp(ways + m * log(p) + (n - m) * log1p(-p)) if 0 < p < 1 else p == 0 and m == 0
        if m >= low:
            yield min(total, 1.0)


def imbalance(chances, groups, tokens):
    """Load of the busiest of several groups of experts over the mean load: what `Plan(imbalance=...)` takes.

    chances: those that a token uses each expert (`popularity`, or counts of your own over tokens), in the order of placement:
    each group holds as many neighbours. tokens: a whole number, routed independently of each other. A group takes at most as
    many of a token's choices as it has experts. ValueError unless the groups divide the experts; as `expected_max`."""
    groups, tokens, found = whole("groups", groups), whole("tokens", tokens), _chances(chances)
    if not tokens or not groups or sum(found) < 0.5 or len(found) % groups:
        raise ValueError(f"tokens are 1 at least, and groups divide the experts, whose chances are from 0 to 1 and add up "
                         f"to one expert at least; got {tokens}, {groups} groups, chances {chances!r}")
    own, mean = len(found) // groups, tokens * sum(found) / groups
    most = min(own, max(round(sum(found)), 1))
    loads = [sum(found[own * g:own * (g + 1)]) for g in range(groups)]
    busiest = expected_max(tokens * most, [min(load / most, 1.0) for load in loads])
    fullest = max(busiest, ceil(mean - 2**-20)) / mean      # a bin has the mean, rounded up, at least
    return min(max(fullest, 1.0), float(groups))


def whole(name, x):
    """`x` as an int if it is a whole number from 0 to 2^30, all of which can be gone through; ValueError otherwise."""
    try:
        if not isinstance(x, bool) and 0 <= index(x) <= 2**30:
            return index(x)
    except TypeError:
        pass
    raise ValueError(f"{name} must be a whole number from 0 to 2^30, got {x!r}")


def _chances(x):
    """Numbers from 0 to 1 as a tuple; an empty one if they are not that."""
    try:
        found = tuple(float(p + 0.0) for p in x)
    except (TypeError, ValueError):
        return ()
    return found if all(0 <= p <= 1 for p in found) else ()
