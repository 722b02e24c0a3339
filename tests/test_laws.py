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
from lib.mixers import GQA, Recurrent, pairs
from lib.models import FFN, kv_bytes
from lib.network import Slice
from lib.server import Plan, Server, footprint, max_batch, weights
from lib.variants import Shared, Windowed

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


@given(servers(), batches, contexts, news, st.sampled_from(sorted(MOVES)), st.sampled_from(FORMATS))
def test_quantising_one_tensor_moves_only_its_terms(one, batch, context, new, field, stored):
    """Weights, caches, activations, and the modules that may differ: every other leaf stays to the last bit."""
    other = replace(one, precision=replace(one.precision, **{field: stored}))
    before, after = (leaves(forward(s, batch, new, context)) for s in (one, other))
    moved = {path for path in before if before[path] != after[path]}
    assert {path for path in moved if not path.endswith(MOVES[field])} == set()
    lighter = (
        other.precision.of(field).bytes if field not in ("kv", "activations") else getattr(other.precision, field).bytes
    )
    heavier = (
        one.precision.of(field).bytes if field not in ("kv", "activations") else getattr(one.precision, field).bytes
    )
    if lighter <= heavier:
        assert all(after[path] <= before[path] * CLOSE for path in before)


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
