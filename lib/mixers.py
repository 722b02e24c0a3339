"""What mixes tokens in a layer, and what it keeps per sequence: grouped-query and latent attention, recurrent states.

Mixers are interchangeable, those of `variants` too; each answers, for one layer:
  params(D, X=1)          parameters that one of X tensor-parallel chips holds
  flops(T, S, most=None)  FLOPs of T new tokens after S cached ones, beyond the weights, which chips share by heads; a query
                          sees `most` tokens at most
  whole(T, S)             FLOPs that every chip with the sequence does for itself
  cache(S, b, page=1)     bytes that a sequence of S tokens keeps, at b bytes a value, in whole pages
  read(T, S, b)           bytes of it that a pass of T new tokens reads
  write(T, b)             bytes that T new tokens add or rewrite
  core                    the mixer itself, or the innermost one that a variant wraps, which answers for its heads:
  core.ways(X)            how many of X chips hold different parts of the cache
  core.width()            query and output values of one token
  core.sent()             the same, as chips exchange them when the cache is cut by batch or sequence
D is the model width. Sources: Scaling Book chapter 4 for GQA, DeepSeek-V2 for MLA."""

from dataclasses import dataclass

from .elementwise import ceil, maximum, minimum


def pairs(new, context, most=None):
    """Query-key pairs of `new` causal tokens after `context` cached ones: token i sees context + i, at most `most`."""
    if most is None:
        return new * (context + (new + 1) / 2)
    growing = minimum(maximum(most - context, 0), new)      # tokens that do not see `most` yet
    return growing * (context + (growing + 1) / 2) + (new - growing) * most


def paged(tokens, page):
    """Tokens that a cache of whole pages has room for."""
    return tokens if page == 1 else ceil(tokens / page) * page


@dataclass(frozen=True)
class GQA:
    """Grouped-query attention. n_kv_heads = n_heads is MHA, 1 is MQA; values may be narrower than keys."""

    n_heads: int
    n_kv_heads: int
    d_head: int
    d_value: int | None = None
    extra: int = 0

    def _value(self):
        return self.d_head if self.d_value is None else self.d_value

    def params(self, D, X=1):
        N, K, H, Hv = self.n_heads, self.n_kv_heads, self.d_head, self._value()
        return D * N * (H + Hv) / X + D * K * (H + Hv) / self.ways(X) + self.extra / X

    def query_input(self, D):
        """Width of what queries are projected from."""
        return D

    def flops(self, new, context, most=None):
        return 2 * self.n_heads * (self.d_head + self._value()) * pairs(new, context, most)

    def whole(self, new, context):
        return 0 * new

    def cache(self, context, b, page=1):
        return b * self.n_kv_heads * (self.d_head + self._value()) * paged(context, page)

    def read(self, new, context, b):
        return self.cache(context, b)

    def write(self, new, b):
        return self.cache(new, b)

    @property
    def core(self):
        return self

    def ways(self, X):
        return minimum(self.n_kv_heads, X)

    def width(self):
        return self.n_heads * (self.d_head + self._value())

    def sent(self):
        return self.width()


@dataclass(frozen=True)
class MLA:
    """Multi-head latent attention: one latent a token, shared by all heads, serves as keys and values.

    A pass may absorb the up-projection into queries and outputs (cheap to cache, what decode does) or expand the latents into
    keys and values (what prefill does); the model takes the cheaper of the two."""

    n_heads: int
    q_rank: int | None
    kv_rank: int
    d_rope: int
    d_nope: int
    d_value: int
    extra: int = 0

    def params(self, D, X=1):
        N, r, wide = self.n_heads, self.kv_rank, self.d_nope + self.d_rope
        query = self.query_input(D) * N * wide / X + (0 if self.q_rank is None else D * self.q_rank)
        return query + D * (r + self.d_rope) + r * N * (self.d_nope + self.d_value) / X + N * self.d_value * D / X + self.extra

    def query_input(self, D):
        """Width of what queries are projected from."""
        return D if self.q_rank is None else self.q_rank

    def flops(self, new, context, most=None):
        N, r, seen = self.n_heads, self.kv_rank, pairs(new, context, most)
        absorbed = 2 * N * (2 * r + self.d_rope) * seen
        expanded = 2 * N * (self.d_nope + self.d_rope + self.d_value) * seen
        return minimum(absorbed, expanded + 2 * r * N * (self.d_nope + self.d_value) * context)

    def whole(self, new, context):
        return 0 * new

    def cache(self, context, b, page=1):
        return b * (self.kv_rank + self.d_rope) * paged(context, page)

    def read(self, new, context, b):
        return self.cache(context, b)

    def write(self, new, b):
        return self.cache(new, b)

    @property
    def core(self):
        return self

    def ways(self, X):
        return 1

    def width(self):
        return self.n_heads * (self.d_nope + self.d_rope + self.d_value)

    def sent(self):
        return self.n_heads * (2 * self.kv_rank + self.d_rope)      # absorbed queries and latent outputs


@dataclass(frozen=True)
class Recurrent:
    """A mixer with a state of fixed size instead of a growing cache (linear attention, state space): `state` bytes a sequence in
    the state's own format, `state_flops` FLOPs a token on it, `n_heads` heads that may be split."""

    weights_per_layer: int
    state: float
    state_flops: float
    n_heads: int = 1
    d_head: int = 0

    def params(self, D, X=1):
        return self.weights_per_layer / X

    def flops(self, new, context, most=None):
        return self.state_flops * new

    def whole(self, new, context):
        return 0 * new

    def cache(self, context, b, page=1):
        return self.state

    def read(self, new, context, b):
        return self.state

    def write(self, new, b):
        return self.state

    @property
    def core(self):
        return self

    def ways(self, X):
        return minimum(self.n_heads, X)

    def width(self):
        return 2 * self.n_heads * self.d_head

    def sent(self):
        return self.width()
