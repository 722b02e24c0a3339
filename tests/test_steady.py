"""Steady states: loads by hand, queues by Pollaczek and Khinchine, batches whose distribution has a name, and refusals."""

from dataclasses import replace
from math import inf, log

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import server

from lib.bounds import server_ratio
from lib.chips import chip
from lib.forward import decode_step, forward, mixed, prefill
from lib.goodput import at_rate
from lib.models import model
from lib.network import Switch
from lib.queueing import wait_chance
from lib.server import Plan, Server
from lib.serving import colocated, disaggregated, handover, transfer
from lib.steady import capacity, decoding, loads, station, tpot, ttft
from lib.workload import Lengths, Workload, lognormal

ONE = server("llama-3-70b", "ironwood", 8)
LOAD = Workload(8192, 512, 1.0)
FREE = Switch(1e20, 0.0, 10**6)  # a link that takes no time
APART = disaggregated(ONE, ONE, LOAD, (1, 1), FREE, slots=64)
READ = prefill(ONE, 1, 8192).value
FULL = decode_step(ONE, 64, 8447.5).value
TOGETHER = {
    policy: colocated(ONE, LOAD, 1, policy, 8192 + 64 if policy == "chunked" else None, 64)
    for policy in ("prefill first", "decode first", "chunked")
}
EVERY = pytest.mark.parametrize("one", [APART, *TOGETHER.values()], ids=lambda s: s.policy)
STEADY = pytest.mark.parametrize(
    "one", [APART, TOGETHER["prefill first"], TOGETHER["chunked"]], ids=lambda s: s.policy
)  # where closed forms say who decodes


def at_load(one, load):
    """The service at a part of its capacity."""
    return at_rate(one, load * capacity(one).value)


def test_a_station_by_hand():
    """Steps at the mean context, prompts read alone; co-located, each prompt adds all of itself to the others' steps."""
    apart, first = station(APART), station(TOGETHER["prefill first"])
    assert [decode_step(ONE, n, 8447.5).value for n in range(1, 65)] == pytest.approx(apart.steps, rel=1e-12)
    assert ((READ,) * 64, (0.0,) * 64, 0.0, 512) == (apart.reading, apart.extra, apart.variation, apart.output)
    assert apart.held < 1e-9 and first.held == 0
    assert (apart.steps, first.extra) == (first.steps, first.reading)


def test_a_station_of_chunks_by_hand():
    """A budget of 576 beside 64 slots: 8,192 tokens take 16 passes of 512 with a full batch, in the middle of the prompt on
    average; the batch alone would have gone on meanwhile."""
    one = station(colocated(ONE, LOAD, 1, "chunked", 576, 64))
    whole = mixed(ONE, 64, 8447.5, 512, (8192 - 512) / 2).value
    assert (16 * whole, 16 * (whole - FULL)) == pytest.approx((one.reading[-1], one.extra[-1]), rel=1e-12)
    alone = mixed(ONE, 1, 8447.5, 575, (8192 - 575) / 2).value
    assert 8192 / 575 * alone == pytest.approx(one.reading[0], rel=1e-12)


def test_a_station_of_two_lengths():
    """Prompts of 100 and 10,000 tokens: mean and deviation of their reading, by hand."""
    two = Lengths((100, 10_000), (0.8, 0.2))
    one = station(replace(APART, workload=Workload(two, 512, 1.0)))
    short, long = (prefill(ONE, 1, P).value for P in two.counts)
    mean = 0.8 * short + 0.2 * long
    assert mean == pytest.approx(one.reading[0], rel=1e-12)
    assert (0.4 * (long - short) / mean) == pytest.approx(one.variation, rel=1e-9)


def test_the_rate_of_a_station_does_not_matter():
    """It says what one server does; the same object for every rate."""
    assert station(APART) is station(at_rate(APART, 77.0))


# Loads and capacity


@pytest.mark.parametrize("servers", [(1, 1), (3, 1), (2, 5)])
def test_loads_of_pools_by_hand(servers):
    """rate t_p / P, rate t_x / P, rate G T(64) / (64 D), the transfer's time a slot is held beside it."""
    one = replace(APART, servers=servers, link="dcn", workload=replace(LOAD, rate=2.0))
    moved = transfer(one, 8192).value
    decode = 2 * (moved + 512 * FULL) / 64 / servers[1]
    expected = {"prefill servers": 2 * READ / servers[0], "decode servers": decode}
    found = loads(one)
    assert expected == pytest.approx({where: found[where] for where in expected}, rel=1e-9)
    assert found["link"] >= 2 * moved / servers[0] * (1 - 1e-12)


def test_the_fullest_pool_is_the_capacity():
    """One reader feeds 5.2 requests a second, a decode server takes 19."""
    assert 1 / READ == pytest.approx(capacity(APART).value, rel=1e-9)
    assert 64 / (512 * FULL) == pytest.approx(capacity(replace(APART, servers=(100, 1))).value, rel=1e-6)


def test_capacity_of_servers_that_do_both_by_hand():
    """A request costs its reading and 512 parts of a step: 1 / (t_p + G T(64) / 64), times the servers."""
    for policy in ("prefill first", "decode first"):
        for servers in (1, 3):
            one = replace(TOGETHER[policy], servers=(servers, servers))
            assert servers / (READ + 512 * FULL / 64) == pytest.approx(capacity(one).value, rel=1e-12)


def test_chunks_save_reads_of_the_weights():
    """A budget that holds a prompt beside the batch: a chunk adds less to a step than the prompt takes alone."""
    assert capacity(TOGETHER["prefill first"]).value < capacity(TOGETHER["chunked"]).value
    assert station(TOGETHER["chunked"]).extra[-1] < READ


def test_the_ratio_of_loads_is_the_server_ratio():
    """What a decode server keeps busy, from the closed form and from the pools, with a link that takes no time."""
    found = loads(APART)
    ratio = server_ratio(READ, FULL, 64, 512).value
    assert ratio == pytest.approx(found["prefill servers"] / found["decode servers"], rel=1e-6)


@EVERY
def test_capacity_is_no_matter_of_the_rate(one):
    """Load over capacity is the rate over it."""
    assert capacity(one).value == pytest.approx(capacity(at_rate(one, 50.0)).value, rel=1e-12)
    assert 0.7 == pytest.approx(max(loads(at_load(one, 0.7)).values()), rel=1e-12)


def test_chunks_of_prompts_with_any_mean():
    """A mean prompt of half a token more is read in chunks too, as fast as 1,000 or 1,001 tokens, to the 1 % that half of them
    in a pass of their own may cost; many lengths are slower than the shortest and faster than the longest."""
    many = lognormal(1000, 1.0)
    low, half, short, found, long = (
        capacity(colocated(ONE, Workload(P, 100, 1.0), 1, "chunked", 9000, 64)).value
        for P in (1000, Lengths((1000, 1001)), min(many.counts), many, max(many.counts))
    )
    assert half == pytest.approx(low, rel=0.01)
    assert long < found < short


PIPES = Server(model("llama-3-70b"), chip("ironwood"), Plan(1, pipeline=8))
LONG = Workload(60_000, 2000, 1.0, 0.9)


@pytest.mark.parametrize("slots", [16, 17, 33])
@pytest.mark.parametrize("policy", ["prefill first", "apart"])
def test_what_is_below_capacity_can_be_served(policy, slots):
    """Eight stages share 17 sequences as they would 24: 16 are faster a sequence, and nobody need take the 17th. A rate just
    below the capacity is stable, by every function."""
    one = colocated(PIPES, LONG, slots=slots)
    if policy == "apart":
        one = disaggregated(PIPES, PIPES, LONG, (1000, 1), FREE, slots)
    loaded = at_load(one, 0.999)
    assert 1 <= decoding(loaded).value < inf and ttft(loaded).value < inf and tpot(loaded).value < inf


def test_a_decode_server_has_one_network():
    """60 prefill servers send 2.68 GB a request into one decode server, whose 8 chips take in 100 GB/s: at most 37 requests a
    second, whatever the senders and the batch could do."""
    many = disaggregated(ONE, ONE, Workload(8192, 32, 1.0), (60, 1))
    assert capacity(many).value <= 100e9 / (327_680 * 8192) * (1 + 1e-9)


# Batches


@pytest.mark.parametrize("grown", [0.01, 0.1, 0.2])
@pytest.mark.parametrize("policy", ["prefill first", "apart"])
def test_batches_of_steps_that_grow_evenly(policy, grown):
    """Steps of a + b n make the batch negative binomial: its mean is r G (a + b) / (1 - r G b), not the r G a / (1 - r G b) of a
    fixed point, since a request sees itself. Prompts on the same chips stretch a and b by 1 / (1 - r t_p)."""
    one = replace(APART, servers=(1000, 1), slots=None)
    if policy != "apart":
        one = colocated(ONE, Workload(8192, 16_000, 1.0))
    steps, output = np.array(station(one).steps[:60]), station(one).output
    b = steps[1] - steps[0]
    np.testing.assert_allclose(np.diff(steps), b, rtol=1e-9)  # memory- and latency-bound up to 62 sequences
    a, busy = steps[0] - b, READ * (policy != "apart")
    rate = grown / (output * b + grown * busy)  # r G b / (1 - r t_p) = grown
    found, expected = at_rate(one, rate), (a + b) / b * grown / (1 - grown)
    assert expected < 20
    assert expected == pytest.approx(decoding(found).value, rel=1e-6)
    assert expected / rate / output == pytest.approx(tpot(found).value, rel=1e-6)


@STEADY
@pytest.mark.parametrize("load", [1e-6, 0.4, 0.95])
def test_littles_law(one, load):
    """Sequences on each decode server are its rate times the seconds of one: the transfer and a token after the other."""
    found = at_load(replace(one, link="dcn"), load)
    rate, seconds = found.workload.rate / found.servers[1], station(found).held + 512 * tpot(found).value
    assert rate * seconds == pytest.approx(decoding(found).value, rel=1e-9)


@STEADY
def test_alone_a_request_takes_steps_of_one(one):
    """A millionth of the capacity: nobody else is there. One part in 10^4 of the time somebody is."""
    found = at_load(one, 1e-6)
    alone = decode_step(ONE, 1, 8447.5).value
    assert alone == pytest.approx(tpot(found).value, rel=1e-4)
    reading = station(one).reading[0]
    assert reading + station(one).held + alone == pytest.approx(ttft(found).value, rel=1e-4)


def test_prompts_take_their_part_of_the_time():
    """Prefill first: the time for steps is what rate t_p leaves, so interference is that part of a TPOT; none apart."""
    found = at_load(TOGETHER["prefill first"], 0.5)
    parts = tpot(found)
    assert found.workload.rate * READ == pytest.approx(parts["prefill interference"].value / parts.value, rel=1e-9)
    assert 0 == tpot(at_load(APART, 0.5))["prefill interference"].value


# Time to first token


@pytest.mark.parametrize("load", [0.1, 0.5, 0.9])
def test_equal_prompts_wait_as_in_m_d_1(load):
    """Apart, one reader: rho t_p / (2 (1 - rho)); a slot is always free."""
    found = at_load(replace(APART, servers=(1, 4)), load)
    assert load * READ / 2 / (1 - load) == pytest.approx(ttft(found)["queue"].value, rel=1e-6)


@pytest.mark.parametrize("load", [0.2, 0.8])
def test_unequal_prompts_wait_longer(load):
    """Pollaczek and Khinchine with the moments of the prompts' reading, a tenth of them long."""
    two = Lengths((1000, 16_000), (0.9, 0.1))
    found = at_load(disaggregated(ONE, ONE, Workload(two, 64, 1.0), (1, 4), FREE), load)
    square = 0.9 * prefill(ONE, 1, 1000).value ** 2 + 0.1 * prefill(ONE, 1, 16_000).value ** 2
    expected = found.workload.rate * square / 2 / (1 - load)
    assert expected == pytest.approx(ttft(found)["queue"].value, rel=1e-6)


@pytest.mark.parametrize("share", [0.5, 0.9, 0.999])
def test_shares_of_a_first_token(share):
    """The wait of those that wait is exponential, ten times longer for e^-10 of them; what follows is at its mean."""
    found = at_load(replace(APART, servers=(1, 4)), 0.8)
    mean, part = ttft(found), ttft(found, share)
    expected = mean["queue"].value / 0.8 * max(log(0.8 / (1 - share)), 0)
    assert expected == pytest.approx(part["queue"].value, rel=1e-6)
    for name in ("prefill", "transfer", "first step"):
        assert mean[name].value == part[name].value


def test_pools_of_readers_wait_less():
    """Three readers at the same load each, by Erlang's C and half the exponential wait: a third of a reader's, and less."""
    found = at_load(replace(APART, servers=(3, 12)), 0.8)
    late = wait_chance(2.4, 1.0, 3)
    assert late == pytest.approx(0.6472, abs=5e-5)
    assert late * READ / (3 * 0.2) / 2 == pytest.approx(ttft(found)["queue"].value, rel=1e-6)


@pytest.mark.parametrize("servers", [60, 300])
def test_many_readers_and_hardly_a_prompt(servers):
    """Of a share that underflows nobody waits: 0, in the mean and for every share."""
    found = at_load(replace(APART, servers=(servers, servers // 3)), 1e-6)
    assert 0 == pytest.approx(ttft(found, 0.9)["queue"].value, abs=1e-12)


@pytest.mark.parametrize("f", [tpot, ttft, decoding])
def test_where_batches_end_first_there_is_no_closed_form(f):
    """Who waits and who decodes is for the simulation to say; capacity is known."""
    with pytest.raises(ValueError, match="no closed form .*simulate it"):
        f(at_load(TOGETHER["decode first"], 0.5))


def test_a_batch_of_unequal_answers_by_hand():
    """Two sequences of 100 or 300 tokens, alike: 100 steps of two; 200 more if any is long, in 3 of 4 cases, with 4/3 of
    them on average. Read two, decode that long: two requests."""
    one = colocated(ONE, Workload(8192, Lengths((100, 300)), 1.0), 1, "decode first", slots=2)
    alone, both = station(one).steps
    batch = 100 * both + 200 * 3 / 4 * (alone + (both - alone) / 3)
    assert 2 / (2 * READ + batch) == pytest.approx(capacity(one).value, rel=1e-9)


@STEADY
def test_a_first_token_is_the_sum_of_its_parts(one):
    """Queue, prefill, transfer, first step; none is negative, and one alone would have to step at least."""
    for load in (1e-9, 0.3, 0.9, 0.9999):
        parts = ttft(at_load(one, load))
        assert ["queue", "prefill", "transfer", "first step"] == [part.name for part in parts.parts]
        assert all(part.value >= 0 for part in parts.parts)
        assert parts["first step"].value >= station(one).steps[0] * (1 - 1e-9)
        assert parts["prefill"].value >= station(one).reading[0] * (1 - 1e-9)


def test_a_streamed_cache_shortens_the_first_token_only():
    """By what the reading hides; tokens come no faster, but a slot is held for less."""
    whole, streamed = (
        at_rate(replace(APART, link=Switch(1e9, 0.0, 10**6), streamed=way, servers=(2, 1)), 1.0)
        for way in (False, True)
    )
    saved = handover(whole, 8192).value - handover(streamed, 8192).value
    assert 79 / 80 * READ == pytest.approx(saved, rel=1e-9)
    assert ttft(whole)["transfer"].value - ttft(streamed)["transfer"].value == pytest.approx(saved)
    assert decoding(streamed).value < decoding(whole).value


def test_cached_prompts_are_read_sooner():
    """Half of each prompt is there: what is read is the other half, after it. What moves is all of it."""
    half = at_rate(replace(APART, workload=replace(LOAD, cached=0.5), link="dcn"), 1.0)
    assert forward(ONE, 1, 4096, 4096).value == pytest.approx(ttft(half)["prefill"].value, rel=1e-12)
    assert ttft(half)["transfer"].value == ttft(at_rate(replace(APART, link="dcn"), 1.0))["transfer"].value


# Above capacity


@EVERY
@pytest.mark.parametrize(("load", "said"), [(1.3, "1.3"), (2.04, "2"), (1.01, "1.01"), (17, "17")])
def test_more_than_can_be_served(one, load, said):
    """Refused by everything that has no steady state, with the load, at once; apart, with the pool that is full."""
    found, where = at_load(one, load), " of prefill servers" if one is APART else ""
    for f in (tpot, decoding, ttft):
        with pytest.raises(ValueError, match=f"unstable: load {said} of capacity{where}: the queue grows without end"):
            f(found)


@pytest.mark.parametrize(
    ("servers", "link", "where"),
    [
        ((100, 1), FREE, "decode servers"),
        ((1, 100), Switch(1e6, 0.0, 10**6), "link"),
        ((1, 1), FREE, "prefill servers"),
    ],
)
def test_what_is_full_is_named(servers, link, where):
    """Readers, link or batches, whichever cannot keep up."""
    with pytest.raises(ValueError, match=f"unstable: load 1.2 of capacity of {where}"):
        tpot(at_load(replace(APART, servers=servers, link=link), 1.2))


def test_close_to_capacity_waits_grow_without_end():
    """Ten times as close, ten times the queue: both saturated means no finite wait (M/D/1 beyond 0.99)."""
    queues = [ttft(at_load(replace(APART, servers=(1, 4)), 1 - 10**-n))["queue"].value for n in (3, 4, 5)]
    assert [10, 10] == pytest.approx([queues[1] / queues[0], queues[2] / queues[1]], rel=2e-3)


@settings(max_examples=40)
@given(
    st.integers(1, 20_000),
    st.integers(1, 2000),
    st.sampled_from([0.0, 0.3, 0.9]),
    st.sampled_from([1, 2, 17, 64]),
    st.sampled_from(["prefill first", "apart", "chunked"]),
)
def test_a_service_is_finite_below_its_capacity_and_refused_above(prompt, output, cached, slots, policy):
    """For any lengths; and at no rate does a token come sooner than a step of one sequence."""
    load = Workload(prompt, output, 1.0, cached)
    one = disaggregated(ONE, ONE, load, (2, 1), slots=slots)
    if policy != "apart":
        one = colocated(ONE, load, 2, policy, slots + 512 if policy == "chunked" else None, slots)
    for part in (1e-6, 0.5, 0.9999):
        assert station(one).steps[0] * (1 - 1e-9) <= tpot(at_load(one, part)).value < inf
        assert 0 < decoding(at_load(one, part)).value <= slots * (1 + 1e-9)
    with pytest.raises(ValueError, match="unstable: load 1"):
        tpot(at_load(one, 1.2))


@pytest.mark.parametrize(
    ("servers", "egress", "load", "where"),
    [((1, 1), 3e9, 3, "prefill servers"), ((24, 1), 3e10, 2, "decode servers"), ((1, 1), 1e8, 20, "link")],
)
def test_of_several_full_places_the_fullest_is_named(servers, egress, load, where):
    """Two of readers, link and batches are above their capacity: the load that is told is how much too much comes."""
    pools = disaggregated(ONE, ONE, Workload(2000, 64, 1.0), servers, Switch(egress, 0.0, 10**6), 64)
    found = at_load(pools, load)
    assert 2 == sum(each > 1 for each in loads(found).values())
    with pytest.raises(ValueError, match=f"unstable: load {load} of capacity of {where}"):
        tpot(found)


def test_a_request_of_one_token_takes_one_step():
    """Nobody waits for a second token; the first comes with the step after the prompt."""
    one = at_rate(disaggregated(ONE, ONE, Workload(8192, 1, 1.0), link=FREE), 1e-6)
    assert READ + decode_step(ONE, 1, 8192).value == pytest.approx(ttft(one).value, rel=1e-5)
