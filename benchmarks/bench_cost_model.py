"""Speed of the cost model, warm. Absolute times depend on the machine; the figures to quote are the rates per core.

Run with `make bench`. Targets: 4 million configurations a second through `decode_step` on one core, 2 million where the plan is
swept too, 50 million jitted on two, 0.3 ms for a scalar step, 1 s for `explain`, 0.1 s for `import lib`."""

import statistics
import subprocess
import sys
import time
import tracemalloc

import jax
import numpy as np

from lib import Plan, Server, chip, decode_step, explain, model

SERVER = Server(model("llama-3-70b"), chip("ironwood"), Plan(tensor=8))
WAYS = 2 ** (np.arange(1_000_000) % 7)          # 1 to 64 tensor ways, beside batches from 1 on
BATCH, CONTEXT = (axis.astype(float).ravel() for axis in np.meshgrid(np.arange(1, 1001), np.arange(128, 128_001, 128)))


def test_sweep_of_a_million_configurations(benchmark):
    """Distinct (batch, context) pairs through the whole tree, NumPy, one core."""
    assert len(BATCH) == 1_000_000
    benchmark.pedantic(decode_step, (SERVER, BATCH, CONTEXT), rounds=7, warmup_rounds=3)
    benchmark.extra_info["million_per_second"] = round(1e-6 * len(BATCH) / benchmark.stats["median"], 1)


def sweep_of_plans(batch, tensor):
    """A server that is all of these plans at once, and its step."""
    return decode_step(Server(SERVER.model, SERVER.chip, Plan(tensor=tensor)), batch, 8192)


def test_sweep_of_a_million_plans(benchmark):
    """Distinct (batch, tensor) pairs, server and slices of the network included, NumPy, one core."""
    batch = 1.0 + np.arange(len(WAYS)) // 7
    benchmark.pedantic(sweep_of_plans, (batch, WAYS), rounds=7, warmup_rounds=3)
    benchmark.extra_info["million_per_second"] = round(1e-6 * len(WAYS) / benchmark.stats["median"], 1)


def test_sweep_of_a_million_configurations_jitted(benchmark):
    """The same through jax.jit, as many cores as XLA takes."""
    with jax.enable_x64(True):
        step = jax.jit(lambda batch, context: decode_step(SERVER, batch, context).value)
        batch, context = jax.numpy.asarray(BATCH), jax.numpy.asarray(CONTEXT)
        benchmark.pedantic(lambda: step(batch, context).block_until_ready(), rounds=20, warmup_rounds=3)
    benchmark.extra_info["million_per_second"] = round(1e-6 * len(BATCH) / benchmark.stats["median"], 1)


def test_one_step(benchmark):
    """One scalar configuration, the whole tree."""
    benchmark(decode_step, SERVER, 64, 32_768)


def test_explain(benchmark):
    """The same configuration with its formulas."""
    benchmark(explain, decode_step, server=SERVER, batch=64, context=32_768)


def test_import(benchmark):
    """A fresh interpreter that imports `lib`, less one that imports nothing: read the difference of the two rows."""
    benchmark.pedantic(subprocess.run, ([sys.executable, "-c", "import lib"],), {"check": True}, rounds=7, warmup_rounds=2)


def test_bare_interpreter(benchmark):
    """A fresh interpreter that imports nothing."""
    benchmark.pedantic(subprocess.run, ([sys.executable, "-c", "pass"],), {"check": True}, rounds=7, warmup_rounds=2)


def test_memory_of_a_sweep():
    """A million configurations stay under 1 GB at their peak."""
    tracemalloc.start()
    decode_step(SERVER, BATCH, CONTEXT)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    print(f"peak memory of the sweep: {peak / 1e6:.0f} MB")
    assert peak < 1e9


def test_ratios():
    """What does not depend on the machine: ways to do the same work, timed in turn, and the ratio of their medians."""
    with jax.enable_x64(True):
        step = jax.jit(lambda batch, context: decode_step(SERVER, batch, context).value)
        batch, context = jax.numpy.asarray(BATCH), jax.numpy.asarray(CONTEXT)
        ways = {"scalar": (lambda: [decode_step(SERVER, 64, 32_768) for _ in range(100)], 100),
                "NumPy": (lambda: decode_step(SERVER, BATCH, CONTEXT), len(BATCH)),
                "jax.jit": (lambda: step(batch, context).block_until_ready(), len(BATCH))}
        times = {name: [] for name in ways}
        for _ in range(9):
            for name, (work, _) in ways.items():
                start = time.perf_counter()
                work()
                times[name].append(time.perf_counter() - start)
    rates = {name: ways[name][1] / statistics.median(seconds[2:]) for name, seconds in times.items()}
    for name, rate in rates.items():
        print(f"{name:8} {rate:14,.0f} configurations a second, {rate / rates['scalar']:9,.0f} times a scalar call")
