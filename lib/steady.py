"""The steady state of a service: how much it can take, how long a request waits for its first token and for each one after.

Requests come independently of each other. Prompts wait for the first of all servers that is free to read, as a router that
knows their queues deals them; sequences are dealt evenly. Decoding is a station that its sequences share equally."""

from dataclasses import dataclass, replace
from functools import lru_cache
from math import exp

from .breakdown import term, total
from .forward import decode_step, mixed
from .queueing import crowd, stable, tail, wait, wait_chance
from .serving import APART, Service, handover, read, transfer


@dataclass(frozen=True)
class Station:
    """What one server does while it decodes n = 1, 2, ... sequences, whatever the rate of requests.

    Seconds of a step, of the passes that a prompt fills, and by which it lengthens the steps of the others, an entry for each n.
    In chunks: `whole` from its first pass to the end of its last, in which `spare` seconds are left for the next prompt;
    `beside`, by which a full chunk lengthens a step. The `variation` of reading; `held`, the seconds that a place is held
    while the cache comes; `output`, the mean tokens."""

    steps: tuple
    reading: tuple
    extra: tuple
    whole: tuple
    spare: tuple
    beside: tuple
    variation: float
    held: float
    output: float


@lru_cache(maxsize=256)
def station(service):
    """The `Station` of a service. Where batches end before prompts are read, answers are taken to have their mean length."""
    if not isinstance(service, Service):
        raise ValueError(f"a steady state is that of a Service, from colocated or disaggregated; got {service!r}")
    return _station(replace(service, workload=replace(service.workload, rate=1.0)))


@lru_cache(maxsize=256)
def _station(service):
    import numpy
    workload, batches = service.workload, numpy.arange(1, service.slots + 1)
    prompts, seconds = workload.prompt, {prompt: read(service, prompt) for prompt in workload.prompt.counts}
    steps, alone = decode_step(service.decode, batches, workload.context).value, prompts.mean(seconds.get)
    reading = whole = alone + 0 * steps
    extra = spare = beside = 0 * steps
    held = 0.0
    if service.policy == APART:
        held = prompts.mean(lambda prompt: handover(service, prompt).value)
    elif service.policy == "chunked":
        new = prompts.mean(lambda prompt: prompt - workload.kept(prompt))
        chunks = numpy.minimum(service.budget - batches, new)
        passes = mixed(service.decode, batches, workload.context, chunks, prompts.mean() - (new + chunks) / 2).value
        count, beside = new / chunks, passes - steps
        reading, extra = count * passes, count * beside
        whole, spare = extra + numpy.ceil(count) * steps, (numpy.ceil(count) - count) * beside
    else:
        extra = reading
    variation = max(prompts.mean(lambda prompt: seconds[prompt] ** 2) / alone**2 - 1, 0) ** 0.5
    columns = (tuple(values.tolist()) for values in (steps, reading, extra, whole, spare, beside))
    return Station(*columns, variation, held, workload.output.mean())


def loads(service):
    """{where: load} of what requests pass: the servers; or prefill servers, link (its busier end) and decode servers. From 1 on a
    queue grows."""
    one, rate, (prefills, decodes), speeds = station(service), service.workload.rate, service.servers, _speeds(service)
    if service.policy != APART:
        readings = [1 / reading for reading in one.reading]
        most = speeds[-1] if speeds[-1] <= readings[-1] else max(map(min, speeds, readings))
        return {"servers": rate / decodes / most}
    moved = service.workload.prompt.mean
    out, into = (moved(lambda prompt, end=end: transfer(service, prompt)[end].value) for end in ("out", "in"))
    return {"prefill servers": rate * one.reading[0] / (prefills * service.lanes),
            "link": rate * max(out / prefills, into / decodes), "decode servers": rate / decodes / speeds[-1]}


def check_load(service):
    """ValueError with the largest of a service's loads where it is 1 or more."""
    where, load = max(loads(service).items(), key=lambda item: item[1])
    stable(load, f" of {where}" if service.policy == APART else "")


def _speeds(service):
    """Requests a second that n = 1, 2, ... sequences on each server stand for."""
    one = station(service)
    return [n / (one.held + one.output * step + n * extra)
            for n, (step, extra) in enumerate(zip(one.steps, one.extra, strict=True), 1)]


def capacity(service):
    """Requests per second that a service can take at most, whatever its workload's own rate is."""
    return term("capacity", service.workload.rate / max(loads(service).values()), "req/s")


def decoding(service):
    """Mean sequences that each decode server decodes together. ValueError for a load of 1 or more."""
    chances, _ = _crowd(service)
    return term("batch", sum(n * p for n, p in enumerate(chances)), "sequences")


def tpot(service):
    """Mean seconds from one token of a request to the next: a step, and how much other prompts lengthen it on the same chips.

    ValueError for a load of 1 or more. Source: Little's law, B = rate x output x TPOT."""
    rate, one, present = service.workload.rate / service.servers[1], station(service), decoding(service).value
    every = (present - rate * one.held) / (rate * one.output)
    delay = rate * _usual(service, one.extra)               # the part of the time that prompts take
    return total("TPOT", term("step", every * (1 - delay)), term("prefill interference", every * delay))


def ttft(service, share=None):
    """Seconds until a request's first token: queue, prefill, transfer, first step; the mean, or what a `share` of requests gets.

    The queue is all that is read before a request's first step but its own prompt, and the wait for a place. A share is of
    that, taken as exponential, with what follows at its mean: for prompts of one length.
    ValueError for a load of 1 or more, and where batches end before prompts are read, for which there is no closed form."""
    if station(service) and service.policy == "decode first":
        raise ValueError("no closed form says how long prompts wait for a batch to end: simulate it")
    chances, waiting = _crowd(service)
    one, gap, (prefills, decodes) = station(service), tpot(service), service.servers
    step = gap["step"].value
    rate, busy = service.workload.rate / decodes, 1 - chances[0]
    reading, whole, spare, beside = (_usual(service, each) for each in (one.reading, one.whole, one.spare, one.beside))
    readers = prefills * service.lanes if service.policy == APART else decodes
    late = wait_chance(service.workload.rate, reading, readers)
    queue, first = wait(service.workload.rate, reading, readers, one.variation).value, step
    place = waiting / rate
    if service.policy == APART:
        first = step * (1 + busy / 2)                       # the step under way ends first
        # While its queue is long, a prefill pool sends caches at an even pace; so long, over how long one decodes:
        calm = reading / readers / (1 - service.workload.rate * reading / readers) ** 2 / (one.output * step)
        place = place / (1 + calm)
    else:
        queue = queue + busy * step / 2                     # the pass under way ends first
        if service.policy == "chunked":                     # the next prompt may be in the last pass, and in the first step
            whole, first = whole + rate * reading * spare, step + rate * reading * beside
        else:                                               # whoever comes meanwhile, all servers being busy, is read before it
            queue, late = queue + late * (queue + reading) / (1 - late), 1 - (1 - late) * exp(-late)
    if share is not None:
        queue = queue * tail(late, share)
    return total("TTFT", term("queue", queue + place), term("prefill", whole), term("transfer", one.held),
                 term("first step", first))


@lru_cache(maxsize=256)
def _crowd(service):
    """(chances of so many sequences on a decode server, mean number that waits for a place)."""
    check_load(service)
    rate, one, completions, begun = service.workload.rate / service.servers[1], station(service), [], 0.0
    for n, (step, reading, extra) in enumerate(zip(one.steps, one.reading, one.extra, strict=True), 1):
        read = rate if service.policy == APART else min(rate, 1 / reading)      # no more are read than there is time for
        completions.append(n * (1 - read * extra) / (one.held + one.output * step) * rate / (begun or read))
        begun = read
    return crowd(rate, completions)


def _usual(service, values):
    """Of values at n = 1, 2, ... sequences the one at as many as the rate stands for, between two of them."""
    rate, speeds = service.workload.rate / service.servers[1], _speeds(service)
    n = next((i for i, speed in enumerate(speeds) if speed >= rate), len(speeds) - 1)
    if n == 0:
        return values[0]
    return values[n - 1] + (values[n] - values[n - 1]) * min((rate - speeds[n - 1]) / (speeds[n] - speeds[n - 1]), 1)
