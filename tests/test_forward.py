"""The time of one pass, operation by operation."""

from dataclasses import replace
from math import comb

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import GROUPED, batches, contexts, leaves, nodes, server, servers

from lib.chips import chip
from lib.formats import Precision
from lib.forward import decode_step, forward, mixed, prefill
from lib.mixers import GQA
from lib.models import FFN, Block, Model, model
from lib.network import all_reduce
from lib.server import Plan, Server, max_batch
from lib.variants import Shared

C, W = 2307e12, 7380e9  # Ironwood, bf16
D, N, K, H, F, V, L = 8192, 64, 8, 128, 28672, 128_256, 80  # LLaMA-3-70B
STEP = decode_step(server("llama-3-70b", "ironwood", 8), 64, 8192)
BY_HAND = {  # seconds on each of 8 chips: every operation of a decode step of 64 sequences after 8,192 tokens
    "embed/memory": 64 * D * (2 + 2) / 8 / W,
    "layers/projections/compute": L * 2 * 64 * (2 * D * N * H + 2 * D * K * H) / 8 / C,
    "layers/projections/memory": L * (2 * (2 * D * N * H + 2 * D * K * H) / 8 + 2 * 64 * (2 * D + 2 * N * H / 8)) / W,
    "layers/attention/compute": L * 64 * 4 * N * H * 8193 / 8 / C,
    "layers/attention/memory": L * (64 * 2 * 2 * K * H * 8193 / 8 + 2 * 64 * 2 * N * H / 8) / W,
    "layers/ffn/compute": L * 2 * 64 * 3 * D * F / 8 / C,
    "layers/ffn/memory": L * (2 * 3 * D * F / 8 + 2 * 64 * (2 * D + 3 * F / 8)) / W,
    "layers/all-reduce/reduce-scatter/latency": L * 2 * 3e-6,
    "layers/all-reduce/reduce-scatter/bandwidth": L * 2 * 2 * 64 * D * 7 / 8 / 300e9,
    "layers/all-reduce/all-gather/latency": L * 2 * 3e-6,
    "layers/all-reduce/all-gather/bandwidth": L * 2 * 2 * 64 * D * 7 / 8 / 300e9,
    "unembed/compute": 2 * 64 * D * V / 8 / C,
    "unembed/memory": (2 * D * V / 8 + 2 * 64 * (D + V / 8)) / W,
}


@pytest.mark.parametrize("path", BY_HAND)
def test_a_decode_step_by_hand(path):
    """70B on 8 Ironwood chips, batch 64, 8,192 tokens: weights, caches, activations and the new KV are moved once."""
    assert BY_HAND[path] == pytest.approx(STEP[path].value, rel=1e-12)


def test_the_step_is_what_its_operations_take():
    """The sum over operations of the longer of arithmetic and memory: nothing is left out of the table above."""
    seconds = BY_HAND["embed/memory"]
    for one in ("layers/projections", "layers/attention", "layers/ffn", "unembed"):
        seconds += max(BY_HAND[f"{one}/compute"], BY_HAND[f"{one}/memory"])
    for half in ("reduce-scatter", "all-gather"):
        seconds += max(BY_HAND[f"layers/all-reduce/{half}/latency"], BY_HAND[f"layers/all-reduce/{half}/bandwidth"])
    assert STEP.value == pytest.approx(seconds, rel=1e-12)


def test_decode_and_prefill_are_corners_of_forward():
    """One new token after the context; all tokens after none."""
    one = server("llama-3-70b", "ironwood", 8)
    assert (forward(one, 4, 1, 100).value, forward(one, 4, 100, 0).value) == (
        decode_step(one, 4, 100).value,
        prefill(one, 4, 100).value,
    )


def test_a_prefill_by_hand():
    """8B, one prompt of 2,048 tokens on one H100, compute-bound projections and FFN; logits of one token only."""
    T, c = 2048, 989e12
    pre = prefill(server("llama-3-8b", "h100"), 1, T)
    matmul = 2 * 4096 * 4096 + 2 * 4096 * 1024
    assert [
        32 * 2 * T * matmul / c,
        32 * 2 * T * 3 * 4096 * 14336 / c,
        32 * 4 * 4096 * T * (T + 1) / 2 / c,
        2 * 4096 * 128_256 / c,
    ] == [
        pytest.approx(pre[path].value, rel=1e-12)
        for path in ("layers/projections/compute", "layers/ffn/compute", "layers/attention/compute", "unembed/compute")
    ]
    assert ("compute", "compute") == (pre["layers/projections"].bound, pre["layers/ffn"].bound)


def test_experts_are_read_as_often_as_they_are_touched():
    """Mixtral, one chip, 4 sequences: 5.47 of 8 experts read, 2 multiplied (formulas.md T11: 5.5)."""
    E, k, B = 8, 2, 4
    touched = E * (1 - (1 - k / E) ** B)
    expert, router = 3 * 4096 * 14336, 4096 * 8
    ffn = decode_step(server("mixtral-8x7b", "ironwood"), B, 1000)["layers/ffn"]
    assert 5.5 == round(touched, 1)
    assert [
        32 * 2 * B * (k * expert + router) / C,
        32 * (2 * (touched * expert + router) + 2 * B * (2 * k * 4096 + 3 * k * 14336)) / W,
    ] == [pytest.approx(ffn[part].value, rel=1e-12) for part in ("compute", "memory")]


def test_latent_attention_by_hand():
    """DeepSeek-V3 on one chip: 576 values a token are read once for keys and values; scores cost 2 N (576 + 512)."""
    B, S = 8, 4096
    attention = decode_step(server("deepseek-v3", "ironwood"), B, S)["moe/attention"]
    moved = 2 * 576 * (S + 1) * B + 2 * B * 128 * (128 + 64 + 128)
    assert [58 * B * 2 * 128 * (576 + 512) * (S + 1) / C, 58 * moved / W] == [
        pytest.approx(attention[part].value, rel=1e-12) for part in ("compute", "memory")
    ]


def test_dense_layers_come_before_the_experts():
    """DeepSeek-V3: 3 dense layers of width 18,432, 58 with 256 experts and a shared one."""
    one = decode_step(server("deepseek-v3", "ironwood"), 1, 100)
    assert ["embed", "dense", "moe", "unembed"] == [part.name for part in one.parts]
    assert 3 * 2 * 3 * 7168 * 18432 / C == pytest.approx(one["dense/ffn/compute"].value)
    common = 3 * 7168 * 2048 + 7168 * 256 + 256
    assert 58 * 2 * (8 * 3 * 7168 * 2048 + common) / C == pytest.approx(one["moe/ffn/compute"].value)


def test_windowed_layers_read_their_window():
    """gpt-oss-120b: 18 layers see 128 tokens, the new one among them, 18 see all 8,193 (formulas.md, trap 12).

    A sliding window of 128 is the token itself and the 127 before it: 127 are read, one is written."""
    one = decode_step(server("gpt-oss-120b", "ironwood"), 4, 8192)
    token, activations = 2 * 2 * 8 * 64, 2 * 4 * 2 * 64 * 64
    assert [18 * (4 * token * 128 + activations) / W, 18 * (4 * token * 8193 + activations) / W] == [
        pytest.approx(one[f"{name}/attention/memory"].value, rel=1e-12) for name in ("local", "global")
    ]


def test_windowed_layers_score_their_window():
    """gpt-oss-120b: 128 tokens in 18 layers, all 8,193 in the others; a prompt of 200 grows to the window and stays."""
    step, fill = decode_step(server("gpt-oss-120b"), 4, 8192), prefill(server("gpt-oss-120b"), 4, 200)
    seen = [
        ("local", step, 128),
        ("global", step, 8193),
        ("local", fill, 128 * 129 / 2 + 72 * 128),
        ("global", fill, 20_100),
    ]
    for name, one, tokens in seen:
        assert 18 * 4 * 4 * 64 * 64 * tokens / C == pytest.approx(one[f"{name}/attention/compute"].value, rel=1e-12)


def test_recurrent_layers_do_not_grow():
    """Qwen3.5: 45 layers read and write a state of 4,268,032 bytes, whatever the context."""
    short, long = (decode_step(server("qwen3.5-397b-a17b", "ironwood"), 2, s)["linear"] for s in (10, 10**5))
    assert short.value == long.value
    assert 45 * (2 * 2 * 4_268_032 + 2 * 2 * 2 * 64 * 128) / W == pytest.approx(
        long["attention/memory"].value, rel=1e-12
    )


def test_a_layer_that_shares_a_cache_keeps_none():
    """It reads another layer's cache, writes nothing, and has no key and value projections."""
    one = model("llama-3-8b")
    (block,) = one.blocks
    shared = replace(
        one, blocks=(replace(block, layers=16), replace(block, name="shared", layers=16, mixer=Shared(block.mixer)))
    )
    step = decode_step(Server(shared, chip("ironwood")), 4, 1000)
    token = 2 * 2 * 8 * 128
    assert 16 * 4 * token / W == pytest.approx(
        step["layers/attention/memory"].value - step["shared/attention/memory"].value
    )
    assert 16 * 2 * 4 * 2 * 4096 * 1024 / C == pytest.approx(
        step["layers/projections/compute"].value - step["shared/projections/compute"].value
    )


def test_embedding_is_a_gather():
    """64 rows, not the table: no arithmetic, 64 x 8192 values in and out."""
    embed = decode_step(server(), 64, 10)["embed"]
    assert (["memory"], pytest.approx(64 * D * 4 / W)) == ([part.name for part in embed.parts], embed.value)


def test_two_all_reduces_a_layer():
    """Of B D activations each, on the server's slice."""
    one = server("llama-3-70b", "v5e", 8)
    assert 80 * 2 * all_reduce(2 * 16 * D, 8, one.slice).value == pytest.approx(
        decode_step(one, 16, 100)["layers/all-reduce"].value, rel=1e-12
    )


@pytest.mark.parametrize("kv", ["heads", "batch", "sequence"])
def test_one_chip_waits_for_no_network(kv):
    """Whatever the plan calls the cut."""
    waits = decode_step(server("llama-3-70b", "ironwood", 1, kv), 16, 8192).waits
    assert 0 == waits.get("latency", 0) == waits.get("bandwidth", 0)


@pytest.mark.parametrize("kv", ["batch", "sequence"])
def test_a_cut_that_copies_nothing_costs_nothing(kv):
    """At 8 ways the 8 KV heads of 70B lie once: the same step as kv="heads"."""
    assert (
        decode_step(server("llama-3-70b", "ironwood", 8), 16, 8192).value
        == decode_step(server("llama-3-70b", "ironwood", 8, kv), 16, 8192).value
    )


def test_a_layer_without_copies_pays_no_exchange():
    """Qwen3.5 on 8 chips: the 64 heads of its recurrent layers are cut 8 ways, only the 15 others exchange queries."""
    step = decode_step(server("qwen3.5-397b-a17b", "ironwood", 8, "batch"), 16, 8192)
    exchanged = {part.name: part.value for part in step["linear"].parts if part.name == "all-to-all"}
    assert 0 == sum(exchanged.values())
    assert step["full/all-to-all"].value > 0


def test_cutting_by_batch_costs_two_all_to_alls_a_layer():
    """Queries there, outputs back: two hop floors a layer (formulas.md, disagreement 26 and trap 15).

    70B on 16 v5e: two copies, one hop apart, so 2 x 80 x 1 us at least."""
    step = decode_step(server("llama-3-70b", "v5e", 16, "batch"), 16, 8192)
    exchanges = [
        node
        for node in nodes(step["layers"])
        if "latency" in [p.name for p in node.parts] and node.name == "all-to-all"
    ]
    assert 160e-6 == pytest.approx(sum(node["latency"].value for node in exchanges))


@pytest.mark.parametrize("kv", ["batch", "sequence"])
def test_cutting_beyond_the_heads_halves_the_read(kv):
    """70B on 16 chips: attention reads half of what the copies read."""
    heads, cut = (
        decode_step(server("llama-3-70b", "v5e", 16, one), 16, 65536)["layers/attention/memory"].value
        for one in ("heads", kv)
    )
    assert 0.5 == pytest.approx(cut / heads, rel=2e-3)


def test_sequences_dealt_out_unevenly():
    """Three sequences on two copies: the fuller chip reads two, and computes two."""
    three, four = (
        decode_step(server("llama-3-70b", "v5e", 16, "batch"), b, 65536)["layers/attention/compute"].value
        for b in (3, 4)
    )
    assert three == four


def test_a_measured_cache_rate_is_used_by_attention_only():
    """A chip whose cache streams at half the rate."""
    slow = replace(chip("ironwood"), kv_bandwidth=W / 2)
    one = server("llama-3-70b", "ironwood", 8)
    fast, slow = decode_step(one, 64, 8192), decode_step(replace(one, chip=slow), 64, 8192)
    assert [2, 1, 1] == [
        slow[path].value / fast[path].value
        for path in ("layers/attention/memory", "layers/ffn/memory", "layers/projections/memory")
    ]


def test_a_measured_cache_rate_may_be_swept():
    """An array of rates gives an array of steps."""
    one = server("llama-3-70b", "ironwood", 8)
    swept = decode_step(replace(one, chip=replace(one.chip, kv_bandwidth=np.array([W, W / 2]))), 64, 8192)
    assert [1.0, 2.0] == (swept["layers/attention/memory"].value / STEP["layers/attention/memory"].value).tolist()


def test_a_swept_chip():
    """Arrays in the chip: HBM bandwidth as an axis of the sweep, one value the same as that chip alone."""
    one = server("llama-3-70b", "ironwood", 8)
    swept = decode_step(replace(one, chip=replace(one.chip, hbm_bandwidth=np.array([W, 2 * W]))), 64, 8192)
    assert STEP.value == swept.value[0] > swept.value[1]


def test_what_does_not_fit_is_returned_and_says_so():
    """A time with fits False and a line in its text: 70B in bf16 does not fit one v5e."""
    step = decode_step(server("llama-3-70b", "v5e"), 1, 8192)
    assert (False, True) == (step.fits, step.value > 0)
    assert "does not fit: 144 GB a chip of 16.9 GB" in str(step).splitlines()[0]
    assert "does not fit" in step._repr_html_()
    assert (True, "") == (STEP.fits, STEP.note)


def test_fits_is_a_mask_in_a_sweep():
    """One truth value a configuration."""
    swept = decode_step(server("llama-3-70b", "ironwood", 8), np.array([[1], [1000]]), np.array([8192, 131072]))
    assert [[True, True], [False, False]] == swept.fits.tolist()
    assert swept.fits.shape == swept.value.shape


@pytest.mark.parametrize(
    "pair",
    [
        (np.array([[1], [64]]), np.array([8, 8192, 32768])),
        (np.arange(1, 4), 100),
        (5, np.array([[[7]]])),
        ([1, 2], (3, 4)),
        (np.array([1, 2], np.uint8), np.array([3, 4], np.int16)),
        (np.array(3), np.array(4)),
        (np.int64(3), np.float32(4)),
    ],
    ids=str,
)
def test_a_sweep_has_the_broadcast_shape_and_the_values_of_each(pair):
    """Lists, 0-d arrays, NumPy scalars, small integers: each entry is the scalar answer."""
    one = server("gpt-oss-120b", "h100", 4, "batch")
    batch, context = np.broadcast_arrays(*pair)
    expected = [decode_step(one, int(b), int(s)).value for b, s in zip(batch.flat, context.flat, strict=True)]
    swept = np.asarray(decode_step(one, *pair).value)
    assert batch.shape == swept.shape
    np.testing.assert_allclose(swept.ravel(), expected, rtol=1e-12)


@pytest.mark.parametrize("kind", [np.int32, np.uint32, np.int64, np.float16, np.float32])
def test_narrow_numbers_do_not_overflow(kind):
    """2^14 sequences of 2^15 tokens: the products exceed 32 bits, and float16 long before."""
    one = server("llama-3-70b", "ironwood", 8)
    expected = decode_step(one, 2**14, 2**15).value
    assert expected == pytest.approx(
        float(decode_step(one, np.array([2**14], kind), np.array([2**15], kind)).value[0]), rel=1e-6
    )
    assert expected == pytest.approx(float(decode_step(one, kind(2**14), kind(2**15)).value), rel=1e-6)


def test_shapes_that_do_not_broadcast():
    """ValueError of NumPy, not a wrong answer."""
    with pytest.raises(ValueError, match="broadcast"):
        decode_step(server(), np.arange(1, 4), np.arange(1, 3))


@pytest.mark.parametrize("huge", [10**400, 1e300], ids=["int", "float"])
def test_numbers_beyond_all_batches(huge):
    """An answer that is infinite is none: ValueError."""
    with pytest.raises(ValueError, match="batch"):
        decode_step(server(), huge, 8192)


def test_hop_floor_of_a_short_step():
    """At batch 1 the 2 x 2 x 80 collectives of 70B on 8 Ironwood wait for their 3 hops: 0.96 ms (formulas.md T7)."""
    assert 0.96e-3 == pytest.approx(decode_step(server("llama-3-70b", "ironwood", 8), 1, 100).waits["latency"])


@given(servers(), batches, contexts, st.sampled_from([1, 5, 512]))
def test_every_value_is_finite_and_adds_up(one, batch, context, new):
    """No NaN, no negative time; sums are sums and maxima are maxima, at every node."""
    for node in nodes(forward(one, batch, new, context)):
        assert 0 <= node.value < float("inf")
        if node.parts:
            values = [part.value for part in node.parts]
            assert node.value == (max(values) if node.join == "max" else pytest.approx(sum(values), rel=1e-12))


def test_a_swept_plan_of_formats():
    """Bytes of the KV cache halve when it is kept in fp8, and nothing else of attention does."""
    one = server("llama-3-70b", "ironwood", 8)
    fp8 = decode_step(Server(one.model, one.chip, Plan(8), Precision(kv="fp8")), 64, 8192)
    a = L * 2 * 64 * 2 * N * H / 8 / W
    assert 0.5 == pytest.approx(
        (fp8["layers/attention/memory"].value - a) / (STEP["layers/attention/memory"].value - a)
    )


def test_verified_drafts_have_logits_each():
    """Five tokens to verify want five rows of logits: five times the arithmetic, the same read of the table."""
    one = Server(model("llama-3-8b"), chip("v5e"), precision=Precision("int8", "int8"))
    last, all_five = (forward(one, 64, 5, 2048, logits=logits)["unembed"] for logits in (1, 5))
    assert 5 * last["compute"].value == pytest.approx(all_five["compute"].value)
    assert all_five["memory"].value < 1.2 * last["memory"].value


def test_many_steps_fit_no_better_than_one():
    """A hundred steps of a server that does not fit do not fit either."""
    step = decode_step(Server(model("llama-3-70b"), chip("v5e"), Plan(16)), 500, 8192) * 100
    assert not step.fits and "does not fit" in str(step)


def test_a_sweep_says_how_many_do_not_fit():
    """The text of a sweep counts what does not fit."""
    one = Server(model("llama-3-70b"), chip("ironwood"), Plan(8))
    assert "1 of 2 do not fit" in str(decode_step(one, np.array([1, 10_000]), 8192))


def test_the_largest_batch_fits_its_step():
    """A step at the largest batch says that it fits."""
    one = Server(model("llama-2-7b"), chip("v3"))
    assert decode_step(one, max_batch(one, 128), 128).fits


def test_a_cache_cut_by_sequence_merges_partial_outputs():
    """16 chips, 8 KV heads: pairs gather the queries of their 8 heads (128 wide) and scatter as many partial outputs, bf16."""
    one = Server(model("llama-3-70b"), chip("v5e"), Plan(16, kv="sequence"))
    layers = decode_step(one, 64, 8192)["layers"]
    seconds = 80 * 2 * 64 * 64 * 128 / 8 * (1 - 1 / 2) / one.kv_slices[0].bandwidth
    assert seconds == pytest.approx(layers["all-gather/bandwidth"].value)
    assert seconds == pytest.approx(layers["reduce-scatter/bandwidth"].value)


def test_parts_of_a_sequence_are_indexed_by_their_own_chip():
    """Cut by sequence, each of 8 chips scores its eighth of the tokens; cut by heads, each scores all of them."""

    def compute(kv):
        one = Server(model("deepseek-v3.2"), chip("h200"), Plan(8, kv=kv), Precision(math="fp8"))
        return decode_step(one, 1, 32_768)["moe/attention/compute"].value

    scores = 58 * 2 * 64 * 128 * 32_769 / chip("h200").peak("fp8")
    assert scores * 7 / 8 == pytest.approx(compute("heads") - compute("sequence"))


# Plans with more axes: H200s in servers of 8, 450 GB/s and 0.6 us inside, 50 GB/s and 10 us between them


def step(plan, batch, name="llama-3-70b", chip_name="h200", context=8192):
    """A decode step by names, in bf16."""
    return decode_step(Server(model(name), chip(chip_name), plan), batch, context)


def test_a_pipeline_by_hand():
    """1,024 sequences on 4 stages of one server each: 256 are under way in a stage, through all 80 layers, one table at either
    end and 3 steps from server to server, of 256 x 8192 activations, an eighth of them over the card of each chip."""
    staged, part = step(Plan(8, pipeline=4), 1024), step(Plan(8), 256)
    assert [one.name for one in staged.parts] == ["embed", "layers", "send between domains", "unembed"]
    assert [part[one].value for one in ("embed", "layers", "unembed")] == [
        staged[one].value for one in ("embed", "layers", "unembed")
    ]
    sent = staged["send between domains"]
    assert [3 * 10e-6, 3 * 2 * 256 * D / 8 / 50e9] == pytest.approx([sent["latency"].value, sent["bandwidth"].value])
    assert part.value + max(30e-6, 3 * 2 * 256 * D / 8 / 50e9) == pytest.approx(staged.value)


SENDS = [  # chip, plan; steps inside a domain and between domains, microseconds of each kind
    ("h200", Plan(4, pipeline=2), {"send": 0.6}),
    ("h200", Plan(2, pipeline=8), {"send": 6 * 0.6, "send between domains": 10}),
    ("h200", Plan(2, expert=2, pipeline=4), {"send": 2 * 0.6, "send between domains": 10}),
    ("h200", Plan(8, pipeline=3), {"send between domains": 2 * 10}),
    ("h200", Plan(16, pipeline=2), {"send between domains": 10}),
    ("h200", Plan(8, pipeline=2, data=5), {"send between domains": 10}),
    ("gb200", Plan(32, pipeline=3), {"send": 0.6, "send between domains": 5}),
    ("gb200", Plan(16, pipeline=9), {"send": 6 * 0.6, "send between domains": 2 * 5}),  # 4 stages of 16 in a rack of 72
    ("ironwood", Plan(8, pipeline=8), {"send": 7}),
    ("v5e", Plan(16, pipeline=32), {"send": 30, "send between domains": 10}),
    ("l40s", Plan(pipeline=8), {"send": 7}),
    ("h200", Plan(64), {}),
]


@pytest.mark.parametrize(("name", "plan", "expected"), SENDS, ids=str)
def test_stages_fill_one_domain_after_the_other(name, plan, expected):
    """A stage hands over to its neighbour; the last one in a domain to the first of the next."""
    sent = [part for part in step(plan, 1, chip_name=name, context=1).parts if "send" in part.name]
    assert expected == pytest.approx({part.name: 1e6 * part["latency"].value for part in sent})


def test_a_prompt_is_handed_over_whole():
    """4 prompts of 1,000 tokens on 4 stages: one is under way, 1,000 x 8192 activations a step, from 8 chips to 8."""
    one = Server(model("llama-3-70b"), chip("h200"), Plan(8, pipeline=4))
    assert 3 * 2 * 1000 * D / 8 / 50e9 == pytest.approx(prefill(one, 4, 1000)["send between domains/bandwidth"].value)


@pytest.mark.parametrize(("batch", "share"), [(64, 22), (66, 22), (67, 23)])
def test_replicas_share_the_batch(batch, share):
    """Three replicas of 8 chips: the fullest has a third of the sequences, rounded up, and nothing to do with the others."""
    assert step(Plan(8), share).value == step(Plan(8, data=3), batch).value


def test_experts_in_groups_by_hand():
    """DeepSeek-V3 on 4 groups of 2 chips, 64 sequences: each group attends to 16 and reads a quarter of the 222 experts that
    all 64 touch (formulas.md T11), half of each on a chip."""
    layers, C, W = 58, 989e12, 4800e9
    touched, wide = 256 * (1 - (1 - 8 / 256) ** 64), 7168
    expert, common = 3 * wide * 2048 / 2, 3 * wide * 2048 / 2 + wide * 256 + 256
    moe = step(Plan(2, expert=4), 64, "deepseek-v3")["moe"]
    moved = 2 * (touched * expert / 4 + common) + 2 * 16 * (2 * wide * 8 + 3 * (8 + 1) * 2048 / 2)
    assert 222.4 == round(touched, 1)
    assert [layers * 2 * 16 * (8 * expert + common) / C, layers * moved / W] == pytest.approx(
        [moe["ffn/compute"].value, moe["ffn/memory"].value]
    )
    assert moe["attention"].value == step(Plan(2), 16, "deepseek-v3")["moe/attention"].value


def places(E, k, n):
    """Chips, of n, that hold some of the k distinct experts of a token, of E: those that do not hold none of comb(E, k) hands."""
    return n * (1 - comb(E - E // n, k) / comb(E, k))


@pytest.mark.parametrize(("E", "k", "n", "chips"), [(8, 2, 8, 2.0), (256, 8, 16, 6.52), (128, 8, 16, 6.60), (128, 4, 8, 3.34)])
def test_chips_that_a_token_visits(E, k, n, chips):
    """Mixtral's two experts lie on two of 8 chips, not on the 1.9 that two draws with replacement would reach. To 0.5 %."""
    assert chips == pytest.approx(places(E, k, n), abs=0.005)
    ffn = FFN(64, E, k)
    block = Block("moe", 1, GQA(8, 8, 16), ffn)
    one = Server(Model("m", 128, 100, (block,)), chip("v5e"), Plan(expert=n))
    sent = decode_step(one, n, 100)["moe/expert all-to-all/bandwidth"].value
    assert 2 * 2 * n * chips * 128 * (1 - 1 / n) / one.expert_slice.exchange == pytest.approx(sent, rel=5e-3)


@pytest.mark.parametrize(("E", "k", "n"), [(8, 2, 8), (8, 2, 32), (8, 8, 8), (256, 8, 64), (256, 8, 1024), (16, 1, 4), (4, 4, 2)])
def test_a_token_visits_no_more_chips_than_it_has_experts(E, k, n):
    """Never more than the exact count, and 14 % less at most, where it uses all experts (CONTRIBUTING, decisions). An expert that
    is cut over n / E chips is visited on all of them."""
    exact = places(E, k, n) if n <= E else n / E * places(E, k, E)
    block = Block("moe", 1, GQA(n, n, 16), FFN(1024, E, k))
    plan = Plan(max(n // E, 1), expert=min(n, E))
    one = Server(Model("m", 128, 100, (block,)), chip("v5p"), plan)
    sent = decode_step(one, n, 100)["moe/expert all-to-all/bandwidth"].value
    reached = sent * one.expert_slice.exchange / (2 * 2 * n * 128 * (1 - 1 / n))
    assert 0.86 * exact <= reached <= 1.0001 * exact <= 1.0001 * min(n, k * max(n / E, 1))


@pytest.mark.parametrize(("batch", "touched"), [(1, 8.0), (4, 30.5), (8, 57.4), (16, 102.0)])
def test_few_sequences_touch_few_experts_in_any_number_of_groups(batch, touched):
    """DeepSeek-V3 on 8 groups of one chip: what B sequences touch (formulas.md T11), an eighth of it in each group. That groups
    come in whole sequences adds none. A token travels once to each of the chips that hold some of its 8 of 256 experts."""
    expert, common = 3 * 7168 * 2048, 3 * 7168 * 2048 + 7168 * 256 + 256
    one = step(Plan(expert=8), batch, "deepseek-v3")["moe"]
    assert 58 * 2 * (touched * expert / 8 + common) / 4800e9 == pytest.approx(one["ffn/memory"].value, rel=0.02)
    sent = one["expert all-to-all/bandwidth"].value
    assert 58 * 2 * 2 * batch * places(256, 8, 8) * 7168 * (7 / 8) / 8 / 450e9 == pytest.approx(sent, rel=1e-3)


def test_tokens_travel_to_their_experts_and_back():
    """The same plan: 64 tokens of 7,168 values, each to 5.3 of the 8 chips (8 experts land on so many), twice a layer."""
    one = step(Plan(2, expert=4), 64, "deepseek-v3")
    sent = one["moe/expert all-to-all"]
    routed = 2 * 64 * places(256, 8, 8) * 7168
    assert 5.3 == round(places(256, 8, 8), 1)
    assert [58 * 2 * 0.6e-6, 58 * 2 * routed * (7 / 8) / 8 / 450e9] == pytest.approx(
        [sent["latency"].value, sent["bandwidth"].value], rel=1e-3
    )
    assert "expert all-to-all" not in [part.name for part in one["dense"].parts]


def test_tokens_travel_between_servers():
    """4 groups of 8 chips, a server each: three quarters of a server's tokens leave it through its 8 cards."""
    sent = step(Plan(8, expert=4), 64, "deepseek-v3")["moe/expert all-to-all"]
    routed = 2 * 64 * places(256, 8, 32) * 7168
    assert [58 * 2 * 10.6e-6, 58 * 2 * routed / 4 * (3 / 4) / 8 / 50e9] == pytest.approx(
        [sent["latency"].value, sent["bandwidth"].value], rel=1e-3
    )


def test_one_all_reduce_where_only_experts_follow_attention():
    """gpt-oss has no shared expert: its tokens leave between the halves of one all-reduce, 64 x 2880 bf16 over 8 chips.
    DeepSeek's shared expert needs the second one."""
    for name, layers, count, width in (("gpt-oss-120b", "local", 1, 2880), ("deepseek-v3", "moe", 2, 7168)):
        one = Server(model(name), chip("h200"), Plan(8, expert=2))
        found = decode_step(one, 2**14, 100)[layers]["all-reduce/all-gather/bandwidth"].value
        depth = next(block.layers for block in one.model.blocks if block.name == layers)
        assert depth * count * 2 * 2**13 * width * (7 / 8) / 450e9 == pytest.approx(found)


def test_a_dense_model_has_no_experts_to_share():
    """Its groups are replicas: no exchange, the same time."""
    assert step(Plan(2, expert=4), 64).value == step(Plan(2, data=4), 64).value == step(Plan(2), 16).value


@pytest.mark.parametrize(
    ("name", "chips", "latency", "seconds"),
    [("ironwood", 8, 3e-6, 7 / 300e9), ("v5e", 16, 6e-6, 15 / 100e9), ("h200", 8, 0.6e-6, 7 / 450e9)],
)
def test_one_shot_all_reduces_by_hand(name, chips, latency, seconds):
    """160 of 64 x 8192 activations: hops once instead of twice, and the whole array to every other chip."""
    waits = step(Plan(chips, all_reduce="one-shot"), 64, chip_name=name)["layers/all-reduce"]
    assert [160 * latency, 160 * 2 * 64 * D * seconds] == pytest.approx(
        [waits["latency"].value, waits["bandwidth"].value]
    )


def test_matrices_cut_over_two_servers():
    """16 H200: each of 320 phases crosses both networks, 0.6 + 10 us; the slower one brings half of the array through 8 cards
    while the faster one, which takes longer, still spreads 7/8 of it. The two copies of a KV head lie in one server."""
    one = step(Plan(16, kv="batch"), 512)["layers"]
    half = one["all-reduce/all-gather"]
    assert [160 * 10.6e-6, 160 * 2 * 512 * D * max(1 / 2 / 8 / 50e9, 7 / 8 / 450e9)] == pytest.approx(
        [half["latency"].value, half["bandwidth"].value]
    )
    assert 160 * 0.6e-6 == pytest.approx(one["all-to-all/latency"].value)


@pytest.mark.parametrize("kv", ["heads", "batch", "sequence"])
@pytest.mark.parametrize("plan", [Plan(), Plan(expert=2, pipeline=3, data=2, all_reduce="one-shot")], ids=str)
def test_a_swept_plan_is_its_plans(plan, kv):
    """tensor as an array beside a batch as an array: operations, exchanges, steps between stages and fits, entry by entry."""
    ways, batch = np.array([[1], [4], [8], [16]]), np.array([[1, 100, 5000]])

    def timed(tensor, batch):
        one = Server(model("mixtral-8x22b"), chip("h100"), replace(plan, tensor=tensor, kv=kv))
        return decode_step(one, batch, 8192)

    swept = timed(ways, batch)
    each = [[timed(x, b) for b in batch[0].tolist()] for x in ways[:, 0].tolist()]
    np.testing.assert_allclose(swept.value, [[one.value for one in row] for row in each], rtol=1e-12)
    np.testing.assert_array_equal(swept.fits, [[one.fits for one in row] for row in each])
    np.testing.assert_array_equal(swept.bound, [[one.bound for one in row] for row in each])


def test_parts_of_a_sequence_are_weighed():
    """16 v5e, 8 KV heads: a pair exchanges a number for each of its 8 query heads, 64 sequences and both parts, one hop apart."""
    sums = step(Plan(16, kv="sequence"), 64, chip_name="v5e")["layers/log-sum all-gather"]
    assert [80 * 1e-6, 80 * 2 * 64 * 8 * 2 / 2 / 50e9] == pytest.approx(
        [sums["latency"].value, sums["bandwidth"].value]
    )


# Steps that read a chunk of a prompt, too

KINDS = [  # dense, latents with experts, windows, chunked attention, experts with sinks
    server("llama-3-70b", "ironwood", 8),
    server("deepseek-v3", "h200", 16, "batch", weights="fp8"),
    server("gemma-3-27b", "v6e", 8),
    server("llama-4-scout", "h100", 8, "sequence"),
    server("gpt-oss-120b", "mi300x", 4, kv="fp8"),
    server("qwen3.5-397b-a17b", "b200", 8, weights="fp8"),
]
kinds = pytest.mark.parametrize("one", KINDS, ids=lambda s: s.model.name)


def test_a_mixed_step_by_hand():
    """64 sequences of 8,192 tokens and 512 tokens after 1,024: 576 tokens through every matrix, whose weights are read once;
    64 logits; attention of the 64 and of the chunk one after the other."""
    step = mixed(server("llama-3-70b", "ironwood", 8), 64, 8192, 512, 1024)
    attended = 512 * 1024 + 512 * 513 / 2
    expected = {
        "embed/memory": 576 * D * 4 / 8 / W,
        "layers/ffn/compute": L * 2 * 576 * 3 * D * F / 8 / C,
        "layers/ffn/memory": L * (2 * 3 * D * F / 8 + 2 * 576 * (2 * D + 3 * F / 8)) / W,
        "layers/projections/compute": L * 2 * 576 * (2 * D * N * H + 2 * D * K * H) / 8 / C,
        "layers/attention/decoding/memory": BY_HAND["layers/attention/memory"],
        "layers/attention/chunk/compute": L * 4 * N * H * attended / 8 / C,
        "layers/attention/chunk/memory": L * (2 * 2 * K * H * (1024 + 512) / 8 + 2 * 512 * 2 * N * H / 8) / W,
        "layers/all-reduce/all-gather/bandwidth": L * 2 * 2 * 576 * D * 7 / 8 / 300e9,
        "unembed/memory": BY_HAND["unembed/memory"],
        "unembed/compute": BY_HAND["unembed/compute"],
    }
    assert expected == pytest.approx({path: step[path].value for path in expected}, rel=1e-12)


@pytest.mark.parametrize("one", KINDS[:-1], ids=lambda s: s.model.name)
@pytest.mark.parametrize("batch", [1, 48])
def test_a_mixed_step_without_a_chunk_is_a_decode_step(one, batch):
    """As the chunk, after nothing, shrinks to a billionth of a token: the decode step, term by term. But for recurrent states,
    which are read and written whole however few tokens come."""
    alone, step = decode_step(one, batch, 5000), mixed(one, batch, 5000, 1e-9, 0)
    assert step.value == pytest.approx(alone.value, rel=1e-6)
    assert step["unembed"].value == alone["unembed"].value
    for block in one.model.blocks:
        assert step[f"{block.name}/attention/decoding"].value == alone[f"{block.name}/attention"].value


@kinds
def test_attention_of_a_mixed_step_is_that_of_both_passes(one):
    """Each cache is looked at on its own, whatever mixes tokens: that of the step, and that of the chunk's pass."""
    step, alone, chunk = mixed(one, 32, 20_000, 300, 9000), decode_step(one, 32, 20_000), forward(one, 1, 300, 9000)
    for block in one.model.blocks:
        found = step[f"{block.name}/attention"]
        assert alone[f"{block.name}/attention"].value == found["decoding"].value
        assert chunk[f"{block.name}/attention"].value == found["chunk"].value
        assert found.value == found["decoding"].value + found["chunk"].value
        for part in ("projections", "ffn"):
            assert decode_step(one, 332, 20_000)[f"{block.name}/{part}"].value == step[f"{block.name}/{part}"].value


@kinds
def test_the_parts_of_a_mixed_step_add_up(one):
    """Every node is the sum or the longest of its parts; the names are those of a decode step, with attention in two."""
    step = mixed(one, 32, 8192, 512, 4096)
    for node in nodes(step):
        if node.parts:
            values = [part.value for part in node.parts]
            assert node.value == pytest.approx(sum(values) if node.join == "sum" else max(values), rel=1e-12)
    plain = {path.replace("/decoding", "") for path in leaves(step) if "/chunk/" not in path}
    assert set(leaves(decode_step(one, 32, 8192))) == plain


@pytest.mark.parametrize("chunk", [128, 512, 8192])
def test_chunks_of_a_prompt_attend_as_the_whole(chunk):
    """The causal half is the same in chunks: their arithmetic adds up to that of one pass (trap 3); their reads do not."""
    one = server("llama-3-70b", "ironwood", 8)
    path, whole = "layers/attention", prefill(one, 1, 8192)
    parts = [mixed(one, 16, 100, chunk, start)[f"{path}/chunk"] for start in range(0, 8192, chunk)]
    assert whole[f"{path}/compute"].value == pytest.approx(sum(part["compute"].value for part in parts), rel=1e-12)
    read = sum(part["memory"].value for part in parts)
    assert (read > whole[f"{path}/memory"].value * 1.5) == (chunk < 8192)


@given(servers(), batches, contexts, st.integers(1, 8192), st.integers(0, 100_000))
def test_a_mixed_step_is_between_one_pass_and_two(one, batch, context, new, cached):
    """Never faster than the decode step or the chunk's layers alone, never slower than one pass after the other: weights are
    read once, messages sent once. Sequences of pipelines and groups are rounded up in both."""
    step, alone = mixed(one, batch, context, new, cached).value, decode_step(one, batch, context).value
    assert alone * (1 - 1e-9) <= step <= (alone + forward(one, 1, new, cached).value) * (1 + 1e-9)


@given(servers(GROUPED), batches, contexts, st.integers(1, 4096), st.integers(0, 50_000))
def test_a_mixed_step_takes_longer_with_more_of_anything(one, batch, context, new, cached):
    """Sequences and new tokens; and tokens before either, but where attention begins anew after some (Llama 4)."""
    least = mixed(one, batch, context, new, cached).value
    more = [(2 * batch, context, new, cached), (batch, context, 2 * new, cached)]
    if "llama-4" not in one.model.name:
        more += [(batch, 2 * context, new, cached), (batch, context, new, 2 * cached + 1)]
    assert all(least <= mixed(one, *work).value * (1 + 1e-9) for work in more)


@kinds
def test_mixed_steps_of_arrays(one):
    """Batches down, chunks across: each as alone."""
    sizes, chunks = np.array([[1], [48]]), np.array([[1, 500, 4000]])
    found = mixed(one, sizes, 8192, chunks, 1024).value
    each = [[mixed(one, b, 8192, c, 1024).value for c in chunks[0].tolist()] for b in sizes[:, 0].tolist()]
    np.testing.assert_allclose(found, each, rtol=1e-12)


def test_a_mixture_reads_the_experts_of_all_tokens():
    """Mixtral, one sequence and 7 tokens of a prompt: experts of 8 tokens, 8 (1 - (3/4)^8), are read once."""
    one = server("mixtral-8x7b", "h100", 2)
    together, alone = mixed(one, 1, 100, 7, 0), decode_step(one, 8, 100)
    assert together["layers/ffn/memory"].value == alone["layers/ffn/memory"].value
    assert together["layers/ffn/memory"].value < sum(
        step["layers/ffn/memory"].value for step in (decode_step(one, 1, 100), forward(one, 1, 7, 0))
    )
