"""The small programs that the referee has compiled for TPUs: a matrix product, attention, layers of experts.

Each function takes a `referee.Case` and returns (function, abstract arguments, which of them it may overwrite). Nothing here is
ever run: the arguments are shapes on the devices of a machine that exists only as a description.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from lib.demos import mixture
from lib.demos.referee import D_HEAD, HEADS, KV_HEADS, SMALLEST, WIDE, D, F

TYPES = {"f32": jnp.float32, "bf16": jnp.bfloat16, "int8": jnp.int8, "fp8": jnp.float8_e4m3fn, "int4": jnp.int4,
         "fp4": jnp.float4_e2m1fn, "int2": jnp.int2}


def devices(case):
    """The abstract devices of a case's slice, an array. Slice "1" is one device of the smallest that can be described."""
    smallest = SMALLEST[case.chip]
    name = smallest if case.slice == "1" else f"{smallest.partition(':')[0]}:{case.slice}"
    found = np.array(topologies.get_topology_desc(platform="tpu", topology_name=name).devices)
    return found[:1] if case.slice == "1" else found


def _one(case, *arguments):
    """(shape, format or dtype) pairs as arguments on the case's first device."""
    where = SingleDeviceSharding(devices(case)[0])
    return [jax.ShapeDtypeStruct(shape, TYPES.get(kind, kind), sharding=where) for shape, kind in arguments]


def matmul(case):
    """[batch, 8192] x [8192, 32768], both operands in one format."""
    return _product(case, WIDE)


def weights(case):
    """[batch, 8192] x [8192, 28672], an FFN matrix of LLaMA-3-70B, stored in a format and multiplied in the activations'."""
    return _product(case, F)


def _product(case, columns):
    sums = jnp.int32 if case.activations.startswith("int") else jnp.float32

    def product(x, weights):
        return jax.lax.dot(x, weights.astype(x.dtype), preferred_element_type=sums).astype(jnp.bfloat16)

    return product, _one(case, ((case.batch, D), case.activations), ((D, columns), case.weights)), ()


def decode_attention(case):
    """One new token of each of batch sequences attends to its cache [context, KV heads, batch, d_head], stored in a format."""
    query = (case.batch, KV_HEADS, HEADS // KV_HEADS, D_HEAD)
    cache = (case.context, KV_HEADS, case.batch, D_HEAD)
    return (lambda q, keys, values: attend(q, keys, values, "skbh")[0],
            _one(case, (query, case.activations), (cache, case.kv), (cache, case.kv)), ())


def attend(q, keys, values, order, visible=True):
    """Attention of one new token a sequence, queries [batch, KV heads, group, d_head], over a cache whose axes have that order.

    Returns (mixed values, shaped as q; log-sum-exps of the scores [batch, KV heads, group]). The cache is converted when read.
    """
    scores = jnp.einsum(f"bkgh,{order}->bkgs", q, keys.astype(q.dtype), preferred_element_type=jnp.float32) * q.shape[-1] ** -0.5
    scores = jnp.where(visible, scores, -1e30)
    weights = jax.nn.softmax(scores).astype(q.dtype)
    return jnp.einsum(f"bkgs,{order}->bkgh", weights, values.astype(q.dtype)), jax.nn.logsumexp(scores, -1)


def prefill_attention(case):
    """A prompt of context tokens attends to itself in eight heads: scores written out ("naive"), or JAX's Pallas kernel."""
    from jax.experimental.pallas.ops.tpu import flash_attention

    def naive(q, k, v):
        scores = jnp.einsum("bhtd,bhsd->bhts", q, k, preferred_element_type=jnp.float32) * D_HEAD**-0.5
        visible = jnp.tril(jnp.ones(scores.shape[-2:], bool))
        weights = jax.nn.softmax(jnp.where(visible, scores, -jnp.inf), -1).astype(v.dtype)
        return jnp.einsum("bhts,bhsd->bhtd", weights, v)

    def flash(q, k, v):
        return flash_attention.flash_attention(q, k, v, causal=True, sm_scale=D_HEAD**-0.5)

    shape = (case.batch, 8, case.context, D_HEAD), case.activations
    return {"naive": naive, "flash": flash}[case.layout], _one(case, shape, shape, shape), ()


def experts(case):
    """One mixture layer whose experts are spread over the slice: tokens go to the chips that hold some of theirs, and back.

    Shapes are fixed before the routing is known, so each chip sends every other one room for all of its tokens.
    """
    model, where = case.architecture, devices(case)
    ffn, n = model.blocks[-1].ffn, len(where)
    mesh, E, own = Mesh(where, "experts"), ffn.n_experts, ffn.n_experts // n

    def weights_of(x, router):
        """What each token gives to each expert, [tokens, E]; zero for those it is not routed to."""
        best, chosen = jax.lax.top_k(x @ router, ffn.top_k)
        return (jax.nn.one_hot(chosen, E, dtype=x.dtype) * jax.nn.softmax(best)[..., None]).sum(1)

    def layer(x, router, gate, up, down):
        per_chip = weights_of(x, router).reshape(-1, n, own).any(-1)            # [tokens, chips]
        there = jnp.where(per_chip.T[..., None], x, 0)                          # [chips, tokens, D]
        arrived = jax.lax.all_to_all(there, "experts", 0, 0, tiled=True).reshape(-1, x.shape[1])
        here = jax.lax.dynamic_slice_in_dim(weights_of(arrived, router), own * jax.lax.axis_index("experts"), own, 1)
        hidden = jax.nn.silu(jnp.einsum("td,edf->tef", arrived, gate)) * jnp.einsum("td,edf->tef", arrived, up)
        mixed = jnp.einsum("tef,te,efd->td", hidden, here, down)
        return jax.lax.all_to_all(mixed.reshape(there.shape), "experts", 0, 0, tiled=True).sum(0).astype(x.dtype)

    width, spec = (model.d_model, ffn.d_ff), P("experts")
    shapes = ((case.batch, model.d_model), spec), ((model.d_model, E), P()), *[((E, *width), spec)] * 2, ((E, *width[::-1]), spec)
    arguments = [jax.ShapeDtypeStruct(shape, TYPES[case.weights], sharding=NamedSharding(mesh, at)) for shape, at in shapes]
    return jax.shard_map(layer, mesh=mesh, in_specs=tuple(at for _, at in shapes), out_specs=spec, check_vma=False), arguments, ()


def ragged(case):
    """One mixture layer on one device: `ragged_dot` on tokens sorted by expert, or, "dense", every expert on every token."""
    model = case.architecture
    ffn, where = model.blocks[-1].ffn, SingleDeviceSharding(devices(case)[0])
    layer = {"ragged": mixture.ragged, "dense": mixture.dense}[case.layout]
    weights, x = jax.tree.map(lambda each: jax.ShapeDtypeStruct(each.shape, TYPES[case.weights], sharding=where),
                              mixture.shapes(ffn, model.d_model, case.batch))
    return functools.partial(layer, top_k=ffn.top_k), [weights, x], ()
