"""Language models of single sequences: the demo transformer, a lookup of n-grams, a table small enough to enumerate.

Each has two methods. `start(length)` makes an empty cache for so many tokens. `read(cache, tokens, position)` reads tokens
that follow the first `position` ones and returns the distribution after each, [new, vocab], with a longer cache. What a cache
holds beyond `position` counts as not read, which is how tokens are taken back.
"""

from dataclasses import dataclass, replace

import jax.numpy as jnp
import numpy as np

from lib.demos import transformer
from lib.elementwise import positive


@dataclass(frozen=True)
class Model:
    """A transformer as a language model of single sequences.

    shape, params: as in `transformer`. At temperature 0 the likeliest token has probability 1, and decoding is greedy. Raises
    ValueError for a negative one.
    """

    shape: transformer.Shape
    params: dict
    temperature: float = 1.0

    def __post_init__(self):
        positive("temperature", self.temperature, zero=True)

    def start(self, length):
        """An empty KV cache."""
        return transformer.empty_cache(self.shape, 1, length)

    def read(self, cache, tokens, position):
        """One pass. Raises ValueError when the cache cannot hold the tokens."""
        logits, cache = transformer.extend(self.params, self.shape, cache, np.array([tokens], np.int32), position)
        logits = np.asarray(logits, np.float64)[0]
        if self.temperature == 0:
            return _certain(logits.argmax(-1), self.shape.vocab), cache
        odds = np.exp((logits - logits.max(-1, keepdims=True)) / self.temperature)
        return odds / odds.sum(-1, keepdims=True), cache


@dataclass(frozen=True)
class NGram:
    """A draft without weights: looks the last bytes up in what came before and proposes the byte that followed them.

    longest: bytes looked up at most. The longest match counts, of several the latest.
    """

    longest: int = 8

    def start(self, length):
        """The cache is the text itself."""
        return b""

    def read(self, cache, tokens, position):
        """Each distribution is one byte: nothing is left to chance."""
        text = cache[:position] + bytes(list(tokens))
        return _certain([self.next(text[:end]) for end in range(position + 1, len(text) + 1)], 256), text

    def next(self, text):
        """The byte that followed the latest match of the end of a text; the last one again where nothing matches."""
        for length in range(min(self.longest, len(text) - 1), 0, -1):
            if (at := text.rfind(text[-length:], 0, -1)) >= 0:
                return text[at + length]
        return text[-1]


@dataclass(frozen=True)
class Chain:
    """A model small enough to enumerate what it says: the next token depends on the last one alone.

    table: probabilities [vocab, vocab], a row for each last token.
    """

    table: np.ndarray

    def start(self, length):
        """Nothing to keep."""

    def read(self, cache, tokens, position):
        """A row of the table for each token."""
        return self.table[tokens], cache


def widened(model, d_ff):
    """The same function, computed by a larger model: its neurons are repeated until there are d_ff, and the new ones lead
    nowhere. Raises ValueError for fewer than there are."""
    more = d_ff - model.shape.d_ff
    if more < 0:
        raise ValueError(f"{model.shape.d_ff} neurons cannot be widened to {d_ff}")

    def wide(layer):
        gate, up = (np.resize(half, (d_ff, model.shape.d_model)) for half in np.split(layer["gate_up"], 2))
        return layer | {"gate_up": jnp.concatenate([gate, up]), "down": jnp.pad(layer["down"], ((0, 0), (0, more)))}

    params = model.params | {"layers": [wide(layer) for layer in model.params["layers"]]}
    return replace(model, shape=replace(model.shape, d_ff=d_ff), params=params)


def _certain(tokens, vocab):
    return np.equal.outer(tokens, np.arange(vocab)).astype(float)
