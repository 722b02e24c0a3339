"""Transformer architectures as a stack of blocks: what they hold, and what a sequence keeps."""

from dataclasses import dataclass
from functools import cache

from .elementwise import positive
from .facts import known, nested
from .formats import Precision
from .formats import format as _format
from .mixers import GQA, MLA, Recurrent
from .routing import experts_touched, known_chances, skewed_touched
from .variants import Chunked, Indexed, Shared, Windowed

Mixer = GQA | MLA | Recurrent | Windowed | Chunked | Indexed | Shared
NOUNS = {noun.__name__: noun for noun in (GQA, MLA, Recurrent, Windowed, Chunked, Indexed, Shared)}


@dataclass(frozen=True)
class FFN:
    """A mixture of experts behind a router, beside shared experts of `d_shared` width in all; one expert is the dense case.

    `chances`: those that a token uses each expert, where the router is skewed (`routing.popularity`, or your own counts over
    tokens); None: all alike."""

    d_ff: int
    n_experts: int = 1
    top_k: int = 1
    d_shared: int = 0
    matrices: int = 3
    router: int = 0
    extra: int = 0
    expert_extra: int = 0
    chances: tuple[float, ...] | None = None

    def __post_init__(self):
        if not 1 <= self.top_k <= self.n_experts:
            raise ValueError(f"a token uses 1 to {self.n_experts} experts of {self.n_experts}, not {self.top_k}")
        if self.chances is not None:
            object.__setattr__(self, "chances", known_chances(self.chances, self.n_experts, self.top_k))

    def expert(self, D):
        """Parameters of one expert."""
        return self.matrices * D * self.d_ff + self.expert_extra

    def common(self, D, X=1):
        """Parameters that every token uses: shared experts, and the router, which every chip holds whole."""
        return self.matrices * D * self.d_shared / X + self.router * D * self.n_experts + self.extra

    def params(self, D, X=1, groups=1):
        """Parameters that one of X chips holds, in one of `groups` that share the experts of a mixture."""
        return self.n_experts * self.expert(D) / X / self.spread(groups) + self.common(D, X)

    def spread(self, groups):
        """How many of so many groups hold different experts: one network that is always used is in all of them."""
        return 1 if self.n_experts == 1 else groups

    def touched(self, tokens):
        """Distinct experts that independently routed tokens reach."""
        if self.chances is None:
            return experts_touched(self.n_experts, self.top_k, tokens)
        return skewed_touched(self.chances, tokens)


@dataclass(frozen=True)
class Block:
    """A run of `layers` equal layers; `norms` vectors of the model width each; `precision` where it differs from the server's."""

    name: str
    layers: int
    mixer: Mixer
    ffn: FFN
    norms: int = 2
    precision: Precision | None = None

    def params(self, D, X=1):
        return self.layers * (self.mixer.params(D, X) + self.ffn.params(D, X) + self.norms * D)


@dataclass(frozen=True)
class Model:
    """A decoder: blocks between an embedding and an unembedding of `vocab` rows, which may be the same table (`tied`).

    `native` is the precision it is published in."""

    name: str
    d_model: int
    vocab: int
    blocks: tuple[Block, ...]
    tied: bool = False
    native: Precision = Precision()
    max_context: int | None = None

    def __post_init__(self):
        object.__setattr__(self, "blocks", tuple(self.blocks))

    @property
    def layers(self):
        return sum(block.layers for block in self.blocks)

    @property
    def params(self):
        """All parameters of the language model."""
        D = self.d_model
        return round(sum(block.params(D) for block in self.blocks) + (1 if self.tied else 2) * self.vocab * D + D)

    @property
    def active_params(self):
        """Parameters that one token uses: all but the experts it is not routed to."""
        idle = sum(b.layers * (b.ffn.n_experts - b.ffn.top_k) * b.ffn.expert(self.d_model) for b in self.blocks)
        return round(self.params - idle)


def weights_read(model, tokens):
    """Parameters that a pass of so many tokens reads: all but the experts that none of them uses, the norms, and the embedding,
    of which rows are looked up. Numbers or arrays. ValueError for negative tokens. Source: this book, as `forward` counts."""
    tokens, D = positive("tokens", tokens, zero=True), model.d_model
    read = [b.layers * (b.mixer.params(D) + b.ffn.common(D) + b.ffn.touched(tokens) * b.ffn.expert(D)) for b in model.blocks]
    return sum(read) + model.vocab * D


def kv_bytes(model, context, format="bf16"):
    """Bytes that one sequence of `context` tokens keeps: windows, latents, recurrent states and indexer keys included.

    ValueError for a context that is not positive, KeyError for an unknown format."""
    context, b = positive("context", context), _format(format).bytes
    return sum(block.layers * block.mixer.cache(context, b) for block in model.blocks)


def model(name):
    """The model of that hub name ("llama-3-70b"; case and organisation do not matter). KeyError lists the names.

    Source: data/models.toml, each entry with the configuration file it was read from."""
    return _read(str(name).lower().rpartition("/")[2])


@cache
def _read(name):
    entries = nested("models")
    aliases = {alias: entry for entry, fields in entries.items() for alias in fields.get("aliases", ())}
    fields = entries[known("model", aliases.get(name, name), {*entries, *aliases})]
    return Model(name, fields["d_model"], fields["vocab"], tuple(map(_block, fields["blocks"])), fields["tied"],
                 Precision(**fields.get("native", {})), fields.get("max_context"))


def _block(fields):
    return Block(fields["name"], fields["layers"], _mixer(**fields["mixer"]), FFN(**fields["ffn"]), fields.get("norms", 2))


def _mixer(kind, inner=None, **fields):
    return NOUNS[kind](**fields) if inner is None else NOUNS[kind](_mixer(**inner), **fields)


def model_names():
    """Names of all models, in the order of the data file."""
    return tuple(nested("models"))
