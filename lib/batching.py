"""The sequences that a server decodes together: slots, pages, who joins, who ends, who has to give way."""


class Job:
    """A request on its way: tokens of its cache once it is read, tokens it still wants, tokens that are read so far."""

    __slots__ = ("context", "size", "left", "read", "kept", "joined", "moving", "row")

    def __init__(self, arrival, prompt, output, kept):
        self.context, self.left, self.read, self.kept = prompt, output, kept, kept
        self.size = prompt                                  # tokens that its cache counts for
        self.joined, self.moving = None, False              # the step after which it joined a batch; on a link
        self.row = dict(arrival=arrival, prompt=prompt, output=output, start=0.0, prefilled=0.0, moved=0.0, first=None, end=0.0,
                        server=0, preemptions=0)


class Batch:
    """A server's `slots`, and a pool of `pages` of `page` tokens.

    Before each step every sequence owns the page of its next token. At which step one ends or begins a page is known when it
    joins, so that a step costs the same for any number of sequences."""

    def __init__(self, slots, pages, page):
        self.slots, self.pages, self.page = slots, pages, page
        self.free, self.held = pages, {}                    # pages; those with a slot, in the order of their admission
        self.running, self.fresh = 0, []                    # sequences; those without a token since they joined
        self.steps, self.total, self.ends = 0, 0, {}        # done; tokens in their caches; {step: those who end there}
        self.turns = [0] * page                             # by size less steps, modulo page: sequences

    def has_room(self, job):
        """Whether a slot is free, and pages for a job's cache and one token more."""
        return len(self.held) < self.slots and -(-(job.size + 1) // self.page) <= self.free

    def admit(self, job):
        """A slot, and pages for the cache and one token."""
        self.held[job] = None
        self.free -= -(-(job.size + 1) // self.page)

    def join(self, job):
        """From the next step on the job gains tokens."""
        job.joined = self.steps
        self.running += 1
        self.fresh.append(job)
        self.total += job.context
        self.turns[(job.size - self.steps) % self.page] += 1
        self.ends.setdefault(self.steps + job.left, {})[job] = None

    def step(self):
        """Every running sequence gains a token. Returns those that have their first since they joined, and those that end."""
        self.steps += 1
        self.total += self.running
        fresh, self.fresh = self.fresh, []
        ended = [*self.ends.pop(self.steps, ())]
        for job in ended:
            self.leave(job, owned=0)                        # the page of a next token was its last one's
        return fresh, ended

    def grow(self):
        """A page for each sequence whose next token begins one. Returns those that lose theirs for it: admitted last, and not
        on a link."""
        lost = []
        while (wanted := self.turns[-self.steps % self.page]) > self.free:
            job = next(job for job in reversed(self.held) if not job.moving)
            begins = job.joined is not None and not (job.size + self.steps - job.joined) % self.page
            self.leave(job, owned=0 if begins else 1)
            lost.append(job)
        self.free -= wanted
        return lost

    def leave(self, job, owned):
        """Slot and pages are free again; `owned` is 1 if the next token's page counts."""
        del self.held[job]
        if job.joined is not None:
            made = self.steps - job.joined
            self.ends.get(job.joined + job.left, {}).pop(job, None)
            job.context, job.size, job.left, job.joined = job.context + made, job.size + made, job.left - made, None
            self.running -= 1
            self.total -= job.context
            self.turns[(job.size - self.steps) % self.page] -= 1
        self.free += -(-(job.size + owned) // self.page)
        job.read = job.kept
