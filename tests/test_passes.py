"""Passes are looked up, not computed: the tables against the passes themselves, between the knots and on them."""

import pickle
from dataclasses import replace

import numpy as np
import pytest
from strategies import server

from lib.chips import chip
from lib.forward import decode_step, forward, mixed
from lib.models import model
from lib.passes import Passes
from lib.server import Plan, Server
from lib.serving import colocated, disaggregated, transfer
from lib.workload import Workload

LONGEST, BUDGET, SLOTS = 20_000, 600, 16
WAYS = {  # dense; experts; windows; latents, whose pass takes the cheaper of two forms; stages and replicas
    "dense": ("llama-3-70b", "ironwood", Plan(8, page=16)),
    "dense on a small chip": ("llama-3-8b", "v5e", Plan(4)),
    "stages": ("llama-3-405b", "gb200", Plan(8, pipeline=2)),
    "replicas": ("llama-3-8b", "h200", Plan(2, data=2)),
    "experts": ("mixtral-8x7b", "h200", Plan(4, expert=2)),
    "experts and windows": ("gpt-oss-120b", "h100", Plan(8, page=128)),
    "one window": ("mistral-7b-v0.1", "v5e", Plan(4)),
    "windows": ("gemma-3-27b", "ironwood", Plan(4, page=16)),
    "a cut sequence": ("gemma-2-27b", "v6e", Plan(16, kv="sequence")),
    "latents": ("deepseek-v3", "ironwood", Plan(8, expert=2, kv="sequence")),
    "latents in replicas": ("deepseek-v3", "ironwood", Plan(8, expert=2, kv="batch")),
}


def service(way, policy="chunked"):
    """A service of that kind of model."""
    name, chip_name, plan = WAYS[way]
    one, workload = Server(model(name), chip(chip_name), plan), Workload(4096, 256, 1.0)
    if policy == "apart":
        return disaggregated(one, one, workload, slots=SLOTS)
    return colocated(one, workload, 1, policy, BUDGET if policy == "chunked" else None, SLOTS)


CACHE = {}


def tables(way):
    """Its tables, made once."""
    if way not in CACHE:
        CACHE[way] = Passes(service(way), LONGEST)
    return CACHE[way]


def off(actual, expected):
    """By which part of the expected time a time is off."""
    return abs(actual / expected - 1)


ways = pytest.mark.parametrize("way", WAYS)


@ways
def test_steps_between_the_knots(way):
    """Any batch, contexts over four orders of magnitude, halves too: within 1e-3 of the pass itself."""
    passes, one = tables(way), service(way).decode
    batch = 1 + np.arange(200) % SLOTS
    context = np.geomspace(1, LONGEST - 1, 200).round(1)
    expected = decode_step(one, batch, context).value
    worst = max(map(off, [passes.step(*each) for each in zip(batch.tolist(), context.tolist(), strict=True)], expected))
    assert worst < 1e-3


@ways
@pytest.mark.parametrize("batch", [1, 7, SLOTS])
def test_steps_at_the_knots_are_exact(way, batch):
    """To rounding: there is nothing to interpolate. The longest context is a knot."""
    passes, one = tables(way), service(way).decode
    assert LONGEST == passes.knots[-1]
    for knot in passes.knots[1:]:
        assert decode_step(one, batch, knot).value == pytest.approx(passes.step(batch, knot), rel=1e-12)


def test_knots_are_at_most_a_quarter_of_an_octave_apart():
    """Whole numbers from 0 to the longest, each at most 2^(1/4) times the one before, rounded up."""
    knots = tables("dense").knots
    assert sorted(set(knots)) == knots
    assert all(high <= np.ceil(low * 2**0.25) for low, high in zip(knots[1:], knots[2:], strict=False))


def test_dense_steps_are_exact_everywhere():
    """Attention is linear in the context, and memory-bound at every batch: to rounding, not to 1e-3."""
    passes, one = tables("dense"), service("dense").decode
    for context in (1.5, 333, 4097.25, 19_999):
        assert decode_step(one, 9, context).value == pytest.approx(passes.step(9, context), rel=1e-12)


@ways
def test_a_chunk_beside_a_batch(way):
    """Chunks of 1 token to all of the budget, after nothing and after thousands: within 1e-3, with latents 2e-3.

    A pass over latents takes the cheaper of two forms, whose crossing lies between knots: these samples are 1.6e-3
    off at most, others were 1.3e-2 off (164 tokens after 25,120)."""
    passes, one, rng = tables(way), service(way).decode, np.random.default_rng(0)
    for _ in range(60):
        batch = int(rng.integers(1, SLOTS + 1))
        context, new = int(np.exp(rng.uniform(0, 9.8))), int(rng.integers(1, BUDGET - batch + 1))
        before = int(rng.integers(0, 2) * np.exp(rng.uniform(0, 9.8)))
        expected = mixed(one, batch, context, new, before).value
        assert off(passes.mixed(batch, context, [(new, before)]), expected) < (2e-3 if "latents" in way else 1e-3)


@ways
def test_a_chunk_at_the_knots_is_exact(way):
    """Tabulated chunks after tabulated contexts: to rounding."""
    passes, one = tables(way), service(way).decode
    for new in passes.sizes[::5]:
        for before in passes.knots[::9]:
            if new + 5 <= BUDGET:
                expected = mixed(one, 5, 777, new, before)
                own = decode_step(one, 5, 777)
                for block in one.model.blocks:  # the batch's own attention may lie between knots
                    assert own[block.name]["attention"].value == expected[block.name]["attention/decoding"].value
                between = passes.step(5, 777) - own.value
                assert expected.value + between == pytest.approx(passes.mixed(5, 777, [(new, before)]), rel=1e-12)


def test_two_pieces_share_one_read_of_the_weights():
    """70B: a pass with chunks of 100 and 200 is one with a chunk of 300, the attention of each in place of theirs."""
    passes, one = tables("dense"), service("dense").decode
    whole = mixed(one, 8, 1000, 300, 0)
    attention = [
        forward(one, 1, new, before)["layers/attention"].value for new, before in ((100, 0), (200, 3000), (300, 0))
    ]
    expected = whole.value - attention[2] + attention[0] + attention[1]
    assert expected == pytest.approx(passes.mixed(8, 1000, [(100, 0), (200, 3000)]), rel=1e-3)


def test_a_chunk_alone():
    """Nobody decodes: the chunk's own pass without its logits, which `forward` has for its last token."""
    passes, one = tables("dense"), service("dense").decode
    alone = forward(one, 1, 512, 2048)
    assert alone.value - alone["unembed"].value == pytest.approx(passes.mixed(0, 0, [(512, 2048)]), rel=1e-3)


def test_no_chunk_is_a_step():
    """A pass that reads nothing is a decode step, exactly."""
    assert tables("dense").step(4, 900) == tables("dense").mixed(4, 900, [])


@ways
def test_prompts_are_exact(way):
    """Whole prompts are not interpolated: `forward`, after a cached part, twice the same."""
    passes, one = tables(way), service(way).prefill
    for new, kept in ((1, 0), (777, 0), (1000, 3000), (1000, 3000)):
        assert forward(one, 1, new, kept).value == passes.prefill(new, kept)


@pytest.mark.parametrize("streamed", [False, True])
def test_caches_move_as_long_as_the_handover_says(streamed):
    """Apart, 8,192 tokens of 327,680 B over 8 chips, whole or streamed (what a prefill hides is the simulation's to
    say); together, 0."""
    apart = replace(service("dense", "apart"), streamed=streamed)
    moved = 8192 * 327_680 / 8 / 12.5e9
    assert moved == pytest.approx(transfer(apart, 8192).value, rel=0.01)  # a chip's share of 100 Gbit/s, and a latency
    assert transfer(apart, 8192).value == Passes(apart, LONGEST).transfer(8192)
    assert 0 == tables("dense").transfer(8192)


def test_a_heterogeneous_pair_reads_and_decodes_on_its_own_chips():
    """v6e prefill, Ironwood decode: each pass is its server's."""
    one, two = server("llama-3-8b", "v6e", 4), server("llama-3-8b", "ironwood", 1)
    passes = Passes(disaggregated(one, two, Workload(1024, 64, 1.0), slots=8), 2000)
    assert forward(one, 1, 1024, 0).value == passes.prefill(1024, 0)
    assert decode_step(two, 8, 1000).value == pytest.approx(passes.step(8, 1000), rel=1e-12)


def test_a_prompt_in_every_lane():
    """Apart, two groups of Mixtral's experts read a prompt each in a pass, and wake more experts than one prompt that
    is alone on a server for both."""
    one, workload = Server(model("mixtral-8x7b"), chip("h200"), Plan(4, expert=2)), Workload(64, 64, 1.0)
    apart, together = disaggregated(one, one, workload, slots=8), colocated(one, workload, slots=8)
    assert forward(one, 2, 9, 50).value == Passes(apart, 128).prefill(9, 50)
    assert forward(one, 1, 9, 50).value == Passes(together, 128).prefill(9, 50)
    assert forward(one, 1, 9, 50).value < forward(one, 2, 9, 50).value


def test_an_empty_context_is_straight_before_the_first():
    """A sequence of nothing, as the mean of an empty batch would be: what 1 and 2 tokens extrapolate to."""
    passes, one = tables("dense"), service("dense").decode
    first, second = (decode_step(one, 3, context).value for context in (1, 2))
    assert 2 * first - second == pytest.approx(passes.step(3, 0), rel=1e-12)


@pytest.mark.parametrize("longest", [1, 2, 3, 5])
def test_shortest_requests(longest):
    """Tables of a few knots: every step, at every context from 1 on."""
    passes, one = Passes(service("dense", "prefill first"), longest), service("dense").decode
    for context in range(1, longest + 1):
        assert decode_step(one, 3, context).value == pytest.approx(passes.step(3, context), rel=1e-9)


def test_passes_are_positive_and_finite_far_outside_the_tables():
    """Contexts ten times the longest go straight on, where attention is linear."""
    passes, one = tables("dense"), service("dense").decode
    assert decode_step(one, 3, 200_000).value == pytest.approx(passes.step(3, 200_000), rel=1e-9)


def test_tables_go_through_a_pickle():
    """To other processes and back: the same seconds, those kept and those not yet."""
    passes = tables("windows")
    passes.prefill(321, 0)
    again = pickle.loads(pickle.dumps(passes))
    assert passes.prefill(321, 0) == again.prefill(321, 0)
    assert passes.prefill(322, 5) == again.prefill(322, 5)
    assert passes.step(7, 1234.5) == again.step(7, 1234.5)
    assert passes.mixed(7, 1234.5, [(50, 60)]) == again.mixed(7, 1234.5, [(50, 60)])


def test_chunked_attention_between_the_knots():
    """Llama 4 attends within chunks of 8,192 tokens, and reads less just after a chunk's end than just before it: the
    steps of the tables follow that within 1e-3, as they do windows."""
    one = Server(model("llama-4-scout"), chip("ironwood"), Plan(8))
    passes = Passes(colocated(one, Workload(4096, 256, 1.0), slots=64), LONGEST)
    context = np.array([6000, 7500, 8117, 8192, 8193, 9000, 12_000, 16_383, 16_385])
    expected = decode_step(one, 62, context).value
    assert max(map(off, [passes.step(62, each) for each in context.tolist()], expected)) < 1e-3
