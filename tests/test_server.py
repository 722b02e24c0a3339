"""A model on its chips: what each holds, what fits, how the cache is cut."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given
from strategies import batches, contexts, server, servers

from lib.chips import chip
from lib.formats import Precision
from lib.forward import decode_step
from lib.models import Model, kv_bytes, model
from lib.server import Plan, Server, fits, footprint, max_batch, pool

GB, GiB = 1e9, 2**30
MHA = server("llama-2-13b", "v5e", 8)


def gqa_13b(kv_heads=8, tensor=8):
    """LLaMA-2-13B with fewer KV heads: 8 is the 1:5 of the source."""
    full = model("llama-2-13b")
    (block,) = full.blocks
    one = replace(full, blocks=(replace(block, mixer=replace(block.mixer, n_kv_heads=kv_heads)),))
    return Server(one, MHA.chip, Plan(tensor))


def test_13b_weights_on_a_chip_by_hand():
    """13.016e9 parameters in 2 bytes over 8 chips: 26.03 GB / 8, but norms (81 x 5120) whole on each of them."""
    norms = 2 * 81 * 5120
    whole = 2 * 13_015_864_320
    assert (whole - norms) / 8 + norms == footprint(MHA, 1, 1)["weights"].value


@pytest.mark.parametrize(
    ("batch", "expected"), [(1, True), (8, True), (16, True), (17, False), (32, False), (64, False)]
)
def test_13b_mha_fits_batch_16(batch, expected):
    """GiB chips: 26.03 GB + 16 x 6.71 GB = 124.2 of 128 GiB; 32 do not fit (formulas.md T4, claim S-003)."""
    assert expected == fits(MHA, batch, 8192)


def test_13b_mha_max_batch_under_both_readings():
    """16 sequences with 16 GiB a chip, 15 with 16 GB (formulas.md, disagreement 9)."""
    whole, decimal = (replace(MHA, chip=replace(MHA.chip, hbm_bytes=size, hbm_reserved=0)) for size in (2**34, 16 * GB))
    assert (16, 15) == (max_batch(whole, 8192), max_batch(decimal, 8192))


def test_13b_gqa_fits_batch_64():
    """With 8 KV heads 64 sequences fit, 240 do not (claim S-005; the real 1:5 model is 1.68e9 parameters lighter)."""
    assert (True, False) == (fits(gqa_13b(), 64, 8192), fits(gqa_13b(), 240, 8192))


def test_13b_gqa_cache_by_hand():
    """64 x 1.342 GB over 8 chips: 10.74 GB on each (formulas.md T4: 85.90 GB in all)."""
    assert 85.90 == round(8 * footprint(gqa_13b(), 64, 8192)["KV cache"].value / GB, 2)


@pytest.mark.parametrize(
    ("tensor", "share"), [(1, 1), (2, 1 / 2), (4, 1 / 4), (8, 1 / 8), (16, 1 / 8), (32, 1 / 8), (64, 1 / 8)]
)
def test_kv_heads_replicate_beyond_their_number(tensor, share):
    """70B has K = 8 KV heads: 16 chips hold two copies, 64 eight (formulas.md, trap 10)."""
    assert share * 4 * 327_680 * 8192 == pytest.approx(
        footprint(server("llama-3-70b", "ironwood", tensor), 4, 8192)["KV cache"].value, rel=1e-12
    )


@pytest.mark.parametrize("kv", ["batch", "sequence"])
def test_cutting_the_copies_by_batch_or_sequence_frees_them(kv):
    """16 chips then hold a sixteenth each, of 64 sequences as of one's length."""
    one = server("llama-3-70b", "ironwood", 16, kv)
    assert 64 * 327_680 * 8192 / 16 == pytest.approx(footprint(one, 64, 8192)["KV cache"].value, rel=1e-12)


def test_sequences_are_not_cut_by_batch():
    """One sequence on 16 chips and 8 KV heads: one of the two copies is idle; three sequences lie 2 and 1."""
    one = server("llama-3-70b", "ironwood", 16, "batch")
    eighth = 327_680 * 8192 / 8
    assert [eighth, 2 * eighth] == [pytest.approx(footprint(one, b, 8192)["KV cache"].value) for b in (1, 3)]


@pytest.mark.parametrize("tensor", [1, 8, 32])
def test_latents_are_on_every_chip(tensor):
    """DeepSeek-V3: 70,272 bytes a token, whatever the tensor parallelism (formulas.md, trap 11)."""
    one = server("deepseek-v3", "ironwood", tensor)
    assert 5 * 70_272 * 8192 == pytest.approx(footprint(one, 5, 8192)["KV cache"].value, rel=1e-12)


@pytest.mark.parametrize(
    ("kv", "tensor", "batch", "share"), [("batch", 8, 64, 8), ("batch", 8, 65, 9), ("sequence", 8, 64, 8)]
)
def test_latents_split_by_batch_or_sequence(kv, tensor, batch, share):
    """64 sequences on 8 chips weigh 8 on each; the 65th makes it 9 when whole sequences are dealt out."""
    one = server("deepseek-v3", "ironwood", tensor, kv)
    assert share * 70_272 * 8192 == pytest.approx(footprint(one, batch, 8192)["KV cache"].value, rel=1e-12)


def test_what_latent_attention_replicates_counts_whole():
    """MLA on 8 chips: each holds both down-projections, D x 1536 and D x (512 + 64), and the norms of the latents."""
    one, alone = (footprint(server("deepseek-v3", "ironwood", x), 1, 1)["weights/attention"].value for x in (8, 1))
    whole = 61 * 2 * (7168 * 1536 + 7168 * 576 + 1536 + 512)
    assert (alone - whole) / 8 + whole == pytest.approx(one, rel=1e-12)


def test_routers_and_norms_count_whole():
    """Mixtral on 8 chips: the 4096 x 8 router of 32 layers and 65 norms on every chip."""
    held = footprint(server("mixtral-8x7b", "ironwood", 8), 1, 1)
    experts = 32 * 8 * 3 * 4096 * 14336
    assert (2 * (experts / 8 + 32 * 4096 * 8), 2 * 65 * 4096) == (
        held["weights/ffn"].value,
        held["weights/norms"].value,
    )


def test_a_tied_table_is_held_once():
    """Gemma-2: no head beside the embedding of 256,000 x 4608."""
    held = footprint(server("gemma-2-27b", "ironwood"), 1, 1)["weights"]
    assert ["attention", "ffn", "norms", "embedding"] == [part.name for part in held.parts]
    assert 2 * 256_000 * 4608 == held["embedding"].value
    assert 2 * 27_227_128_320 == held.value


@pytest.mark.parametrize(
    "name", ["llama-3-70b", "mixtral-8x7b", "deepseek-v3", "gpt-oss-120b", "qwen3.5-397b-a17b", "gemma-3-27b"]
)
def test_one_chip_holds_every_parameter(name):
    """Bytes of weights on one chip are two times the parameters."""
    assert 2 * model(name).params == pytest.approx(
        footprint(server(name, "ironwood"), 1, 1)["weights"].value, rel=1e-12
    )


@pytest.mark.parametrize(
    ("name", "gigabytes"),
    [
        ("llama-2-7b", 13.48),
        ("qwen2.5-72b", 145.4),
        ("gpt-oss-20b", 13.75),
        ("gpt-oss-120b", 65.2),
        ("deepseek-v3", 673.04),
    ],
)
def test_published_formats(name, gigabytes):
    """Weights as published weigh what models.csv counts: 4.25-bit experts, fp8, 16-bit tables; DeepSeek-V3's 672.9 GB
    there leave out its block scales, 4 bytes per 128 x 128 values: 0.16 GB."""
    one = model(name)
    held = footprint(Server(one, chip("ironwood"), Plan(), one.native), 1, 1)["weights"].value
    assert gigabytes == pytest.approx(held / GB, rel=1e-3)


def test_formats_by_module():
    """70B in 4-bit with group scales: 36.4 GB; both tables kept in 16 bits add 3.2 GB (formulas.md, trap 8)."""
    four, mixed = (
        footprint(server(weights="int4g128", **more), 1, 1)["weights"].value
        for more in ({}, dict(embedding="bf16", head="bf16"))
    )
    assert 36.4 == round(four / GB, 1)
    assert (16 - 4.125) / 8 * 2 * 128_256 * 8192 == pytest.approx(mixed - four)
    # The 3.2 GB of formulas.md count from 4 bits without scales.
    assert 3.2 == round((16 - 4) / 8 * 2 * 128_256 * 8192 / GB, 1)


def test_pages_round_a_cache_up():
    """Pages of 16: 17 tokens weigh 32, 32 weigh 32 (formulas.md, traps 12 and 20)."""
    plain, paged = server(), server(page=16)

    def held(one, context):
        return footprint(one, 1, context)["KV cache"].value

    assert [32, 32, 48] == [held(paged, c) / held(plain, 1) for c in (17, 32, 33)]
    np.testing.assert_array_equal([16.0, 32.0], held(paged, np.array([1, 17])) / held(plain, 1))


def test_memory_may_be_swept():
    """13B on 8 chips of 16 and of 32 GB, of which 0.27 GB are kept: 3.25 GB of weights a chip, 0.839 GB a sequence."""
    one = server("llama-2-13b", "v5e", 8)
    swept = replace(one, chip=replace(one.chip, hbm_bytes=np.array([16e9, 32e9])))
    assert [(16e9 - 0.27e9 - 3.254e9) // 0.8389e9, (32e9 - 0.27e9 - 3.254e9) // 0.8389e9] == max_batch(swept, 8192).tolist()


def test_max_batch_of_70b_on_16_v5e():
    """By hand: 256 GiB less 143.8 GB of weights (K and V projections lie twice) leave 131.1 GB, 126.8 GB where the compiler
    leaves 252 GiB; KV heads lie twice, so 24 or 23 sequences of 2 x 2.684 GB fit; split by batch 48 or 46. (The slice's
    total would take 49, formulas.md T8: a 25th on one of the copies.)"""
    for reserved, expected in ((0, (24, 48)), (2**28, (23, 46))):
        servers = [server("llama-3-70b", "v5e", 16, kv) for kv in ("heads", "batch")]
        servers = [replace(one, chip=replace(one.chip, hbm_reserved=reserved)) for one in servers]
        assert expected == tuple(max_batch(one, 8192) for one in servers)


def test_max_batch_is_zero_where_nothing_fits():
    """Neither one sequence of a billion tokens, nor the weights of 70B on one v5e; in arrays too."""
    assert 0 == max_batch(server(), 10**9) == max_batch(server("llama-3-70b", "v5e"), 1)
    assert [0] == list(max_batch(server("llama-3-70b", "v5e"), np.array([8192])))


def test_max_batch_of_a_sweep_is_that_of_each():
    """Arrays in, whole numbers out."""
    one, swept = server("gpt-oss-120b", "h200", 4, "batch"), np.array([[100], [8192], [10**8]])
    np.testing.assert_array_equal([[max_batch(one, int(c))] for c in swept[:, 0]], max_batch(one, swept))


def test_fits_is_a_mask():
    """Infeasible is data: one truth value a configuration, in the broadcast shape."""
    mask = fits(MHA, np.array([[1], [16], [32]]), np.array([4096, 8192]))
    assert [[True, True], [True, True], [True, False]] == mask.tolist()


@given(servers(), contexts)
def test_max_batch_fits_and_one_more_does_not(one, context):
    """The most sequences, under every way of cutting the cache."""
    most = int(max_batch(one, context))
    assume(footprint(one, 1, context).value > 0)
    assert most == 0 or fits(one, most, context)
    assert not fits(one, most + 1, context)


@given(servers(), batches, contexts)
def test_whatever_fits_is_inside_the_hbm(one, batch, context):
    """All chips together hold every parameter and cache at least once: these are within their HBM wherever it fits."""
    stored = one.precision.weights.bytes * one.model.params + batch * kv_bytes(one.model, context, one.precision.kv)
    if fits(one, batch, context):
        assert stored <= one.plan.chips * one.chip.capacity * (1 + 1e-12)
        assert footprint(one, batch, context).value <= one.chip.capacity


@given(servers(), batches, contexts)
def test_chips_together_hold_everything(one, batch, context):
    """Never less than one copy of the parameters and of the caches."""
    held = footprint(one, batch, context)
    assert held["weights"].value * one.plan.chips >= one.precision.weights.bytes * one.model.params * (1 - 1e-12)
    assert held["KV cache"].value * one.plan.chips >= batch * kv_bytes(one.model, context, one.precision.kv) * (
        1 - 1e-12
    )


PLANS = [
    ("llama-3-70b", 3),
    ("llama-3-70b", 7),
    ("llama-3-70b", 128),
    ("llama-2-13b", 16),
    ("mixtral-8x7b", 64),
    ("gpt-oss-120b", 128),
    ("deepseek-v3", 256),
    ("llama-3-70b", 10**9),
]


@pytest.mark.parametrize(("name", "tensor"), PLANS)
def test_a_plan_that_heads_or_widths_cannot_take(name, tensor):
    """ValueError names the model, the heads and the width."""
    with pytest.raises(ValueError, match=f"{name} cannot be cut {tensor} ways.*query heads.*KV heads.*width"):
        server(name, "ironwood", tensor)


def test_kv_heads_neither_dividing_nor_divided():
    """6 chips for 4 KV heads: no chip could hold a whole number of them, or of copies."""
    one = model("llama-3-8b")
    (block,) = one.blocks
    odd = replace(
        one,
        blocks=(replace(block, mixer=replace(block.mixer, n_heads=12, n_kv_heads=4), ffn=replace(block.ffn, d_ff=12)),),
    )
    with pytest.raises(ValueError, match="cannot be cut 6 ways"):
        Server(odd, MHA.chip, Plan(6))


def test_more_chips_than_the_network_has():
    """16 cards where no network joins more than the 8 of a host: ValueError; a pipeline does not help."""
    for plan in (Plan(16), Plan(8, pipeline=2)):
        with pytest.raises(ValueError, match="16 chips, and l40s's network joins 8"):
            Server(model("llama-3-70b"), chip("l40s"), plan)


def test_math_that_the_chip_lacks():
    """At the door of the server, weights in the same format pass: they are upcast."""
    with pytest.raises(ValueError, match="ironwood does not multiply int8, only: bf16, fp8"):
        server(math="int8")
    assert server(weights="int8").precision.weights.name == "int8"


def test_math_of_a_block_that_the_chip_lacks():
    """Where formats vary by module, each block's math format is checked at the door too."""
    one = model("llama-3-8b")
    mixed = replace(one, blocks=(replace(one.blocks[0], precision=Precision(math="int8")),))
    with pytest.raises(ValueError, match="ironwood does not multiply int8"):
        Server(mixed, server().chip)


def test_formats_vary_by_block():
    """A block of its own precision weighs in it; the rest in the server's."""
    one = model("llama-3-8b")
    light = replace(one, blocks=(replace(one.blocks[0], precision=Precision("int4", kv="fp8")),))
    plain, mixed = (footprint(Server(m, server().chip), 2, 100) for m in (one, light))
    assert (0.25, 0.25, 0.5, 1.0) == tuple(
        mixed[p].value / plain[p].value for p in ("weights/attention", "weights/ffn", "KV cache", "weights/embedding")
    )


@pytest.mark.parametrize("kv", ["head", "", None, "Batch", 1, ["heads"]])
def test_a_cut_of_the_cache_that_does_not_exist(kv):
    """The message lists the three."""
    with pytest.raises(ValueError, match="heads, batch, sequence"):
        Plan(kv=kv)


def test_chips_of_a_plan_are_the_product_of_its_axes():
    """4 x 2 x 3 x 5 = 120 chips in 2 x 5 = 10 groups that hold different sequences."""
    plan = Plan(4, expert=2, pipeline=3, data=5)
    assert (120, 10) == (plan.chips, plan.groups)


def test_an_all_reduce_that_does_not_exist():
    """The message lists the two."""
    with pytest.raises(ValueError, match="all_reduce must be one of ring, one-shot, got 'tree'"):
        Plan(all_reduce="tree")


def test_experts_that_the_groups_cannot_share():
    """Mixtral has 8 experts: 3 groups cannot share them. A dense model has none to share: any number goes."""
    with pytest.raises(ValueError, match="8 experts .* expert=3"):
        Server(model("mixtral-8x7b"), chip("ironwood"), Plan(1, expert=3))
    assert 3 == Server(model("llama-3-8b"), chip("ironwood"), Plan(1, expert=3)).plan.chips


def test_more_stages_than_layers():
    """LLaMA-3-8B has 32 layers."""
    with pytest.raises(ValueError, match="32 layers, too few for pipeline=33"):
        Server(model("llama-3-8b"), chip("ironwood"), Plan(pipeline=33))


def test_replicas_hold_the_same_and_serve_more():
    """Two replicas: a chip holds what it held, twice the sequences fit."""
    one, two = (Server(model("llama-3-70b"), chip("ironwood"), Plan(8, data=n)) for n in (1, 2))
    assert footprint(one, 64, 8192).value == footprint(two, 128, 8192).value
    assert 2 * max_batch(one, 8192) == max_batch(two, 8192)


def test_stages_hold_their_layers():
    """70B in 4 stages of 20 layers on 8 chips each: a quarter of the layers, one of the two tables, a quarter of the cache."""
    one, four = (
        footprint(Server(model("llama-3-70b"), chip("ironwood"), Plan(8, pipeline=p)), 64, 8192) for p in (1, 4)
    )
    for module in ("attention", "ffn"):
        assert one["weights"][module].value / 4 == pytest.approx(four["weights"][module].value)
    assert 2 * 128_256 * 8192 / 8 == four["weights/embedding or head"].value
    assert one["KV cache"].value / 4 == pytest.approx(four["KV cache"].value)


def test_the_fullest_stage_holds_its_part_of_every_kind_of_layer():
    """Gemma-3-27B: 10 of 62 layers see the whole context. In 8 stages one has 2 of them: 2 x 8,192 bytes a token and sequence."""
    held = footprint(Server(model("gemma-3-27b"), chip("h200"), Plan(pipeline=8)), 1, 131_072)["KV cache"].value
    window = 7 * 8192 * 1024  # 52 local layers: 7 on a stage
    assert 2 * 8192 * 131_072 + window == held


def test_the_fullest_stage_of_an_uneven_cut():
    """61 layers of DeepSeek-V3 in 4 stages: 16 on the fullest."""
    one, four = (footprint(Server(model("deepseek-v3"), chip("ironwood"), Plan(8, pipeline=p)), 1, 1) for p in (1, 4))
    assert 16 / 61 == pytest.approx(four["KV cache"].value / one["KV cache"].value)


def test_groups_share_the_experts_and_replicate_the_rest():
    """Mixtral-8x7B on 4 groups of 2: a chip holds an eighth of the experts, half of the attention, a quarter of the batch."""
    moe = model("mixtral-8x7b")
    alone, shared = (Server(moe, chip("ironwood"), Plan(2, expert=x)) for x in (1, 4))
    experts, router = 32 * 8 * 3 * 4096 * 14336, 32 * 8 * 4096
    assert 2 * (experts / 8 + router) == pytest.approx(footprint(shared, 4, 1)["weights/ffn"].value)
    held = [footprint(one, 64, 8192)["weights/attention"].value for one in (alone, shared)]
    assert held[0] == held[1]
    assert footprint(alone, 16, 8192)["KV cache"].value == footprint(shared, 64, 8192)["KV cache"].value


@pytest.mark.parametrize(("name", "tensor", "said"), [("ironwood", 8, True), ("ironwood", 4, False), ("v5e", 8, False)])
def test_devices_that_share_a_kv_head_say_so(name, tensor, said):
    """8 Ironwood chips are 16 devices for 8 KV heads: the two of a chip split its sequences. On 4 chips each has its own head."""
    assert said == (
        "devices of a chip split the sequences" in str(footprint(server("llama-3-70b", name, tensor), 1, 8192))
    )


def test_an_array_of_plans_is_its_plans():
    """Footprints, fits and the largest batch of a sweep over tensor ways equal those of each, and validation sees every entry."""
    tensor = np.array([1, 8, 32, 2, 8])
    swept = Server(model("llama-3-70b"), chip("ironwood"), Plan(tensor, kv="batch"))
    each = [Server(model("llama-3-70b"), chip("ironwood"), Plan(int(x), kv="batch")) for x in tensor]
    np.testing.assert_allclose(footprint(swept, 64, 8192).value, [footprint(one, 64, 8192).value for one in each])
    np.testing.assert_array_equal(fits(swept, 64, 8192), [fits(one, 64, 8192) for one in each])
    np.testing.assert_array_equal(max_batch(swept, 8192), [max_batch(one, 8192) for one in each])
    with pytest.raises(ValueError, match="cannot be cut 3 ways"):
        Server(model("llama-3-70b"), chip("ironwood"), Plan(np.array([1, 3])))


def test_the_slice_is_the_most_compact():
    """8 Ironwood chips are 2x2x2: 3 hops; one chip has none."""
    assert (3, 0) == (server("llama-3-70b", "ironwood", 8).slice.hops, server().slice.hops)


def test_a_server_is_a_value():
    """Equal and hashable by what it is made of; frozen."""
    assert server() == server() and len({server(), server(), server(weights="fp8")}) == 2
    assert isinstance(server().model, Model)
    with pytest.raises(AttributeError):
        server().plan = Plan(2)


def test_a_layer_that_is_not_replicated_does_not_limit_the_batch():
    """Qwen3.5 on 8 chips: 2 KV heads in 15 layers lie four times unless cut by batch, the recurrent layers only once.

    By hand: free / (45 x state / 8 + 15 x cache / 8) sequences, in steps of the copies."""
    one = server("qwen3.5-397b-a17b", "ironwood", 8, "batch", weights="fp8")
    free = one.chip.capacity - footprint(one, 1, 1)["weights"].value
    state, cache = 4_268_032, 2 * 2 * 2 * 256 * 8192
    ideal = free / (45 * state / 8 + 15 * cache / 8)
    assert ideal - 4 <= max_batch(one, 8192) <= ideal


def test_a_plan_has_no_imbalance_unless_it_is_said():
    """1.0; part of what a plan is, and of what it is equal to."""
    assert 1 == Plan().imbalance
    assert Plan(8, expert=4, imbalance=1.3) != Plan(8, expert=4) == Plan(8, expert=4, imbalance=1)
    assert len({Plan(expert=4), Plan(expert=4, imbalance=1), Plan(expert=4, imbalance=1.5)}) == 2


def test_imbalance_takes_time_but_no_room():
    """The busiest group holds as many experts as the others: footprint and largest batch stay, and it waits for nothing else."""
    even, busy = (Server(model("mixtral-8x7b"), chip("h200"), Plan(1, expert=4, imbalance=x)) for x in (1, 2))
    assert footprint(even, 64, 8192).value == footprint(busy, 64, 8192).value
    assert max_batch(even, 8192) == max_batch(busy, 8192)
    assert decode_step(even, 64, 8192).value < decode_step(busy, 64, 8192).value


@pytest.mark.parametrize("context", [1000, 8192, 100_000])
def test_tokens_of_a_pool_by_hand(context):
    """70B on 8 Ironwood: what the weights leave over 327,680 bytes a token, 1/8 of it on a chip; a sequence counts for its
    tokens."""
    one = server("llama-3-70b", "ironwood", 8)
    free = one.chip.capacity - footprint(one, 1, 1)["weights"].value
    tokens, weigh = pool(one)
    assert int(free / (327_680 / 8)) == tokens
    assert context == weigh(context)


def test_tokens_of_windowed_caches_by_hand():
    """Gemma-2-27B on one H100: 23 of 46 layers keep 4,096 tokens, so that of 32,768 each counts for 9/16."""
    one = server("gemma-2-27b", "h100")
    free = one.chip.capacity - footprint(one, 1, 1)["weights"].value
    tokens, weigh = pool(one)
    assert int(free / (46 * 2 * 2 * 16 * 128)) == tokens
    assert [1000, 4096, 18_432] == [weigh(context) for context in (1000, 4096, 32_768)]


def test_a_state_counts_from_the_first_token_on():
    """Qwen3.5-397B keeps 45 states of 4,268,032 bytes, and two heads' keys and values of 256 in 15 layers for each token."""
    _, weigh = pool(Server(model("qwen3.5-397b-a17b"), chip("b300"), Plan(2)))
    state = 45 * 4_268_032 / (15 * 2 * 2 * 256 * 2)
    assert [1 + state, 5000 + state] == pytest.approx([weigh(1), weigh(5000)], abs=1)


def test_no_tokens_where_the_weights_do_not_fit():
    """0, not less: 70B on one v5e."""
    assert 0 == pool(server("llama-3-70b", "v5e"))[0]


@given(servers(), contexts)
def test_a_pool_holds_the_largest_batch_and_not_one_more(one, context):
    """Whatever the cut of the cache; where replicas or copies share sequences, one more is one for each of them."""
    one = replace(one, plan=replace(one.plan, page=1))
    turn = one.plan.groups
    if one.plan.kv == "batch":
        turn *= int(np.lcm.reduce([round(one.copies(block.mixer)) for block in one.model.blocks]))
    (tokens, weigh), batch = pool(one), max_batch(one, context)
    assume(batch < 1e9)
    assert batch * (weigh(context) - 1) <= tokens * (1 + 1e-9) + 1
    assert tokens < (batch + turn) * weigh(context) * (1 + 1e-9)


@pytest.mark.parametrize("context", [1, 127, 128, 129, 200, 257, 8192])
def test_a_pool_has_the_pages_of_its_largest_batch(context):
    """Pages of 128 tokens: a pool that holds a batch in the model of footprints has as many pages as its sequences take. One
    token over a page must not halve the pool."""
    one = server("llama-3-70b", "ironwood", 8, page=128)
    assert pool(one)[0] // 128 >= max_batch(one, context) * -(-context // 128)


def test_replicas_have_a_pool_each():
    """Twice the replicas, twice the tokens; the fp8 cache has twice as many, too."""
    one = server("llama-3-70b", "ironwood", 8)
    for twice in (Server(one.model, one.chip, Plan(8, data=2)), server("llama-3-70b", "ironwood", 8, kv="fp8")):
        assert 2 * pool(one)[0] == pytest.approx(pool(twice)[0], abs=1)
