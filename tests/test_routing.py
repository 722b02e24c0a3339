"""Routing: distinct experts, popularity, the fullest bin and the busiest group, against enumerations and simulated tokens."""

from fractions import Fraction
from itertools import combinations, permutations, product
from math import comb, factorial, prod

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lib.models import FFN
from lib.routing import expected_max, experts_touched, imbalance, popularity
from lib.server import Plan

# Enumerations and simulations: what the closed forms are compared with


def drawn_together(experts, top_k, skew):
    """{experts of a token: its chance}, experts drawn one after the other in proportion to 1 / rank^skew, by all orders."""
    weights, found = [rank**-skew for rank in range(1, experts + 1)], {}
    for order in permutations(range(experts), top_k):
        chance, left = 1.0, sum(weights)
        for expert in order:
            chance, left = chance * weights[expert] / left, left - weights[expert]
        found[frozenset(order)] = found.get(frozenset(order), 0) + chance
    return found


def chances_of(drawn, experts):
    """The chance of each expert to be among those of a token."""
    return tuple(sum(p for chosen, p in drawn.items() if expert in chosen) for expert in range(experts))


def fullest(count, shares):
    """Mean of the fullest of bins that share `count` things: one minus n! [x^n] prod_bins sum_{j <= m} (p x)^j / j!."""
    mean = 0.0
    for m in range(count):
        polynomial = np.ones(1)
        for p in shares:
            polynomial = np.convolve(polynomial, [p**j / factorial(j) for j in range(m + 1)])[: count + 1]
        together = polynomial[count] * float(factorial(count)) if len(polynomial) > count else 0.0
        mean += 1 - together
    return mean


def routed(experts, top_k, skew, tokens, passes, seed):
    """[passes, tokens, experts] truths: whether a token uses an expert, drawn one after the other (Gumbel's trick)."""
    keys = np.random.default_rng(seed).gumbel(size=(passes, tokens, experts)) - skew * np.log(np.arange(1, experts + 1))
    used = np.zeros(keys.shape, bool)
    np.put_along_axis(used, np.argpartition(-keys, top_k - 1, axis=-1)[..., :top_k], True, axis=-1)
    return used


# Distinct experts


@pytest.mark.parametrize(("E", "k", "tokens"), [(4, 1, 5), (4, 2, 3), (5, 2, 2), (5, 3, 3), (6, 5, 2), (3, 3, 2)])
def test_distinct_experts_by_enumeration(E, k, tokens):
    """All choices of k experts by every token, each as likely."""
    choices = list(combinations(range(E), k))
    counts = [len(set().union(*chosen)) for chosen in product(choices, repeat=tokens)]
    assert sum(counts) / len(counts) == pytest.approx(experts_touched(E, k, tokens), rel=1e-12)


T11 = [  # formulas.md: experts, top k; distinct experts and per cent at 1, 4, 8 ... 256 tokens
    (16, 2, "2.0 6.6 10.5 14.1 15.8 16.0 16.0 16.0", "12 41 66 88 99 100 100 100"),
    (8, 2, "2.0 5.5 7.2 7.9 8.0 8.0 8.0 8.0", "25 68 90 99 100 100 100 100"),
    (128, 4, "4.0 15.3 28.7 51.0 81.7 111.2 125.8 128.0", "3 12 22 40 64 87 98 100"),
    (256, 8, "8.0 30.5 57.4 102.0 163.3 222.4 251.6 255.9", "3 12 22 40 64 87 98 100"),
]


@pytest.mark.parametrize(("E", "k", "counts", "percent"), T11)
def test_distinct_experts_of_the_table(E, k, counts, percent):
    """T11, in one sweep over tokens."""
    touched = experts_touched(E, k, [1, 4, 8, 16, 32, 64, 128, 256])
    assert counts.split() == [f"{x:.1f}" for x in touched]
    assert percent.split() == [f"{x:.0f}" for x in 100 * touched / E]


def test_distinct_experts_take_arrays_of_everything():
    """Experts down, tokens across; 0 tokens reach none, and narrow integers do not overflow."""
    found = experts_touched(np.array([[8], [16]], np.int8), np.int8(2), np.array([0, 1, 4], np.int8))
    assert [[0.0, 2.0, 5.5], [0.0, 2.0, 6.6]] == np.round(found, 1).tolist()


def test_no_token_uses_more_experts_than_each_entry_has():
    """In a sweep over layers too: 8 experts of 4 would make 4 (1 - (1 - 2)^3) = 8 distinct ones of them."""
    with pytest.raises(ValueError, match="top_k"):
        experts_touched(np.array([4, 8]), 8, 3)


@pytest.mark.parametrize(
    "f", [lambda k: experts_touched(8, k, 4), lambda k: popularity(8, k, 1.0)], ids=["touched", "popular"]
)
def test_a_token_uses_an_expert_at_least(f):
    """Half an expert is none: ValueError unless 1 <= top_k."""
    with pytest.raises(ValueError, match="top_k"):
        f(0.5)


@pytest.mark.parametrize("skew", [0, 0.5, 1.0, 2.0])
@pytest.mark.parametrize("tokens", [1, 2, 3])
def test_distinct_experts_of_skewed_routing_by_enumeration(skew, tokens):
    """What an expert is missed by is each token by itself: exact for any router, whatever experts it draws together."""
    drawn = drawn_together(5, 2, skew)
    mean = sum(
        prod(drawn[chosen] for chosen in each) * len(frozenset().union(*each)) for each in product(drawn, repeat=tokens)
    )
    assert mean == pytest.approx(FFN(8, 5, 2, chances=chances_of(drawn, 5)).touched(tokens), rel=1e-12)


def test_distinct_experts_of_simulated_tokens():
    """64 of DeepSeek-V3's kind (256 experts, 8 of them), popularity 1 / sqrt(rank): 205 distinct ones; all alike, 222."""
    used = routed(256, 8, 0.5, 64, 40, seed=1).any(1).sum(-1).mean()
    assert used == pytest.approx(FFN(8, 256, 8, chances=popularity(256, 8, 0.5)).touched(64), rel=0.01)
    assert 1.05 < 222.4 / used < 1.15


# Popularity


@pytest.mark.parametrize(("E", "k"), [(8, 1), (8, 2), (16, 4), (256, 8), (7, 6)])
@pytest.mark.parametrize("skew", [0, 0.3, 1, 2.5])
def test_chances_add_up_to_the_experts_of_a_token(E, k, skew):
    """One for each expert, the most popular first, none above 1."""
    found = popularity(E, k, skew)
    assert isinstance(found, tuple) and E == len(found)
    assert k == pytest.approx(sum(found), rel=1e-12)
    assert list(found) == sorted(found, reverse=True) and 0 < found[-1] <= found[0] <= 1


def test_without_skew_all_are_alike():
    """k / E; and 1 where a token uses all experts, however they are liked."""
    assert [2 / 8] * 8 == pytest.approx(popularity(8, 2, 0))
    assert (1.0,) * 8 == popularity(8, 8, 3.0)


def test_rare_experts_are_used_in_proportion_to_their_popularity():
    """Few of many experts: the chances fall as 1 / rank^skew."""
    found = popularity(10_000, 1, 0.5)
    assert 10 == pytest.approx(found[99] / found[9_999], rel=1e-2)


@pytest.mark.parametrize(
    ("E", "k", "skew"), [(8, 1, 0.5), (8, 1, 1.0), (8, 2, 0.5), (8, 2, 1.0), (6, 3, 1.0), (6, 5, 1.0)]
)
def test_popularity_by_enumeration(E, k, skew):
    """The most popular expert to 5 %, of all orders of k draws without replacement; where k = 1 it is w / sum of w."""
    exact = chances_of(drawn_together(E, k, skew), E)
    assert exact[0] == pytest.approx(popularity(E, k, skew)[0], rel=0.05)


@pytest.mark.parametrize(("E", "k", "skew"), [(64, 8, 0.5), (64, 8, 1.0), (128, 4, 1.0)])
def test_popularity_of_simulated_tokens(E, k, skew):
    """Each of the eight most popular experts to 5 %, and the less popular half together."""
    used, found = routed(E, k, skew, 400, 50, seed=2).mean((0, 1)), np.array(popularity(E, k, skew))
    np.testing.assert_allclose(found[:8], used[:8], rtol=0.05)
    assert used[E // 2 :].sum() == pytest.approx(found[E // 2 :].sum(), rel=0.05)


@pytest.mark.parametrize(("E", "k", "skew"), [(256, 8, 400.0), (8, 2, 16.1), (8, 2, 1e30)])
def test_an_extreme_skew_is_refused(E, k, skew):
    """Beyond 16 the popularity of most experts is no number any more."""
    with pytest.raises(ValueError, match="skew .* at most 16"):
        popularity(E, k, skew)


def test_the_steepest_skew_leaves_the_first_k():
    """At 16 the most popular experts are used by every token, the last hardly ever, and none of it is NaN."""
    found = popularity(256, 8, 16.0)
    assert [1] * 6 == pytest.approx(found[:6], abs=1e-4) and 0 < found[-1] < 1e-20
    assert 8 == pytest.approx(sum(found))


def test_many_things_in_many_bins():
    """The largest of 64 counts of a million things: 2.3637 deviations above the mean (order statistics of the normal law)."""
    mean, deviation = 1e6 / 64, (1e6 / 64 * 63 / 64) ** 0.5
    assert expected_max(10**6, [1 / 64] * 64) == pytest.approx(mean + 2.3637 * deviation, abs=0.1 * deviation)


# The fullest bin


@pytest.mark.parametrize(
    ("count", "shares"),
    [
        (1, (0.5, 0.5)),
        (3, (0.5, 0.5)),
        (2, (0.2, 0.7, 0.1)),
        (4, (0.25,) * 4),
        (3, (1, 0.5)),
        (3, (0, 0.5)),
        (2, (0, 1, 1)),
    ],
)
def test_the_largest_of_independent_counts_by_enumeration(count, shares):
    """Every combination of binomial counts with its chance."""

    def chance(p, m):
        return comb(count, m) * Fraction(p) ** m * (1 - Fraction(p)) ** (count - m)

    counts = product(range(count + 1), repeat=len(shares))
    mean = sum(max(each) * prod(map(chance, shares, each)) for each in counts)
    assert float(mean) == pytest.approx(expected_max(count, shares), rel=1e-12)


def test_two_bins_by_hand():
    """Of two independent fair counts of one thing the largest is 0 once in four; of two things 1.375."""
    assert [0.75, 1.375] == pytest.approx([expected_max(n, (0.5, 0.5)) for n in (1, 2)])
    assert (0, 0, 7) == (expected_max(0, (0.5, 0.5)), expected_max(7, (0, 0)), expected_max(7, (0.1, 1)))


@pytest.mark.parametrize(("bins", "count"), [(2, 4), (4, 8), (8, 16), (16, 32), (32, 64), (64, 128), (2, 64), (8, 128)])
def test_bins_may_be_taken_as_independent(bins, count):
    """What the docstring says of bins that share what there is: within 3 % from 16 bins on, too low by 8 % at most below."""
    ratio = expected_max(count, [1 / bins] * bins) / fullest(count, [1 / bins] * bins)
    assert (0.97 if bins >= 16 else 0.92) < ratio <= 1


@given(st.lists(st.floats(0.05, 1), min_size=1, max_size=6), st.integers(1, 12))
@settings(max_examples=50)
def test_the_fullest_bin_lies_between_the_mean_and_all(weights, count):
    """At least what the largest share gets on average, at most everything, and never above bins whose sum is fixed."""
    shares = [w / sum(weights) for w in weights]
    found = expected_max(count, shares)
    assert count * max(shares) <= found * (1 + 1e-9) and found <= count * (1 + 1e-9)
    assert found <= fullest(count, shares) * (1 + 1e-9)
    assert found <= expected_max(count + 1, shares) * (1 + 1e-9)


def test_many_things_follow_the_normal_law():
    """The largest of 8 normal numbers is 1.4236 deviations above the mean (a table of order statistics)."""
    count = 100_000
    expected = count / 8 + 1.42360 * (count * 1 / 8 * 7 / 8) ** 0.5
    assert expected == pytest.approx(expected_max(count, [1 / 8] * 8), rel=1e-4)


def test_chances_too_small_for_the_rest_to_matter():
    """1e-14 each for 8 bins and 10 things: nearly always nothing, 8e-13 on average, not 0."""
    assert 8e-13 == pytest.approx(expected_max(10, [1e-14] * 8), rel=1e-2)


# The busiest group

SIMULATED = [  # experts, top k, skew; groups, tokens
    (8, 2, 0.0, 4, 64),
    (8, 2, 1.0, 2, 64),
    (8, 2, 1.0, 8, 16),
    (16, 4, 1.0, 4, 16),
    (64, 8, 0.0, 8, 16),
    (64, 8, 0.5, 8, 64),
    (64, 8, 1.0, 16, 16),
    (64, 8, 1.0, 64, 4),
    (128, 4, 0.5, 16, 64),
]


@pytest.mark.parametrize(("E", "k", "skew", "groups", "tokens"), SIMULATED)
def test_imbalance_of_simulated_tokens(E, k, skew, groups, tokens):
    """Load of the busiest group over the mean, of passes whose tokens draw their experts one after the other: to 5 %."""
    passes = max(150, 200_000 // (E * tokens))
    loads = routed(E, k, skew, tokens, passes, seed=3).reshape(passes, tokens, groups, E // groups).sum((1, 3))
    busiest = loads.max(1).mean() / (tokens * k / groups)
    assert busiest == pytest.approx(imbalance(popularity(E, k, skew), groups, tokens), rel=0.05)


def test_a_group_of_all_experts_has_the_mean_load():
    """One group: no imbalance. As many experts as a token uses: none either."""
    assert 1 == imbalance(popularity(8, 2, 1.0), 1, 5) == imbalance([1.0] * 8, 4, 5)


@pytest.mark.parametrize("groups", [2, 4, 8])
def test_many_tokens_leave_the_popularity_of_the_first_group(groups):
    """By hand: the share of the most popular neighbours over the mean share; without skew 1."""
    chances = popularity(8, 2, 1.0)
    share = sum(chances[: 8 // groups]) * groups / 2
    assert share == pytest.approx(imbalance(chances, groups, 20_000), rel=0.01)
    assert 1 == pytest.approx(imbalance([0.25] * 8, groups, 20_000), rel=0.02)


def test_the_order_of_placement_matters():
    """Popular experts dealt out over four groups of two: 1st with 8th, 2nd with 7th; less than neighbours together."""
    first, *rest = chances = popularity(8, 2, 1.0)
    dealt = [x for pair in zip(chances[:4], chances[:3:-1], strict=True) for x in pair]
    assert (first + rest[-1]) * 4 / 2 == pytest.approx(imbalance(dealt, 4, 20_000), rel=0.01)
    assert imbalance(dealt, 4, 64) < imbalance(chances, 4, 64)


def test_a_group_takes_no_more_than_it_has_experts():
    """One expert is used once by a token: the busiest of 8 has at most 8/2 times the mean, of 2 groups of four 2."""
    hot = (1.0, 1.0, 0, 0, 0, 0, 0, 0)
    assert [4, 2] == pytest.approx([imbalance(hot, groups, 10) for groups in (8, 2)])


@given(
    st.sampled_from([(8, 1), (8, 2), (16, 4), (64, 8), (8, 7)]),
    st.floats(0, 3),
    st.sampled_from([1, 2, 4, 8]),
    st.integers(1, 200),
)
@settings(max_examples=50)
def test_imbalance_is_at_least_one_and_falls_with_tokens(sizes, skew, groups, tokens):
    """And never more than all choices that one group can take over the mean."""
    E, k = sizes
    chances = popularity(E, k, skew)
    found = imbalance(chances, groups, tokens)
    assert 1 <= found <= groups * min(E // groups, k) / k * (1 + 1e-9)
    assert imbalance(chances, groups, 2 * tokens) <= found * (1 + 1e-9)
    assert Plan(1, expert=groups, imbalance=found).imbalance == found


@given(st.sampled_from([(8, 2), (64, 8)]), st.floats(0, 2), st.floats(0.01, 1), st.integers(1, 100))
@settings(max_examples=30)
def test_more_skew_is_more_imbalance(sizes, skew, more, tokens):
    """With popular experts as neighbours."""
    even, skewed = (imbalance(popularity(*sizes, x), 4, tokens) for x in (skew, skew + more))
    assert even <= skewed * (1 + 1e-6)


def test_counts_of_your_own():
    """How often 100 tokens used each of four experts, over tokens; NumPy's numbers as well, for a plan too."""
    counts = np.array([90, 60, 30, 20])
    busiest = imbalance(counts / 100, np.int64(2), np.int32(50))
    assert busiest == imbalance([0.9, 0.6, 0.3, 0.2], 2, 50)
    assert busiest == pytest.approx(1.5, rel=0.02) and Plan(expert=2, imbalance=busiest).imbalance == busiest


def test_counts_that_are_not_over_tokens():
    """90 is no chance: refused, not 1.0 as if nothing were uneven."""
    with pytest.raises(ValueError, match="chance|from 0 to 1"):
        imbalance([90, 60, 30, 20], 2, 100)


@pytest.mark.parametrize("E", [8, 64])
def test_experts_that_many_tokens_miss(E):
    """Skewed routing reaches as many experts as even routing in the end, and never more on the way."""
    even, skewed = FFN(8, E, 2), FFN(8, E, 2, chances=popularity(E, 2, 1.0))
    for tokens in (1, 2, 8, 64, 512):
        assert skewed.touched(tokens) <= even.touched(tokens) * (1 + 1e-9)
    assert E == pytest.approx(skewed.touched(10**6))
