"""How long the passes of a service take, looked up: a simulation asks some hundred thousand times.

Steps and chunks lie between tabulated contexts, four an octave and where windows and chunks of attention end; what is linear
in the context is exact. The sequences of a step are taken at their mean context, which chunked attention (Llama 4) is not: just
after the end of a chunk a step reads less, for all sequences here, for some in truth (up to a fifth of the step)."""

from bisect import bisect_right
from dataclasses import dataclass, field
from math import ceil, log2

from .forward import decode_step, forward
from .serving import APART, Service, read, transfer
from .variants import Chunked, Shared


@dataclass(frozen=True, eq=False)
class Passes:
    """Seconds of what the servers of a service do, for sequences of at most `longest` tokens: `prefill`, `step`, `mixed` and
    `transfer`, the whole way of a cache also where it is sent while the prompt is read."""

    service: Service
    longest: int
    knots: list = field(init=False, repr=False)             # contexts of the tables
    decoding: list = field(init=False, repr=False)          # by sequences, then context: seconds of attention
    heads: list = field(init=False, repr=False)             # by sequences: of the logits
    bodies: list = field(init=False, repr=False)            # by tokens: of everything else
    chunks: list = field(init=False, repr=False)            # by new tokens, then context: of a chunk's attention
    sizes: list = field(init=False, repr=False)             # new tokens of that table
    whole: dict = field(init=False, repr=False, default_factory=dict)

    def __post_init__(self):
        import numpy
        service = self.service
        server, most, budget = service.decode, service.slots, service.budget or 0
        bends = [edge for block in server.model.blocks for edge in _bends(block.mixer, self.longest)]
        knots = [0, *sorted({*_spread(self.longest, 4), *bends})]
        sizes = _spread(budget, 8) if budget else []
        tree = decode_step(server, numpy.arange(1, most + 1)[:, None], numpy.array(knots[1:])[None])
        heads = tree["unembed"].value[:, 0]
        decoding = numpy.hstack([numpy.zeros((most, 1)), _attention(server, tree)])
        decoding[:, 0] = 2 * decoding[:, 1] - decoding[:, 2] if len(knots) > 2 and knots[2] == 2 else decoding[:, 1]
        tokens = decode_step(server, numpy.arange(1, most + budget + 1), 1)
        bodies = tokens.value - _attention(server, tokens) - tokens["unembed"].value
        chunks = bodies[:0]
        if sizes:
            chunks = _attention(server, forward(server, 1, numpy.array(sizes)[:, None], numpy.array(knots)[None]))
        tables = dict(knots=knots, decoding=[[], *decoding.tolist()], heads=[0.0, *heads.tolist()],
                      bodies=[0.0, *bodies.tolist()], chunks=chunks.tolist(), sizes=sizes)
        for name, values in tables.items():
            object.__setattr__(self, name, values)

    def prefill(self, new, cached):
        """Seconds in which `new` tokens of one prompt are read after `cached` ones."""
        if (new, cached) not in self.whole:
            self.whole[new, cached] = read(self.service, new + cached, cached)
        return self.whole[new, cached]

    def step(self, batch, context):
        """Seconds in which `batch` sequences of `context` tokens on average gain one token each."""
        return self.bodies[batch] + self.heads[batch] + _at(self.knots, self.decoding[batch], context)

    def mixed(self, batch, context, pieces):
        """Seconds of a step that also reads `pieces` of prompts, each (new tokens, tokens before them)."""
        seconds = self.bodies[batch + sum(new for new, _ in pieces)] + self.heads[batch]
        if batch:
            seconds += _at(self.knots, self.decoding[batch], context)
        for new, before in pieces:
            i = min(max(bisect_right(self.sizes, new), 1), len(self.sizes) - 1)
            rows = [_at(self.knots, row, before) for row in self.chunks[i - 1:i + 1]]
            low, high = self.sizes[i - 1:i + 1] if len(self.sizes) > 1 else (new, new + 1)
            seconds += rows[0] + (new - low) * (rows[-1] - rows[0]) / (high - low)
        return seconds

    def transfer(self, prompt):
        """Seconds that the cache of a prompt is on its way."""
        key = "transfer", prompt
        if key not in self.whole:
            self.whole[key] = transfer(self.service, prompt).value if self.service.policy == APART else 0.0
        return self.whole[key]


def _attention(server, tree):
    return sum(tree[block.name]["attention"].value for block in server.model.blocks)


def _spread(most, octave):
    """Whole numbers from 1 to `most`, so many an octave but for the first."""
    return sorted({*[min(ceil(2 ** (i / octave)), most) for i in range(ceil(octave * log2(most)) + 1)], most})


def _bends(mixer, longest):
    """Contexts up to the longest at which the cost of attention bends or jumps: the end of a window, the ends of chunks."""
    mixer = mixer.inner if isinstance(mixer, Shared) else mixer
    ends = range(mixer.chunk, longest, mixer.chunk) if isinstance(mixer, Chunked) else [getattr(mixer, "window", longest)]
    return [context for end in ends for context in (end - 1, end, end + 1) if 1 <= context <= longest]


def _at(knots, values, x):
    """Linear between the knots; straight on beyond the last."""
    i = min(max(bisect_right(knots, x), 1), len(knots) - 1)
    low, high = knots[i - 1], knots[i]
    return values[i - 1] + (x - low) * (values[i] - values[i - 1]) / (high - low)
