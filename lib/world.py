"""The clock, the servers and the queues of one simulated run: what a pass does to them, whoever decides which is next."""

from collections import deque

from .batching import Batch, Job
from .runs import ROW, STEP, Run
from .server import cache_tokens
from .serving import APART


class World:
    """The clock, the servers and the queues of one run."""

    def __init__(self, service, requests, longest, passes):
        import simpy
        from tqdm import tqdm
        page, tokens = service.decode.plan.page, cache_tokens(service.decode, longest)
        if longest > tokens // page * page:
            raise ValueError(f"does not fit: a request of {longest} tokens is longer than a server's cache of {tokens}")
        self.service, self.requests, self.passes, self.env = service, requests, passes, simpy.Environment()
        self.batches = [Batch(service.slots, tokens // page, page) for _ in range(service.servers[1])]
        self.jobs = [Job(*job) for job in zip(*(getattr(requests, name).tolist()
                                                for name in ("arrival", "prompt", "output", "cached")), strict=True)]
        apart = service.policy == APART
        self.queues = [deque()] if apart else [deque() for _ in self.batches]   # prompts to be read
        self.lanes = []                                     # (number, link of its server, memory of its server)
        for _ in range(service.servers[0] if apart else 0):
            memory = Batch(service.lanes + len(requests), cache_tokens(service.prefill, longest), 1)
            link, first = simpy.Resource(self.env), len(self.batches) + len(self.lanes)
            self.lanes += [(first + i, link, memory) for i in range(service.lanes)]
        self.ready = deque()                                # prompts that are read and wait for a place
        self.arrived = [deque() for _ in self.batches]      # caches that have come and join at the next step
        self.bells = {}                                     # {server: the event it sleeps on}
        self.present, self.since, self.area, self.log = 0, 0.0, 0.0, []
        self.bar = tqdm(total=len(requests), unit="requests", delay=2, disable=None, leave=False)

    def run(self):
        """What is left when all have ended."""
        import numpy
        self.bar.close()
        rows = numpy.array([tuple(job.row[name] for name, _ in ROW) for job in self.jobs], ROW)
        return Run(rows, numpy.array(self.log, STEP), self.batches[0].pages, self.area / self.since)

    def count(self, change):
        """Requests come or go: the integral of how many there are."""
        self.area += self.present * (self.env.now - self.since)
        self.since = self.env.now
        self.present += change

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
        yield self.env.timeout(seconds)
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
            self.enqueue(job, server, first=True)

    def read(self, job, server):
        """A pass over all of a prompt that is not read yet, alone."""
        start, new = self.env.now, job.context - job.read
        job.row["start"] = start
        used = self.batches[server].pages - self.batches[server].free if server < len(self.batches) else 0
        yield self.env.timeout(self.passes.prefill(new, job.read))
        job.row["prefilled"] = job.row["moved"] = self.env.now
        self.log.append((server, start, self.env.now, 0, new, used))
