"""Time of one pass through a model: prefill, decode and verification of drafts are its corners.

A floor: nominal peaks, each operation's arithmetic and memory traffic perfectly overlapped, operations one after the other.
An operation reads its inputs and writes its outputs once; inside attention the scores stay on the chip. Left out: norms' and
softmax's own arithmetic, launches, sampling."""

from dataclasses import replace

from .breakdown import slowest, term, total
from .chips import roofline
from .elementwise import NUMBERS, minimum, positive
from .network import all_gather, all_reduce, all_to_all, reduce_scatter, send
from .server import Server, footprint, kv_share, split
from .units import show


def forward(server, batch, new, context, logits=1):
    """Seconds in which `batch` sequences each push `new` tokens through the model after `context` cached ones.

    `logits` is for how many of a sequence's new tokens they are computed: the last one, or all when drafts are verified.
    The groups of a plan share the sequences. So do the parts of the batch that are under way in a pipeline: the time is that
    of one part through all stages, and with equal stages the time after which every sequence has its new tokens.
    A Breakdown; its `fits` is False, or a mask, where caches of context + new tokens do not fit the HBM, and its text says so.
    ValueError if batch or new are not positive, context is negative, or logits exceed new. Source: formulas 7.2 and 7.3."""
    new, context = positive("new", new), positive("context", context, zero=True)
    most = new.min() if type(new).__module__ == "numpy" else new
    return said(_pass(server, batch, new, context, positive("logits", logits, most=most)),
                footprint(server, batch, context + new).value, server.chip.capacity)


def _pass(server, batch, new, context, logits):
    if not isinstance(server, Server):
        raise ValueError(f"a pass takes a Server, got {server!r}")
    batch, plan = positive("batch", batch), server.plan
    among = split(batch, plan.data * plan.pipeline) * new   # tokens of all groups that share experts
    batch = split(batch, plan.groups * plan.pipeline)
    chip, model, X, precision = server.chip, server.model, server.plan.tensor, server.precision
    D, tokens, a = model.d_model, batch * new, precision.activations.bytes
    table, b_E, b_V = D * model.vocab / X, precision.of("embedding").bytes, precision.of("head").bytes
    blocks = [_layer(server, block, copies, batch, among, new, context) * block.layers
              for block, copies in zip(model.blocks, server.kv_slices, strict=True)]
    embed = slowest("embed", term("memory", tokens * D * (b_E + a) / X / chip.hbm_bandwidth))   # rows looked up, not multiplied
    hand_over = [replace(send(a * tokens * D / X, link) * times, name=name) for name, times, link in server.sends]
    rows = batch * logits
    unembed = roofline("unembed", 2 * rows * table, b_V * table + a * rows * (D + model.vocab / X), chip, precision.math)
    return total("forward", embed, *blocks, *hand_over, unembed)


def _layer(server, block, copies, batch, among, new, context):
    chip, mixer, ffn, X, D = server.chip, block.mixer, block.ffn, server.plan.tensor, server.model.d_model
    stored = block.precision or server.precision
    a, b_kv, math, tokens = stored.activations.bytes, stored.kv.bytes, stored.math, batch * new
    b_A, b_F = stored.of("attention").bytes, stored.of("ffn").bytes
    projected, values, common, expert = mixer.params(D, X), mixer.core.width() / X, ffn.common(D, X), ffn.expert(D) / X
    groups = ffn.spread(server.plan.expert)
    among = tokens if groups == 1 else among * server.plan.imbalance            # from which the busiest experts get theirs
    k = ffn.top_k if groups == 1 else ffn.top_k * among / (groups * tokens)     # for each token of this group
    hidden = ffn.matrices * (k * ffn.d_ff + ffn.d_shared) / X
    sequences, share = kv_share(server, mixer, batch)
    cache = sequences * share * (mixer.read(new, context, b_kv) + mixer.write(new, b_kv))
    heads = X if server.plan.kv != "batch" else mixer.core.ways(X)
    parts = copies.chips if server.plan.kv == "sequence" else 1
    scores = mixer.flops(new, context) / heads + mixer.whole(new, context) / parts
    return total(block.name,
        roofline("projections", 2 * tokens * projected, b_A * projected + a * tokens * (2 * D + values), chip, math),
        roofline("attention", sequences * scores, cache + a * tokens * values, chip, math, chip.cache_bandwidth),
        roofline("ffn", 2 * tokens * (k * expert + common),
                 b_F * (ffn.touched(among) * expert / groups + common) + a * tokens * (2 * D * k + hidden), chip, math),
        *_collectives(server, block, copies, a, tokens, None if groups == 1 else among))


def _collectives(server, block, copies, a, tokens, among):
    """What the chips exchange in a layer: Megatron's two all-reduces, what a cache cut beyond the KV heads costs, and the way
    of tokens to their experts, once to each chip that holds some of them.

    Where nothing but experts spread over groups follows attention, tokens leave between the halves of a single all-reduce."""
    X, D, mixer, ffn = server.plan.tensor, server.model.d_model, block.mixer, block.ffn
    sums = 1 if among is not None and ffn.d_shared == 0 else 2
    yield all_reduce(a * tokens * D, X, server.slice, server.plan.all_reduce) * sums
    wide = a * tokens * mixer.core.sent() / mixer.core.ways(X)      # queries and outputs of the heads that `copies` share
    if server.plan.kv == "batch":                           # queries to the chip that holds their sequence, outputs back
        yield all_to_all(wide / 2, copies.chips, copies) * 2
    if server.plan.kv == "sequence":                        # every part sees all queries, then partial outputs are merged
        weights = a * tokens * mixer.core.n_heads / mixer.core.ways(X) * copies.chips
        yield all_gather(wide / 2, copies.chips, copies)
        yield replace(all_gather(weights, copies.chips, copies), name="log-sum all-gather")    # how to weigh the parts
        yield reduce_scatter(wide / 2, copies.chips, copies)
    if among is not None:
        n = X * server.plan.expert
        E, k = ffn.n_experts, ffn.top_k
        each = E / minimum(n, E) / (E - (k - 1) / 2)        # drawn k times from ever fewer experts: from their mean number
        places = n * (1 - (1 - each) ** k)         # chips that hold some of a token's experts
        yield replace(all_to_all(a * among * places * D, n, server.expert_slice) * 2, name="expert all-to-all")


def mixed(server, batch, context, new, cached):
    """Seconds of a pass in which `batch` sequences with `context` cached tokens gain a token each, and beside them a chunk of
    `new` prompt tokens is read after `cached` ones: chunked prefill.

    All tokens share one read of the weights and one message of each collective; attention looks at each cache on its own.
    No logits for the chunk. Numbers or arrays; the caches' fit is not asked. ValueError as `forward`."""
    batch, context = positive("batch", batch), positive("context", context)
    new, cached = positive("new", new), positive("cached", cached, zero=True)
    together, alone = _pass(server, batch + new, 1, context, 1), _pass(server, batch, 1, context, 1)
    chunk = _pass(server, 1, new, cached, 1)
    layers = {block.name for block in server.model.blocks}

    def merged(whole, own, read):
        if whole.name not in layers:
            return own if whole.name == "unembed" else whole
        attention = total("attention", replace(own["attention"], name="decoding"), replace(read["attention"], name="chunk"))
        return total(whole.name, *[attention if part.name == "attention" else part for part in whole.parts])
    parts = zip(together.parts, alone.parts, chunk.parts, strict=True)
    return total("mixed", *[merged(whole, own, read) for whole, own, read in parts])


def said(result, held, room):
    """A breakdown that knows whether the bytes `held` by the fullest chip fit its `room`, and says so if they do not."""
    fits = held <= room
    note = ""
    if isinstance(held, NUMBERS) and isinstance(room, NUMBERS):
        note = "" if fits else f"does not fit: {show(held, 'B')} a chip of {show(room, 'B')}"
    elif type(fits).__module__ == "numpy" and not fits.all():
        note = f"{fits.size - fits.sum()} of {fits.size} do not fit"
    return replace(result, fits=fits, note=note)


def prefill(server, batch, prompt):
    """Seconds in which `batch` prompts of `prompt` tokens each are read in one pass."""
    return forward(server, batch, new=prompt, context=0)


def decode_step(server, batch, context):
    """Seconds in which each of `batch` sequences with `context` cached tokens gains one token.

    Its `fits` is that of caches of `context` tokens, as for `fits` and `max_batch`: the new token's is not there yet."""
    context = positive("context", context)
    return said(_pass(server, batch, 1, context, 1), footprint(server, batch, context).value, server.chip.capacity)
