"""Services: what they are made of and refuse, and what a cache costs on its way."""

from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from strategies import server, servers

from lib.chips import chip
from lib.forward import forward, prefill
from lib.models import kv_bytes, model
from lib.network import Switch
from lib.server import Plan, Server, fits, max_batch
from lib.serving import APART, POLICIES, Service, colocated, disaggregated, handover, read, transfer
from lib.workload import Lengths, Workload

V5E, IRONWOOD = server("llama-3-70b", "v5e", 16), server("llama-3-70b", "ironwood", 8)
LOAD = Workload(8192, 512, 1.0)
KV = 327_680 * 8192  # bytes of 8,192 tokens of 70B: 2.68 GB


def test_a_service_by_hand():
    """3 prefill and 1 decode servers of 16 v5e: 64 chips; slots are what fits at 8,704 tokens."""
    one = disaggregated(V5E, V5E, LOAD, (3, 1))
    assert (64, (3, 1), APART, max_batch(V5E, 8704)) == (one.chips, one.servers, one.policy, one.slots)
    assert (V5E, V5E, LOAD, "dcn", False) == (one.prefill, one.decode, one.workload, one.link, one.streamed)


@pytest.mark.parametrize("policy", POLICIES)
def test_chips_of_a_pool_that_does_both_count_once(policy):
    """Three co-located servers of 8 chips are 24, whatever they do first; all are prefill and all are decode servers."""
    one = colocated(IRONWOOD, LOAD, 3, policy, 4096 if policy == "chunked" else None)
    assert (24, (3, 3), policy) == (one.chips, one.servers, one.policy)
    assert one.prefill is one.decode


def test_servers_may_differ():
    """A prefill server of v6e and two decode servers of Ironwood, in other formats: 32 + 2 x 8 chips."""
    first = server("llama-3-70b", "v6e", 32, weights="fp8")
    one = disaggregated(first, IRONWOOD, LOAD, (1, 2))
    assert (48, first, IRONWOOD) == (one.chips, one.prefill, one.decode)


def test_slots_by_hand():
    """As many as fit at full length if none are given; up to what fits at the mean context if they are."""
    mean, full = (max_batch(IRONWOOD, S) for S in (8447.5, 8704))
    assert full < mean
    assert (full, mean, 1) == tuple(colocated(IRONWOOD, LOAD, slots=slots).slots for slots in (None, mean, 1))
    with pytest.raises(ValueError, match=rf"does not fit: {mean + 1} sequences of 8448 .*at most {mean}"):
        colocated(IRONWOOD, LOAD, slots=mean + 1)


def test_a_service_is_a_value():
    """Equal and hashable by what it is made of, at every rate; frozen."""
    assert colocated(IRONWOOD, LOAD) == colocated(IRONWOOD, LOAD)
    assert 3 == len({colocated(IRONWOOD, LOAD), disaggregated(IRONWOOD, IRONWOOD, LOAD), colocated(IRONWOOD, LOAD, 2)})
    with pytest.raises(AttributeError):
        colocated(IRONWOOD, LOAD).slots = 5


# Reading and moving


@pytest.mark.parametrize(("cached", "kept"), [(0, 0), (0.5, 4096), (0.999, 8183)])
def test_reading_a_prompt(cached, kept):
    """A pass over what is not cached, after what is."""
    one = disaggregated(IRONWOOD, IRONWOOD, replace(LOAD, cached=cached))
    assert forward(IRONWOOD, 1, 8192 - kept, kept).value == read(one, 8192)
    assert read(one, 8192) <= prefill(IRONWOOD, 1, 8192).value


def test_lanes_of_a_prefill_server():
    """A prompt in each stage and each group: four at once through 2 stages in 2 replicas, in the time that forward gives four.
    Co-located servers read one."""
    wide = Server(model("llama-3-70b"), chip("ironwood"), Plan(8, pipeline=2, data=2))
    assert (4, 1, 1) == (
        disaggregated(wide, wide, LOAD).lanes,
        colocated(wide, LOAD).lanes,
        disaggregated(IRONWOOD, wide, LOAD).lanes,
    )
    assert forward(wide, 4, 8192, 0).value == read(disaggregated(wide, wide, LOAD), 8192)
    assert forward(wide, 1, 8192, 0).value == read(colocated(wide, LOAD), 8192)


@pytest.mark.parametrize(
    ("one", "milliseconds"), [(V5E, 54), (IRONWOOD, 27)], ids=lambda x: getattr(x, "chip", chip("v5e")).name
)
def test_a_cache_over_the_data_center(one, milliseconds):
    """2.68 GB over 16 v5e NICs of 25 Gb/s: 54 ms (issue 6); over 8 Ironwood's 100 Gb/s: 27 ms. Latency is far below."""
    moved = transfer(disaggregated(one, one, LOAD), 8192)
    assert milliseconds == round(1e3 * moved.value)
    assert KV / one.plan.chips / one.chip.dcn.egress == pytest.approx(moved.value, rel=1e-12)
    assert ["out", "in"] == [part.name for part in moved.parts] and "bandwidth" == moved.bound


def test_the_slower_end_sets_the_time():
    """From 16 v5e to 8 Ironwood: 50 GB/s go out, 100 GB/s could come in."""
    moved = transfer(disaggregated(V5E, IRONWOOD, LOAD), 8192)
    assert [KV / 50e9, KV / 100e9] == pytest.approx([moved["out"].value, moved["in"].value])
    assert moved.value == moved["out"].value


def test_a_link_inside_a_domain():
    """Two slices of 8 Ironwood side by side: one link of 100 GB/s a chip, one hop of 1 us."""
    moved = transfer(disaggregated(IRONWOOD, IRONWOOD, LOAD, link="network"), 8192)
    assert KV / 8 / 100e9 == pytest.approx(moved.value, rel=1e-12)
    assert 1e-6 == pytest.approx(moved["out/latency"].value)


def test_a_switch_is_a_link():
    """Any egress a chip: 10 GB/s from 16 chips into 8."""
    moved = transfer(disaggregated(V5E, IRONWOOD, LOAD, link=Switch(10e9, 5e-6, 1024)), 8192)
    assert [KV / 160e9, KV / 80e9] == pytest.approx([moved["out"].value, moved["in"].value])


def test_a_short_cache_waits_for_the_latency():
    """One token of 70B is 20 kB a v5e chip: 6.6 us of bytes, 10 us of latency."""
    moved = transfer(disaggregated(V5E, V5E, LOAD), 1)
    assert ("latency", 1e-5) == (moved.bound, pytest.approx(moved.value))


def test_what_moves_is_what_the_decode_server_keeps():
    """In its format: fp8 halves it, whatever the prefill server keeps; with everything that is cached of the prompt."""
    eight = server("llama-3-70b", "ironwood", 8, kv="fp8")
    whole = transfer(disaggregated(IRONWOOD, IRONWOOD, LOAD), 8192).value
    assert whole / 2 == pytest.approx(transfer(disaggregated(IRONWOOD, eight, LOAD), 8192).value)
    assert whole == transfer(disaggregated(eight, IRONWOOD, LOAD), 8192).value
    assert whole == transfer(disaggregated(IRONWOOD, IRONWOOD, replace(LOAD, cached=0.9)), 8192).value


@pytest.mark.parametrize("name", ["deepseek-v3", "gpt-oss-120b", "gemma-3-27b"])
def test_latents_and_windows_move_as_they_are(name):
    """The bytes that one sequence keeps: 70 kB a token of DeepSeek's latents, windows no longer than they are."""
    one = server(name, "h200", 8, weights="fp8")
    moved = transfer(disaggregated(one, one, Workload(32_768, 512, 1.0)), 32_768)
    assert kv_bytes(one.model, 32_768) / 8 / 50e9 == pytest.approx(moved.value)


def test_a_streamed_cache_by_hand():
    """70B reads for longer than it sends: only the last of 80 layers is left. Over a link of 1 GB/s a chip it sends for
    longer: all but what 79 of 80 parts of the reading hide."""
    slow = Switch(1e9, 0.0, 1024)
    for link, seconds in (("dcn", KV / 100e9 / 80), (slow, KV / 8e9 - prefill(IRONWOOD, 1, 8192).value * 79 / 80)):
        one = disaggregated(IRONWOOD, IRONWOOD, LOAD, link=link, streamed=True)
        assert seconds == pytest.approx(handover(one, 8192).value, rel=1e-12)
        assert transfer(one, 8192).value == transfer(replace(one, streamed=False), 8192).value


def test_what_is_not_streamed_is_handed_over_whole():
    """The transfer itself, with its parts."""
    one = disaggregated(IRONWOOD, IRONWOOD, LOAD)
    assert handover(one, 8192).value == transfer(one, 8192).value and handover(one, 8192).parts


@given(servers(), st.integers(1, 60_000), st.floats(1e6, 1e13), st.floats(0, 0.99))
def test_streaming_never_waits_longer(one, prompt, egress, cached):
    """Whatever the server, the link and what is cached; never less than a layer's part, never more than all."""
    assume(fits(one, one.plan.pipeline * one.plan.groups, prompt) and max_batch(one, prompt + 1))
    load = Workload(prompt, 1, 1.0, cached)
    whole, streamed = (
        handover(disaggregated(one, one, load, link=Switch(egress, 1e-5, 10**6), streamed=way), prompt).value
        for way in (False, True)
    )
    assert whole / one.model.layers * (1 - 1e-12) <= streamed <= whole


# What does not fit


def test_a_service_whose_server_does_not_fit():
    """Neither the prefill nor the decode server may lack room: the message has both sizes."""
    small = server("llama-3-70b", "v5e", 8)
    for make in (
        lambda: colocated(small, LOAD),
        lambda: disaggregated(small, V5E, LOAD),
        lambda: disaggregated(V5E, small, LOAD),
    ):
        with pytest.raises(ValueError, match="does not fit: .*prompt of 8192 tokens.*request of 8704"):
            make()


LONG = Lengths((1000, 200_000), (0.999, 0.001))


@pytest.mark.parametrize(
    "load", [Workload(LONG, 100, 0.01), Workload(1000, LONG, 0.01)], ids=["long prompts", "long answers"]
)
def test_the_longest_request_has_to_fit_a_decode_server(load):
    """One in a thousand has 200,000 tokens, and one v5e beside 8B has room for 6,500: such requests never end, however short
    the mean. The prefill server is large."""
    small, large = server("llama-3-8b", "v5e"), server("llama-3-8b", "h200")
    assert not fits(small, 1, 200_000) and fits(large, 1, 200_000)
    with pytest.raises(ValueError, match="does not fit"):
        disaggregated(large, small, load)


def test_a_service_made_by_hand_is_checked_too():
    """A policy that nobody knows is not priced as another, and no servers are not some."""
    with pytest.raises(ValueError, match="policy"):
        Service(IRONWOOD, IRONWOOD, LOAD, (1, 1), "fastest first")
    with pytest.raises(ValueError, match="servers"):
        Service(IRONWOOD, IRONWOOD, LOAD, (0, 0), APART)
