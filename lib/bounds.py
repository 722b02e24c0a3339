"""The closed forms of the source chapter, one function a formula; numbers or arrays in, Breakdown out.

`chip` is a Chip, `n` how many share the work, `params` a count, `kv` the bytes that one sequence keeps. Formats are names.
The limits of sharding are about one [d_in x d_out] matrix cut along `axes` of a torus, each `wrapped` or not."""

from .breakdown import slowest, term, total
from .elementwise import ceil, maximum, positive
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


def dequantization_limit(chip, weights="int4"):
    """Vector operations per weight that a chip has time for while it reads the weights: more, and unpacking them takes longer
    than the read.

    What is stored in a format that is not multiplied is cast on the vector units first. ValueError where their rate is not
    known. Source: this book, from the vector units of the Scaling Book's chapter 2."""
    if chip.vector is None:
        raise ValueError(f"how fast the vector units of {chip.name} are is not known")
    return term("operations", format(weights).bytes * chip.vector / chip.hbm_bandwidth, "FLOP")


def attention_intensity(group, context, new=1, kv="bf16", activations="bf16"):
    """FLOPs per HBM byte of decode attention with `group` query heads per KV head: 2 G T / b_kv for long contexts.

    `new` tokens of one sequence share the read of the cache. Source: Scaling Book chapter 4."""
    group, context, new = positive("group", group), positive("context", context), positive("new", new)
    flops = 4 * new * group * context
    return term("intensity", flops / (2 * format(kv).bytes * context + 2 * format(activations).bytes * group * new), "FLOP/B")


def step_time(chip, n, params, kv, batch, weights="bf16", math="bf16"):
    """Seconds of a decode step: every cache is read, and every weight is read or multiplied, whichever takes longer.

    `params` are those a step reads: all but the input embedding, of which it looks up rows (1.5 % of a 70B).
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


def prefill_time(chip, n, params, prompt, mfu=1.0, math="bf16"):
    """Seconds in which n chips push `prompt` tokens through every matrix, at the fraction `mfu` of their peak.

    Attention's own arithmetic is left out. ValueError unless mfu is above 0 and at most 1. Source: formula 7.3."""
    n, params, prompt = positive("n", n), positive("params", params), positive("prompt", prompt)
    mfu = positive("mfu", mfu, most=1)
    return term("prefill", 2 * params * prompt / (n * chip.peak(math) * mfu))


def server_ratio(prefill, step, batch, output):
    """Prefill servers that one decode server keeps busy: t_p B / (t_d A), both working without a pause.

    prefill: seconds of one prompt; step: seconds of a decode step of `batch` sequences, that batch and no other; output: tokens
    a request asks for. Servers, not chips: of different sizes, weigh them. Source: the Scaling Book's chapter 8, question 12."""
    asked = positive("prefill", prefill) * positive("batch", batch)
    return term("ratio", asked / (positive("step", step) * positive("output", output)), "P/G")


def evicted_tokens(batch, prompt, output):
    """Tokens of cache that a full decode server frees a step, and takes in again: B/A requests end, each of T + A tokens.

    Source: the Scaling Book's chapter 8."""
    batch, prompt, output = positive("batch", batch), positive("prompt", prompt), positive("output", output)
    return term("evicted", batch * (prompt + output) / output, "tokens")


def attention_parity(params, layers, n_heads, d_head):
    """Prompt tokens at which causal attention takes as many FLOPs as the matrices: 2 L N H T^2 = 2 P T."""
    width = positive("n_heads", n_heads) * positive("d_head", d_head)
    return term("prompt", positive("params", params) / (positive("layers", layers) * width), "tokens")


def latency_bound_bytes(chip, n):
    """Bytes below which a collective among n chips of a ring or a line waits for its hops: n W_1 times the hop latency.

    For large n; the collectives of `network` have the exact (n - 1) / n. Nominal links give 400 kB for 8 v5e, the Scaling
    Book's own (chip("v5e", link_bandwidth="SB")) its 360 kB. Source: Scaling Book chapter 7, appendix C."""
    return term("bytes", positive("n", n) * chip.axis_bandwidth(wrapped=False) * chip.network.hop_latency, "B")


def cut_matrix(chip, d_in, d_out, batch, ways, axes=1, wrapped=True, weights="bf16", activations="bf16"):
    """Seconds of one matrix cut so many ways: its part is read, while one phase of a collective moves its activations.

    n chips on `axes` equal axes have axes n^(1/axes) / 2 hops between the farthest two, twice that less one an axis without
    wraparound. tensor_parallel_limit and latency_limit are where the read meets the other two. Source: formula 7.4 and the
    hop latency that the source chapter states beside it, put together by this book."""
    d_in, d_out, batch, ways = positive("d_in", d_in), positive("d_out", d_out), positive("batch", batch), positive("ways", ways)
    d, sent = positive("axes", axes), format(activations).bytes * batch * d_in
    length = ways ** (1 / d)
    hops = d * length / 2 if wrapped else d * (length - 1)
    return slowest("matrix",
        term("memory", format(weights).bytes * d_in * d_out / (ways * chip.hbm_bandwidth)),
        slowest("phase", term("latency", hops * chip.network.hop_latency),
                         term("bandwidth", sent / (d * chip.axis_bandwidth(wrapped)))))


def tensor_parallel_limit(chip, d_ff, batch, axes=1, wrapped=True, weights="bf16", activations="bf16", matrices=1, collectives=1):
    """Ways to cut an FFN until the bytes of its activations take longer between chips than its weights from HBM: F / (B beta).

    A wrapped axis sends both ways. `matrices` weight matrices are read for every `collectives` phases of activations. The
    hops, which bind earlier at small batches, are in `latency_limit`; both may be asked about more axes than a chip has.
    Source: formula 7.4, for one matrix, one phase and equal bytes."""
    d_ff, batch, axes = positive("d_ff", d_ff), positive("batch", batch), positive("axes", axes)
    read = positive("matrices", matrices) * format(weights).bytes * d_ff / chip.hbm_bandwidth
    sent = positive("collectives", collectives) * format(activations).bytes * batch / (axes * chip.axis_bandwidth(wrapped))
    return term("ways", read / sent, "ways")


def latency_limit(chip, d_in, d_out, axes=1, wrapped=True, weights="bf16", matrices=1, collectives=1):
    """Ways to cut matrices until the hops of their phases take longer than their read: as tensor_parallel_limit, at any batch.

    Without wraparound `explain` cannot solve for it. Source: the hops of cut_matrix."""
    d_in, d_out, d = positive("d_in", d_in), positive("d_out", d_out), positive("axes", axes)
    chip.axis_bandwidth(wrapped)                            # a torus, or nothing here makes sense
    hop = positive("hop_latency", chip.network.hop_latency)
    read = positive("matrices", matrices) * format(weights).bytes * d_in * d_out / chip.hbm_bandwidth
    hops = read / (positive("collectives", collectives) * hop)      # that the whole read is worth, a phase
    length = (2 * hops / d) ** (1 / (d + 1))                # of an axis: (d / 2) length^(d + 1) = hops
    if not wrapped:                                         # d (length - 1) length^d = hops: nearly, then Newton's method
        if hasattr(hops, "free_symbols"):
            raise ValueError("without wraparound the limit has no closed form in letters, only in numbers")
        length = maximum((hops / d) ** (1 / (d + 1)) + 1 / (d + 1), 1)
        for _ in range(5):
            steep = (d + 1) * length**d - d * length ** (d - 1)
            length = (d * length ** (d + 1) - (d - 1) * length**d + hops / d) / steep
    return term("ways", length**d, "ways")


def exchange_parity(chip, d_head, copies, hops=1, kv="bf16"):
    """Tokens in all caches together from which cutting a cache by batch pays, where `copies` chips share a KV head: each then
    reads a part of it, and two all-to-alls of `hops` bring queries there and outputs back.

    Fewer are read faster whole, by every copy. ValueError for fewer than two copies. Source: this book, reads against hops."""
    saved = 2 * positive("d_head", d_head) * format(kv).bytes * (1 - 1 / positive("copies", copies)) / chip.cache_bandwidth
    positive("copies - 1, the chips that would read the same", copies - 1)
    return term("tokens", 2 * positive("hops", hops) * chip.network.hop_latency / saved, "tokens")


def tile_share(chip, columns, rows=None, activations="bf16"):
    """The part of a matrix unit that is filled by a matrix of so many columns, and so many rows of activations: the last tile
    of columns is multiplied whole, and rows come in eights of 32 bits (16 of bf16), so that 1 costs as much as 8.

    `forward` prices nominal peaks and leaves this out. Source: Scaling Book chapter 1; ValueError where the chip's tile is not
    known."""
    if chip.tile == 1:
        raise ValueError(f"the side of {chip.name}'s matrix unit is not known")
    columns, together = positive("columns", columns), 32 / format(activations).bytes
    rows = together if rows is None else positive("rows", rows)
    filled = columns / (ceil(columns / chip.tile) * chip.tile)
    return term("filled", filled * rows / (ceil(rows / together) * together), "")


def arithmetic_limit(chip, d_ff, axes=1, wrapped=True, math="bf16"):
    """Ways to cut an FFN until its activations take longer between chips than its arithmetic, at any large batch: F W_ici / C.

    What bounds tensor parallelism in training and prefill. Source: Scaling Book chapter 5."""
    d_ff, axes = positive("d_ff", d_ff), positive("axes", axes)
    return term("ways", axes * d_ff * chip.axis_bandwidth(wrapped) / chip.peak(math), "ways")


def fsdp_penalty(chip, n, axes=1, wrapped=True):
    """How much longer n chips take to gather the weights from each other than to read their share from HBM: n W / W_ici.

    What FSDP does to a decode step. Source: Scaling Book chapter 7."""
    n, axes = positive("n", n), positive("axes", axes)
    return term("penalty", n * chip.hbm_bandwidth / (axes * chip.axis_bandwidth(wrapped)), "x")


def _sizes(n, params, kv, batch):
    return positive("n", n), positive("params", params), positive("kv", kv), positive("batch", batch)
