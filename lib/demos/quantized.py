"""The demo transformer quantized by rules: Qwix exchanges products while JAX traces them, and leaves those it does not know.

A rule names modules by their path and formats for their weights and activations; which products it caught, the traced
program tells by the types of their operands. Counts, bytes and types do not depend on the machine.
"""

import functools
from collections import Counter
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
import qwix
from flax import nnx
from jax.experimental import pallas

from lib.demos import machine, transformer

MATRICES = r"layers/\d+/\w+"  # the paths of the four matrices of each layer: not attention, embedding or head
FORMATS = {"int8": jnp.int8, "fp8": jnp.float8_e4m3fn, "int4": jnp.int4}
SHORT = {"float32": "f32", "float8_e4m3fn": "fp8"}  # what products and weights are called


def rule(weights, activations=None, path=MATRICES, **how):
    """A `qwix.QuantizationRule` for modules at a path, a regular expression: "int8", "fp8" or "int4" weights and activations.

    Without activations only weights are quantized, one scale an output; with them both, one scale a token, from its
    largest value (dynamic range). act_static_scale=True takes one scale for all tokens instead, from the sample that the
    model is quantized with. tile_size=32 gives every 32 weights a scale. Raises ValueError for another format.
    """
    if weights not in FORMATS or activations not in {*FORMATS, None}:
        raise ValueError(f"formats are {', '.join(FORMATS)}, not {weights!r} and {activations!r}")
    kinds = FORMATS[weights], activations and FORMATS[activations]
    return qwix.QuantizationRule(module_path=path, weight_qtype=kinds[0], act_qtype=kinds[1], **how)


STATIC = dict(act_static_scale=True, act_batch_axes=(0, 1))  # activations are [batch, tokens, features]
SCHEMES = {
    "int8 weights": rule("int8"),
    "int8 both, dynamic": rule("int8", "int8"),
    "int8 both, static": rule("int8", "int8", **STATIC),
    "int8 both, static, twice the range": rule("int8", "int8", act_calibration_method="absmax,2", **STATIC),
    "fp8 weights": rule("fp8"),
    "fp8 both, dynamic": rule("fp8", "fp8"),
    "int4 weights": rule("int4"),
    "int4 weights, tiles of 32": rule("int4", tile_size=32),
}


def einsum(x, weight):
    """x [..., in] times weight [out, in]: [..., out]."""
    return jnp.einsum("...i,oi->...o", x, weight)


class Product(nnx.Module):
    """One weight and the function that multiplies with it, as a module: rules find it by its path."""

    def __init__(self, weight, function=einsum):
        self.weight, self.function = nnx.Param(weight), function

    def __call__(self, x):
        return self.function(x, self.weight[...])


class Layer(nnx.Module):
    """A layer of `transformer`, its matrices modules and its attention not: [batch, tokens, d_model] to the same."""

    def __init__(self, shape, matrices):
        self.shape = shape
        for name, matrix in matrices.items():
            setattr(self, name, Product(matrix))

    def __call__(self, x, turns, visible):
        shape, (batch, new, _) = self.shape, x.shape
        heads = self.qkv(transformer._norm(x, -1)).reshape(batch, new, -1, shape.d_head).transpose(2, 3, 0, 1)
        q, k, v = jnp.split(heads, [shape.n_heads, shape.n_heads + shape.n_kv_heads])
        q, k = transformer._rotate(q, turns), transformer._rotate(k, turns)
        q = q.reshape(shape.n_kv_heads, -1, shape.d_head, batch, new).transpose(3, 0, 1, 4, 2)
        mixed = transformer.attention(q, k.transpose(2, 0, 1, 3), v.transpose(2, 0, 3, 1), visible)
        x = x + self.out(mixed.transpose(0, 3, 1, 2, 4).reshape(batch, new, -1))
        gate, up = jnp.split(self.gate_up(transformer._norm(x, -1)), 2, -1)
        return x + self.down(jax.nn.silu(gate) * up)


class Decoder(nnx.Module):
    """What `transformer.full_forward` computes, as modules that rules can name: tokens [batch, length] to logits.

    The embedding is looked up in one module and is the output head in another: a rule for "head" quantizes a copy.
    """

    def __init__(self, shape, params):
        self.shape = shape
        self.layers = nnx.List([Layer(shape, matrices) for matrices in params["layers"]])
        self.head = Product(params["embedding"])
        self.embedding = self.head.weight

    def __call__(self, tokens):
        positions = jnp.arange(tokens.shape[1])
        turns, visible = transformer._turns(self.shape, tokens.shape[1], positions), positions <= positions[:, None]
        x = self.embedding[...][tokens]
        for layer in self.layers:
            x = layer(x, turns, visible)
        return self.head(transformer._norm(x, -1))


def quantize(model, rules, sample):
    """A quantized copy of a module, made by running it once on a sample of its input.

    rules: a rule or a list of them, the first that fits counts. Raises ValueError when a rule met no product: Qwix says
    nothing then and leaves the model as it was.
    """
    provider = qwix.PtqProvider([rules] if isinstance(rules, qwix.QuantizationRule) else rules)
    quantized = qwix.quantize_model(model, provider, sample)
    unused = provider.get_unused_rules()
    if unused:
        raise ValueError(f"no product that Qwix intercepts is under the paths {[each.module_path for each in unused]}")
    return quantized


@nnx.jit
def logits(model, tokens):
    """A module's output for tokens [batch, length], compiled: [batch, length, vocab] in f32."""
    return model(tokens)


def products(function, *inputs):
    """The products in the program that JAX traces for a function: a Counter of "int8 x int8 -> int32" and the like."""
    return Counter(_products(jax.make_jaxpr(function)(*inputs)))


def _products(program):
    for equation in program.eqns:
        if equation.primitive.name in ("dot_general", "ragged_dot_general", "conv_general_dilated"):
            left, right, result = (_named(each.aval) for each in (*equation.invars[:2], *equation.outvars))
            yield f"{left} x {right} -> {result}"
        for inner in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda each: hasattr(each, "eqns")):
            if hasattr(inner, "eqns"):
                yield from _products(inner)


def _named(array):
    return SHORT.get(str(array.dtype), str(array.dtype))


def stored(arrays):
    """Bytes of the arrays of a tree or module, packed: XLA's count of what a program takes.

    `nbytes` would charge a byte for a 4-bit value.
    """
    arrays = nnx.state(arrays) if isinstance(arrays, nnx.Module) else arrays
    compiled = jax.jit(lambda arrays: None, keep_unused=True).lower(arrays).compile()
    return compiled.memory_analysis().argument_size_in_bytes


@dataclass(frozen=True)
class Quality:
    """How far next-token distributions are from those of a reference, on a text, means over its tokens.

    `divergence`: Kullback-Leibler, of the reference from the quantized, in nats; `change`: of the nats a token that the
    text costs; `agreement`: the share of tokens whose likeliest successor is the same.
    """

    divergence: float
    change: float
    agreement: float


def quality(reference, quantized, text):
    """The `Quality` of logits [..., length, vocab] against reference logits, on the text's next tokens [..., length]."""
    logits = (np.asarray(each, np.float64) for each in (reference, quantized))
    p, q = (each - np.logaddexp.reduce(each, -1, keepdims=True) for each in logits)
    divergence = (np.exp(p) * (p - q)).sum(-1).mean()
    change = np.take_along_axis(p - q, np.asarray(text)[..., None], -1).mean()
    return Quality(float(divergence), float(change), float((p.argmax(-1) == q.argmax(-1)).mean()))


def kernel(x, weight):
    """x [tokens, in] times weight [out, in] in a Pallas kernel, interpreted: [tokens, out]."""

    def multiply(x, weight, result):
        result[...] = einsum(x[...], weight[...])

    shape = jax.ShapeDtypeStruct((x.shape[0], weight.shape[0]), x.dtype)
    return pallas.pallas_call(multiply, out_shape=shape, interpret=True)(x, weight)


TOKENS, IN, OUT, EXPERTS = 12, 40, 24, 4
SPELLINGS = {  # of a product: (function, shape of its weight)
    "jax.lax.dot_general": (lambda x, w: jax.lax.dot_general(x, w, (((1,), (1,)), ((), ()))), (OUT, IN)),
    "jnp.einsum": (einsum, (OUT, IN)),
    "conv_general_dilated": (lambda x, w: jax.lax.conv_general_dilated(x[..., None], w, (1,), "VALID")[..., 0], (OUT, IN, 1)),
    "ragged_dot": (lambda x, w: jax.lax.ragged_dot(x, w, jnp.full(EXPERTS, TOKENS // EXPERTS)), (EXPERTS, IN, OUT)),
    "in a Pallas kernel": (kernel, (OUT, IN)),
    "@, traced before": (lambda x, w: x @ w.T, (OUT, IN)),
}


def intercepted(provider=qwix.PtqProvider):
    """What a provider makes of one product in int8, by how it is spelled: {spelling: (products, formats of the weight)}.

    The products are those of `products`. Each spelling has run unquantized before.
    """
    rng, found = np.random.default_rng(0), {}
    x = jnp.asarray(rng.integers(-9, 10, (TOKENS, IN)), jnp.float32)
    for name, (function, shape) in SPELLINGS.items():
        model = Product(jnp.asarray(rng.integers(-9, 10, shape), jnp.float32), function)
        model(x)
        after = qwix.quantize_model(model, provider([rule("int8", "int8", path=".*")]), x)
        found[name] = products(after, x), sorted({_named(each) for each in jax.tree.leaves(nnx.state(after))})
    return found


@dataclass(frozen=True)
class Read:
    """One product of a matrix and a batch, compiled: bytes of the matrix as stored, accessed and temporary by XLA's count.

    `run()` computes it.
    """

    stored: int
    accessed: float
    temporary: int
    run: object


def reads(schemes, rows=8192, columns=4096, batch=8):
    """One matrix [rows, columns] times a batch under each rule of `schemes`, for this machine: {name: `Read`}, "f32" first.

    Whatever path a rule names, it is applied.
    """
    integers = np.random.default_rng(0).integers(-127, 128, (rows, columns), dtype=np.int8)
    plain = Product(jnp.asarray(integers, jnp.float32), lambda x, w: jnp.einsum("ib,oi->ob", x, w))
    x, found = jnp.ones((columns, batch)), {}
    for name, each in {"f32": None, **schemes}.items():
        model = quantize(plain, replace(each, module_path=".*"), x) if each else plain
        definition, state = nnx.split(model)
        compiled = jax.jit(lambda state, x, like=definition: nnx.merge(like, state)(x)).lower(state, x).compile()
        temporary, accessed = compiled.memory_analysis().temp_size_in_bytes, compiled.cost_analysis()["bytes accessed"]
        found[name] = Read(stored(state), accessed, temporary, functools.partial(compiled, state, x))
    return found


def times(found, rounds=7):
    """Median seconds of each `Read`, all of them once in every round: {name: seconds}."""
    seconds = [[machine.timed(each.run)[0] for each in found.values()] for _ in range(rounds)]
    return dict(zip(found, np.median(seconds, 0).tolist(), strict=True))
