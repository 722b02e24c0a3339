"""The quantized demo transformer: roundings, bytes and program types against hand calculations and NumPy."""

import functools
from collections import Counter
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import qwix
from flax import nnx

from lib.demos import quantized, quantized_cache, transformer
from lib.demos.quantized import SCHEMES, rule
from lib.demos.transformer import Shape

SHAPE = Shape(layers=2, d_model=32, n_heads=4, n_kv_heads=2, d_head=16, d_ff=96, vocab=64)
WEIGHTS = 2 * (128 * 32 + 32 * 64 + 192 * 32 + 32 * 96)  # of the matrices of both layers
OUTPUTS = 2 * (128 + 32 + 192 + 32)
TILES = 2 * (128 * 1 + 32 * 2 + 192 * 1 + 32 * 3)  # of 32 inputs
F32, INT8, FP8 = "f32 x f32 -> f32", "int8 x int8 -> int32", "fp8 x fp8 -> f32"

pytestmark = pytest.mark.skipif(
    jax.default_backend() != "cpu", reason="exact roundings need f32, and bytes XLA for a CPU"
)


def rounded(values, most, kind=None, axis=-1):
    """NumPy's quantization and back: the largest value of an axis becomes `most`, the rest is rounded to integers or `kind`.

    Qwix takes half a step more, 127.5 or 7.5, and the largest value itself is a tie: let it be positive, it saturates.
    """
    values = np.asarray(values, np.float32)
    largest = np.abs(values).max(axis, keepdims=True)
    scale = np.where(largest > 0, largest, most) / np.float32(most)
    steps = values / scale
    steps = np.clip(np.round(steps), -np.ceil(most), int(most)) if kind is None else steps.astype(kind)
    return steps.astype(np.float32) * scale


def tiled(values, most=7.5):
    return rounded(values.reshape(len(values), -1, 32), most).reshape(values.shape)


def positive(values, tile):
    """The values with signs such that the largest of each tile of the last axis is positive."""
    tiles = np.asarray(values).reshape(*values.shape[:-1], -1, tile)
    largest = np.take_along_axis(tiles, np.abs(tiles).argmax(-1, keepdims=True), -1)
    return jnp.asarray((tiles * np.sign(largest)).reshape(values.shape))


ROUNDINGS = {
    "int8 weights": lambda w: rounded(w, 127.5),
    "fp8 weights": lambda w: rounded(w, 448, jnp.float8_e4m3fn),
    "int4 weights": lambda w: rounded(w, 7.5),
    "int4 weights, tiles of 32": tiled,
}
PARAMS = transformer.init(SHAPE)  # scaled integers, of which many would be ties again: a little noise parts them
PARAMS["layers"] = jax.tree.map(
    lambda matrix: positive(matrix + 0.01 * np.random.default_rng(6).standard_normal(matrix.shape, np.float32), 32),
    PARAMS["layers"],
)
TOKENS = jnp.asarray(np.random.default_rng(1).integers(0, SHAPE.vocab, (3, 20)), jnp.int32)
DECODER = quantized.Decoder(SHAPE, PARAMS)


@functools.cache
def by(scheme):
    return quantized.quantize(DECODER, SCHEMES[scheme], TOKENS[:1])


def test_the_modules_compute_the_transformer():
    """Logits are those of the textbook pass, for grouped and for multi-head attention."""
    expected = transformer.full_forward(PARAMS, SHAPE, TOKENS)
    np.testing.assert_allclose(quantized.logits(DECODER, TOKENS), expected, atol=2e-5)
    shape = replace(SHAPE, n_kv_heads=4)
    params = transformer.init(shape)
    expected = transformer.full_forward(params, shape, TOKENS)
    np.testing.assert_allclose(quantized.Decoder(shape, params)(TOKENS), expected, atol=2e-5)


@pytest.mark.parametrize("scheme", ROUNDINGS)
def test_weights_are_rounded_as_numpy_rounds_them(scheme):
    """A decoder with weights that Qwix quantized is the textbook pass on weights that NumPy rounded."""
    layers = [
        {name: jnp.asarray(ROUNDINGS[scheme](np.asarray(matrix))) for name, matrix in layer.items()}
        for layer in PARAMS["layers"]
    ]
    expected = transformer.full_forward(PARAMS | {"layers": layers}, SHAPE, TOKENS)
    changed = abs(expected - transformer.full_forward(PARAMS, SHAPE, TOKENS)).max()
    actual = quantized.logits(by(scheme), TOKENS)
    np.testing.assert_allclose(actual, expected, atol=3e-5)
    assert changed > 1e-3, "a quantization that changes nothing would pass"


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("int8 weights", {F32: 13}),
        ("int4 weights, tiles of 32", {F32: 13}),
        ("int8 both, dynamic", {INT8: 8, F32: 5}),
        ("int8 both, static", {INT8: 8, F32: 5}),
        ("fp8 both, dynamic", {FP8: 8, F32: 5}),
        ([SCHEMES["int8 both, dynamic"], rule("int8", "int8", path="head")], {INT8: 9, F32: 4}),
        (rule("int8", "int8", path=".*"), {INT8: 13}),
        (rule("int8", "int8", path=r"layers/0/\w+"), {INT8: 4, F32: 9}),
    ],
)
def test_rules_decide_which_products_are_integer(given, expected):
    """Of 13 products, a layer's four matrices, its two of attention, and the head, those change whose path a rule names."""
    assert quantized.products(DECODER, TOKENS) == Counter({F32: 2 * (4 + 2) + 1})
    model = by(given) if isinstance(given, str) else quantized.quantize(DECODER, given, TOKENS[:1])
    assert quantized.products(model, TOKENS) == Counter(expected)


@pytest.mark.parametrize(
    ("scheme", "expected"),
    [
        ("int8 weights", WEIGHTS + 4 * OUTPUTS),
        ("int8 both, dynamic", WEIGHTS + 4 * OUTPUTS),
        ("int8 both, static", WEIGHTS + 4 * OUTPUTS + 4 * 8),  # and one scale for the input of each matrix
        ("fp8 weights", WEIGHTS + 4 * OUTPUTS),
        ("int4 weights", WEIGHTS // 2 + 4 * OUTPUTS),
        ("int4 weights, tiles of 32", WEIGHTS // 2 + 4 * TILES),
    ],
)
def test_stored_bytes_are_values_scales_and_what_stayed(scheme, expected):
    """Bits of the values, an f32 scale an output or tile, and the embedding in f32."""
    embedding = 4 * 64 * 32
    assert quantized.stored(DECODER) == 4 * WEIGHTS + embedding
    assert quantized.stored(by(scheme)) == expected + embedding


def test_a_quantized_head_is_stored_beside_the_embedding():
    """The tied matrix is looked up in f32 and multiplied in int8, so both are kept."""
    both = quantized.quantize(DECODER, rule("int8", path="head"), TOKENS[:1])
    assert quantized.stored(both) == 4 * WEIGHTS + 4 * 64 * 32 + 64 * 32 + 4 * 64


def test_four_bits_are_half_a_byte():
    """The array itself charges a byte for each value; what a compiled program takes is half of that."""
    values = jnp.zeros((6, 10), jnp.int4)
    assert values.nbytes == 60
    assert quantized.stored([values, jnp.zeros(3)]) == 30 + 12


def test_activations_scaled_by_token_or_by_sample():
    """One product of integers with both scales taken out: a token's own, or the mean of the sample's largest values."""
    rng = np.random.default_rng(2)
    weight, x = (np.array(positive(rng.standard_normal(size, np.float32), 40)) for size in ((24, 40), (2, 5, 40)))
    x[0, 0] *= 30  # beyond the static range, so that it is clipped
    steps, top = rounded(weight, 127.5), np.float32(127.5)
    model = quantized.Product(jnp.asarray(weight))
    dynamic = quantized.quantize(model, rule("int8", "int8", path=".*"), jnp.asarray(x))
    np.testing.assert_allclose(dynamic(jnp.asarray(x)), rounded(x, 127.5) @ steps.T, rtol=1e-4, atol=1e-3)

    sample = x[1:]
    static = quantized.quantize(model, rule("int8", "int8", path=".*", **quantized.STATIC), jnp.asarray(sample))
    scale = np.abs(sample).max(-1).mean() / top
    expected = np.clip(np.round(x / scale), -128, 127) * scale @ steps.T
    np.testing.assert_allclose(static(jnp.asarray(x)), expected, rtol=1e-4, atol=1e-3)
    assert abs(expected[0, 0] - x[0, 0] @ steps.T).max() > 1, "the clipped token must differ"


@pytest.mark.parametrize(
    "given",
    [
        rule("int8", path="layers/7/.*"),
        [SCHEMES["int8 weights"], rule("int8", path="attention")],
        replace(SCHEMES["int8 weights"], op_names=("ragged_dot",)),
    ],
)
def test_a_rule_that_meets_no_product_is_refused(given):
    """Qwix leaves the model as it was and says nothing; here it is a ValueError that names the path."""
    with pytest.raises(ValueError, match="no product"):
        quantized.quantize(DECODER, given, TOKENS[:1])


def test_a_rule_for_an_unknown_format_is_refused():
    """Qwix would accept any name and fail later: ValueError names the formats that there are."""
    for formats in (("int3",), ("int8", "bf16"), (None, "int8")):
        with pytest.raises(ValueError, match="int8, fp8, int4"):
            rule(*formats)


def test_what_qwix_intercepts():
    """The post-training provider leaves ragged_dot alone, the training provider does not; neither enters a kernel."""
    ours, training = quantized.intercepted(), quantized.intercepted(qwix.QtProvider)
    caught = ["jax.lax.dot_general", "jnp.einsum", "conv_general_dilated"]
    missed = ["in a Pallas kernel", "@, traced before"]
    assert list(ours) == [*caught, "ragged_dot", *missed]
    for name in caught:
        assert ours[name] == ({INT8: 1}, ["f32", "int8"])  # values and their scales
    for name in ["ragged_dot", *missed]:
        assert ours[name] == ({F32: 1}, ["f32"])
    for name in [*caught, "ragged_dot"]:
        assert training[name] == ({INT8: 1}, ["f32"])  # weights stay as they were, for the optimizer
    for name in missed:
        assert training[name] == ({F32: 1}, ["f32"])


@pytest.mark.parametrize("spelling", ["ragged_dot", "in a Pallas kernel"])
def test_the_spellings_multiply(spelling):
    """The products that are counted are products: against NumPy."""
    function, shape = quantized.SPELLINGS[spelling]
    rng = np.random.default_rng(3)
    x, weight = rng.standard_normal((12, 40), np.float32), rng.standard_normal(shape, np.float32)
    experts = weight if len(shape) == 3 else np.swapaxes(weight, 0, 1)[None]
    expected = np.concatenate([part @ each for part, each in zip(np.split(x, len(experts)), experts, strict=True)])
    np.testing.assert_allclose(function(jnp.asarray(x), jnp.asarray(weight)), expected, rtol=1e-4, atol=1e-4)


def test_qwix_has_a_ragged_dot_to_call():
    """Given quantized operands, `qwix.ragged_dot` multiplies integers and is right to their rounding."""
    rng = np.random.default_rng(4)
    x, weight = rng.standard_normal((12, 40), np.float32), rng.standard_normal((4, 40, 24), np.float32)
    sizes = jnp.asarray([5, 0, 4, 3])
    operands = (
        qwix.quantize(jnp.asarray(x), "int8", channelwise_axes=(0,)),
        qwix.quantize(jnp.asarray(weight), "int8", channelwise_axes=(2,)),
    )
    assert INT8 in quantized.products(lambda x, w: qwix.ragged_dot(x, w, sizes), *operands)
    expected = np.concatenate([x[:5] @ weight[0], x[5:9] @ weight[2], x[9:] @ weight[3]])
    error = np.linalg.norm(qwix.ragged_dot(*operands, sizes) - expected) / np.linalg.norm(expected)
    assert 1e-3 < error < 0.02


def test_a_matmul_traced_under_interception_stays_quantized():
    """`@` is compiled and kept by JAX: once quantized, it is quantized for all, the unquantized model too.

    No other test multiplies these sizes. When this fails, Qwix or JAX has changed, and the chapter's sentence with it.
    """
    rng = np.random.default_rng(5)
    x, weight = rng.standard_normal((7, 45), np.float32), rng.standard_normal((19, 45), np.float32)
    plain = quantized.Product(jnp.asarray(weight), lambda x, w: x @ w.T)
    quantized.quantize(plain, rule("int8", "int8", path=".*"), jnp.asarray(x))
    assert quantized.products(plain, jnp.asarray(x)) == {INT8: 1}
    error = np.linalg.norm(plain(jnp.asarray(x)) - x @ weight.T) / np.linalg.norm(x @ weight.T)
    assert 1e-3 < error < 0.03


def test_quality_by_hand():
    """Two tokens with probabilities 1/2 against 9/10 and 1/10; the text has the second one."""
    reference, other = np.log([[[0.5, 0.5]]]), np.log([[[0.1, 0.9]]])
    found = quantized.quality(reference, other + 3, [[1]])  # logits have no zero
    assert found.divergence == pytest.approx(0.5 * np.log(0.5 / 0.1) + 0.5 * np.log(0.5 / 0.9))
    assert found.change == pytest.approx(np.log(0.5 / 0.9))
    assert quantized.quality(other, other, [[0]]) == quantized.Quality(0, 0, 1)
    more = np.log([[[0.9, 0.1], [0.2, 0.8], [0.6, 0.4], [0.3, 0.7]]])
    assert quantized.quality(more, more[:, :, ::-1], [[0] * 4]).agreement == 0
    assert quantized.quality(more, more[:, [0, 1, 3, 3]], [[0] * 4]).agreement == 0.75


def test_what_a_cpu_reads_for_a_quantized_matrix():
    """Bytes for each weight: 1 or 0.5 read, and where XLA multiplies in f32, 4 written and 4 read again."""
    rows, columns, batch = 512, 1024, 8
    weights, activations = rows * columns, 4 * batch * (rows + columns)
    schemes = {name: SCHEMES[name] for name in ("int8 weights", "int4 weights", "int8 both, dynamic")}
    found = quantized.reads(schemes, rows, columns, batch)
    assert list(found) == ["f32", *schemes]
    # With both operands int8 the activations are also written and read as int8, and scales and int32 sums beside them.
    for name, each, matrix in (
        ("f32", 4, 0),
        ("int8 weights", 9, 4),
        ("int4 weights", 8.5, 4),
        ("int8 both, dynamic", 1, 0),
    ):
        assert found[name].accessed == pytest.approx(
            each * weights + activations, rel=0.02 if name != "int8 both, dynamic" else 0.2
        )
        assert matrix * weights <= found[name].temporary <= matrix * weights + 8 * activations
    stored = [4 * weights, weights + 4 * rows, weights // 2 + 4 * rows, weights + 4 * rows]
    assert [each.stored for each in found.values()] == stored
    seconds = quantized.times(found, rounds=1)
    assert list(seconds) == list(found) and min(seconds.values()) > 0


CACHED = {"int8": (127, None), "fp8": (448, jnp.float8_e4m3fn), "int4": (7, None)}


@pytest.mark.parametrize(("format", "bits"), [("int8", 8), ("fp8", 8), ("int4", 4)])
def test_a_compressed_cache_holds_its_values_and_a_scale_for_each_head(format, bits):
    """Bytes: K and V of 16 features a token and head, and 4 for each of their scales."""
    plain = transformer.empty_cache(SHAPE, 3, 10)
    heads = 2 * 3 * 10 * 2 * 2  # layers, sequences, tokens, KV heads, K and V
    assert quantized.stored(plain) == heads * 16 * 4
    assert quantized.stored(quantized_cache.compress(plain, format)) == heads * (16 * bits // 8 + 4)


@pytest.mark.parametrize("format", CACHED)
def test_a_compressed_cache_is_rounded_as_numpy_rounds_it(format):
    """Scales are those of a token and head: along d_head, which is the last but one axis of keys and the last of values."""
    _, cache = transformer.extend(PARAMS, SHAPE, transformer.empty_cache(SHAPE, 3, 20), TOKENS, 0)
    for plain, layer in zip(cache, quantized_cache.expand(quantized_cache.compress(cache, format)), strict=True):
        for values, expanded, axis in zip(plain, layer, (2, 3), strict=True):
            np.testing.assert_allclose(expanded, rounded(values, *CACHED[format], axis), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("format", CACHED)
def test_decoding_through_a_compressed_cache(format):
    """Logits are those of `transformer.extend` when NumPy rounds each new token in its cache before the next step."""
    actual = quantized_cache.follow(PARAMS, SHAPE, TOKENS, format)
    cache = transformer.empty_cache(SHAPE, 3, 20)
    for position in range(20):
        expected, cache = transformer.extend(PARAMS, SHAPE, cache, TOKENS[:, position : position + 1], position)
        np.testing.assert_allclose(actual[:, position], expected[:, 0], atol=5e-5)
        cache = [
            tuple(
                jnp.asarray(
                    np.where(np.arange(20).reshape(at) == position, rounded(values, *CACHED[format], axis), values)
                )
                for values, axis, at in zip(layer, (2, 3), ((1, 1, 1, -1), (1, 1, -1, 1)), strict=True)
            )
            for layer in cache
        ]
    whole = transformer.full_forward(PARAMS, SHAPE, TOKENS)
    np.testing.assert_allclose(actual[:, 0], whole[:, 0], atol=5e-5)  # the first token sees only itself
    assert abs(actual[:, 1:] - whole[:, 1:]).max() > 1e-3


def test_greedy_tokens_are_the_likeliest():
    """After a prompt of five tokens, each generated token is the argmax of following those before it."""
    generated = quantized_cache.generate(PARAMS, SHAPE, TOKENS[:, :5], 15, "int4")
    text = jnp.concatenate([TOKENS[:, :5], generated], 1)
    expected = quantized_cache.follow(PARAMS, SHAPE, text, "int4").argmax(-1)[:, 4:-1]
    np.testing.assert_array_equal(generated, expected)
    assert len(np.unique(generated)) > 3, "a model that repeats itself would pass any test of tokens"


def test_tokens_of_one_pass_see_each_other_uncompressed():
    """A whole prompt has the logits of the textbook pass, in any format; what follows it reads it compressed."""
    cache = quantized_cache.compress(transformer.empty_cache(SHAPE, 3, 40), "int4")
    whole = transformer.full_forward(PARAMS, SHAPE, jnp.concatenate([TOKENS, TOKENS], 1))
    first, cache = quantized_cache.extend(PARAMS, SHAPE, cache, TOKENS, 0)
    second, _ = quantized_cache.extend(PARAMS, SHAPE, cache, TOKENS, 20)
    np.testing.assert_allclose(first, whole[:, :20], atol=5e-5)
    assert abs(second - whole[:, 20:]).max() > 1e-2


def test_an_unknown_format_is_refused():
    """int3 is no format of a cache, nor bf16: ValueError names those that are."""
    for call in (quantized_cache.follow, lambda *given: quantized_cache.generate(*given[:3], 2, given[3])):
        with pytest.raises(ValueError, match="int8, fp8, int4"):
            call(PARAMS, SHAPE, TOKENS, "bf16")


def test_divergence_grows_with_the_square_of_the_step():
    """A step of int4 is 17 or 18 times that of int8, in weights or cache, so the divergence is about 300 times as much."""
    reference, following = quantized.logits(DECODER, TOKENS), jnp.roll(TOKENS, -1, 1)
    weights = [quantized.logits(by(scheme), TOKENS) for scheme in ("int8 weights", "int4 weights")]
    caches = [quantized_cache.follow(PARAMS, SHAPE, TOKENS, format) for format in ("int8", "int4")]
    for pair in (weights, caches):
        eight, four = (quantized.quality(reference, logits, following) for logits in pair)
        assert 17**2 / 2 < four.divergence / eight.divergence < 2 * 18**2
        assert four.agreement < eight.agreement


def test_modules_are_not_changed_by_quantizing_them():
    """The unquantized decoder is the same before and after."""
    before = quantized.logits(DECODER, TOKENS)
    quantized.quantize(DECODER, SCHEMES["int4 weights"], TOKENS[:1])
    np.testing.assert_array_equal(quantized.logits(DECODER, TOKENS), before)
    assert {str(each.dtype) for each in jax.tree.leaves(nnx.state(DECODER))} == {"float32"}
