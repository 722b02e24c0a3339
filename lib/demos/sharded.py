"""A decode step of the demo transformer on eight devices: six layouts, the collectives XLA compiled, the bytes they send.

The mesh is `heads` x `copies`: KV heads are cut as far as they go, and chips that share one are its copies. Embedding and
head stay whole and uncounted: the cost model has no collective there. Counts and bytes do not depend on the machine.
"""

import functools
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

import lib
from lib.demos import transformer
from lib.demos.hlo import KINDS, collectives
from lib.demos.verdicts import sent

SHAPE = transformer.Shape(layers=2, d_model=512, n_heads=16, n_kv_heads=4, d_head=32, d_ff=1536, vocab=1024)
COUNT = 8
ALL = ("heads", "copies")
ROWS, COLUMNS = P(ALL), P(None, ALL)
MEGATRON = dict(q=ROWS, k=P("heads"), v=P("heads"), out=COLUMNS, gate=ROWS, up=ROWS, down=COLUMNS)


def devices():
    """Eight devices, a list: on a CPU they are made here. Raises RuntimeError if JAX has started with fewer before."""
    with suppress(RuntimeError):  # JAX has started, perhaps with enough
        jax.config.update("jax_num_cpu_devices", COUNT)
    if len(jax.devices()) < COUNT:
        raise RuntimeError(f"JAX has started with fewer than {COUNT} devices: call sharded.devices() before anything else "
                           f"uses JAX (restart the kernel), or set JAX_NUM_CPU_DEVICES={COUNT} in the environment")
    return jax.devices()[:COUNT]


def mesh(shape):
    """The devices, arranged as a shape's KV heads allow. Raises ValueError where the devices cannot share its heads."""
    ways = min(shape.n_kv_heads, COUNT)
    if COUNT % ways or shape.n_kv_heads % ways or shape.n_heads % COUNT or shape.d_ff % COUNT:
        raise ValueError(f"{COUNT} devices must divide query heads and FFN width, and divide the KV heads or be a multiple "
                         f"of them; those of {shape} they do not")
    return jax.sharding.Mesh(np.array(devices()).reshape(ways, -1), ALL)


def by_heads(q, k, v, cache, position):
    """Attention to the KV heads that are here. No collective.

    q: [query heads, d_head, batch]; k, v: [KV heads, d_head, batch]; cache: (keys, values); position: of the new token.
    Returns (mixed values, shaped as q, cache), and so do `by_batch` and `by_sequence`.
    """
    cache = _written(cache, k, v, position)
    return _attention(q, *cache, jnp.arange(cache[0].shape[-1]) <= position)[0], cache


def by_batch(q, k, v, cache, position):
    """Each copy of a KV head has some of the sequences: queries go there, mixed values come back. Two all-to-alls."""
    some = cache[0].shape[0]
    k, v = (jax.lax.dynamic_slice_in_dim(each, some * jax.lax.axis_index("copies"), some, 2) for each in (k, v))
    q = jax.lax.all_to_all(q, "copies", split_axis=2, concat_axis=0, tiled=True)
    mixed, cache = by_heads(q, k, v, cache, position)
    return jax.lax.all_to_all(mixed, "copies", split_axis=0, concat_axis=2, tiled=True), cache


def by_sequence(q, k, v, cache, position):
    """Each copy of a KV head has a part of every sequence: all-gather queries, then log-sum-exps; reduce-scatter the mixes."""
    part = cache[0].shape[-1]
    start = part * jax.lax.axis_index("copies")
    q = jax.lax.all_gather(q, "copies", axis=0, tiled=True)
    cache = _written(cache, k, v, position - start)
    mixed, summed = _attention(q, *cache, start + jnp.arange(part) <= position)
    weight = jnp.exp(summed - jax.nn.logsumexp(jax.lax.all_gather(summed, "copies"), 0))[:, None]
    return jax.lax.psum_scatter((mixed * weight).astype(q.dtype), "copies", scatter_dimension=0, tiled=True), cache


def _written(cache, k, v, at):
    """The cache with the new token, if index `at` is in it; if not, another device has it."""
    (keys, values), (k, v) = cache, (each.transpose(2, 0, 1) for each in (k, v))
    at = jnp.where(at < 0, keys.shape[-1], at)  # a negative index would count from the end
    return keys.at[:, :, :, at].set(k, mode="drop"), values.at[:, :, at].set(v, mode="drop")


def _attention(q, keys, values, visible):
    """(mixed values, shaped as q, and f32 log-sum-exps of the scores [query heads, batch]) of a cache's visible part."""
    groups = q.reshape(keys.shape[1], -1, *q.shape[1:])
    scores = jnp.einsum("kghb,bkhs->kgbs", groups, keys, preferred_element_type=jnp.float32) * q.shape[1] ** -0.5
    scores = jnp.where(visible, scores, jnp.finfo(jnp.float32).min)  # finite: a part that is masked whole gives no NaN
    mixed = jnp.einsum("kgbs,bksh->kghb", jax.nn.softmax(scores).astype(values.dtype), values)
    return mixed.reshape(q.shape), jax.nn.logsumexp(scores, -1).reshape(len(q), -1)


@dataclass(frozen=True)
class Layout:
    """The cost model's name of a plan, if any; partition specs of keys and values; what attention does about them.

    `automatic`: XLA cuts an unsharded program as its inputs suggest. `fsdp`: matrices are cut by rows, gathered before use.
    """

    plan: str | None
    cache: tuple
    attend: object = by_heads
    automatic: bool = False
    fsdp: bool = False

    def specs(self, shape):
        """Partition specs of what `compiled` takes: layers, cache, x, position."""
        weights, x = (dict.fromkeys(MEGATRON, ROWS), COLUMNS) if self.fsdp else (MEGATRON, P())
        return [weights] * shape.layers, [self.cache] * shape.layers, x, P()


HEADS, BATCH, PARTS = P(None, "heads"), P("copies", "heads"), P(None, "heads", "copies")
LAYOUTS = {
    "Megatron": Layout("heads", (HEADS, HEADS)),
    "Megatron, automatic": Layout("heads", (HEADS, HEADS), automatic=True),
    "KV by batch": Layout("batch", (BATCH, BATCH), by_batch),
    "KV by batch, automatic": Layout("batch", (BATCH, BATCH), automatic=True),
    "KV by sequence": Layout("sequence", (P(None, "heads", None, "copies"), PARTS), by_sequence),
    "FSDP": Layout(None, (ROWS, ROWS), fsdp=True),
}


def decode_step(layout, shape, params, cache, token, position):
    """`transformer.decode_step` in a `Layout`, by which it cuts params and cache, if the cache is not one that it returned.

    token: [batch], each at index `position` of its sequence. Returns (logits [batch, vocab], cache); the cache passed in
    stays valid. Raises ValueError for a position outside the cache, and where batch, length or shape cannot be cut evenly.
    """
    transformer._check(cache, token[:, None], position)
    batch, *_, length = cache[0][0].shape
    layers = jax.tree.map(np.asarray, _apart(shape, params))  # JAX would compile a program for each piece that it cuts
    with jax.set_mesh(mesh(shape)):
        inputs = layers, cache, params["embedding"][token].T, jnp.int32(position)
        x, cache = compiled(layout, shape, batch, length)(*jax.device_put(inputs, layout.specs(shape)))
    return transformer._logits(params, jax.device_put(x, params["embedding"].sharding)).T, cache


@functools.cache
def compiled(layout, shape, batch, length):
    """All layers of a step, compiled: (layers, cache, x [d_model, batch], position) -> (x, cache). Raises as the step does."""
    specs, step = layout.specs(shape), functools.partial(_layers, layout, shape, length)
    step = step if layout.automatic else jax.shard_map(step, in_specs=specs, out_specs=(specs[2], specs[1]))
    inputs = jax.eval_shape(lambda: (_apart(shape, transformer.init(shape)), transformer.empty_cache(shape, batch, length),
                                     jnp.zeros((shape.d_model, batch), transformer.dtype()), jnp.int32(0)))
    with jax.set_mesh(mesh(shape)):
        return jax.jit(step, in_shardings=specs, out_shardings=(None, specs[1])).lower(*inputs).compile()


def _layers(layout, shape, length, layers, cache, x, position):
    """`transformer._layers` for one new token: of one device, or of all where the layout is automatic."""
    join = functools.partial(jax.lax.psum, axis_name=() if layout.automatic or layout.fsdp else ALL)
    turns, extended = transformer._turns(shape, length, position[None]), []
    for each, kept in zip(layers, cache, strict=True):
        if layout.fsdp:
            each = jax.tree.map(lambda rows: jax.lax.all_gather(rows, ALL, axis=0, tiled=True), each)
        columns = transformer._norm(x, 0)
        q, k, v = ((each[matrix] @ columns).reshape(-1, shape.d_head, x.shape[1]) for matrix in "qkv")
        q, k = (transformer._rotate(heads[..., None], turns)[..., 0] for heads in (q, k))
        mixed, kept = layout.attend(q, k, v, kept, position)
        x = x + join(each["out"] @ mixed.reshape(-1, x.shape[1]))
        columns = transformer._norm(x, 0)
        x = x + join(each["down"] @ (jax.nn.silu(each["gate"] @ columns) * (each["up"] @ columns)))
        extended.append(kept)
    return x, extended


def _apart(shape, params):
    """Layers of seven matrices: `transformer.init` fuses those that read the same input."""
    cuts = np.cumsum([shape.n_heads, shape.n_kv_heads]) * shape.d_head
    return [dict(zip(MEGATRON, (*jnp.split(each["qkv"], cuts), each["out"], *jnp.split(each["gate_up"], 2), each["down"]),
                     strict=True)) for each in params["layers"]]


def per_layer(found, layers):
    """{kind: (how many, bytes that a device sends)} in each of the layers. Raises ValueError unless they are alike."""
    if odd := [each for each, times in Counter(found).items() if times % layers]:
        raise ValueError(f"not as many in each of {layers} layers: {odd}")
    sent = {kind: [each.wire for each in found if each.kind == kind] for kind in KINDS}
    return {kind: (len(wires) // layers, sum(wires) / layers) for kind, wires in sent.items() if wires}


def predicted(shape, batch, plan):
    """{kind: bytes that a chip sends a layer} in the cost model."""
    chip = lib.Chip("any", hbm_bytes=1, hbm_bandwidth=1, network=lib.network.Switch(1, 0, COUNT), f32=1)
    server = lib.Server(shape.model(), chip, lib.Plan(COUNT, kv=plan), lib.Precision("f32", "f32", "f32", "f32"))
    return {kind: size / shape.layers for kind, size in sent(server, batch).items()}


def compare(shape=SHAPE, batch=8, context=100):
    """A step after `context` random tokens: {layout: (its `per_layer`, whether tokens and logits, to 1e-5, are unsharded's)}."""
    params, length = transformer.init(shape), (context // COUNT + 1) * COUNT
    prompt = jnp.asarray(np.random.default_rng(1).integers(0, shape.vocab, (batch, context)), jnp.int32)
    token, cache = transformer.prefill(params, shape, prompt, transformer.empty_cache(shape, batch, length))
    expected, rows = transformer.extend(params, shape, cache, token[:, None], context)[0][:, 0], {}
    for name, layout in LAYOUTS.items():
        logits, _ = decode_step(layout, shape, params, cache, token, context)
        equal = (logits.argmax(-1) == expected.argmax(-1)).all() & (abs(logits - expected).max() < 1e-5 * abs(expected).max())
        rows[name] = per_layer(collectives(compiled(layout, shape, batch, length).as_text()), shape.layers), bool(equal)
    return rows
