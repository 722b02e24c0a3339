"""The closed forms of the source chapter for decode, one function a formula; numbers or arrays in, Breakdown out.

`chip` is a Chip, `n` how many share the work, `params` a count, `kv` the bytes that one sequence keeps. Formats are names."""

from .breakdown import slowest, term, total
from .elementwise import positive
from .formats import format


def critical_batch(chip, weights="bf16", math="bf16"):
    """Tokens in a pass from which a wide matmul waits for arithmetic instead of its weights: (b/2) C/W.

    ValueError if the chip does not multiply `math`. Source: formula 1.4 of the source chapter."""
    return term("critical batch", format(weights).bytes / 2 * chip.peak(math) / chip.hbm_bandwidth, "tokens")


def exact_critical_batch(chip, d_in, d_out, weights="bf16", math="bf16", activations="bf16"):
    """The critical batch of one [d_in x d_out] matrix with its activations read and written: larger, the smaller the matrix.

    ValueError if the matrix is too small to be compute-bound at any batch. Source: formula 1.4 solved for finite sizes."""
    b, a, ridge = format(weights).bytes, format(activations).bytes, chip.peak(math) / chip.hbm_bandwidth
    d_in, d_out = positive("d_in", d_in), positive("d_out", d_out)
    surplus = 2 * d_in * d_out / ridge - a * (d_in + d_out)
    try:
        positive("surplus", surplus)
    except ValueError:
        raise ValueError(f"a [{d_in} x {d_out}] matmul is not compute-bound at any batch on {chip.name}: "
                         f"its activations alone take longer than its arithmetic") from None
    return term("critical batch", b * d_in * d_out / surplus, "tokens")


def attention_intensity(group, context, new=1, kv="bf16", activations="bf16"):
    """FLOPs per HBM byte of decode attention with `group` query heads per KV head: 2 G T / b_kv for long contexts.

    `new` tokens of one sequence share the read of the cache. Source: Scaling Book chapter 4."""
    group, context, new = positive("group", group), positive("context", context), positive("new", new)
    flops = 4 * new * group * context
    return term("intensity", flops / (2 * format(kv).bytes * context + 2 * format(activations).bytes * group * new), "FLOP/B")


def step_time(chip, n, params, kv, batch, weights="bf16", math="bf16"):
    """Seconds of a decode step: every cache is read, and every weight is read or multiplied, whichever takes longer.

    Source: formula 7.2 of the source chapter; the two terms follow one another, nothing else takes time."""
    n, params, kv, batch = _sizes(n, params, kv, batch)
    return total("step",
        slowest("attention", term("memory", batch * kv / (n * chip.cache_bandwidth))),
        slowest("matmuls", term("compute", 2 * batch * params / (n * chip.peak(math))),
                           term("memory", format(weights).bytes * params / (n * chip.hbm_bandwidth))))


def step_floor(chip, n, params, kv, batch, weights="bf16"):
    """Seconds that no decode step can beat: every cache and every weight once over the HBM. Source: lower bound of 7.2."""
    n, params, kv, batch = _sizes(n, params, kv, batch)
    return total("bytes over bandwidth",
        term("weights", format(weights).bytes * params / (n * chip.hbm_bandwidth)),
        term("KV cache", batch * kv / (n * chip.cache_bandwidth)))


def saturation_throughput(chip, n, kv):
    """Tokens per second that decode approaches as the batch grows, if arithmetic costs nothing: whole caches read, X W / KV."""
    return term("saturation throughput", positive("n", n) * chip.cache_bandwidth / positive("kv", kv), "tok/s")


def half_throughput_batch(params, kv, weights="bf16"):
    """Sequences at which a bandwidth-bound decode reaches half its saturation throughput: caches then weigh as much as the
    weights, b P / KV. No chip appears in it."""
    return term("half-throughput batch", format(weights).bytes * positive("params", params) / positive("kv", kv), "sequences")


def _sizes(n, params, kv, batch):
    return positive("n", n), positive("params", params), positive("kv", kv), positive("batch", batch)
