"""One copy of a model on the chips that hold it: the plan that cuts it, the memory it needs."""

from dataclasses import dataclass, field, replace
from math import floor, lcm
from operator import index

from .breakdown import term, total
from .chips import Chip
from .elementwise import LARGEST, NUMBERS, ceil, maximum, minimum, positive
from .formats import Precision
from .models import Model
from .network import ALGORITHMS, Slice, cut, sizes


@dataclass(frozen=True)
class Plan:
    """How many chips share the model, and how the KV cache is cut. Counts chips, not devices: their product is the server.

    `tensor` chips share every matrix (Megatron); it may be an array, for a sweep. Their KV cache is cut by heads as far as the
    KV heads go; beyond that kv="heads" replicates it, "batch" gives the copies different sequences (two all-to-alls a layer),
    "sequence" different parts of each sequence (partial softmaxes are merged). The two devices that some chips consist of
    count as one: where they share a KV head, they split its sequences, over a link inside the chip that costs nothing here.

    `expert` such groups hold different experts of each mixture, and different sequences; what is not an expert they replicate.
    Two all-to-alls a mixture bring tokens to their experts and back. `pipeline` stages hold different layers, and have as many
    parts of the batch under way. `data` replicas of all this share nothing. `page` is the tokens that a cache page holds,
    `all_reduce` the algorithm of that collective ("ring" or "one-shot"). `imbalance` is how many times the mean load the
    busiest group of experts has, for which the others wait (`routing.imbalance`; 1: none)."""

    tensor: int = 1
    expert: int = 1
    pipeline: int = 1
    data: int = 1
    kv: str = "heads"
    page: int = 1
    all_reduce: str = "ring"
    imbalance: float = 1.0

    def __post_init__(self):
        for name in ("tensor", "expert", "pipeline", "data", "page"):
            object.__setattr__(self, name, _ways(name, getattr(self, name), swept=name == "tensor"))
        load = positive("imbalance", self.imbalance)
        if getattr(load, "shape", ()) or not 1 <= load <= self.expert:
            raise ValueError(f"imbalance is a number from 1, the mean load, to expert={self.expert}, all of it; got {load!r}")
        object.__setattr__(self, "imbalance", float(load))
        for name, allowed in (("kv", ("heads", "batch", "sequence")), ("all_reduce", ALGORITHMS)):
            if not isinstance(getattr(self, name), str) or getattr(self, name) not in allowed:
                raise ValueError(f"{name} must be one of {', '.join(allowed)}, got {getattr(self, name)!r}")

    @property
    def chips(self):
        """Chips of the whole server."""
        return self.tensor * self.expert * self.pipeline * self.data

    @property
    def groups(self):
        """Groups of chips that hold different sequences."""
        return self.expert * self.data


def _ways(name, x, swept):
    if swept and (getattr(x, "shape", ()) or isinstance(x, list | tuple)):
        x = positive(name, x)
        if (x % 1 != 0).any():
            raise ValueError(f"{name} must be whole numbers and positive, everywhere")
        return x
    try:
        if not isinstance(x, bool):
            return positive(name, index(x))
    except TypeError:
        pass
    raise ValueError(f"{name} must be a whole number and positive{', or an array of them' * swept}, got {x!r}")


@dataclass(frozen=True)
class Server:
    """A model, a chip, the plan that cuts one over several of the other, and the formats of its values.

    The parts of the network that the plan uses follow, each as compact as it can be: `slice` joins the chips of a tensor group,
    `kv_slices`, one for each block, those that hold the same KV heads, `expert_slice` the groups that hold different experts;
    `sends` are the (name, number, network) of the steps from one pipeline stage to the next. `shared` says whether the devices
    of one chip hold the same KV head. ValueError if model, network or chip cannot take the plan."""

    model: Model
    chip: Chip
    plan: Plan = Plan()
    precision: Precision = Precision()
    slice: Slice = field(init=False, repr=False)
    kv_slices: tuple[Slice, ...] = field(init=False, repr=False)
    expert_slice: Slice = field(init=False, repr=False)
    sends: tuple = field(init=False, repr=False)
    shared: bool = field(init=False, repr=False)

    def __post_init__(self):
        for noun, kind in ((self.model, Model), (self.chip, Chip), (self.plan, Plan), (self.precision, Precision)):
            if not isinstance(noun, kind):
                raise ValueError(f"a server takes a {kind.__name__}, got {noun!r}")
        for precision in (self.precision, *[block.precision for block in self.model.blocks if block.precision]):
            self.chip.peak(precision.math)
        model, plan, network = self.model, self.plan, self.chip.interconnect
        X, most, joined = plan.tensor, max(sizes(plan.tensor)), plan.tensor * plan.expert * plan.pipeline
        for size in sizes(X):
            for block in model.blocks:
                _divisible(model, block, size, plan.expert)
        if plan.pipeline > model.layers:
            raise ValueError(f"{model.name} has {model.layers} layers, too few for pipeline={plan.pipeline}")
        if max(sizes(joined)) > network.domain:
            beyond = "" if self.chip.dcn else " (no slower network between its domains is known)"
            raise ValueError(f"tensor x expert x pipeline are {max(sizes(joined))} chips, and {self.chip.name}'s network joins "
                             f"{network.domain}{beyond}")
        derived = dict(
            slice=cut(network, X),
            kv_slices=tuple(cut(network, X // b.mixer.core.ways(X)) for b in model.blocks),
            expert_slice=cut(network, X * plan.expert),
            sends=_sends(self.chip, X * plan.expert, plan.pipeline),
            shared=self.chip.devices > 1 and any(b.mixer.core.ways(most * self.chip.devices) <= most for b in model.blocks))
        for name, value in derived.items():
            object.__setattr__(self, name, value)

    def copies(self, mixer):
        """How many chips of a tensor group hold the same KV heads of a layer."""
        return self.plan.tensor / mixer.core.ways(self.plan.tensor)


def _sends(chip, group, stages):
    """(name, number, network) of the steps from stage to stage: those inside a domain, those from one domain to the next."""
    if stages == 1:
        return ()
    whole = maximum(chip.network.domain // group, 1)
    crossings = ceil(stages / whole) - 1                    # each domain holds whole stages, at least one
    steps = (("send", stages - 1 - crossings, chip.network.slice(2) if chip.network.domain > 1 else None),
             ("send between domains", crossings, chip.dcn and chip.dcn.slice(2)))
    return tuple(step for step in steps if step[2] and (not isinstance(step[1], NUMBERS) or step[1]))


def _divisible(model, block, X, expert):
    core, ffn = block.mixer.core, block.ffn
    heads, widths = core.n_heads, [ffn.d_ff, ffn.d_shared]
    kv_heads = getattr(core, "n_kv_heads", 1)
    if heads % X or any(width % X for width in widths) or (kv_heads % X and X % kv_heads):
        raise ValueError(f"{model.name} cannot be cut {X} ways: its {block.name!r} have {heads} query heads, {kv_heads} KV "
                         f"heads, FFN width {ffn.d_ff} and shared width {ffn.d_shared}; the chips must divide query "
                         f"heads and widths, and must divide the KV heads or be a multiple of them")
    if ffn.n_experts > 1 and ffn.n_experts % expert:
        raise ValueError(f"{model.name} has {ffn.n_experts} experts in its {block.name!r}: expert={expert} does not divide them")


def split(count, parts):
    """Of `count` things in `parts` nearly equal parts, the largest part."""
    return count if isinstance(parts, NUMBERS) and parts == 1 else ceil(count / parts)


def footprint(server, batch, context):
    """Bytes that the fullest chip holds: weights as they are cut, and the caches of `batch` sequences of `context` tokens.

    The fullest stage of a pipeline holds its part of every kind of layer, rounded up. What every chip holds whole counts whole:
    norms, routers, latents, KV heads beyond their number. Activations, which the compiler keeps small in decode, are left out.
    Its text says where the devices of a chip share a KV head. ValueError if batch or context are not positive."""
    batch, context = positive("batch", batch), positive("context", context)
    held = total("HBM", weights(server), term("KV cache", _cache(server, split(batch, server.plan.groups), context), "B"))
    return replace(held, note="the devices of a chip split the sequences of the KV heads they share" if server.shared else "")


def weights(server):
    """Bytes of weights that one chip of the fullest stage holds, by module."""
    model, X, D = server.model, server.plan.tensor, server.model.d_model
    attention, ffn, norms = 0, 0, server.precision.weights.bytes * D
    for block in model.blocks:
        stored, layers = block.precision or server.precision, split(block.layers, server.plan.pipeline)
        attention = attention + layers * stored.of("attention").bytes * block.mixer.params(D, X)
        ffn = ffn + layers * stored.of("ffn").bytes * block.ffn.params(D, X, server.plan.expert)
        norms = norms + layers * stored.weights.bytes * block.norms * D
    table = model.vocab * D / X
    tables = (term("embedding", server.precision.of("embedding").bytes * table, "B"),)
    if server.plan.pipeline != 1:                           # the first stage holds one, the last the other
        heavier = maximum(server.precision.of("embedding").bytes, server.precision.of("head").bytes)
        tables = (term("embedding or head", heavier * table, "B"),)
    elif not model.tied:
        tables += (term("head", server.precision.of("head").bytes * table, "B"),)
    return total("weights", term("attention", attention, "B"), term("ffn", ffn, "B"), term("norms", norms, "B"), *tables)


def _cache(server, batch, context):
    """Bytes of KV cache on one chip, whole pages, of the `batch` sequences of its group."""
    held = 0
    for block in server.model.blocks:
        precision = block.precision or server.precision
        sequences, share = kv_share(server, block.mixer, batch)
        one = block.mixer.cache(context, precision.kv.bytes, server.plan.page)
        held = held + split(block.layers, server.plan.pipeline) * sequences * one * share
    return held


def kv_share(server, mixer, batch):
    """(sequences, fraction of each one's cache) that one chip holds and reads of a layer, of the `batch` of its group."""
    ways, copies = mixer.core.ways(server.plan.tensor), server.copies(mixer)
    if server.plan.kv == "batch":
        return split(batch, copies), 1 / ways
    return batch, 1 / (ways * copies) if server.plan.kv == "sequence" else 1 / ways


def fits(server, batch, context):
    """Whether weights and caches fit the HBM that every chip leaves to programs; a mask for arrays."""
    return footprint(server, batch, context).value <= server.chip.capacity


def max_batch(server, context):
    """Most sequences of `context` tokens whose caches fit beside the weights; 0 if not even one, or not even the weights."""
    context, tensor = positive("context", context), server.plan.tensor
    if not isinstance(tensor, NUMBERS):
        plans = {X: replace(server.plan, tensor=X) for X in sizes(tensor)}
        return sum((tensor == X) * max_batch(replace(server, plan=plan), context) for X, plan in plans.items())
    turn, turns, groups = *_turns(server, context), server.plan.groups
    whole = turn * (max(floor(turns), 0) if isinstance(turns, NUMBERS) else turns.clip(0) // 1)
    return groups * (whole + sum(fits(server, groups * (whole + more), context) for more in range(1, turn)))


def pool(server):
    """(tokens of cache that fit beside the weights, weigh): weigh(context) is how many of them a sequence counts for.

    A token is the most that one more of them ever takes: where windows make the tokens of a long sequence lighter, it counts for
    fewer; a recurrent state counts for so many from its first token on. ValueError for a sweep of plans."""
    if not isinstance(server.plan.tensor, NUMBERS):
        raise ValueError(f"a pool is that of one plan, got tensor={server.plan.tensor!r}")
    one = replace(server, plan=replace(server.plan, page=1))
    turn, turns = _turns(one, 1)
    token = _cache(one, turn, 2) - _cache(one, turn, 1) or _cache(one, turn, 1)

    def weigh(context):
        return ceil(_cache(one, turn, context) / token * (1 - 2**-40))
    return floor(max(server.plan.groups * turn * turns * _cache(one, turn, 1) / token, 0)), weigh


def _turns(server, context):
    """(sequences that add the same to every chip of a group, how many times as many fit)."""
    copies = [round(server.copies(block.mixer)) for block in server.model.blocks]
    turn = lcm(*copies) if server.plan.kv == "batch" else 1
    return turn, minimum((server.chip.capacity - weights(server).value) / _cache(server, turn, context), LARGEST)
