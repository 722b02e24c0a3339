"""A service request by request: continuous batching step by step, a paged cache, admission, preemption and transfers.

Prompts wait in their order: in one queue for all prefill servers, or, co-located, at the server with the fewest before it. A
sequence is admitted when a slot is free and the pool has pages for its cache and one token more. Where the next tokens need
more pages than are left, the sequence admitted last loses its cache and goes back to the head of the queue, to be read again
with what it has made. A prefill server has a prompt in each of its lanes, and reads on while caches wait or are sent, as long
as its memory holds them all; they leave it one after the other, each for the decode server with the fewest sequences."""

from collections import deque

from .passes import Passes
from .serving import APART, Service
from .steady import check_load
from .workload import Requests, poisson
from .world import World


def simulate(service, requests=10_000, seed=0, passes=None):
    """What happens to requests, one by one: a `Run`. The same seed gives the same rows.

    requests: how many of the service's workload, Poisson by `seed`; or `Requests` (from `bursty`, `backlog`, `trace`). passes:
    what takes how long, if not the floors of the model: anything with the methods of `Passes`. In a terminal a bar shows how
    far a long run is. ValueError for a workload that comes faster than it can be served (listed requests may: they end), and
    for a request that is longer than a server's cache."""
    if not isinstance(service, Service):
        raise ValueError(f"simulate takes a Service, from colocated or disaggregated; got {service!r}")
    if not isinstance(requests, Requests):
        if passes is None:
            check_load(service)
        requests = poisson(service.workload, requests, seed)
    needed = ("prefill", "step", "transfer", *["mixed"] * (service.policy == "chunked"))
    if passes is not None and not all(hasattr(passes, name) for name in needed):
        raise ValueError(f"passes have the methods {', '.join(needed)}; got {passes!r}")
    longest = int((requests.prompt + requests.output).max())
    world = World(service, requests, longest, passes or Passes(service, longest))
    world.env.process(_arrivals(world))
    for server in range(len(world.batches)):
        world.env.process(TURNS[service.policy](world, server))
    for lane in world.lanes:
        world.env.process(_prefill(world, *lane))
    world.env.run()
    return world.run()


def simulate_many(services, requests=10_000, seeds=(0,), executor=None):
    """The runs of every service with every seed, services outermost: a tuple of `Run`s.

    executor: anything with the `map` of concurrent.futures.Executor, which carries them over processes or machines (a process
    pool; Dask's Client.get_executor()); the rows are the same without. Raises as `simulate`."""
    try:
        services, seeds, carry = tuple(services), tuple(seeds), executor.map if executor is not None else map
    except (TypeError, AttributeError):
        raise ValueError(f"many runs take services and seeds in a sequence each, and an executor with a map; got {services!r}, "
                         f"{seeds!r}, {executor!r}") from None
    pairs = [(service, requests, seed) for service in services for seed in seeds]
    return tuple(carry(simulate, *zip(*pairs, strict=True))) if pairs else ()


def _arrivals(world):
    for job in world.jobs:
        yield world.env.timeout(max(job.row["arrival"] - world.env.now, 0))
        world.count(1)
        world.enqueue(job, min(range(len(world.queues)), key=world.unread))


def _prefill_first(world, server):
    batch, queue = world.batches[server], world.queue_of(server)
    while True:
        if queue and batch.has_room(queue[0]):
            job = queue.popleft()
            batch.admit(job)
            yield from world.read(job, server)
            batch.join(job)
        elif batch.running:
            yield from world.decode(server)
        else:
            yield world.sleep(server)


def _decode_first(world, server):
    batch, queue = world.batches[server], world.queue_of(server)
    while True:
        while batch.running:
            yield from world.decode(server)
        group = []
        while queue and batch.has_room(queue[0]):
            batch.admit(queue[0])
            group.append(queue.popleft())
        for job in group:
            yield from world.read(job, server)
        for job in group:
            batch.join(job)
        if not group:
            yield world.sleep(server)


def _chunked(world, server):
    batch, queue, reading = world.batches[server], world.queue_of(server), deque()
    while True:
        pieces, space = [], world.service.budget - batch.running
        for job in reading:
            pieces.append((job, min(space, job.context - job.read)))
            space -= pieces[-1][1]
        while space and queue and batch.has_room(queue[0]):
            job = queue.popleft()
            batch.admit(job)
            reading.append(job)
            job.row["start"] = world.env.now
            pieces.append((job, min(space, job.context - job.read)))
            space -= pieces[-1][1]
        pieces = [(job, new) for job, new in pieces if new]
        if not pieces and not batch.running:
            yield world.sleep(server)
            continue
        yield from world.decode(server, pieces)
        for job, new in pieces:
            if job in batch.held:                           # it may have had to give way
                job.read += new
        while reading and (reading[0] not in batch.held or reading[0].read == reading[0].context):
            job = reading.popleft()
            if job in batch.held:
                job.row["prefilled"] = job.row["moved"] = world.env.now
                batch.join(job)


def _prefill(world, lane, sender, memory):
    queue = world.queue_of(lane)
    while True:
        if queue and memory.has_room(queue[0]):
            job = queue.popleft()
            memory.admit(job)
            yield from world.read(job, lane)
            world.ready.append((job, sender, memory))
            _place(world)
        else:
            yield world.sleep(lane)


def _place(world):
    """Prompts that are read get a place on a decode server, in their order, and set out."""
    while world.ready:
        rooms = [i for i, batch in enumerate(world.batches) if batch.has_room(world.ready[0][0])]
        if not rooms:
            return
        job, sender, memory = world.ready.popleft()
        server = min(rooms, key=lambda i: len(world.batches[i].held))
        world.batches[server].admit(job)
        job.moving = True
        world.env.process(_send(world, job, sender, server, memory))


def _send(world, job, sender, server, memory):
    yield world.env.timeout(world.moved(job, sender, server) - world.env.now)
    memory.leave(job, owned=1)
    job.row["moved"] = world.env.now
    world.arrived[server].append(job)
    world.wake(server)
    for lane, *_ in world.lanes:                            # there is memory again
        world.wake(lane)


def _decode(world, server):
    batch, arrived = world.batches[server], world.arrived[server]
    while True:
        while arrived:
            job = arrived.popleft()
            job.moving = False
            batch.join(job)
        if batch.running:
            yield from world.decode(server)
            _place(world)
        else:
            yield world.sleep(server)


TURNS = {"prefill first": _prefill_first, "decode first": _decode_first, "chunked": _chunked, APART: _decode}
