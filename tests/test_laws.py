"""Laws that every server obeys, whatever the numbers: hypothesis over every chip, model, plan and format."""

from dataclasses import fields, is_dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
import pint
import pytest
import sympy
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from strategies import (
    CHIPS,
    DENSE,
    FORMATS,
    GROUPED,
    MODELS,
    batches,
    contexts,
    leaves,
    nodes,
    server,
    servers,
    ways,
)

from lib.bounds import half_throughput_batch, prefill_time, saturation_throughput, step_floor, step_time
from lib.breakdown import symbolic
from lib.formats import Format, Precision
from lib.forward import decode_step, forward, prefill
from lib.goodput import at_rate, goodput, per_chip
from lib.mixers import GQA, Recurrent, pairs
from lib.models import FFN, kv_bytes
from lib.network import Slice, Switch
from lib.routing import popularity
from lib.server import Plan, Server, fits, footprint, max_batch, weights
from lib.serving import APART, POLICIES, colocated, disaggregated, handover, transfer
from lib.speculation import break_even_batch, expected_tokens, implied_acceptance, speculate, speedup
from lib.steady import capacity, decoding, loads, station, tpot, ttft
from lib.variants import Shared, Windowed
from lib.workload import Lengths, Workload

NOTHING = Format("nothing", 0, "bf16")
UNITS = pint.UnitRegistry()
CLOSE = 1 + 1e-9
news = st.sampled_from([1, 2, 5, 64, 2048])
PASSES = {"batch": batches, "new": news, "context": contexts}
FEW = [  # one of each kind: dense, experts, latents, windows, recurrent, indexed; every network; every cut
    server("llama-3-70b", "ironwood", 8),
    server("mixtral-8x7b", "h100", 4, page=16),
    server("deepseek-v3", "v5e", 16, "batch", weights="fp8b128"),
    server("gpt-oss-120b", "mi300x", 8, ffn="mxfp4"),
    server("gemma-3-27b", "v6e", 32, "sequence", kv="fp8"),
    server("qwen3.5-397b-a17b", "tpu8i", 8, "batch"),
    server("deepseek-v3.2", "b200", 8, "sequence", math="fp8"),
    Server(MODELS["deepseek-v3"], CHIPS["h200"], Plan(8, 4, 3, 2, "batch", all_reduce="one-shot"), Precision("fp8")),
    Server(MODELS["llama-3.1-70b"], CHIPS["h100"], Plan(16, pipeline=2)),
]
each = pytest.mark.parametrize("one", FEW, ids=lambda s: f"{s.model.name}-{s.chip.name}x{s.plan.chips}-{s.plan.kv}")


# Floors


def matmul_params(model):
    """Parameters that one token is multiplied with, by hand: active ones, without norms and the input embedding."""
    norms = sum(b.layers * b.norms for b in model.blocks) + 1
    return model.active_params - norms * model.d_model - (0 if model.tied else model.vocab * model.d_model)


@given(servers(), batches, contexts, news)
def test_never_faster_than_bytes_over_bandwidth(one, batch, context, new):
    """All chips together read every matrix that a token uses and every cache byte that attention sees at least once."""
    step = forward(one, batch, new, context)
    moved = one.precision.weights.bytes * matmul_params(one.model)
    moved += batch * sum(b.layers * b.mixer.read(new, context, one.precision.kv.bytes) for b in one.model.blocks)
    assert step.value * CLOSE >= moved / (one.plan.chips * one.chip.hbm_bandwidth)


@given(servers(), batches, contexts, news)
def test_never_faster_than_flops_over_peak(one, batch, context, new):
    """Two FLOPs a parameter and token, the head for the last token only, and attention's, at the math format's peak."""
    head = one.model.vocab * one.model.d_model
    flops = 2 * batch * (new * (matmul_params(one.model) - head) + head)
    flops += batch * sum(b.layers * b.mixer.flops(new, context) for b in one.model.blocks)
    peak = one.plan.chips * one.chip.peak(one.precision.math)
    assert forward(one, batch, new, context).value * CLOSE >= flops / peak


@given(servers(), batches, contexts, news)
def test_no_operation_is_faster_than_its_resources(one, batch, context, new):
    """Overlap hides the shorter part of a maximum, never part of the longer one; nothing overlapped is slowest."""
    step = forward(one, batch, new, context)
    for node in nodes(step):
        assert all(part.value <= node.value * CLOSE for part in node.parts)
    assert step.value <= step.serial * CLOSE
    assert step.serial <= 2 * step.value * CLOSE  # no maximum has more than two parts
    assert step.serial == pytest.approx(sum(leaves(step).values()), rel=1e-9)


@given(servers(), batches, contexts, news)
def test_waits_add_up_to_the_value(one, batch, context, new):
    """Every second is waited for one resource, and the bound is the one waited for most."""
    step = forward(one, batch, new, context)
    assert sum(step.waits.values()) == pytest.approx(step.value, rel=1e-9)
    assert set(step.waits) <= {"compute", "memory", "latency", "bandwidth"}
    assert step.waits[step.bound] == max(step.waits.values())


# More is never slower


@given(servers(), batches, contexts, news, st.floats(1, 10), st.sampled_from(["compute", "memory", "network"]))
def test_a_faster_chip_is_never_slower(one, batch, context, new, factor, what):
    """More peak, more memory bandwidth, more link bandwidth: each helps or does nothing."""
    faster = replace(one, chip=one.chip.derate(**{what: factor}))
    assert forward(faster, batch, new, context).value <= forward(one, batch, new, context).value * CLOSE


NETWORK = {  # part of the network: which of its numbers may get better, and how
    "bandwidth": ("network", ("link_bandwidth", "egress"), lambda x, factor: x * factor),
    "hop latency": ("network", ("hop_latency",), lambda x, factor: x / factor),
    "overhead": ("network", ("overhead",), lambda x, factor: x / factor),
    "bandwidth between domains": ("dcn", ("egress",), lambda x, factor: x * factor),
    "latency between domains": ("dcn", ("hop_latency",), lambda x, factor: x / factor),
}


@given(servers(), batches, contexts, news, st.floats(1, 10), st.sampled_from(sorted(NETWORK)), st.floats(0, 1e-4))
def test_a_better_network_is_never_slower(one, batch, context, new, factor, what, overhead):
    """Its own or the one between domains: more bandwidth, shorter hops, less overhead. Only its own terms move."""
    which, names, better = NETWORK[what]
    old = replace(one, chip=replace(one.chip, network=replace(one.chip.network, overhead=overhead)))
    part = getattr(old.chip, which)
    assume(part is not None)
    changes = {name: better(getattr(part, name), factor) for name in names if hasattr(part, name)}
    improved = replace(old, chip=replace(old.chip, **{which: replace(part, **changes)}))
    before, after = (leaves(forward(s, batch, new, context)) for s in (old, improved))
    assert all(after[path] <= before[path] * CLOSE for path in before)
    moved = {path for path in before if before[path] != after[path]}
    assert all(path.endswith(("latency", "bandwidth")) for path in moved)


@given(servers(), batches, contexts, news, st.floats(0, 1e-3))
def test_an_overhead_is_paid_by_every_phase(one, batch, context, new, overhead):
    """Latency and bandwidth of a collective grow by the same, once for each of its phases, so that their order stays."""
    slow = replace(one, chip=replace(one.chip, network=replace(one.chip.network, overhead=overhead)))
    before, after = (leaves(forward(s, batch, new, context)) for s in (one, slow))
    phases = {}
    for path in before:
        collective, _, resource = path.rpartition("/")
        if resource in ("latency", "bandwidth"):
            phases.setdefault(collective, []).append(after[path] - before[path])
        else:
            assert before[path] == after[path]
    for latency, bandwidth in phases.values():
        assert 0 <= latency == pytest.approx(bandwidth, rel=1e-6, abs=1e-9)


@given(servers(), batches, contexts, news, st.sampled_from(["batch", "new", "context"]), st.integers(1, 1000))
def test_more_work_is_never_faster(one, batch, context, new, what, more):
    """One more sequence, new token or cached token takes time or nothing."""
    work = dict(batch=batch, new=new, context=context)
    now, then = forward(one, **work), forward(one, **{**work, what: work[what] + more})
    assert now.value <= then.value * CLOSE


@given(servers(), st.sampled_from(["batch", "context"]), batches, contexts, st.integers(1, 1000))
def test_more_tokens_never_need_less_memory(one, what, batch, context, more):
    """Footprints grow with batch and context, weights do not."""
    work = dict(batch=batch, context=context)
    now, then = footprint(one, **work), footprint(one, **{**work, what: work[what] + more})
    assert now.value <= then.value * CLOSE and now["weights"].value == then["weights"].value


@given(st.sampled_from(list(MODELS)), st.integers(1, 10**5), st.integers(1, 10**5))
def test_experts_touched_lie_between_k_and_all_and_grow(name, tokens, more):
    """k for one token, never more than E, never fewer for more tokens."""
    for ffn in {block.ffn for block in MODELS[name].blocks}:
        touched = ffn.touched(tokens)
        assert ffn.top_k <= touched * CLOSE and touched <= ffn.n_experts
        assert touched <= ffn.touched(tokens + more) * CLOSE
        assert ffn.touched(1) == pytest.approx(ffn.top_k)


@given(st.integers(1, 512), st.data())
def test_experts_of_any_layer_lie_between_k_and_all(experts, data):
    """Every E and k, not only those of known models; k = E touches all."""
    top_k, tokens = data.draw(st.integers(1, experts)), data.draw(st.integers(1, 10**6))
    touched = FFN(8, experts, top_k).touched(tokens)
    assert top_k <= touched * CLOSE and touched <= experts
    assert top_k < experts or touched == experts


def skewed(model, skew):
    """The same model with routers of that skew in all its mixtures."""

    def liked(ffn):
        return ffn if ffn.n_experts == 1 else replace(ffn, chances=popularity(ffn.n_experts, ffn.top_k, skew))

    return replace(model, blocks=tuple([replace(block, ffn=liked(block.ffn)) for block in model.blocks]))


MIXTURES = tuple(name for name, one in MODELS.items() if any(block.ffn.n_experts > 1 for block in one.blocks))


@given(st.integers(2, 64), st.floats(0, 3), st.integers(1, 10**4), st.integers(1, 10**4), st.data())
@settings(max_examples=60)
def test_experts_that_a_skewed_router_touches_lie_between_k_and_all_and_grow(experts, skew, tokens, more, data):
    """As with routers that like all alike, of which no skewed one touches more."""
    top_k = data.draw(st.integers(1, experts))
    even, uneven = FFN(8, experts, top_k), FFN(8, experts, top_k, chances=popularity(experts, top_k, skew))
    touched = uneven.touched(tokens)
    assert top_k <= touched * CLOSE and touched <= experts * CLOSE
    assert touched <= uneven.touched(tokens + more) * CLOSE and touched <= even.touched(tokens) * CLOSE
    assert uneven.touched(1) == pytest.approx(top_k)


@given(servers(models=MIXTURES), batches, contexts, news, st.floats(0, 2))
@settings(max_examples=60)
def test_a_skewed_router_is_never_slower_where_groups_have_the_same_load(one, batch, context, new, skew):
    """Fewer experts are read, nothing else moves; without skew, not even that."""
    uneven = replace(one, model=skewed(one.model, skew))
    before, after = (leaves(forward(s, batch, new, context)) for s in (one, uneven))
    assert {path for path in before if after[path] > before[path] * CLOSE} == set()
    assert {path for path in before if after[path] < before[path] / CLOSE and not path.endswith("ffn/memory")} == set()
    assert leaves(footprint(one, batch, context)) == leaves(footprint(uneven, batch, context))
    assert skew or after == pytest.approx(before, rel=1e-9)


@given(servers(models=MIXTURES), batches, contexts, news, st.floats(1, 4), st.floats(0, 1))
def test_more_imbalance_is_never_faster(one, batch, context, new, imbalance, more):
    """The busiest group computes, reads and receives at least as much; nothing else moves, and memory does not grow."""
    plans = [replace(one.plan, imbalance=min(x, one.plan.expert)) for x in (imbalance, imbalance + more)]
    now, then = (leaves(forward(replace(one, plan=plan), batch, new, context)) for plan in plans)
    assert all(now[path] <= then[path] * CLOSE for path in now)
    moved = {path for path in now if now[path] != then[path]}
    assert all("ffn/" in path or path.endswith("expert all-to-all/bandwidth") for path in moved)
    held = [leaves(footprint(replace(one, plan=plan), batch, context)) for plan in plans]
    assert held[0] == held[1]


@given(servers(), batches, contexts, news, st.sampled_from([1, 1.0, np.float64(1)]))
def test_no_imbalance_changes_nothing(one, batch, context, new, imbalance):
    """1 is the default, as whole number, float and NumPy's."""
    same = replace(one, plan=replace(one.plan, imbalance=imbalance))
    assert same == one
    assert leaves(forward(one, batch, new, context)) == leaves(forward(same, batch, new, context))


@given(servers(models=DENSE), batches, contexts, news, st.floats(1, 2))
def test_a_dense_model_has_no_imbalance(one, batch, context, new, imbalance):
    """In any number of groups: there is no router."""
    busy = replace(one, plan=replace(one.plan, expert=2, pipeline=1, tensor=1, imbalance=imbalance))
    even = replace(busy, plan=replace(busy.plan, imbalance=1.0))
    assert leaves(forward(busy, batch, new, context)) == leaves(forward(even, batch, new, context))


# Formats move their own terms

MOVES = {  # field of the precision: paths of leaves that may change with it
    "kv": ("attention/memory",),
    "activations": ("memory", "bandwidth"),
    "weights": ("projections/memory", "ffn/memory", "embed/memory", "unembed/memory"),
    "attention": ("projections/memory",),
    "ffn": ("ffn/memory",),
    "embedding": ("embed/memory",),
    "head": ("unembed/memory",),
}


def belongs(path, field):
    """Whether a leaf may change with a field; embed/memory is no part of unembed/memory."""
    return any(f"/{path}".endswith(f"/{end}") for end in MOVES[field])


@given(servers(), batches, contexts, news, st.sampled_from(sorted(MOVES)), st.sampled_from(FORMATS))
def test_quantising_one_tensor_moves_only_its_terms(one, batch, context, new, field, stored):
    """Weights, caches, activations, and the modules that may differ: every other leaf stays to the last bit."""
    other = replace(one, precision=replace(one.precision, **{field: stored}))
    before, after = (leaves(forward(s, batch, new, context)) for s in (one, other))
    moved = {path for path in before if before[path] != after[path]}
    assert {path for path in moved if not belongs(path, field)} == set()
    lighter = (
        other.precision.of(field).bytes if field not in ("kv", "activations") else getattr(other.precision, field).bytes
    )
    heavier = (
        one.precision.of(field).bytes if field not in ("kv", "activations") else getattr(one.precision, field).bytes
    )
    if lighter <= heavier:
        assert all(after[path] <= before[path] * CLOSE for path in before)


HELD = {  # field of the precision: parts of the footprint that may change with it, beside the tables of a pipeline
    "kv": ("KV cache",),
    "activations": (),
    "weights": ("weights/attention", "weights/ffn", "weights/norms", "weights/embedding", "weights/head"),
    "attention": ("weights/attention",),
    "ffn": ("weights/ffn",),
    "embedding": ("weights/embedding",),
    "head": ("weights/head",),
}
FIELDS = sorted(HELD)


@given(servers(), batches, contexts, st.sampled_from(FIELDS), st.sampled_from(FORMATS))
def test_quantising_one_tensor_moves_only_its_memory(one, batch, context, field, stored):
    """By module, to the last bit; the first and the last stage of a pipeline hold one table, the heavier counts."""
    other = replace(one, precision=replace(one.precision, **{field: stored}))
    before, after = (leaves(footprint(s, batch, context)) for s in (one, other))
    tables = ("weights/embedding or head",) if field in ("weights", "embedding", "head") else ()
    assert {path for path in before if before[path] != after[path]} <= {*HELD[field], *tables}


@given(servers(), batches, contexts, news, st.sampled_from(FIELDS), st.sampled_from(FORMATS), st.data())
def test_every_tensor_that_is_quantised_moves_its_terms(one, batch, context, new, field, stored, data):
    """Not only no others: where the bytes of a value differ, all leaves that read such values alone move, by that ratio where
    they read nothing else. Weights move nothing where every module has a format of its own, but norms in memory."""
    nothing = replace(one.precision, activations=NOTHING)
    one = replace(one, precision=nothing)
    assume(field != "activations" and not any(isinstance(b.mixer, Recurrent) for b in one.model.blocks))
    other = replace(one, precision=replace(nothing, **{field: stored}))
    ratio = getattr(other.precision, field).bytes / (nothing.kv if field == "kv" else nothing.weights).bytes
    before, after = (leaves(forward(s, batch, new, context)) for s in (one, other))
    for path in before:
        if belongs(path, field):
            assert after[path] == pytest.approx(ratio * before[path], rel=1e-9)
    own = {module: data.draw(st.sampled_from(FORMATS)) for module in ("attention", "ffn", "embedding", "head")}
    every = [replace(s, precision=replace(s.precision, **own)) for s in (one, other)]
    if field == "weights":
        assert leaves(forward(every[0], batch, new, context)) == leaves(forward(every[1], batch, new, context))
        held = [leaves(footprint(s, batch, context)) for s in every]
        assert {path for path in held[0] if held[0][path] != held[1][path]} <= {"weights/norms"}


@given(servers(), batches, contexts, news, st.data())
def test_what_is_multiplied_moves_only_arithmetic(one, batch, context, new, data):
    """All of it, by the ratio of the peaks; and no memory."""
    math = data.draw(
        st.sampled_from([f for f in ("bf16", "f32", "int8", "fp8", "int4", "fp4") if getattr(one.chip, f)])
    )
    other = replace(one, precision=replace(one.precision, math=math))
    before, after = (leaves(forward(s, batch, new, context)) for s in (one, other))
    ratio = one.chip.peak(one.precision.math) / one.chip.peak(math)
    for path in before:
        here = ratio if path.endswith("compute") else 1
        assert after[path] == pytest.approx(here * before[path], rel=1e-12, abs=0)
    assert leaves(footprint(one, batch, context)) == leaves(footprint(other, batch, context))


@given(
    servers(), batches, contexts, st.sampled_from(FIELDS), st.sampled_from(FORMATS), st.booleans(), st.integers(0, 6)
)
@settings(max_examples=60)
def test_quantising_a_draft_leaves_its_target_alone(one, batch, context, field, stored, drafts, k):
    """And the other way round: each has its own precision."""
    draft = Server(MODELS["llama-3.1-8b"], one.chip)
    before = leaves(speculate(one, draft, k, batch, context))

    def with_format(s, changed):
        return replace(s, precision=replace(s.precision, **{field: stored})) if changed else s

    after = leaves(speculate(with_format(one, not drafts), with_format(draft, drafts), k, batch, context))
    moved = {path for path in before if before[path] != after[path]}
    assert {path for path in moved if not path.startswith("draft/" if drafts else "verify/")} == set()
    assert {path for path in moved if not belongs(path, field)} == set()


@given(servers(), batches, contexts, st.sampled_from(FORMATS))
def test_quantising_the_cache_leaves_the_weights_alone(one, batch, context, stored):
    """In memory as in time."""
    other = replace(one, precision=replace(one.precision, kv=stored))
    held, then = footprint(one, batch, context), footprint(other, batch, context)
    assert held["weights"].value == then["weights"].value
    recurrent = any(isinstance(b.mixer, Recurrent) for b in one.model.blocks)
    if not recurrent:
        ratio = other.precision.kv.bytes / one.precision.kv.bytes
        assert then["KV cache"].value == pytest.approx(ratio * held["KV cache"].value, rel=1e-9)


# Chips beyond the KV heads


@given(st.sampled_from(GROUPED), st.sampled_from(list(CHIPS)), batches, contexts, st.data())
def test_chips_beyond_the_kv_heads_hold_no_more_cache(model_name, chip_name, batch, context, data):
    """Beyond K heads a chip's share of the cache stops shrinking, unless it is cut by batch or sequence."""
    heads = max(getattr(b.mixer, "inner", b.mixer).n_kv_heads for b in MODELS[model_name].blocks)
    beyond = [x for x in ways(model_name, chip_name) if x > heads]
    assume(beyond and heads in ways(model_name, chip_name))
    tensor = data.draw(st.sampled_from(beyond))

    def cache(x, kv):
        return footprint(Server(MODELS[model_name], CHIPS[chip_name], Plan(x, kv=kv)), batch, context)["KV cache"].value

    assert cache(tensor, "heads") == pytest.approx(cache(heads, "heads"), rel=1e-12)
    assert cache(tensor, "sequence") == pytest.approx(cache(heads, "heads") * heads / tensor, rel=1e-12)
    assert cache(tensor, "batch") <= cache(heads, "heads") * CLOSE
    if batch > 1:
        assert cache(tensor, "batch") < cache(heads, "heads")


@given(st.sampled_from(GROUPED), st.sampled_from(list(CHIPS)), contexts, st.integers(1, 2000), st.data())
def test_chips_beyond_the_kv_heads_add_no_capacity(model_name, chip_name, context, room, data):
    """On chips that have the same room beside their weights, whatever the other axes of the plan: as many sequences fit on
    K tensor ways as on more of them, and a group of them fits more only where the cache is cut by batch or sequence."""
    heads = max(getattr(b.mixer, "inner", b.mixer).n_kv_heads for b in MODELS[model_name].blocks)
    beyond = [x for x in ways(model_name, chip_name) if x > heads]
    assume(beyond and heads in ways(model_name, chip_name))
    tensor, expert, pipeline = (
        data.draw(st.sampled_from(beyond)),
        data.draw(st.sampled_from((1, 2))),
        data.draw(st.sampled_from((1, 2, 3))),
    )
    assume(tensor * expert * pipeline <= CHIPS[chip_name].interconnect.domain)
    rest = Plan(1, expert, pipeline, data.draw(st.sampled_from((1, 3))), page=data.draw(st.sampled_from((1, 16))))
    cache = kv_bytes(MODELS[model_name], context) / heads / pipeline

    def most(x, kv):
        one = Server(MODELS[model_name], CHIPS[chip_name], replace(rest, tensor=x, kv=kv))
        free = weights(one).value + room * cache / 7
        return max_batch(replace(one, chip=replace(one.chip, hbm_bytes=free, hbm_reserved=0)), context)

    at_heads, copies = most(heads, "heads"), tensor // heads
    assert at_heads == most(tensor, "heads")
    assert copies * at_heads <= most(tensor, "batch")
    assert copies * at_heads <= most(tensor, "sequence")


# Plans of several axes


@given(servers(), st.integers(1, 500), contexts, news, st.integers(2, 9))
def test_replicas_take_their_share_in_the_same_time(one, batch, context, new, copies):
    """d replicas do d times the batch in the same time, to the last bit, and hold on a chip what one holds."""
    more = replace(one, plan=replace(one.plan, data=copies * one.plan.data))
    assert leaves(forward(one, batch * one.plan.data, new, context)) == leaves(
        forward(more, batch * more.plan.data, new, context)
    )
    assert leaves(footprint(one, batch * one.plan.data, context)) == leaves(
        footprint(more, batch * more.plan.data, context)
    )
    assert copies * max_batch(one, context) == max_batch(more, context)


@given(servers(), st.integers(1, 500), contexts, news)
def test_a_pipeline_does_its_parts_one_after_the_other(one, batch, context, new):
    """As many parts of the batch as stages in the time of one part on one stage, and the steps from stage to stage."""
    plan, whole = one.plan, batch * one.plan.groups
    staged = forward(one, whole * plan.pipeline, new, context)
    sent = sum(part.value for part in staged.parts if part.name.startswith("send"))
    assert (plan.pipeline == 1) == (sent == 0)
    alone = forward(replace(one, plan=replace(plan, pipeline=1)), whole, new, context)
    assert staged.value == pytest.approx(alone.value + sent, rel=1e-12)


@given(servers(models=DENSE), batches, contexts, news)
def test_groups_without_experts_are_replicas(one, batch, context, new):
    """A dense model has nothing to share: the same time and footprint."""
    plan = one.plan
    same = replace(one, plan=replace(plan, expert=1, data=plan.groups))
    assert leaves(footprint(one, batch, context)) == leaves(footprint(same, batch, context))
    assume(plan.pipeline == 1)  # more groups in a domain than replicas, so that its stages lie elsewhere
    assert leaves(forward(one, batch, new, context)) == leaves(forward(same, batch, new, context))


# Speculation


@st.composite
def rounds(draw, **which):
    """A server, a draft on as many of its chips or none, a batch and a context."""
    one = draw(servers(**which))
    draft = draw(st.sampled_from([None, "llama-3.1-8b", "mixtral-8x7b", "gpt-oss-20b", "gemma-3-27b"]))
    smaller = draft and Server(MODELS[draft], one.chip, Plan(1, data=one.plan.chips), one.precision)
    return one, smaller, draw(batches), draw(contexts)


@given(rounds())
@settings(max_examples=60)
def test_no_proposals_are_plain_decoding(work):
    """A round of none costs a step, to the last bit, and gains nothing, whatever is accepted."""
    one, draft, batch, context = work
    plain = forward(one, batch, 1, context).value
    assert plain == speculate(one, draft, 0, batch, context).value == decode_step(one, batch, context).value
    for acceptance in (0, 0.3, 1):
        assert speedup(one, draft, acceptance, 0, batch, context).value == pytest.approx(1, rel=1e-12)


@given(rounds(), st.integers(0, 16))
@settings(max_examples=60)
def test_proposals_that_are_all_refused_gain_nothing(work, k):
    """At acceptance 0 no number of them does, with a draft or without."""
    one, draft, batch, context = work
    assert speedup(one, draft, 0, k, batch, context).value <= CLOSE


@given(rounds(), st.floats(0, 1), st.floats(0, 1), st.integers(0, 16))
@settings(max_examples=60)
def test_what_a_round_gains(work, acceptance, more, k):
    """At most k + 1 times, more with more acceptance, never less without the draft's time; a round of more takes longer."""
    one, draft, batch, context = work
    low, high = sorted((acceptance, more))
    gain = speedup(one, draft, low, k, batch, context).value
    assert 0 < gain <= (k + 1) * CLOSE
    assert gain <= speedup(one, draft, high, k, batch, context).value * (1 + 1e-7)
    assert gain <= speedup(one, None, low, k, batch, context).value * CLOSE
    longer = speculate(one, draft, k + 1, batch, context)
    assert speculate(one, draft, k, batch, context).value <= longer.value * CLOSE


@given(rounds(), st.integers(0, 8))
@settings(max_examples=60)
def test_a_round_needs_the_room_of_both(work, k):
    """What does not fit alone does not fit in a round, nor with a longer one; and it says so."""
    one, draft, batch, context = work
    found = speculate(one, draft, k, batch, context)
    held = sum(footprint(s, batch, context + k + 1).value for s in (one, draft) if s)
    assert found.fits == (held <= one.chip.capacity) == (not found.note)
    assert found.fits or not speculate(one, draft, k + 1, batch, context).fits


@given(st.floats(0, 1), st.floats(0, 1), st.integers(0, 200), st.integers(0, 200))
def test_tokens_of_a_round_lie_between_one_and_all(acceptance, more, k, longer):
    """More acceptance, more proposals: never fewer tokens."""
    tokens = expected_tokens(acceptance, k).value
    assert 1 <= tokens * CLOSE and tokens <= (k + 1) * (1 + 1e-7)
    assert tokens <= expected_tokens(max(acceptance, more), k).value * (1 + 1e-7)
    assert tokens <= expected_tokens(acceptance, k + longer).value * (1 + 1e-7)
    assert tokens == pytest.approx(sum(acceptance**i for i in range(k + 1)), rel=1e-5)


@given(st.floats(0.001, 0.99), st.integers(1, 50))
def test_tokens_tell_the_acceptance(acceptance, k):
    """The inverse, there and back."""
    tokens = expected_tokens(acceptance, k).value
    assert expected_tokens(implied_acceptance(tokens, k).value, k).value == pytest.approx(tokens, rel=1e-9)


@given(rounds(), st.floats(0, 1), st.integers(1, 8))
@settings(max_examples=30)
def test_the_batch_that_breaks_even_is_the_first_that_loses(work, acceptance, k):
    """One by one up to a limit."""
    one, draft, _, context = work
    gains = [speedup(one, draft, acceptance, k, batch, context).value for batch in range(1, 25)]
    slower = [batch for batch, gain in enumerate(gains, 1) if gain < 1]
    assume(all(abs(gain - 1) > 1e-12 for gain in gains))
    assert (slower or [None])[0] == break_even_batch(one, draft, acceptance, k, context, most=24)


@given(
    st.sampled_from(DENSE),
    st.sampled_from(list(CHIPS)),
    batches,
    contexts,
    st.integers(0, 8),
    st.sampled_from(FORMATS),
    st.data(),
)
def test_a_round_of_dense_models_is_its_closed_form(name, chip_name, batch, context, k, stored, data):
    """Ideal network, no activations, no input embedding, the new tokens in the cache: k times 7.2 of the draft, and 7.2 of the
    target with 2 B (k + 1) P FLOPs and every cache read once, where attention waits for memory (formulas.md, section 1)."""
    formats = Precision(stored, activations=NOTHING, embedding=NOTHING)
    tensor = data.draw(st.sampled_from(ways(name, chip_name)))
    one = ideal(Server(MODELS[name], CHIPS[chip_name], Plan(tensor), formats))
    draft = ideal(Server(MODELS["llama-3.1-8b"], CHIPS[chip_name], Plan(1), formats))
    heads = MODELS[name].blocks[0].mixer
    ridge = one.chip.bf16 / one.chip.hbm_bandwidth
    assume(heads.n_kv_heads % tensor == 0 and (k + 1) * max(heads.n_heads / heads.n_kv_heads, 4) < ridge)

    def pass_time(s, tokens, cached):
        params, kv = matmul_params(s.model), kv_bytes(s.model, cached)
        head = s.model.vocab * s.model.d_model
        moved, flops = s.precision.weights.bytes / s.chip.hbm_bandwidth, 2 * batch * tokens / s.chip.bf16
        wide = sum(max(moved * p, flops * p) for p in (params - head, head))
        return (batch * kv / s.chip.hbm_bandwidth + wide) / s.plan.chips

    expected = k * pass_time(draft, 1, context + max(k - 1, 0) / 2 + 1) + pass_time(one, k + 1, context + k + 1)
    assert expected == pytest.approx(speculate(one, draft, k, batch, context).value, rel=1e-9)


# Attention in chunks


@given(
    st.lists(st.integers(1, 5000), min_size=1, max_size=8),
    st.integers(0, 10**5),
    st.one_of(st.none(), st.integers(1, 9000)),
)
def test_chunks_do_the_attention_of_one_pass(chunks, context, window):
    """Query-key pairs add up, in windows too: counted one token at a time by hand for the whole."""
    whole = sum(min(context + i, window) if window else context + i for i in range(1, sum(chunks) + 1))
    done, start = 0, context
    for chunk in chunks:
        done, start = done + pairs(chunk, start, window), start + chunk
    assert done == whole == pairs(sum(chunks), context, window)


@given(
    st.sampled_from([n for n in GROUPED]), st.lists(st.integers(1, 4096), min_size=2, max_size=6), st.integers(1, 64)
)
def test_chunked_prefill_computes_what_one_prefill_does(name, chunks, batch):
    """Attention FLOPs of the chunks add up to those of the prompt, for every model without latents."""
    one, start, seconds = Server(MODELS[name], CHIPS["ironwood"]), 0, 0

    def attention(step):
        return sum(value for path, value in leaves(step).items() if path.endswith("attention/compute"))

    for chunk in chunks:
        seconds, start = seconds + attention(forward(one, batch, chunk, start)), start + chunk
    assert seconds == pytest.approx(attention(prefill(one, batch, start)), rel=1e-9)


@given(st.sampled_from(["deepseek-v2", "deepseek-v3"]), st.lists(st.integers(1, 4096), min_size=2, max_size=6))
def test_chunks_of_latents_cost_no_less_than_one_prefill(name, chunks):
    """Cached latents are expanded again or attended to absorbed: chunks can only add FLOPs."""
    mixer = MODELS[name].blocks[0].mixer
    starts = [sum(chunks[:i]) for i in range(len(chunks))]
    assert sum(mixer.flops(c, s) for c, s in zip(chunks, starts, strict=True)) * CLOSE >= mixer.flops(sum(chunks), 0)


# Closed form and pass


def ideal(one):
    """The same server on a network that costs nothing."""
    network = replace(one.chip.network, hop_latency=0.0)
    link = "egress" if hasattr(network, "egress") else "link_bandwidth"
    dcn = one.chip.dcn and replace(one.chip.dcn, hop_latency=0.0, egress=1e29)
    return replace(one, chip=replace(one.chip, network=replace(network, **{link: 1e29}), dcn=dcn))


@given(
    st.sampled_from((*DENSE, "gemma-2-27b", "gemma-3-27b", "mistral-7b-v0.1")),
    st.sampled_from(list(CHIPS)),
    batches,
    contexts,
    st.sampled_from(FORMATS),
    st.sampled_from(FORMATS),
    st.data(),
)
def test_closed_form_and_pass_agree_for_dense_models(name, chip_name, batch, context, weights, kv, data):
    """Ideal network, no activations, no input embedding, no norms, the new token in the cache: 7.2 to rounding.

    Chips up to the number of KV heads, bf16 math, and attention that waits for memory: what 7.2 assumes."""
    tensor = data.draw(st.sampled_from(ways(name, chip_name)))
    inner = getattr(MODELS[name].blocks[0].mixer, "inner", MODELS[name].blocks[0].mixer)
    assume(inner.n_kv_heads % tensor == 0)
    formats = Precision(weights, kv, NOTHING, embedding=NOTHING)
    one = ideal(Server(MODELS[name], CHIPS[chip_name], Plan(tensor), formats))
    cache = kv_bytes(one.model, context + 1, kv)
    assume(2 * inner.n_heads / inner.n_kv_heads / formats.kv.bytes < one.chip.bf16 / one.chip.hbm_bandwidth)
    bound = step_time(one.chip, tensor, matmul_params(one.model), cache, batch, weights)
    step = decode_step(one, batch, context)
    assert step.value == pytest.approx(bound.value, rel=1e-9)
    memory = sum(value for path, value in leaves(step).items() if path.endswith("attention/memory"))
    assert memory == pytest.approx(bound["attention"].value, rel=1e-9)


@given(servers(), batches, contexts)
def test_a_pass_is_never_faster_than_the_closed_form(one, batch, context):
    """Experts, latents, networks, activations only add to 7.2 of the parameters and the cache that a token uses."""
    b = one.precision.kv.bytes
    read = sum(block.layers * block.mixer.read(1, context, b) for block in one.model.blocks)
    assume(read > 0)
    bound = step_time(
        one.chip, one.plan.chips, matmul_params(one.model), read, batch, one.precision.weights, one.precision.math
    )
    assert decode_step(one, batch, context).value * CLOSE >= bound.value


@given(servers(), batches, st.integers(1, 100_000))
def test_a_prefill_is_never_faster_than_the_closed_form(one, batch, prompt):
    """At the full peak of all chips, for every matrix that a prompt token is multiplied with: all but the unembedding."""
    params = matmul_params(one.model) - one.model.vocab * one.model.d_model
    bound = prefill_time(one.chip, one.plan.chips, params, batch * prompt, math=one.precision.math)
    assert prefill(one, batch, prompt).value * CLOSE >= bound.value


@given(servers(models=DENSE, kv=("heads",)), contexts)
def test_throughput_never_exceeds_saturation(one, context):
    """And at the half-throughput batch of the floor it is half of it."""
    kv, n = kv_bytes(one.model, context, one.precision.kv), one.plan.chips
    limit = saturation_throughput(one.chip, n, kv).value
    half = half_throughput_batch(one.model.params, kv, one.precision.weights).value
    assert half / step_floor(one.chip, n, one.model.params, kv, half, one.precision.weights).value == pytest.approx(
        limit / 2
    )
    assert 4096 / decode_step(one, 4096, context).value <= limit * CLOSE


# One formula for every kind of number


@given(servers(), st.lists(batches, min_size=1, max_size=4), st.lists(contexts, min_size=1, max_size=4), news)
@settings(max_examples=40)
def test_an_array_is_its_numbers(one, many, long, new):
    """Value, waits, bound and fits of a sweep, entry by entry."""
    swept = forward(one, np.array(many)[:, None], new, np.array(long))
    single = [[forward(one, b, new, s) for s in long] for b in many]
    np.testing.assert_allclose(swept.value, [[x.value for x in row] for row in single], rtol=1e-12)
    np.testing.assert_array_equal(swept.fits, [[x.fits for x in row] for row in single])
    np.testing.assert_allclose(
        sum(np.broadcast_to(w, swept.value.shape) for w in swept.waits.values()), swept.value, rtol=1e-9
    )


@given(servers(), batches, contexts, news)
@settings(max_examples=60)
def test_an_array_of_plans_is_its_plans(one, batch, context, new):
    """Time, waits and fits of a sweep over tensor ways, beside the other axes of the plan, entry by entry."""
    joined, domain = one.plan.expert * one.plan.pipeline, one.chip.interconnect.domain
    many = [x for x in ways(one.model.name, one.chip.name) if x * joined <= domain]

    def timed(tensor):
        return forward(replace(one, plan=replace(one.plan, tensor=tensor)), batch, new, context)

    swept, single = timed(np.array(many)), [timed(x) for x in many]
    np.testing.assert_allclose(swept.value, [x.value for x in single], rtol=1e-12)
    np.testing.assert_array_equal(np.broadcast_to(swept.fits, len(many)), [x.fits for x in single])
    for name, seconds in swept.waits.items():
        np.testing.assert_allclose(
            np.broadcast_to(seconds, len(many)), [x.waits.get(name, 0) for x in single], rtol=1e-9, atol=1e-18
        )


@each
def test_numbers_arrays_jax_and_symbols_agree(one):
    """The same function on floats, NumPy arrays, JAX arrays (jitted, vmapped) and SymPy symbols, numbers put in."""
    batch, context = np.array([1.0, 16.0, 700.0]), np.array([128.0, 8192.0, 10**5])
    expected = np.array([decode_step(one, b, s).value for b, s in zip(batch.tolist(), context.tolist(), strict=True)])

    def step(b, s):
        return decode_step(one, b, s).value

    np.testing.assert_allclose(step(batch, context), expected, rtol=1e-12)
    with jax.enable_x64(True):
        b, s = jnp.asarray(batch), jnp.asarray(context)
        for f in (step, jax.jit(jax.vmap(step))):
            got = f(b, s)
            assert got.dtype == jnp.float64
            np.testing.assert_allclose(np.asarray(got), expected, rtol=1e-12)
    seen = {}
    inputs = {name: symbolic(x, (name,), seen) for name, x in dict(server=one, batch=16, context=8192).items()}
    formula = decode_step(**inputs).value
    values = {symbol: value for symbol, _, value in seen.values()}
    assert isinstance(formula, sympy.Basic) and formula.free_symbols <= set(values)
    assert sympy.lambdify(list(values), formula, "math")(*values.values()) == pytest.approx(expected[1], rel=1e-12)


@each
@pytest.mark.parametrize("what", ["batch", "context", "hbm_bandwidth", "bf16"])
def test_gradients_are_finite_and_true(one, what):
    """jax.grad through a step equals the difference quotient: what one more sequence, token or byte per second buys."""
    at = dict(batch=37.3, context=5000.3, hbm_bandwidth=one.chip.hbm_bandwidth, bf16=one.chip.bf16)

    def step(x):
        work = {**at, what: x}
        chip = replace(one.chip, hbm_bandwidth=work["hbm_bandwidth"], bf16=work["bf16"])
        return decode_step(replace(one, chip=chip), work["batch"], work["context"]).value

    x, h = at[what], at[what] * 1e-5
    with jax.enable_x64(True):
        slope, jitted = float(jax.grad(step)(x)), float(jax.jit(jax.grad(step))(x))
    quotient = (step(x + h) - step(x - h)) / (2 * h)
    assert np.isfinite(slope) and slope == pytest.approx(jitted, rel=1e-9)
    assert slope == pytest.approx(quotient, rel=1e-4, abs=1e-9 * step(x) / x)
    assert slope <= 0 if what in ("hbm_bandwidth", "bf16") else slope >= 0


def test_gradients_of_formats_and_links():
    """Bytes of a weight, link bandwidth and hop latency have slopes too: fp8 weights buy half of what weights cost."""
    one = server("llama-3-70b", "ironwood", 8)

    def by_bytes(b):
        return decode_step(replace(one, precision=Precision(weights=Format("w", b, "bf16"))), 1, 8192).value

    def by_link(w):
        network = replace(one.chip.network, link_bandwidth=w)
        return decode_step(replace(one, chip=replace(one.chip, network=network)), 4096, 100).value

    with jax.enable_x64(True):
        assert float(jax.grad(by_link)(100e9)) < 0
        slope = float(jax.grad(by_bytes)(2.0))
    assert slope == pytest.approx((by_bytes(2.001) - by_bytes(1.999)) / 0.002, rel=1e-6)


def test_gradients_of_a_footprint():
    """A token more of each of 4 sequences takes 4 times the bytes of a token, in the derivative too."""
    with jax.enable_x64(True):
        slope = jax.grad(lambda context: footprint(server("llama-3-70b"), 4.0, context).value)(8192.0)
    assert 4 * 327_680 == float(slope)


def with_units(one, units):
    """The server with a unit on everything that has one."""

    def per(unit, **values):
        return {name: value * unit for name, value in values.items() if value is not None}

    s, B = units.second, units.byte
    chip = one.chip

    def wired(network):
        with_units = {"hop_latency": s, "overhead": s, "link_bandwidth": B / s, "egress": B / s}
        has = [f.name for f in fields(network) if f.name in with_units]
        return replace(network, **{name: getattr(network, name) * with_units[name] for name in has})

    chip = replace(
        chip,
        network=wired(chip.network),
        dcn=chip.dcn and wired(chip.dcn),
        hbm_bytes=chip.hbm_bytes * B,
        hbm_reserved=chip.hbm_reserved * B,
        hbm_bandwidth=chip.hbm_bandwidth * B / s,
        **per(1 / s, **{f: getattr(chip, f) for f in ("bf16", "f32", "int8", "fp8", "int4", "fp4")}),
    )

    def weighed(x):
        if isinstance(x, Format):
            return replace(x, bytes=x.bytes * B)
        if isinstance(x, Recurrent):
            return replace(x, state=x.state * B)
        if isinstance(x, tuple):
            return tuple(map(weighed, x))
        changes = {f.name: weighed(getattr(x, f.name)) for f in fields(x) if f.init} if is_dataclass(x) else None
        return x if changes is None else replace(x, **changes)

    return replace(one, model=weighed(one.model), chip=chip, precision=weighed(one.precision))


@each
def test_units_in_seconds_out(one):
    """Pint quantities in, seconds out, of the same number: no term adds bytes to seconds. Footprints are bytes."""
    units = UNITS
    carried = with_units(one, units)
    for f, work in ((decode_step, (64, 8192)), (prefill, (1, 8192))):
        seconds = f(carried, *work).value
        assert seconds.units == units.second
        assert seconds.magnitude == pytest.approx(f(one, *work).value, rel=1e-12)
    held = footprint(carried, 64, 8192).value
    assert held.units == units.byte and held.magnitude == pytest.approx(footprint(one, 64, 8192).value)


@each
def test_a_repeated_pass_is_the_same(one):
    """Nothing is kept between calls: the same inputs give the same bits."""
    assert leaves(decode_step(one, 16, 8192)) == leaves(decode_step(one, 16, 8192))


# Nouns in disguise


@given(batches, contexts, news)
def test_degenerate_nouns_are_the_plain_ones(batch, context, new):
    """A window beyond the context is full attention; MHA is GQA with K = N; one expert is the dense case."""
    plain = GQA(32, 8, 128)
    wide = Windowed(plain, 10**9)
    assert (plain.flops(new, context), plain.read(new, context, 2), plain.cache(context, 2)) == (
        wide.flops(new, context),
        wide.read(new, context, 2),
        wide.cache(context, 2),
    )
    assert FFN(8, 1, 1).touched(batch) == 1
    shared = Shared(plain)
    assert (shared.flops(new, context), 0, 0) == (
        plain.flops(new, context),
        shared.cache(context, 2),
        shared.write(new, 2),
    )
    assert shared.params(4096) == 2 * 4096 * 32 * 128


@given(servers(kv=("heads",)), batches, contexts)
def test_a_slice_of_its_own_is_the_network_it_came_from(one, batch, context):
    """Cutting the slice again changes nothing."""
    assert isinstance(one.slice, Slice) and one.slice.slice(one.plan.tensor) == one.slice
    assert one.slice == one.chip.interconnect.slice(one.plan.tensor)


# Services

LINK = Switch(10e9, 1e-5, 10**6)  # every chip has one, whatever its makers say
lengths = st.integers(1, 20_000) | st.builds(
    lambda *counts: Lengths(counts), st.integers(1, 500), st.integers(500, 4000), st.integers(4000, 20_000)
)


@st.composite
def services(draw, policies=(APART, *POLICIES)):
    """A service of any kind of model whose slots all go equally fast: stages and groups are left out (test_steady has them)."""
    one = draw(st.sampled_from([one for one in FEW if one.plan.groups * one.plan.pipeline == 1]))
    load = Workload(draw(lengths), draw(st.integers(1, 3000)), 1.0, draw(st.sampled_from([0.0, 0.25, 0.9])))
    policy, slots = draw(st.sampled_from(policies)), draw(st.sampled_from([1, 4, 16]))
    assume(max_batch(one, load.length) >= slots and max_batch(one, 24_000))
    if policy == APART:
        servers = draw(st.tuples(st.integers(1, 5), st.integers(1, 5)))
        return disaggregated(one, one, load, servers, LINK, slots, draw(st.booleans()))
    budget = slots + draw(st.sampled_from([256, 4096])) if policy == "chunked" else None
    return colocated(one, load, draw(st.integers(1, 5)), policy, budget, slots)


@settings(max_examples=50)
@given(services())
def test_more_servers_never_lower_the_capacity(one):
    """Of either pool; and twice the servers, of both, is twice the capacity."""
    most, (prefills, decodes) = capacity(one).value, one.servers
    pools = [(prefills + 1, decodes), (prefills, decodes + 1)] if one.policy == APART else [(prefills + 1, decodes + 1)]
    for more in pools:
        assert most <= capacity(replace(one, servers=more)).value * CLOSE
    twice = replace(one, servers=(2 * prefills, 2 * decodes))
    assert 2 * most == pytest.approx(capacity(twice).value, rel=1e-9)


@settings(max_examples=50)
@given(services((APART, "prefill first", "chunked")), st.floats(0.01, 0.99), st.floats(0.01, 0.99))
def test_waits_grow_with_the_rate(one, part, other):
    """Load, batch, TTFT and TPOT. Chunks that are small beside a prompt are the exception: they are so much longer while few
    decode that TPOT may fall by some per cent towards the capacity."""
    slow, fast = (at_rate(one, x * capacity(one).value) for x in sorted((part, other)))
    low, high = loads(slow), loads(fast)
    assert all(low[where] <= high[where] for where in low)
    assert decoding(slow).value <= decoding(fast).value * CLOSE
    least = 1.05 if one.policy == "chunked" else CLOSE
    assert tpot(slow).value <= tpot(fast).value * least
    assert ttft(slow).value <= ttft(fast).value * CLOSE
    assert ttft(slow, 0.9).value <= ttft(fast, 0.99).value * CLOSE


@settings(max_examples=50)
@given(services(), st.floats(0.01, 0.99))
def test_tokens_per_chip_are_those_of_all_chips(one, part):
    """Times the chips of both pools: rate x output. And never above capacity x output over the chips."""
    loaded = at_rate(one, part * capacity(one).value)
    mean = one.workload.output.mean()
    assert per_chip(loaded).value * one.chips == pytest.approx(loaded.workload.rate * mean, rel=1e-12)
    assert per_chip(loaded).value <= capacity(one).value * mean / one.chips * CLOSE


@settings(max_examples=50)
@given(services((APART, "prefill first", "chunked")), st.floats(0.01, 0.99))
def test_littles_law_of_a_service(one, part):
    """Sequences present are the rate times the time of one: its cache on the way, and a TPOT for each token."""
    loaded = at_rate(one, part * capacity(one).value)
    rate = loaded.workload.rate / loaded.servers[1]
    seconds = station(loaded).held + loaded.workload.output.mean() * tpot(loaded).value
    assert rate * seconds == pytest.approx(decoding(loaded).value, rel=1e-6)


@settings(max_examples=40)
@given(
    services((APART, "prefill first", "chunked")),
    st.floats(0.01, 100),
    st.floats(1e-3, 1),
    st.sampled_from([0.5, 0.9, 0.99]),
)
def test_goodput_is_what_promises_leave_of_the_capacity(one, first, each, share):
    """Never above it, never less for softer promises or a smaller share that they are made to."""
    found = goodput(one, first, each, share).value
    assert 0 <= found <= capacity(one).value
    for softer in ((2 * first, each, share), (first, 2 * each, share), (first, each, share - 0.2)):
        assert found <= goodput(one, *softer).value * (1 + 2e-4)


@given(servers(), st.integers(1, 30_000), st.floats(1e6, 1e12))
def test_half_the_bits_of_a_cache_are_half_its_way(one, prompt, egress):
    """fp8 instead of bf16 on the decode server: half the bytes, and half the time of a link without latency. States keep their
    own format."""
    assume(all(not isinstance(block.mixer.core, Recurrent) for block in one.model.blocks))
    wide, narrow = (replace(one, precision=replace(one.precision, kv=kv)) for kv in ("bf16", "fp8"))
    assume(max_batch(wide, prompt + 1) and fits(one, one.plan.groups * one.plan.pipeline, prompt))
    link, load = Switch(egress, 0.0, 10**6), Workload(prompt, 1, 1.0)
    long, short = (transfer(disaggregated(one, decode, load, link=link), prompt).value for decode in (wide, narrow))
    assert long == pytest.approx(2 * short, rel=1e-12)


@settings(max_examples=50)
@given(services((APART,)))
def test_streaming_a_cache_never_costs(one):
    """The way, the capacity and the first token are no worse than those of caches sent whole."""
    whole, streamed = (replace(one, streamed=way) for way in (False, True))
    for prompt in one.workload.prompt.counts:
        assert handover(streamed, prompt).value <= handover(whole, prompt).value
    assert capacity(whole).value <= capacity(streamed).value * CLOSE
    both = [at_rate(each, 0.5 * capacity(whole).value) for each in (streamed, whole)]
    assert ttft(both[0]).value <= ttft(both[1]).value * CLOSE


@settings(max_examples=50)
@given(services((APART,)), st.floats(1, 100))
def test_a_faster_link_never_costs(one, k):
    """Capacity and first token, at the same rate."""
    fast = replace(one, link=replace(LINK, egress=k * LINK.egress))
    rate = 0.9 * capacity(one).value
    assert capacity(one).value <= capacity(fast).value * CLOSE
    assert ttft(at_rate(fast, rate)).value <= ttft(at_rate(one, rate)).value * CLOSE
