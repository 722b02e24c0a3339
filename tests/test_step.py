"""The programs that are compiled for TPUs, run on eight devices of a CPU: against textbook ones in NumPy."""

import functools
from collections import Counter
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lib import FFN, GQA, Block, Model
from lib.demos import hlo, programs, sharded, step, transformer

L, D, N, H, F, V, B, S = 3, 32, 16, 8, 48, 64, 8, 16
# The layouts of a step, and so many KV heads that each has something to cut on eight devices.
LAYOUTS = {"heads": 8, "batch": 4, "sequence": 4, "automatic": 4, "fsdp": 8}
ORDERS = [order + how for order in ("LSKBH", "LKBSH", "LBKSH") for how in ("", " scanned")]
layouts = pytest.mark.parametrize("layout", LAYOUTS)


@pytest.fixture(scope="module", autouse=True)
def eight(request):
    """Skip where JAX started with fewer devices; in a fresh process they are made."""
    try:
        return np.array(sharded.devices())
    except RuntimeError as error:
        request.getfixturevalue("unchecked")("programs for the TPU compiler", str(error))


@pytest.fixture(autouse=True)
def here(eight, monkeypatch):
    """Devices of this machine in place of the described ones: all of them, or the first for slice "1"."""
    monkeypatch.setattr(programs, "devices", lambda case: eight[:1] if case.slice == "1" else eight)


def small(n_kv_heads, n_heads=N):
    return Model("small", D, V, (Block("layer", L, GQA(n_heads, n_kv_heads, H), FFN(F)),))


def case(layout="heads", cache="LSKBH", n_kv_heads=None, **changes):
    """What a `referee.Case` tells a step, for the small model."""
    kinds = dict(weights="f32", kv="f32", activations="f32")
    model = small(n_kv_heads or LAYOUTS[layout])
    fields = dict(architecture=model, slice="2x4", chip="v5e", layout=layout, cache=cache, batch=B, context=S, **kinds)
    return SimpleNamespace(**(fields | changes))


def drawn(abstract, seed=0):
    """Random arrays in place of abstract ones, so large that sums over the width are about 1; small integers."""
    rng = np.random.default_rng(seed)

    def draw(each):
        if jnp.issubdtype(each.dtype, jnp.integer):
            return rng.choice([-1, 0, 1], each.shape, p=[1 / 16, 7 / 8, 1 / 16]).astype(each.dtype)
        return (rng.normal(size=each.shape) * D**-0.5).astype(each.dtype)

    layers, tables, cache, tokens, _ = jax.tree.map(draw, abstract)
    cache = tuple(
        (each.astype(np.float32) * (1 if each.dtype == np.int8 else D**0.5)).astype(each.dtype) for each in cache
    )
    return layers, tables, cache, rng.integers(0, V, tokens.shape).astype(np.int32)


def norm(x):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + transformer.NORM_EPSILON)


def silu(x):
    return x / (1 + np.exp(-x))


def softmax(x):
    raised = np.exp(x - x.max(-1, keepdims=True))
    return raised / raised.sum(-1, keepdims=True)


def textbook(order, layers, tables, cache, tokens, position):
    """(Logits, keys, values) of a decode step in double precision, one sequence, layer and head after another.

    The cache is stored in its own format, and read in double precision; its axes have that order.
    """
    axes = [order.index(axis) for axis in "LBKSH"]
    keys, values = (each.transpose(axes).copy() for each in cache)
    layers, tables = jax.tree.map(lambda each: each.astype(np.float64), (layers, tables))
    kinds, logits = (keys.dtype, values.dtype), []
    for b, token in enumerate(tokens):
        x = tables["embedding"][token]
        for i in range(len(layers["q"])):
            q, k, v = (np.tensordot(norm(x), layers[name][i], 1) for name in "qkv")
            keys[i, b, :, position], values[i, b, :, position] = k.astype(kinds[0]), v.astype(kinds[1])
            group, mixed = len(q) // len(k), []
            for n, query in enumerate(q):
                seen, said = (each[i, b, n // group, : position + 1].astype(np.float64) for each in (keys, values))
                mixed.append(softmax(seen @ query / np.sqrt(len(query))) @ said)
            x = x + np.tensordot(np.array(mixed), layers["out"][i], 2)
            y = norm(x)
            x = x + (silu(y @ layers["gate"][i]) * (y @ layers["up"][i])) @ layers["down"][i]
        logits.append(norm(x) @ tables["head"])
    back = ["LBKSH".index(axis) for axis in order]
    return np.array(logits), keys.transpose(back), values.transpose(back)


@functools.cache
def compiled(asked):
    """(Executable, abstract arguments) of the step of a case, told by its fields; code for the CPU is not optimized."""
    function, abstract, overwritten = step.build(SimpleNamespace(**dict(asked)))
    lowered = jax.jit(function, donate_argnums=overwritten).lower(*abstract)
    return lowered.compile(compiler_options={"xla_backend_optimization_level": 0}), abstract


def executable(asked):
    return compiled(tuple(vars(asked).items()))


def run(asked, position, seed=0):
    """(Random inputs, next tokens, cache) of a step of a case."""
    function, abstract = executable(asked)
    given = drawn(abstract, seed)
    put = jax.tree.map(lambda each, like: jax.device_put(each, like.sharding), (*given, np.int32(position)), abstract)
    following, cache = function(*put)
    return given, np.asarray(following), [np.asarray(each) for each in cache]


def compare(asked, position, seed=0, atol=2e-5):
    """Assert that a step of a case is the textbook's; returns the next tokens."""
    given, tokens, cache = run(asked, position, seed)
    logits, *expected = textbook(asked.cache.split()[0], *given, position)
    best = np.sort(logits)
    assert (best[:, -1] - best[:, -2]).min() > 1e-3, "tokens are likelier than others by more than rounding"
    np.testing.assert_array_equal(tokens, logits.argmax(-1))
    for before, after, wanted in zip(given[2], cache, expected, strict=True):
        np.testing.assert_allclose(after.astype(np.float32), wanted.astype(np.float32), atol=atol)
        places = np.nonzero(after.astype(np.float32) != before.astype(np.float32))[asked.cache.index("S")]
        assert np.unique(places).tolist() == [position], "the new token is written in its place, and nothing else is"
    return tokens


@pytest.mark.parametrize("cache", ORDERS)
@layouts
def test_every_layout_and_cache_order_is_a_decode_step(layout, cache):
    """Greedy tokens exactly and the cache to 2e-5, for the first, a middle and the last place of the cache."""
    tokens = [compare(case(layout, cache), position, seed=position) for position in (0, S // 2, S - 1)]
    assert len(np.unique(tokens)) > 8, "a model that repeats itself would pass any test of tokens"


@pytest.mark.parametrize(
    ("layout", "n_kv_heads"), [("heads", 16), ("heads", 4), ("fsdp", 16), ("batch", 1), ("sequence", 1), ("batch", 8)]
)
def test_any_number_of_kv_heads_is_a_decode_step(layout, n_kv_heads):
    """Two KV heads a device, one for two that hold copies, one for all eight, and a layout that has nothing to cut."""
    compare(case(layout, n_kv_heads=n_kv_heads), S // 2 + 1)


@pytest.mark.parametrize(
    ("layout", "cache", "weights", "kv"),
    [
        ("heads", "LSKBH", "int8", "int8"),
        ("heads", "LKBSH", "fp8", "fp8"),
        ("batch", "LSKBH scanned", "fp8", "int8"),
        ("sequence", "LBKSH", "int8", "fp8"),
        ("automatic", "LSKBH", "int8", "f32"),
        ("fsdp", "LSKBH", "f32", "fp8"),
    ],
)
def test_what_is_stored_narrow_is_converted_when_read(layout, cache, weights, kv):
    """The step on the converted values, of weights and cache in eight bits; new keys and values are rounded to them."""
    asked = case(layout, cache, weights=weights, kv=kv)
    given, _, after = run(asked, 0)
    kinds = {"f32": "float32", "int8": "int8", "fp8": "float8_e4m3fn"}
    assert {str(each.dtype) for each in jax.tree.leaves(given[:2])} == {kinds[weights]}
    assert {str(each.dtype) for each in (*given[2], *after)} == {kinds[kv]}
    for position in (0, S // 2):
        compare(asked, position, seed=position, atol=2e-5 if kv == "f32" else 0)


@pytest.mark.parametrize("layout", ["heads", "sequence"])
def test_in_bf16_it_is_the_same_step(layout):
    """All stored and multiplied in bf16, as on a TPU: the cache to three steps of that format at values of 4."""
    asked = case(layout, weights="bf16", kv="bf16", activations="bf16")
    given, _, cache = run(asked, S // 2)
    _, *expected = textbook("LSKBH", *given, S // 2)
    for after, wanted in zip(cache, expected, strict=True):
        assert str(after.dtype) == "bfloat16"
        np.testing.assert_allclose(after.astype(np.float32), wanted.astype(np.float32), atol=3 * 2**-5)


@layouts
def test_every_device_holds_its_share(layout):
    """An eighth of everything, but of the matrices of keys and values what the heads allow, and every token."""
    done, _ = executable(case(layout))
    K = LAYOUTS[layout]
    shared = L * (2 * N * H * D + 3 * D * F) + 2 * V * D
    cache = 2 * L * S * K * B * H // 8
    sizes = done.memory_analysis()
    assert sizes.argument_size_in_bytes == 4 * (shared // 8 + 2 * L * D * K * H // K + cache + B + 1)
    assert sizes.alias_size_in_bytes == 4 * cache, "the cache is overwritten in place"


def test_the_collectives_of_a_step_by_hand():
    """Of every layer those of its layout, of the whole step the gathering of embeddings and logits; 4 bytes a value."""
    ends = Counter({("all-gather", 8, 4 * B * D): 1, ("all-gather", 8, 4 * B * V): 1})
    joins = Counter({("all-reduce", 8, 4 * B * D): 2 * L})
    queries, sums = 4 * B * (N // 4) * H, 4 * B * (N // 4) * 2  # of a KV head; log-sum-exps of both parts of a sequence
    merged = {("all-gather", 2, queries): L, ("all-gather", 2, sums): L, ("reduce-scatter", 2, queries): L}
    matrices = Counter([4 * D * N * H] * 2 + [4 * D * (N // 2) * H] * 2 + [4 * D * F] * 3)
    expected = {
        "heads": joins,
        "batch": joins + Counter({("all-to-all", 2, queries): 2 * L}),
        "sequence": joins + Counter(merged),
        "fsdp": Counter({("all-gather", 8, size): times * L for size, times in matrices.items()}),
    }
    expected["fsdp"]["all-gather", 8, 4 * B * D] += 1  # of the last layer's outputs, which the head needs whole
    for layout, each in expected.items():
        found = hlo.collectives(executable(case(layout))[0].as_text())
        assert Counter((one.kind, one.group, one.bytes) for one in found) == each + ends


@pytest.mark.parametrize("order", ["skbh", "kbsh", "bksh"])
def test_attention_of_one_new_token(order):
    """Mixed values and log-sum-exps of the visible scores, for a cache in any order and format."""
    rng = np.random.default_rng(3)
    q, keys, values = (rng.normal(size=size).astype(np.float32) for size in ((2, 3, 4, 8), *[(2, 3, 5, 8)] * 2))
    back = ["bksh".index(axis) for axis in order]
    for kind, last in ((np.float32, 5), (np.float32, 3), (np.int8, 5), (jnp.float8_e4m3fn, 4)):
        stored = [(2 * each).astype(kind) for each in (keys, values)]
        seen, said = (each.astype(np.float64)[:, :, :last] for each in stored)
        scores = np.einsum("bkgh,bksh->bkgs", q, seen) / np.sqrt(8)
        visible = True if last == 5 else np.arange(5) < last
        mixed, summed = programs.attend(q, *[each.transpose(back) for each in stored], order, visible)
        np.testing.assert_allclose(mixed, np.einsum("bkgs,bksh->bkgh", softmax(scores), said), atol=1e-5)
        np.testing.assert_allclose(summed, np.log(np.exp(scores).sum(-1)), atol=1e-5)


def one_device(program, **fields):
    """(Function, random arguments) of a program of one device."""
    function, abstract, _ = getattr(programs, program)(SimpleNamespace(slice="1", chip="v5e", **fields))
    rng = np.random.default_rng(4)
    return function, [jnp.asarray(rng.normal(size=each.shape), each.dtype) for each in abstract]


def test_decode_attention_is_that_of_llama():
    """64 query heads in groups of eight attend to eight KV heads, [context, heads, batch, width]."""
    function, (q, keys, values) = one_device("decode_attention", activations="f32", kv="fp8", batch=2, context=6)
    assert (q.shape, q.dtype) == ((2, 8, 8, 128), np.float32)
    assert (keys.shape, keys.dtype) == (values.shape, values.dtype) == ((6, 8, 2, 128), jnp.float8_e4m3fn)
    mixed, q, seen, said = (np.asarray(each, np.float64) for each in (function(q, keys, values), q, keys, values))
    scores = softmax(np.einsum("bkgh,skbh->bkgs", q, seen) / np.sqrt(128))
    np.testing.assert_allclose(mixed, np.einsum("bkgs,skbh->bkgh", scores, said), atol=1e-5)


def test_a_prompt_attends_to_its_own_past():
    """Eight heads, each token to itself and those before it; the kernel takes the same arguments."""
    fields = dict(activations="f32", batch=2, context=6)
    function, given = one_device("prefill_attention", layout="naive", **fields)
    q, k, v = (np.asarray(each, np.float64) for each in given)
    expected = np.zeros((2, 8, 6, 128))
    for t in range(6):
        scores = np.einsum("bhd,bhsd->bhs", q[:, :, t], k[:, :, : t + 1]) / np.sqrt(128)
        expected[:, :, t] = np.einsum("bhs,bhsd->bhd", softmax(scores), v[:, :, : t + 1])
    np.testing.assert_allclose(function(*given), expected, atol=1e-5)


@pytest.mark.parametrize(("program", "columns"), [("matmul", 32_768), ("weights", 28_672)])
def test_a_matrix_product_is_summed_wide_and_rounded_once(program, columns):
    """Shapes as told; integers are summed in 32 bits, and narrow weights are what they stand for."""
    wide, narrow = jnp.bfloat16, {"int8": 100, "int4": 7, "int2": 1, "fp8": 1.5, "fp4": 1.5, "bf16": 1.5}
    for kind, value in narrow.items():
        given = "int8" if kind == "int8" else "bf16"
        asked = SimpleNamespace(slice="1", chip="v5e", weights=kind, activations=given, batch=16)
        function, (x, matrix), overwritten = getattr(programs, program)(asked)
        assert (x.shape, x.dtype) == ((16, 8192), programs.TYPES[given])
        assert (matrix.shape, matrix.dtype, overwritten) == ((8192, columns), programs.TYPES[kind], ())
        one, other = jnp.full((2, 8192), 100, x.dtype), jnp.full((8192, 3), value, matrix.dtype)
        product = function(one, other)
        assert product.dtype == wide
        np.testing.assert_array_equal(product, np.full((2, 3), 100 * value * 8192).astype(wide))
        [dot] = [each for each in jax.make_jaxpr(function)(one, other).eqns if each.primitive.name == "dot_general"]
        assert dot.outvars[0].aval.dtype == (jnp.int32 if kind == "int8" else jnp.float32)


@pytest.mark.parametrize(("n_experts", "top_k"), [(8, 2), (32, 5)])
def test_experts_are_the_mixture_of_each_token(n_experts, top_k):
    """The chosen experts' outputs, weighted by a softmax over the chosen logits; of the model's last block."""
    mixture = Block("mixture", 1, GQA(N, 4, H), FFN(12, n_experts, top_k))
    model = Model("small", D, V, (Block("dense", 1, GQA(N, 4, H), FFN(F)), mixture))
    asked = SimpleNamespace(architecture=model, slice="2x4", chip="v5e", weights="f32", batch=16)
    function, abstract, overwritten = programs.experts(asked)
    sizes = (16, D), (D, n_experts), (n_experts, D, 12), (n_experts, D, 12), (n_experts, 12, D)
    assert (tuple(each.shape for each in abstract), overwritten) == (sizes, ())
    rng = np.random.default_rng(5)
    given = [(rng.normal(size=size) * (D**-0.5 if i else 1)).astype(np.float32) for i, size in enumerate(sizes)]
    put = [jax.device_put(each, like.sharding) for each, like in zip(given, abstract, strict=True)]
    x, router, gate, up, down = (each.astype(np.float64) for each in given)
    expected = np.zeros_like(x)
    for token, logits in enumerate(x @ router):
        chosen = np.argsort(-logits)[:top_k]
        for expert, weight in zip(chosen, softmax(logits[chosen]), strict=True):
            hidden = silu(x[token] @ gate[expert]) * (x[token] @ up[expert])
            expected[token] += weight * (hidden @ down[expert])
    np.testing.assert_allclose(jax.jit(function)(*put), expected, atol=1e-5)


def test_experts_send_room_for_every_token():
    """Each of eight devices sends all of its tokens to all others, and back, whatever the routing."""
    model = Model("small", D, V, (Block("mixture", 1, GQA(N, 4, H), FFN(12, 8, 2)),))
    function, abstract, _ = programs.experts(
        SimpleNamespace(architecture=model, slice="2x4", chip="v5e", weights="f32", batch=16)
    )
    found = hlo.collectives(jax.jit(function).lower(*abstract).compile().as_text())
    assert found == 2 * [hlo.Collective("all-to-all", 8, 8 * (8 * 2 * D * 4))]
