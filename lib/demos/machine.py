"""What this machine does: its own read and matmul rates, the passes it runs, and what XLA counts in them.

A pass is a decode step, or a prompt: any number of new tokens a sequence. Calibration runs programs of its own (a
reduction, one matmul, one attention), never a pass, so a prediction made from its rates has no number fitted to the
pass. Times depend on the machine and its load; counts do not.
"""

import os
import time
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from lib.demos import transformer

# Short contexts in growing batches show the knee; the long ones show the KV cache.
POINTS = tuple((batch, 64) for batch in (1, 2, 4, 8, 16, 32, 64, 128))
POINTS += ((2, 2048), (8, 1024), (16, 1024), (4, 4096))
KV_POINT = (16, 512)  # batch and context of the attention that calibrates KV reads: the middle of the contexts above


@dataclass(frozen=True)
class Machine:
    """Rates of a machine for one `Shape`: reading weights and reading KV in B/s, multiplying large batches in FLOP/s.

    `memory` is its capacity in B, `format` what it keeps weights and cache in ("f32" or "bf16"), `itemsize` that in B.
    """

    name: str
    memory: int
    bandwidth: float
    kv_bandwidth: float
    flops: float
    format: str
    itemsize: int

    def chip(self):
        """This machine as the cost model describes one: a `lib.chips.Chip` alone, whose network is never used."""
        from lib.chips import Chip
        from lib.network import Switch

        rates = {"kv_bandwidth": self.kv_bandwidth, self.format: self.flops}
        return Chip(self.name, self.memory, self.bandwidth, Switch(1.0, 0.0, domain=1), **rates)


@dataclass(frozen=True)
class Step:
    """The median time of one measured pass: batch sequences, caches of context tokens, the last `new` of them new, seconds."""

    batch: int
    context: int
    seconds: float
    new: int = 1


@dataclass(frozen=True)
class Counts:
    """What XLA counts in one compiled pass: FLOPs, and bytes accessed, aliased (donated) and temporary."""

    flops: float
    accessed: float
    aliased: int
    temporary: int


@dataclass(frozen=True)
class Case:
    """One line of the referee's table: XLA's count beside the formula's, and why they agree or not."""

    case: str
    counted: float
    formula: float
    why: str

    @property
    def ratio(self):
        """Counted over formula; 1 is agreement."""
        return self.counted / self.formula


def calibrate(shape, rounds=9):
    """Measure this machine's three rates without running any pass.

    shape: a `Shape`, which sets the sizes read and multiplied and the query heads per KV head. Returns a `Machine`.
    """
    programs = _programs(shape, transformer.init(shape))
    return _machine([_once(programs) for _ in range(rounds)], programs)


def sweep(shape, points=POINTS, rounds=4, seed=0):
    """Measure passes, with the calibration programs run between them so that both see the same machine.

    points: (batch, context) for a decode step, (batch, context, new) for the last `new` tokens of the context at once.
    Each round times every point twice and calibrates after each point. Returns (Machine, [Step, ...] in the order of
    points), medians all. Raises ValueError when a point is not positive or new exceeds its context.
    """
    params = transformer.init(shape, seed)
    programs = _programs(shape, params)
    points = [(*point, 1)[:3] for point in points]
    caches = {point: transformer.empty_cache(shape, *point[:2]) for point in points}

    def once(point):
        batch, context, new = _checked(*point)
        tokens, position = jnp.zeros((batch, new), jnp.int32), jnp.int32(context - new)
        elapsed, (_, caches[point]) = timed(transformer.next_token, params, shape, caches[point], tokens, position)
        return elapsed

    for point in points:
        once(point)
    calibrations, measured = [], {point: [] for point in points}
    for _ in range(rounds):
        for point in points:
            measured[point] += [once(point), once(point)]
            calibrations.append(_once(programs))
    steps = [Step(batch, context, float(np.median(measured[batch, context, new])), new) for batch, context, new in points]
    return _machine(calibrations, programs), steps


def knee(batches, seconds):
    """The batch at which the flat part of a step's time meets the linear part.

    batches and seconds: matching sequences at one context, three flat points or more at the small end. The flat level
    is the median of the three smallest batches, the line runs through the origin and the largest. The same function
    reads measured and predicted times. Raises ValueError with fewer than four points.
    """
    if len(batches) < 4:
        raise ValueError(f"a knee needs at least four batches, not {len(batches)}")
    ordered = sorted(zip(batches, seconds, strict=True))
    flat = float(np.median([time for _, time in ordered[:3]]))
    largest, slowest = ordered[-1]
    return flat * largest / slowest


def xla_counts(shape, batch, context, new=1):
    """Compile one pass without running it and return XLA's `Counts`.

    batch: sequences, context: length of the cache, which holds the `new` tokens of each too: 1 is a decode step. Raises
    ValueError unless all are positive and new is at most context.
    """
    _checked(batch, context, new)
    params, cache = jax.eval_shape(lambda: (transformer.init(shape), transformer.empty_cache(shape, batch, context)))
    tokens, position = jax.ShapeDtypeStruct((batch, new), jnp.int32), jax.ShapeDtypeStruct((), jnp.int32)
    compiled = transformer.next_token.lower(params, shape, cache, tokens, position).compile()
    cost, memory = compiled.cost_analysis(), compiled.memory_analysis()
    return Counts(cost["flops"], cost["bytes accessed"], memory.alias_size_in_bytes, memory.temp_size_in_bytes)


def referee():
    """Where XLA's count can be trusted and where it misleads: a list of `Case`, computed by compiling, never by timing.

    The ratios are those of an XLA compile for a CPU; elsewhere the bf16 case is fair.
    """
    f32, bf16 = jnp.float32, jnp.bfloat16
    width, batch, layers, length, vocab = 1024, 8, 10, 2048, 4096

    def matmul(weights, x):
        return weights @ x

    def through_layers(stacked, x):
        return jax.lax.scan(lambda x, weights: (weights @ x, None), x, stacked)[0]

    def write(cache, new, position):
        return jax.lax.dynamic_update_slice(cache, new, (position, 0))

    def gather(table, rows):
        return table[rows]

    product = 2 * width * width * batch
    column, square = (width, batch), (width, width)
    one_matmul = _cost(matmul, (square, f32), (column, f32))
    scanned = _cost(through_layers, ((layers, *square), f32), (column, f32))
    narrow = _cost(matmul, (square, bf16), (column, bf16))
    update = ((length, width), f32), ((1, width), f32), ((), jnp.int32)
    gathered = _cost(gather, ((vocab, width), f32), ((batch,), jnp.int32))
    rows = 4 * (batch + 2 * batch * width)
    return [
        Case("f32 matmul, FLOPs", one_matmul["flops"], product, "multiply and add count as two"),
        Case("f32 matmul, bytes", one_matmul["bytes accessed"], 4 * (width * width + 2 * width * batch),
             "every operand once, the result once"),
        Case("scan over 10 layers, FLOPs", scanned["flops"], layers * product,
             "a loop's body is counted once, whatever its trip count"),
        Case("bf16 matmul on a CPU, bytes", narrow["bytes accessed"], 2 * (width * width + 2 * width * batch),
             "the matrix is converted to f32: 2 bytes read, 4 written, 4 read again"),
        Case("cache write, donated, bytes", _cost(write, *update, donate=0)["bytes accessed"], 2 * 4 * width,
             "the new token is read and written in place"),
        Case("cache write, not donated, bytes", _cost(write, *update)["bytes accessed"], 2 * 4 * width,
             "the whole cache is copied, which the machine really does"),
        Case("embedding gather, bytes", gathered["bytes accessed"], rows,
             "the whole table is charged, though only the rows asked for are read"),
    ]


def _checked(batch, context, new):
    if not 1 <= new <= context:
        raise ValueError(f"a cache of {context} tokens has room for 1 to {context} new ones, not {new}")
    return batch, context, new


def _cost(function, *operands, donate=()):
    operands = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in operands]
    return jax.jit(function, donate_argnums=donate).lower(*operands).compile().cost_analysis()


def _programs(shape, params):
    """The calibration programs: name -> ((function, operands...), work in bytes or FLOPs)."""
    large = 128 if jax.default_backend() == "cpu" else 4096  # far above any critical batch
    weights, matrix = jax.tree.leaves(params), params["layers"][0]["gate_up"]
    batch, context = KV_POINT
    keys, values = transformer.empty_cache(shape, batch, context)[0]
    groups = shape.n_heads // shape.n_kv_heads
    query = jnp.ones((batch, shape.n_kv_heads, groups, 1, shape.d_head), keys.dtype)
    columns = jnp.ones((shape.d_model, large), matrix.dtype)
    programs = {
        "bandwidth": ((jax.jit(_read), weights), sum(each.nbytes for each in weights)),
        "flops": ((jax.jit(jnp.matmul), matrix, columns), 2 * matrix.size * large),
        "kv_bandwidth": ((jax.jit(transformer.attention), query, keys, values), keys.nbytes + values.nbytes),
    }
    _once(programs)  # compiles them
    return programs


def _once(programs):
    """Seconds of one run of every calibration program, by name."""
    return {name: timed(*program)[0] for name, (program, _) in programs.items()}


def _read(arrays):
    return [each.max() for each in arrays]


def timed(function, *operands):
    """Seconds of one call, until its result is there, and the result."""
    start = time.perf_counter()
    result = jax.block_until_ready(function(*operands))
    return time.perf_counter() - start, result


def _machine(calibrations, programs):
    rates = {name: work / float(np.median([each[name] for each in calibrations]))
             for name, (_, work) in programs.items()}
    device, dtype = jax.devices()[0], transformer.dtype()
    host = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    memory = (device.memory_stats() or {}).get("bytes_limit", host)
    name = {"float32": "f32", "bfloat16": "bf16"}[dtype.name]
    return Machine(device.device_kind, memory, format=name, itemsize=dtype.itemsize, **rates)
