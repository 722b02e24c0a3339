"""XLA's counts of the demo transformer against formulas done by hand; of the clock, only that it can be read."""

import functools

import jax
import pytest

from lib.bounds import step_time
from lib.demos import machine, transformer
from lib.demos.transformer import Shape
from lib.models import kv_bytes

BATCH, CONTEXT = 8, 256
on_cpu = pytest.mark.skipif(jax.default_backend() != "cpu", reason="these counts are those of an XLA compile for a CPU")


def middling(n_kv_heads):
    """Big enough for the matrices to outweigh norms and rotations, small enough to compile at once."""
    return Shape(layers=2, d_model=512, n_heads=8, n_kv_heads=n_kv_heads, d_head=64, d_ff=1536, vocab=1024)


def matmul_params(shape):
    heads = shape.n_heads + 2 * shape.n_kv_heads
    layer = heads * shape.d_head * shape.d_model + shape.n_heads * shape.d_head * shape.d_model
    return shape.vocab * shape.d_model + shape.layers * (layer + 3 * shape.d_ff * shape.d_model)


def cache_bytes(shape):
    return BATCH * CONTEXT * shape.layers * 2 * shape.n_kv_heads * shape.d_head * transformer.dtype().itemsize


@functools.cache
def counts(n_kv_heads):
    return machine.xla_counts(middling(n_kv_heads), BATCH, CONTEXT)


attentions = pytest.mark.parametrize("n_kv_heads", [8, 2, 1], ids=["multi-head", "grouped", "multi-query"])


def test_the_weights_are_the_matrices_and_nothing_else():
    """Parameters counted from the arrays equal the sum over matrices, the embedding once."""
    shape = middling(2)
    assert sum(each.size for each in jax.tree.leaves(transformer.init(shape))) == matmul_params(shape)


def test_the_cost_model_is_told_the_same_shape():
    """The cost model's parameters are the matrices and one gain vector, and its KV bytes are those of the cache."""
    shape = middling(2)
    model, format = shape.model(), "f32" if transformer.dtype().itemsize == 4 else "bf16"
    assert model.params == matmul_params(shape) + shape.d_model
    assert BATCH * kv_bytes(model, CONTEXT, format) == cache_bytes(shape)


def test_a_machine_becomes_a_chip_with_its_rates():
    """A prediction from the cost model is the formula with the machine's own three rates."""
    rates = dict(bandwidth=2e10, kv_bandwidth=1e10, flops=2e11)
    chip = machine.Machine("demo", 2**34, format="f32", itemsize=4, **rates).chip()
    model = middling(2).model()
    kv = kv_bytes(model, CONTEXT, "f32")
    for batch in (1, 64):
        expected = max(4 * model.params / 2e10, 2 * batch * model.params / 2e11) + batch * kv / 1e10
        actual = step_time(chip, 1, model.params, kv, batch, weights="f32", math="f32").value
        assert actual == pytest.approx(expected, rel=1e-12)


@on_cpu
@attentions
def test_xla_counts_the_flops_of_the_formula(n_kv_heads):
    """One step costs 2 FLOPs a parameter and sequence, and 4 S N H a layer and sequence in attention."""
    shape = middling(n_kv_heads)
    expected = BATCH * (2 * matmul_params(shape) + 4 * CONTEXT * shape.n_heads * shape.d_head * shape.layers)
    assert counts(n_kv_heads).flops == pytest.approx(expected, rel=0.01)


@on_cpu
@pytest.mark.parametrize("n_kv_heads", [8, 2], ids=["multi-head", "grouped"])
def test_xla_counts_little_more_than_weights_and_cache(n_kv_heads):
    """Bytes accessed are weights and cache, once each, and activations that XLA writes and reads back."""
    shape = middling(n_kv_heads)
    floor = 4 * matmul_params(shape) + cache_bytes(shape)
    assert 1 <= counts(n_kv_heads).accessed / floor < 1.3
    assert counts(n_kv_heads).temporary < cache_bytes(shape) / 10


@attentions
def test_the_donated_cache_is_updated_in_place(n_kv_heads):
    """The aliased bytes of a step are exactly the cache."""
    assert counts(n_kv_heads).aliased == cache_bytes(middling(n_kv_heads))


@on_cpu
def test_a_single_kv_head_costs_copies_on_a_cpu():
    """XLA:CPU copies a cache of one KV head before it multiplies: in place by its aliases, not by its temporaries."""
    assert counts(1).temporary > cache_bytes(middling(1))


@pytest.fixture(scope="module")
def rows():
    return machine.referee()


@on_cpu
@pytest.mark.parametrize(
    ("case", "ratio"),
    [
        ("f32 matmul, FLOPs", 1),
        ("f32 matmul, bytes", 1),
        ("scan over 10 layers, FLOPs", 0.1),
        ("bf16 matmul on a CPU, bytes", 5),
        ("cache write, donated, bytes", 1),
        ("cache write, not donated, bytes", 2049),
        ("embedding gather, bytes", 256),
    ],
)
def test_the_referee_is_right_or_wrong_as_stated(rows, case, ratio):
    """Each line of the table has the ratio that the book states, to one per cent."""
    (row,) = [row for row in rows if row.case == case]
    assert row.ratio == pytest.approx(ratio, rel=0.01)
    assert row.why


def test_a_sweep_has_a_time_for_every_point_and_a_rate_for_every_resource():
    """Structure only: no time decides a test."""
    shape = Shape(layers=1, d_model=32, n_heads=4, n_kv_heads=2, d_head=8, d_ff=48, vocab=64)
    points = [(2, 8), (1, 8), (1, 16)]
    measured, steps = machine.sweep(shape, points, rounds=1)
    assert [(step.batch, step.context) for step in steps] == points
    assert all(step.seconds > 0 for step in steps)
    assert min(measured.bandwidth, measured.kv_bandwidth, measured.flops) > 0
    assert measured.itemsize == transformer.dtype().itemsize
    again = machine.calibrate(shape, rounds=1)
    assert (again.name, again.format) == (measured.name, measured.format)
    with pytest.raises(ValueError):
        machine.sweep(shape, [(0, 8)])


def test_the_knee_of_a_roofline_is_its_critical_batch():
    """On an ideal roofline the knee is where the two lines cross, whatever the order of the points."""
    batches = [128, 1, 2, 4, 8, 16, 32, 64]
    seconds = [max(12, batch) for batch in batches]
    assert machine.knee(batches, seconds) == 12
    with pytest.raises(ValueError):
        machine.knee(batches[:3], seconds[:3])
