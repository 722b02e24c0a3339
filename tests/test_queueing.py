"""Waiting lines: tables of queueing theory, hand sums, a chain solved by linear algebra, and the limits of the formulas."""

from math import exp, factorial, log

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lib.queueing import crowd, stable, tail, wait, wait_chance, wait_quantile

ERLANG_C = [  # servers, load of each, chance to wait; two and three servers by hand: 2 r^2 / (1 + r); a^3 / 6 over ...
    (1, 0.5, 0.5),
    (2, 0.5, 1 / 3),
    (2, 0.8, 0.7111),
    (3, 0.8, 0.6472),
    (5, 0.8, 0.5541),
    (10, 0.8, 0.4092),
    (10, 0.5, 0.0361),
    (3, 2 / 3, 0.4444),
]
loads = st.floats(1e-6, 0.999)
counts = st.integers(1, 200)


def erlang_c(servers, load):
    """The textbook's sum: (a^c / c!) / (1 - rho) over itself and the sum of a^k / k!."""
    a = servers * load
    last = a**servers / factorial(servers) / (1 - load)
    return last / (last + sum(a**k / factorial(k) for k in range(servers)))


@pytest.mark.parametrize(("servers", "load", "chance"), ERLANG_C)
def test_erlang_c_of_the_tables(servers, load, chance):
    """Published chances that all servers are busy, to four decimals."""
    assert chance == pytest.approx(wait_chance(servers * load / 3.0, 3.0, servers), abs=5e-5)


@given(st.integers(1, 60), loads)
def test_erlang_c_is_the_textbooks_sum(servers, load):
    """The recursion over Erlang's B against the sum with factorials."""
    assert erlang_c(servers, load) == pytest.approx(wait_chance(servers * load, 1.0, servers), rel=1e-9)


@given(st.floats(1e-3, 1e3), loads)
def test_one_exponential_server(mu, load):
    """M/M/1: rho / (mu - lambda); equal times wait half as long; the chance to wait is the load."""
    rate, expected = load * mu, load / (mu - load * mu)
    assert expected == pytest.approx(wait(rate, 1 / mu).value, rel=1e-9)
    assert expected / 2 == pytest.approx(wait(rate, 1 / mu, variation=0).value, rel=1e-9)
    assert load == pytest.approx(wait_chance(rate, 1 / mu), rel=1e-9)


@given(st.floats(0.01, 10), st.floats(0.01, 10), st.floats(0.01, 0.99), loads)
def test_pollaczek_khinchine(short, long, share, load):
    """lambda E[s^2] / (2 (1 - rho)) for two lengths of service, from their moments."""
    mean, square = share * short + (1 - share) * long, share * short**2 + (1 - share) * long**2
    rate, variation = load / mean, max(square / mean**2 - 1, 0) ** 0.5
    assert rate * square / 2 / (1 - load) == pytest.approx(wait(rate, mean, 1, variation).value, rel=1e-9)


def test_two_servers_by_hand():
    """0.8 each, a second of service: 0.7111 wait, each of them 1 / (2 - 1.6) s: 1.7778 s on average; half for equal times."""
    assert 0.64 * 2 / 1.8 / 0.4 == pytest.approx(wait(1.6, 1.0, 2).value, rel=1e-12)
    assert 1.7778 / 2 == pytest.approx(wait(1.6, 1.0, 2, 0).value, abs=5e-5)


@pytest.mark.parametrize(("servers", "load", "off"), [(2, 0.9, 0.01), (5, 0.9, 0.02), (2, 0.5, 0.06), (5, 0.7, 0.08)])
def test_equal_times_on_several_servers(servers, load, off):
    """Crommelin's chain: a service later all who were served are gone, and a Poisson number has come; solved by iteration.

    The formula is a few per cent below it at high loads, as it says: up to 2 % at 0.9, 8 % at 0.7."""
    most, a = 400, servers * load
    came = np.array([exp(-a + n * log(a) - sum(map(log, range(1, n + 1)))) for n in range(most)])
    moves = np.zeros((most, most))
    for n in range(most):
        left = max(n - servers, 0)
        moves[n, left:] = came[: most - left]
    stay = np.linalg.matrix_power(moves, 2**12)[0]
    exact = (np.maximum(np.arange(most) - servers, 0) * stay).sum() / stay.sum() / a
    assert 1 - off < wait(a, 1.0, servers, 0).value / exact < 1


@given(counts, loads)
def test_more_servers_never_wait_longer(servers, load):
    """At the same rate, and at the same load of each: pooling helps."""
    for rate in (servers * load, (servers + 1) * load):
        assert wait(rate, 1.0, servers + 1).value <= wait(servers * load, 1.0, servers).value * (1 + 1e-9)


@given(counts, loads, loads)
def test_waits_grow_with_the_load(servers, one, other):
    """And the chance with it, up to 1."""
    low, high = sorted((one, other))
    chances = [wait_chance(servers * load, 1.0, servers) for load in (low, high)]
    assert 0 <= chances[0] <= chances[1] * (1 + 1e-12) <= 1 + 1e-12
    assert wait(servers * low, 1, servers).value <= wait(servers * high, 1, servers).value * (1 + 1e-9)


@given(counts, loads, st.floats(1e-6, 1e6))
def test_seconds_scale(servers, load, k):
    """Everything k times as slow waits k times as long: the load alone says how many times a service."""
    assert k * wait(servers * load, 1.0, servers, 0.5).value == pytest.approx(
        wait(servers * load / k, k, servers, 0.5).value, rel=1e-9
    )


def test_waits_of_arrays():
    """Rates down, variations across, each as alone; NumPy's numbers are numbers."""
    rates, variations = np.array([[0.2], [0.9]]), np.array([[0.0, 1.0, 2.0]])
    each = [[wait(r, 1.0, 3, v).value for v in variations[0]] for r in rates[:, 0].tolist()]
    np.testing.assert_allclose(wait(rates, 1.0, 3, variations).value, each, rtol=1e-12)
    assert wait(0.5, 1, 2).value == wait(np.float32(0.5), np.int64(1), np.int8(2)).value


def test_waits_of_lists():
    """Lists are arrays, as in every other function of numbers or arrays."""
    np.testing.assert_allclose(wait([0.2, 0.9], 1.0).value, [0.2 / 0.8, 0.9 / 0.1], rtol=1e-12)
    np.testing.assert_allclose(wait(0.5, [1.0, 1.5]).value, [1.0, 0.75 * 1.5 / 0.25], rtol=1e-12)


@pytest.mark.parametrize(
    ("rate", "said"), [(1.3, "1.3"), (2, "2"), (1.0, "1"), (1.001, "1.001"), (1.04, "1.04"), (17, "17")]
)
def test_an_unstable_line_says_how_unstable(rate, said):
    """Load in two digits, in four where it is close to 1, from every function; of an array the largest."""
    for f in (wait, wait_chance, lambda r, s: wait_quantile(0.9, r, s), lambda r, s: crowd(r, [1 / s])):
        with pytest.raises(ValueError, match=rf"unstable: load {said} of capacity: the queue grows without end"):
            f(rate, 1.0)
    with pytest.raises(ValueError, match=rf"unstable: load {said} of capacity"):
        wait(np.array([0.5, rate, 0.1]), 1.0)


def test_a_load_that_is_hundreds_of_capacities():
    """A number that can be read, not 1.2e+02."""
    with pytest.raises(ValueError, match=r"unstable: load 12[03] of capacity"):
        wait(123, 1.0)


def test_what_is_stable_passes():
    """The load itself, below 1 by as little as there is; the place is named if it is not."""
    assert 1 - 2**-53 == stable(1 - 2**-53)
    with pytest.raises(ValueError, match="unstable: load 1.5 of capacity of link"):
        stable(1.5, " of link")


@given(st.floats(0.01, 0.99), loads)
def test_quantiles_of_one_exponential_server(share, load):
    """P(W > t) = rho e^(-(mu - lambda) t): the quantile is where that is 1 - share, or 0 where fewer wait at all."""
    at = wait_quantile(share, load, 1.0).value
    assert max(log(load / (1 - share)) / (1 - load), 0) == pytest.approx(at, rel=1e-9, abs=1e-12)


@given(st.floats(1e-3, 1), st.floats(1e-3, 20))
def test_those_that_wait_do_so_exponentially(late, x):
    """All but late e^-x of them wait x / late means at most: the exponential's quantile, whose mean is the mean over `late`."""
    assert x / late == pytest.approx(tail(late, 1 - late * exp(-x)), rel=1e-4)


@pytest.mark.parametrize("servers", [1, 50, 200, 1000])
def test_nobody_waits_where_there_are_many_servers(servers):
    """A load of a millionth: the share that waits underflows, and its quantile is 0, not an error."""
    assert 0 == wait_quantile(0.9, servers * 1e-6, 1.0, servers).value
    assert 0 <= wait(servers * 1e-6, 1.0, servers).value < 1e-5


def test_a_tail_by_hand():
    """A tenth waits: 95 % wait ln 2 times the wait of those that do, which is ten means; 80 % not at all."""
    assert (10 * log(2), 0) == (pytest.approx(tail(0.1, 0.95)), tail(0.1, 0.8))


# Stations


@given(st.integers(1, 30), st.floats(0.05, 0.95))
def test_a_crowd_of_servers_is_m_m_n(servers, load):
    """Completions n mu up to N: the chances of M/M/N by hand, and its queue C rho / (1 - rho)."""
    chances, queue = crowd(servers * load, [float(n) for n in range(1, servers + 1)])
    a, late = servers * load, erlang_c(servers, load)
    none = (1 - load) * late * factorial(servers) / a**servers
    expected = [none * a**n / factorial(n) for n in range(servers)] + [late]
    assert expected == pytest.approx(chances, rel=1e-9, abs=1e-300)
    assert late * load / (1 - load) == pytest.approx(queue, rel=1e-9)


@given(st.floats(0.05, 0.9), st.integers(1, 40))
def test_a_crowd_that_shares_one_speed_is_geometric(load, places):
    """M/M/1-PS: (1 - rho) rho^n, however many have places; those without queue, rho^(N+1) / (1 - rho) of them."""
    chances, queue = crowd(load, [1.0] * places)
    assert [(1 - load) * load**n for n in range(places)] == pytest.approx(chances[:-1], rel=1e-9)
    assert load**places == pytest.approx(chances[-1], rel=1e-9)
    assert load ** (places + 1) / (1 - load) == pytest.approx(queue, rel=1e-9)


def test_endless_places_are_poisson():
    """Where nobody has to share, the number present is Poisson with the mean rate x seconds: 200 places are endless for 5."""
    chances, queue = crowd(5.0, [float(n) for n in range(1, 201)])
    assert [exp(-5) * 5**n / factorial(n) for n in range(20)] == pytest.approx(chances[:20], rel=1e-9)
    assert queue < 1e-100


@settings(max_examples=30)
@given(st.lists(st.floats(0.2, 5), min_size=1, max_size=8), st.floats(0.05, 0.9))
def test_a_crowd_is_the_solution_of_its_chain(completions, load):
    """Any speeds: the generator of the chain solved by linear algebra. It is cut at 150 requests, beyond which a millionth is."""
    rate, most, n = load * completions[-1], 150, len(completions)
    Q = np.diag([rate] * most, 1) + np.diag(completions + completions[-1:] * (most - n), -1)
    Q = (Q - np.diag(Q.sum(1))).T
    Q[-1] = 1
    solved = np.linalg.solve(Q, np.array([0.0] * most + [1.0])).tolist()
    chances, queue = crowd(rate, completions)
    assert [*solved[:n], sum(solved[n:])] == pytest.approx(chances, abs=1e-5)
    assert sum(p * (i - n) for i, p in enumerate(solved) if i > n) == pytest.approx(queue, rel=1e-3, abs=1e-3)


def test_very_many_places():
    """Weights that leave the floats on the way are rescaled: 50,000 shared places at load 0.5, and a slow start."""
    chances, queue = crowd(1.0, [2.0] * 50_000)
    assert (1, 0.5, 0) == pytest.approx((sum(chances), chances[0], queue))
    chances, _ = crowd(1.0, [1e-3] * 1000 + [2.0] * 3000)
    assert 1 == pytest.approx(sum(chances)) and all(0 <= p <= 1 for p in chances)
    assert chances[1000] == pytest.approx(0.5, rel=1e-3)  # hardly anybody is ever below, geometric above


def test_a_station_that_cannot_keep_up():
    """What counts is the speed with all places taken: ValueError, not a negative queue."""
    with pytest.raises(ValueError, match="unstable: load 1.5 of capacity"):
        crowd(1.5, [5.0, 1.0])
