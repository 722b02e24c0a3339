"""A real decoder-only transformer with a KV cache, laid out so that a decode step meets its roofline on a CPU too.

Weights are stored [out, in] and activations are columns [features, tokens]: XLA:CPU then reads each weight once
whatever the batch. Layers are a Python list, because slices of stacked weights would be copied before use. Values are
f32 on a CPU, which converts bf16 matrices before it multiplies them, and bf16 elsewhere.
"""

import functools
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np

ROPE_BASE = 10_000.0
NORM_EPSILON = 1e-5


@dataclass(frozen=True)
class Shape:
    """The sizes of a decoder: n_kv_heads = n_heads is multi-head attention, 1 is multi-query, between is grouped.

    All fields are counts; d_head is even, for the rotary embedding. Raises ValueError on anything else.
    """

    layers: int
    d_model: int
    n_heads: int
    n_kv_heads: int
    d_head: int
    d_ff: int
    vocab: int

    def __post_init__(self):
        if min(vars(self).values()) < 1:
            raise ValueError(f"every size of a transformer is at least 1, not {self}")
        if self.n_heads % self.n_kv_heads:
            raise ValueError(f"{self.n_heads} query heads cannot share {self.n_kv_heads} KV heads evenly")
        if self.d_head % 2:
            raise ValueError(f"rotary embedding turns pairs of features: d_head is even, not {self.d_head}")

    def model(self):
        """This architecture as the cost model describes it: a `lib.models.Model`, which adds one norm's gain."""
        from lib.models import FFN, GQA, Block, Model

        attention = GQA(self.n_heads, self.n_kv_heads, self.d_head)
        block = Block("layer", self.layers, attention, FFN(self.d_ff), norms=0)
        return Model("demo", self.d_model, self.vocab, (block,), tied=True)


# The timed shapes: TinyLlama's width, two layers, 445 MB of f32 weights, many times any last-level cache.
MULTI_HEAD = Shape(layers=2, d_model=2048, n_heads=16, n_kv_heads=16, d_head=128, d_ff=5632, vocab=4096)
GROUPED = replace(MULTI_HEAD, n_kv_heads=4)


def dtype():
    """The type that weights and cache have on this backend: float32 on a CPU, bfloat16 elsewhere."""
    return jnp.dtype(jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16)


def init(shape, seed=0):
    """Random weights of a transformer, the same bits on every processor (scaled integers, no transcendentals).

    Returns {"embedding": [vocab, d_model], "layers": [{"qkv", "out", "gate_up", "down"}, ...]}, matrices [out, in].
    The embedding is also the output head, and normalisation has no gain: the weights are the matrices and nothing else.
    """
    rng = np.random.default_rng(seed)

    def matrix(rows, columns):
        integers = rng.integers(-127, 128, (rows, columns), dtype=np.int8)
        variance = (255**2 - 1) / 12  # of 255 equally likely consecutive integers
        return (jnp.asarray(integers, jnp.float32) * np.float32((variance * columns) ** -0.5)).astype(dtype())

    sizes = {
        "qkv": ((shape.n_heads + 2 * shape.n_kv_heads) * shape.d_head, shape.d_model),
        "out": (shape.d_model, shape.n_heads * shape.d_head),
        "gate_up": (2 * shape.d_ff, shape.d_model),
        "down": (shape.d_model, shape.d_ff),
    }
    embedding = matrix(shape.vocab, shape.d_model)
    layers = [{name: matrix(*size) for name, size in sizes.items()} for _ in range(shape.layers)]
    return {"embedding": embedding, "layers": layers}


def empty_cache(shape, batch, length):
    """Room for the keys and values of `length` tokens of `batch` sequences.

    Returns one (keys [batch, n_kv_heads, d_head, length], values [batch, n_kv_heads, length, d_head]) a layer: the
    orders in which the two attention products read them. Raises ValueError unless batch and length are positive.
    """
    if batch < 1 or length < 1:
        raise ValueError(f"a cache holds at least one sequence and one token, not batch {batch}, length {length}")
    sizes = (batch, shape.n_kv_heads, shape.d_head, length), (batch, shape.n_kv_heads, length, shape.d_head)
    return [tuple(jnp.zeros(size, dtype()) for size in sizes) for _ in range(shape.layers)]


def extend(params, shape, cache, tokens, position):
    """Process tokens that follow `position` cached ones: prefill, decode and verification are this one function.

    tokens: [batch, new]. Returns (logits [batch, new, vocab] in f32, cache with `new` more tokens); the cache passed in
    stays valid. Raises ValueError when it cannot hold the tokens.
    """
    _check(cache, tokens, position)
    return _extend(params, shape, cache, tokens, jnp.int32(position))


def prefill(params, shape, tokens, cache):
    """Process a whole prompt at once, filling the cache from its start.

    tokens: [batch, prompt]. Returns (greedy next token [batch], cache); the cache passed in is donated, so it is gone.
    Raises ValueError when the prompt is longer than the cache.
    """
    _check(cache, tokens, 0)
    return next_token(params, shape, cache, tokens, jnp.int32(0))


def decode_step(params, shape, cache, token, position):
    """Add one token to every sequence: the step whose time the decode roofline predicts.

    token: [batch], each at index `position` (a Python int) of its sequence. Returns (greedy next token [batch], cache);
    the cache passed in is donated. The step reads the whole length of the cache, masked beyond `position`.
    Raises ValueError when `position` is not inside the cache.
    """
    _check(cache, token[:, None], position)
    return next_token(params, shape, cache, token[:, None], jnp.int32(position))


def generate(params, shape, prompt, new):
    """Greedy decoding: one prefill, then `new` - 1 decode steps.

    prompt: [batch, length]. Returns tokens [batch, new]. Raises ValueError when new is not positive.
    """
    if new < 1:
        raise ValueError(f"generation makes at least one token, not {new}")
    batch, length = prompt.shape
    token, cache = prefill(params, shape, prompt, empty_cache(shape, batch, length + new))
    tokens = [token]
    for position in range(length, length + new - 1):
        token, cache = decode_step(params, shape, cache, token, position)
        tokens.append(token)
    return jnp.stack(tokens, axis=1)


@functools.partial(jax.jit, static_argnames="shape")
def full_forward(params, shape, tokens):
    """The textbook forward pass in f32, without cache or layout tricks: what the cached one must agree with.

    tokens: [batch, length]. Returns logits [batch, length, vocab].
    """
    params = jax.tree.map(lambda weights: weights.astype(jnp.float32), params)
    x, (batch, length) = params["embedding"][tokens], tokens.shape
    causal = jnp.tril(jnp.ones((length, length), bool))
    turn = jnp.exp(1j * jnp.arange(length)[:, None, None] * ROPE_BASE ** -jnp.linspace(0, 1, shape.d_head // 2, False))

    def rotate(x):
        turned = jax.lax.complex(*jnp.split(x, 2, -1)) * turn
        return jnp.concatenate([turned.real, turned.imag], -1)

    for layer in params["layers"]:
        heads = (_norm(x, -1) @ layer["qkv"].T).reshape(batch, length, -1, shape.d_head)
        q, k, v = jnp.split(heads, [shape.n_heads, shape.n_heads + shape.n_kv_heads], 2)
        k, v = (jnp.repeat(each, shape.n_heads // shape.n_kv_heads, 2) for each in (k, v))
        scores = jnp.einsum("btnh,bsnh->bnts", rotate(q), rotate(k)) / jnp.sqrt(shape.d_head)
        weights = jax.nn.softmax(jnp.where(causal, scores, -jnp.inf))
        x = x + jnp.einsum("bnts,bsnh->btnh", weights, v).reshape(batch, length, -1) @ layer["out"].T
        gate, up = jnp.split(_norm(x, -1) @ layer["gate_up"].T, 2, -1)
        x = x + (jax.nn.silu(gate) * up) @ layer["down"].T
    return _norm(x, -1) @ params["embedding"].T


@functools.partial(jax.jit, static_argnames="shape", donate_argnames="cache")
def next_token(params, shape, cache, tokens, position):
    """`extend`, compiled, then the likeliest token after the last one.

    Same inputs, position an int32 scalar that is not checked. Returns (token [batch], cache); donates the cache.
    """
    x, cache = _layers(params, shape, cache, tokens, position)
    logits = _logits(params, x.reshape(shape.d_model, *tokens.shape)[:, :, -1])
    return jnp.argmax(logits, 0).astype(jnp.int32), cache


@functools.partial(jax.jit, static_argnames="shape")
def _extend(params, shape, cache, tokens, position):
    x, cache = _layers(params, shape, cache, tokens, position)
    return _logits(params, x).reshape(-1, *tokens.shape).transpose(1, 2, 0), cache


def attention(q, keys, values, visible=True):
    """Softmax attention of queries over a cache, the queries of a group sharing their KV head.

    q: [batch, n_kv_heads, group, new, d_head]; keys, values: as in `empty_cache`; visible: mask [new, length] or True.
    Returns [batch, n_kv_heads, group, new, d_head]. Scores are f32 whatever the cache holds.
    """
    scores = jnp.einsum("bkgth,bkhs->bkgts", q, keys, preferred_element_type=jnp.float32) * q.shape[-1] ** -0.5
    weights = jax.nn.softmax(jnp.where(visible, scores, -jnp.inf)).astype(values.dtype)
    return jnp.einsum("bkgts,bksh->bkgth", weights, values)


def _check(cache, tokens, position):
    batch, *_, length = cache[0][0].shape
    if tokens.shape[0] != batch:
        raise ValueError(f"{tokens.shape[0]} sequences do not match a cache of {batch}")
    if not 0 <= position <= length - tokens.shape[1]:
        raise ValueError(f"{tokens.shape[1]} tokens from position {position} do not fit a cache of {length}")


def _layers(params, shape, cache, tokens, position):
    """The residual stream after every layer, [d_model, batch * new], and the extended cache."""
    batch, new = tokens.shape
    positions = position + jnp.arange(new)
    turns = _turns(shape, cache[0][0].shape[-1], positions)
    visible = jnp.arange(cache[0][0].shape[-1]) <= positions[:, None]
    x = params["embedding"][tokens.reshape(-1)].T
    extended = []
    for layer, (keys, values) in zip(params["layers"], cache, strict=True):
        heads = (layer["qkv"] @ _norm(x, 0)).reshape(-1, shape.d_head, batch, new)
        q, k, v = jnp.split(heads, [shape.n_heads, shape.n_heads + shape.n_kv_heads])
        q, k = _rotate(q, turns), _rotate(k, turns)
        keys = jax.lax.dynamic_update_slice(keys, k.transpose(2, 0, 1, 3), (0, 0, 0, position))
        values = jax.lax.dynamic_update_slice(values, v.transpose(2, 0, 3, 1), (0, 0, position, 0))
        q = q.reshape(shape.n_kv_heads, -1, shape.d_head, batch, new).transpose(3, 0, 1, 4, 2)
        mixed = attention(q, keys, values, visible)
        mixed = mixed.transpose(1, 2, 4, 0, 3).reshape(-1, batch * new)
        x = x + layer["out"] @ mixed
        gate, up = jnp.split(layer["gate_up"] @ _norm(x, 0), 2)
        x = x + layer["down"] @ (jax.nn.silu(gate) * up)
        extended.append((keys, values))
    return x, extended


def _logits(params, x):
    return jnp.matmul(params["embedding"], _norm(x, 0), preferred_element_type=jnp.float32)


def _norm(x, axis):
    square = jnp.mean(jnp.square(x.astype(jnp.float32)), axis, keepdims=True)
    return (x * jax.lax.rsqrt(square + NORM_EPSILON)).astype(x.dtype)


def _turns(shape, length, positions):
    """Cosines and sines of the rotary embedding, [d_head / 2, 1, new], looked up: XLA would recompute them per use."""
    angles = np.outer(ROPE_BASE ** -np.linspace(0, 1, shape.d_head // 2, False), np.arange(length))
    return [jnp.asarray(table, jnp.float32)[:, None, positions] for table in (np.cos(angles), np.sin(angles))]


def _rotate(x, turns):
    """Rotary embedding of x [heads, d_head, batch, new]: pairs of features turn with the position."""
    (cosine, sine), (first, second) = turns, jnp.split(x, 2, 1)
    return jnp.concatenate([first * cosine - second * sine, first * sine + second * cosine], 1).astype(x.dtype)
