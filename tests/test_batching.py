"""A batch counts its sequences and pages without looking at each: against one that walks over all of them at every
step."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lib.batching import Batch, Job


class Walk:
    """The same server, sequence by sequence: [job, tokens in its cache, tokens it wants, whether it runs, pages it
    owns]."""

    def __init__(self, slots, pages, page):
        self.slots, self.pages, self.page, self.each = slots, pages, page, []

    def need(self, tokens):
        """Pages for a cache and its next token."""
        return sum(1 for start in range(0, tokens + 1, self.page))

    @property
    def free(self):
        return self.pages - sum(owned for *_, owned in self.each)

    def has_room(self, job):
        return len(self.each) < self.slots and self.need(job.context) <= self.free

    def admit(self, job):
        self.each.append([job, job.context, job.left, False, self.need(job.context)])

    def join(self, job):
        next(one for one in self.each if one[0] is job)[3] = True

    def step(self):
        """One token more for each that runs; those that have all they want leave."""
        for one in self.each:
            if one[3]:
                one[1], one[2] = one[1] + 1, one[2] - 1
        ended = [one[0] for one in self.each if one[2] == 0]
        self.each = [one for one in self.each if one[2]]
        return ended

    def grow(self):
        """Pages for the next tokens of all that run; the last admitted that is not on a link gives way."""
        lost = []
        while sum(self.need(one[1]) - one[4] for one in self.each if one[3]) > self.free:
            victim = [one for one in self.each if not one[0].moving][-1]
            self.each.remove(victim)
            lost.append((victim[0], victim[1], victim[2]))
        for one in self.each:
            if one[3]:
                one[4] = self.need(one[1])
        return lost


requests = st.tuples(st.integers(1, 24), st.integers(1, 12), st.integers(0, 3), st.booleans())


@given(st.lists(requests, min_size=1, max_size=12), st.integers(1, 6), st.integers(1, 9), st.integers(0, 4))
def test_a_batch_is_what_walking_over_it_says(many, slots, page, spare):
    """Prompts that are admitted, read for some steps (or are on a link meanwhile), run, end, and give way in pools
    that are often too small: after each step the same pages, tokens, sequences, ends and victims, down to an empty
    pool."""
    pages = max(-(-(prompt + output) // page) for prompt, output, *_ in many) + spare
    batch, walk = Batch(slots, pages, page), Walk(slots, pages, page)
    waiting = [(Job(0.0, prompt, output, 0), delay, link) for prompt, output, delay, link in many]
    kinds = {job: (delay, link) for job, delay, link in waiting}
    queue, coming, ended, steps = [job for job, *_ in waiting], {}, [], 0
    while len(ended) < len(many):
        while queue and walk.has_room(queue[0]):
            assert batch.has_room(queue[0])
            job = queue.pop(0)
            batch.admit(job)
            walk.admit(job)
            coming[job], job.moving = kinds[job][0], kinds[job][1] and kinds[job][0] > 0
        assert not (queue and batch.has_room(queue[0]))
        for job in [job for job, steps_left in coming.items() if not steps_left]:
            del coming[job]
            job.moving = False
            batch.join(job)
            walk.join(job)
        coming = {job: steps_left - 1 for job, steps_left in coming.items()}
        if any(one[3] for one in walk.each):
            gone = walk.step()
            assert sorted(map(id, gone)) == sorted(map(id, batch.step()[1]))
            ended += gone
            expected = walk.grow()
            assert expected == [(job, job.context, job.left) for job in batch.grow()]
            for job, *_ in expected:
                coming.pop(job, None)
                queue.insert(0, job)
        running = [one for one in walk.each if one[3]]
        assert (len(running), sum(one[1] for one in running)) == (batch.running, batch.total)
        assert walk.free == batch.free >= 0
        assert walk.pages - batch.free == sum(walk.need(one[1]) for one in walk.each)
        assert [one[0] for one in walk.each] == [*batch.held]
        steps += 1
        assert steps < 10_000
    assert (pages, 0, 0, {}, []) == (batch.free, batch.running, batch.total, batch.held, queue)
    assert [0] * page == batch.turns


def test_pages_by_hand():
    """Pages of 4 tokens, prompt of 6, 3 tokens wanted: 2 pages hold 7 and 8 tokens, the step that makes 8 takes a
    third for the ninth, and all come back with it."""
    batch, job = Batch(2, 5, 4), Job(0.0, 6, 3, 0)
    batch.admit(job)
    batch.join(job)
    used = []
    for _ in range(3):
        used.append(5 - batch.free)
        fresh, ended = batch.step()
        assert (fresh, ended) == ([job] if len(used) == 1 else [], [job] if len(used) == 3 else [])
        assert [] == batch.grow()
    assert ([2, 2, 3], 5) == (used, batch.free)


def test_a_prompt_that_fills_its_page_takes_the_next_one():
    """4 tokens in pages of 4: the next token needs a second page."""
    job = Job(0.0, 4, 1, 0)
    assert (False, True) == (Batch(1, 1, 4).has_room(job), Batch(1, 2, 4).has_room(job))


def test_the_last_admitted_gives_way():
    """Three sequences of 3 tokens in 3 pages of 4: their next step but one needs 6 pages. The third gives way, then
    the second (two pages are not three), and each remembers its token and wants one less."""
    batch, jobs = Batch(3, 3, 4), [Job(0.0, 3, 5, 0) for _ in range(3)]
    for job in jobs:
        batch.admit(job)
        batch.join(job)
    batch.step()
    assert jobs[:0:-1] == batch.grow()
    assert [(4, 4), (4, 4)] == [(job.context, job.left) for job in jobs[1:]]
    assert (1, [jobs[0]], 1, 4) == (batch.free, [*batch.held], batch.running, batch.total)


def test_a_cache_on_a_link_keeps_its_pages():
    """The last admitted is on its way: the one before it gives way."""
    batch, first, last = Batch(2, 2, 4), Job(0.0, 3, 5, 0), Job(0.0, 3, 5, 0)
    for job in (first, last):
        batch.admit(job)
    batch.join(first)
    last.moving = True
    batch.step()
    assert [first] == batch.grow()
    assert ([last], 1, 0) == ([*batch.held], batch.free, batch.running)


def test_slots_are_a_limit_of_their_own():
    """One slot, a hundred pages: no room for a second."""
    batch = Batch(1, 100, 4)
    batch.admit(Job(0.0, 3, 5, 0))
    assert not batch.has_room(Job(0.0, 3, 5, 0))


def test_what_is_kept_is_not_read_again():
    """A cached prefix of 5 survives a preemption: reading starts behind it."""
    batch, first, last = Batch(2, 4, 4), Job(0.0, 7, 5, 5), Job(0.0, 7, 5, 5)
    for job in (first, last):
        batch.admit(job)
        batch.join(job)
        job.read = 7
    batch.step()
    assert [last] == batch.grow()
    assert (5, 8) == (last.read, last.context)


@pytest.mark.parametrize("page", [1, 2, 7, 64, 10**6])
def test_any_page(page):
    """A sequence of 1 + 1 tokens and one of 100 + 100: pages as wide as a token and wider than both; all come back."""
    pages = -(-200 // page) + 2
    batch, jobs = Batch(2, pages, page), [Job(0.0, 1, 1, 0), Job(0.0, 100, 100, 0)]
    for job in jobs:
        batch.admit(job)
        batch.join(job)
    ended = []
    for _ in range(100):
        ended += batch.step()[1]
        assert [] == batch.grow()
    assert (jobs, pages) == (ended, batch.free)
