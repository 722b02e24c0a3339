"""Prompts through the demo transformer: what a prefill computes, whole or in chunks, and how long it should take.

A pass over a prompt is the decode step's program with more new tokens, so `machine` counts and times it too:
`machine.sweep(shape, LENGTHS, rounds=2)` for one prompt of growing length, `BATCHES` for several prompts at once.
"""

import functools
from dataclasses import dataclass, replace

import jax.numpy as jnp

from lib.breakdown import leaves
from lib.chips import Chip
from lib.demos import machine, transformer
from lib.formats import Precision
from lib.forward import forward
from lib.mixers import pairs
from lib.network import Switch
from lib.server import Server

# Points of `machine.sweep`: (batch, length of the cache, new tokens). The critical batch of a CPU is around a dozen tokens.
LENGTHS = tuple((1, tokens, tokens) for tokens in (1, 2, 4, 8, 16, 32, 64, 256))
BATCHES = tuple((batch, tokens, tokens) for tokens in (4, 64) for batch in (1, 8))


@dataclass(frozen=True)
class Counts:
    """What the passes over one prompt compute and move, by XLA's count and by the cost model's, in FLOPs and bytes.

    The model counts the pairs of a query and a key that it may see. The demo multiplies every query with the whole
    cache and masks what it may not see: `masked_flops` is that difference.
    """

    passes: int
    xla_flops: float
    model_flops: float
    masked_flops: float
    xla_bytes: float
    model_bytes: float

    @property
    def ratio(self):
        """XLA's FLOPs over the model's: above 1 by what is masked."""
        return self.xla_flops / self.model_flops

    @property
    def explained(self):
        """XLA's FLOPs over the model's and the masked ones; what remains above 1 is softmax, norms and rotations."""
        return self.xla_flops / (self.model_flops + self.masked_flops)


def counts(shape, prompt, chunk=None, length=None):
    """Count a prefill of `prompt` tokens of one sequence, by compiling it; nothing runs.

    chunk: tokens a pass, by default the whole prompt. length: tokens that the cache has room for, by default the
    prompt. Every pass computes logits of its last token. Returns `Counts`, the sum over passes. Raises ValueError
    unless all are positive and the cache holds the prompt.
    """
    server, length = _counter(shape), prompt if length is None else length
    if length < prompt:
        raise ValueError(f"a cache of {length} tokens cannot hold a prompt of {prompt}")
    total = Counts(0, 0, 0, 0, 0, 0)
    for cached, new in chunks(prompt, chunk):
        xla, terms = _xla(shape, 1, length, new), leaves(forward(server, 1, new, cached))
        flops, moved = (sum(term.value for term in terms if term.name == name) for name in ("compute", "memory"))
        masked = 4 * shape.layers * shape.n_heads * shape.d_head * (new * length - pairs(new, cached))
        one = 1, xla.flops, flops, masked, xla.accessed, moved
        total = Counts(*(old + more for old, more in zip(vars(total).values(), one, strict=True)))
    return total


def chunks(prompt, chunk=None):
    """The passes over a prompt in chunks: [(tokens cached before it, new tokens), ...], the last chunk what is left.

    Both are counts of tokens; without `chunk` the prompt is one pass. Raises ValueError unless they are positive.
    """
    chunk = prompt if chunk is None else chunk
    if prompt < 1 or chunk < 1:
        raise ValueError(f"a prompt and its chunks have at least one token, not {prompt} in chunks of {chunk}")
    return [(cached, min(chunk, prompt - cached)) for cached in range(0, prompt, chunk)]


def chunked(params, shape, tokens, chunk=None):
    """Process a prompt chunk by chunk, each attending to the ones before it in the cache.

    tokens: [batch, prompt]. Returns (logits [batch, prompt, vocab] in f32, the cache that decoding continues from): the
    same for every chunk. Raises ValueError as `chunks` does.
    """
    batch, prompt = tokens.shape
    passes, logits, cache = chunks(prompt, chunk), [], transformer.empty_cache(shape, batch, prompt)
    for cached, new in passes:
        more, cache = transformer.extend(params, shape, cache, tokens[:, cached : cached + new], cached)
        logits.append(more)
    return jnp.concatenate(logits, 1), cache


def estimate(found, shape, batch, new, cached=0):
    """The cost model's time of a pass on a calibrated machine: a Breakdown in s, with no number fitted to the pass.

    found: a `machine.Machine`; batch sequences push `new` tokens each after `cached` ones, and one of each gets logits.
    Numbers or arrays. Raises ValueError as `lib.forward.forward` does.
    """
    return forward(_server(shape, found.chip(), found.format), batch, new, cached)


def estimates(found, shape, steps):
    """The measured steps of `machine.sweep` with the times that the calibrated rates let one expect: [Step, ...]."""
    return [replace(step, seconds=estimate(found, shape, step.batch, step.new, step.context - step.new).value)
            for step in steps]


def gains(steps):
    """Throughput of prompts processed at once, over that of the same prompts one after another: a number a step.

    Steps measured or estimated. Raises ValueError when there is no step with one prompt of the same length and context.
    """
    alone = {(step.new, step.context): step.seconds for step in steps if step.batch == 1}
    missing = {(step.new, step.context) for step in steps} - alone.keys()
    if missing:
        raise ValueError(f"no step of one prompt to compare with, for (new, context) {sorted(missing)}")
    return [step.batch * alone[step.new, step.context] / step.seconds for step in steps]


_xla = functools.cache(machine.xla_counts)  # chunks of one size are one program


def _server(shape, chip, format):
    return Server(shape.model(), chip, precision=Precision(format, format, format, format))


def _counter(shape):
    """The demo on a chip that does one operation and moves one byte a second: its seconds are counts."""
    name = {4: "f32", 2: "bf16"}[transformer.dtype().itemsize]
    return _server(shape, Chip("counter", 1e12, 1.0, Switch(1.0, 0.0, 1), **{name: 1.0}), name)
