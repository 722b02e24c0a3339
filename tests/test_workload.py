"""Lengths, workloads and lists of requests: moments by hand, drawn requests against them, traces line by line."""

from math import exp, log, sqrt

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lib.workload import Lengths, Requests, Workload, backlog, bursty, lognormal, poisson, trace

TWO = Lengths((100, 1000), (0.75, 0.25))
histograms = st.lists(st.tuples(st.integers(1, 4000), st.integers(1, 9)), min_size=1, max_size=6).map(
    lambda pairs: Lengths(tuple(n for n, _ in pairs), tuple(k / sum(k for _, k in pairs) for _, k in pairs))
)


def test_lengths_by_hand():
    """0.75 x 100 + 0.25 x 1000 = 325; of squares 257,500. No chances: all alike."""
    assert (325, 257_500) == (TWO.mean(), TWO.mean(lambda n: n * n))
    assert Lengths((1, 2, 3)) == Lengths([1, 2, 3], [1 / 3] * 3) == Lengths(np.array([1, 2, 3]), np.full(3, 1 / 3))
    assert 7 == Lengths((7,)).mean() and hash(TWO) == hash(Lengths((100, 1000), (0.75, 0.25)))


@pytest.mark.parametrize("variation", [0.3, 1, 2, 3])
@pytest.mark.parametrize("mean", [50, 2000, 100_000])
def test_lognormal_lengths_keep_their_mean(mean, variation):
    """Rounded to tokens, the mean is within half a token; half of them are below the median e^(mu), mean / sqrt(1 + v^2),
    which stretching against the cut tail makes up to a third longer at v = 3."""
    found = lognormal(mean, variation)
    assert mean == pytest.approx(found.mean(), abs=0.5)
    middle = sorted(found.counts)[len(found.counts) // 2]
    assert 1 <= middle * sqrt(1 + variation**2) / mean < 1.45


@pytest.mark.parametrize("variation", [0.1, 0.5, 1])
def test_lognormal_lengths_vary_as_said(variation):
    """The standard deviation over the mean is the `variation` that was asked for, to 10 %: what the cut tail may take."""
    found = lognormal(1e6, variation)
    spread = sqrt(found.mean(lambda n: n * n) / found.mean() ** 2 - 1)
    assert variation == pytest.approx(spread, rel=0.1)


def test_lognormal_lengths_are_the_middles_of_equal_parts():
    """Two parts: quartiles of the lognormal, at z = -0.67449 and 0.67449, stretched to the mean."""
    sigma = sqrt(log(2))
    low, high = exp(-0.674490 * sigma), exp(0.674490 * sigma)
    assert [1e6 * 2 * x / (low + high) for x in (low, high)] == pytest.approx(lognormal(1e6, 1, 2).counts, rel=1e-5)
    assert (1000,) == lognormal(1000, 5, 1).counts


def test_a_workload_by_hand():
    """8,192 + 512: 8,447.5 cached tokens before a step on average, 8,704 at the end."""
    one = Workload(8192, 512, 2.0)
    assert (8447.5, 8704) == (one.context, one.length)
    assert one == Workload(Lengths((8192,)), Lengths((512,)), 2.0, 0.0) and hash(one) == hash(Workload(8192, 512, 2))


@given(histograms, histograms)
def test_the_mean_context_is_over_all_steps(prompt, output):
    """Every step of every request, enumerated: P, P + 1, ..., P + G - 1 tokens, each answer's chance times its steps."""
    steps = weight = 0.0
    for P, p in zip(prompt.counts, prompt.chances, strict=True):
        for G, g in zip(output.counts, output.chances, strict=True):
            steps += p * g * np.arange(P, P + G).sum()
            weight += p * g * G
    assert steps / weight == pytest.approx(Workload(prompt, output, 1.0).context, rel=1e-9)


@given(st.integers(1, 2**20), st.floats(0, 1, exclude_max=True))
def test_what_is_kept_of_a_prompt(prompt, cached):
    """Whole tokens, not more than the share, less than one token fewer, and never the last."""
    kept = Workload(prompt, 1, 1.0, cached).kept(prompt)
    assert isinstance(kept, int) and 0 <= kept < prompt and cached * prompt - 1 < kept <= cached * prompt + 1e-9


def test_percents_of_a_hundred_tokens():
    """29 % of 100 tokens are 29, whatever 0.29 is in binary."""
    assert list(range(100)) == [Workload(100, 1, 1.0, percent / 100).kept(100) for percent in range(100)]


@pytest.mark.parametrize("kind", [np.int8, np.uint16, np.int64])
def test_whole_numbers_of_numpy_are_token_counts(kind):
    """And so are its whole numbers in a histogram."""
    assert Workload(100, 10, 1.0) == Workload(kind(100), kind(10), 1.0)
    assert Lengths((1, 2)) == Lengths((kind(1), kind(2)))


@pytest.mark.parametrize("kind", [np.float64, np.float32, np.int64, np.int32])
def test_numbers_of_numpy_are_rates_and_shares(kind):
    """A rate out of arange or linspace is a rate."""
    assert Workload(100, 10, 2) == Workload(100, 10, kind(2), kind(0))


# Requests


def test_requests_by_hand():
    """One number for all, or one each; as many as there are arrivals."""
    one = Requests([0, 0.5, 0.5], [5, 6, 7], 2)
    assert (3, [5, 6, 7], [2, 2, 2], [0, 0, 0]) == (
        len(one),
        one.prompt.tolist(),
        one.output.tolist(),
        one.cached.tolist(),
    )
    assert [np.dtype(float), np.dtype(int), np.dtype(int)] == [x.dtype for x in (one.arrival, one.prompt, one.cached)]
    assert 1 == len(Requests(0.0, 5, 1))


@pytest.mark.parametrize("arrivals", [poisson, lambda *how: bursty(*how, variation=0.5), backlog])
def test_the_same_seed_gives_the_same_requests(arrivals):
    """Another seed gives others."""
    load = Workload(TWO, TWO, 2.0, 0.5)
    one, same, other = (arrivals(load, 500, seed) for seed in (3, 3, 4))
    for name in ("arrival", "prompt", "output", "cached"):
        np.testing.assert_array_equal(getattr(one, name), getattr(same, name))
    assert (one.prompt != other.prompt).any() and (one.output != one.prompt).any()


def test_rates_stretch_time_only():
    """The same seed gives the same lengths, and gaps that are the same in units of the mean gap."""
    slow, fast = (poisson(Workload(TWO, 50, rate), 1000, 1) for rate in (0.1, 40.0))
    np.testing.assert_array_equal(slow.prompt, fast.prompt)
    np.testing.assert_allclose(slow.arrival * 0.1, fast.arrival * 40, rtol=1e-12)


def test_more_requests_begin_with_the_same_arrivals():
    """A longer run is the shorter one continued, as far as its times go."""
    short, long = (poisson(Workload(100, 10, 2.0), count, 1) for count in (100, 1000))
    np.testing.assert_allclose(short.arrival, long.arrival[:100], rtol=1e-12)


@pytest.mark.parametrize("variation", [0.2, 1.0, 3.0])
def test_gaps_vary_as_said(variation):
    """200,000 gaps: mean 1 / rate to 1.5 %, four standard errors of the burstiest 2.7 %; deviation to 3 %."""
    gaps = np.diff(bursty(Workload(100, 10, 4.0), 200_000, 0, variation).arrival, prepend=0)
    assert 0.25 == pytest.approx(gaps.mean(), rel=0.01 * max(variation, 1))
    assert variation == pytest.approx(gaps.std() / gaps.mean(), rel=0.03)


def test_poisson_gaps_are_exponential():
    """A share e^-1 is longer than the mean, e^-3 than three of them; neighbours do not know each other. 200,000 gaps."""
    gaps = np.diff(poisson(Workload(100, 10, 1.0), 200_000).arrival)
    assert [exp(-1), exp(-3)] == pytest.approx([(gaps > x).mean() for x in (1, 3)], abs=0.004)
    assert abs(np.corrcoef(gaps[1:], gaps[:-1])[0, 1]) < 0.01
    np.testing.assert_array_equal(
        poisson(Workload(5, 5, 1.0), 9, 2).arrival, bursty(Workload(5, 5, 1.0), 9, 2, 1).arrival
    )


def test_lengths_are_drawn_by_their_chances():
    """100,000 requests: shares within 0.006, four standard errors; prompt and answer do not know each other."""
    drawn = poisson(Workload(TWO, TWO, 1.0, 0.25), 100_000)
    for tokens in (drawn.prompt, drawn.output):
        assert {100, 1000} == set(tokens.tolist())
        assert 0.25 == pytest.approx((tokens == 1000).mean(), abs=0.006)
    assert abs(np.corrcoef(drawn.prompt, drawn.output)[0, 1]) < 0.015
    np.testing.assert_array_equal(drawn.cached, drawn.prompt // 4)


def test_a_backlog_waits_at_time_0():
    """Whatever the rate."""
    one, other = (backlog(Workload(TWO, 10, rate), 100, 5) for rate in (1e-3, 1e3))
    assert not one.arrival.any() and 100 == len(one)
    np.testing.assert_array_equal(one.prompt, other.prompt)


# Traces


def test_a_trace_is_its_lines(tmp_path):
    """With and without cached tokens; blank lines and spaces do not count."""
    path = tmp_path / "trace.csv"
    path.write_text("arrival, prompt, output, cached\n0, 100, 10, 50\n\n0.5,7,1,0\n0.5,8,2,7\n", encoding="utf-8")
    one = trace(path)
    assert [[0, 0.5, 0.5], [100, 7, 8], [10, 1, 2], [50, 0, 7]] == [
        getattr(one, name).tolist() for name in ("arrival", "prompt", "output", "cached")
    ]
    path.write_text("arrival,prompt,output\r\n1e-3,5,5\r\n", encoding="utf-8")
    assert ([0.001], [0]) == (trace(str(path)).arrival.tolist(), trace(path).cached.tolist())


def test_what_is_drawn_can_be_written_and_read(tmp_path):
    """A trace of 200 drawn requests gives them back, to the last bit."""
    drawn, path = bursty(Workload(TWO, TWO, 0.3, 0.1), 200), tmp_path / "trace.csv"
    columns = [getattr(drawn, name).tolist() for name in ("arrival", "prompt", "output", "cached")]
    rows = [",".join(map(repr, row)) for row in zip(*columns, strict=True)]
    path.write_text("\n".join(["arrival,prompt,output,cached", *rows]), encoding="utf-8")
    assert columns == [getattr(trace(path), name).tolist() for name in ("arrival", "prompt", "output", "cached")]
