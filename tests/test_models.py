"""models.toml and the nouns it is written in, against counts made elsewhere (data/expected_models.csv, formulas.md)."""

import csv
from pathlib import Path

import numpy as np
import pytest

from lib.formats import Precision, format
from lib.mixers import GQA, MLA, Recurrent
from lib.models import FFN, Block, Model, kv_bytes, model, model_names, weights_read
from lib.variants import Indexed, Shared, Windowed

with open(Path(__file__).parent / "data" / "expected_models.csv", newline="", encoding="utf-8") as file:
    EXPECTED = {row["model"]: row for row in csv.DictReader(file)}

K8, K32, K128 = 8192, 32768, 131072
DENSE = FFN(100)


def native_bytes(m):
    """Bytes of the weights as they are published."""
    layers = sum(
        block.layers
        * (
            block.mixer.params(m.d_model) * m.native.of("attention").bytes
            + block.ffn.params(m.d_model) * m.native.of("ffn").bytes
            + block.norms * m.d_model * m.native.weights.bytes
        )
        for block in m.blocks
    )
    head = 0 if m.tied else m.native.of("head").bytes
    return layers + m.vocab * m.d_model * (m.native.of("embedding").bytes + head)


def test_every_expected_model_is_there():
    """The data file holds the models of the table, no more and no fewer."""
    assert set(model_names()) == set(EXPECTED)


@pytest.mark.parametrize("name", EXPECTED)
def test_params_are_exact(name):
    """Norms, biases, sinks, routers and the gates of shared experts included."""
    assert model(name).params == int(EXPECTED[name]["params"])


@pytest.mark.parametrize("name", EXPECTED)
def test_active_params_are_exact(name):
    """All parameters but the experts that a token is not routed to."""
    assert model(name).active_params == int(EXPECTED[name]["active_params"])


@pytest.mark.parametrize("name", [name for name, row in EXPECTED.items() if row["published_params"]])
def test_params_agree_with_the_publisher(name):
    """Published totals are rounded, or count a vision tower of which only Gemma 3 gives the size: 1 %."""
    vision = int(EXPECTED[name]["vision_params"] or 0)
    assert model(name).params + vision == pytest.approx(float(EXPECTED[name]["published_params"]), rel=0.01)


@pytest.mark.parametrize("name", EXPECTED)
def test_cache_of_a_short_sequence(name):
    """Within every window each token adds the same, indexer keys included; a recurrent state is there at once."""
    indexer = {"deepseek-v3.2": 61 * 128 * 2}.get(name, 0)
    state = {"qwen3.5-397b-a17b": int(EXPECTED["qwen3.5-397b-a17b"]["kv_bounded"])}.get(name, 0)
    assert kv_bytes(model(name), 100) == 100 * (int(EXPECTED[name]["kv_per_token"]) + indexer) + state


@pytest.mark.parametrize("name", EXPECTED)
def test_cache_of_a_long_sequence(name):
    """Beyond every window only the unbounded layers grow."""
    indexer = {"deepseek-v3.2": 61 * 128 * 2}.get(name, 0)
    growing = int(EXPECTED[name]["kv_per_token_unbounded"]) + indexer
    assert kv_bytes(model(name), 100_000) == 100_000 * growing + int(EXPECTED[name]["kv_bounded"])


@pytest.mark.parametrize("name", EXPECTED)
def test_native_bytes(name):
    """The published files weigh what the native formats say, block scales included."""
    assert native_bytes(model(name)) == pytest.approx(1e9 * float(EXPECTED[name]["native_GB"]), rel=0.005)


@pytest.mark.parametrize(
    "name, short, middle, long",
    [
        ("llama-2-13b", "6.71", "26.84", "107.37"),
        ("llama-3-8b", "1.07", "4.29", "17.18"),
        ("llama-3-70b", "2.68", "10.74", "42.95"),
        ("llama-3-405b", "4.23", "16.91", "67.65"),
        ("deepseek-v3", "0.58", "2.30", "9.21"),
        ("gpt-oss-120b", "0.31", "1.21", "4.84"),
        ("gemma-2-27b", "2.32", "6.95", "25.47"),
        ("gemma-3-27b", "1.11", "3.12", "11.17"),
    ],
)
def test_cache_table(name, short, middle, long):
    """GB of one sequence of 8k, 32k and 128k tokens at 16 bits: table T10 of formulas.md."""
    assert [f"{kv_bytes(model(name), context) / 1e9:.2f}" for context in (K8, K32, K128)] == [short, middle, long]


def test_cache_counts_kv_heads_of_their_own_width():
    """gpt-oss-20b keeps 8 heads of 64, not 64 heads of 2880/64 = 45: 12 unbounded layers, 12 of the last 128 tokens."""
    assert kv_bytes(model("gpt-oss-20b"), K8) == 2 * 2 * 8 * 64 * (12 * 8192 + 12 * 128)


def test_mla_keeps_one_latent_for_keys_and_values():
    """61 layers of 512 + 64 values at two bytes, once: 70,272 bytes a token."""
    assert kv_bytes(model("deepseek-v3"), 1) == 61 * (512 + 64) * 2 == 70_272


def test_mla_keeps_71_times_less_than_the_heads_it_stands_for():
    """128 heads of keys (192) and values (128) would be 40,960 values a token and layer; the latent is 576."""
    expanded, latent = GQA(128, 128, 192, 128), MLA(128, 1536, 512, 64, 128, 128)
    assert expanded.cache(1000, 2) / latent.cache(1000, 2) == pytest.approx(71.1, abs=0.05)


def test_windows_bound_local_layers_only():
    """Gemma 3 at 32k: 10 layers keep all tokens, 52 keep 1024."""
    assert kv_bytes(model("gemma-3-27b"), K32) == 2 * 2 * 16 * 128 * (10 * 32768 + 52 * 1024)


def test_a_model_of_windows_stops_growing():
    """Mistral 7B v0.1 keeps 4096 tokens whatever the context."""
    assert kv_bytes(model("mistral-7b-v0.1"), K8) == kv_bytes(model("mistral-7b-v0.1"), K128) == 32 * 4096 * 4096


@pytest.mark.parametrize(
    "experts, k, distinct",
    [
        (16, 2, ["2.0", "6.6", "10.5", "14.1", "15.8", "16.0", "16.0", "16.0"]),
        (8, 2, ["2.0", "5.5", "7.2", "7.9", "8.0", "8.0", "8.0", "8.0"]),
        (128, 4, ["4.0", "15.3", "28.7", "51.0", "81.7", "111.2", "125.8", "128.0"]),
        (256, 8, ["8.0", "30.5", "57.4", "102.0", "163.3", "222.4", "251.6", "255.9"]),
    ],
)
def test_distinct_experts(experts, k, distinct):
    """Experts that 1, 4, 8, ... 256 tokens reach together: table T11 of formulas.md."""
    ffn = FFN(1, experts, k)
    assert [f"{ffn.touched(tokens):.1f}" for tokens in (1, 4, 8, 16, 32, 64, 128, 256)] == distinct


def test_experts_that_all_tokens_like_alike():
    """Chances of k / E each are the router without any; the same parameters whatever the chances."""
    even, told = FFN(1, 8, 2), FFN(1, 8, 2, chances=(0.25,) * 8)
    assert [even.touched(n) for n in (1, 4, 64)] == pytest.approx([told.touched(n) for n in (1, 4, 64)])
    assert even.params(100) == told.params(100) == FFN(1, 8, 2, chances=(1, 1, 0, 0, 0, 0, 0, 0)).params(100)


def test_experts_that_some_tokens_like():
    """By hand, 4 experts, 2 of them: chances 0.9, 0.6, 0.3, 0.2 and two tokens make 0.99 + 0.84 + 0.51 + 0.36; two experts
    that every token uses stay two; an array of tokens is its numbers."""
    liked = FFN(1, 4, 2, chances=(0.9, 0.6, 0.3, 0.2))
    assert [2, 0.99 + 0.84 + 0.51 + 0.36, 4] == pytest.approx([liked.touched(n) for n in (1, 2, 10**6)])
    assert [0, 2, 2.7] == pytest.approx(liked.touched(np.array([0, 1, 2])))
    assert [2, 2, 2] == [FFN(1, 4, 2, chances=(1, 0, 1, 0)).touched(n) for n in (1, 2, 1000)]


@pytest.mark.parametrize("kind", [list, np.array])
def test_chances_of_any_sequence(kind):
    """A list or an array of chances is their tuple: equal, hashable, and it takes a list of tokens as the even router does."""
    told = FFN(1, 4, 2, chances=kind([0.9, 0.6, 0.3, 0.2]))
    assert told == FFN(1, 4, 2, chances=(0.9, 0.6, 0.3, 0.2)) and len({told, told}) == 1


def test_distinct_experts_of_a_list_of_tokens():
    """As the even router, the skewed one takes a list."""
    for chances in (None, (0.5,) * 4):
        assert [2, 3] == pytest.approx(FFN(1, 4, 2, chances=chances).touched([1, 2]))


def test_dense_ffn_is_one_expert():
    """Any number of tokens reads the one expert there is."""
    assert [FFN(100).touched(tokens) for tokens in (1, 2, 1000)] == [1, 1, 1]


def test_shared_expert_router_and_its_bias_are_read_by_every_token():
    """DeepSeek-V3: a shared expert of 2048, a router of 256 x 7168 and its 256 biases."""
    moe = model("deepseek-v3").blocks[1].ffn
    assert moe.common(7168) == 3 * 7168 * 2048 + 256 * 7168 + 256


def test_tensor_parallelism_splits_experts_but_not_the_router():
    """Each of four chips holds a quarter of the experts and the shared width, and the whole router."""
    assert FFN(10, 8, 2, d_shared=20, router=1).params(100, 4) == 8 * 3 * 100 * 10 / 4 + 3 * 100 * 20 / 4 + 8 * 100


def test_dense_layers_come_first():
    """DeepSeek-V3 has three dense layers of 18432 before 58 of 256 experts."""
    dense, moe = model("deepseek-v3").blocks
    assert (dense.layers, dense.ffn, moe.layers, moe.ffn.n_experts) == (3, FFN(18432), 58, 256)


def test_indexer_costs_what_its_matrices_hold():
    """DeepSeek-V3.2 is V3 and, a layer, 64 x 128 indexer queries, one key, 64 head weights and the norm of the key."""
    indexer = 64 * 128 * 1536 + 7168 * (128 + 64) + 2 * 128
    assert model("deepseek-v3.2").params - model("deepseek-v3").params == 61 * indexer


def test_indexer_keys_are_kept_and_read_whole():
    """Attention reads the best 2048 tokens, the indexer a key of every token."""
    mixer = Indexed(MLA(128, 1536, 512, 64, 128, 128), 64, 128, 2048)
    assert mixer.cache(K32, 2) == 2 * (576 + 128) * 32768
    assert mixer.read(1, K32, 2) == 2 * (576 * 2048 + 128 * 32768)


def test_recurrent_state_does_not_grow():
    """A layer without a cache keeps, reads and rewrites the same state at every context."""
    mixer = Recurrent(weights_per_layer=1000, state=5000, state_flops=70)
    assert {mixer.cache(context, 2) for context in (1, K8, K128)} == {5000}
    assert (mixer.read(1, K128, 2), mixer.write(1, 2), mixer.flops(10, K128)) == (5000, 5000, 700)


def test_hybrid_keeps_state_and_cache():
    """Qwen3.5: 45 states of 64 x 128 x 128 in f32 and 3 x 12288 in bf16; 15 layers of 2 heads of 256."""
    state = 64 * 128 * 128 * 4 + 3 * 12288 * 2
    assert kv_bytes(model("qwen3.5-397b-a17b"), K8) == 45 * state + 15 * 2 * 2 * 2 * 256 * 8192


def test_shared_cache_is_read_but_not_kept():
    """A layer on the cache of an earlier one keeps and writes nothing, and has no key and value matrices."""
    own, shared = GQA(8, 2, 16), Shared(GQA(8, 2, 16))
    assert (shared.cache(1000, 2), shared.write(1, 2)) == (0, 0)
    assert shared.read(1, 1000, 2) == 2 * 2 * 2 * 16 * 1000
    assert own.params(100) - shared.params(100) == 100 * 2 * (16 + 16)
    stack = Model("shared", 100, 50, (Block("own", 2, own, DENSE), Block("borrowed", 6, shared, DENSE)))
    assert kv_bytes(stack, 1000) == 2 * (2 * 2 * 2 * 16 * 1000)


def test_keys_and_values_of_different_widths():
    """Keys of 192 and values of 128: 320 values a token and head; queries are as wide as keys, outputs as values."""
    mixer = GQA(16, 4, 192, 128)
    assert mixer.cache(1000, 2) == 2 * 4 * 320 * 1000
    assert mixer.params(1024) == 1024 * (16 * 192 + 4 * 192 + 4 * 128 + 16 * 128)


def test_layers_of_different_widths():
    """Each block counts with its own heads and its own d_ff; two tables of 1000 rows and a last norm."""
    narrow, wide = Block("narrow", 2, GQA(4, 1, 16), FFN(64)), Block("wide", 3, GQA(8, 2, 16), FFN(256))
    expected = 2 * (64 * (2 * 4 + 2 * 1) * 16 + 3 * 64 * 64 + 2 * 64) + 3 * (
        64 * (2 * 8 + 2 * 2) * 16 + 3 * 64 * 256 + 2 * 64
    )
    stack = Model("tapered", 64, 1000, (narrow, wide))
    assert stack.params == expected + 2 * 1000 * 64 + 64
    assert kv_bytes(stack, 10) == 2 * 2 * 16 * (2 * 1 + 3 * 2) * 10


def test_block_has_a_precision_of_its_own():
    """One block may be stored in another format; how many parameters it has does not depend on it."""
    plain = Block("layers", 2, GQA(4, 1, 16), FFN(64))
    small = Block("layers", 2, GQA(4, 1, 16), FFN(64), precision=Precision("int8"))
    assert small.params(64) == plain.params(64)
    assert small.precision.of("ffn").bytes == 1 and plain.precision is None


def test_tied_tables_count_once():
    """Without a table of its own the head adds nothing."""
    blocks = (Block("layers", 1, GQA(4, 1, 16), FFN(64)),)
    assert Model("two", 64, 1000, blocks).params - Model("one", 64, 1000, blocks, tied=True).params == 64_000


def test_ungated_ffn_has_two_matrices():
    """Chinchilla's feed-forward network has no gate."""
    assert FFN(400, matrices=2).params(100) == 2 * 100 * 400


def test_window_limits_what_inner_keeps():
    """A window keeps the smaller of context and window, and writes no more than it keeps."""
    mixer = Windowed(GQA(8, 2, 16), 128)
    assert [mixer.cache(context, 2) for context in (100, 128, 1000)] == [128 * n for n in (100, 128, 128)]
    assert mixer.write(1000, 2) == 128 * 128


@pytest.mark.parametrize("format_, bytes_", [("bf16", 2), ("fp8", 1), ("int8", 1)])
def test_cache_in_other_formats(format_, bytes_):
    """A cache of fewer bits is smaller in proportion, by name or as a Format."""
    values = 80 * 2 * 8 * 128 * 1000
    assert kv_bytes(model("llama-3-70b"), 1000, format_) == bytes_ * values
    assert kv_bytes(model("llama-3-70b"), 1000, format(format_)) == bytes_ * values


def test_aliases_and_case():
    """Llama 3 has the shape of Llama 3.1, and names are not case-sensitive."""
    assert model("Llama-3-70B").blocks == model("llama-3.1-70b").blocks


def test_unknown_model_lists_the_known():
    """KeyError names what there is."""
    with pytest.raises(KeyError, match="unknown model 'gpt-5'.*llama-3-70b.*qwen3-32b"):
        model("gpt-5")


@pytest.mark.parametrize("context", [0, -1, float("nan"), float("inf"), "8k", None])
def test_context_must_be_positive(context):
    """ValueError before any arithmetic."""
    with pytest.raises(ValueError, match="context"):
        kv_bytes(model("llama-3-8b"), context)


def test_unknown_cache_format():
    """KeyError names the formats."""
    with pytest.raises(KeyError, match="unknown format 'fp7'.*bf16"):
        kv_bytes(model("llama-3-8b"), 100, "fp7")


@pytest.mark.parametrize(("name", "tokens", "billions"), [
    ("llama-3-70b", 1, 69.50), ("llama-3-70b", 1000, 69.50),    # formulas.md, trap 1: all but the input embedding
    ("mixtral-8x7b", 1, 12.88 - 0.13), ("mixtral-8x7b", 1000, 46.70 - 0.13),
])
def test_weights_that_a_pass_reads(name, tokens, billions):
    """A dense model reads the same for any number of tokens; a mixture from its active to all of its parameters."""
    assert billions == pytest.approx(weights_read(model(name), tokens) / 1e9, abs=0.006)


def test_weights_that_no_pass_reads():
    """Negative tokens are refused; none touch no expert."""
    with pytest.raises(ValueError, match="tokens"):
        weights_read(model("mixtral-8x7b"), -1)
    mixtral = model("mixtral-8x7b")
    routed = 32 * 8 * 3 * 4096 * 14_336
    assert weights_read(mixtral, 10**9) - weights_read(mixtral, 0) == pytest.approx(routed)
