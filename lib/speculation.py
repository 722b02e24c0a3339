"""Draft and verify: a small model proposes tokens, the target checks them all in one pass.

A round is k draft steps and one verification of k + 1 tokens: the one that is certain and the k that are proposed. It ends with
at least one token of the target, also where every proposal is refused."""

from dataclasses import replace

from .bounds import critical_batch
from .breakdown import leaves, term, total
from .elementwise import maximum, minimum, positive
from .forward import decode_step, forward, said
from .network import all_reduce
from .routing import whole
from .server import Server, footprint


def expected_tokens(acceptance, k):
    """Tokens that a round of k proposals yields, the target's own included: 1 + a + ... + a^k, with every proposal accepted
    with the same chance, whatever came before.

    Numbers or arrays; a chance of 1 is computed as 1 - 2^-26. ValueError for a chance outside 0 to 1, a negative k.
    Source: Leviathan et al. 2023, equation 1."""
    a, k = _chance(acceptance), positive("k", k, zero=True)
    return term("tokens", (1 - a ** (k + 1)) / (1 - a), "tokens")


def speculative_speedup(acceptance, k, draft, verify=1.0):
    """Times faster than plain decoding, with `draft` and `verify` the times of a draft step and of a verification over that of a
    target step. Raises as `expected_tokens`, and ValueError for a negative draft, a verify not positive.

    Source: Leviathan et al. 2023, theorem 3.8, for a verification that costs more than a step."""
    cost = positive("k", k, zero=True) * positive("draft", draft, zero=True) + positive("verify", verify)
    return term("speed-up", expected_tokens(acceptance, k).value / cost, "x")


def implied_acceptance(tokens, k):
    """The acceptance at which a round of k proposals yields so many tokens: `expected_tokens` inverted.

    ValueError unless 1 <= tokens < k + 1. Source: this book, by bisection."""
    most = positive("k", _number("k", k)) + 1
    if not 1 <= positive("tokens", _number("tokens", tokens)) < most:
        raise ValueError(f"a round of {k} proposals yields 1 token at least and fewer than {most} on average, got {tokens}")
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if expected_tokens(middle, k).value < tokens else (low, middle)
    return term("acceptance", high, "")


def free_drafts(chip, batch, weights="bf16", math="bf16"):
    """Proposals per sequence up to which a verification still waits for weights: B (k + 1) = critical batch.

    Negative where even plain decoding is compute-bound. ValueError if the chip does not multiply `math`. Source: formula 1.4
    with the tokens of a pass in place of sequences."""
    return term("proposals", critical_batch(chip, weights, math).value / positive("batch", batch) - 1, "tokens")


def link_bound_tokens(server):
    """Tokens of a pass from which a layer's all-reduces wait for their bytes instead of their hops.

    From there on every proposal costs its share of the links. ValueError for a server whose chips exchange nothing.
    Source: this book; the collectives' own terms."""
    X, one = server.plan.tensor, server.precision.activations.bytes * server.model.d_model
    positive("tensor - 1, the chips that others have to hear from", X - 1)
    terms = leaves(all_reduce(one, X, replace(server.slice, overhead=0.0), server.plan.all_reduce))    # it is in both terms
    hops, links = (sum(each.value for each in terms if each.name == name) for name in ("latency", "bandwidth"))
    return term("tokens", hops / links, "tokens")


def speculate(target, draft, k, batch, context):
    """Seconds of a round: k steps of the draft, then the target's pass over k + 1 tokens a sequence.

    draft: the Server of a smaller model on chips of the target's, which take turns; None for proposals that cost nothing
    (n-grams). k: a whole number; batch and context may be arrays. The draft's steps are taken at their mean context, which is
    exact but where chunked attention begins a chunk in between. Its `fits` counts weights and caches of both.
    ValueError for another k, for a draft on other chips or on more, and as `forward`. Source: formula 7.2 for each pass."""
    k, context = positive("k", k, zero=True), positive("context", context)
    if not hasattr(k, "free_symbols"):
        if getattr(k, "shape", ()) or k % 1:
            raise ValueError(f"a round has a whole number of proposals, got {k}")
        k = int(k)
    verify = replace(forward(target, batch, k + 1, context, logits=k + 1), name="verify", fits=True, note="")
    held = footprint(target, batch, context + k + 1).value
    if draft is None:
        return said(total("round", verify), held, target.chip.capacity)
    same = isinstance(draft, Server) and (draft.chip is target.chip or repr(draft.chip) == repr(target.chip))   # arrays too
    short = draft.plan.chips > target.plan.chips if same else True
    if short is True or hasattr(short, "any") and short.any():          # of letters nobody knows
        raise ValueError(f"a draft is None, or a Server on at most the {target.plan.chips} {target.chip.name} chips of its "
                         f"target, got {draft!r}")
    steps = replace(decode_step(draft, batch, context + maximum(k - 1, 0) / 2) * k, name="draft", fits=True, note="")
    held = held + footprint(draft, batch, context + k + 1).value
    return said(total("round", steps, verify), held, target.chip.capacity)


def speedup(target, draft, acceptance, k, batch, context):
    """Times more tokens a second from rounds of k proposals than from plain decoding, on the same chips at the same batch.

    Raises as `speculate` and `expected_tokens`; the Breakdown's `fits` is that of `speculate`."""
    each = speculate(target, draft, k, batch, context)
    gain = expected_tokens(acceptance, k).value * decode_step(target, batch, context).value / each.value
    return replace(term("speed-up", gain, "x"), fits=each.fits, note=each.note)


def best_k(target, draft, acceptance, batch, context, most=16):
    """Proposals a round, from 0 to `most`, that give the most tokens a second; 0 where plain decoding does.

    Whether target and draft fit is not asked. Numbers only; raises as `speedup`."""
    for name, x in (("acceptance", acceptance), ("batch", batch), ("context", context)):
        _number(name, x)
    gains = [speedup(target, draft, acceptance, k, batch, context).value for k in range(whole("most", most) + 1)]
    return gains.index(max(gains))


def break_even_batch(target, draft, acceptance, k, context, most=4096):
    """The smallest batch at which rounds of k proposals are slower than plain decoding; None if none up to `most` is.

    Beyond it rounds may gain again: for a mixture they do once nearly all experts are read anyway. Whether that many caches
    fit is not asked. Numbers only; raises as `speedup`. Source: this book, by trying every batch."""
    _number("acceptance", acceptance), _number("context", context)
    slower = speedup(target, draft, acceptance, k, [*range(1, positive("most", whole("most", most)) + 1)], context).value < 1
    return int(slower.argmax()) + 1 if slower.any() else None


def _chance(acceptance):
    """An acceptance that the geometric series can be summed for: below 1 by at least 2^-26."""
    a = positive("acceptance", acceptance, zero=True, most=1)
    return a if hasattr(a, "free_symbols") else minimum(a, 1 - 2**-26)


def _number(name, x):
    if getattr(x, "shape", ()) or isinstance(x, list | tuple | range) or hasattr(x, "free_symbols"):
        raise ValueError(f"{name} must be one number here, got {x!r}")
    return x
