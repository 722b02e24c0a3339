"""Slices of a network and the collectives on them, by hand."""

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from strategies import CHIPS

from lib.breakdown import explain
from lib.chips import chip
from lib.network import (
    Boardfly,
    Mesh,
    Slice,
    Switch,
    Tiered,
    Torus,
    all_gather,
    all_reduce,
    all_to_all,
    compact,
    cut,
    reduce_scatter,
    send,
)

RING = Torus(link_bandwidth=50e9, hop_latency=1e-6, axes=1, wrap=4, domain=1024)  # both links: 100 GB/s
LINE = Torus(link_bandwidth=50e9, hop_latency=1e-6, axes=1, wrap=2048, domain=1024)  # never closes

HOPS = [  # formulas.md T7
    ("v5e", 8, (2, 4), 4),
    ("v5e", 16, (4, 4), 6),
    ("v5e", 32, (4, 8), 10),
    ("v5e", 256, (16, 16), 16),
    ("ironwood", 8, (2, 2, 2), 3),
    ("ironwood", 64, (4, 4, 4), 6),
    ("v4", 1024, (8, 8, 16), 16),  # claim S-023: the diameter that Boardfly brings down to 7
]


@pytest.mark.parametrize(("name", "chips", "shape", "hops"), HOPS)
def test_the_most_compact_slice_and_its_diameter(name, chips, shape, hops):
    """X/2 hops along a wrapped axis, X - 1 along one that is not, summed over the axes."""
    network = chip(name).network
    assert (shape, hops, hops) == (
        compact(chips, network.axes),
        network.slice(chips).hops,
        network.slice(chips, shape).hops,
    )


FLOORS = [
    ("v5e", 8, 1.28),
    ("v5e", 16, 1.92),
    ("v5e", 32, 3.20),
    ("v5e", 256, 5.12),
    ("ironwood", 8, 0.96),
    ("ironwood", 64, 1.92),
]


@pytest.mark.parametrize(("name", "chips", "milliseconds"), FLOORS)
def test_hop_floor_of_llama_70b(name, chips, milliseconds):
    """80 layers x 2 all-reduces of next to nothing cost their hops, twice each (formulas.md T7)."""
    assert milliseconds == pytest.approx(160e3 * all_reduce(1, chips, chip(name).network).value)


@pytest.mark.parametrize("collective", [all_gather, reduce_scatter, all_reduce, all_to_all])
@pytest.mark.parametrize(
    "network",
    [RING, LINE, Switch(450e9, 6e-7, 8), Mesh(64e9, 8e-7, 8), Boardfly(1.2e12, 1e-6, 64)],
    ids=lambda n: type(n).__name__,
)
def test_one_chip_talks_to_nobody(collective, network):
    """A collective of one costs 0, latency included: one chip is a case, not a branch."""
    assert (0, 0) == (collective(1e9, 1, network).value, collective(1e9, 1, network).serial)


def test_all_gather_on_a_wrapped_ring():
    """8 chips, 1 GB: 7/8 GB arrive over both links: 0.875 GB / 100 GB/s = 8.75 ms."""
    assert 8.75e-3 == pytest.approx(all_gather(1e9, 8, RING).value)


def test_all_gather_on_a_line():
    """Without wraparound only one link brings data: twice as long (formulas.md, disagreement 3)."""
    assert 17.5e-3 == pytest.approx(all_gather(1e9, 8, LINE).value)


def test_all_gather_uses_every_axis():
    """A wrapped 4x4x4 torus of 100 GB/s links sends over 6: 1 GB x 63/64 / 600 GB/s."""
    assert 1e9 * 63 / 64 / 600e9 == pytest.approx(all_gather(1e9, 64, chip("ironwood").network)["bandwidth"].value)


def test_three_axes_wrap_only_together():
    """Slices below 4x4x4 do not wrap, not even along an axis of 4 (formulas.md, disagreement 3)."""
    network = chip("ironwood").network
    assert (2 + 1 + 3, 3 * 100e9) == (lambda s: (s.hops, s.bandwidth))(network.slice(24, (3, 2, 4)))
    assert (1 + 1 + 3, 3 * 100e9) == (lambda s: (s.hops, s.bandwidth))(network.slice(16, (2, 2, 4)))


def test_two_axes_wrap_one_by_one():
    """A 4x16 slice of v5e is a ring along its long axis and a line along the short one."""
    four_by_sixteen = chip("v5e").network.slice(64, (4, 16))
    assert (3 + 8, 150e9) == (four_by_sixteen.hops, four_by_sixteen.bandwidth)


@pytest.mark.parametrize("name", ["v5e", "ironwood", "h100", "mi300x", "tpu8i"])
@pytest.mark.parametrize("bytes", [1, 1e5, 1e9])
def test_all_reduce_is_a_reduce_scatter_and_an_all_gather(name, bytes):
    """Twice an all-gather, hop floor included."""
    network = chip(name).network
    twice = reduce_scatter(bytes, 8, network).value + all_gather(bytes, 8, network).value
    assert twice == all_reduce(bytes, 8, network).value == 2 * all_gather(bytes, 8, network).value


def has(network, n):
    """Whether the network has a slice of n chips."""
    try:
        return bool(network.slice(n))
    except ValueError:
        return False


def busiest(n, wrapped):
    """By brute force: the most n-th parts of n-th parts of an array that any one-way link carries when every chip sends one to
    every other the shorter way around, halved between both ways where they are equally long. No formula, a count."""
    loads = {}
    for source in range(n):
        for target in range(n):
            ahead = (target - source) % n
            ways = [(ahead, 1), (n - ahead, -1)] if wrapped else [(abs(target - source), 1 if target > source else -1)]
            shortest = [way for way in ways if way[0] == min(length for length, _ in ways)]
            for length, step in shortest:
                for hop in range(length):
                    link = ((source + step * hop) % n, step)
                    loads[link] = loads.get(link, 0) + 1 / len(shortest)
    return max(loads.values())


@pytest.mark.parametrize("wrapped", [True, False])
@pytest.mark.parametrize("n", range(2, 17))
def test_all_to_all_is_what_the_busiest_link_carries(n, wrapped):
    """Every pair over every link, for even and odd rings and lines: the parts that the busiest link carries, at its rate."""
    network = Torus(50e9, 1e-6, 1, 1 if wrapped else 2048, 1024)
    carried = busiest(n, wrapped) * 1e9 / n**2
    assert carried / 50e9 == pytest.approx(all_to_all(1e9, n, network)["bandwidth"].value, rel=1e-12)


@pytest.mark.parametrize("n", [2, 4, 8, 16, 64, 1024])
def test_all_to_all_on_a_ring(n):
    """V / (4 W) for even n, W = both links: each chip's V/n^2 travel n/4 hops on average in each direction
    (formulas.md, section 1 and trap 15)."""
    ring = Torus(50e9, 1e-6, 1, 2, 1024)
    assert 1e9 / (4 * 100e9) == pytest.approx(all_to_all(1e9, n, ring)["bandwidth"].value)


@pytest.mark.parametrize("n", [4, 8, 64])
def test_all_to_all_on_a_line(n):
    """Twice as long: half of everything crosses the middle link, V/4 each way."""
    assert 1e9 / 4 / 50e9 == pytest.approx(all_to_all(1e9, n, LINE)["bandwidth"].value)


def test_all_to_all_tends_to_a_quarter_of_an_all_gather():
    """Only for large n (formulas.md, section 1)."""
    assert 0.25 == pytest.approx(all_to_all(1e9, 1024, RING).value / all_gather(1e9, 1024, RING).value, rel=2e-3)


@pytest.mark.parametrize("shape", [(16, 16), (4, 16)])
def test_all_to_all_on_a_torus_is_bound_by_its_longest_axis(shape):
    """V/4 crosses the middle of the long axis each way, over 2 cuts x chips across x one-way links."""
    network, n = chip("v5e").network, shape[0] * shape[1]
    assert 1e9 / 4 / (2 * shape[0] * 50e9) == pytest.approx(
        all_to_all(1e9, n, network.slice(n, shape))["bandwidth"].value
    )


@pytest.mark.parametrize("n", [2, 4, 8])
def test_all_to_all_through_a_switch(n):
    """Every chip sends (n-1)/n of its V/n through its own egress."""
    assert 1e9 / n * (n - 1) / n / 450e9 == pytest.approx(all_to_all(1e9, n, chip("h100").network)["bandwidth"].value)


@pytest.mark.parametrize("n", [2, 4, 8])
def test_all_to_all_on_a_full_mesh(n):
    """Every pair exchanges V/n^2 over the one link it has."""
    assert 1e9 / n**2 / 64e9 == pytest.approx(all_to_all(1e9, n, chip("mi300x").network)["bandwidth"].value)


@pytest.mark.parametrize(("n", "links"), [(2, 1), (4, 3), (8, 7)])
def test_a_pair_on_a_mesh_has_one_link(n, links):
    """64 GB/s to each of the others taking part: 1, 3 or 7 of the 7 links of an MI300X."""
    assert 1e9 * (n - 1) / n / (links * 64e9) == pytest.approx(
        all_gather(1e9, n, chip("mi300x").network)["bandwidth"].value
    )


@pytest.mark.parametrize(("n", "hops"), [(1, 0), (2, 1), (4, 1), (8, 3), (32, 3), (64, 7), (1024, 7)])
def test_boardfly_has_seven_hops_at_most(n, hops):
    """A board, a group, everything (claim S-023)."""
    assert hops == chip("tpu8i").network.slice(n).hops


def test_a_switch_is_one_hop_whatever_the_number():
    """0.6 us on NVLink, for 2 and for 8."""
    assert [6e-7, 6e-7] == [all_gather(1, n, chip("h100").network).value for n in (2, 8)]


def test_latency_and_bandwidth_overlap():
    """A collective takes the longer of the two: on 8 v5e chips an all-gather of 400 kB meets both (T6, nominal links,
    wrapped ring): 4 hops = 400 kB x 7/8 / 100 GB/s + rounding of (n-1)/n."""
    on = all_gather(4e-6 * 100e9 * 8 / 7, 8, RING)
    assert (4e-6, pytest.approx(4e-6)) == (on["latency"].value, on["bandwidth"].value)


@pytest.mark.parametrize("n", [0, -1, 257, 8.0, 2.5, float("nan"), "8", None, True])
def test_a_number_of_chips_that_the_network_lacks(n):
    """ValueError says what the network takes: whole numbers from 1 to 256 for v5e."""
    with pytest.raises(ValueError, match="chips must be a whole number from 1 to 256"):
        all_reduce(1e6, n, chip("v5e").network)


def test_whole_numbers_of_numpy_count_chips():
    """8 is 8, whoever made it."""
    assert all_reduce(1e6, 8, chip("v5e").network).value == all_reduce(1e6, np.int64(8), chip("v5e").network).value


@pytest.mark.parametrize("shape", [(2, 2, 2), (4, 4), (3, 3), (-2, -4), (8.0, 1)])
def test_a_grid_that_is_none(shape):
    """Too many axes, another number of chips, negative lengths: ValueError."""
    with pytest.raises(ValueError, match="grid"):
        chip("v5e").network.slice(8, shape)


@pytest.mark.parametrize("bytes", [-1, float("nan"), float("inf"), "1e6", None, [1, -1]], ids=repr)
def test_bytes_that_are_no_size(bytes):
    """ValueError; NaN must not come out as the latency."""
    with pytest.raises(ValueError, match="bytes"):
        all_gather(bytes, 8, chip("v5e").network)


def test_collectives_take_arrays():
    """A sweep over bytes: 0 bytes cost the hops."""
    np.testing.assert_allclose(all_gather(np.array([0, 1e9]), 8, RING).value, [4e-6, 8.75e-3])


def test_a_slice_cuts_itself():
    """What a server occupies is a network for its collectives."""
    mine = Slice(8, 3, 300e9, 1e12, 1e-6)
    assert (mine, 3e-6) == (mine.slice(8), all_gather(0, 8, mine).value)


@given(
    st.sampled_from(sorted(CHIPS)),
    st.integers(1, 300),
    st.floats(0, 1e10),
    st.floats(1, 8),
    st.sampled_from([all_gather, reduce_scatter, all_reduce, all_to_all]),
)
def test_more_of_a_network_is_never_slower(name, n, bytes, factor, collective):
    """More bandwidth helps or does nothing; more bytes cost time or nothing; nothing is free of its hops."""
    network = CHIPS[name].network
    assume(has(network, n))
    link = "egress" if hasattr(network, "egress") else "link_bandwidth"
    faster = type(network)(**{**vars(network), link: factor * getattr(network, link)})
    now = collective(bytes, n, network).value
    assert collective(bytes, n, faster).value <= now <= collective(bytes * factor, n, network).value
    assert network.slice(n).hops * network.hop_latency <= now or n == 1


@given(st.sampled_from(sorted(CHIPS)), st.integers(2, 300), st.floats(1e6, 1e10))
def test_nothing_is_sent_faster_than_all_links_can(name, n, bytes):
    """A chip receives (n-1)/n of the bytes of an all-gather, an n-th of that in an all-to-all: never faster than
    its links together."""
    near, network = CHIPS[name].network, CHIPS[name].interconnect
    assume(has(network, n))
    inside = (
        near.egress
        if hasattr(near, "egress")
        else near.link_bandwidth * (2 * near.axes if isinstance(near, Torus) else n - 1)
    )
    links = inside + (CHIPS[name].dcn.egress if n > near.domain else 0)
    received = bytes * (n - 1) / n
    assert all_gather(bytes, n, network).value >= received / links * (1 - 1e-12)
    assert all_to_all(bytes, n, network).value >= received / n / links * (1 - 1e-12)


def test_all_to_all_waits_for_the_axis_that_does_not_wrap():
    """12 x 16 on v5e: the axis of 16 wraps, that of 12 does not. A quarter of 1 GB passes its 16 links of 50 GB/s, each way."""
    assert 0.25e9 / (16 * 50e9) == pytest.approx(all_to_all(1e9, 192, chip("v5e").network).value)


def test_a_collective_explains_itself():
    """The network's rules have no letter, so its slice is explained."""
    told = explain(all_reduce, bytes=1e6, n=8, network=chip("v5e").network)
    assert told.value == all_reduce(1e6, 8, chip("v5e").network).value and "W_ici" in str(told)


# Algorithms, neighbours, overheads


@pytest.mark.parametrize(("name", "n"), [("v5e", 8), ("ironwood", 64), ("h100", 8), ("mi300x", 4), ("tpu8i", 32)])
def test_one_shot_all_reduce_halves_the_hops(name, n):
    """Everyone sends its whole array to everyone: one phase of hops instead of two, n/2 times the bytes."""
    ring, shot = (all_reduce(1e6, n, chip(name).network, way) for way in ("ring", "one-shot"))
    assert 2 * shot["latency"].value == pytest.approx(
        ring["all-gather/latency"].value + ring["reduce-scatter/latency"].value
    )
    both = ring["all-gather/bandwidth"].value + ring["reduce-scatter/bandwidth"].value
    assert n / 2 * both == pytest.approx(shot["bandwidth"].value)


def test_an_algorithm_that_does_not_exist():
    """ValueError lists the two."""
    with pytest.raises(ValueError, match="ring, one-shot, got 'tree'"):
        all_reduce(1, 8, RING, "tree")


def test_a_neighbour_gets_its_bytes_over_one_link():
    """100 MB over a 50 GB/s link take 2 ms, a byte takes a hop; through a switch the whole egress serves one neighbour."""
    assert [2e-3, 1e-6] == [pytest.approx(send(bytes, chip("v5e").network).value) for bytes in (1e8, 1)]
    assert 1e8 / 450e9 == pytest.approx(send(1e8, chip("h100").network).value)


@pytest.mark.parametrize("collective", [all_gather, reduce_scatter, all_to_all])
def test_an_overhead_adds_to_whichever_is_longer(collective):
    """5 us of launch and synchronisation, on top of the hops of a small array and of the bytes of a large one; alone, nothing."""
    slow = Torus(50e9, 1e-6, 1, 4, 1024, overhead=5e-6)
    for bytes in (1, 1e9):
        assert 5e-6 + collective(bytes, 8, RING).value == pytest.approx(collective(bytes, 8, slow).value)
    assert 0 == collective(1e9, 1, slow).value
    assert 2 * all_gather(1e6, 8, slow).value == all_reduce(1e6, 8, slow).value  # its two phases both pay


# Domains, and the slower network between them

TWO_TIERS = Tiered(Switch(450e9, 6e-7, 8), Switch(50e9, 1e-5, 1000))


def test_inside_a_domain_the_slower_network_is_not_used():
    """8 GPUs of one server: as if there were no other."""
    assert TWO_TIERS.near.slice(8) == TWO_TIERS.slice(8)


def test_an_all_gather_over_two_domains():
    """1 GB on 16 GPUs: each server lacks half of it, which enters through 8 cards of 50 GB/s: 1.25 ms. Inside a server each GPU
    still lacks 7/8, at 450 GB/s: 1.94 ms, and that is longer. Latencies add."""
    on = all_gather(1e9, 16, TWO_TIERS)
    assert 7 / 8 * 1e9 / 450e9 == pytest.approx(on["bandwidth"].value)
    assert 0.6e-6 + 10e-6 == pytest.approx(on["latency"].value)
    thin = Tiered(TWO_TIERS.near, Switch(5e9, 1e-5, 1000))
    assert 0.5e9 / (8 * 5e9) == pytest.approx(all_gather(1e9, 16, thin)["bandwidth"].value)


def test_an_all_to_all_over_two_domains():
    """Of 1 GB each server holds half and sends half of that away, through 8 cards of 50 GB/s: 0.625 ms."""
    assert 0.25e9 / (8 * 50e9) == pytest.approx(all_to_all(1e9, 16, TWO_TIERS)["bandwidth"].value)


def test_domains_are_filled_evenly():
    """12 GPUs take two servers of 6, not one of 8 and one of 4; 17 have no equal parts but single ones."""
    assert (12, 1, 1) == (lambda s: (s.chips, s.hops, s.far_hops))(TWO_TIERS.slice(12))
    assert (17, 0, 1) == (lambda s: (s.chips, s.hops, s.far_hops))(TWO_TIERS.slice(17))


@pytest.mark.parametrize("name", ["v5e", "ironwood", "h100", "tpu8i"])
def test_an_array_of_counts_is_its_slices(name):
    """A sweep over n: hops and bandwidths entry by entry; entries that the network lacks are refused."""
    n, network = np.array([1, 2, 8, 32, 8]), chip(name).interconnect
    swept, each = all_to_all(1e6, n, network), [all_to_all(1e6, int(x), network) for x in n]
    np.testing.assert_allclose(swept.value, [one.value for one in each])
    np.testing.assert_array_equal(swept["latency"].value, [one["latency"].value for one in each])
    for bad in ([0, 8], [2.5], [-1], [10**7], []):
        with pytest.raises(ValueError, match="whole numbers"):
            cut(network, np.array(bad))


@pytest.mark.parametrize("n", [34, 251])
def test_a_pod_has_no_longer_axis_than_its_side(n):
    """v5e is 16 x 16: no ring of 251 chips, no grid of 2 x 17."""
    with pytest.raises(ValueError, match="16 chips a side"):
        chip("v5e").network.slice(n)
    assert 7 + 8 == chip("v5e").network.slice(128, (8, 16)).hops  # along the line, around the ring


def test_a_flat_slice_of_a_cube_does_not_wrap():
    """4x4x1 of Ironwood is not made of whole cubes, however it is written; 4x4x6 is not either, 4x8x12 is."""
    network = chip("ironwood").network
    flat = [network.slice(16, shape) for shape in ((4, 4), (1, 4, 4), (4, 4, 1))]
    assert [(6, 200e9)] * 3 == [(one.hops, one.bandwidth) for one in flat]
    assert (300e9, 600e9) == (network.slice(96, (4, 4, 6)).bandwidth, network.slice(384, (4, 8, 12)).bandwidth)


@pytest.mark.parametrize("field", ["link_bandwidth", "hop_latency", "overhead"])
@pytest.mark.parametrize("x", [-1, float("nan"), float("inf"), "1"])
def test_numbers_of_a_network_that_are_none(field, x):
    """Refused before they become a time."""
    with pytest.raises(ValueError, match=field):
        all_reduce(1e6, 8, Torus(**{**vars(RING), field: x}))


@pytest.mark.parametrize("axes", [0, 4, 2.5])
def test_a_torus_has_one_to_three_axes(axes):
    """Neither none nor four."""
    torus = Torus(50e9, 1e-6, axes, 4, 64)
    for cut_one in (torus.slice, torus.grid, lambda n: torus.slice(n, (n,))):
        with pytest.raises(ValueError, match="1, 2 or 3 axes"):
            cut_one(8)


@pytest.mark.parametrize("n", [4, 0, -1, float("nan"), np.int64(4), np.float32(4)])
def test_a_collective_on_a_slice_is_among_its_chips(n):
    """Eight chips, and no others."""
    with pytest.raises(ValueError, match="this slice has 8 chips"):
        all_gather(1e6, n, chip("v5e").network.slice(8))


@pytest.mark.parametrize("network", [chip("v5e"), None, "torus"])
def test_what_is_no_network(network):
    """A chip is none; its network is."""
    for call in (lambda: all_gather(1e6, 8, network), lambda: send(1e6, network)):
        with pytest.raises(ValueError, match="a network or a slice"):
            call()


def test_both_overheads_are_paid_between_domains():
    """3 us inside and 5 us between: a collective over two servers pays both, one inside a server its own."""
    slow = Tiered(Switch(450e9, 6e-7, 8, 3e-6), Switch(50e9, 1e-5, 1000, 5e-6))
    assert 8e-6 + all_gather(1, 16, TWO_TIERS).value == pytest.approx(all_gather(1, 16, slow).value)
    assert 3e-6 + all_gather(1, 8, TWO_TIERS).value == pytest.approx(all_gather(1, 8, slow).value)


def test_a_swept_network_reaches_other_domains():
    """Two card speeds at once: entry by entry the scalar answer."""
    egress = np.array([5e9, 50e9])
    swept = all_gather(1e9, 16, Tiered(TWO_TIERS.near, Switch(egress, 1e-5, 1000))).value
    each = [all_gather(1e9, 16, Tiered(TWO_TIERS.near, Switch(x, 1e-5, 1000))).value for x in egress]
    np.testing.assert_allclose(swept, each)
