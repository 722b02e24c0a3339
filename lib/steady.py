"""The steady state of a service: how much it can take, how long a request waits for its first token and for each one after.

Requests come independently of each other. Prompts wait for the first of all servers that is free to read, as a router that
knows their queues deals them; sequences are dealt evenly. Decoding is a station that its sequences share equally."""

from dataclasses import dataclass, replace
from functools import lru_cache
from math import exp
from statistics import NormalDist

from .breakdown import term, total
from .forward import decode_step, mixed
from .queueing import checked_share, crowd, stable, tail, wait, wait_chance
from .serving import APART, Service, handover, read, transfer


@dataclass(frozen=True)
class Station:
    """What one server does while it decodes n = 1, 2, ... sequences, whatever the rate of requests.

    Seconds of a step, of the passes that a prompt fills, and by which it lengthens the steps of the others, an entry for each n.
    In chunks: `whole` from its first pass to the end of its last, in which `spare` seconds are left for the next prompt;
    `beside`, by which a full chunk lengthens a step. The `variation` of reading, and the `sizes` of prompts: chances, and how
    long each takes over the mean; `held`, the seconds that a place is held while the cache comes; `output`, the mean tokens."""

    steps: tuple
    reading: tuple
    extra: tuple
    whole: tuple
    spare: tuple
    beside: tuple
    variation: float
    sizes: tuple
    held: float
    output: float


@lru_cache(maxsize=256)
def station(service):
    """The `Station` of a Service. ValueError for anything else."""
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
        pieces = {prompt: _pieces(service, prompt, batches, steps) for prompt in prompts.counts}
        reading, extra, whole, spare, beside = (prompts.mean(lambda prompt, i=i: pieces[prompt][i]) for i in range(5))
        seconds, alone = {prompt: each[0][0] for prompt, each in pieces.items()}, reading[0]
    elif service.policy == "decode first":                  # a batch is read, and decoded until the last of it has ended
        extra = reading + (_thinning(workload.output, steps) - workload.output.mean() * steps) / batches
    else:
        extra = reading
    sizes = tuple((p, seconds[prompt] / alone) for prompt, p in zip(prompts.counts, prompts.chances, strict=True))
    columns = (tuple(values.tolist()) for values in (steps, reading, extra, whole, spare, beside))
    return Station(*columns, prompts.variation(seconds.get), sizes, held, workload.output.mean())


def _pieces(service, prompt, batches, steps):
    """Of a prompt in chunks: reading, extra, whole, spare, beside, as in a Station."""
    import numpy
    new = prompt - service.workload.kept(prompt)
    chunks = numpy.minimum(service.budget - batches, new)
    passes = mixed(service.decode, batches, service.workload.context, chunks, prompt - (new + chunks) / 2).value
    count, beside = new / chunks, passes - steps
    last = numpy.ceil(count)
    return count * passes, count * beside, count * beside + last * steps, (last - count) * beside, beside


def _thinning(output, steps):
    """Seconds in which batches of n = 1, 2, ... sequences decode until the last of each has ended."""
    import numpy
    batches, seconds, before, going = numpy.arange(1, len(steps) + 1), 0 * steps, 0, 1.0
    for count, chance in sorted(zip(output.counts, output.chances, strict=True)):
        some = 1 - (1 - min(going, 1)) ** batches           # the chance that any of them is that long
        seconds = seconds + (count - before) * some * numpy.interp(batches * going / some, batches, steps)
        before, going = count, max(going - chance, 2**-60)
    return seconds


def loads(service):
    """{where: load} of what requests pass: the servers; or prefill servers, link (its busier end) and decode servers.

    From 1 on a queue grows. ValueError for what is no Service. Source: this book, what arrives over what all the time allows."""
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
    """Requests per second that a service can take at most, whatever its workload's own rate is. ValueError for no Service."""
    return term("capacity", service.workload.rate / max(loads(service).values()), "req/s")


def decoding(service):
    """Mean sequences that each decode server decodes together. ValueError for a load of 1 or more."""
    chances = _crowd(service)
    return term("batch", sum(n * p for n, p in enumerate(chances)), "sequences")


def tpot(service, share=None):
    """Seconds from one token of a request to the next, averaged over its answer: a step, and how much other prompts lengthen it
    on the same chips; the mean over requests, or what a `share` of them gets.

    Requests differ since they meet other crowds and other numbers of prompts: normally distributed, for answers that are
    equally long and meet several prompts. Where answers are short and prompts long, co-located, both come together: the mean
    is then up to a third too low, and the share no better; simulate that. ValueError for a load of 1 or more.
    Source: Little's law; the spread is this book's."""
    rate, one, present = service.workload.rate / service.servers[1], station(service), decoding(service).value
    every = (present - rate * one.held) / (rate * one.output)
    costs = _usual(service, one.extra)
    step, delay = every * (1 - rate * costs), every * rate * costs      # prompts take the part rate x costs of the time
    if share is not None:
        sigmas = NormalDist().inv_cdf(checked_share(share))
        chances = _crowd(service)
        spread = sum(p * (n - present) ** 2 for n, p in enumerate(chances)) ** 0.5
        # A crowd changes as fast as requests end: averaged over an answer, 2/3 of its variance are left.
        wider = (_between(one.steps, present + spread) - _between(one.steps, present - spread)) / 2
        crowded = (2 / 3) ** 0.5 * wider / (1 - rate * costs)
        prompts = costs * (rate * one.output * every) ** 0.5 / one.output       # of so many on average, Poisson
        more = sigmas * (crowded**2 + prompts**2) ** 0.5
        more = max(more, one.steps[0] - every)              # no token comes sooner than a step of one sequence
        step, delay = step + more * (1 - rate * costs), delay + more * rate * costs
    return total("TPOT", term("step", step), term("prefill interference", delay))


def ttft(service, share=None):
    """Seconds until a request's first token: queue, prefill, transfer, first step; the mean, or what a `share` of requests gets.

    The queue is all that is read before a request's first step but its own prompt, and the wait for a place. For a share, waits
    are taken as exponential, prompts as long as they are, and the rest at its mean; what the prompt does not take is shown as
    queue. ValueError for a load of 1 or more, and where batches end before prompts are read: there is no closed form.
    Source: Pollaczek and Khinchine for the queue of prompts, Erlang for several servers; how they are put together is ours."""
    chances = _crowd(service)
    one, gap, (prefills, decodes) = station(service), tpot(service), service.servers
    step = gap["step"].value
    rate, busy = service.workload.rate / decodes, 1 - chances[0]
    reading, whole, spare, beside = (_usual(service, each) for each in (one.reading, one.whole, one.spare, one.beside))
    readers = prefills * service.lanes if service.policy == APART else decodes
    late = wait_chance(service.workload.rate, reading, readers)
    queue, first = wait(service.workload.rate, reading, readers, one.variation).value, step
    held = service.slots / _speeds(service)[-1]             # seconds that a sequence has its place while all are taken
    place = wait(service.workload.rate, held, decodes * service.slots, service.workload.output.variation()).value
    full = wait_chance(service.workload.rate, held, decodes * service.slots)
    if service.policy == APART:
        first = step * (1 + busy / 2)                       # the step under way ends first
        # While its queue is long, a prefill pool sends caches at an even pace; so long, over how long one decodes:
        calm = reading / readers / (1 - service.workload.rate * reading / readers) ** 2 / (one.output * step)
        place, full = place / (1 + calm), full / (1 + calm)
    else:
        queue = queue + busy * step / 2                     # the pass under way ends first
        if service.policy == "chunked":                     # the next prompt may be in the last pass, and in the first step
            whole, first = whole + rate * reading * spare, step + rate * reading * beside
        else:                                               # whoever comes meanwhile, all servers being busy, is read before it
            queue, late = queue + late * (queue + reading) / (1 - late), 1 - (1 - late) * exp(-late)
    queue = queue + place
    if share is not None:
        own = whole + one.held
        late = 1 - (1 - late) * (1 - full)                  # for one or the other
        queue = _quantile(share, late, queue, [(p, own * size) for p, size in one.sizes]) - own
    return total("TTFT", term("queue", queue), term("prefill", whole), term("transfer", one.held),
                 term("first step", first))


def _quantile(share, late, queue, own):
    """Seconds within which a share of requests has waited and been read: `queue` seconds on average, exponential for the part
    `late` that waits at all, and of its `own` [(chance, seconds)]."""
    def reached(seconds):
        left = [(p, seconds - each) for p, each in own]
        return sum(p * (1 - late * exp(-late * rest / queue) if queue else p) for p, rest in left if rest >= 0)
    low, high = min(each for _, each in own), max(each for _, each in own) + queue * tail(late, share)
    while high - low > high * 2**-40:
        middle = (low + high) / 2
        low, high = (middle, high) if reached(middle) < share else (low, middle)
    return high


@lru_cache(maxsize=256)
def _crowd(service):
    """Chances of 0, 1, 2, ... sequences on a decode server."""
    check_load(service)
    if service.policy == "decode first":
        raise ValueError("no closed form says how long prompts wait for a batch to end, and who decodes meanwhile: simulate it")
    rate, one, completions, begun = service.workload.rate / service.servers[1], station(service), [], 0.0
    for n, (step, reading, extra) in enumerate(zip(one.steps, one.reading, one.extra, strict=True), 1):
        read = rate if service.policy == APART else min(rate, 1 / reading)      # no more are read than there is time for
        completions.append(n * (1 - read * extra) / (one.held + one.output * step) * rate / (begun or read))
        begun = read
    return crowd(rate, completions)[0]


def _usual(service, values):
    """Of values at n = 1, 2, ... sequences the one at as many as the rate stands for, between two of them."""
    rate, speeds = service.workload.rate / service.servers[1], _speeds(service)
    n = next((i for i, speed in enumerate(speeds) if speed >= rate), len(speeds) - 1)
    if n == 0:
        return values[0]
    return values[n - 1] + (values[n] - values[n - 1]) * min((rate - speeds[n - 1]) / (speeds[n] - speeds[n - 1]), 1)


def _between(values, n):
    """Of values at 1, 2, ... the one at n, which need not be whole; beyond the ends the last one."""
    n = min(max(n, 1), len(values))
    low = min(int(n), max(len(values) - 1, 1))
    return values[low - 1] + (n - low) * (values[min(low, len(values) - 1)] - values[low - 1])
