"""Attention that sees or keeps less: sliding windows, chunks, sparse attention, a cache shared between layers.

Each wraps a mixer and answers what `mixers` says a mixer answers. Sources: the configurations of Mistral, Gemma and gpt-oss for
windows, Llama 4 for chunks, DeepSeek-V3.2 for the indexer."""

from dataclasses import dataclass

from .elementwise import ceil, maximum, minimum
from .mixers import GQA, MLA, paged, pairs


@dataclass(frozen=True)
class Windowed:
    """A mixer whose tokens see the last `window` tokens only, themselves included, and which keeps no more."""

    inner: GQA | MLA
    window: int

    def params(self, D, X=1):
        return self.inner.params(D, X)

    def flops(self, new, context, most=None):
        return self.inner.flops(new, minimum(context, self.window), self.window)

    def whole(self, new, context):
        return self.inner.whole(new, context)

    def cache(self, context, b, page=1):
        return self.inner.cache(minimum(context, self.window), b, page)

    def read(self, new, context, b):
        return self.inner.read(new, minimum(context, self.window - 1), b)

    def write(self, new, b):
        return self.inner.write(minimum(new, self.window), b)

    @property
    def core(self):
        return self.inner.core


@dataclass(frozen=True)
class Chunked:
    """A mixer whose tokens see the earlier tokens of their own chunk of `chunk` only: half a chunk on average."""

    inner: GQA
    chunk: int

    def _filled(self, tokens):
        """Tokens in the chunk that the last of `tokens` stands in."""
        return tokens - self.chunk * (ceil(tokens / self.chunk) - 1)

    def _seen(self, tokens):
        """Query-key pairs of the first `tokens` tokens: whole chunks, and the one being filled."""
        last = self._filled(tokens)
        return (tokens - last) * (self.chunk + 1) / 2 + last * (last + 1) / 2

    def params(self, D, X=1):
        return self.inner.params(D, X)

    def flops(self, new, context, most=None):
        alike = self.inner.flops(1, 0)                      # FLOPs of one pair
        return alike * (self._seen(context + new) - self._seen(context))

    def whole(self, new, context):
        return self.inner.whole(new, context)

    def cache(self, context, b, page=1):
        return self.inner.cache(minimum(context, self.chunk), b, page)

    def read(self, new, context, b):
        return self.inner.read(new, maximum(self._filled(context + 1) - 1, 0), b)       # 0: half a token, of a mean

    def write(self, new, b):
        return self.inner.write(minimum(new, self.chunk), b)

    @property
    def core(self):
        return self.inner.core


@dataclass(frozen=True)
class Indexed:
    """Sparse attention: an indexer scores every cached token with small keys of its own, attention reads the best few. Every chip
    that holds a sequence runs the whole indexer."""

    inner: GQA | MLA
    index_heads: int
    index_width: int
    index_top_k: int
    extra: int = 0

    def params(self, D, X=1):
        queries = self.index_heads * self.index_width * self.inner.query_input(D)
        return self.inner.params(D, X) + queries + D * (self.index_width + self.index_heads) + self.extra

    def flops(self, new, context, most=None):
        return self.inner.flops(new, context, self.index_top_k)

    def whole(self, new, context):
        return 2 * self.index_heads * self.index_width * pairs(new, context)

    def cache(self, context, b, page=1):
        return self.inner.cache(context, b, page) + b * self.index_width * paged(context, page)

    def read(self, new, context, b):
        return self.inner.read(new, minimum(context, new * self.index_top_k), b) + b * self.index_width * context

    def write(self, new, b):
        return self.inner.write(new, b) + b * self.index_width * new

    @property
    def core(self):
        return self.inner.core


@dataclass(frozen=True)
class Shared:
    """A mixer that attends to the cache of an earlier layer: it reads that cache, keeps none and projects no keys or values."""

    inner: GQA | Windowed | Chunked

    def params(self, D, X=1):
        keys_and_values = D * self.inner.cache(1, 1)
        return self.inner.params(D, X) - keys_and_values / self.core.ways(X)

    def flops(self, new, context, most=None):
        return self.inner.flops(new, context, most)

    def whole(self, new, context):
        return self.inner.whole(new, context)

    def cache(self, context, b, page=1):
        return 0 * context

    def read(self, new, context, b):
        return self.inner.read(new, context, b)

    def write(self, new, b):
        return 0 * new

    @property
    def core(self):
        return self.inner.core
