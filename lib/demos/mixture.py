"""A mixture of experts: its layer in several ways, where its router sends tokens, and what its experts cost in time.

Tokens, routers and biases are whole multiples of a power of two, so that every sum of a router is exact in f32 and each token
goes to the same experts on every processor. Weights are scaled integers. Times depend on the machine; counts do not.
"""

import functools
import math
from dataclasses import astuple, dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from lib.demos import machine, sharded
from lib.routing import known_chances

WIDTH = 256     # of the tokens whose way is counted
AXIS = "experts"


def shapes(ffn, width, tokens):
    """What a layer takes, abstract and in f32: its weights by name, and x [tokens, width]. ffn: a `lib.FFN` of E experts."""
    E, F, array = ffn.n_experts, ffn.d_ff, functools.partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
    weights = {"router": array((width, E)), "gate_up": array((E, width, 2 * F)), "down": array((E, F, width))}
    return weights, array((tokens, width))


def init(ffn, width, seed=0):
    """Random weights of a layer, shaped as `shapes` says, with a router that is as fair to its experts as random signs are.

    Directions of the router have one length, a power of two near 1: no expert is preferred for the length of its own.
    """
    rng, found = np.random.default_rng(seed), {}
    for name, each in shapes(ffn, width, 1)[0].items():
        integers = rng.integers(-127, 128, each.shape, dtype=np.int8)
        scale = ((255**2 - 1) / 12 * each.shape[-2]) ** -0.5    # of 255 equally likely consecutive integers
        found[name] = jnp.asarray(integers, jnp.float32) * np.float32(scale)
    signs = np.where(rng.integers(0, 2, (width, ffn.n_experts)), 1, -1)
    return {**found, "router": jnp.asarray(signs * 2.0 ** -round(math.log2(width) / 2), jnp.float32)}


def draw(count, width=WIDTH, seed=1):
    """Random tokens [count, width] in f32, each value a multiple of 2^-15 between -1 and 1."""
    integers = np.random.default_rng(seed).integers(-(2**15), 2**15, (count, width), dtype=np.int16)
    return jnp.asarray(integers, jnp.float32) * 2.0**-15


@functools.partial(jax.jit, static_argnames="top_k")
def route(router, x, top_k, bias=0.0):
    """Each token's experts: the top_k largest of its logits plus the biases [E], weighed by a softmax over these.

    x: [tokens, width]. Returns (weights [tokens, top_k], experts [tokens, top_k]), the largest first.
    """
    logits = jnp.matmul(x, router, precision="highest", preferred_element_type=jnp.float32) + bias
    best, experts = jax.lax.top_k(logits, top_k)
    return jax.nn.softmax(best), experts


@functools.partial(jax.jit, static_argnames="top_k")
def dense(params, x, top_k):
    """The layer as its definition reads: every expert computes every token, and most results weigh 0. Shapes as of x."""
    (weights, experts), total = route(params["router"], x, top_k), jnp.zeros_like(x)
    for expert, (gate_up, down) in enumerate(zip(params["gate_up"], params["down"], strict=True)):
        gate, up = jnp.split(x @ gate_up, 2, -1)
        share = jnp.where(experts == expert, weights, 0).sum(-1, keepdims=True).astype(x.dtype)
        total += share * ((jax.nn.silu(gate) * up) @ down)
    return total


@functools.partial(jax.jit, static_argnames="top_k")
def ragged(params, x, top_k):
    """The layer as it is served: tokens sorted by expert, and one `ragged_dot` over all experts a matrix. Shapes as of x."""
    return _chosen(params, x, *route(params["router"], x, top_k))


def _chosen(params, x, weights, experts, first=0):
    """What the experts here, the first of them numbered `first`, add to tokens that were routed among all experts."""
    own, top_k = len(params["down"]), experts.shape[1]
    experts = experts.reshape(-1) - first
    here = (experts >= 0) & (experts < own)
    order = jnp.argsort(jnp.where(here, experts, own))
    counts = (experts[:, None] == jnp.arange(own)).sum(0, dtype=jnp.int32)
    rows = order // top_k
    gate, up = jnp.split(jax.lax.ragged_dot(x[rows], params["gate_up"], counts), 2, -1)
    results = jax.lax.ragged_dot(jax.nn.silu(gate) * up, params["down"], counts)
    weights = weights.reshape(-1, 1)[order].astype(x.dtype)
    return jnp.zeros_like(x).at[rows].add(jnp.where(here[order, None], weights * results, 0))


@functools.cache
def parallel(ffn, width, tokens):
    """The layer on eight devices, compiled: each holds E/8 experts, and tokens/8 tokens, whose results it returns.

    (params, x [tokens, width]) -> [tokens, width]. Two all-to-alls: tokens go to the devices that hold some of their experts,
    results come back. Shapes are fixed before the router speaks, so a device keeps room for all of its tokens to go to every
    device; what does not go is sent as zeros. ValueError unless eight divides experts and tokens.
    """
    if ffn.n_experts % sharded.COUNT or tokens % sharded.COUNT:
        raise ValueError(f"{sharded.COUNT} devices must divide experts and tokens, not {ffn.n_experts} and {tokens}")
    own = ffn.n_experts // sharded.COUNT

    def layer(params, x):
        _, experts = route(params["router"], x, ffn.top_k)
        goes = (experts // own == jnp.arange(sharded.COUNT)[:, None, None]).any(-1)
        there = jnp.where(goes[..., None], x, 0)
        arrived = jax.lax.all_to_all(there, AXIS, 0, 0, tiled=True).reshape(-1, width)
        routed = route(params["router"], arrived, ffn.top_k)    # again, by the same router, instead of a third exchange
        mixed = _chosen(params, arrived, *routed, first=own * jax.lax.axis_index(AXIS))
        return jax.lax.all_to_all(mixed.reshape(there.shape), AXIS, 0, 0, tiled=True).sum(0)

    mesh = jax.sharding.Mesh(np.array(sharded.devices()), AXIS)
    specs = {"router": P(), "gate_up": P(AXIS), "down": P(AXIS)}, P(AXIS)
    placed = jax.tree.map(lambda spec: jax.sharding.NamedSharding(mesh, spec), specs)
    mapped = jax.shard_map(layer, mesh=mesh, in_specs=specs, out_specs=P(AXIS))
    return jax.jit(mapped, in_shardings=placed).lower(*shapes(ffn, width, tokens)).compile()


def flops(function, ffn, width, tokens):
    """FLOPs that XLA counts in `dense` or `ragged`, compiled for this backend and not run."""
    return function.lower(*shapes(ffn, width, tokens), top_k=ffn.top_k).compile().cost_analysis()["flops"]


def loads(experts, count, tokens):
    """How many tokens each of `count` experts gets, in each of as many passes of so many tokens as there are: [passes, count].

    experts: [all tokens, top_k], as `route` returns them. ValueError where they are fewer than one pass has.
    """
    if not 1 <= tokens <= len(experts):
        raise ValueError(f"a pass of {tokens} tokens needs as many, not {len(experts)}")
    passes = len(experts) // tokens
    each = np.asarray(experts)[: passes * tokens].reshape(passes, -1) + count * np.arange(passes)[:, None]
    return np.bincount(each.ravel(), minlength=passes * count).reshape(passes, count)


def biases(router, x, chances):
    """Biases [E] under which a router uses its experts as often as `chances` say, found as balanced training finds them.

    An expert that the tokens x [tokens, width] use too often loses a step, one that they use too seldom gains it, and steps
    become smaller. chances: as of `lib.routing.popularity`. ValueError unless there is one for each expert, from 0 to 1, and
    they add up to a whole number of experts.
    """
    top_k, bias = round(sum(chances)), np.zeros(router.shape[1], np.float32)
    chances = known_chances(chances, router.shape[1], top_k)
    wanted = np.rint(np.asarray(chances) * len(x))
    for step in np.repeat(2.0 ** -np.arange(12), 6):
        _, experts = route(router, x, top_k, bias)
        bias += step * np.sign(wanted - loads(experts, len(chances), len(x))[0])
    return jnp.asarray(bias)


def columns(params):
    """A layer's experts as a CPU reads them once: [{"gate_up": [2 d_ff, width], "down": [width, d_ff]}, ...]."""
    pairs = zip(params["gate_up"], params["down"], strict=True)
    return [{"gate_up": jnp.array(gate_up.T), "down": jnp.array(down.T)} for gate_up, down in pairs]


def shares(router, x, top_k, bias=0.0):
    """What each expert's result weighs in each token, [E, tokens]: 0 where the token does not use it."""
    weights, experts = route(router, x, top_k, bias)
    return np.array((jax.nn.one_hot(experts, router.shape[1]) * weights[..., None]).sum(1).T)


@jax.jit
def branches(experts, x, share):
    """The layer with a branch around each expert: one that no token uses is not read, any other computes all tokens.

    experts: as `columns` returns them; x: [width, tokens]; share: [E, tokens]. Returns [width, tokens].
    """
    total = jnp.zeros_like(x)
    for each, weights in zip(experts, share, strict=True):
        used = functools.partial(_weighed, each, x, weights)
        total += jax.lax.cond(weights.any(), used, lambda: jnp.zeros_like(x))
    return total


def gathered(experts, x, share):
    """The layer with its branches on the host: each expert that is used computes only the tokens that use it.

    Inputs as of `branches`, x and share in NumPy; returns NumPy. An expert's columns are filled up as `filled` says.
    """
    total = np.zeros_like(x)
    for each, weights in zip(experts, share, strict=True):
        if used := np.flatnonzero(weights).tolist():
            columns = used + used[:1] * (filled(len(used)) - len(used))
            total[:, used] += np.asarray(_weighed(each, x[:, columns], weights[columns]))[:, : len(used)]
    return total


def filled(columns):
    """Columns that an expert computes for so many tokens: 1, 2, 4 or a multiple of 8, so that few programs are compiled."""
    return min(1 << (columns - 1).bit_length(), -(-columns // 8) * 8)


@jax.jit
def _weighed(expert, x, weights):
    gate, up = jnp.split(expert["gate_up"] @ x, 2)
    return weights * (expert["down"] @ (jax.nn.silu(gate) * up))


@dataclass(frozen=True)
class Pass:
    """A timed pass, or the medians of several: its tokens, how many experts it read, seconds."""

    tokens: int
    experts: float
    seconds: float


def touch(router, experts, top_k, bias=0.0, batches=(1, 2, 4, 8, 16), rounds=6):
    """Time `branches`, each time on other tokens: [(`Pass`, one of the same batch that uses all experts), ...]."""
    found, everything = [], np.full((len(experts), max(batches)), 1 / len(experts), np.float32)
    for seed in range(rounds + 1):
        for n in batches:
            x = draw(n, len(router), seed)
            share = shares(router, x, top_k, bias), everything[:, :n]
            found.append([_timed(branches, experts, x.T, each) for each in share])
    return found[len(batches) :]    # the first round compiles


def sweep(router, experts, top_k, batches=(1, 2, 4, 8, 16, 32, 64, 72, 128, 256, 512, 576), rounds=6):
    """Time `gathered`, and in turn a dense layer of equal active size: {"mixture": [Pass, ...], "dense", "dense again"}.

    The dense layer is top_k experts that all tokens use, other ones in each round, up to the batch that gives them as many
    tokens each as the mixture's have in its largest. "Again" is a second pass, when a cache may hold some of it. Medians.
    """
    ways, asked, found = len(experts) // top_k, [], {}
    for seed in range(rounds):
        some = experts[seed % ways * top_k :][:top_k]
        for n in batches:
            x = draw(n, len(router), seed)
            asked.append(("mixture", experts, np.array(x.T), shares(router, x, top_k)))
            if n * ways <= max(batches):
                once = some, np.array(x.T), np.full((top_k, n), 1 / top_k, np.float32)
                asked += [("dense", *once), ("dense again", *once)]
    for size in {filled(int(n)) for *_, share in asked for n in (share > 0).sum(1) if n}:
        _weighed(experts[0], np.zeros((len(router), size), np.float32), np.zeros(size, np.float32))   # compiles
    for name, *operands in asked:
        one = _timed(gathered, *operands)
        found.setdefault(name, {}).setdefault(one.tokens, []).append(astuple(one))
    return {name: [Pass(tokens, *np.median(rows, 0)[1:].tolist()) for tokens, rows in sizes.items()]
            for name, sizes in found.items()}


def _timed(function, experts, x, share):
    seconds, _ = machine.timed(function, experts, x, share)
    return Pass(x.shape[1], int((share > 0).any(1).sum()), seconds)
