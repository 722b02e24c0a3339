"""The demo transformer as a serving engine: slots, insertion, continuous batching; on one mesh of devices, or on two.

A prefill fills the cache of all tokens of a prompt but the last, which is the input of the first decode step: a request of n
tokens takes n steps, wherever its prompt was read. Passes run for real, in the order that given durations imply: times in a
`Run` are logical, tokens and bytes are not.
"""

from collections import deque
from dataclasses import dataclass

import jax
import numpy as np

from lib.demos import machine
from lib.demos.replica import insert, prefill, send, step
from lib.elementwise import positive


@dataclass(frozen=True)
class Request:
    """When a request arrives, the tokens of its prompt, and how many it wants."""

    arrival: float
    prompt: tuple
    new: int


@dataclass(frozen=True)
class Passes:
    """How long it takes to read a prompt, to make a step of all slots, and to send a cache: in one unit, whichever.

    The methods are what `lib.simulate` asks for: programs of fixed sizes take the same time for whatever is in them. Raises
    ValueError unless the numbers are positive; only sending may take 0.
    """

    read: float
    decode: float
    send: float = 0.0

    def __post_init__(self):
        for name in ("read", "decode", "send"):
            positive(name, getattr(self, name), zero=name == "send")

    def prefill(self, new, context):
        """Reading a prompt."""
        return self.read

    def step(self, batch, context):
        """A token for every occupied slot."""
        return self.decode

    def transfer(self, tokens):
        """Sending the cache of a prompt."""
        return self.send


@dataclass(frozen=True)
class Step:
    """A pass of a server, "prefill" or "decode", or "both" on one mesh: `decoding` sequences got a token; 0: it read a prompt."""

    server: str
    start: float
    end: float
    decoding: int


@dataclass(frozen=True)
class Served:
    """When a request arrived, its prefill started and ended, its cache was there, its first and last token came; its tokens."""

    arrival: float
    start: float
    prefilled: float
    moved: float
    first: float
    end: float
    tokens: tuple


@dataclass(frozen=True)
class Run:
    """What was served, in the order of the requests; the passes, by start; the bytes that went from one mesh to the other."""

    served: tuple
    steps: tuple
    sent: int

    @property
    def decoding(self):
        """How many sequences each decode step served."""
        return [each.decoding for each in self.steps if each.decoding]


class Slots:
    """The slots of a replica, who is in them, and what has happened: what changes while an engine runs.

    Raises ValueError for requests out of order or of a size that slots or padded prompts do not have.
    """

    def __init__(self, replica, requests):
        _check(replica, requests)
        self.replica, self.requests, self.cache = replica, requests, replica.empty()
        self.tokens, self.positions = np.zeros((2, replica.slots), np.int32)
        self.freed = dict.fromkeys(range(replica.slots), 0.0)  # the free slots, and since when
        self.holders, self.sent = {}, {}  # {slot: request}, {slot: cache that is to be inserted}
        self.prefilled, self.steps, self.bytes = deque(), [], 0  # (request, cache) that wait for a slot
        self.times, self.made = [{} for _ in requests], [[] for _ in requests]

    def read(self, server, reader, i, start, seconds):
        """The replica `reader` reads the prompt of request i, and its cache waits for a slot. Returns the end."""
        end = start + seconds
        self.prefilled.append((i, prefill(reader, self.requests[i].prompt)))
        self.times[i].update(start=start, prefilled=end)
        self.steps.append(Step(server, start, end, 0))
        return end

    def seat(self, moved):
        """The cache that has waited longest takes the slot that has been free longest and is sent there. Returns `moved`."""
        (i, cache), slot = self.prefilled.popleft(), min(self.freed, key=self.freed.get)
        del self.freed[slot]
        self.holders[slot], self.times[i]["moved"] = i, moved
        self.sent[slot] = send(self.replica, cache, slot)
        for old, new in zip(*map(jax.tree.leaves, (cache, self.sent[slot])), strict=True):
            self.bytes += sum(part.data.nbytes for part in new.addressable_shards if part.device not in old.devices())
        return moved

    def step(self, server, start, end):
        """A token for each sequence whose cache is there. Those that have all their tokens leave. Returns the end."""
        here = [slot for slot, i in self.holders.items() if self.times[i]["moved"] <= start]
        for slot in self.sent.keys() & here:
            prompt = self.requests[self.holders[slot]].prompt
            self.cache = insert(self.cache, self.sent.pop(slot), slot)
            self.tokens[slot], self.positions[slot] = prompt[-1], len(prompt) - 1
        made, self.cache = step(self.replica, self.cache, self.tokens, self.positions)
        self.tokens = np.array(made)
        self.positions[here] += 1
        self.steps.append(Step(server, start, end, len(here)))
        for slot in here:
            i = self.holders[slot]
            self.made[i].append(int(self.tokens[slot]))
            self.times[i].setdefault("first", end)
            if len(self.made[i]) == self.requests[i].new:
                self.times[i]["end"], self.freed[slot] = end, end
                del self.holders[slot]
        return end

    def run(self):
        """What has happened, after the last token."""
        served = [Served(request.arrival, **times, tokens=tuple(made))
                  for request, times, made in zip(self.requests, self.times, self.made, strict=True)]
        return Run(tuple(served), tuple(sorted(self.steps, key=lambda each: each.start)), self.bytes)


def one_mesh(replica, requests, passes):
    """Serve requests on one replica, prefill first: while a prompt waits and a slot is free it is read; else all slots step.

    passes: `Passes` in the unit of the arrivals. Returns a `Run`. Raises ValueError as `Slots` does.
    """
    slots, waiting, now = Slots(replica, requests), deque(range(len(requests))), 0.0
    while waiting or slots.holders:
        if waiting and slots.freed and requests[waiting[0]].arrival <= now:
            now = slots.seat(slots.read("both", replica, waiting.popleft(), now, passes.read))
        elif slots.holders:
            now = slots.step("both", now, now + passes.decode)
        else:
            now = requests[waiting[0]].arrival
    return slots.run()


def two_meshes(prefiller, decoder, requests, passes):
    """Serve requests on two replicas: one reads prompts, one by one, the other decodes. Arguments and result as for `one_mesh`.

    A cache waits where it was made until a slot is free, takes it and is sent, one transfer at a time; its sequence joins the
    first step that starts after it has arrived. Raises ValueError too where the two do not pad prompts alike.
    """
    if prefiller.padded != decoder.padded:
        raise ValueError(f"two replicas pad prompts alike, not to {prefiller.padded} and {decoder.padded} tokens")
    slots, waiting = Slots(decoder, requests), deque(range(len(requests)))
    reader = link = batch = 0.0  # when each of the three is free
    while waiting or slots.prefilled or slots.holders:
        starts = {}
        if waiting:
            starts["read"] = max(reader, requests[waiting[0]].arrival)
        if slots.prefilled and slots.freed:
            starts["send"] = max(link, slots.times[slots.prefilled[0][0]]["prefilled"], min(slots.freed.values()))
        if slots.holders:
            starts["step"] = max(batch, min(slots.times[i]["moved"] for i in slots.holders.values()))
        start = min(starts.values())
        if starts.get("read") == start:
            reader = slots.read("prefill", prefiller, waiting.popleft(), start, passes.read)
        elif starts.get("send") == start:
            link = slots.seat(start + passes.send)
        else:
            batch = slots.step("decode", start, start + passes.decode)
    return slots.run()


def clock(serve, prefiller, decoder, rounds=7):
    """Time single passes and a whole run in turns, here and now: (`Passes`, seconds of the run), medians in s.

    serve: a function without arguments, the run. A transfer includes the insertion, and so takes time on one mesh too.
    """
    times, caches = {name: [] for name in ("read", "decode", "send", "run")}, [decoder.empty()]
    idle = np.zeros((2, decoder.slots), np.int32)

    def moved(one):
        caches.append(insert(caches.pop(), send(decoder, one, 0), 0))
        return caches

    def decoded():
        made, cache = step(decoder, caches.pop(), *idle)
        caches.append(cache)
        return np.asarray(made)

    for _ in range(rounds + 1):  # the first compiles
        for _ in range(3):
            seconds, one = machine.timed(prefill, prefiller, (0, 0))
            times["read"].append(seconds)
            times["send"].append(machine.timed(moved, one)[0])
            times["decode"].append(machine.timed(decoded)[0])
        times["run"].append(machine.timed(serve)[0])
    median = {name: float(np.median(each[len(each) // (rounds + 1):])) for name, each in times.items()}
    run = median.pop("run")
    return Passes(**median), run


def _check(replica, requests):
    arrivals = [positive("arrival", each.arrival, zero=True) for each in requests]
    if arrivals != sorted(arrivals):
        raise ValueError(f"requests are listed in the order in which they arrive, not {arrivals}")
    for each in requests:
        room = replica.length + 1 - len(each.prompt)
        if not 2 <= len(each.prompt) <= replica.padded + 1 or not {*each.prompt} <= {*range(replica.shape.vocab)}:
            raise ValueError(f"a prompt has 2 to {replica.padded + 1} tokens from 0 to {replica.shape.vocab - 1}, "
                             f"not {each.prompt}")
        if not 1 <= each.new <= room:
            raise ValueError(f"a slot of {replica.length} tokens has room for 1 to {room} new ones after {len(each.prompt)}, "
                             f"not {each.new}")
