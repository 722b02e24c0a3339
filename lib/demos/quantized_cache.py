"""The demo transformer decoding through a quantized cache: keys and values in 8 or 4 bits, an f32 scale for each token and head.

Every step expands the stored values, and stores its own token's compressed. Only that token sees itself as computed.
Bytes are those of the arrays; tokens and quality are those of real passes through the cache.
"""

import functools

import jax
import jax.numpy as jnp

from lib.demos import transformer
from lib.demos.quantized import FORMATS

FEATURES, TOKENS = (2, 3), (3, 2)  # the axes of d_head and of tokens, in keys and in values


def compress(cache, format):
    """A cache of `transformer.empty_cache`'s layout in a format, "int8", "fp8" or "int4".

    Returns one (keys, values) a layer, each a pair (values in the format, f32 scales): a scale is the largest value of
    a token and head over the largest of the format. Raises ValueError for another format.
    """
    if format not in FORMATS:
        raise ValueError(f"a cache is quantized to {', '.join(FORMATS)}, not {format!r}")
    return [_compress(layer, FORMATS[format]) for layer in cache]


def expand(cache):
    """The cache that a compressed one stands for, in the layout of `transformer.empty_cache`."""
    return [tuple(values.astype(scale.dtype) * scale for values, scale in layer) for layer in cache]


@functools.partial(jax.jit, static_argnames="shape")
def extend(params, shape, cache, tokens, position):
    """`transformer.extend` through a compressed cache: (logits [batch, new, vocab] in f32, cache with `new` more tokens).

    tokens: [batch, new]; position: int32, of the first of them, not checked. The new tokens see each other uncompressed.
    """
    logits, plain = transformer._extend(params, shape, expand(cache), tokens, position)
    extended = []
    for layer, old in zip(plain, cache, strict=True):
        new = [jax.lax.dynamic_slice_in_dim(each, position, tokens.shape[1], axis)
               for each, axis in zip(layer, TOKENS, strict=True)]
        new = _compress(new, old[0][0].dtype)
        extended.append(tuple(_written(into, each, position, axis) for into, each, axis in zip(old, new, TOKENS, strict=True)))
    return logits, extended


def follow(params, shape, tokens, format):
    """Logits after each token of a text, decoded one by one through a compressed cache.

    tokens: [batch, length]. Returns f32 [batch, length, vocab]. Raises ValueError as `compress` does.
    """
    return _decode(params, shape, _empty(shape, tokens, format), tokens, tokens.shape[1])


def generate(params, shape, prompt, new, format):
    """`transformer.generate` through a compressed cache, the prompt token by token too: greedy tokens [batch, new].

    prompt: [batch, length]. Raises ValueError as `compress` does.
    """
    tokens = jnp.pad(prompt, ((0, 0), (0, new)))
    logits = _decode(params, shape, _empty(shape, tokens, format), tokens, prompt.shape[1])
    return jnp.argmax(logits[:, prompt.shape[1] - 1 : -1], -1)


@functools.partial(jax.jit, static_argnames="shape")
def _decode(params, shape, cache, tokens, given):
    """Logits after each token [batch, length, vocab]: the first `given` tokens as they are, then the likeliest each time."""
    def step(state, at):
        cache, likeliest = state
        position, token = at
        token = jnp.where(position < given, token, likeliest)
        logits, cache = extend(params, shape, cache, token[:, None], position)
        return (cache, jnp.argmax(logits[:, 0], -1).astype(token.dtype)), logits[:, 0]

    start = cache, jnp.zeros_like(tokens[:, 0])
    return jax.lax.scan(step, start, (jnp.arange(tokens.shape[1]), tokens.T))[1].swapaxes(0, 1)


def _empty(shape, tokens, format):
    return compress(transformer.empty_cache(shape, *tokens.shape), format)


def _compress(layer, kind):
    """Keys and values of some tokens, each as (values of a kind, scales)."""
    integer = jnp.issubdtype(kind, jnp.integer)
    most, compressed = float((jnp.iinfo if integer else jnp.finfo)(kind).max), []
    for each, axis in zip(layer, FEATURES, strict=True):
        largest = abs(each).max(axis, keepdims=True)
        scale = jnp.where(largest > 0, largest, most) / most
        values = jnp.round(each / scale) if integer else each / scale
        compressed.append((values.astype(kind), scale))
    return tuple(compressed)


def _written(old, new, position, axis):
    return jax.tree.map(lambda into, each: jax.lax.dynamic_update_slice_in_dim(into, each, position, axis), old, new)
