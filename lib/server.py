"""One copy of a model on the chips that hold it: the plan that cuts it, the memory it needs."""

from dataclasses import dataclass, field
from math import floor, lcm
from operator import index

from .breakdown import term, total
from .chips import Chip
from .elementwise import NUMBERS, ceil, positive
from .formats import Precision
from .models import Model
from .network import Slice


@dataclass(frozen=True)
class Plan:
    """How many chips share the model, and how the KV cache is cut. Counts chips, not devices.

    `tensor` chips share every matrix (Megatron). Their KV cache is cut by heads as far as the KV heads go; beyond that
    kv="heads" replicates it, "batch" gives the copies different sequences (two all-to-alls a layer), "sequence" different
    parts of each sequence (partial softmaxes are merged). `page` is the tokens that a cache page holds."""

    tensor: int = 1
    expert: int = 1
    pipeline: int = 1
    data: int = 1
    kv: str = "heads"
    page: int = 1

    def __post_init__(self):
        for name in ("tensor", "expert", "pipeline", "data", "page"):
            value = getattr(self, name)
            if isinstance(value, bool) or not hasattr(value, "__index__") or getattr(value, "shape", ()):
                raise ValueError(f"{name} must be a whole number and positive, got {value!r}")
            object.__setattr__(self, name, positive(name, index(value)))
        if self.kv not in ("heads", "batch", "sequence"):
            raise ValueError(f"kv must be 'heads', 'batch' or 'sequence', got {self.kv!r}")
        if max(self.expert, self.pipeline, self.data) > 1:
            raise ValueError("expert, pipeline and data must be 1: the model knows tensor parallelism only so far")


@dataclass(frozen=True)
class Server:
    """A model, a chip, the plan that cuts one over several of the other, and the formats of its values.

    Two parts of the network follow: `slice`, the most compact one that holds the plan, and `kv_slices`, one for each block, in
    which chips hold the same KV heads. ValueError if model, network or chip cannot take the plan."""

    model: Model
    chip: Chip
    plan: Plan = Plan()
    precision: Precision = Precision()
    slice: Slice = field(init=False, repr=False)
    kv_slices: tuple[Slice, ...] = field(init=False, repr=False)

    def __post_init__(self):
        for noun, kind in ((self.model, Model), (self.chip, Chip), (self.plan, Plan), (self.precision, Precision)):
            if not isinstance(noun, kind):
                raise ValueError(f"a server takes a {kind.__name__}, got {noun!r}")
        for precision in (self.precision, *[block.precision for block in self.model.blocks if block.precision]):
            self.chip.peak(precision.math)
        X, network = self.plan.tensor, self.chip.network
        for block in self.model.blocks:
            _divisible(self.model, block, X)
        if X > network.domain:
            raise ValueError(f"tensor={X} is more than the {network.domain} chips that {self.chip.name}'s own network joins; "
                             f"tensor must be from 1 to {network.domain} (slower networks between domains are not modelled)")
        object.__setattr__(self, "slice", network.slice(X))
        object.__setattr__(self, "kv_slices", tuple(network.slice(X // b.mixer.core.ways(X)) for b in self.model.blocks))

    def copies(self, mixer):
        """How many chips hold the same KV heads of a layer."""
        return self.plan.tensor / mixer.core.ways(self.plan.tensor)


def _divisible(model, block, X):
    core = block.mixer.core
    heads, widths = core.n_heads, [block.ffn.d_ff, block.ffn.d_shared]
    kv_heads = getattr(core, "n_kv_heads", 1)
    if heads % X or any(width % X for width in widths) or (kv_heads % X and X % kv_heads):
        raise ValueError(f"{model.name} cannot be cut {X} ways: its {block.name!r} have {heads} query heads, {kv_heads} KV "
                         f"heads, FFN width {block.ffn.d_ff} and shared width {block.ffn.d_shared}; the chips must divide query "
                         f"heads and widths, and must divide the KV heads or be a multiple of them")


def footprint(server, batch, context):
    """Bytes that the fullest chip holds: weights as they are cut, and the caches of `batch` sequences of `context` tokens.

    What every chip holds whole counts whole: norms, routers, latents, KV heads beyond their number. Activations, which the
    compiler keeps small in decode, are left out. ValueError if batch or context are not positive."""
    batch, context = positive("batch", batch), positive("context", context)
    return total("HBM", weights(server), term("KV cache", _cache(server, batch, context), "B"))


def weights(server):
    """Bytes of weights that one chip holds, by module."""
    model, X, D = server.model, server.plan.tensor, server.model.d_model
    attention, ffn, norms = 0, 0, server.precision.weights.bytes * D
    for block in model.blocks:
        stored = block.precision or server.precision
        attention = attention + block.layers * stored.of("attention").bytes * block.mixer.params(D, X)
        ffn = ffn + block.layers * stored.of("ffn").bytes * block.ffn.params(D, X)
        norms = norms + block.layers * stored.weights.bytes * block.norms * D
    table = model.vocab * D / X
    embedding = term("embedding", server.precision.of("embedding").bytes * table, "B")
    head = () if model.tied else (term("head", server.precision.of("head").bytes * table, "B"),)
    return total("weights", term("attention", attention, "B"), term("ffn", ffn, "B"), term("norms", norms, "B"), embedding, *head)


def _cache(server, batch, context):
    """Bytes of KV cache on one chip, whole pages."""
    held = 0
    for block in server.model.blocks:
        precision = block.precision or server.precision
        sequences, share = kv_share(server, block.mixer, batch)
        held = held + block.layers * sequences * block.mixer.cache(context, precision.kv.bytes, server.plan.page) * share
    return held


def kv_share(server, mixer, batch):
    """(sequences, fraction of each one's cache) that one chip holds and reads of a layer."""
    ways, copies = mixer.core.ways(server.plan.tensor), server.copies(mixer)
    if server.plan.kv == "batch":
        return batch if copies == 1 else ceil(batch / copies), 1 / ways
    return batch, 1 / (ways * copies) if server.plan.kv == "sequence" else 1 / ways


def fits(server, batch, context):
    """Whether weights and caches fit the HBM of every chip; a mask for arrays."""
    return footprint(server, batch, context).value <= server.chip.hbm_bytes


def max_batch(server, context):
    """Most sequences of `context` tokens whose caches fit beside the weights; 0 if not even one, or not even the weights."""
    context = positive("context", context)
    copies = [round(server.copies(block.mixer)) for block in server.model.blocks]
    turn = lcm(*copies) if server.plan.kv == "batch" else 1  # so many sequences add the same to every chip
    turns = (server.chip.hbm_bytes - weights(server).value) / _cache(server, turn, context)
    whole = turn * (max(floor(turns), 0) if isinstance(turns, NUMBERS) else turns.clip(0) // 1)
    return whole + sum(fits(server, whole + more, context) for more in range(1, turn))
