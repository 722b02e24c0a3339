"""Speed of the simulation: 100,000 requests of 2,048 + 256 tokens, 70B on 8 Ironwood at batch up to 64, on one core.

Run with `make bench`. Target: a minute. `steps_per_second` are passes of all servers; `us_per_step` is their price, and the
share of simpy is what as many bare timeouts of one process cost. No test is decided by a time."""

import time

import pytest

from lib import Plan, Server, chip, model
from lib.goodput import at_rate
from lib.passes import Passes
from lib.serving import colocated, disaggregated
from lib.simulation import simulate
from lib.steady import capacity
from lib.workload import Workload

SERVER = Server(model("llama-3-70b"), chip("ironwood"), Plan(tensor=8, page=16))
COUNT, WORKLOAD, SLOTS, LOAD = 100_000, Workload(2048, 256, 1.0), 64, 0.9
SERVICES = {
    "prefill first": lambda: colocated(SERVER, WORKLOAD, slots=SLOTS),
    "decode first": lambda: colocated(SERVER, WORKLOAD, policy="decode first", slots=SLOTS),
    "chunked": lambda: colocated(SERVER, WORKLOAD, policy="chunked", budget=512, slots=SLOTS),
    "apart": lambda: disaggregated(SERVER, SERVER, WORKLOAD, (2, 1), slots=SLOTS),
}


def loaded(name):
    """The service at nine tenths of what it can take."""
    service = SERVICES[name]()
    return at_rate(service, LOAD * capacity(service).value)


@pytest.mark.parametrize("name", SERVICES)
def test_a_hundred_thousand_requests(benchmark, name):
    """Every policy once, tables included."""
    run = benchmark.pedantic(simulate, (loaded(name), COUNT), rounds=1)
    seconds = benchmark.stats["median"]
    assert COUNT == len(run.rows) and COUNT * 256 == run.steps["decoding"].sum()
    benchmark.extra_info.update(steps=len(run.steps), steps_per_second=round(len(run.steps) / seconds),
                                us_per_step=round(1e6 * seconds / len(run.steps), 2), mean_batch=round(run.batch, 1))


def test_tables(benchmark):
    """What a simulation looks up, made anew: chunks of up to 512 tokens, contexts of up to 2,304."""
    benchmark(Passes, loaded("chunked"), 2304)


def test_shares():
    """Where the time of a step goes: 20,000 requests, as many bare timeouts of simpy, as many look-ups."""
    import simpy
    service = loaded("prefill first")
    passes = Passes(service, 2304)
    start = time.perf_counter()
    run = simulate(service, COUNT // 5, passes=passes)
    whole, steps = time.perf_counter() - start, len(run.steps)
    env = simpy.Environment()

    def ticking():
        for _ in range(steps):
            yield env.timeout(1.0)
    env.process(ticking())
    start = time.perf_counter()
    env.run()
    ticks = time.perf_counter() - start
    start = time.perf_counter()
    for i in range(steps):
        passes.step(1 + i % SLOTS, 2048.5 + i % 256)
    looks = time.perf_counter() - start
    print(f"a step: {1e6 * whole / steps:.2f} us, of which simpy's clock {1e6 * ticks / steps:.2f} ({ticks / whole:.0%}), "
          f"tables {1e6 * looks / steps:.2f} ({looks / whole:.0%}); without simpy {steps / (whole - ticks):,.0f} steps a second")
