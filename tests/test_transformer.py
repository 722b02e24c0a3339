"""The demo transformer computes what a textbook transformer computes, with and without its cache."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lib.demos import transformer
from lib.demos.transformer import Shape

HEADS = 4
LENGTH = 10


def small(n_kv_heads):
    return Shape(layers=2, d_model=32, n_heads=HEADS, n_kv_heads=n_kv_heads, d_head=8, d_ff=48, vocab=64)


def some_tokens(batch=3, length=LENGTH):
    return jnp.asarray(np.random.default_rng(1).integers(0, 64, (batch, length)), jnp.int32)


def tolerance():
    return 2e-5 if transformer.dtype() == jnp.float32 else 0.1


in_f32 = pytest.mark.skipif(jax.default_backend() != "cpu", reason="exact tokens and weights need f32")
attentions = pytest.mark.parametrize("n_kv_heads", [4, 2, 1], ids=["multi-head", "grouped", "multi-query"])


@attentions
def test_cached_decode_equals_the_full_forward_pass(n_kv_heads):
    """Token by token through the cache gives the logits of one pass over the whole sequence."""
    shape, tokens = small(n_kv_heads), some_tokens()
    params = transformer.init(shape)
    expected = transformer.full_forward(params, shape, tokens)
    cache = transformer.empty_cache(shape, 3, LENGTH + 3)  # longer than needed: what lies beyond is masked
    for position in range(LENGTH):
        actual, cache = transformer.extend(params, shape, cache, tokens[:, position : position + 1], position)
        np.testing.assert_allclose(actual[:, 0], expected[:, position], atol=tolerance(), rtol=tolerance())


def test_a_chunked_pass_equals_the_full_forward_pass():
    """A prefill and one further chunk (how a draft is verified) give the logits of one pass over the whole."""
    shape, tokens, prompt = small(2), some_tokens(), 6
    params = transformer.init(shape)
    cache = transformer.empty_cache(shape, 3, LENGTH)
    first, cache = transformer.extend(params, shape, cache, tokens[:, :prompt], 0)
    second, _ = transformer.extend(params, shape, cache, tokens[:, prompt:], prompt)
    actual = jnp.concatenate([first, second], 1)
    expected = transformer.full_forward(params, shape, tokens)
    np.testing.assert_allclose(actual, expected, atol=tolerance(), rtol=tolerance())


@in_f32
def test_prefill_then_decode_equals_decode_token_by_token():
    """A prompt processed at once leaves the same cache and the same next tokens as one processed token by token."""
    shape, prompt = small(2), some_tokens(length=6)
    params = transformer.init(shape)
    token, cache = transformer.prefill(params, shape, prompt, transformer.empty_cache(shape, 3, LENGTH))
    slow_cache = transformer.empty_cache(shape, 3, LENGTH)
    for position in range(6):
        slow_token, slow_cache = transformer.decode_step(params, shape, slow_cache, prompt[:, position], position)
    for position in range(6, LENGTH):
        np.testing.assert_array_equal(token, slow_token)
        token, cache = transformer.decode_step(params, shape, cache, token, position)
        slow_token, slow_cache = transformer.decode_step(params, shape, slow_cache, slow_token, position)
    for fast, slow in zip(jax.tree.leaves(cache), jax.tree.leaves(slow_cache), strict=True):
        np.testing.assert_allclose(fast, slow, atol=tolerance(), rtol=tolerance())


@in_f32
def test_generate_takes_the_likeliest_token_each_time():
    """Each generated token is the argmax of a full pass over everything before it."""
    shape, prompt = small(2), some_tokens()
    params = transformer.init(shape)
    generated = transformer.generate(params, shape, prompt, 5)
    everything = jnp.concatenate([prompt, generated], 1)
    expected = jnp.argmax(transformer.full_forward(params, shape, everything), -1)[:, LENGTH - 1 : -1]
    np.testing.assert_array_equal(generated, expected)
    assert len(np.unique(generated)) > 3, "a model that repeats itself would pass any test of tokens"


@in_f32
def test_weights_do_not_depend_on_the_processor():
    """The initial weights are scaled integers, so they can be recovered exactly from the f32 weights."""
    params = transformer.init(small(2))
    scale = np.float32(((255**2 - 1) / 12 * 32) ** -0.5)
    integers = np.round(np.asarray(params["embedding"]) / scale)
    assert integers[0, :6].tolist() == [-33, 2, 66, 89, 79, 107]
    np.testing.assert_array_equal(params["embedding"], integers * scale)


def test_weights_have_unit_gain():
    """A normalised input leaves a matrix with variance near one, so that logits stay of order one."""
    matrix = np.asarray(transformer.init(small(2))["layers"][0]["gate_up"], np.float32)
    assert matrix.shape == (2 * 48, 32)
    assert 0.9 < 32 * matrix.var() < 1.1


@pytest.mark.parametrize("n_kv_heads", [4, 1])
def test_the_cache_holds_two_values_per_head_feature_and_token(n_kv_heads):
    """Bytes of the cache are the formula's: 2 K H values a token and layer."""
    cache = transformer.empty_cache(small(n_kv_heads), 3, 7)
    expected = 3 * 7 * 2 * (2 * n_kv_heads * 8) * transformer.dtype().itemsize
    assert sum(each.nbytes for each in jax.tree.leaves(cache)) == expected


@pytest.mark.parametrize("change", [{"n_kv_heads": 3}, {"n_kv_heads": 8}, {"d_head": 7}, {"layers": 0}, {"vocab": -1}])
def test_an_impossible_shape_is_refused(change):
    """Heads that cannot be shared evenly, odd heads and sizes below one raise ValueError."""
    sizes = dict(layers=2, d_model=32, n_heads=4, n_kv_heads=2, d_head=8, d_ff=48, vocab=64) | change
    with pytest.raises(ValueError):
        Shape(**sizes)


def test_tokens_beyond_the_cache_are_refused():
    """A write past the end of the cache raises ValueError instead of moving to where there is room."""
    shape = small(2)
    params, cache = transformer.init(shape), transformer.empty_cache(shape, 3, 4)
    with pytest.raises(ValueError, match="cache of 4"):
        transformer.prefill(params, shape, some_tokens(length=5), cache)
    for position in (-1, 4):
        with pytest.raises(ValueError, match="cache of 4"):
            transformer.decode_step(params, shape, cache, some_tokens()[:, 0], position)
    with pytest.raises(ValueError, match="2 sequences"):
        transformer.decode_step(params, shape, cache, some_tokens(batch=2)[:, 0], 0)
    with pytest.raises(ValueError):
        transformer.empty_cache(shape, 0, 4)
    with pytest.raises(ValueError):
        transformer.generate(params, shape, some_tokens(), 0)
