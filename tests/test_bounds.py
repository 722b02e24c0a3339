"""The closed forms of the source chapter: tables of formulas.md and claims, reproduced."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import CHIPS, FORMATS, MATH

from lib.bounds import (
    arithmetic_limit,
    attention_intensity,
    attention_parity,
    critical_batch,
    cut_matrix,
    dequantization_limit,
    evicted_tokens,
    exact_critical_batch,
    exchange_parity,
    fsdp_penalty,
    half_throughput_batch,
    latency_bound_bytes,
    latency_limit,
    prefill_time,
    saturation_throughput,
    server_ratio,
    step_floor,
    step_time,
    tensor_parallel_limit,
    tile_share,
)
from lib.breakdown import explain
from lib.chips import chip
from lib.models import kv_bytes, model
from lib.network import Torus

CRITICAL = [  # formulas.md T1 and issue 2, section 3: chip, weights, math, tokens
    ("v4", "bf16", "bf16", 229),
    ("v5e", "bf16", "bf16", 241),
    ("v5e", "int8", "bf16", 120),
    ("v5e", "int4", "bf16", 60),
    ("v5e", "int8", "int8", 241),
    ("v5e", "int4", "int8", 120),
    ("v5e", "int4", "int4", 241),
    ("v5p", "bf16", "bf16", 166),
    ("v5p", "int8", "bf16", 83),
    ("v5p", "int4", "bf16", 42),
    ("v5p", "int8", "int8", 166),
    ("v6e", "bf16", "bf16", 560),
    ("v6e", "int8", "bf16", 280),
    ("v6e", "int4", "bf16", 140),
    ("v6e", "fp8", "fp8", 280),
    ("v6e", "int8", "int8", 560),
    ("ironwood", "bf16", "bf16", 313),
    ("ironwood", "fp8", "bf16", 156),
    ("ironwood", "int8", "bf16", 156),
    ("ironwood", "int4", "bf16", 78),
    ("ironwood", "fp8", "fp8", 313),
    ("ironwood", "int4", "fp8", 156),
    ("h100", "bf16", "bf16", 295),
    ("h100", "int8", "bf16", 148),
    ("h100", "int4", "bf16", 74),
    ("h100", "fp8", "fp8", 295),
    ("tpu8i", "fp4", "fp4", 294),
]


@pytest.mark.parametrize(("name", "weights", "math", "expected"), CRITICAL)
def test_critical_batches(name, weights, math, expected):
    """(b/2) C/W with C the peak of the format that is multiplied (v4 at the 1,200 GB/s chosen here: 229)."""
    assert expected == round(critical_batch(chip(name), weights, math).value)


def test_two_fifty_is_only_v5e():
    """The universal 240 differs by chip: 8.2e11 B/s as the Scaling Book rounds it gives 240.2 (claim S-001)."""
    assert 240.24 == round(critical_batch(replace(chip("v5e"), hbm_bandwidth=8.2e11)).value, 2)


@pytest.mark.parametrize(("math", "name"), [("int8", "ironwood"), ("fp8", "v5e"), ("int5", "v5e"), ("f16", "v5e")])
def test_critical_batch_of_math_that_is_not_there(math, name):
    """ValueError, not the wrong peak."""
    with pytest.raises(ValueError, match="does not multiply"):
        critical_batch(chip(name), "int8", math)


def test_critical_batch_of_an_unknown_format():
    """KeyError lists the formats."""
    with pytest.raises(KeyError, match="known: bf16"):
        critical_batch(chip("v5e"), "int5")


V5E_OF_THE_BOOK = replace(chip("v5e"), hbm_bandwidth=8.2e11)


@pytest.mark.parametrize(("ways", "expected"), [(1, 250), (8, 266), (16, 287), (32, 342), (64, 553)])
def test_exact_critical_batch_under_tensor_parallelism(ways, expected):
    """D = 8192, F = 28672 split: the smaller the matrix, the more activations weigh (formulas.md T3, W = 8.2e11)."""
    assert expected == round(exact_critical_batch(V5E_OF_THE_BOOK, 8192, 28672 / ways).value)


def test_exact_critical_batch_of_the_microbenchmark():
    """D = 8192, F = 32768 / 4: 255 (claim B7-114)."""
    assert 255.213 == round(exact_critical_batch(V5E_OF_THE_BOOK, 8192, 32768 / 4).value, 3)


def test_exact_critical_batch_of_a_matrix_too_small():
    """At 128 ways F/Y = 224 < C/W: activations alone take longer than the arithmetic, at any batch."""
    with pytest.raises(ValueError, match="not compute-bound at any batch on v5e"):
        exact_critical_batch(chip("v5e"), 8192, 28672 / 128)


def test_exact_critical_batch_meets_compute_and_memory():
    """At that batch both times of the matmul, activations included, are equal."""
    one, D, F = chip("v5e"), 8192, 3584
    B = exact_critical_batch(one, D, F).value
    assert 2 * B * D * F / one.bf16 == pytest.approx((2 * D * F + 2 * B * (D + F)) / one.hbm_bandwidth)


def test_exact_critical_batch_tends_to_the_wide_limit():
    """Activations vanish beside weights of 10^9 x 10^9."""
    assert critical_batch(chip("v5e")).value == pytest.approx(
        exact_critical_batch(chip("v5e"), 1e9, 1e9).value, rel=1e-6
    )


@pytest.mark.parametrize(
    ("group", "context", "expected"),
    [
        (8, 8192, 7.9922),  # claim S-002
        (1, 8192, 0.999878),  # claim B7-008
    ],
)
def test_attention_intensity_of_the_claims(group, context, expected):
    """S G / (S + G) at 16 bits."""
    assert expected == float(f"{attention_intensity(group, context).value:.6g}")


@pytest.mark.parametrize(
    ("group", "kv", "new", "expected"),
    [(8, "bf16", 1, 8), (8, "fp8", 1, 16), (1, "bf16", 1, 1), (8, "bf16", 5, 40), (16, "int4", 5, 320)],
)
def test_attention_intensity_limits(group, kv, new, expected):
    """2 G (k+1) / b_kv for long contexts: 320 FLOP/B at G = 16, int4 and 4 drafts (formulas.md, trap 6)."""
    assert expected == pytest.approx(attention_intensity(group, 1e12, new, kv).value, rel=1e-6)


SB7 = replace(chip("v5e"), hbm_bandwidth=0.82e12)
T4 = [  # batch; MHA step ms, tok/s; GQA step ms, tok/s
    (1, 4.98, 200.61, 4.17, 239.94),
    (8, 12.13, 659.30, 5.60, 1429.19),
    (16, 20.30, 787.99, 7.23, 2212.48),
    (32, 36.65, 873.21, 10.50, 3047.62),
    (64, 69.33, 923.13, 17.04, 3756.62),
    (240, 249.09, 963.53, 52.99, 4529.34),
]


@pytest.mark.parametrize(("batch", "mha_ms", "mha_rate", "gqa_ms", "gqa_rate"), T4)
def test_llama_2_13b_on_eight_v5e(batch, mha_ms, mha_rate, gqa_ms, gqa_rate):
    """Steps and throughputs of both 13B tables: KV 6.7 or 1.34 GB, P 26 GB, W 8 x 0.82e12 (formulas.md T4)."""
    mha, gqa = (step_floor(SB7, 8, 13e9, kv, batch).value for kv in (6.7e9, 1.34e9))
    assert (mha_ms, gqa_ms) == (round(mha * 1e3, 2), round(gqa * 1e3, 2))
    assert (mha_rate, gqa_rate) == (round(batch / mha, 2), round(batch / gqa, 2))


def test_step_time_is_its_floor_until_the_batch_is_critical():
    """Batch 240 of the 13B tables is just below 240.24: the matmuls still wait for their weights; 241 is above."""
    below, above = (step_time(SB7, 8, 13e9, 6.7e9, batch) for batch in (240, 241))
    assert (step_floor(SB7, 8, 13e9, 6.7e9, 240).value, "memory", "compute") == (
        below.value,
        below["matmuls"].bound,
        above["matmuls"].bound,
    )


@pytest.mark.parametrize(
    ("weights", "kv", "expected"),
    [("bf16", "bf16", 14.03), ("fp8", "bf16", 12.83), ("bf16", "fp8", 8.21), ("fp8", "fp8", 7.01)],
)
def test_the_70b_example_above(weights, kv, expected):
    """8 Ironwood, batch 64, 32,768 tokens, P = 70.55e9: 14.0 to 7.0 ms (formulas.md T5)."""
    cache = kv_bytes(model("llama-3-70b"), 32768, kv)
    assert expected == round(1e3 * step_time(chip("ironwood"), 8, 70.55e9, cache, 64, weights).value, 2)


def test_two_thirds_of_the_example_is_cache():
    """83 % of the 14.03 ms is KV (formulas.md T5)."""
    step = step_time(chip("ironwood"), 8, 70.55e9, kv_bytes(model("llama-3-70b"), 32768), 64)
    assert 83 == round(100 * step["attention"].value / step.value)


def test_the_pop_quiz():
    """30B int8 on 16 v5e at 8.1e11 B/s, 819 MB a sequence: 2.57 ms at batch 4, 21.05 ms at 256 (B7-010, B7-011)."""
    one, kv = replace(chip("v5e"), hbm_bandwidth=8.1e11), 819e6
    assert (2.56759, 21.0509) == tuple(
        float(f"{1e3 * step_time(one, 16, 30e9, kv, batch, 'int8').value:.6g}") for batch in (4, 256)
    )


def test_the_32_sequence_step():
    """70 GB of weights and 41.9 GB of KV on 8 v5e at 8.1e11 B/s: 17.28 ms (claim B8-011)."""
    one = replace(chip("v5e"), hbm_bandwidth=8.1e11)
    assert 17.28 == round(1e3 * step_floor(one, 8, 70e9, 41.98e9 / 32, 32, "int8").value, 2)


@pytest.mark.parametrize(
    ("context", "batch", "rate"), [(8192, 52.6, 21_994), (32768, 13.1, 5_499), (131072, 3.3, 1_375)]
)
def test_half_throughput_and_saturation_of_70b(context, batch, rate):
    """P_bytes / KV and N W / KV on 8 Ironwood (formulas.md, section 5)."""
    kv = kv_bytes(model("llama-3-70b"), context)
    assert batch == round(half_throughput_batch(70.55e9, kv).value, 1)
    assert rate == round(saturation_throughput(chip("ironwood"), 8, kv).value)


def test_saturation_of_the_13b_tables():
    """979 and 4,896 tok/s on 8 v5e at 8.2e11 (claims B7-045, B7-069; the first is 979.1)."""
    assert (979, 4896) == tuple(round(saturation_throughput(SB7, 8, kv).value) for kv in (6.7e9, 1.34e9))


def test_attention_is_read_at_its_own_rate_where_measured():
    """A chip whose cache streams at half the rate spends twice as long on it, and saturates at half the throughput."""
    full = chip("ironwood")
    slow = replace(full, kv_bandwidth=full.hbm_bandwidth / 2)
    steps = [step_time(c, 8, 70.55e9, 1e9, 64) for c in (full, slow)]
    assert [2.0, 1.0] == [steps[1][part].value / steps[0][part].value for part in ("attention", "matmuls")]
    assert 0.5 == saturation_throughput(slow, 8, 1e9).value / saturation_throughput(full, 8, 1e9).value


# Prefill

PREFILL = [  # chips, parameters, math; milliseconds of 8,192 tokens at 40 % (formulas.md, section 3, row 11 and section 5)
    ("v5e", 16, 70e9, "bf16", 910),
    ("ironwood", 8, 70.55e9, "bf16", 157),
    ("ironwood", 8, 70e9, "bf16", 155),
    ("ironwood", 8, 70.55e9, "fp8", 78.3),
]


@pytest.mark.parametrize(("name", "n", "params", "math", "milliseconds"), PREFILL)
def test_prefill_of_70b(name, n, params, math, milliseconds):
    """0.91 s needs 70e9 parameters, 157 ms 70.55e9: the source counts twice; 40 % of the fp8 peak is half the time."""
    assert milliseconds == float(f"{1e3 * prefill_time(chip(name), n, params, 8192, 0.4, math).value:.3g}")


@pytest.mark.parametrize(
    ("params", "layers", "heads", "width", "tokens"),
    [
        (70.55e9, 80, 64, 128, 107_651),  # by hand: 70.55e9 / (80 x 8192)
        (model("llama-3-70b").params - 2 * 128_256 * 8192, 80, 64, 128, 104_450),  # 104k (formulas.md, section 5)
        (64 * 16 * 8192**2, 64, 64, 128, 16 * 8192),  # F = 4 D, MHA: 8 D without the causal half (claim X-021)
    ],
)
def test_prompts_of_which_half_is_attention(params, layers, heads, width, tokens):
    """P / (L N H): neither embedding is multiplied for a prompt's tokens."""
    assert tokens == round(attention_parity(params, layers, heads, width).value)


# Sharding

T6 = [  # chip, links; W/W_ici wrapped, C/W_ici, kB below which 8 chips wait for hops, ways at F = 28672, B = 32
    ("v5e", "DERIV", 8.2, 1970, 400, 109),
    ("v5e", "SB", 9.1, 2189, 360, 98),
    ("v5p", "DERIV", 13.8, 2295, 800, 65),
    ("v5p", "SB", 15.4, 2550, 720, 58),
    ("v6e", "DERIV", 8.2, 4590, 800, 109),
    ("v6e", "SB", 9.1, 5100, 720, 98),
    ("ironwood", "DERIV", 36.9, 11535, 800, 24),
    ("ironwood", "SB115", 41.0, 12817, 720, 22),  # a tenth less: row 5 of formulas.md, section 3
]


@pytest.mark.parametrize(("name", "source", "beta", "ridge", "kilobytes", "ways"), T6)
def test_sharding_constants(name, source, beta, ridge, kilobytes, ways):
    """With nominal links and as the Scaling Book reads them (formulas.md T6)."""
    one = chip(name, link_bandwidth=source)
    assert beta == round(fsdp_penalty(one, 1).value, 1)
    assert ridge == round(1e6 / arithmetic_limit(one, 1e6).value)
    assert kilobytes == round(latency_bound_bytes(one, 8).value / 1e3)
    assert ways == round(tensor_parallel_limit(one, 28672, 32).value)


ROUNDED, OF_SB = (replace(chip("v5e"), hbm_bandwidth=800e9), chip("v5e", hbm_bandwidth="SB", link_bandwidth="SB"))
WAYS = [  # claims S-014, S-016, B8-061 and formula 7.4
    (ROUNDED, 16384, 32, {}, 64),
    (ROUNDED, 16384, 32, dict(wrapped=False), 32),
    (OF_SB, 16384, 32, {}, 56.9),
    (OF_SB, 16384, 32, dict(wrapped=False), 28.4),
    (OF_SB, 28672, 64, {}, 49.8),
    (OF_SB, 28672, 64, dict(wrapped=False), 24.9),
    (chip("ironwood"), 28672, 32, {}, 24.3),
    (chip("ironwood"), 28672, 32, dict(axes=3), 72.8),
    (chip("ironwood"), 28672, 32, dict(wrapped=False), 12.1),
    (chip("ironwood"), 28672, 32, dict(weights="fp8"), 12.1),
    (chip("ironwood"), 28672, 32, dict(weights="fp8", activations="fp8"), 24.3),
    (chip("ironwood"), 28672, 32, dict(matrices=3, collectives=2), 36.4),  # a gated FFN: 3/2 of 24.28
]


@pytest.mark.parametrize(("one", "d_ff", "batch", "how", "ways"), WAYS)
def test_ways_until_activations_take_longer_than_weights(one, d_ff, batch, how, ways):
    """F / (B beta): beta of 8, of 9, twice that without wraparound, fewer bytes of weights, more matrices a collective."""
    assert ways == round(tensor_parallel_limit(one, d_ff, batch, **how).value, 1)


FLOORED = [  # formulas.md T6, last column, the line below it, and claim S-016
    ("v5e", 8192, 28672, (34, 69, 86)),
    ("v5p", 8192, 28672, (18, 31, 35)),
    ("v6e", 8192, 28672, (24, 43, 51)),
    ("ironwood", 8192, 28672, (11, 16, 17)),
    ("v5e", 4096, 16384, (18, 30)),
]


@pytest.mark.parametrize(("name", "d_in", "d_out", "ways"), FLOORED)
def test_ways_until_hops_take_longer_than_weights(name, d_in, d_out, ways):
    """A ring, two and three axes, at 1 us a hop: fewer ways than bandwidth allows, whatever the batch."""
    found = [latency_limit(chip(name), d_in, d_out, axes).value for axes in range(1, len(ways) + 1)]
    assert list(ways) == [round(value) for value in found]


def test_fewer_ways_for_lighter_weights():
    """70B in fp8 on Ironwood: 8.0 on a ring, 9.9 on three axes (claim S-016)."""
    found = [latency_limit(chip("ironwood"), 8192, 28672, axes, weights="fp8").value for axes in (1, 3)]
    assert [8.0, 9.9] == [round(value, 1) for value in found]


@pytest.mark.parametrize("sizes", [(1, 1), (4096, 16384), (1e6, 1e6)], ids=str)
@pytest.mark.parametrize("axes", [1, 2, 3])
@pytest.mark.parametrize("wrapped", [True, False])
def test_at_that_limit_hops_take_as_long_as_the_read(wrapped, axes, sizes):
    """Put back: Y chips read 2 D F / (Y W), and have d Y^(1/d) / 2 hops of 1 us, or d (Y^(1/d) - 1)."""
    Y = latency_limit(chip("v5p"), *sizes, axes, wrapped).value
    hops = axes * (Y ** (1 / axes) / 2 if wrapped else Y ** (1 / axes) - 1)
    assert 2 * sizes[0] * sizes[1] / (Y * 2765e9) == pytest.approx(hops * 1e-6, rel=1e-6)


@pytest.mark.parametrize(("wrap", "wrapped"), [(1, True), (10**6, False)])
def test_the_slices_of_a_network_pass_that_limit_there(wrap, wrapped):
    """The first count of chips whose slice has more hops than its read is worth comes after it, within one more hop."""
    network, limit = Torus(50e9, 1e-6, 1, wrap, 1000), latency_limit(chip("v5e"), 8192, 28672, 1, wrapped).value
    first = next(n for n in range(1, 1000) if network.slice(n).hops * 1e-6 > 2 * 8192 * 28672 / (n * 819e9))
    assert first - 2 < limit < first


@pytest.mark.parametrize(
    ("one", "d_ff", "axes", "math", "ways"),
    [
        (OF_SB, 16384, 2, "bf16", 15.0),  # claim B7-089
        (OF_SB, 28672, 2, "bf16", 26.2),  # claim B8-014
        (OF_SB, 16384, 1, "bf16", 7.5),  # claim B7-116
        (OF_SB, 28672, 1, "bf16", 13.1),
        (OF_SB, 28672, 2, "int8", 13.1),  # twice the peak
    ],
)
def test_ways_until_activations_take_longer_than_arithmetic(one, d_ff, axes, math, ways):
    """d F / 2189 on v5e, and no batch in it; half of that one way."""
    assert ways == round(arithmetic_limit(one, d_ff, axes, math=math).value, 1)
    assert arithmetic_limit(one, d_ff, axes).value == 2 * arithmetic_limit(one, d_ff, axes, wrapped=False).value


@pytest.mark.parametrize(
    ("one", "n", "axes", "times"), [(OF_SB, 16, 2, 72), (chip("ironwood"), 8, 3, 98), (chip("ironwood"), 8, 1, 295)]
)
def test_what_gathering_the_weights_costs(one, n, axes, times):
    """72 times the read on a 4x4 of v5e, 98 on 8 Ironwood along three axes (claim S-033); twice that without wraparound."""
    assert times == round(fsdp_penalty(one, n, axes).value)
    assert 2 * fsdp_penalty(one, n, axes).value == fsdp_penalty(one, n, axes, wrapped=False).value


@pytest.mark.parametrize(
    ("name", "columns", "share"),
    [
        ("v6e", 28672 / 64, 0.875),  # 448 columns: one tile of 256, and 192 in another
        ("v5e", 448, 0.875),  # three and a half tiles of 128
        ("ironwood", 64, 0.25),
        ("v5p", 64, 0.5),
        ("v5e", 129, 129 / 256),
        ("v6e", 256, 1),
    ],
)
def test_tiles_are_multiplied_whole(name, columns, share):
    """128 values wide until v5p, 256 from v6e on."""
    assert share == tile_share(chip(name), columns).value


@pytest.mark.parametrize(
    ("name", "weights", "operations"),
    [
        ("v5e", "int4", 3.75),  # by hand: 0.5 x 6.14e12 / 819e9
        ("v5e", "int8", 7.50),
        ("v5e", "bf16", 14.99),
        ("v5e", "int4g128", 3.87),  # 4.125 bits: scales take time to read too
        ("v5e", "mxfp4", 3.98),
        ("v5p", "int4", 2.59),  # 0.5 x 14.3e12 / 2765e9
        ("v5p", "int8", 5.17),
    ],
)
def test_vector_operations_on_a_weight_while_it_is_read(name, weights, operations):
    """8 x 128 lanes of 4 operations at 1.5 GHz are 6.14e12 a second on v5e; two cores of them at 1.75 GHz 14.3e12 on v5p."""
    assert operations == round(dequantization_limit(chip(name), weights).value, 2)
    assert [6.14e12, 14.3e12] == pytest.approx([8 * 128 * 4 * 1.5e9, 2 * 8 * 128 * 4 * 1.75e9], rel=3e-3)
    assert 6.14e12 == chip("v5e").vector and 14.3e12 == chip("v5p").vector


def test_vector_units_that_are_not_known():
    """Of most chips: ValueError names them, whatever the weights."""
    unknown = [name for name, one in CHIPS.items() if one.vector is None]
    assert {"h100", "ironwood", "v6e"} <= set(unknown) and not {"v5e", "v5p"} & set(unknown)
    for name in unknown:
        with pytest.raises(ValueError, match=f"vector units of {name} are is not known"):
            dequantization_limit(CHIPS[name], "int8")


def test_vector_units_may_be_swept_and_derated():
    """Rates as an array; the fraction of the peak that software reaches holds for them too."""
    swept = dequantization_limit(replace(V5E, vector=np.array([819e9, 1638e9])), "int8").value
    assert [1, 2] == swept.tolist()
    half = V5E.derate(compute=0.5), V5E.derate(memory=0.5)
    assert [3.75 / 2, 3.75 * 2] == pytest.approx([dequantization_limit(one).value for one in half], rel=1e-3)


V5E = chip("v5e")
FORMS = [  # function, inputs, formula
    (prefill_time, dict(chip=V5E, n=16, params=70e9, prompt=8192, mfu=0.4), "2*P*T/(C*MFU*X)"),
    (attention_parity, dict(params=70e9, layers=80, n_heads=64, d_head=128), "P/(H*L*N)"),
    (latency_bound_bytes, dict(chip=V5E, n=8), "W_1*X*α"),
    (tensor_parallel_limit, dict(chip=V5E, d_ff=28672, batch=32, axes=1), "2*F*W_1/(B*W)"),
    (
        tensor_parallel_limit,
        dict(chip=V5E, d_ff=28672, batch=32, axes=2, matrices=3, collectives=2, weights="fp8"),
        "F*W_1*d*m/(B*W*c)",
    ),
    (latency_limit, dict(chip=V5E, d_in=8192, d_out=28672, axes=1), "2*sqrt(D)*sqrt(F)/(sqrt(W)*sqrt(α))"),
    (latency_limit, dict(chip=V5E, d_in=8192, d_out=28672, axes=2), "(4*D*F/(W*d*α))**(d/(d + 1))"),
    (tile_share, dict(chip=V5E, columns=448), "F/(t*ceiling(F/t))"),
    (dequantization_limit, dict(chip=V5E, weights="int8"), "C_v/W"),
    (dequantization_limit, dict(chip=V5E), "C_v/(2*W)"),
    (arithmetic_limit, dict(chip=V5E, d_ff=28672, axes=2), "2*F*W_1*d/C"),
    (fsdp_penalty, dict(chip=V5E, n=16, axes=2), "W*X/(2*W_1*d)"),
]
NUMBERS = set(
    "n params prompt mfu layers n_heads d_head d_ff batch axes matrices collectives d_in d_out columns".split()
)


@pytest.mark.parametrize(("f", "inputs", "formula"), FORMS)
def test_forms_explain_themselves(f, inputs, formula):
    """In the letters of the chapters, with the value of the plain call."""
    told = explain(f, **inputs)
    assert (f(**inputs).value, formula) == (told.value, str(told.formula))


def test_the_limit_on_lines_has_no_letters():
    """Without wraparound the equation is of degree axes + 1: explain says so at once, numbers are solved."""
    with pytest.raises(ValueError, match="no closed form in letters"):
        explain(latency_limit, chip=V5E, d_in=8192, d_out=28672, axes=1, wrapped=False)


@pytest.mark.parametrize(("f", "inputs", "formula"), FORMS)
def test_forms_take_arrays(f, inputs, formula):
    """Each input by itself as an array: entry by entry the scalar answer."""
    for key in NUMBERS & set(inputs):
        many = np.array([0.25, 0.5, 1]) * inputs[key]
        expected = [f(**{**inputs, key: float(x)}).value for x in many]
        np.testing.assert_allclose(f(**{**inputs, key: many}).value, expected, rtol=1e-12)


def test_lines_take_arrays():
    """Newton's method on all entries at once."""
    found = latency_limit(V5E, 8192, np.array([100, 28672, 1e9]), 2, wrapped=False).value
    np.testing.assert_allclose(
        found, [latency_limit(V5E, 8192, d_out, 2, wrapped=False).value for d_out in (100, 28672, 1e9)]
    )


@pytest.mark.parametrize("name", ["h100", "mi300x", "tpu8i"])
@pytest.mark.parametrize(
    ("f", "inputs", "formula"), [one for one in FORMS if "W_1" in one[2] or one[0] is latency_limit]
)
def test_chips_without_axes(f, inputs, formula, name):
    """Through a switch, or all to all, no bandwidth is that of an axis: ValueError names the chip."""
    with pytest.raises(ValueError, match=f"{name} has no links along axes"):
        f(**{**inputs, "chip": chip(name)})


# Doors


@pytest.mark.parametrize("bad", [0, -1, float("nan"), float("inf"), "1", None, True, [1, 0], []], ids=repr)
def test_inputs_that_are_no_sizes(bad):
    """ValueError names the input, in every closed form."""
    one = chip("v5e")
    for name in ("n", "params", "kv", "batch"):
        sizes = {**dict(n=8, params=1e9, kv=1e6, batch=4), name: bad}
        for f in (step_time, step_floor):
            with pytest.raises(ValueError, match=name):
                f(one, **sizes)
    for name, f in (
        ("n", lambda x: saturation_throughput(one, x, 1)),
        ("kv", lambda x: saturation_throughput(one, 8, x)),
        ("params", lambda x: half_throughput_batch(x, 1)),
        ("kv", lambda x: half_throughput_batch(1, x)),
        ("group", lambda x: attention_intensity(x, 1)),
        ("context", lambda x: attention_intensity(1, x)),
        ("new", lambda x: attention_intensity(1, 1, x)),
        ("d_in", lambda x: exact_critical_batch(one, x, 9e9)),
        ("d_out", lambda x: exact_critical_batch(one, 9e9, x)),
        *[
            (key, lambda x, f=f, good=good, key=key: f(**{**good, key: x}))
            for f, good, _ in FORMS
            for key in NUMBERS & set(good)
        ],
    ):
        with pytest.raises(ValueError, match=name):
            f(bad)


@pytest.mark.parametrize("mfu", [1.01, 40])
def test_more_than_the_peak(mfu):
    """A fraction of the peak is one at most, and 40 is no percentage."""
    with pytest.raises(ValueError, match="mfu .* at most 1"):
        prefill_time(chip("v5e"), 16, 70e9, 8192, mfu)


def test_sweeps_have_the_broadcast_shape():
    """Batch down, context across; lists are arrays."""
    kv = kv_bytes(model("llama-3-70b"), np.array([8192, 32768]))
    swept = step_time(chip("ironwood"), 8, 70.55e9, kv, np.array([[1], [64], [512]], np.int32))
    one = step_time(chip("ironwood"), 8, 70.55e9, float(kv[1]), 64)
    assert ((3, 2), one.value) == (swept.value.shape, swept.value[1, 1])
    np.testing.assert_array_equal(
        step_time(chip("v5e"), 8, 1e9, 1e6, [1, 2]).value, step_time(chip("v5e"), 8, 1e9, 1e6, np.array([1, 2])).value
    )


def test_explain_prints_the_formulas_of_the_chapter():
    """7.2 in its letters: B KV / (X W) + max(2 B P / (X C), b P / (X W))."""
    told = explain(step_time, chip=chip("ironwood"), n=8, params=70.55e9, kv=1e9, batch=64)
    assert {"B*KV/(W*X)", "2*B*P/(C*X)"} <= {str(row[-1]) for row in told.rows()}


@given(
    st.sampled_from(sorted(CHIPS)),
    st.sampled_from(FORMATS),
    st.integers(1, 64),
    st.floats(1e6, 1e13),
    st.floats(1, 1e12),
    st.integers(1, 10**6),
    st.data(),
)
def test_no_step_beats_its_floor(name, weights, n, params, kv, batch, data):
    """And below the critical batch the two are equal."""
    math = data.draw(st.sampled_from(MATH[name]))
    step, floor = (
        f(CHIPS[name], n, params, kv, batch, weights, *more) for f, more in ((step_time, (math,)), (step_floor, ()))
    )
    assert step.value >= floor.value * (1 - 1e-12)
    if batch < critical_batch(CHIPS[name], weights, math).value * (1 - 1e-9):
        assert step.value == pytest.approx(floor.value, rel=1e-12)


def test_a_gated_ffn_reads_three_matrices_for_two_phases():
    """1.5 times the reading for each phase: 1.5^(d / (d + 1)) times the ways until the hops bind, on d axes."""
    for d in (1, 2, 3):
        one, gated = (
            latency_limit(chip("ironwood"), 8192, 28672, d, **how).value
            for how in ({}, dict(matrices=3, collectives=2))
        )
        assert 1.5 ** (d / (d + 1)) == pytest.approx(gated / one)


@pytest.mark.parametrize("wrapped", [True, False])
@pytest.mark.parametrize("axes", [1, 2, 3])
def test_the_limits_are_where_the_read_meets_the_phase(axes, wrapped):
    """At the limits of 32 sequences the read takes as long as the bytes, or as the hops."""
    sizes, how = (chip("ironwood"), 8192, 28672), dict(axes=axes, wrapped=wrapped)
    by_bytes = cut_matrix(*sizes, 32, tensor_parallel_limit(sizes[0], 28672, 32, axes, wrapped).value, **how)
    by_hops = cut_matrix(*sizes, 32, latency_limit(*sizes, **how).value, **how)
    assert by_bytes["memory"].value == pytest.approx(by_bytes["phase/bandwidth"].value)
    assert by_hops["memory"].value == pytest.approx(by_hops["phase/latency"].value)


def test_a_cut_matrix_by_hand():
    """70B's FFN matrix on 16 Ironwood, 2x2x4 without wraparound: 16th of 470 MB at 7.38 TB/s; 0.52 MB over three links; and on
    a wrapped ring 8 hops."""
    flat, ring = (cut_matrix(chip("ironwood"), 8192, 28672, 32, 16, *how) for how in ((3, False), (1, True)))
    assert 2 * 8192 * 28672 / 16 / 7380e9 == pytest.approx(flat["memory"].value)
    assert [2 * 32 * 8192 / 300e9, 8e-6] == pytest.approx([flat["phase/bandwidth"].value, ring["phase/latency"].value])
    assert ("latency", 8e-6) == (ring.bound, pytest.approx(ring.value))


@pytest.mark.parametrize(
    ("batch", "step", "ratio"), [(32, 0.019, 2.99342), (43, 0.019, 4.0224), (1, 0.019, 0.093544), (32, 0.0095, 5.98684)]
)
def test_prefill_servers_of_a_decode_server(batch, step, ratio):
    """0.91 s a prompt, 512 tokens: the ledger's three (S-012, B8-068), and 4.02 with a batch of 43; linear in the batch."""
    found = server_ratio(0.91, step, batch, 512)
    assert (pytest.approx(ratio, rel=1e-5), "P/G") == (found.value, found.unit)


@given(st.floats(1e-3, 1e3), st.floats(1e-5, 10), st.integers(1, 10**6), st.integers(1, 10**6))
def test_both_servers_work_without_a_pause(read, step, batch, output):
    """So many prefill servers hand over as many requests a second as one decode server ends: P / t_p = B / (t_d G)."""
    assert server_ratio(read, step, batch, output).value / read == pytest.approx(batch / (step * output), rel=1e-12)


def test_server_ratios_of_arrays():
    """Prompts down, batches across, lists too; as each alone."""
    found = server_ratio([[0.91], [1.82]], 0.019, np.array([[32, 43]]), 512).value
    np.testing.assert_allclose(found, [[2.99342, 4.0224], [5.98684, 8.0448]], rtol=1e-5)


def test_tokens_that_leave_a_full_server_a_step():
    """B/G requests of P + G tokens: 96 for 32, 8,192 and 4,096 (B8-067); every sequence's P + 1 where answers are one token."""
    assert (96, 64 * 8193) == (evicted_tokens(32, 8192, 4096).value, evicted_tokens(64, 8192, 1).value)
    assert "tokens" == evicted_tokens(32, 8192, 4096).unit
    assert [96, 192] == evicted_tokens([32, 64], 8192, 4096).value.tolist()


@given(st.integers(1, 200), st.integers(1, 2000), st.integers(1, 60))
def test_evictions_by_enumeration(batch, prompt, output):
    """Sequences one step apart, as many a step as end: what leaves over `output` steps is what `batch` whole requests hold."""
    left = 0
    for age in range(batch * output):  # every sequence grows a token a step; the one that has `output` of them leaves
        left += prompt + output if age % output == output - 1 else 0
    assert left / output == pytest.approx(evicted_tokens(batch, prompt, output).value)


@pytest.mark.parametrize(("copies", "tokens"), [(2, 6398), (4, 4266), (8, 3656)])
def test_a_cut_by_batch_pays_from_so_many_tokens(copies, tokens):
    """v5e, heads of 128 in bf16: 512 bytes a token, of which 1 - 1/n are saved, against two all-to-alls of 1 us: 2e-6 x 819e9
    / 512 / (1 - 1/n) by hand."""
    found = exchange_parity(chip("v5e"), 128, copies)
    assert (tokens, "tokens") == (round(found.value), found.unit)
    assert 3 * found.value == pytest.approx(exchange_parity(chip("v5e"), 128, copies, hops=3).value)
    assert 2 * found.value == pytest.approx(exchange_parity(chip("v5e"), 128, copies, kv="fp8").value)


@pytest.mark.parametrize("copies", [1, 0, -2, 0.5, float("nan"), "2", None])
def test_a_head_that_nobody_shares(copies):
    """One chip exchanges nothing: ValueError that names the copies."""
    with pytest.raises(ValueError, match="copies"):
        exchange_parity(chip("v5e"), 128, copies)
