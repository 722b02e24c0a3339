"""What the TPU compiler said, as recorded, against the cost model. No test here needs the compiler."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from lib import chip, fits, footprint, max_batch, model
from lib.demos import cases, referee, verdicts

ROOT = Path(__file__).parent.parent
ROWS = referee.recorded()
STEPS = [row for row in ROWS if row.case.program == "step"]
ACCEPTED = [row for row in STEPS if row.accepted]
GIB = 2**30
names = {"ids": lambda row: row.case.name}


def one(**wanted):
    [row] = referee.recorded(**wanted)
    return row


def v5e(batch, kv_heads=0, **wanted):
    """A step of the 13B on 8 v5e with 8k contexts."""
    wanted = dict(slice="2x4", layout="heads", cache="LSKBH", context=8192) | wanted
    return one(program="step", chip="v5e", model="llama-2-13b", kv_heads=kv_heads, batch=batch, **wanted)


def test_the_record_is_what_is_asked():
    """150 rows or more over at least four chips, one for each case and in their order, all of the pinned versions."""
    assert [row.case for row in ROWS] == cases.cases()
    assert 150 <= len(ROWS) and 4 <= len({row.case.chip for row in ROWS})
    pins = dict(re.findall(r"^([\w-]+)==([\w.]+)", (ROOT / "requirements-tpu.lock").read_text("utf-8"), re.M))
    assert {(row.jax, row.libtpu) for row in ROWS} == {(pins["jax"], pins["libtpu"])}
    assert f"jax=={pins['jax']} " in (ROOT / "requirements.txt").read_text("utf-8").replace("\n", " ")


def test_a_row_is_complete():
    """An accepted program has counts and a digest of its text, a refused one only what it asked for."""
    for row in ROWS:
        counted = (row.flops, row.accessed, row.hbm, row.argument, row.peak)
        assert (min(counted) > 0 and re.fullmatch("[0-9a-f]{16}", row.text)) if row.accepted else not any(counted), row
        assert row.accepted == (row.room == 0) and (row.accepted or row.temporary > row.room)


@pytest.mark.parametrize("row", ACCEPTED, **names)
def test_footprint_is_what_the_compiler_holds(row):
    """To 2 % of the argument bytes, the bar that was set; a device's share of its chip, and each device as a chip."""
    case = row.case
    assert row.argument == pytest.approx(verdicts.held(case), rel=0.02)
    if case.layout != "automatic":  # whose plan of 8 KV heads on 16 devices of 8 chips no chip of lib has
        whole = footprint(case.server, case.batch, case.context).value
        assert row.argument == pytest.approx(whole / chip(case.chip).devices, rel=0.02)


@pytest.mark.parametrize("row", ACCEPTED, **names)
def test_what_the_compiler_accepts_fits(row):
    """The model never refuses what compiles."""
    assert fits(row.case.server, row.case.batch, row.case.context)


EDGES = [  # wanted, the last batch accepted and the first refused (issue's and demos.md's numbers), rows in a tile of sequences
    (dict(model="llama-2-13b", kv_heads=0, chip="v5e", layout="heads"), 16, 17, 8),
    (dict(model="llama-2-13b", kv_heads=8, chip="v5e", layout="heads"), 80, 81, 8),
    (dict(model="llama-3-70b", slice="2x4", chip="v5e", layout="heads"), 48, 49, 8),
    (dict(model="llama-3-70b", slice="4x4", chip="v5e", layout="batch"), 144, 148, 16),
    (
        dict(model="llama-3-70b", slice="2x2x2", chip="ironwood", kv="bf16", cache="LKBSH", context=32_768),
        126,
        128,
        2,
    ),
    (dict(model="llama-3-70b", slice="2x2x2", chip="ironwood", weights="fp8", context=32_768), 272, 280, 16),
    (dict(model="llama-3-70b", slice="2x2x2", chip="ironwood", weights="bf16", kv="fp8", context=32_768), 240, 256, 16),
    (dict(model="llama-2-13b", chip="v6e"), 32, 36, 8),
]


@pytest.mark.parametrize(("wanted", "last", "refused", "tile"), EDGES)
def test_max_batch_is_the_last_that_compiles(wanted, last, refused, tile):
    """After the reserve (the chip's, and the program's own temporary memory), in whole tiles of the batch axis."""
    asked = referee.recorded(program="step", **(dict(cache="LSKBH", context=8192) | wanted))
    accepted = {row.case.batch: row for row in asked if row.accepted}
    assert last == max(accepted) and refused == min(row.case.batch for row in asked if not row.accepted)
    server = accepted[last].case.server
    kept = server.chip.hbm_reserved + server.chip.devices * accepted[last].temporary
    own = replace(server, chip=replace(server.chip, hbm_reserved=kept))
    assert last == max_batch(own, accepted[last].case.context) // tile * tile
    assert last <= max_batch(server, accepted[last].case.context)


@pytest.mark.parametrize(
    ("batch", "kv_heads", "accepted"), [(16, 0, 1), (17, 0, 0), (32, 0, 0), (64, 8, 1), (96, 8, 0)]
)
def test_13b_on_8_v5e(batch, kv_heads, accepted):
    """40 KV heads: 16 yes, 17 and 32 no; 8 KV heads: 64 yes, 96 no (demos.md 1a)."""
    assert v5e(batch, kv_heads).accepted == bool(accepted)


def test_the_scaling_books_gib_are_gb():
    """Its 133.2 at batch 16 are 124.2 GiB, of 126 that the compiler leaves on 8 chips: by hand, 16 x 6.71 + 26.03 GB."""
    assert 8 * v5e(16).argument / 1e9 == pytest.approx(16 * 6.711 + 26.03, abs=0.05)
    assert 8 * v5e(16).argument / GIB == pytest.approx(124.2, abs=0.1)


@pytest.mark.parametrize("cache", ["LKSBH", "LBKSH", "LSKBH scanned", "LBKSH scanned"])
def test_other_orders_of_the_axes_do_not_fit(cache):
    """What fits in one order asks for 6 to 13 GiB more in others."""
    assert v5e(16).accepted
    refused = v5e(16, cache=cache)
    assert not refused.accepted and 6 < refused.temporary / GIB - 15.53 < 14


@pytest.mark.parametrize(
    ("name", "left"), [("v4", 30.5), ("v5e", 15.75), ("v5p", 95.74), ("v6e", 31.25), ("ironwood", 189.5)]
)
def test_what_a_program_may_fill(name, left):
    """The limits that refusals name (GiB, demos.md section 1 and v4's), of a chip's one or two devices."""
    assert chip(name).capacity / GIB == pytest.approx(left, abs=1e-9)
    named = [chip(name).devices * row.room / GIB for row in ROWS if row.case.chip == name and not row.accepted]
    assert named == pytest.approx([left] * len(named)) and named


def test_temporary_memory_is_matrices_in_another_tiling():
    """The 7.19 GiB on Ironwood: FFN and output matrices of 80 layers on 16 devices; on 8 devices twice that. 7.88 on v5p:
    query and output matrices of the 405B. What is left is at most three layers' keys and values."""
    matrices = 80 * (3 * 8192 * 28672 + 8192**2) * 2
    for wanted, copied in (
        (dict(chip="ironwood", slice="2x2x2", kv="bf16", cache="LKBSH"), matrices / 16),
        (dict(chip="ironwood", slice="2x2x1"), matrices / 8),
        (dict(chip="v5p", slice="2x2x4"), 126 * 2 * 16384**2 * 2 / 16),
    ):
        for row in referee.recorded(program="step", weights="bf16", **wanted):
            if row.accepted:
                layer = row.case.batch * row.case.context * 2 * 8 * 128 * 2 / row.case.devices
                assert 0 <= row.temporary - copied < 3 * layer, row.case.name


@pytest.mark.parametrize(("batch", "kv_heads"), [(8, 0), (16, 0), (16, 8)])
def test_a_step_moves_weights_and_cache(batch, kv_heads):
    """To 1 % of 2 (L D (3F + 2H(N+K)) + V D) + 2 x 40 x 2 x B K S H bytes on 8 chips: a matrix each, and the cache, by hand."""
    heads = kv_heads or 40
    layers = 40 * 5120 * (3 * 13824 + 2 * 128 * (40 + heads))
    cache = 40 * 2 * batch * heads * 8192 * 128
    assert v5e(batch, kv_heads).hbm == pytest.approx(2 * (layers + 32000 * 5120 + cache) / 8, rel=0.01)


def test_one_slice_of_the_cache_is_really_copied():
    """8 KV heads, 64 sequences: 134 MB of keys and as many of values a layer, out to HBM and in again: 2.59 times the bytes."""
    row, slice = v5e(64, 8), 64 * 8192 * 128 * 2
    assert row.temporary == pytest.approx(slice, rel=0.01)
    must = 2 * (40 * 5120 * (3 * 13824 + 256 * 48) + 32000 * 5120) / 8 + 40 * 2 * slice
    assert row.hbm == pytest.approx(must + 40 * 2 * 2 * slice, rel=0.01)
    assert row.hbm / must == pytest.approx(2.59, abs=0.01)


def test_megatron_sends_two_all_reduces_a_layer():
    """80 of 16 x 5120 bf16 values among 8: 2 x 7/8 of 163,840 bytes each."""
    assert v5e(16).sent(40) == {"all-reduce": (80, 80 * 2 * 7 / 8 * 163_840)}


def test_kv_by_batch_adds_two_all_to_alls_a_layer():
    """160 in 80 layers, beside 160 all-reduces, on 16 v5e and on the 16 devices of 8 Ironwood."""
    for row in (
        one(program="step", slice="4x4", layout="batch", batch=128),
        one(cache="LKBSH", batch=96, chip="ironwood"),
    ):
        assert {kind: times for kind, (times, _) in row.sent(80).items()} == {"all-to-all": 160, "all-reduce": 160}
    # a device's half of 64 sequences' 64 / 8 heads of 128 bf16 values goes to the other that has the KV head
    assert (
        one(program="step", slice="4x4", layout="batch", batch=128).sent(80)["all-to-all"][1] == 160 * 64 * 4 * 128 * 2
    )


def test_fsdp_sends_968_times_as_much():
    """7/8 of a layer's 317 million parameters in bf16, against 2 all-reduces of 163,840 bytes."""
    fsdp, megatron = (v5e(16, layout=layout, context=2048).sent(40) for layout in ("fsdp", "heads"))
    layer = 5120 * (3 * 13824 + 4 * 5120)
    assert fsdp["all-gather"] == (7 * 40, 40 * 2 * layer * 7 / 8)
    assert fsdp["all-gather"][1] / megatron["all-reduce"][1] == pytest.approx(968, abs=0.5)


def test_left_alone_the_compiler_gathers_a_matrix():
    """One all-to-all a layer instead of two, and all of W_O, 64 x 128 x 8192 bytes of int8, on every chip."""
    row = one(program="step", slice="4x4", layout="automatic")
    assert row.sent(80)["all-to-all"][0] == pytest.approx(80, abs=1)
    assert f"80 all-gather of 16: {64 * 128 * 8192} B" in row.collectives


def test_weights_of_half_the_bytes_move_half():
    """472 MB in bf16, 237 in int8 (demos.md 1d), by the compiler's count and by ours; temporary memory 0: conversion is fused."""
    wide, narrow = (one(program="weights", chip="v5e", weights=kind) for kind in ("bf16", "int8"))
    assert (wide.accessed, narrow.accessed) == (pytest.approx(472e6, abs=5e5), pytest.approx(237e6, abs=5e5))
    assert wide.hbm - narrow.hbm == pytest.approx(8192 * 28672, rel=1e-3)
    assert {0} == {row.temporary for row in referee.recorded(program="weights")}


def test_a_kernel_keeps_scores_on_the_chip():
    """At 4,096 tokens: 1.07 GB of temporary memory without it, two arrays of 8 x 4096^2 f32 scores, and none with it."""
    naive, flash = (one(program="prefill attention", chip="v5e", layout=x, context=4096) for x in ("naive", "flash"))
    assert naive.temporary == pytest.approx(2 * 8 * 4096**2 * 4, rel=0.01) and flash.temporary == 0
    assert flash.hbm == pytest.approx(33.55e6, rel=1e-3)  # at its borders: queries, keys, values and outputs


def rate(name, kind):
    return max(row.flops / row.cycles for row in referee.recorded(program="matmul", chip=name, weights=kind))


def test_int8_is_the_fast_type_on_v5e_and_fp8_on_ironwood():
    """Twice bf16, as the peaks say; the other of the two buys no arithmetic."""
    assert rate("v5e", "int8") / rate("v5e", "bf16") == pytest.approx(2, rel=0.05)
    assert rate("v5e", "fp8") / rate("v5e", "bf16") == pytest.approx(1, rel=0.05)
    assert rate("ironwood", "fp8") / rate("ironwood", "bf16") == pytest.approx(2, rel=0.05)
    assert rate("ironwood", "int8") / rate("ironwood", "bf16") < 1.05


@pytest.mark.parametrize("row", referee.recorded(program="experts"), **names)
def test_experts_cost_two_all_to_alls(row):
    """Each of B/n tokens of D bf16 values to every one of n devices, and back: 2 (n-1)/n of n x B/n x 2D bytes sent."""
    n, D = row.case.devices, model(row.case.model).d_model
    assert row.sent() == {"all-to-all": (2, pytest.approx(2 * (n - 1) / n * row.case.batch * 2 * D))}


@pytest.mark.parametrize(
    ("name", "batch", "expert", "experts", "top_k"),
    [
        ("mixtral-8x7b", 8, 3 * 4096 * 14336, 8, 2),
        ("mixtral-8x7b", 64, 3 * 4096 * 14336, 8, 2),
        ("qwen3-30b-a3b", 64, 3 * 2048 * 768, 128, 8),
    ],
)
def test_ragged_dot_is_charged_with_the_chosen_experts(name, batch, expert, experts, top_k):
    """2 FLOPs a parameter of an expert for each of a token's top_k, to 1 % with the router; and the bytes of all experts."""
    row = one(program="ragged", chip="v5e", layout="ragged", model=name, batch=batch)
    assert row.flops == pytest.approx(2 * batch * top_k * expert, rel=0.01)
    assert row.hbm == pytest.approx(2 * experts * expert, rel=0.01)


def test_a_loop_over_the_experts_multiplies_them_all():
    """Mixtral's 8 instead of 2: four times the FLOPs, for the same bytes."""
    loop, ragged = (
        one(program="ragged", chip="v5e", layout=layout, batch=64, model="mixtral-8x7b")
        for layout in ("dense", "ragged")
    )
    assert loop.flops == pytest.approx(4 * ragged.flops, rel=0.005)
    assert loop.hbm == pytest.approx(ragged.hbm, rel=0.005)


FOUND = [each for row in ROWS for each in verdicts.verdicts(row)]


def test_every_difference_has_a_reason():
    """Beyond 5 %, one that gives the compiler's number within 5 %, or the range that it lies in; the page prints them all."""
    assert [] == [(each.row.case.name, each.quantity, each.ratio, each.why) for each in FOUND if not each.explained]


@pytest.mark.parametrize("factor", [0.1, 0.15, 12, 100])
@pytest.mark.parametrize("field", ["flops", "accessed", "hbm", "argument"])
def test_reasons_do_not_explain_everything(field, factor):
    """A number that is seven times too small, or twelve times too large, is not explained, whatever is said of its quantity."""
    quantity = {"flops": "FLOPs", "accessed": "bytes accessed", "hbm": "HBM bytes", "argument": "argument bytes"}[field]
    for row in ROWS:
        wrong = verdicts.verdicts(replace(row, **{field: factor * getattr(row, field)}))
        assert [] == [row.case.name for each in wrong if each.quantity == quantity and each.explained]


def test_programs_are_different():
    """No two programs for a chip have the same text."""
    accepted = [row for row in ROWS if row.accepted]
    assert len({(row.case.chip, row.text) for row in accepted}) == len(accepted)


@pytest.mark.parametrize("row", [row for row in ACCEPTED if row.case.layout in ("heads", "batch")], **names)
def test_outside_the_layers_two_gathers(row):
    """The embeddings, batch x D values in bf16, and the logits, batch x V: once a step, and nothing else."""
    outside = re.findall(r"(?<!\d)1 ([a-z-]+) of (\d+): (\d+) B", row.collectives)
    model, batch, n = row.case.architecture, row.case.batch, row.case.devices
    expected = [("all-gather", n, 2 * batch * model.d_model), ("all-gather", n, 2 * batch * model.vocab)]
    assert [(kind, int(group), int(size)) for kind, group, size in outside] == expected
    assert sum(times for times, _ in row.sent().values()) == 2 + sum(
        times for times, _ in row.sent(model.layers).values()
    )


def test_the_model_is_compared_on_memory_bytes_and_collectives():
    """Of each accepted row something is compared, of each step its memory, of each layout that the model prices what it sends."""
    assert {row.case for row in ROWS if row.accepted} == {each.row.case for each in FOUND}
    asked = {
        quantity: {each.row.case for each in FOUND if each.quantity == quantity}
        for quantity in ("argument bytes", "all-reduce bytes", "all-to-all bytes")
    }
    assert {row.case for row in ACCEPTED} <= asked["argument bytes"]
    assert {row.case for row in ACCEPTED if row.case.layout in ("heads", "batch", "sequence")} <= asked[
        "all-reduce bytes"
    ]
    assert {row.case for row in ACCEPTED if row.case.layout == "batch"} <= asked["all-to-all bytes"]


def test_a_changed_fact_is_found(monkeypatch):
    """With heads of 144 instead of 128 values the record disagrees on memory and traffic, and not on what Megatron sends."""
    row, architecture = v5e(16), model("llama-2-13b")
    assert all(each.agrees for each in verdicts.verdicts(row))
    [block] = architecture.blocks
    wider = replace(block, mixer=replace(block.mixer, d_head=144))
    monkeypatch.setattr(referee.Case, "architecture", replace(architecture, blocks=(wider,)))
    assert [each.quantity for each in verdicts.verdicts(row) if not each.agrees] == ["argument bytes", "HBM bytes"]


WRONG = {(cache, 16, "heads") for cache in ("LKSBH", "LBKSH", "LSKBH scanned", "LBKSH scanned")}
WRONG |= {("LSKBH", 128, "batch"), ("LSKBH", 16, "fsdp")}


@pytest.mark.parametrize("row", [row for row in STEPS if not row.accepted], **names)
def test_what_is_refused_has_a_reason(row):
    """Whole tiles of its batch do not fit beside what the same program keeps at a smaller batch, or its axes are in an order, or
    its layout one, for which the compiler copies the cache or gathers weights (pinned above)."""
    case, tile = row.case, 8 * (row.case.devices // min(8, row.case.devices))
    if (case.cache, case.batch, case.layout) in WRONG:
        return
    same = [each.temporary for each in ACCEPTED if replace(each.case, batch=case.batch) == case]
    tiled = verdicts.held(replace(case, batch=-(-case.batch // tile) * tile))
    assert tiled + max(same, default=0) > chip(case.chip).capacity / chip(case.chip).devices
