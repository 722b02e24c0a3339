"""Mixture layers against a loop over tokens, their routers against counting laws, their exchanges against the cost model."""

import functools
from dataclasses import replace
from itertools import combinations, product
from math import comb
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lib import FFN, GQA, Block, Chip, Model, Plan, Precision, Server
from lib.demos import hlo, mixture, programs, sharded, verdicts
from lib.network import Switch
from lib.routing import expected_max, imbalance, popularity

on_cpu = pytest.mark.skipif(jax.default_backend() != "cpu", reason="these counts are those of an XLA compile for a CPU")
D, F, TOKENS = 64, 24, 40
MIXTURES = [(16, 2), (8, 2), (128, 8)]
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
POOL = 2**16
EIGHT = 8  # devices


@pytest.fixture
def eight(request):
    """Skip where JAX started with fewer devices."""
    try:
        return sharded.devices()
    except RuntimeError as error:
        request.getfixturevalue("unchecked")("experts on eight devices", str(error))


def definition(params, x, top_k):
    """The layer token by token, in f64."""
    params = {name: np.asarray(each, np.float64) for name, each in params.items()}
    total = np.zeros(x.shape)
    for token, values in enumerate(np.asarray(x, np.float64)):
        logits = values @ params["router"]
        chosen = np.argsort(-logits)[:top_k]
        weights = np.exp(logits[chosen]) / np.exp(logits[chosen]).sum()
        for expert, weight in zip(chosen, weights, strict=True):
            gate, up = np.split(values @ params["gate_up"][expert], 2)
            total[token] += weight * ((gate / (1 + np.exp(-gate)) * up) @ params["down"][expert])
    return total


def on_devices(ffn, params, x):
    compiled = mixture.parallel(ffn, x.shape[1], len(x))
    return compiled(*jax.device_put((params, x), compiled.input_shardings[0]))


def by_columns(function, params, x, top_k):
    share = mixture.shares(params["router"], x, top_k)
    return function(mixture.columns(params), np.array(x.T), share).T


@pytest.mark.parametrize(("experts", "top_k"), [(16, 5), (8, 1), (8, 8), (3, 2)])
def test_every_way_computes_the_layer(experts, top_k, request):
    """Each token's chosen experts, weighed by a softmax over their logits; to 1e-5 of the largest value."""
    ffn = FFN(F, experts, top_k)
    params, x = mixture.init(ffn, D), mixture.draw(TOKENS, D)
    expected = definition(params, x, top_k)
    close = functools.partial(np.testing.assert_allclose, desired=expected, atol=1e-5 * abs(expected).max())
    close(mixture.dense(params, x, top_k))
    close(mixture.ragged(params, x, top_k))
    close(by_columns(mixture.branches, params, x, top_k))
    close(by_columns(mixture.gathered, params, x, top_k))
    if experts % EIGHT == 0:
        request.getfixturevalue("eight")
        close(on_devices(ffn, params, x))


@pytest.mark.parametrize("favourites", [(0, 1), (14, 15), (3, 11)])
def test_no_token_is_dropped_when_all_want_the_same(favourites, eight):
    """A router that sends every token to the same two experts: one or two of eight devices get everything."""
    ffn = FFN(F, 16, 2)
    router = jnp.zeros((D, 16)).at[0, jnp.array(favourites)].set(1.0)
    params, x = mixture.init(ffn, D) | {"router": router}, mixture.draw(TOKENS, D).at[:, 0].set(1.0)
    assert set(np.asarray(mixture.route(router, x, 2)[1]).ravel().tolist()) == set(favourites)
    expected = definition(params, x, 2)
    tolerance = dict(atol=1e-5 * abs(expected).max())
    np.testing.assert_allclose(on_devices(ffn, params, x), expected, **tolerance)
    np.testing.assert_allclose(mixture.ragged(params, x, 2), expected, **tolerance)


def test_an_expert_that_no_token_uses_is_left_alone():
    """Its weights are no numbers, and no result shows it where there are branches; where all compute all, each does."""
    params, x = mixture.init(FFN(F, 6, 1), D), mixture.draw(4, D)
    idle = ~np.isin(np.arange(6), mixture.route(params["router"], x, 1)[1])
    broken = params | {name: jnp.where(idle[:, None, None], np.nan, params[name]) for name in ("gate_up", "down")}
    assert 2 <= idle.sum() <= 4
    for function in (mixture.branches, mixture.gathered):
        np.testing.assert_array_equal(
            by_columns(function, broken, x, 1), np.asarray(by_columns(function, params, x, 1))
        )
    assert np.isnan(mixture.dense(broken, x, 1)).all()


def test_a_branch_for_each_expert():
    """The compiled program has as many conditionals as experts: none was turned into a selection after the work."""
    params = mixture.init(FFN(F, 6, 1), D)
    experts, x, share = mixture.columns(params), jnp.ones((D, 4)), jnp.ones((6, 4))
    text = mixture.branches.lower(experts, x, share).compile().as_text()
    assert text.count(" conditional(") == 6


@pytest.mark.parametrize(("experts", "top_k"), MIXTURES)
def test_routing_is_exact(experts, top_k):
    """Experts are those of 64-bit integers: no processor's rounding decides where a token goes."""
    router = mixture.init(FFN(1, experts, top_k), mixture.WIDTH)["router"]
    x = mixture.draw(4096)
    whole, signs = np.asarray(x, np.float64) * 2**15, np.asarray(router, np.float64) * 16
    assert (whole == np.rint(whole)).all() and whole.min() >= -(2**15) and whole.max() < 2**15
    assert set(np.unique(signs)) == {-1, 1}
    logits = whole.astype(np.int64) @ signs.astype(np.int64)
    weights, chosen = mixture.route(router, x, top_k)
    np.testing.assert_array_equal(chosen, np.argsort(-logits, 1, kind="stable")[:, :top_k])
    np.testing.assert_allclose(weights.sum(1), 1, rtol=1e-6)
    bias = jnp.arange(experts) / 8.0
    logits += np.arange(experts) * 2**16  # logits are integers over 2^19
    np.testing.assert_array_equal(
        mixture.route(router, x, top_k, bias)[1], np.argsort(-logits, 1, kind="stable")[:, :top_k]
    )


def test_loads_by_hand():
    """Five tokens of two experts each, two a pass: the fifth is left out."""
    chosen = [[0, 2], [2, 1], [3, 0], [0, 3], [1, 2]]
    assert mixture.loads(chosen, 4, 2).tolist() == [[1, 1, 2, 0], [2, 0, 0, 2]]
    assert mixture.loads(chosen, 5, 5).tolist() == [[3, 2, 3, 2, 0]]
    with pytest.raises(ValueError, match="6 tokens"):
        mixture.loads(chosen, 4, 6)


@functools.cache
def routed(experts, top_k):
    """The experts of a pool of tokens, by a fair router."""
    router = mixture.init(FFN(1, experts, top_k), mixture.WIDTH)["router"]
    return np.asarray(mixture.route(router, mixture.draw(POOL), top_k)[1])


def distinct(experts, top_k, tokens):
    """(mean, variance) of the distinct experts of tokens that use any top_k alike: who is missed, alone and in pairs."""
    one, two = ((comb(experts - m, top_k) / comb(experts, top_k)) ** tokens for m in (1, 2))
    missed = experts * one
    return experts - missed, max(missed + experts * (experts - 1) * two - missed**2, 0)


def test_the_law_of_distinct_experts():
    """Its mean and variance are those of all 6^3 ways in which three tokens use two of four experts."""
    hands = [set(hand) for hand in combinations(range(4), 2)]
    counts = [len(set.union(*each)) for each in product(hands, repeat=3)]
    assert distinct(4, 2, 3) == pytest.approx((np.mean(counts), np.var(counts)))


@pytest.mark.parametrize("tokens", BATCHES)
@pytest.mark.parametrize(("experts", "top_k"), MIXTURES)
def test_a_pass_touches_the_experts_that_the_formula_says(experts, top_k, tokens):
    """Mean of all passes in the pool, to 4 standard errors of the law."""
    touched = (mixture.loads(routed(experts, top_k), experts, tokens) > 0).sum(1)
    expected, variance = distinct(experts, top_k, tokens)
    assert FFN(1, experts, top_k).touched(tokens) == pytest.approx(expected, rel=1e-12)
    assert touched.mean() == pytest.approx(expected, abs=4 * (variance / len(touched)) ** 0.5 + 1e-9)


def test_the_sample_tells_formulas_apart():
    """Experts drawn with replacement would be 6.45 of 16 for four tokens of two, not 6.62."""
    touched = (mixture.loads(routed(16, 2), 16, 4) > 0).sum(1)
    replaced = 16 * (1 - (15 / 16) ** 8)
    assert abs(touched.mean() - replaced) > 15 * touched.std() / len(touched) ** 0.5


@pytest.mark.parametrize(
    ("experts", "top_k", "tokens", "skew"), [(16, 2, 16, 1.0), (16, 2, 16, 2.0), (128, 8, 16, 1.0)]
)
def test_a_skewed_router_touches_fewer(experts, top_k, tokens, skew):
    """Biases give the chances that were asked for, to 5 standard errors of both samples; the distinct experts follow."""
    chances = np.array(popularity(experts, top_k, skew))
    router, known, unknown = mixture.init(FFN(1, experts, top_k), D)["router"], 2**14, 2**15
    bias = mixture.biases(router, mixture.draw(known, D), chances)
    chosen = np.asarray(mixture.route(router, mixture.draw(unknown, D, seed=2), top_k, bias)[1])
    found = mixture.loads(chosen, experts, unknown)[0] / unknown
    errors = (chances * (1 - chances) * (1 / known + 1 / unknown)) ** 0.5
    assert (abs(found - chances) < 5 * errors + 1 / known).all()
    assert found[0] > 1.5 * top_k / experts
    touched = (mixture.loads(chosen, experts, tokens) > 0).sum(1)
    expected = FFN(1, experts, top_k, chances=tuple(chances)).touched(tokens)
    assert touched.mean() == pytest.approx(expected, rel=0.01)
    assert touched.mean() < 0.87 * FFN(1, experts, top_k).touched(tokens)


def test_chances_of_other_experts_are_refused():
    """One for each, no more."""
    with pytest.raises(ValueError, match="chances are 16 numbers"):
        mixture.biases(jnp.ones((4, 16)), jnp.ones((2, 4)), [0.25] * 8)


def test_the_largest_load_by_enumeration():
    """Four tokens of one expert in eight: the mean maximum over all 8^4 ways, to 4 standard errors."""
    expected = np.mean([max(map(hand.count, hand)) for hand in product(range(8), repeat=4)])
    router = mixture.init(FFN(1, 8, 1), mixture.WIDTH)["router"]
    chosen = mixture.route(router, mixture.draw(POOL), 1)[1]
    most = mixture.loads(chosen, 8, 4).max(1)
    assert most.mean() == pytest.approx(expected, abs=4 * most.std() / len(most) ** 0.5)


@pytest.mark.parametrize(("experts", "top_k"), MIXTURES)
@pytest.mark.parametrize("tokens", [16, 64, 256])
def test_the_largest_load_is_what_the_model_expects(experts, top_k, tokens):
    """Of experts, and of eight groups of them: independent bins are at most 4 % too low."""
    loads = mixture.loads(routed(experts, top_k), experts, tokens)
    most = loads.max(1).mean()
    assert 0.96 * most < expected_max(tokens, [top_k / experts] * experts) < 1.01 * most
    grouped = loads.reshape(len(loads), EIGHT, -1).sum(2).max(1).mean() / (tokens * top_k / EIGHT)
    assert 0.96 * grouped < imbalance([top_k / experts] * experts, EIGHT, tokens) < 1.01 * grouped


def test_two_all_to_alls_of_the_room_for_every_token(eight):
    """Each device sends its tokens, 5 of 64 f32 values, to all eight, and back: 7/8 of 8 x 5 x 64 x 4 bytes leave it, twice."""
    text = mixture.parallel(FFN(F, 16, 2), D, TOKENS).as_text()
    found = hlo.collectives(text)
    assert found == 2 * [hlo.Collective("all-to-all", 8, 8 * 8 * 5 * 64 * 4)]
    assert [each.wire for each in found] == 2 * [7 / 8 * 8 * 5 * 64 * 4]


@pytest.mark.parametrize(("experts", "top_k"), MIXTURES)
def test_the_model_prices_the_places_that_tokens_go_to(experts, top_k, eight):
    """The compiled bytes are 8 / places of the model's; places by counting hands, and in the pool to 4 standard errors."""
    own = experts // EIGHT
    places = EIGHT * (1 - comb(experts - own, top_k) / comb(experts, top_k))
    block = Block("mixture", 1, GQA(8, 8, 8), FFN(F, experts, top_k))
    chip = Chip("any", hbm_bytes=1e9, hbm_bandwidth=1.0, network=Switch(1.0, 0.0, EIGHT), f32=1.0)
    server = Server(Model("m", D, 100, (block,)), chip, Plan(expert=EIGHT), Precision("f32", "f32", "f32", "f32"))
    priced = verdicts.sent(server, TOKENS)["all-to-all"]
    compiled = sum(each.wire for each in hlo.collectives(mixture.parallel(block.ffn, D, TOKENS).as_text()))
    assert compiled / priced == pytest.approx(EIGHT / places, rel=0.01)
    visited = np.array([len(set(row)) for row in (routed(experts, top_k)[:8192] // own).tolist()])
    assert visited.mean() == pytest.approx(places, abs=4 * visited.std() / 8192**0.5 + 1e-9)


def test_what_devices_cannot_share_is_refused():
    """Twelve experts, and 12 tokens, on eight devices."""
    for ffn, tokens in ((FFN(F, 12, 2), 16), (FFN(F, 16, 2), 12)):
        with pytest.raises(ValueError, match="8 devices must divide"):
            mixture.parallel(ffn, D, tokens)


@on_cpu
@pytest.mark.parametrize(("experts", "top_k"), [(16, 2), (8, 3)])
def test_a_cpu_multiplies_every_row_with_every_expert(experts, top_k):
    """`ragged_dot` costs E times the chosen experts' FLOPs, a loop over all of them E / k times: multiply and add are two."""
    ffn, tokens, width = FFN(128, experts, top_k), 32, 256
    one, router = 2 * 3 * width * 128, 2 * tokens * width * experts
    ragged = mixture.flops(mixture.ragged, ffn, width, tokens)
    assert ragged == pytest.approx(tokens * top_k * experts * one + router, rel=0.01)
    assert mixture.flops(mixture.dense, ffn, width, tokens) == pytest.approx(tokens * experts * one + router, rel=0.01)


def test_columns_that_are_computed():
    """Powers of two, then multiples of eight, never fewer than asked."""
    asked = (1, 2, 3, 4, 5, 7, 8, 9, 16, 17, 33, 64, 65)
    assert [mixture.filled(n) for n in asked] == [1, 2, 4, 4, 8, 8, 8, 16, 16, 24, 40, 64, 72]


def test_timed_passes_are_those_that_were_asked_for():
    """Structure only: no time decides a test."""
    params = mixture.init(FFN(F, 6, 2), D)
    router, experts = params["router"], mixture.columns(params)
    pairs = mixture.touch(router, experts, 2, batches=(1, 4), rounds=3)
    assert [(one.tokens, every.tokens, every.experts) for one, every in pairs] == 3 * [(1, 1, 6), (4, 4, 6)]
    for i, (one, _) in enumerate(pairs):
        chosen = mixture.route(router, mixture.draw(one.tokens, D, seed=1 + i // 2), 2)[1]
        assert one.experts == len(set(np.asarray(chosen).ravel().tolist()))
    swept = mixture.sweep(router, experts, 2, batches=(1, 2, 6, 24), rounds=2)
    assert list(swept) == ["mixture", "dense", "dense again"]
    assert [one.tokens for one in swept["mixture"]] == [1, 2, 6, 24]
    assert [one.tokens for one in swept["dense"]] == [one.tokens for one in swept["dense again"]] == [1, 2, 6]
    assert {one.experts for one in swept["dense"]} == {2} and swept["mixture"][0].experts == 2
    timed = [one for passes in swept.values() for one in passes] + [one for pair in pairs for one in pair]
    assert min(one.seconds for one in timed) > 0


@pytest.mark.parametrize("layout", ["ragged", "dense"])
def test_what_the_tpu_compiler_is_asked(layout, monkeypatch):
    """The same layer in bf16, of a model's last block."""
    monkeypatch.setattr(programs, "devices", lambda case: jax.devices())
    mixed = Block("mixture", 1, GQA(8, 8, 8), FFN(F, 16, 2))
    model = Model("small", D, 100, (replace(mixed, ffn=FFN(F)), mixed))
    case = SimpleNamespace(architecture=model, layout=layout, weights="bf16", batch=TOKENS)
    function, (weights, x), overwritten = programs.ragged(case)
    assert (x.shape, x.dtype, overwritten) == ((TOKENS, D), jnp.bfloat16, ())
    assert {name: each.shape for name, each in weights.items()} == {
        "router": (D, 16),
        "gate_up": (16, D, 2 * F),
        "down": (16, F, D),
    }
    params, values = mixture.init(FFN(F, 16, 2), D), mixture.draw(TOKENS, D)
    narrow = jax.tree.map(lambda each: each.astype(jnp.bfloat16), (params, values))
    expected = definition(narrow[0], narrow[1], 2)
    actual = function(*narrow)
    assert actual.dtype == jnp.bfloat16
    np.testing.assert_allclose(actual.astype(jnp.float32), expected, atol=0.05 * abs(expected).max())
