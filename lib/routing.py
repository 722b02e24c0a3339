"""Which experts the tokens of a pass reach, and how unevenly: plain counts, from which mixtures are priced."""

from math import exp, lgamma, log, log1p, prod
from operator import index

from .elementwise import positive


def experts_touched(experts, top_k, tokens):
    """Distinct experts that uniformly routed tokens reach: E (1 - (1 - k/E)^tokens). Numbers or arrays.

    Each token uses top_k different experts, whatever the others use. ValueError unless 1 <= top_k <= experts.
    Source: the chance that all tokens miss an expert; in neither the source chapter nor the Scaling Book."""
    experts = positive("experts", experts)
    top_k, tokens = positive("top_k", top_k, most=experts), positive("tokens", tokens, zero=True)
    return experts * (1 - (1 - top_k / experts) ** tokens)


def popularity(experts, top_k, skew):
    """The chance that a token uses each expert, the most popular first, where popularity falls as 1 / rank^skew.

    A token draws its top_k experts one after the other, each in proportion to the popularity of those left; the chance to be
    among them is 1 - exp(-c w), with c such that the chances add up to top_k. A tuple; skew 0 gives top_k / experts.
    ValueError for a skew that is negative, or unless 1 <= top_k <= experts. Source: Rosen 1972 on successive sampling."""
    skew, top_k = positive("skew", skew, zero=True), positive("top_k", top_k, most=positive("experts", experts))
    weights = [rank ** -skew for rank in range(1, experts + 1)]
    if top_k == experts:
        return (1.0,) * experts

    def drawn(c):
        return [1 - exp(-c * w) for w in weights]
    low, high = 0.0, 1.0
    while sum(drawn(high)) < top_k:
        high *= 2
    while high - low > 2**-50 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if sum(drawn(middle)) < top_k else (low, middle)
    return tuple(drawn(high))


def expected_max(count, shares):
    """Mean of the largest of several binomial counts: of `count` things, how many the bin that gets most of them gets.

    shares: the chance of each bin. Bins are taken as independent, though their sum is fixed: within 3 % from about two things
    a bin on, too low where they are fewer. ValueError for a count or shares that are none.
    Source: the distribution of a maximum is the product of the distributions."""
    whole, shares = isinstance(count, int) and not isinstance(count, bool), [*shares]
    if not whole or count < 0 or not shares or not all(0 <= p <= 1 for p in shares):
        raise ValueError(f"a whole number of things, not negative, and shares from 0 to 1, got {count!r} and {shares[:4]}")
    sums, mean = {p: _cumulated(count, p) for p in set(shares)}, 0.0
    for _ in range(count):
        here = {p: next(below) for p, below in sums.items()}
        beyond = 1 - prod(here[p] for p in shares)
        mean += beyond
        if beyond < 1e-12 and mean:
            break
    return mean


def _cumulated(n, p):
    """The chances that a binomial count is at most 0, 1, 2, ..."""
    total = 0.0
    for m in range(n):
        ways = lgamma(n + 1) - lgamma(m + 1) - lgamma(n - m + 1)
        total += exp(ways + m * log(p) + (n - m) * log1p(-p)) if 0 < p < 1 else p == 0 and m == 0
        yield min(total, 1.0)


def imbalance(chances, groups, tokens):
    """Load of the busiest of several groups of experts over the mean load: what `Plan(imbalance=...)` takes.

    chances: those that a token uses each expert (`popularity`, or counts of your own over tokens), in the order of placement:
    each group holds as many neighbours. tokens: a whole number, routed independently of each other. A group takes at most as
    many of a token's choices as it has experts. ValueError unless the groups divide the experts."""
    chances, groups, tokens = [*chances], index(groups), index(tokens)
    if groups < 1 or len(chances) % groups or tokens < 1:
        raise ValueError(f"{groups} groups must divide {len(chances)} experts, and have a token at least, got {tokens}")
    own, k = len(chances) // groups, round(sum(chances))
    most = min(own, k)
    loads = [sum(chances[own * g:own * (g + 1)]) for g in range(groups)]
    return max(expected_max(tokens * most, [min(load / most, 1.0) for load in loads]) * groups / (tokens * sum(loads)), 1.0)
