"""A copy of the demo transformer on a mesh of devices, with a KV cache of fixed slots: what a serving engine runs.

A mesh is `rows` x `heads`: heads cut the matrices, both cut the cache, and XLA adds the collectives. Programs have fixed
sizes, so prompts are padded, and a step computes empty slots too. The cache of one sequence can be sent to another mesh.
"""

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from lib.demos import transformer

AXES = ("rows", "heads")
MATRICES = dict(qkv=P("heads"), out=P(None, "heads"), gate_up=P("heads"), down=P(None, "heads"))
SLOTS, ONE = P("rows", "heads"), P(None, "heads")  # how the cache of all slots is cut, and that of one sequence


@dataclass(frozen=True)
class Replica:
    """Weights on a mesh, where `place` put them; slots, the tokens that one holds, and the tokens that prompts are padded to."""

    shape: transformer.Shape
    params: dict
    mesh: jax.sharding.Mesh
    slots: int
    length: int
    padded: int

    def cut(self, spec):
        """A partition spec on this mesh."""
        return NamedSharding(self.mesh, spec)

    def empty(self):
        """The cache of all slots, as `transformer.empty_cache` lays it out."""
        sizes = self.shape, self.slots, self.length
        return jax.jit(transformer.empty_cache, static_argnums=(0, 1, 2), out_shardings=self.cut(SLOTS))(*sizes)


def place(shape, params, devices, rows=1, slots=4, length=64, padded=32):
    """A `Replica` on some devices, in so many rows. Raises ValueError where rows, heads or prompts do not fit."""
    ways, left = divmod(len(devices), rows)
    if left or not ways or slots % rows or shape.n_kv_heads % ways or shape.d_ff % ways:
        raise ValueError(f"{rows} rows must divide {len(devices)} devices and {slots} slots, and the {ways} devices of a row the "
                         f"KV heads and the FFN width of {shape}")
    if not 1 <= padded < length:
        raise ValueError(f"a slot of {length} tokens holds prompts padded to 1 to {length - 1}, not {padded}")
    mesh = jax.sharding.Mesh(np.array(devices).reshape(rows, ways), AXES)
    cuts = {"embedding": P(), "layers": [MATRICES] * shape.layers}
    placed = jax.device_put(params, jax.tree.map(functools.partial(NamedSharding, mesh), cuts))
    return Replica(shape, placed, mesh, slots, length, padded)


def prefill(replica, prompt):
    """Keys and values of a prompt without its last token: a cache of one sequence of `replica.padded` tokens."""
    tokens = np.zeros((1, replica.padded), np.int32)
    tokens[0, : len(prompt) - 1] = prompt[:-1]
    return _prefill(replica.params, replica.shape, replica.cut(ONE), tokens)


def send(replica, one, slot):
    """The cache of one sequence, on the devices that hold a slot: every byte goes to one device, however meshes cut it."""
    row = replica.mesh.devices[slot // (replica.slots // len(replica.mesh.devices))]
    return jax.device_put(one, NamedSharding(jax.sharding.Mesh(row[None], AXES), ONE))


def insert(cache, one, slot):
    """The cache of all slots, with one that was sent in its slot: each device writes what it received. Donates `cache`."""
    def written(held, new):
        parts = {shard.device: shard.data for shard in held.addressable_shards}
        for shard in new.addressable_shards:
            here = parts[shard.device]
            parts[shard.device] = _write(here, shard.data, slot % len(here))
        return jax.make_array_from_single_device_arrays(held.shape, held.sharding, list(parts.values()))

    return jax.tree.map(written, cache, one)


def step(replica, cache, tokens, positions):
    """Each slot reads a token: tokens [slots] at positions [slots]. Returns (next tokens [slots], cache); donates `cache`."""
    return _step(replica.params, replica.shape, replica.cut(SLOTS), cache, tokens, positions)


@functools.partial(jax.jit, static_argnames=("shape", "cut"))
def _prefill(params, shape, cut, tokens):
    _, cache = transformer._layers(params, shape, transformer.empty_cache(shape, *tokens.shape), tokens, 0)
    return jax.lax.with_sharding_constraint(cache, cut)


@functools.partial(jax.jit, donate_argnums=0)
def _write(held, new, slot):
    return jax.lax.dynamic_update_slice(held, new, (slot, 0, 0, 0))


@functools.partial(jax.jit, static_argnames=("shape", "cut"), donate_argnames="cache")
def _step(params, shape, cut, cache, tokens, positions):
    def one(cache, token, position):
        x, cache = transformer._layers(params, shape, jax.tree.map(lambda each: each[None], cache), token[None, None], position)
        return x[:, 0], jax.tree.map(lambda each: each[0], cache)

    x, cache = jax.vmap(one, out_axes=(1, 0))(cache, tokens, positions)
    return jnp.argmax(transformer._logits(params, x), 0).astype(jnp.int32), jax.lax.with_sharding_constraint(cache, cut)
