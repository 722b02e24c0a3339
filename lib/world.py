"""The clock, the servers and the queues of one simulated run: what a pass does to them, whoever decides which is next."""

from collections import defaultdict, deque
from math import inf

from .batching import Batch, Job
from .runs import ROW, STEP, Run
from .server import pool
from .serving import APART, exposed, transfer


class World:
    """The clock, the servers and the queues of one run."""

    def __init__(self, service, requests, longest, passes):
        import simpy
        from tqdm import tqdm
        page, apart = service.decode.plan.page, service.policy == APART
        (tokens, self.weigh), (self.room, _) = pool(service.decode), pool(service.prefill)
        for what, size, room in (("request", longest, tokens), ("prompt", int(requests.prompt.max()), self.room)):
            if self.weigh(size) > room // page * page:
                raise ValueError(f"does not fit: a {what} of {size} tokens is longer than a server's cache of {room}")
        self.service, self.passes, self.env = service, passes, simpy.Environment()
        self.batches = [Batch(service.slots, tokens // page, page) for _ in range(service.servers[1])]
        self.jobs = [Job(*job) for job in zip(*(getattr(requests, name).tolist()
                                                for name in ("arrival", "prompt", "output", "cached")), strict=True)]
        for job in self.jobs:
            job.size = self.weigh(job.context)
        self.queues = [deque()] if apart else [deque() for _ in self.batches]   # prompts to be read
        self.lanes, self.links = [], defaultdict(float)     # (number, server, its memory); {end of a link: free from then on}
        for server in range(service.servers[0] if apart else 0):
            memory, first = Batch(len(requests), self.room + 1, 1), len(self.batches) + len(self.lanes)
            self.lanes += [(first + i, server, memory) for i in range(service.lanes)]
        if apart:                                           # how long each end is busy, of the time that a cache takes
            moved = transfer(service, longest)
            self.ends = [moved[end].value / moved.value for end in ("out", "in")]
        self.ready = deque()                                # prompts that are read and wait for a place
        self.arrived = [deque() for _ in self.batches]      # caches that have come and join at the next step
        self.bells = {}                                     # {server: the event it sleeps on}
        self.present, self.since, self.area, self.log = 0, 0.0, 0.0, []
        self.bar = tqdm(total=len(requests), unit="requests", delay=2, disable=None, leave=False)

    def run(self):
        """What is left when all have ended."""
        import numpy
        self.bar.close()
        if not self.since:
            raise ValueError("passes that take no time at all leave nothing to measure")
        rows = numpy.array([tuple(job.row[name] for name, _ in ROW) for job in self.jobs], ROW)
        return Run(rows, numpy.array(self.log, STEP), self.batches[0].pages, self.area / self.since)

    def count(self, change):
        """Requests come or go: the integral of how many there are."""
        self.area += self.present * (self.env.now - self.since)
        self.since = self.env.now
        self.present += change

    def moved(self, job, sender, receiver):
        """When the cache of a job has moved: each end of a link is busy with one cache after the other.

        What is sent layer by layer began while the prompt was read, if there was a place for it."""
        now, seconds = self.env.now, self.passes.transfer(job.context)
        out, into = (seconds * each for each in self.ends)
        left, read = seconds, job.row["prefilled"]
        if self.service.streamed and now == read:
            left = exposed(self.service, seconds, read - job.row["start"])
        begun = max(now + left - seconds, self.links["out", sender])
        self.links["out", sender] = begun + out
        self.links["in", receiver] = max(begun, self.links["in", receiver]) + into
        return max(now + left, self.links["out", sender], self.links["in", receiver])

    def unread(self, server):
        """How many prompts a server has before it, and how many sequences: what a router looks at."""
        queue, batch = self.queue_of(server), self.batches[server]
        return len(queue) + len(batch.held) - batch.running, batch.running

    def sleep(self, server):
        """The event that a server without work waits for."""
        self.bells[server] = self.env.event()
        return self.bells[server]

    def wake(self, server):
        """There may be work for a server."""
        if server in self.bells:
            self.bells.pop(server).succeed()

    def queue_of(self, server):
        """The prompts that a server may read next."""
        return self.queues[0 if self.service.policy == APART else server]

    def enqueue(self, job, server, first=False):
        """A prompt waits to be read: by a server, or by any prefill server."""
        queue = self.queue_of(server)
        queue.appendleft(job) if first else queue.append(job)
        for each in [lane for lane, *_ in self.lanes] or [server]:
            self.wake(each)

    def decode(self, server, pieces=()):
        """A step of a batch, with `pieces` [(job, new tokens)] of prompts beside it; then who has ended, and who gives way."""
        batch, passes, start = self.batches[server], self.passes, self.env.now
        n, used = batch.running, batch.pages - batch.free
        if pieces:
            seconds = passes.mixed(n, batch.total / n if n else 0, [(new, job.read) for job, new in pieces])
        else:
            seconds = passes.step(n, batch.total / n)
        yield self.env.timeout(_lasting(seconds))
        now = self.env.now
        self.log.append((server, start, now, n, sum(new for _, new in pieces), used))
        fresh, ended = batch.step()
        for job in fresh:
            job.row["first"] = now if job.row["first"] is None else job.row["first"]
        for job in ended:
            job.row["end"], job.row["server"] = now, server
            self.count(-1)
        self.bar.update(len(ended))
        for job in batch.grow():
            job.row["preemptions"] += 1
            job.size = self.weigh(job.context)
            if self.lanes and job.size > self.room:
                raise ValueError(f"does not fit: a sequence of {job.context} tokens lost its cache, and is too long for a "
                                 f"prefill server to be read again")
            self.enqueue(job, server, first=True)

    def read(self, job, server):
        """A pass over all of a prompt that is not read yet, alone."""
        start, new = self.env.now, job.context - job.read
        job.row["start"] = start
        used = self.batches[server].pages - self.batches[server].free if server < len(self.batches) else 0
        yield self.env.timeout(_lasting(self.passes.prefill(new, job.read)))
        job.row["prefilled"] = job.row["moved"] = self.env.now
        self.log.append((server, start, self.env.now, 0, new, used))


def _lasting(seconds):
    if not 0 <= seconds < inf:
        raise ValueError(f"a pass takes a finite time, not negative; got {seconds!r}")
    return seconds
