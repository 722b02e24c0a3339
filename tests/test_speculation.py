"""Draft and verify: the literature's values, rounds simulated and by hand, what fits, and when it stops to pay."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from strategies import leaves, server

from lib.bounds import critical_batch
from lib.breakdown import explain
from lib.chips import chip
from lib.formats import Format
from lib.forward import decode_step, forward
from lib.models import kv_bytes, model
from lib.server import Plan, Server, fits, footprint
from lib.speculation import (
    best_k,
    break_even_batch,
    expected_tokens,
    free_drafts,
    implied_acceptance,
    link_bound_tokens,
    speculate,
    speculative_speedup,
    speedup,
)

TARGET, DRAFT = server("llama-3-70b", "ironwood", 8), server("llama-3-8b", "ironwood", 8)
CHEN = 1.8 / 14.1  # draft step over target step, ms (Chen et al. 2023)

# Tokens of a round

LEVIATHAN = [  # acceptance and proposals of Leviathan et al. 2023, table 2; tokens by their equation 1, computed elsewhere
    (0.75, 7, 3.6),
    (0.80, 7, 4.161),
    (0.82, 7, 4.42),
    (0.62, 7, 2.574),
    (0.68, 5, 2.816),
    (0.71, 3, 2.572),
    (0.65, 5, 2.642),
    (0.73, 5, 3.143),
    (0.74, 3, 2.693),
]


@pytest.mark.parametrize(("acceptance", "k", "tokens"), LEVIATHAN)
def test_tokens_of_leviathan(acceptance, k, tokens):
    """Nine published acceptances, to three decimals."""
    assert tokens == pytest.approx(expected_tokens(acceptance, k).value, abs=5e-4)


@pytest.mark.parametrize(("acceptance", "k"), [(0.3, 4), (0.75, 7), (0.95, 3), (0.5, 1)])
def test_tokens_of_simulated_rounds(acceptance, k):
    """Proposals up to the first that is refused, and the target's own token: 200,000 rounds."""
    refused = np.random.default_rng(0).random((200_000, k)) >= acceptance
    accepted = np.where(refused.any(1), refused.argmax(1), k)
    assert accepted.mean() + 1 == pytest.approx(expected_tokens(acceptance, k).value, rel=0.01)


@pytest.mark.parametrize("k", [0, 1, 4, 7])
def test_tokens_of_rounds_that_are_all_or_nothing(k):
    """All refused: the target's token. All accepted: k + 1, to 1e-6, in integers as in floats. No proposals: one."""
    assert 1 == expected_tokens(0, k).value == expected_tokens(0.0, k).value
    assert [k + 1, k + 1] == pytest.approx([expected_tokens(1, k).value, expected_tokens(1.0, k).value], rel=1e-6)
    assert 1 == pytest.approx(expected_tokens(0.6, 0).value, rel=1e-12)


def test_tokens_of_many_rounds_at_once():
    """Acceptances down, proposals across: 1 + a + a^2 ...; lists, narrow numbers and a chance of exactly 1 among them."""
    found = expected_tokens([[0], [0.5], [1]], np.array([0, 1, 2, 100], np.int8)).value
    np.testing.assert_allclose(found, [[1, 1, 1, 1], [1, 1.5, 1.75, 2], [1, 2, 3, 101]], rtol=1e-5)
    assert 1.75 == expected_tokens(np.float32(0.5), np.int64(2)).value


def test_a_certain_acceptance_in_jax():
    """k + 1 as elsewhere, not NaN: in an array that is there, and under jit and vmap."""
    with jax.enable_x64(True):
        certain = jnp.array([0.0, 0.5, 1.0])
        for f in (lambda a: expected_tokens(a, 2).value, jax.jit(jax.vmap(lambda a: expected_tokens(a, 2).value))):
            np.testing.assert_allclose(np.asarray(f(certain)), [1, 1.75, 3], rtol=1e-6)


def test_a_round_of_very_many_proposals():
    """1 / (1 - a) however many there are: nothing overflows."""
    assert 10 == pytest.approx(expected_tokens(0.9, 1e30).value) == pytest.approx(expected_tokens(0.9, 10**29).value)


# Speed-ups of two times

T9 = [  # speed-up printed for K = 4; tokens, acceptance; speed-ups of 1 to 8 proposals, best k (formulas.md T9)
    (1.92, 2.90, 0.724, "1.53 1.79 1.90 1.92 1.89 1.84 1.77 1.69", 4),
    (2.01, 3.04, 0.748, "1.55 1.84 1.97 2.01 2.00 1.95 1.89 1.82", 4),
    (2.46, 3.72, 0.851, "1.64 2.05 2.31 2.46 2.54 2.57 2.57 2.54", 6),
]


@pytest.mark.parametrize(("printed", "tokens", "acceptance", "table", "best"), T9)
def test_acceptance_behind_the_speedups_of_chen(printed, tokens, acceptance, table, best):
    """Tokens of a round from the printed speed-up, the acceptance from them, and from that the whole table."""
    rounds = printed * (1 + 4 * CHEN)
    implied = implied_acceptance(rounds, 4).value
    assert (tokens, acceptance) == (round(rounds, 2), pytest.approx(implied, abs=6e-4))
    gains = speculative_speedup(implied, np.arange(1, 9), CHEN).value
    assert table.split() == [f"{gain:.2f}" for gain in gains]
    assert best == 1 + gains.argmax()


def test_the_optimum_of_chen_is_flat():
    """Three to five proposals are within 1.5 % of four (formulas.md T9)."""
    gains = speculative_speedup(0.724, np.array([3, 4, 5]), CHEN).value
    assert (gains >= 0.985 * gains[1]).all()


def test_the_measured_step_is_not_the_printed_speedup():
    """14.1 / 7.52 is 1.875, not the printed 1.92: its round yields 2.83 tokens."""
    assert 2.83 == round(14.1 / 7.52 * (1 + 4 * CHEN), 2)
    assert 0.711 == pytest.approx(implied_acceptance(14.1 / 7.52 * (1 + 4 * CHEN), 4).value, abs=1e-3)


@pytest.mark.parametrize(
    ("acceptance", "draft", "gain"), [(0.5, 0.5, 1), (0.6, 0.5, 1.6 / 1.5), (0.4, 0.5, 1.4 / 1.5), (0, 0, 1)]
)
def test_one_proposal_pays_if_it_is_likelier_than_dear(acceptance, draft, gain):
    """(1 + a) / (1 + c) by hand."""
    assert gain == pytest.approx(speculative_speedup(acceptance, 1, draft).value)


def test_a_dear_verification():
    """1.75 tokens in 2 x 0.1 + 1.5 steps; free drafts and a verification that costs a step gain all tokens."""
    assert [1.75 / 1.7, 1.75] == pytest.approx(
        [speculative_speedup(0.5, 2, 0.1, 1.5).value, speculative_speedup(0.5, 2, 0).value]
    )


def of_closed_forms(batch, context, k):
    """(draft, verification) of 70B and 8B on 8 Ironwood over a target step, by 7.2 with all parameters, every cache read once."""
    one = chip("ironwood")

    def step(name, params, tokens):
        cache = batch * kv_bytes(model(name), context) / (8 * one.hbm_bandwidth)
        return cache + max(2 * batch * tokens * params / (8 * one.bf16), 2 * params / (8 * one.hbm_bandwidth))

    plain = step("llama-3-70b", 70.55e9, 1)
    return step("llama-3-8b", 8.03e9, 1) / plain, step("llama-3-70b", 70.55e9, k + 1) / plain


@pytest.mark.parametrize(
    ("batch", "context", "gain"), [(1, 8192, 2.31), (64, 8192, 1.63), (256, 8192, 1.25), (128, 32768, 1.38)]
)
def test_the_gain_shrinks_with_the_batch_and_survives_long_contexts(batch, context, gain):
    """70B with an 8B draft on 8 Ironwood, acceptance 0.8, best k (formulas.md, section 5)."""
    gains = [speculative_speedup(0.8, k, *of_closed_forms(batch, context, k)).value for k in range(17)]
    assert gain == round(max(gains), 2)


# Acceptance from tokens


@pytest.mark.parametrize(
    ("tokens", "k", "acceptance"), [(1, 4, 0), (1.5, 1, 0.5), (1.75, 2, 0.5), (1.9375, 4, 0.5), (2.71, 2, 0.9)]
)
def test_implied_acceptance_by_hand(tokens, k, acceptance):
    """1 + a = 1.5, 1 + a + a^2 = 1.75 or 2.71: the geometric sum inverted."""
    assert acceptance == pytest.approx(implied_acceptance(tokens, k).value, abs=1e-9)


@pytest.mark.parametrize("k", [1, 4, 16, 1000])
@pytest.mark.parametrize("acceptance", [1e-3, 0.3, 0.9, 0.999])
def test_implied_acceptance_inverts(acceptance, k):
    """There and back; NumPy's numbers as well."""
    tokens = expected_tokens(acceptance, k).value
    assert acceptance == pytest.approx(implied_acceptance(tokens, k).value, rel=1e-6)
    assert implied_acceptance(tokens, k).value == implied_acceptance(np.float64(tokens), np.int64(k)).value


def test_nearly_all_proposals_accepted():
    """Close below k + 1 the acceptance is close below 1, not above it."""
    assert 1 - 1e-6 < implied_acceptance(5 - 1e-9, 4).value <= 1


# Proposals that cost nothing


@pytest.mark.parametrize(
    ("name", "batch", "formats", "proposals"),
    [
        ("v5e", 1, {}, 239.5),
        ("v5e", 48, {}, 240.54 / 48 - 1),
        ("v5e", 48, {"weights": "int8"}, 120.27 / 48 - 1),
        ("v5e", 48, {"weights": "int8", "math": "int8"}, 240.54 / 48 - 1),
        ("ironwood", 64, {}, 312.60 / 64 - 1),
        ("v5e", 481.08, {}, -0.5),  # compute-bound already
    ],
)
def test_proposals_up_to_the_compute_wall(name, batch, formats, proposals):
    """B (k + 1) = 241 on v5e, 120 with int8 weights, 313 on Ironwood (formulas.md T1)."""
    assert proposals == pytest.approx(free_drafts(chip(name), batch, **formats).value, abs=0.05)


def test_the_compute_wall_is_where_a_verification_turns():
    """v5e, activations left out: the FFN of 48 sequences waits for weights with 4 proposals (240 tokens), not with 5 (288)."""
    nothing = Format("nothing", 0, "bf16")
    one = server("llama-3-8b", "v5e", 1, activations=nothing)
    assert 4 < free_drafts(one.chip, 48).value < 5
    ffn = [speculate(one, None, k, 48, 100)["verify/layers/ffn"] for k in (0, 4, 5)]
    assert ["memory", "memory", "compute"] == [part.bound for part in ffn]
    assert ffn[0].value == ffn[1].value < ffn[2].value


# Rounds


def test_a_round_is_draft_steps_and_a_verification():
    """Four steps of the draft one after the other, and the target's pass over five tokens with logits for each."""
    step = speculate(TARGET, DRAFT, 4, 64, 8192)
    assert ["draft", "verify"] == [part.name for part in step.parts]
    drafted = sum(decode_step(DRAFT, 64, 8192 + i).value for i in range(4))
    assert drafted == pytest.approx(step["draft"].value, rel=1e-12)
    assert leaves(forward(TARGET, 64, 5, 8192, logits=5)) == leaves(step["verify"])
    assert step.value == step["draft"].value + step["verify"].value


def test_a_round_by_hand():
    """One sequence, 8 Ironwood: the head of 70B is read once for five tokens, that of 8B once for each of four."""
    step = speculate(TARGET, DRAFT, 4, 1, 8192)
    heads = [
        2 * 8192 * 128_256 / 8 + 2 * 5 * (8192 + 128_256 / 8),
        4 * (2 * 4096 * 128_256 / 8 + 2 * (4096 + 128_256 / 8)),
    ]
    assert heads == pytest.approx([7380e9 * step[f"{part}/unembed/memory"].value for part in ("verify", "draft")])
    cache = 4 * 32 * 2 * 2 * 8 * 128 * (8192 + 1.5 + 1) / 8 + 4 * 32 * 2 * 2 * 32 * 128 / 8
    assert cache == pytest.approx(7380e9 * step["draft/layers/attention/memory"].value)


def test_a_draft_grows_its_context_step_by_step():
    """Exactly, but where attention sees chunks: llama-4-scout begins a new one after 8,192 tokens, in the middle of a round."""
    draft = server("llama-4-scout", "ironwood", 8)
    for context, error in ((8000, 1e-9), (8190, 0.15), (8191, 0.15), (9000, 1e-9)):
        drafted = sum(decode_step(draft, 64, context + i).value for i in range(4))
        assert drafted == pytest.approx(
            speculate(server("llama-4-maverick", "ironwood", 8), draft, 4, 64, context)["draft"].value, rel=error
        )


def test_nothing_is_read_less_than_not_at_all():
    """Contexts may be averages: half a token after a chunk begins, its cache has no negative bytes."""
    chunked = model("llama-4-scout").blocks[0].mixer
    assert 8192 == chunked.chunk
    assert all(chunked.read(1, context, 2) >= 0 for context in (8191, 8191.25, 8191.5, 8192, 8192.5))


def test_without_a_draft_proposals_cost_nothing():
    """N-grams: the verification alone, and its memory alone."""
    step = speculate(TARGET, None, 4, 64, 8192)
    assert step.value == forward(TARGET, 64, 5, 8192, logits=5).value == step["verify"].value
    assert ["verify"] == [part.name for part in step.parts]


@pytest.mark.parametrize("k", [4, 4.0, np.int64(4), np.float32(4), np.array(4)], ids=repr)
def test_whole_numbers_of_every_kind(k):
    """One round."""
    assert speculate(TARGET, DRAFT, 4, 64, 8192).value == speculate(TARGET, DRAFT, k, 64, 8192).value


@pytest.mark.parametrize("k", [1.5, np.float32(1.5), np.array(1.5)], ids=repr)
def test_half_a_proposal(k):
    """ValueError, in a 0-d array too."""
    with pytest.raises(ValueError, match="whole number of proposals"):
        speculate(TARGET, DRAFT, k, 64, 8192)


def test_rounds_take_arrays():
    """Batches down, contexts across, entry by entry the round of numbers; `fits` too."""
    batches, contexts = [1, 64, 4096], [100, 8192]
    swept = speedup(TARGET, DRAFT, 0.8, 4, np.array(batches)[:, None], contexts)
    single = [[speedup(TARGET, DRAFT, 0.8, 4, b, s) for s in contexts] for b in batches]
    np.testing.assert_allclose(swept.value, [[x.value for x in row] for row in single], rtol=1e-12)
    np.testing.assert_array_equal(swept.fits, [[x.fits for x in row] for row in single])
    assert not swept.fits.all() and "1 of 6 do not fit" == swept.note


def test_rounds_take_a_sweep_of_plans():
    """Tensor ways of the target may be an array, as in `forward`; the draft stays on 8 chips, or follows."""
    wide = replace(TARGET, plan=Plan(np.array([8, 16])))
    for draft, each in (
        (None, (None, None)),
        (DRAFT, (DRAFT, DRAFT)),
        (replace(DRAFT, plan=wide.plan), (DRAFT, replace(DRAFT, plan=Plan(16)))),
    ):
        found = speculate(wide, draft, 4, 64, 8192).value
        single = [
            speculate(replace(TARGET, plan=Plan(x)), one, 4, 64, 8192).value
            for x, one in zip((8, 16), each, strict=True)
        ]
        np.testing.assert_allclose(found, single, rtol=1e-12)


def test_rounds_take_a_sweep_of_chips():
    """A bandwidth of two values, in the target's chip and in an equal one of the draft."""
    chips = [replace(TARGET.chip, hbm_bandwidth=np.array([7e12, 7.38e12])) for _ in range(2)]
    for other in chips:
        found = speculate(replace(TARGET, chip=chips[0]), replace(DRAFT, chip=other), 4, 64, 8192).value
        assert found[1] == pytest.approx(speculate(TARGET, DRAFT, 4, 64, 8192).value)


# What fits


def test_the_draft_and_its_caches_take_room():
    """Weights and caches of both, of 8,192 + 5 tokens, on the chips they share."""
    batch = 300
    held = [footprint(one, batch, 8197).value for one in (TARGET, DRAFT)]
    room = replace(TARGET.chip, hbm_bytes=sum(held), hbm_reserved=0.0)
    small = replace(room, hbm_bytes=sum(held) - 1e3)
    for one, enough in ((room, True), (small, False)):
        target, draft = replace(TARGET, chip=one), replace(DRAFT, chip=one)
        assert fits(target, batch, 8197) and fits(draft, batch, 8197)
        assert (
            enough == speculate(target, draft, 4, batch, 8192).fits == speedup(target, draft, 0.8, 4, batch, 8192).fits
        )
        assert ("does not fit" in str(speculate(target, draft, 4, batch, 8192))) != enough
        assert speculate(target, None, 4, batch, 8192).fits


def test_a_draft_on_fewer_chips_lies_on_one_of_them_whole():
    """8B on one chip of 8: 16 GB of it, not 2."""
    one = server("llama-3-8b", "ironwood", 1)
    room = footprint(TARGET, 1, 8197).value + footprint(one, 1, 8197).value
    for hbm, enough in ((room, True), (room - 1e3, False)):
        small = replace(TARGET.chip, hbm_bytes=hbm, hbm_reserved=0.0)
        assert enough == speculate(replace(TARGET, chip=small), replace(one, chip=small), 4, 1, 8192).fits


# When it pays


@pytest.mark.parametrize("acceptance", [0.724, 0.748, 0.851])
def test_a_speedup_is_that_of_its_times(acceptance):
    """`speedup` of servers is `speculative_speedup` of the times of their steps."""
    plain, draft = (decode_step(one, 16, 8192).value for one in (TARGET, DRAFT))
    verify = forward(TARGET, 16, 2, 8192, logits=2).value
    expected = speculative_speedup(acceptance, 1, draft / plain, verify / plain).value
    assert expected == pytest.approx(speedup(TARGET, DRAFT, acceptance, 1, 16, 8192).value, rel=1e-12)


def test_the_best_number_of_proposals():
    """The one of 0 to 16 that no other beats; none at acceptance 0; as many as allowed where they cost next to nothing."""
    k = best_k(TARGET, DRAFT, 0.8, 1, 8192)
    gains = [speedup(TARGET, DRAFT, 0.8, n, 1, 8192).value for n in range(17)]
    assert max(gains) == gains[k] and 0 < k < 16
    assert (0, 0, 16) == tuple(best_k(TARGET, d, a, 1, 8192) for d, a in ((DRAFT, 0), (None, 0), (None, 1)))
    assert (3, 0) == (best_k(TARGET, None, 1, 1, 8192, most=3), best_k(TARGET, DRAFT, 0.8, 1, 8192, most=0))


@pytest.mark.parametrize(("acceptance", "k"), [(0.8, 4), (0.7, 2), (0.5, 1)])
def test_the_batch_from_which_it_is_slower(acceptance, k):
    """One sequence fewer still gains; the first that loses is returned, as a plain whole number."""
    batch = break_even_batch(TARGET, DRAFT, acceptance, k, 8192)
    assert type(batch) is int
    assert speedup(TARGET, DRAFT, acceptance, k, batch, 8192).value < 1
    assert all(speedup(TARGET, DRAFT, acceptance, k, b, 8192).value >= 1 for b in range(1, batch))
    assert break_even_batch(TARGET, DRAFT, acceptance, k, 8192, most=batch - 1) is None


def test_where_it_never_pays_and_where_it_always_does():
    """Acceptance 0 loses at once; no proposals are plain decoding, which is not slower than itself."""
    assert (1, 1) == tuple(break_even_batch(TARGET, draft, 0, 4, 8192) for draft in (DRAFT, None))
    assert break_even_batch(TARGET, DRAFT, 0.8, 0, 8192) is None


def test_a_mixture_loses_at_few_sequences_and_gains_at_many():
    """gpt-oss-120b on 4 H100, two free proposals, half of them accepted: at 4 sequences a verification reads more experts than
    it is worth, at 64 it reads those that a step reads anyway. The first batch that loses is no wall there."""
    one = Server(model("gpt-oss-120b"), chip("h100"), Plan(4), model("gpt-oss-120b").native)
    gains = speedup(one, None, 0.5, 2, [1, 4, 64, 1024], 8192).value
    assert [True, False, True, True] == (gains > 1).tolist()
    assert 2 == break_even_batch(one, None, 0.5, 2, 8192)


@pytest.mark.parametrize(
    "sweep",
    [
        dict(context=np.array([[8192], [100_000]])),
        dict(context=np.arange(1, 4097)),
        dict(acceptance=np.array([[0.9], [0.1]])),
    ],
    ids=["contexts down", "contexts along the batches", "acceptances down"],
)
def test_one_batch_is_no_answer_for_a_sweep(sweep):
    """4,097 of 4,096 batches, or the diagonal of a table: ValueError instead, that names what may not be an array."""
    inputs = {**dict(acceptance=0.8, k=4, context=8192), **sweep}
    with pytest.raises(ValueError, match="context|acceptance"):
        break_even_batch(TARGET, DRAFT, **inputs)


@pytest.mark.parametrize("sweep", [dict(batch=[1]), dict(batch=[1, 64]), dict(acceptance=[0.5, 0.8])], ids=str)
def test_one_number_of_proposals_is_no_answer_for_a_sweep(sweep):
    """ "Numbers only": ValueError that names what may not be an array."""
    with pytest.raises(ValueError, match="batch|acceptance"):
        best_k(TARGET, DRAFT, **{**dict(acceptance=0.8, batch=1, context=8192), **sweep})


# One formula for every kind of number


def test_speedups_explain_themselves():
    """In the letters of the legend, with the value of the plain call."""
    told = explain(speculative_speedup, acceptance=0.8, k=4, draft=0.1, verify=1.2)
    assert "(1 - a**(k_d + 1))/((1 - a)*(c*k_d + v))" == str(told.formula)
    assert told.value == speculative_speedup(0.8, 4, 0.1, 1.2).value
    assert "-1 + C/(B*W)" == str(explain(free_drafts, chip=chip("v5e"), batch=4).formula)
    assert critical_batch(chip("v5e")).value / 4 - 1 == explain(free_drafts, chip=chip("v5e"), batch=4).value


@pytest.mark.parametrize(("chips", "k"), [(8, 4), (8, 1), (8, 0), (4, 4), (2, 1), (1, 4), (None, 4)])
def test_rounds_explain_themselves(chips, k):
    """With a draft on as many chips as the target, on fewer, and without one."""
    draft = chips and server("llama-3-8b", "ironwood", chips)
    inputs = dict(target=TARGET, draft=draft, k=k, batch=64, context=8192)
    assert leaves(speculate(**inputs)) == leaves(explain(speculate, **inputs))


@pytest.mark.parametrize("acceptance", [0, 0.8, 1])
def test_gains_explain_themselves(acceptance):
    """The gain of a round without a draft, at the edges of the acceptance too: one formula, its value that of the plain call."""
    inputs = dict(target=TARGET, draft=None, acceptance=acceptance, k=4, batch=64, context=8192)
    told = explain(speedup, **inputs)
    assert speedup(**inputs).value == told.value
    assert (acceptance == 0.8) == ("a" in map(str, told.formula.free_symbols))


def test_an_acceptance_has_no_letters():
    """Bisection takes numbers: explain says so."""
    with pytest.raises(ValueError, match="must be one number here"):
        explain(implied_acceptance, tokens=2.9, k=4)


@pytest.mark.parametrize("which", range(4))
def test_slopes_of_a_speedup(which):
    """jax.grad and its jit equal the difference quotient, in acceptance, k, draft and verification."""
    at, h = [0.8, 4.0, 0.1, 1.2], 1e-6

    def gain(*x):
        return speculative_speedup(*x).value

    with jax.enable_x64(True):
        slopes = [float(f(*at)) for f in (jax.grad(gain, which), jax.jit(jax.grad(gain, which)))]
        edge = float(jax.grad(gain)(0.0, 4.0, 0.1, 1.2))
    low, high = ([x + sign * h * (i == which) for i, x in enumerate(at)] for sign in (-1, 1))
    assert [(gain(*high) - gain(*low)) / (2 * h)] * 2 == pytest.approx(slopes, rel=1e-6)
    assert 1 / 1.6 == pytest.approx(edge)  # the first proposal that is ever accepted: one token more


@pytest.mark.parametrize("draft", [DRAFT, None], ids=["a draft", "none"])
@pytest.mark.parametrize("what", ["batch", "context", "hbm_bandwidth"])
def test_slopes_of_a_round(what, draft):
    """What one more sequence, token or byte per second does to a round."""
    at = dict(batch=37.3, context=5000.3, hbm_bandwidth=7.38e12)

    def seconds(x):
        work = {**at, what: x}
        one = replace(TARGET.chip, hbm_bandwidth=work["hbm_bandwidth"])
        small = draft and replace(draft, chip=one)
        return speculate(replace(TARGET, chip=one), small, 4, work["batch"], work["context"]).value

    x, h = at[what], at[what] * 1e-5
    with jax.enable_x64(True):
        slopes = [float(f(x)) for f in (jax.grad(seconds), jax.jit(jax.grad(seconds)))]
    assert [(seconds(x + h) - seconds(x - h)) / (2 * h)] * 2 == pytest.approx(slopes, rel=1e-4)


def test_a_target_of_experts_in_groups():
    """Both kinds of plan together: DeepSeek-V3 in 8 groups of experts, the draft cut 8 ways, imbalance in the verification."""
    target = Server(model("deepseek-v3"), chip("h200"), Plan(1, expert=8, imbalance=1.5))
    draft = server("llama-3-8b", "h200", 8)
    step = speculate(target, draft, 2, 64, 1000)
    assert leaves(forward(target, 64, 3, 1000, logits=3)) == leaves(step["verify"])
    assert 0 < step["draft"].value < step.value


# The links


@pytest.mark.parametrize(
    ("chips", "hops", "rate", "tokens"),
    [(8, 3, 300e9, 62.8), (64, 6, 600e9, 223.2)],  # 2x2x2, unwrapped: 3 links a chip; 4x4x4, wrapped: 6
)
def test_all_reduces_wait_for_their_bytes(chips, hops, rate, tokens):
    """70B on Ironwood: hops x 1 us equal 16,384 B a token x (n - 1) / n over the chip's links of 100 GB/s."""
    assert tokens == pytest.approx(hops * 1e-6 * rate / (2 * 8192 * (1 - 1 / chips)), abs=0.05)
    for overhead in (0.0, 5e-6):  # which is in both terms, and cancels
        ironwood = replace(chip("ironwood"), network=replace(chip("ironwood").network, overhead=overhead))
        found = link_bound_tokens(Server(model("llama-3-70b"), ironwood, Plan(chips, kv="batch"))).value
        assert tokens == pytest.approx(found, abs=0.05)


def test_a_chip_alone_exchanges_nothing():
    """ValueError instead of a number of tokens."""
    with pytest.raises(ValueError, match="others have to hear from"):
        link_bound_tokens(Server(model("llama-3-8b"), chip("ironwood")))
