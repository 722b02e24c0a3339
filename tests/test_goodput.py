"""Goodput under promises, tokens per chip, tokens per dollar: searched by hand, priced by hand."""

from dataclasses import replace
from math import log

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import server

from lib.chips import chip
from lib.forward import prefill
from lib.goodput import at_rate, break_even_price, cost, goodput, per_chip
from lib.models import model
from lib.network import Switch
from lib.server import Plan, Server
from lib.serving import colocated, disaggregated
from lib.steady import capacity, tpot, ttft
from lib.workload import Workload

V5E, IRONWOOD = server("llama-3-70b", "v5e", 16), server("llama-3-70b", "ironwood", 8)
LOAD = Workload(8192, 512, 2.0)
FREE = Switch(1e20, 0.0, 10**6)
APART = disaggregated(IRONWOOD, IRONWOOD, LOAD, (3, 1))
MIXED = colocated(IRONWOOD, LOAD, 4)
CHUNKED = colocated(IRONWOOD, LOAD, 4, "chunked", 2048)
EVERY = pytest.mark.parametrize("one", [APART, MIXED, CHUNKED], ids=lambda s: s.policy)
BOTH = replace(disaggregated(V5E, IRONWOOD, LOAD, (4, 1)))
firsts, eachs = st.floats(1e-3, 100), st.floats(1e-4, 1)


def test_another_rate():
    """Nothing else changes."""
    assert replace(LOAD, rate=5.0) == at_rate(APART, 5.0).workload
    assert APART == at_rate(at_rate(APART, 5.0), 2.0)


@EVERY
def test_generous_promises_are_kept_up_to_the_capacity(one):
    """Thirty years for the first token: the capacity, to the millionth that keeps the queue finite."""
    assert capacity(one).value == pytest.approx(goodput(one, 1e9, 1e9).value, rel=2e-6)


@EVERY
def test_impossible_promises_are_kept_at_no_rate(one):
    """Sooner than a prompt is read, or a step is taken: 0, and a note with the best there is, and no error."""
    alone, step = (f(at_rate(one, 1e-6)).value for f in (ttft, tpot))
    for promise in ((0.9 * alone, 1.0), (10.0, 0.9 * step)):
        found = goodput(one, *promise)
        assert 0 == found.value and "req/s" == found.unit
        assert "not at any rate: alone, a request has its first token after" in found.note


@EVERY
@settings(max_examples=25)
@given(firsts, eachs, st.floats(1, 3), st.floats(1, 3))
def test_goodput_grows_with_both_promises(one, first, each, later, slower):
    """And is never above the capacity."""
    tight, loose = goodput(one, first, each).value, goodput(one, first * later, each * slower).value
    assert 0 <= tight <= loose * (1 + 2e-4) <= capacity(one).value * (1 + 2e-4)


@EVERY
def test_goodput_is_where_a_promise_breaks(one):
    """Both are kept at it, and one is not at a thousandth more."""
    for promise in ((0.6, 0.02), (5.0, 0.0045), (0.3, 0.005)):
        found = goodput(one, *promise).value
        assert 0 < found < capacity(one).value * 0.999
        kept = [
            ttft(at_rate(one, r), 0.9).value <= promise[0] and tpot(at_rate(one, r), 0.9).value <= promise[1]
            for r in (found, found * 1.001)
        ]
        assert [True, False] == kept


def test_goodput_of_one_reader_by_hand():
    """Equal prompts, one reader, batches that never fill: nine tenths start within 1 s where the quantile of M/D/1's queue,
    t_p / (2 (1 - rho)) ln(10 rho), is what reading and a step and a half leave of it."""
    one = disaggregated(IRONWOOD, IRONWOOD, Workload(8192, 8, 1.0), (1, 4), FREE)
    t_p = prefill(IRONWOOD, 1, 8192).value
    low, high = 0.1, 1 - 1e-9
    while high - low > 1e-9:
        rho = (low + high) / 2
        step = ttft(at_rate(one, rho / t_p))["first step"].value
        kept = t_p / 2 / (1 - rho) * log(10 * rho) + t_p + step <= 1
        low, high = (rho, high) if kept else (low, rho)
    assert low / t_p == pytest.approx(goodput(one, 1.0, 1.0).value, rel=2e-4)


def test_a_larger_share_is_a_harder_promise():
    """99 % within two seconds at fewer requests than 90, and those at fewer than half of them."""
    half, most, nearly = (goodput(APART, 0.5, 0.1, share).value for share in (0.5, 0.9, 0.99))
    assert nearly < most < half


@pytest.mark.parametrize("servers", [(60, 20), (300, 100)])
def test_goodput_of_large_pools(servers):
    """Hundreds of readers at a millionth of their load: nobody waits, which is a number, not an error. As many times the
    servers keep at least as many times the requests."""
    small, large = replace(APART, servers=(3, 1)), replace(APART, servers=servers)
    assert goodput(small, 2, 0.03).value * servers[1] <= goodput(large, 2, 0.03).value * (1 + 2e-4)


@pytest.mark.parametrize("slots", [16, 17])
def test_goodput_where_the_last_slot_is_slower(slots):
    """Eight stages with 17 sequences: generous promises are kept up to the capacity there too."""
    pipes = Server(model("llama-3-70b"), chip("ironwood"), Plan(1, pipeline=8))
    one = colocated(pipes, Workload(60_000, 2000, 1.0, 0.9), slots=slots)
    assert capacity(one).value == pytest.approx(goodput(one, 1e9, 1e9).value, rel=2e-6)


def test_no_goodput_without_a_closed_form():
    """Batches that end first have to be simulated."""
    with pytest.raises(ValueError, match="simulate it"):
        goodput(colocated(IRONWOOD, LOAD, 1, "decode first"), 1, 0.1)


# Chips and dollars


def test_tokens_per_chip_by_hand():
    """2 requests of 512 tokens a second: over 3 + 1 servers of 8 chips 32, readers included; over 4 that do both 32 too."""
    assert [32, 32, 2 * 512 / (4 * 16 + 8)] == [per_chip(one).value for one in (APART, MIXED, BOTH)]
    assert "tok/s" == per_chip(APART).unit


def test_cost_by_hand():
    """4 servers of 16 v5e at 1.20 USD an hour, and 8 Ironwood at a price of one's own: dollars a second over tokens a second."""
    found = cost(BOTH, {"ironwood": 0.001})
    assert [64 * 1.2 / 3600 / 1024, 8 * 0.001 / 1024] == pytest.approx([part.value for part in found.parts])
    assert (["prefill chips", "decode chips"], "USD/tok") == ([part.name for part in found.parts], found.unit)
    assert 64 * 0.5 / 1024 + 0.008 / 1024 == pytest.approx(cost(BOTH, {"ironwood": 0.001, "v5e": 0.5}).value)


def test_cost_of_servers_that_do_both():
    """One pool: 32 chips."""
    found = cost(MIXED, {"ironwood": 0.001})
    assert (["decode chips"], pytest.approx(0.032 / 1024)) == ([part.name for part in found.parts], found.value)


def test_twice_the_requests_cost_half_each():
    """Chips are paid by the second, idle or not."""
    prices = {"ironwood": 1e-3}
    assert cost(at_rate(APART, 1.0), prices).value == pytest.approx(2 * cost(at_rate(APART, 2.0), prices).value)


@given(st.floats(1e-6, 1e-2))
def test_the_break_even_price_is_where_costs_meet(price):
    """At the price that is found, a token costs what was asked for; of the chips whose price nobody knows."""
    found = break_even_price(BOTH, cost(BOTH, {"ironwood": price}).value)
    assert price == pytest.approx(found.value, rel=1e-6) and "USD/s" == found.unit


def test_a_break_even_price_by_hand():
    """Every chip unknown: tokens a second times dollars a token, over 32 chips."""
    assert 1024 * 1e-5 / 32 == pytest.approx(break_even_price(APART, 1e-5).value)


@pytest.mark.parametrize(
    ("service", "prices", "each", "why"),
    [
        (BOTH, {"ironwood": 1e-3}, 1e-3, "every price is known: ask cost"),
        (BOTH, {}, 1e-9, "cost 2.08e-05 USD a token already"),
    ],
)
def test_nothing_to_break_even(service, prices, each, why):
    """All prices known, or those that are cost more already: by hand 64 x 1.2 / 3600 / 1024."""
    with pytest.raises(ValueError, match=why):
        break_even_price(service, each, prices)


def test_a_price_that_nobody_knows():
    """ValueError names the chip, how to give a price, and what to ask instead."""
    with pytest.raises(ValueError, match=r"no price is known of ironwood: give prices=\{'ironwood'.*break_even_price"):
        cost(BOTH)


@pytest.mark.parametrize("price", [0, -1.0, float("nan"), float("inf"), "1", True], ids=repr)
@pytest.mark.parametrize(
    "f", [lambda p: cost(BOTH, {"v5e": p, "ironwood": 1e-3}), lambda p: break_even_price(BOTH, 1e-3, {"v5e": p})]
)
def test_a_price_that_is_none(f, price):
    """ValueError from both functions: a negative price makes nothing cheaper, and NaN is no answer."""
    with pytest.raises(ValueError, match="price"):
        f(price)


@pytest.mark.parametrize("f", [per_chip, cost, lambda one: break_even_price(one, 1e-3)], ids=["chip", "cost", "price"])
def test_what_cannot_be_served_has_no_worth(f):
    """A rate of 1.3 of the capacity makes no tokens cheaper: refused with the load."""
    one = at_rate(APART, 1.3 * capacity(APART).value)
    with pytest.raises(ValueError, match="unstable: load 1.3 of capacity"):
        f(one)
