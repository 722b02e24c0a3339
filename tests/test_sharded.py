"""Six layouts of one decode step: the numbers of the unsharded one, and the collectives of the formulas, done by hand."""

import functools
import subprocess
import sys
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lib.demos import sharded, transformer
from lib.demos.hlo import Collective
from lib.demos.sharded import COUNT, LAYOUTS

BATCH, PROMPT, LENGTH = 8, 6, 16
B, D, F, N, H, F32 = BATCH, 64, 96, 16, 8, 4
CUT, WHOLE = 4, 8  # KV heads: cut four ways two devices share each one, cut eight ways none do
AUTOMATIC = "KV by batch, automatic"
names = pytest.mark.parametrize("name", LAYOUTS)


def small(n_kv_heads):
    return transformer.Shape(layers=2, d_model=D, n_heads=N, n_kv_heads=n_kv_heads, d_head=H, d_ff=F, vocab=128)


@pytest.fixture(scope="module", autouse=True)
def eight(request):
    """Skip where JAX started with fewer devices; in a fresh process they are made."""
    try:
        return sharded.devices()
    except RuntimeError as error:
        request.getfixturevalue("unchecked")("sharded layouts", str(error))


@functools.cache
def prompted(n_kv_heads, prompt=PROMPT):
    """Weights, the token after a random prompt, and the cache of the prompt."""
    shape = small(n_kv_heads)
    params, tokens = transformer.init(shape), np.random.default_rng(1).integers(0, shape.vocab, (BATCH, prompt))
    cache = transformer.empty_cache(shape, BATCH, LENGTH)
    return params, *transformer.prefill(params, shape, jnp.asarray(tokens, jnp.int32), cache)


@functools.cache
def found(name, n_kv_heads=CUT):
    shape = small(n_kv_heads)
    text = sharded.compiled(LAYOUTS[name], shape, BATCH, LENGTH).as_text()
    return sharded.per_layer(sharded.collectives(text), shape.layers)


def sent(name, n_kv_heads=CUT):
    return {kind: size for kind, (_, size) in found(name, n_kv_heads).items()}


def counts(name, n_kv_heads=CUT):
    return {kind: count for kind, (count, _) in found(name, n_kv_heads).items()}


@pytest.mark.parametrize("n_kv_heads", [CUT, WHOLE])
@names
def test_every_layout_decodes_what_one_device_decodes(name, n_kv_heads):
    """Logits to 1e-5 and greedy tokens exactly, while the new tokens move from the first half of the cache to the second."""
    shape, layout = small(n_kv_heads), LAYOUTS[name]
    params, token, expected_cache = prompted(n_kv_heads)
    cache, tokens = expected_cache, []
    for position in range(PROMPT, PROMPT + 4):
        expected, expected_cache = transformer.extend(params, shape, expected_cache, token[:, None], position)
        actual, cache = sharded.decode_step(layout, shape, params, cache, token, position)
        assert np.abs(actual - expected[:, 0]).max() < 1e-5 * np.abs(expected).max()
        token = jnp.argmax(expected[:, 0], -1)
        np.testing.assert_array_equal(jnp.argmax(actual, -1), token)
        tokens += token.tolist()
    for one, other in zip(jax.tree.leaves(cache), jax.tree.leaves(expected_cache), strict=True):
        np.testing.assert_allclose(one, other, atol=2e-5)
    assert len(set(tokens)) > 3, "a model that repeats itself would pass any test of tokens"


@pytest.mark.parametrize("position", [0, LENGTH // 2 - 1, LENGTH // 2, LENGTH - 1])
def test_a_part_without_visible_tokens_adds_nothing(position):
    """Sequences that end in the first part leave the second one masked whole: its share is zero, not 0 / 0."""
    shape, (params, token, _) = small(CUT), prompted(CUT)
    rng = np.random.default_rng(2)
    cache = [
        tuple(jnp.asarray(rng.normal(size=each.shape), jnp.float32) for each in pair)
        for pair in transformer.empty_cache(shape, BATCH, LENGTH)
    ]
    expected, expected_cache = transformer.extend(params, shape, cache, token[:, None], position)
    actual, written = sharded.decode_step(LAYOUTS["KV by sequence"], shape, params, cache, token, position)
    assert np.abs(actual - expected[:, 0]).max() < 1e-5 * np.abs(expected).max()
    for before, after, wanted in zip(*map(jax.tree.leaves, (cache, written, expected_cache)), strict=True):
        changed = np.unique(np.nonzero(np.asarray(after) != np.asarray(before))[-1 if before.shape[-1] == LENGTH else -2])
        assert changed.tolist() == [position], "the new token is written once, in the part that owns its place"
        np.testing.assert_allclose(after, wanted, atol=2e-5)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("Megatron", {"all-reduce": 2}),
        ("Megatron, automatic", {"all-reduce": 2}),
        ("KV by batch", {"all-reduce": 2, "all-to-all": 2}),
        ("KV by sequence", {"all-reduce": 2, "all-gather": 2, "reduce-scatter": 1}),
        ("FSDP", {"all-gather": 7}),
    ],
)
def test_collectives_of_a_layer(name, expected):
    """Exactly these and no other, in each of the layers."""
    assert counts(name) == expected


@names
def test_a_kv_head_for_every_device_leaves_nothing_to_exchange(name):
    """With as many KV heads as devices all plans are Megatron's: two all-reduces."""
    assert counts(name, WHOLE) == ({"all-gather": 7} if name == "FSDP" else {"all-reduce": 2})


def test_wire_bytes_by_hand():
    """What each of eight devices sends, or of the two that share a KV head; n-1 of n parts, an all-reduce twice."""
    reduced = 2 * (2 * F32 * B * D * 7 / 8)
    queries = F32 * B * (N / 4) * H  # of the heads that share a KV head, as are their outputs
    sums = F32 * B * (N / 4) * 2  # their log-sum-exps, of both parts
    assert sent("Megatron") == sent("Megatron, automatic") == {"all-reduce": reduced}
    assert sent("KV by batch") == {"all-reduce": reduced, "all-to-all": 2 * (queries / 2) / 2}
    gathered = {"all-gather": (queries + sums) / 2, "reduce-scatter": queries / 2}
    assert sent("KV by sequence") == {"all-reduce": reduced} | gathered
    matrices = 2 * N * H * D + 2 * CUT * H * D + 3 * F * D
    assert sent("FSDP") == {"all-gather": F32 * matrices * 7 / 8}


@pytest.mark.parametrize("n_kv_heads", [CUT, WHOLE])
@names
def test_the_cost_model_prices_what_was_compiled(name, n_kv_heads):
    """Bytes by kind of the decode step's collectives are those in the program, for every plan that the model knows."""
    plan = LAYOUTS[name].plan
    if plan is None or (name == AUTOMATIC and n_kv_heads == CUT):
        return
    predicted = sharded.predicted(small(n_kv_heads), BATCH, plan)
    assert predicted == pytest.approx(sent(name, n_kv_heads), rel=1e-12)


def test_left_alone_xla_moves_a_matrix_instead_of_queries():
    """With only its inputs cut by batch the program has one all-to-all of two, and gathers the output matrix in each layer."""
    text = sharded.compiled(LAYOUTS[AUTOMATIC], small(CUT), BATCH, LENGTH).as_text()
    assert counts(AUTOMATIC)["all-to-all"] == 1
    pair_of_w_o = Collective("all-gather", 2, F32 * (N * H // 4) * D)
    assert sharded.collectives(text).count(pair_of_w_o) == 2
    assert sum(sent(AUTOMATIC).values()) > sum(sent("KV by batch").values())


@names
def test_a_further_layer_adds_what_a_layer_has(name):
    """Three layers have half as many collectives again as two: none is of the first or the last layer only."""
    shape = replace(small(CUT), layers=3)
    text = sharded.compiled(LAYOUTS[name], shape, BATCH, LENGTH).as_text()
    assert sharded.per_layer(sharded.collectives(text), 3) == found(name)


def test_the_table_has_a_row_for_every_layout():
    """All equal to the unsharded step, in batches and contexts that devices share."""
    table = sharded.compare(small(CUT), batch=BATCH, context=LENGTH - 1)
    assert list(table) == list(LAYOUTS)
    assert [equal for _, equal in table.values()] == [True] * 6
    assert {name: each for name, (each, _) in table.items()} == {name: found(name) for name in LAYOUTS}


def test_layers_that_differ_are_refused():
    """What is not in each layer as often has no number a layer."""
    with pytest.raises(ValueError, match="each of 2 layers"):
        sharded.per_layer([Collective("all-reduce", 8, 4), Collective("all-reduce", 8, 8)], 2)


def test_an_uneven_cut_is_refused():
    """Heads, widths, sequences and cache lengths that the devices cannot share raise ValueError."""
    params, token, cache = prompted(CUT)
    for change in ({"n_kv_heads": 3, "n_heads": 24}, {"n_heads": 12}, {"d_ff": 100}):
        with pytest.raises(ValueError, match="must divide"):
            sharded.mesh(replace(small(CUT), **change))
    with pytest.raises(ValueError, match="evenly"):
        odd = [(keys[:3], values[:3]) for keys, values in cache]
        sharded.decode_step(LAYOUTS["KV by batch"], small(CUT), params, odd, token[:3], PROMPT)
    with pytest.raises(ValueError, match="evenly"):
        odd = [(keys[..., :15], values[:, :, :15]) for keys, values in cache]
        sharded.decode_step(LAYOUTS["KV by sequence"], small(CUT), params, odd, token, PROMPT)
    with pytest.raises(ValueError, match=f"cache of {LENGTH}"):
        sharded.decode_step(LAYOUTS["Megatron"], small(CUT), params, cache, token, LENGTH)


DEVICES = """
import os
os.environ.pop("JAX_NUM_CPU_DEVICES", None)
os.environ.pop("XLA_FLAGS", None)
os.environ["JAX_PLATFORMS"] = "cpu"
import jax
from lib.demos import sharded
if {early}:
    jax.devices()
try:
    print(len(sharded.devices()), len(sharded.devices()))
except RuntimeError as error:
    print(error)
"""


@pytest.mark.parametrize(("early", "told"), [(False, f"{COUNT} {COUNT}"), (True, "sharded.devices() before")])
def test_devices_are_made_before_jax_starts_and_not_after(early, told):
    """In a fresh process there are eight, asked once or twice; where JAX has started with one, the error says what to do."""
    code = DEVICES.format(early=early)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert told in done.stdout
