"""Attention that sees or keeps less, against brute force and by hand."""

from dataclasses import replace

import pytest

from lib.chips import chip
from lib.formats import Precision
from lib.forward import decode_step, prefill
from lib.mixers import GQA
from lib.models import FFN, Block, Model, model
from lib.server import Plan, Server, footprint, max_batch
from lib.variants import Chunked, Shared, Windowed

ONE = GQA(1, 1, 1)                                          # 4 FLOPs a query-key pair, 2 values a cached token


def server(mixer, plan=None):
    return Server(Model("one", 12, 32, (Block("layers", 1, mixer, FFN(12)),)), chip("v5e"), plan or Plan())


@pytest.mark.parametrize("new", [1, 2, 7, 8, 9, 40])
@pytest.mark.parametrize("context", [0, 1, 7, 8, 9, 23])
def test_chunks_by_brute_force(new, context):
    """Token p (from 0) sees the p mod 8 tokens before it in its chunk, and itself."""
    pairs = sum(p % 8 + 1 for p in range(context, context + new))
    assert 4 * pairs == Chunked(ONE, 8).flops(new, context)


@pytest.mark.parametrize("context", [1, 7, 8, 9, 16, 23])
def test_a_step_reads_the_chunk_that_its_token_stands_in(context):
    """At a chunk boundary nothing is read; a window of the same size reads seven tokens there."""
    assert 2 * (context % 8) == Chunked(ONE, 8).read(1, context, 1)
    assert 2 * min(context, 7) == Windowed(ONE, 8).read(1, context, 1)


def test_llama_4_prefills_half_of_a_window():
    """131,072 tokens are 16 chunks of 8,192: 16 * 8192 * 8193 / 2 pairs a local layer."""
    local = next(block.mixer for block in model("llama-4-scout").blocks if isinstance(block.mixer, Chunked))
    assert 16 * 8192 * 8193 / 2 * 4 * 40 * 128 == local.flops(131_072, 0)


def test_pages_round_what_a_window_keeps():
    """A window of 128 tokens fills one page of 256 (gpt-oss), or two pages of 100."""
    for page, kept in ((1, 128), (100, 200), (256, 256)):
        assert 2 * kept == Windowed(ONE, 128).cache(8192, 1, page)
    held = {page: footprint(Server(model("gpt-oss-120b"), chip("h100"), Plan(4, page=page)), 1, 8192)["KV cache"].value
            for page in (1, 256)}
    assert held[256] - held[1] == 18 * (256 - 128) * 2 * 8 * 64 * 2 / 4


def test_every_chip_runs_the_whole_indexer():
    """DeepSeek-V3.2's indexer is replicated: 2 * 64 heads * 128 wide a pair, on each of 8 chips, 61 layers."""
    pairs = 8192 * 8193 / 2
    new, old = (Server(model(name), chip("h200"), Plan(8), Precision(math="fp8")) for name in ("deepseek-v3.2", "deepseek-v3"))
    most = 2048 * 2049 / 2 + (8192 - 2048) * 2048           # pairs that attention itself is left with
    per_pair = 2 * 128 * (128 + 64 + 128)                   # expanded, the cheaper way in a prefill
    seconds = 61 * (2 * 64 * 128 * pairs + per_pair * most / 8) / chip("h200").peak("fp8")
    parts = [prefill(new, 1, 8192)[f"{block.name}/attention/compute"].value for block in new.model.blocks]
    assert seconds == pytest.approx(sum(parts))
    assert sum(parts) > sum(prefill(old, 1, 8192)[f"{block.name}/attention/compute"].value for block in old.model.blocks) / 2


@pytest.mark.parametrize("mixer", [Shared(Windowed(GQA(4, 2, 8), 64)), Windowed(Shared(GQA(4, 2, 8)), 64)])
def test_a_shared_layer_may_be_a_windowed_one(mixer):
    """It reads the window that another layer keeps, and keeps nothing."""
    one = server(mixer)
    assert 0 == footprint(one, 4, 1000)["KV cache"].value
    assert 2 * 2 * 8 * 63 == mixer.read(1, 1000, 1) and decode_step(one, 4, 1000).value > 0


def test_latent_attention_exchanges_latents():
    """A chip that attends for other chips' heads gets absorbed queries (512 + 64) and returns latents (512), 128 heads, bf16."""
    one = Server(model("deepseek-v3"), chip("ironwood"), Plan(8, kv="batch"))
    sent = 2 * 64 * 128 * (512 + 64 + 512) * 3              # three dense layers, batch 64
    there = decode_step(one, 64, 8192)["dense/all-to-all/bandwidth"].value
    assert sent * (1 - 1 / 8) / one.kv_slices[0].exchange == pytest.approx(there)


def test_most_sequences_where_kv_heads_do_not_nest():
    """Blocks of 4 and of 6 KV heads on 12 chips hold 3 and 2 sequences at a time: six at once add the same to each."""
    blocks = (Block("a", 1, GQA(12, 4, 64), FFN(12)), Block("b", 1, GQA(12, 6, 64), FFN(12)))
    small = replace(chip("v4"), hbm_bytes=5e8, hbm_reserved=0)
    one = Server(Model("two", 768, 32, blocks), small, Plan(12, kv="batch"))
    most = max_batch(one, 1000)
    fitting = [batch for batch in range(1, 3000) if footprint(one, batch, 1000).value <= 5e8]
    assert fitting[-1] == most
