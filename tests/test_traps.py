"""What cost models get wrong: the traps of formulas.md section 4 that the chapters so far can fall into, by number.

24, about printed digits, is what `check` and test_claims are for."""

from dataclasses import replace

import numpy as np
import pytest
from strategies import DENSE, leaves, nodes, server

from lib.bounds import (
    attention_intensity,
    critical_batch,
    dequantization_limit,
    exact_critical_batch,
    latency_bound_bytes,
    prefill_time,
    server_ratio,
    step_time,
    tile_share,
)
from lib.chips import chip
from lib.formats import Precision
from lib.forward import decode_step, forward, prefill
from lib.mixers import GQA, MLA, pairs
from lib.models import FFN, Block, Model, kv_bytes, model, weights_read
from lib.network import Switch, Torus, all_gather, all_reduce, all_to_all, reduce_scatter
from lib.server import Plan, Server, fits, footprint, max_batch
from lib.serving import colocated, disaggregated
from lib.speculation import expected_tokens, free_drafts, speculate
from lib.steady import loads, station, ttft
from lib.workload import Lengths, Workload

STREAMED = [  # params x 1e9 that a decode step reads (formulas.md, trap 1; -6.5 % for 8B)
    ("llama-3-70b", 69.50),
    ("llama-3-8b", 7.50),
    ("llama-2-13b", 12.85),
]


def weight_bytes(name, chip_name="ironwood"):
    """Bytes of weights that a decode step of one sequence moves on one chip, activations and KV weighing nothing."""
    from lib.formats import Format

    nothing = Format("nothing", 0, "bf16")
    step = decode_step(server(name, chip_name, activations=nothing, kv=nothing, embedding=nothing), 1, 1)
    rate = chip(chip_name).hbm_bandwidth
    return rate * sum(value for path, value in leaves(step).items() if path.endswith("memory"))


@pytest.mark.parametrize(("name", "billions"), STREAMED)
def test_trap_01_input_embedding_is_gathered_and_unembedding_read(name, billions):
    """70B streams 69.50e9 parameters, 8B 7.50e9, 13B 12.85e9: everything but the input embedding."""
    assert billions == pytest.approx(weight_bytes(name) / 2 / 1e9, abs=0.005)


def test_trap_01_tied_embeddings_are_read_once():
    """Gemma-2-27B: the table is read as the head, all 27.227e9 parameters but 185 norms are streamed."""
    norms = (46 * 4 + 1) * 4608
    assert 2 * (27_227_128_320 - norms) == pytest.approx(weight_bytes("gemma-2-27b"), rel=1e-12)


def test_trap_01_unembedding_costs_flops():
    """2 B D V FLOPs."""
    assert 2 * 64 * 8192 * 128_256 / 2307e12 == pytest.approx(decode_step(server(), 64, 100)["unembed/compute"].value)


def test_trap_02_prefill_computes_logits_of_the_last_token():
    """2 D V for a prompt of any length, not 2 D V T."""
    short, long = (prefill(server("llama-3-8b"), 1, T)["unembed/compute"].value for T in (1, 8192))
    assert short == long == pytest.approx(2 * 4096 * 128_256 / 2307e12)


def test_trap_02_norms_routers_and_biases_count_in_p():
    """Exact counts of models.csv: Qwen2.5 with its biases, Mixtral with its routers, gpt-oss with sinks and biases."""
    assert [72_706_203_648, 46_702_792_704, 116_829_156_672] == [
        model(name).params for name in ("qwen2.5-72b", "mixtral-8x7b", "gpt-oss-120b")
    ]


def test_trap_03_causal_attention_is_half():
    """2 L N H T^2 (and T of the diagonal), not 4: 8B, 8,192 tokens."""
    T = 8192
    flops = 2307e12 * prefill(server("llama-3-8b"), 1, T)["layers/attention/compute"].value
    assert 2 * 32 * 32 * 128 * (T**2 + T) == pytest.approx(flops)


@pytest.mark.parametrize("chunk", [1, 7, 512, 4096])
def test_trap_03_chunks_add_up_to_the_same_half(chunk):
    """Each chunk attends to the whole prefix; the sum over chunks is one prefill."""
    T = 4096
    bounds = [*range(0, T, chunk), T]
    assert pairs(T, 0) == sum(pairs(b - a, a) for a, b in zip(bounds, bounds[1:], strict=False)) == T * (T + 1) / 2


def test_trap_03_chunks_of_prefill_multiply_the_same_half():
    """4 chunks of 2,048 tokens and one prompt of 8,192: the same attention FLOPs in `forward`, on every chip of a plan."""
    one = Server(model("llama-3-70b"), chip("h200"), Plan(8, pipeline=2))
    chunks = [forward(one, 2, 2048, start)["layers/attention/compute"].value for start in range(0, 8192, 2048)]
    assert 2 * 80 * 64 * 128 * 8192 * 8193 / 8 / 989e12 == pytest.approx(sum(chunks))
    assert sum(chunks) == pytest.approx(prefill(one, 2, 8192)["layers/attention/compute"].value)


def test_trap_04_kv_bytes_come_from_kv_heads_and_the_config_head():
    """gpt-oss has heads of 64, not 2880/64 = 45; 70B caches 8 heads, not 64 (formulas.md T10)."""
    assert (36 * 2 * 2 * 8 * 64, 80 * 2 * 2 * 8 * 128) == (
        kv_bytes(model("gpt-oss-120b"), 1),
        kv_bytes(model("llama-3-70b"), 1),
    )


T10 = [  # bytes a token at 8k; GB at 8k, 32k, 128k
    ("llama-2-13b", 819_200, 6.71, 26.84, 107.37),
    ("llama-3-8b", 131_072, 1.07, 4.29, 17.18),
    ("llama-3-70b", 327_680, 2.68, 10.74, 42.95),
    ("llama-3-405b", 516_096, 4.23, 16.91, 67.65),
    ("deepseek-v3", 70_272, 0.58, 2.30, 9.21),
    ("gpt-oss-120b", 37_440, 0.31, 1.21, 4.84),
    ("gemma-2-27b", 282_624, 2.32, 6.95, 25.47),
    ("gemma-3-27b", 135_168, 1.11, 3.12, 11.17),
]


@pytest.mark.parametrize(("name", "token", "at_8k", "at_32k", "at_128k"), T10)
def test_trap_04_kv_bytes_of_every_kind_of_model(name, token, at_8k, at_32k, at_128k):
    """The table of formulas.md T10, windows and latents included."""
    one = model(name)
    assert token == kv_bytes(one, 8192) / 8192
    assert [at_8k, at_32k, at_128k] == [round(kv_bytes(one, 2**n) / 1e9, 2) for n in (13, 15, 17)]


def test_trap_05_kv_is_written_as_well_as_read():
    """A decode step writes one token, a prefill all of them: 8B on one chip, attention's memory less activations."""
    rate, token, width = 7380e9, 131_072, 32 * 2 * 2 * 32 * 128
    decoded = rate * decode_step(server("llama-3-8b"), 1, 1000)["layers/attention/memory"].value - width
    filled = rate * prefill(server("llama-3-8b"), 1, 1000)["layers/attention/memory"].value - 1000 * width
    assert [1001 * token, 1000 * token] == [pytest.approx(decoded), pytest.approx(filled)]


@pytest.mark.parametrize(("group", "kv", "drafts", "expected"), [(8, "bf16", 0, 8), (16, "int4", 4, 320)])
def test_trap_06_attention_can_become_compute_bound(group, kv, drafts, expected):
    """2 G (k+1) / b_kv: 320 FLOP/B is above v5e's 240."""
    assert expected == pytest.approx(attention_intensity(group, 1e12, drafts + 1, kv).value, rel=1e-6)


@pytest.mark.parametrize(("drafts", "bound"), [(0, "memory"), (2, "memory"), (3, "compute"), (4, "compute")])
def test_trap_06_verification_can_become_compute_bound(drafts, bound):
    """G = 16 on an int4 cache: 64 (k + 1) FLOP/B for k drafts, 192 for two, 256 for three, 320 for four; v5e has 240."""
    one = model("llama-3-70b")
    (block,) = one.blocks
    wide = replace(one, blocks=(replace(block, mixer=replace(block.mixer, n_kv_heads=4)),))
    target = Server(wide, chip("v5e"), Plan(4), Precision(kv="int4"))
    attention = speculate(target, None, drafts, 1, 10**6)["verify/layers/attention"]
    assert bound == attention.bound
    assert 64 * (drafts + 1) / (197e12 / 819e9) == pytest.approx(
        attention["compute"].value / attention["memory"].value, rel=1e-3
    )


def test_trap_07_peak_is_of_the_format_multiplied():
    """int8 weights with bf16 math run at 197, not 394 TFLOP/s; fp8 on v6e at the bf16 rate; H100 peaks are dense."""
    int8, both = (
        decode_step(server("llama-3-8b", "v5e", 1, weights="int8", **math), 4096, 1)["layers/ffn/compute"].value
        for math in ({}, {"math": "int8"})
    )
    assert (2.0, chip("v6e").peak("bf16"), 989e12) == (int8 / both, chip("v6e").peak("fp8"), chip("h100").peak("bf16"))


def test_trap_07_critical_batch_of_weights_without_native_math():
    """int8 weights on Ironwood: 156, half its bf16 batch; int8 math there is a ValueError."""
    assert 156 == round(critical_batch(chip("ironwood"), "int8").value)
    with pytest.raises(ValueError, match="does not multiply int8"):
        chip("ironwood").peak("int8")


@pytest.mark.parametrize(
    ("weights", "gigabytes"), [("int4g128", 36.4), ("mxfp4", 37.5), ("nvfp4", 39.7), ("int4", 35.3)]
)
def test_trap_08_scales_weigh(weights, gigabytes):
    """70.55e9 parameters at 4.125, 4.25, 4.5 and 4 bits."""
    assert gigabytes == round(footprint(server(weights=weights), 1, 1)["weights"].value / 1e9, 1)


def test_trap_08_tables_may_stay_in_16_bits():
    """70B: +3.2 GB against 4 bits for both tables."""
    four, mixed = (
        footprint(server(weights="int4", **tables), 1, 1)["weights"].value
        for tables in ({}, dict(embedding="bf16", head="bf16"))
    )
    assert 3.2 == round((mixed - four) / 1e9, 1)


def test_trap_09_gib_is_not_gb():
    """16 GiB of v5e take 16 sequences of 13B on 8 chips, 16 GB take 15."""
    one = server("llama-2-13b", "v5e", 8)
    whole, decimal = (replace(one, chip=replace(one.chip, hbm_bytes=size, hbm_reserved=0)) for size in (2**34, 16e9))
    assert (16, 15) == (max_batch(whole, 8192), max_batch(decimal, 8192))


def test_trap_09_capacity_is_per_chip():
    """70B with 8 KV heads on 16 v5e: 36 sequences fit the slice's total but not the chips, where heads lie twice."""
    one, batch = server("llama-3-70b", "v5e", 16), 36
    assert 2 * one.model.params + batch * kv_bytes(one.model, 8192) < 16 * one.chip.hbm_bytes
    assert not fits(one, batch, 8192)


def test_trap_09_attention_is_whole_in_every_group_of_experts():
    """The worked mixture on 8x16 v5e in int8: 1.65 GB a chip if all were cut 128 ways, 2.30 GB with 16 groups of experts
    that each keep attention, cut 8 ways (Scaling Book chapter 7, question 6; formulas.md, trap 9)."""
    worked = Model("worked", 4096, 32_128, (Block("moe", 64, GQA(32, 8, 256), FFN(16_384, 16, 2)),), tied=True)
    one = Server(worked, chip("v5e"), Plan(8, expert=16), Precision("int8"))
    assert 1.65 == round(worked.params / 128 / 1e9, 2)
    assert 2.30 == round(footprint(one, 16, 1)["weights"].value / 1e9, 2)


@pytest.mark.parametrize("tensor", [16, 32, 64])
def test_trap_10_kv_heads_are_replicated(tensor):
    """Beyond K = 8 every chip keeps 1/K of the cache: capacity and traffic of the slice grow by TP/K."""
    eight, more = (server("llama-3-70b", "ironwood", x) for x in (8, tensor))
    assert footprint(eight, 64, 8192)["KV cache"].value == footprint(more, 64, 8192)["KV cache"].value

    def cache_read(one):
        activations = 80 * 2 * 64 * 2 * 64 * 128 / one.plan.tensor
        return 7380e9 * decode_step(one, 64, 8192)["layers/attention/memory"].value - activations

    assert cache_read(eight) == pytest.approx(cache_read(more))


def test_trap_10_projections_of_replicated_heads_are_replicated():
    """70B on 16 chips: each holds, reads and multiplies a sixteenth of the queries and outputs, and one whole KV head."""
    one, projected = server("llama-3-70b", "ironwood", 16), 8192 * 64 * 256 / 16 + 8192 * 256
    assert 80 * 2 * projected == footprint(one, 1, 1)["weights/attention"].value
    step = decode_step(one, 1, 100)["layers/projections"]
    assert 80 * 2 * projected / 2307e12 == pytest.approx(step["compute"].value, rel=1e-12)


@pytest.mark.parametrize(
    ("plan", "share"),
    [
        (Plan(16), 1 / 8),
        (Plan(8, expert=2), 1 / 16),
        (Plan(8, data=2), 1 / 16),
        (Plan(8, pipeline=2), 1 / 16),
        (Plan(16, pipeline=2, data=2), 1 / 32),
    ],
)
def test_trap_10_other_axes_cut_the_cache(plan, share):
    """Groups and replicas have their own sequences, stages their own layers; only the heads are ever replicated."""
    one = Server(model("llama-3-70b"), chip("ironwood"), plan)
    assert 64 * 327_680 * 8192 * share == pytest.approx(footprint(one, 64, 8192)["KV cache"].value, rel=1e-12)


def test_trap_11_latents_are_replicated():
    """8 chips: each holds and reads the whole cache of DeepSeek-V3 unless batch or sequence is split."""
    one, heads, batch, sequence = (
        footprint(server("deepseek-v3", "ironwood", *plan), 64, 8192)["KV cache"].value
        for plan in ((1,), (8,), (8, "batch"), (8, "sequence"))
    )
    assert (1, 1 / 8, 1 / 8) == (heads / one, batch / one, sequence / one)


def test_trap_11_groups_of_experts_keep_their_own_latents():
    """DeepSeek-V3, 64 sequences: 8 groups of one chip hold and read 8 sequences each; 4 groups of 2 hold 16, twice."""
    for plan, held in ((Plan(1, expert=8), 8), (Plan(2, expert=4), 16), (Plan(2, expert=4, kv="batch"), 8)):
        one = Server(model("deepseek-v3"), chip("h200"), plan)
        assert held * 70_272 * 8192 == pytest.approx(footprint(one, 64, 8192)["KV cache"].value)
        queries = 2 * 64 / plan.expert * 128 * (128 + 64 + 128) / plan.tensor
        moved = 58 * (held * 2 * 576 * 8193 + queries)
        assert moved / 4800e9 == pytest.approx(decode_step(one, 64, 8192)["moe/attention/memory"].value)


def test_trap_11_a_latent_serves_keys_and_values():
    """576 elements a token and layer, read once: 1,152 bytes, not 2,304."""
    latent = MLA(128, 1536, 512, 64, 128, 128)
    assert (1152, 1152) == (latent.cache(1, 2), latent.read(1, 1, 2))


def test_trap_11_absorbed_decode_is_near_the_ridge():
    """2 x 128 x (576 + 512) / (2 x 576) = 242 FLOP/B: above v5e's 240, below Ironwood's 313."""
    latent, S = MLA(128, 1536, 512, 64, 128, 128), 10**6
    assert 242 == round(latent.flops(1, S) / latent.read(1, S, 2))
    # The MLA part of a step is compute-bound on v5e where batches are long, memory-bound on Ironwood.
    bound = [
        decode_step(server("deepseek-v3", name, 8, "batch"), 64, 10**6)["moe/attention"].bound
        for name in ("v5e", "ironwood")
    ]
    assert ["compute", "memory"] == bound


def test_trap_12_windows_cap_local_layers_only():
    """gpt-oss-120b: 18 layers stop at 128 tokens, 18 grow: 1,024 bytes x 2 a token and layer."""
    one, layer = model("gpt-oss-120b"), 2 * 2 * 8 * 64
    assert [36 * layer * 100, 18 * layer * (128 + 1000)] == [kv_bytes(one, S) for S in (100, 1000)]


def test_trap_12_paging_rounds_up():
    """Pages of 128: a context of 129 keeps 256 tokens in the full layers, 128 in the windowed ones."""
    held = footprint(server("gpt-oss-120b", page=128), 1, 129)["KV cache"].value
    assert 18 * 2 * 2 * 8 * 64 * (256 + 128) == held


T11 = [
    (16, 2, (2.0, 6.6, 10.5, 14.1, 15.8, 16.0)),
    (8, 2, (2.0, 5.5, 7.2, 7.9, 8.0, 8.0)),
    (128, 4, (4.0, 15.3, 28.7, 51.0, 81.7, 111.2)),
    (256, 8, (8.0, 30.5, 57.4, 102.0, 163.3, 222.4)),
]


@pytest.mark.parametrize(("experts", "top_k", "expected"), T11)
def test_trap_13_distinct_experts(experts, top_k, expected):
    """E (1 - (1 - k/E)^B) at B = 1, 4, 8, 16, 32, 64 (formulas.md T11)."""
    ffn = replace(model("mixtral-8x7b").blocks[0].ffn, n_experts=experts, top_k=top_k)
    assert list(expected) == [round(ffn.touched(B), 1) for B in (1, 4, 8, 16, 32, 64)]


@pytest.mark.parametrize(("batch", "gigabytes"), [(1, 36.5), (8, 163), (32, 433), (128, 659), (10**6, 670)])
def test_trap_13_bytes_of_deepseek_v3(batch, gigabytes):
    """At 1 byte a parameter, a step streams 36.5 to 670 GB: shared experts, dense layers, router included (T11).

    The table counts one byte for everything that is read: experts touched plus the rest of the matrices."""
    from lib.formats import Format

    nothing, byte = Format("nothing", 0, "bf16"), Format("byte", 1, "fp8")
    one = server("deepseek-v3", weights=byte, activations=nothing, kv=nothing, embedding=nothing)
    moved = sum(v for path, v in leaves(decode_step(one, batch, 1)).items() if path.endswith("memory"))
    assert gigabytes == pytest.approx(moved * 7380e9 / 1e9, rel=5e-3)
    assert moved * 7380e9 == pytest.approx(weights_read(model("deepseek-v3"), batch), rel=1e-12)


def test_trap_13_compute_bound_threshold_is_of_expert_matmuls_only():
    """DeepSeek-V3: experts need 32 times the batch; its projections turn compute-bound 32 times earlier."""
    step = decode_step(server("deepseek-v3"), 2048, 100)
    assert ("compute", "memory") == (step["moe/projections"].bound, step["moe/ffn"].bound)
    # n (2 (8 e + c) / C - 2 (16 D + 27 F) / W) = 2 (256 e + c) / W, with e = 3 D F, c = e + 256 D: n = 10,256.
    bounds = [decode_step(server("deepseek-v3"), n, 100)["moe/ffn"].bound for n in (10_100, 10_400)]
    assert ["memory", "compute"] == bounds


@pytest.mark.parametrize(("batch", "even", "skewed"), [(1, 2, 2), (4, 5.47, 4.98), (16, 7.92, 7.68), (512, 8, 8)])
def test_trap_13_correlated_tokens_reach_fewer_experts(batch, even, skewed):
    """Mixtral whose two most popular experts are used by half of the tokens each, the other six by a sixth, by hand:
    2 (1 - 0.5^B) + 6 (1 - (5/6)^B). Their reads are all that changes in a step."""
    one = model("mixtral-8x7b")
    (block,) = one.blocks
    chances = (0.5, 0.5) + (1 / 6,) * 6
    uneven = replace(one, blocks=(replace(block, ffn=replace(block.ffn, chances=chances)),))
    assert skewed == pytest.approx(uneven.blocks[0].ffn.touched(batch), abs=0.005)
    before, after = (leaves(decode_step(Server(m, chip("ironwood")), batch, 100)) for m in (one, uneven))
    saved = 32 * (even - skewed) * 2 * 3 * 4096 * 14336 / 7380e9
    ffn = "layers/ffn/memory"
    assert before.pop(ffn) - after.pop(ffn) == pytest.approx(saved, abs=32 * 0.01 * 2 * 3 * 4096 * 14336 / 7380e9)
    assert before == after


def test_trap_13_the_busiest_group_sets_the_time():
    """Mixtral on 4 groups of experts, 8 sequences, the busiest with 1.5 times the mean: a chip multiplies
    1.5 x 8 x 2 / 4 = 6 rows of an expert, not 4, and reads the experts that 12 tokens would reach: 1.94, not 1.80."""
    busy, even = (Server(model("mixtral-8x7b"), chip("h200"), Plan(1, expert=4, imbalance=x)) for x in (1.5, 1))
    expert, router = 3 * 4096 * 14336, 4096 * 8
    for one, rows in ((busy, 6), (even, 4)):
        step = decode_step(one, 8, 1000)["layers"]
        flops = 32 * 2 * (rows * expert + 2 * router)
        assert flops / 989e12 == pytest.approx(step["ffn/compute"].value)
        touched = 8 * (1 - (3 / 4) ** (2 * rows)) / 4
        moved = 32 * 2 * (touched * expert + router + rows * (2 * 4096 + 3 * 14336))
        assert moved / 4800e9 == pytest.approx(step["ffn/memory"].value)
    sent = [decode_step(one, 8, 1000)["layers/expert all-to-all/bandwidth"].value for one in (busy, even)]
    assert 1.5 == pytest.approx(sent[0] / sent[1])


def test_trap_14_verification_touches_more_experts():
    """256 experts, 8 of them: 4 sequences with 4 drafts are 20 tokens and touch 120 experts instead of 30."""
    ffn = model("deepseek-v3").blocks[1].ffn
    assert (30.5, 120) == (round(ffn.touched(4), 1), round(ffn.touched(20)))
    plain, drafts = (forward(server("deepseek-v3"), 4, new, 1000)["moe/ffn/memory"].value for new in (1, 5))
    expert, common = 2 * 3 * 7168 * 2048, 2 * (3 * 7168 * 2048 + 7168 * 256 + 256)

    def moved(tokens, experts):
        return experts * expert + common + 2 * tokens * (2 * 8 * 7168 + 3 * 9 * 2048)

    assert moved(20, ffn.touched(20)) / moved(4, ffn.touched(4)) == pytest.approx(drafts / plain, rel=1e-3)


@pytest.mark.parametrize(("plan", "tokens"), [(Plan(8), 20), (Plan(1, expert=8), 20), (Plan(4, data=2), 10)])
def test_trap_14_rounds_are_not_free_for_mixtures(plan, tokens):
    """DeepSeek-V3, 4 sequences: 4 proposals each touch 120 experts instead of 30, in all groups that share them; of two
    replicas each has half of the sequences. Its experts' reads grow as much, and a round takes longer than a step by that."""
    one = Server(model("deepseek-v3"), chip("h200"), plan, Precision("fp8"))
    plain, verify = decode_step(one, 4, 1000), speculate(one, None, 4, 4, 1000)["verify"]
    touched = [256 * (1 - (1 - 8 / 256) ** n) for n in (tokens / 5, tokens)]
    if tokens == 20:
        assert [30.5, 120.3] == [round(n, 1) for n in touched]
    experts = 58 * 3 * 7168 * 2048 * (touched[1] - touched[0]) / (plan.tensor * plan.expert) / 4800e9
    grown = verify["moe/ffn/memory"].value - plain["moe/ffn/memory"].value
    assert experts == pytest.approx(grown, rel=0.01)  # beside the activations of more tokens
    assert 0.7 * (verify.value - plain.value) < grown


RING, LINE = (Torus(50e9, 1e-6, 1, wrap, 1024) for wrap in (2, 2048))


@pytest.mark.parametrize(
    ("network", "n"), [(RING, 8), (LINE, 8), (chip("ironwood").network, 64), (chip("h100").network, 8)]
)
def test_trap_15_all_reduce_is_two_all_gathers(network, n):
    """A reduce-scatter and an all-gather, each of (n - 1) / n of the array and with every hop."""
    one, both = all_gather(1e9, n, network), all_reduce(1e9, n, network)
    assert both.value == 2 * one.value == one.value + reduce_scatter(1e9, n, network).value
    assert (1 - 1 / n) * 1e9 / network.slice(n).bandwidth == pytest.approx(one["bandwidth"].value)


@pytest.mark.parametrize("n", [2, 4, 8, 64, 1024])
def test_trap_15_all_to_all_is_a_quarter_of_the_array_over_both_links(n):
    """V / (4 W_ici) on a ring of even n, twice that on a line; an all-gather's quarter times n / (n - 1); the same hops."""
    ring, line = (all_to_all(1e9, n, network) for network in (RING, LINE))
    gathered = all_gather(1e9, n, RING)
    assert 2.5e-3 == pytest.approx(ring["bandwidth"].value)
    assert 5e-3 == pytest.approx(line["bandwidth"].value)
    assert n / (n - 1) / 4 == pytest.approx(ring["bandwidth"].value / gathered["bandwidth"].value)
    assert n // 2 * 1e-6 == pytest.approx(ring["latency"].value) == pytest.approx(gathered["latency"].value)


@pytest.mark.parametrize(
    ("name", "shape", "links"),
    [("v5e", (1, 16), 2), ("v5e", (4, 8), 2), ("v5e", (4, 16), 3), ("v5e", (16, 16), 4)]
    + [("ironwood", (1, 1, 8), 1), ("ironwood", (2, 2, 2), 3), ("ironwood", (2, 4, 4), 3), ("ironwood", (4, 4, 4), 6)],
)
def test_trap_15_axes_add_up_and_both_ways_count_only_around_a_ring(name, shape, links):
    """One link an axis, two where it closes: in two dimensions from 16 on, in three where all are 4 and more."""
    network, n = chip(name).network, int(np.prod(shape))
    assert links * network.link_bandwidth == network.slice(n, shape).bandwidth


def test_trap_15_pcie_lies_between():
    """Cards without a network of their own meet through the host: 7/8 of 1 GB over 32 GB/s of PCIe, 14 times NVLink's time."""
    slow, fast = (all_gather(1e9, 8, chip(name).network).value for name in ("l40s", "h100"))
    assert [7 / 8 * 1e9 / 32e9, 450 / 32] == pytest.approx([slow, slow / fast])


def test_trap_15_a_slower_network_lies_between():
    """512 v5e are two pods: a quarter of what is exchanged leaves each pod through 256 x 3.125 GB/s, 10 us away."""
    on = all_to_all(1e9, 512, chip("v5e").interconnect)
    assert 0.25e9 / 256 / 3.125e9 == pytest.approx(on["bandwidth"].value)
    assert 16e-6 + 10e-6 == pytest.approx(on["latency"].value)


T7 = [  # chips; milliseconds of hops in a step of 70B, and with the measured 8 us for 3 hops (formulas.md T7)
    ("v5e", 8, 1.28, 3.41),
    ("v5e", 16, 1.92, 5.12),
    ("v5e", 32, 3.20, 8.53),
    ("ironwood", 8, 0.96, 2.56),
    ("ironwood", 64, 1.92, 5.12),
]


def hopping(name, plan, **network):
    """Milliseconds that a step of one sequence of 70B waits for latency, on a network that may differ."""
    one = chip(name)
    changed = Server(model("llama-3-70b"), replace(one, network=replace(one.network, **network)), plan)
    return 1e3 * decode_step(changed, 1, 100).waits["latency"]


@pytest.mark.parametrize(("name", "chips", "floor", "measured"), T7)
def test_trap_16_every_collective_waits_for_its_hops(name, chips, floor, measured):
    """80 layers x 2 all-reduces x 2 phases x hops; half of that where everyone sends to everyone at once.

    (The 16x16 of the table has more chips than 70B has heads: test_network has its collectives.)"""
    assert floor == pytest.approx(hopping(name, Plan(chips)))
    assert floor / 2 == pytest.approx(hopping(name, Plan(chips, all_reduce="one-shot")))
    assert measured == round(hopping(name, Plan(chips), hop_latency=8e-6 / 3), 2)


@pytest.mark.parametrize(("algorithm", "phases"), [("ring", 320), ("one-shot", 160)])
def test_trap_16_every_phase_pays_its_overhead(algorithm, phases):
    """5 us a phase, whether it waits for hops or for bytes; not on one chip."""
    one, plan = chip("ironwood"), Plan(8, all_reduce=algorithm)
    slow = replace(one, network=replace(one.network, overhead=5e-6))
    for batch in (1, 4096):
        before, after = (decode_step(Server(model("llama-3-70b"), c, plan), batch, 100).value for c in (one, slow))
        assert phases * 5e-6 == pytest.approx(after - before)
    alone = [decode_step(Server(model("llama-3-8b"), c), 1, 100).value for c in (one, slow)]
    assert alone[0] == alone[1]


def test_trap_16_latency_is_compared_with_bandwidth():
    """16 v5e, 6 us of hops a phase: 39 sequences of 8,192 values send 15/16 of 639 kB in less, 40 in more."""
    phases = [
        decode_step(server("llama-3-70b", "v5e", 16), batch, 100)["layers/all-reduce/all-gather"] for batch in (39, 40)
    ]
    assert ["latency", "bandwidth"] == [phase.bound for phase in phases]


@pytest.mark.parametrize("n", [8, 64, 512])
def test_trap_17_the_latency_threshold_is_of_a_shard(n):
    """45 kB a chip at 45 GB/s and 1 us, whatever n: 360 kB for 8, not 45 (formulas.md, section 3, row 6)."""
    one = chip("v5e", link_bandwidth="SB")
    ring, threshold = Torus(45e9, 1e-6, 1, 2, 1024), latency_bound_bytes(one, n).value
    assert 45e3 == pytest.approx(threshold / n)
    bound = [all_gather(bytes * n / (n - 1), n, ring).bound for bytes in (0.99 * threshold, 1.01 * threshold)]
    assert ["latency", "bandwidth"] == bound


def test_trap_18_critical_batch_grows_under_tensor_parallelism():
    """250 to 553 at 64 ways, D = 8192, F = 28672 (T3); the step's own FFN turns compute-bound later than C/W too."""
    one = replace(chip("v5e"), hbm_bandwidth=8.2e11)
    assert [250, 553] == [round(exact_critical_batch(one, 8192, 28672 / ways).value) for ways in (1, 64)]
    sharded = server("llama-3-70b", "v5e", 64)
    critical = int(critical_batch(chip("v5e")).value)
    assert ["memory", "compute"] == [
        decode_step(sharded, b, 100)["layers/ffn"].bound for b in (critical + 60, 4 * critical)
    ]


def test_trap_18_activations_are_kept():
    """A thousand sequences read and write more than the weights alone: the FFN's memory grows with the batch."""
    small, large = (decode_step(server("llama-3-70b", "v5e", 64), b, 100)["layers/ffn/memory"].value for b in (1, 1001))
    assert 80 * 1000 * 2 * (2 * 8192 + 3 * 28672 / 64) / 819e9 == pytest.approx(large - small)


def test_trap_19_batch_counts_tokens():
    """Four drafts behind each of 64 sequences are 320 tokens: the matmuls of 320 sequences, the cache reads of 64."""
    one = server("llama-3-70b", "ironwood", 8)
    drafts, wide = forward(one, 64, 5, 8192), decode_step(one, 320, 8192)
    assert drafts["layers/ffn"].value == wide["layers/ffn"].value
    assert drafts["layers/projections"].value == wide["layers/projections"].value
    cache = 80 * 64 * 2 * 2 * 8 * 128 * (8192 + 5) / 8 / 7380e9
    activations = 80 * 320 * 2 * 2 * 64 * 128 / 8 / 7380e9
    assert cache + activations == pytest.approx(drafts["layers/attention/memory"].value)


@pytest.mark.parametrize(
    ("batch", "drafts", "bound"), [(48, 4, "memory"), (49, 4, "compute"), (240, 0, "memory"), (241, 0, "compute")]
)
def test_trap_19_the_compute_wall_counts_tokens(batch, drafts, bound):
    """v5e turns compute-bound at 240.5 tokens, not sequences: at 48.1 sequences with four drafts. Activations left out."""
    from lib.formats import Format

    one = server("llama-3-8b", "v5e", activations=Format("nothing", 0, "bf16"))
    assert bound == speculate(one, None, drafts, batch, 100)["verify/layers/ffn"].bound
    assert (bound == "memory") == (drafts <= free_drafts(chip("v5e"), batch).value)


def test_trap_20_average_and_maximal_context_are_different_things():
    """Bandwidth follows the tokens there are, capacity the pages reserved: 8,448 of 8,704 on average."""
    one = server("llama-3-70b", "ironwood", 8, page=128)
    average, most = 8192 + 512 / 2, 8192 + 512
    read = [decode_step(one, 64, S)["layers/attention/memory"].value for S in (average, most)]
    assert read[0] < read[1]
    assert decode_step(one, 64, 8193)["layers/attention"].value < decode_step(one, 64, 8320)["layers/attention"].value
    assert footprint(one, 64, 8193)["KV cache"].value == footprint(one, 64, 8320)["KV cache"].value


def test_trap_20_contexts_may_be_averages():
    """Half tokens are accepted, and the step is linear in the context: the mean of a growing context is its middle."""
    one = server("llama-3-70b", "ironwood", 8)
    growing = decode_step(one, 64, np.arange(8192, 8192 + 513)).value.mean()
    assert growing == pytest.approx(decode_step(one, 64, 8192 + 256).value, rel=1e-12)
    assert decode_step(one, 64, 8192.5).value == pytest.approx(
        decode_step(one, 64, np.array([8192, 8193])).value.mean()
    )


def test_trap_20_the_mean_context_is_half_an_answer_on():
    """P + G/2; exactly P + (G - 1)/2 before each step, which is what a station's steps are taken at."""
    assert 8192 + 511 / 2 == Workload(8192, 512, 1.0).context == np.arange(8192, 8192 + 512).mean()
    one = server("llama-3-70b", "ironwood", 8)
    steps = station(colocated(one, Workload(8192, 512, 1.0), slots=64)).steps
    assert decode_step(one, 64, np.arange(8192, 8192 + 512)).value.mean() == pytest.approx(steps[-1], rel=1e-12)


def test_trap_20_long_answers_weigh_more():
    """Half of the answers have 10 tokens, half 990: of 1,000 steps 990 are a long one's, 494.5 tokens on."""
    context = Workload(1000, Lengths((10, 990)), 1.0).context
    assert 1000 + 0.01 * 4.5 + 0.99 * 494.5 == pytest.approx(context, rel=1e-12)


RATIOS = [  # step in ms, batch it is divided by, prefill servers per decode server (formulas.md, disagreement 1)
    (19, 32, 2.993),
    (None, 43, 3.93),
    (None, 32, 3.30),
]


@pytest.mark.parametrize(("step", "batch", "ratio"), RATIOS)
def test_trap_21_step_and_batch_belong_together(step, batch, ratio):
    """70B on 16 v5e, prompts of 0.91 s, 512 tokens: 19 ms are the step of 43; its own 19.5 ms make 3.93, those of 32, 17.2 ms,
    3.30. Bandwidth 8.2e11 as the source has it."""
    own = step_time(replace(chip("v5e"), hbm_bandwidth=8.2e11), 16, 70e9, 327_680 * 8192, batch).value
    assert {43: 19.5, 32: 17.2}[batch] == round(1e3 * own, 1)
    found = server_ratio(0.91, own if step is None else step / 1e3, batch, 512).value
    assert ratio == pytest.approx(found, abs=0.005 if step is None else 0.0005)


def test_trap_21_the_context_grows():
    """256 tokens more on average make the step longer, the ratio 3.28 instead of 3.30 with 70.55e9 parameters: to a unit of its
    last digit."""
    step = step_time(replace(chip("v5e"), hbm_bandwidth=8.2e11), 16, 70.55e9, 327_680 * (8192 + 256), 32).value
    assert 3.28 == pytest.approx(server_ratio(0.91 * 70.55 / 70, step, 32, 512).value, abs=0.01)


@pytest.mark.parametrize("chips", [8, 16, 32])
def test_trap_21_servers_are_weighted_by_chips(chips):
    """A prefill server of twice the chips reads twice as fast: half the servers, as many chips. Both from the closed form, and
    from the pools."""
    reader, decoder = (server("llama-3-8b", "ironwood", n) for n in (chips, 8))
    link = Switch(1e20, 0.0, 10**6)
    one = disaggregated(reader, decoder, Workload(8192, 512, 1.0), link=link, slots=64)
    read, step = prefill(reader, 1, 8192).value, station(one).steps[-1]
    ratio, found = server_ratio(read, step, 64, 512).value, loads(one)
    assert ratio == pytest.approx(found["prefill servers"] / found["decode servers"], rel=1e-6)
    by_chips = 64 * read * chips / (step * 512 * 8)
    assert by_chips == pytest.approx(ratio * one.prefill.plan.chips / one.decode.plan.chips, rel=1e-6)


@pytest.mark.parametrize("policy", ["prefill first", "chunked", "apart"])
def test_trap_22_a_first_token_is_more_than_a_prefill(policy):
    """Queue, prefill, transfer and a step: even alone it takes a step longer; under load the queue comes before."""
    one, load = server("llama-3-70b", "ironwood", 8), Workload(8192, 512, 3.0)
    if policy == "apart":
        loaded = disaggregated(one, one, load)
    else:
        loaded = colocated(one, load, 1, policy, 10_000 if policy == "chunked" else None)
    parts = ttft(loaded)
    alone = prefill(one, 1, 8192).value
    assert ["queue", "prefill", "transfer", "first step"] == [part.name for part in parts.parts]
    assert parts.value == sum(part.value for part in parts.parts)
    assert parts.value > alone + decode_step(one, 1, 8192).value
    assert parts["queue"].value > 0.1 * alone and parts["first step"].value > 0
    assert (parts["transfer"].value > 0) == (policy == "apart")


def test_trap_23_utilisation_is_of_a_peak():
    """40 % of the bf16 peak is 20 % of the fp8 peak, in fp8 weights too: 157 ms for 8,192 tokens of 70B on 8 Ironwood."""
    bf16, fp8 = (prefill_time(chip("ironwood"), 8, 70.55e9, 8192, *used) for used in ((0.4, "bf16"), (0.2, "fp8")))
    assert 157 == round(1e3 * bf16.value) and bf16.value == fp8.value


@pytest.mark.parametrize(("name", "int4", "int8"), [("v5e", 3.75, 7.5), ("v5p", 2.6, 5.2)])
def test_trap_25_unpacking_runs_on_the_vector_units(name, int4, int8):
    """8 x 128 lanes of four units have time for few operations on a weight while it is read: 3.75 and 2.6 on half a byte, twice
    that on a byte."""
    found = [dequantization_limit(chip(name), weights).value for weights in ("int4", "int8")]
    assert [int4, int8] == pytest.approx(found, rel=0.01)


@pytest.mark.parametrize(("operations", "slower"), [(3, False), (6, True)])
def test_trap_25_unpacking_can_take_longer_than_the_read(operations, slower):
    """8.03e9 weights of int4 on v5e by hand: 4.9 ms to read 4.0 GB; 3 operations each take 3.9 ms of 6.14e12 a second, 6 take
    7.8 ms."""
    params = model("llama-3-8b").params
    read, unpacked = params / 2 / 819e9, operations * params / 6.14e12
    assert slower == (unpacked > read) == (operations > dequantization_limit(chip("v5e"), "int4").value)
    assert [4.9, {3: 3.9, 6: 7.8}[operations]] == [round(1e3 * t, 1) for t in (read, unpacked)]


def test_trap_25_the_vector_units_of_others_are_not_known():
    """No figure for GPUs here: ValueError, not a silent zero. Half the rate leaves half the operations."""
    with pytest.raises(ValueError, match="vector units of h100"):
        dequantization_limit(chip("h100"))
    one = chip("v5e")
    assert dequantization_limit(one).value / 2 == dequantization_limit(one.derate(compute=0.5)).value


def test_trap_26_tiles_are_padded():
    """F / Y = 28672 / 256 = 112 columns fill 7/8 of a tile of v5e and 7/16 of one of v6e; nominal peaks do not know."""
    assert [112 / 128, 112 / 256] == [tile_share(chip(name), 28672 / 256).value for name in ("v5e", "v6e")]
    with pytest.raises(ValueError, match="h100's matrix unit is not known"):
        tile_share(chip("h100"), 448)
    one = server("llama-3-70b", "v6e", 64)
    assert 80 * 2 * 64 * 3 * 8192 * 448 / 918e12 == pytest.approx(decode_step(one, 64, 1)["layers/ffn/compute"].value)


@pytest.mark.parametrize(("activations", "together"), [("f32", 8), ("bf16", 16), ("int8", 32)])
def test_trap_26_rows_come_in_sublanes(activations, together):
    """8 rows of 32 bits are multiplied together: one sequence costs what 8 do in f32, 16 in bf16, 32 in int8."""
    shares = [tile_share(chip("v5e"), 128, rows, activations).value for rows in (1, together, together + 1)]
    assert [1 / together, 1, (together + 1) / (2 * together)] == shares


def test_the_closed_form_counts_params_and_the_pass_counts_operations():
    """7.2 with P = 70.55e9 reads 1.5 % more weights than a step streams (formulas.md, disagreement 13)."""
    closed = step_time(chip("ironwood"), 1, 70.55e9, 1, 1)["matmuls/memory"].value
    assert 1.5 == pytest.approx(100 * (1 - weight_bytes("llama-3-70b") / 7380e9 / closed), abs=0.05)
    assert "llama-3.1-70b" in DENSE and len(list(nodes(decode_step(server(), 1, 1)))) > 10


def test_the_bonus_token_counts():
    """A round ends with a token of the target: 2.90 tokens of XSum's, k = 4; without it 1.90, 34 % fewer (disagreement 31)."""
    tokens = expected_tokens(0.724, 4).value
    without = sum(0.724**i for i in range(1, 5))
    assert (2.90, 1.90) == (round(tokens, 2), round(without, 2))
    assert (1, -34) == (round(tokens - without, 9), round(100 * (without / tokens - 1)))
