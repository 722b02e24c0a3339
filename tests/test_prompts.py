"""Prefills of the demo transformer: counts and estimates against hand calculations, chunks against one pass."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lib.demos import machine, prompts, transformer
from lib.demos.machine import Machine, Step
from lib.demos.transformer import Shape

SMALL = Shape(layers=2, d_model=32, n_heads=4, n_kv_heads=2, d_head=8, d_ff=48, vocab=64)
MIDDLING = Shape(layers=2, d_model=512, n_heads=8, n_kv_heads=2, d_head=64, d_ff=1536, vocab=1024)
LAYER = 512 * (8 + 2 * 2) * 64 + 8 * 64 * 512 + 3 * 512 * 1536  # parameters of a layer of MIDDLING
HEAD = 2 * 1024 * 512  # FLOPs of the logits of one token
PAIR = 2 * 4 * 8 * 64  # FLOPs in the layers for one query and one key: scores and mixing, multiply and add

on_cpu = pytest.mark.skipif(jax.default_backend() != "cpu", reason="these counts are those of an XLA compile for a CPU")


@pytest.mark.parametrize(
    ("arguments", "passes", "causal", "computed"),
    [
        ((1,), 1, 1, 1),
        ((100,), 1, 5050, 100 * 100),
        ((100, None, 250), 1, 5050, 100 * 250),
        ((100, 30), 4, 5050, 100 * 100),  # 30, 30, 30 and the 10 that are left, each beside the whole cache
        ((100, 500), 1, 5050, 100 * 100),
    ],
    ids=["one token", "whole", "room to decode", "chunks", "one chunk"],
)
@on_cpu
def test_what_a_prefill_computes(arguments, passes, causal, computed):
    """2 FLOPs a parameter and token, logits of one token a pass, and pairs: the model's causal, XLA's the whole square.

    XLA counts up to 2 % more, softmax, norms and rotations, which weigh more in this small shape than in a real one.
    """
    count = prompts.counts(MIDDLING, *arguments)
    others = 100 if arguments[0] == 100 else 1
    expected = 2 * 2 * LAYER * others + passes * HEAD + PAIR * causal
    assert count.passes == passes
    assert count.model_flops == pytest.approx(expected, rel=1e-12)
    assert count.masked_flops == pytest.approx(PAIR * (computed - causal), rel=1e-12)
    assert 1 <= count.explained < 1.02
    assert count.ratio == pytest.approx(count.explained * (1 + PAIR * (computed - causal) / expected))


def test_a_chunk_reads_the_weights_again():
    """Bytes by the model: four chunks read the weights of the layers and the head three times more than one pass."""
    one, four = prompts.counts(MIDDLING, 100), prompts.counts(MIDDLING, 100, 25)
    size = transformer.dtype().itemsize
    again = 3 * size * (2 * LAYER + 1024 * 512)
    logits = 3 * size * (512 + 1024)  # the input and output of each further head
    cache = size * 2 * (2 * 2 * 64) * (25 + 50 + 75)
    assert four.model_bytes - one.model_bytes == pytest.approx(again + logits + cache, rel=1e-12)
    assert four.xla_bytes > one.xla_bytes


@pytest.mark.parametrize("size", [1, 7, 64])
def test_chunks_change_nothing(size):
    """Logits, caches and the greedy token are those of one pass, whether or not the chunks divide the prompt."""
    tokens = jnp.asarray(np.random.default_rng(3).integers(0, SMALL.vocab, (2, 65)), jnp.int32)
    params = transformer.init(SMALL)
    tolerance = 1e-5 if transformer.dtype() == jnp.float32 else 0.1
    actual, cache = prompts.chunked(params, SMALL, tokens, size)
    expected, whole = prompts.chunked(params, SMALL, tokens)
    np.testing.assert_allclose(actual, expected, atol=tolerance, rtol=tolerance)
    np.testing.assert_allclose(expected, transformer.full_forward(params, SMALL, tokens), atol=tolerance, rtol=tolerance)
    for one, other in zip(jax.tree.leaves(cache), jax.tree.leaves(whole), strict=True):
        np.testing.assert_allclose(one, other, atol=tolerance, rtol=tolerance)
    if transformer.dtype() == jnp.float32:
        token, _ = transformer.prefill(params, SMALL, tokens, transformer.empty_cache(SMALL, 2, 65))
        np.testing.assert_array_equal(jnp.argmax(actual[:, -1], -1), token)


def test_chunks_cover_a_prompt():
    """Each chunk begins where the one before ended; without a size there is one."""
    assert prompts.chunks(10, 4) == [(0, 4), (4, 4), (8, 2)]
    assert prompts.chunks(8, 4) == [(0, 4), (4, 4)]
    assert prompts.chunks(10) == [(0, 10)]


def test_sizes_that_are_impossible_are_refused():
    """No tokens, no chunk, and more tokens than a cache holds raise ValueError, in counts and in measurements."""
    for arguments in ((0,), (4, 0), (4, -1)):
        with pytest.raises(ValueError):
            prompts.chunks(*arguments)
    with pytest.raises(ValueError, match="cache of 3"):
        prompts.counts(SMALL, 4, length=3)
    for new in (0, 5):
        with pytest.raises(ValueError, match="cache of 4"):
            machine.xla_counts(SMALL, 1, 4, new)
        with pytest.raises(ValueError, match="cache of 4"):
            machine.sweep(SMALL, [(1, 4, new)])


def test_an_estimate_reads_the_weights_or_multiplies_them():
    """Short prompts take the bytes over the bandwidth, long ones the FLOPs over their rate, operation by operation."""
    rates = dict(bandwidth=2e10, kv_bandwidth=1e10, flops=2e11)
    found = Machine("demo", 2**34, format="f32", itemsize=4, **rates)
    heads, width, vocab = 8 * 64, 512, 1024
    written = 4 * 2 * 2 * 64  # keys and values of one token in one layer
    mixed = 4 * 2 * heads  # queries in, outputs out

    def lookup(tokens):
        return 2 * 4 * tokens * width / 2e10

    logits = 4 * (width * vocab + width + vocab) / 2e10  # one token in both: never enough to hide the read of the head
    projected, ffn = width * 12 * 64 + heads * width, 3 * width * 1536
    activations = 4 * (2 * width + 2 * heads) + 4 * (2 * width + 3 * 1536)
    short = 4 * (projected + ffn) / 2e10 + activations / 2e10 + (written + mixed) / 1e10
    assert prompts.estimate(found, MIDDLING, 1, 1).value == pytest.approx(lookup(1) + 2 * short + logits, rel=1e-12)

    tokens = 1000
    pairs = tokens * (tokens + 1) / 2
    long = 2 * tokens * (projected + ffn) / 2e11 + 4 * heads * pairs / 2e11
    expected = lookup(tokens) + 2 * long + logits
    assert prompts.estimate(found, MIDDLING, 1, tokens).value == pytest.approx(expected, rel=1e-12)

    steps = [Step(1, 1000, 7.0, new=1000), Step(1, 1, 8.0)]
    estimated = prompts.estimates(found, MIDDLING, steps)
    assert [(step.batch, step.context, step.new) for step in estimated] == [(1, 1000, 1000), (1, 1, 1)]
    assert estimated[0].seconds == pytest.approx(expected, rel=1e-12)


def test_prompts_together_gain_until_the_machine_computes():
    """On an ideal roofline of 12 tokens, prompts of 4 gain up to threefold and prompts of 64 nothing."""
    steps = [Step(batch, tokens, max(12, batch * tokens), new=tokens) for tokens in (4, 64) for batch in (8, 1, 2, 4)]
    assert prompts.gains(steps) == [3, 1, 2, 3, 1, 1, 1, 1]
    with pytest.raises(ValueError, match=r"\(64, 64\)"):
        prompts.gains(steps[:-4] + steps[-2:])


def test_a_sweep_measures_prompts_too():
    """Structure only: no time decides a test."""
    points = [(1, 8, 8), (2, 8), (1, 16, 4)]
    measured, steps = machine.sweep(SMALL, points, rounds=1)
    assert [(step.batch, step.context, step.new) for step in steps] == [(1, 8, 8), (2, 8, 1), (1, 16, 4)]
    assert all(step.seconds > 0 for step in steps)
    assert all(step.seconds > 0 for step in prompts.estimates(measured, SMALL, steps))


def test_the_points_of_the_book_are_prompts():
    """Every point fills its cache, and every batch has a single prompt to be compared with."""
    points = prompts.LENGTHS + prompts.BATCHES
    assert all(context == new for _, context, new in points)
    assert {(1, length) for _, length, _ in prompts.BATCHES} <= {point[:2] for point in prompts.BATCHES}
