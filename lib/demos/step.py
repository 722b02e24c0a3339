"""A whole decode step for the TPU compiler: every layer of a model in one loop, its cache overwritten in place.

Weights and cache are converted, if stored in another format, as they are read. Norms have no gains and queries are not turned by
their position: neither weighs anything beside the matrices. The mesh is that of `sharded`: KV heads are cut as far as they go,
and devices that share one are its copies.
"""

import functools

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from lib.demos import programs, transformer

ALL = ("heads", "copies")
# How a layout cuts the cache's axes beside its KV heads; "automatic" says nothing of collectives, "fsdp" is a mistake.
CUT = {"heads": {}, "batch": {"B": "copies"}, "automatic": {"B": "copies"}, "sequence": {"S": "copies"},
       "fsdp": {"K": None, "B": ALL}}


def build(case):
    """(function, abstract arguments, which of them it overwrites) of a step: (layers, tables, cache, tokens, position).

    `case.cache` is the order of the axes of keys and values, layers L, context S, KV heads K, batch B, head H: "LSKBH" is carried
    through the loop, "LSKBH scanned" handed to it slice by slice.
    """
    model, where = case.architecture, programs.devices(case)
    [block] = model.blocks
    L, D, F, V = block.layers, model.d_model, block.ffn.d_ff, model.vocab
    N, K, H = block.mixer.n_heads, block.mixer.n_kv_heads, block.mixer.d_head
    mesh = Mesh(where.reshape(min(K, len(where)), -1), ALL)
    columns, rows, heads = P(None, None, ALL), P(None, ALL), P(None, None, "heads")
    layers = dict(q=((L, D, N, H), columns), k=((L, D, K, H), heads), v=((L, D, K, H), heads), out=((L, N, H, D), rows),
                  gate=((L, D, F), columns), up=((L, D, F), columns), down=((L, F, D), rows))
    if case.layout == "fsdp":
        layers = {name: (size, rows) for name, (size, _) in layers.items()}
    order, sizes = case.cache.split()[0], dict(L=L, S=case.context, K=K, B=case.batch, H=H)
    places = {"K": "heads", **CUT[case.layout]}
    kept = tuple(sizes[axis] for axis in order), P(*[places.get(axis) for axis in order])

    def shape(size, at, kind):
        return jax.ShapeDtypeStruct(size, kind, sharding=NamedSharding(mesh, at))

    weights, kv, own = (programs.TYPES[kind] for kind in (case.weights, case.kv, case.activations))
    arguments = ({name: shape(*each, weights) for name, each in layers.items()},
                 dict(embedding=shape((V, D), rows, weights), head=shape((D, V), rows, weights)),
                 (shape(*kept, kv), shape(*kept, kv)), shape((case.batch,), P(), jnp.int32), shape((), P(), jnp.int32))
    whole = functools.partial(_step, case, own)
    if case.layout != "automatic":
        specs = jax.tree.map(lambda each: each.sharding.spec, arguments)
        whole = jax.shard_map(whole, mesh=mesh, in_specs=specs, out_specs=(P(), specs[2]), check_vma=False)
    return whole, arguments, (2,)


def _step(case, kind, layers, tables, cache, tokens, position):
    """(Next token of each sequence, cache): of one device, or of all where the layout is automatic."""
    gathered = functools.partial(jax.lax.all_gather, axis_name=ALL, tiled=True)
    if case.layout == "automatic":
        def gathered(x, axis):
            return x

    x = gathered(tables["embedding"][tokens].astype(kind), axis=1)
    if case.layout == "fsdp":
        x = _part(x, 0, ALL)
    scanned = "scanned" in case.cache

    def turn(carry, each):
        (x, kept), (weights, number, slices) = carry, each
        if scanned:
            x, slices = _layer(case, position, x, weights, [each[None] for each in slices], 0)
            return (x, None), tuple(each[0] for each in slices)
        return _layer(case, position, x, weights, kept, number), None

    carry, numbers = (x, None if scanned else cache), jnp.arange(layers["q"].shape[0])
    (x, kept), slices = jax.lax.scan(turn, carry, (layers, numbers, cache if scanned else None))
    if case.layout == "fsdp":
        x = gathered(x, axis=0)
    logits = gathered(transformer._norm(x, -1) @ tables["head"].astype(kind), axis=1)
    return jnp.argmax(logits, -1).astype(jnp.int32), slices if scanned else kept


def _layer(case, position, x, weights, cache, number):
    weights = {name: each.astype(x.dtype) for name, each in weights.items()}
    if case.layout == "fsdp":
        weights = {name: jax.lax.all_gather(each, ALL, axis=0, tiled=True) for name, each in weights.items()}
    join = (lambda x: x) if case.layout in ("automatic", "fsdp") else functools.partial(jax.lax.psum, axis_name=ALL)
    columns = transformer._norm(x, -1)
    q, k, v = (jnp.einsum("bd,dnh->bnh", columns, weights[name]) for name in "qkv")
    mixed, cache = _attention(case, q, (k, v), cache, number, position)
    x = x + join(jnp.einsum("bnh,nhd->bd", mixed, weights["out"]))
    columns = transformer._norm(x, -1)
    return x + join((jax.nn.silu(columns @ weights["gate"]) * (columns @ weights["up"])) @ weights["down"]), cache


def _attention(case, q, new, cache, number, position):
    """(Mixed values of the query heads that are here, cache): two all-to-alls by batch; three collectives by sequence."""
    order, start = case.cache.split()[0], 0
    if case.layout == "batch":
        new = [_part(each, 0, "copies") for each in new]
        q = jax.lax.all_to_all(q, "copies", split_axis=0, concat_axis=1, tiled=True)
    if case.layout == "sequence":
        start = jax.lax.axis_index("copies") * cache[0].shape[order.index("S")]
        q = jax.lax.all_gather(q, "copies", axis=1, tiled=True)
    cache = tuple(_put(kept, each, order, number, position - start, case.layout == "sequence")
                  for kept, each in zip(cache, new, strict=True))
    keys, values = (jax.lax.dynamic_index_in_dim(each, number, order.index("L"), keepdims=False) for each in cache)
    groups = q.reshape(q.shape[0], new[0].shape[1], -1, q.shape[2])
    visible = start + jnp.arange(cache[0].shape[order.index("S")]) <= position
    mixed, summed = programs.attend(groups, keys, values, order.replace("L", "").lower(), visible)
    if case.layout == "sequence":
        weight = jnp.exp(summed - jax.nn.logsumexp(jax.lax.all_gather(summed, "copies"), 0))
        mixed = (mixed * weight[..., None]).astype(q.dtype).reshape(q.shape)
        return jax.lax.psum_scatter(mixed, "copies", scatter_dimension=1, tiled=True), cache
    mixed = mixed.reshape(q.shape)
    if case.layout == "batch":
        mixed = jax.lax.all_to_all(mixed, "copies", split_axis=1, concat_axis=0, tiled=True)
    return mixed, cache


def _part(x, axis, name):
    """The part of x along an array axis that belongs to this device of the mesh axis of that name."""
    size = x.shape[axis] // jax.lax.axis_size(name)
    return jax.lax.dynamic_slice_in_dim(x, size * jax.lax.axis_index(name), size, axis)


def _put(cache, new, order, number, at, sequence):
    """The cache with the new token [batch, KV heads, d_head] of a layer at index `at`; cut by `sequence`, if that is here."""
    size = cache.shape[order.index("S")]
    place = [{"L": number, "S": jnp.clip(at, 0, size - 1)}.get(axis, 0) for axis in order]
    new = jnp.einsum(f"bkh->{order.replace('L', '').replace('S', '').lower()}", new).astype(cache.dtype)
    new = jnp.expand_dims(new, [order.index("L"), order.index("S")])
    if sequence:
        new = jnp.where((0 <= at) & (at < size), new, jax.lax.dynamic_slice(cache, place, new.shape))
    return jax.lax.dynamic_update_slice(cache, new, place)
