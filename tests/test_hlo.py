"""What is read from the text of a compiled program: small programs written and counted by hand."""

import re

import pytest

from lib.demos import hlo
from lib.demos.hlo import KINDS, Collective

GROUPS = {
    "{{0,1},{2,3},{4,5},{6,7}}": 2,
    "{{0,1,2,3,4,5,6,7}}": 8,
    "[4,2]<=[8]": 2,
    "[2,4]<=[4,2]T(1,0)": 4,
    "[8]<=[8]": 8,
    "mesh['a'=1,'b'=8] {'b'}": 8,
    "mesh['a'=4,'b'=2], device_ids=([2,4]T(1,0)) {'a'}": 4,
    "mesh['a'=4,'b'=2] {'a','b'}": 8,
    "mesh['a'=8] {'a':(2)4}": 4,
}
PAIR = "replica_groups={{0,1},{2,3}}"
REDUCE = f"%x = f32[8]{{0}} all-reduce(%y), {PAIR}"
SUM = Collective("all-reduce", 2, 32)
VMEM, SMEM = "{0:T(1024)S(1)}", "{:T(128)S(6)}"


def computation(name, *lines):
    """A computation of these lines, "=> ..." being its root; the types in its head are never read."""
    body = "\n".join(f"  {line.replace('=> ', 'ROOT ')}" for line in lines)
    return f"%{name} (given: f32[8], /*index=5*/other: (s32[], f32[8])) -> f32[8] {{\n{body}\n}}\n"


def program(*lines, called=()):
    """A module with an entry of these lines, after the computations that it calls."""
    return "\n".join(["HloModule test, is_scheduled=true\n", *called, "ENTRY " + computation("main", *lines)])


def loop(bound, *lines, name="loop", counter="s32[]", attributes=""):
    """[Computations of a loop with such a body, its counter compared with a constant], its line in the program."""
    condition = computation(
        f"{name}.until",
        f"%{name}.bound = {counter}{{:T(128)}} constant({bound})",
        f"%{name}.state = ({counter}, f32[8]) parameter(0)",
        f"%{name}.at = {counter}{{:T(128)}} get-tuple-element(%{name}.state), index=0",
        f"=> %{name}.lt = pred[]{{:T(512)}} compare(%{name}.at, %{name}.bound), direction=LT",
    )
    turn = computation(f"{name}.turn", *lines)
    line = f"%{name} = ({counter}, f32[8]) while(%start), condition=%{name}.until, body=%{name}.turn{attributes}"
    return [condition, turn], line


@pytest.mark.parametrize(("groups", "n"), GROUPS.items())
def test_replica_groups_are_read_in_every_spelling(groups, n):
    """A list, a range cut into a grid, axes of a mesh or a part of one."""
    line = f"%x.1 = f32[64,8]{{1,0}} all-reduce(%y), channel_id=1, replica_groups={groups}, use_global_device_ids=true"
    assert hlo.collectives(program(line)) == [Collective("all-reduce", n, 4 * 64 * 8)]


@pytest.mark.parametrize(
    ("result", "op", "expected"),
    [
        ("f32[16,8]{1,0}", "all-gather", ("all-gather", 512)),
        ("bf16[16,8]{1,0:T(8,128)(2,1)}", "all-gather", ("all-gather", 256)),
        ("f32[16,8]{1,0}", "reduce-scatter", ("reduce-scatter", 1024)),
        ("(f32[8,8]{1,0}, f32[8,8]{1,0})", "all-to-all", ("all-to-all", 1024)),
        ("bf16[32,8]{1,0:T(8,128)(2,1)S(1)}", "all-to-all", ("all-to-all", 1024)),
        ("(f32[16], /*index=1*/s8[16])", "all-reduce", ("all-reduce", 80)),
        ("f32[]", "all-reduce", ("all-reduce", 4)),
        ("pred[16]{0}", "all-reduce", ("all-reduce", 16)),
        ("f8e4m3fn[16]{0}", "all-gather", ("all-gather", 16)),
        ("(f32[8,8]{1,0}, f32[16,8]{1,0})", "all-gather-start", ("all-gather", 512)),
        ("(f32[8], f32[8])", "all-reduce-start", ("all-reduce", 64)),
        ("((f32[32]{0}), f32[16]{0}, u32[])", "reduce-scatter-start", ("reduce-scatter", 128)),
    ],
)
def test_bytes_are_read_from_every_type(result, op, expected):
    """The whole array: of tuples the sum, of a part its multiple, of an asynchronous start the result alone."""
    lines = [f"%x.1 = {result} {op}(%y), channel_id=1, replica_groups=[4,2]<=[8], dimensions={{0}}"]
    if op.endswith("-start"):
        lines.append(f"%z = f32[16,8]{{1,0}} {op.removesuffix('-start')}-done(%x.1)")
    kind, size = expected
    assert hlo.collectives(program(*lines)) == [Collective(kind, 2, size)]


def test_a_permute_passes_its_array_on():
    """Plain or begun and ended, in a group of as many devices as send: 64 bf16 values, 128 bytes on the wire."""
    pairs = "channel_id=2, source_target_pairs={{0,1},{1,2},{2,0}}"
    plain = f"%x = bf16[8,8]{{1,0}} collective-permute(%y), {pairs}"
    both = "bf16[8,8]{1,0:T(8,128)(2,1)S(1)}"
    begun = f"%x = ({both}, {both}, u32[]{{:S(2)}}, u32[]{{:S(2)}}) collective-permute-start(%y), {pairs}"
    ended = f"%z = {both} collective-permute-done(%x)"
    for lines in ([plain], [begun, ended]):
        [found] = hlo.collectives(program(*lines))
        assert (found, found.wire) == (Collective("collective-permute", 3, 128), 128)


def test_a_permute_of_one_pair_is_sent():
    """From device 0 to device 1 and not back: two devices, not a group of one, which sends nothing."""
    line = "%y = f32[8]{0} collective-permute(%x), source_target_pairs={{0,1}}"
    assert hlo.collectives(program(line)) == [Collective("collective-permute", 2, 32)]


def test_wire_bytes_of_a_collective():
    """Of 80 bytes over four devices, in the order of the kinds; a permute sends all of them."""
    assert [Collective(kind, 4, 80).wire for kind in KINDS] == [120, 60, 60, 15, 80]


def test_what_cannot_be_read_is_refused():
    """Unknown kinds and unknown groups are not counted as nothing; a group of one is, and what only has the name."""
    one = "%x = f32[8]{0} all-gather(%y), replica_groups={{0},{1}}, dimensions={0}"
    assert hlo.collectives(program(one, "%z = f32[8]{0} add(%all-reduce, %y)")) == []
    for kind in ("ragged-all-to-all", "collective-broadcast"):
        with pytest.raises(ValueError, match=f"{kind}.*all-reduce.*collective-permute"):
            hlo.collectives(program(f"%x = f32[8]{{0}} {kind}(%y), {PAIR}"))
    with pytest.raises(ValueError, match="cannot be read"):
        hlo.collectives(program("%x = f32[8]{0} all-reduce(%y), replica_groups={}"))


@pytest.mark.parametrize(
    ("bound", "counter", "attributes", "turns"),
    [
        (7, "s32[]", "", 7),
        (4, "u32[]", "", 4),
        (7, "s32[]", ', backend_config={"known_trip_count":{"n":"5"},"known_init_step":{"init":"0","step":"1"}}', 5),
    ],
    ids=["signed", "unsigned", "said"],
)
def test_a_loop_multiplies_what_is_in_it(bound, counter, attributes, turns):
    """What XLA for CPU says comes first; on a TPU the turns are the constant with which the counter is compared."""
    called, line = loop(bound, REDUCE, counter=counter, attributes=attributes)
    other = f"%z = f32[2]{{0}} all-reduce(%y), {PAIR}"
    found = hlo.collectives(program(line, other, called=called))
    assert found == turns * [SUM] + [Collective("all-reduce", 2, 8)]


def test_loops_in_loops_multiply():
    """Three turns of five."""
    inner, within = loop(5, REDUCE)
    outer, line = loop(3, within, name="outer")
    assert hlo.collectives(program(line, called=inner + outer)) == 15 * [SUM]


def test_a_bound_may_stand_in_a_fusion():
    """The comparison of a counter may be a computation of its own."""
    [until, turn], line = loop(6, REDUCE)
    inside = until.replace("%loop.until", "%compared")
    outside = computation("loop.until", "=> %lt = pred[] fusion(%state), kind=kLoop, calls=%compared")
    assert hlo.collectives(program(line, called=[inside, outside, turn])) == 6 * [SUM]


@pytest.mark.parametrize("bound", ["%bound = s32[] get-tuple-element(%state), index=1", "%bound = f32[] constant(7)"])
def test_a_loop_without_a_count_is_refused(bound):
    """A bound that is computed, or is no count, leaves the turns open: ValueError names the loop."""
    [_, turn], line = loop(0, REDUCE, name="endless")
    until = computation("endless.until", bound, "=> %lt = pred[] compare(%at, %bound), direction=LT")
    for read in (hlo.collectives, hlo.hbm_bytes, hlo.cycles):
        with pytest.raises(ValueError, match="endless.*how often"):
            read(program(line, called=[until, turn]))


def test_collectives_are_found_where_they_are_called():
    """In fusions of fusions, calls, and what a TPU starts beside the rest; what a reduction applies is none."""
    start = '((f32[8]{0}, token[]), f32[8]{0}) call-start(%y, %token), async_execution_thread="sparsecore"'
    lines = [
        "%a = f32[8]{0} fusion(%y), kind=kCustom, calls=%fused",
        "%b = f32[8]{0} call(%y), to_apply=%held",
        f"%c.call-start = {start}, to_apply=%held",
        "%c.call-done = f32[8]{0} call-done(%c.call-start)",
        "%d = ((f32[8]{0}), f32[8]{0}) async-start(%y), calls=%held",
        "%e = f32[8]{0} async-done(%d)",
        "=> %f = f32[] reduce(%y, %zero), dimensions={0}, to_apply=%held",
    ]
    fused = computation("fused", "=> %g = f32[8]{0} fusion(%y), kind=kLoop, calls=%held")
    held = computation("held", REDUCE)
    assert hlo.collectives(program(*lines, called=[held, fused])) == 4 * [SUM]


def test_one_collective_beside_several_fusions_is_one():
    """A chain of fusions prints its collective in each; another channel, or one of no chain, is another one."""
    gather = "all-gather(%p), channel_id={}, replica_groups=[4,2]<=[8], dimensions={{0}}"
    chain = 'frontend_attributes={{chain_id="{}"}}'
    asked = [(7, 0), (7, 0), (8, 1), (7, 0), (8, 1)]
    fusions = [
        computation(f"f{i}", f"%g{i} = f32[16]{{0}} {gather.format(channel)}, {chain.format(number)}")
        for i, (channel, number) in enumerate(asked)
    ]
    lines = [f"%c{i} = f32[16]{{0}} fusion(%x), kind=kCustom, calls=%f{i}" for i in range(len(asked))]
    plain = [f"%h{i} = f32[16]{{0}} {gather.format(7)}" for i in range(2)]
    one = Collective("all-gather", 2, 64)
    assert hlo.collectives(program(*lines, *plain, called=fusions)) == 4 * [one]
    called, line = loop(3, *lines)
    assert hlo.collectives(program(line, called=fusions + called)) == 6 * [one]


@pytest.mark.parametrize(
    ("type", "expected"),
    [
        ("f32[]", [(4, 0)]),
        ("bf16[16,8]{1,0:T(8,128)(2,1)}", [(256, 0)]),
        ("bf16[16,8]{1,0:T(8,128)(2,1)S(1)}", [(256, 1)]),
        ("s4[16,8]{1,0:T(8,128)(8,1)E(4)}", [(64, 0)]),
        ("s2[16]{0}", [(4, 0)]),
        ("s4[3]{0}", [(1.5, 0)]),
        ("f8e4m3fn[16,8]{1,0}", [(128, 0)]),
        ("f4e2m1fn[16,8]{1,0}", [(64, 0)]),
        ("pred[16]{0:T(512)(128)(4,1)S(1)}", [(16, 1)]),
        ("u32[]{:S(2)}", [(4, 2)]),
        ("f32[0,8]", [(0, 0)]),
        ("token[]", [(0, 0)]),
        ("(s32[]{:T(128)}, /*index=1*/f32[2,3]{1,0:S(1)}, (f64[2], c64[1]))", [(4, 0), (24, 1), (16, 0), (8, 0)]),
    ],
)
def test_the_arrays_of_a_type(type, expected):
    """Bytes and memory space of each: half a byte for four bits, a whole one for a truth value, nothing for a token."""
    assert hlo.arrays(type) == expected


def test_a_fusion_reads_its_operands_and_writes_its_result_once():
    """A matrix product in bf16: [16, 64] x [64, 32], and the bias in f32; what passes inside it moves nothing."""
    fused = computation(
        "fused",
        "%p0 = bf16[16,64]{1,0} parameter(0)",
        "%p1 = bf16[64,32]{1,0} parameter(1)",
        "%p2 = f32[32]{0} parameter(2)",
        "%dot = f32[16,32]{1,0} convolution(%p0, %p1), dim_labels=bf_io->bf",
        "%wide = f32[16,32]{1,0} broadcast(%p2), dimensions={1}",
        "%sum = f32[16,32]{1,0} add(%dot, %wide)",
        "=> %y = bf16[16,32]{1,0} convert(%sum)",
    )
    lines = [
        "%x = bf16[16,64]{1,0} parameter(0)",
        "%w = bf16[64,32]{1,0} parameter(1)",
        "%b = f32[32]{0} parameter(2)",
        "%z = bf16[16,32]{1,0} fusion(%x, %w, %b), kind=kOutput, calls=%fused",
        "%t = (bf16[16,32]{1,0}, f32[32]{0}) tuple(%z, %b)",
        "%g = bf16[16,32]{1,0} get-tuple-element(%t), index=0",
        "=> %same = bf16[32,16]{0,1} bitcast(%g)",
    ]
    assert hlo.hbm_bytes(program(*lines, called=[fused])) == 2 * 16 * 64 + 2 * 64 * 32 + 4 * 32 + 2 * 16 * 32


def test_what_stays_on_the_chip_is_free():
    """An array is read where it is copied to VMEM, used there for nothing, and written where it is copied back."""
    here, there = "f32[1024]" + VMEM, "f32[1024]{0:T(1024)}"
    fused = computation("fused", f"%p = {here} parameter(0)", f"=> %n = {here} negate(%p)")
    lines = [
        f"%x = {there} parameter(0)",
        f"%in = ({here}, {there}, u32[]{{:S(2)}}) copy-start(%x), cross_program_prefetch_index=0",
        f"%held = {here} copy-done(%in)",
        f"%a = {here} fusion(%held), kind=kLoop, calls=%fused",
        f"%b = {here} add(%a, %held)",
        f"%out = ({there}, {here}, u32[]{{:S(2)}}) copy-start(%b)",
        f"=> %y = {there} copy-done(%out)",
    ]
    assert hlo.hbm_bytes(program(*lines, called=[fused])) == 4096 + 4096
    assert hlo.hbm_bytes(program(*lines[:-2], called=[fused])) == 4096


def test_several_results_are_written_each_where_it_lies():
    """Of a tuple of two, one is in VMEM; the other counts."""
    parts = [f"f32[64]{VMEM}", "bf16[16,8]{1,0:T(8,128)(2,1)}"]
    fused = computation(
        "fused",
        "%p = bf16[16,8]{1,0:T(8,128)(2,1)} parameter(0)",
        f"%one = {parts[0]} custom-call(%p)",
        f"%two = {parts[1]} negate(%p)",
        f"=> %t = ({', '.join(parts)}) tuple(%one, %two)",
    )
    line = f"%f = ({', '.join(parts)}) fusion(%x), kind=kLoop, calls=%fused"
    given = "%x = bf16[16,8]{1,0:T(8,128)(2,1)} parameter(0)"
    assert hlo.hbm_bytes(program(given, line, called=[fused])) == 2 * 128 + 2 * 128


STACK = "bf16[40,64,32]{2,1,0:T(8,128)(2,1)}"
TURN = "%s = bf16[1,64,32]{2,1,0} dynamic-slice(%p, %i, %zero, %zero), dynamic_slice_sizes={1,64,32}"
SLICE = 2 * 64 * 32


def sliced(*lines):
    """Bytes of a program with a fusion of such lines, of a stack of 40 matrices and an index, with a result in VMEM."""
    given = [f"%p = {STACK} parameter(0)", f"%i = s32[]{SMEM} parameter(1)", "%zero = s32[] constant(0)"]
    call = f"%f = f32[64]{VMEM} fusion(%w, %at), kind=kLoop, calls=%fused"
    inner = computation(
        "inner",
        f"%q = {STACK} parameter(0)",
        f"%j = s32[]{SMEM} parameter(1)",
        TURN.replace("%s", "%inner.s").replace("%p", "%q").replace("%i", "%j"),
        "=> %matrix = bf16[64,32]{1,0} bitcast(%inner.s)",
    )
    copied = computation("copied", f"%given = {STACK} parameter(0)", f"=> %same = {STACK} bitcast(%given)")
    fused = computation("fused", *given, *lines)
    text = [f"%w = {STACK} parameter(0)", f"%at = s32[]{SMEM} parameter(1)", call]
    return hlo.hbm_bytes(program(*text, called=[inner, copied, fused]))


ROOT = f"=> %y = f32[64]{VMEM} reduce(%s, %zero), dimensions={{0,2}}, to_apply=%sum"
TILED = f"%p2 = {STACK} fusion(%p), kind=kLoop, output_to_operand_aliasing={{{{}}: (0, {{}})}}, calls=%copied"


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ([TURN, ROOT], SLICE),
        ([TURN, TURN.replace("%s", "%s2"), ROOT], 2 * SLICE),
        ([TURN.replace("%s =", f"%s{i} =") for i in range(41)] + [ROOT], 40 * SLICE),
        ([f"%p1 = {STACK} bitcast(%p)", TURN.replace("%p", "%p1"), ROOT], SLICE),
        ([TILED, TURN.replace("%p", "%p2"), ROOT], SLICE),
        (["%s = bf16[64,32]{1,0} fusion(%p, %i), kind=kLoop, calls=%inner", ROOT], SLICE),
        (["%s = bf16[5,32]{1,0} gather(%p, %i), slice_sizes={1,1,32}", ROOT], 2 * 5 * 32),
        ([TURN, f"%s3 = {STACK} negate(%p)", ROOT], 40 * SLICE),
        ([f"%s = {STACK} negate(%p)", ROOT], 40 * SLICE),
    ],
    ids="once, twice, most, renamed, re-tiled, nested, gathered, and all, all".split(", "),
)
def test_of_a_stack_that_is_sliced_the_slices_count(lines, expected):
    """By a dynamic slice or a gather, also under another name or in another tiling; at most the whole array."""
    assert sliced(*lines) == expected


KEPT, NEW = "f32[128,64]{1,0:T(8,128)}", "f32[1,64]{1,0:T(8,128)}"


@pytest.mark.parametrize(
    ("new", "root", "result", "expected"),
    [
        ("S(1)", [f"=> %r = {KEPT} dynamic-update-slice(%p, %n, %i, %i)"], KEPT, 256),
        ("", [f"=> %r = {KEPT} dynamic-update-slice(%p, %n, %i, %i)"], KEPT, 2 * 256),
        ("S(1)", [f"%d = {KEPT} dynamic-update-slice(%p, %n, %i, %i)", f"=> %r = {KEPT} bitcast(%d)"], KEPT, 256),
        (
            "S(1)",
            [
                f"%d = {KEPT} dynamic-update-slice(%p, %n, %i, %i)",
                f"%s = {NEW} negate(%n)",
                f"=> %r = ({KEPT}, {NEW}) tuple(%d, %s)",
            ],
            f"({KEPT}, {NEW})",
            2 * 256,
        ),
        (
            "S(1)",
            [
                f"%before = {NEW} dynamic-slice(%p, %i, %i), dynamic_slice_sizes={{1,64}}",
                f"%both = {NEW} add(%before, %n)",
                f"=> %r = {KEPT} dynamic-update-slice(%p, %both, %i, %i)",
            ],
            KEPT,
            2 * 256,
        ),
        ("S(1)", [f"=> %r = {KEPT} fusion(%p, %n, %i), kind=kLoop, calls=%inner"], KEPT, 256),
        ("S(1)", [f"%m = {KEPT} negate(%p)", f"=> %r = {KEPT} add(%m, %m)"], KEPT, 2 * 128 * 256),
    ],
    ids=["from VMEM", "from HBM", "renamed", "of two results", "after reading", "nested", "none"],
)
def test_of_an_array_that_is_replaced_in_part_the_part_counts(new, root, result, expected):
    """One row of 128 is written, and read where it comes from HBM; the rest stays where it is."""
    row = NEW.replace("}", new + "}")
    fused = computation(
        "fused", f"%p = {KEPT} parameter(0)", f"%n = {row} parameter(1)", f"%i = s32[]{SMEM} parameter(2)", *root
    )
    inner = computation(
        "inner",
        f"%kept = {KEPT} parameter(0)",
        f"%fresh = {row} parameter(1)",
        f"%j = s32[]{SMEM} parameter(2)",
        f"=> %placed = {KEPT} dynamic-update-slice(%kept, %fresh, %j, %j)",
    )
    lines = [
        f"%cache = {KEPT} parameter(0)",
        f"%new = {row} parameter(1)",
        f"%at = s32[]{SMEM} parameter(2)",
        f"%f = {result} fusion(%cache, %new, %at), kind=kLoop, calls=%fused",
    ]
    assert hlo.hbm_bytes(program(*lines, called=[inner, fused])) == expected


def test_slices_outside_of_fusions_count_alike():
    """A row of an array is read and written, or put back; a part that is fetched to VMEM in the background is read."""
    given = [f"%cache = {KEPT} parameter(0)", f"%at = s32[]{SMEM} parameter(1)"]
    row = f"%row = {NEW} dynamic-slice(%cache, %at, %at), dynamic_slice_sizes={{1,64}}"
    assert hlo.hbm_bytes(program(*given, row)) == 2 * 256
    put = f"%put = {KEPT} dynamic-update-slice(%cache, %row, %at, %at)"
    assert hlo.hbm_bytes(program(*given, row, put)) == 4 * 256
    part = "f32[32,64]{1,0:T(8,128)S(1)}"
    fetch = f"%s = (({KEPT}), {part}, s32[]{{:S(2)}}) slice-start(%cache), slice={{[0:32], [0:64]}}"
    assert hlo.hbm_bytes(program(*given, fetch, f"%d = {part} slice-done(%s)")) == 32 * 256


GIVEN = ("%x = f32[1024]{0} parameter(0)", "%long = f32[8192]{0} parameter(1)", "%at = s32[]{:S(6)} parameter(2)")
HELD = f"%kept = f32[8192]{VMEM} parameter(3)"
PIECE = f"%piece = f32[1024]{VMEM} parameter(3)"


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        # x is 4,096 B, long 32,768 B, a quarter of x 1,024 B
        (["%y = f32[1024]{0} add(%x, %x)"], 4096 + 4096),
        (["%y = f32[256]{0} slice(%long), slice={[0:256]}"], 1024 + 1024),
        (["%y = f32[256]{0} gather(%long, %at), slice_sizes={256}"], 1024 + 1024),
        ([PIECE, "%y = f32[8192]{0} dynamic-update-slice(%long, %piece, %at)"], 4096),
        ([HELD, f"%y = f32[8192]{VMEM} dynamic-update-slice(%kept, %x, %at)"], 4096),
        (
            [
                "%s = (f32[1024]{0}, f32[1024]{0}, u32[]{:S(2)}, u32[]{:S(2)}) collective-permute-start(%x), "
                "source_target_pairs={{0,1},{1,0}}",
                "%y = f32[1024]{0} collective-permute-done(%s)",
            ],
            4096 + 4096,
        ),
        (
            [
                "%s = (f32[1024]{0}, f32[2048]{0}) all-gather-start(%x), replica_groups={{0,1}}, dimensions={0}",
                "%y = f32[2048]{0} all-gather-done(%s)",
            ],
            4096 + 8192,
        ),
    ],
)
def test_what_an_operation_reads_and_writes(lines, expected):
    """An operand once even if it is used twice, a slice as what it is, a collective that starts its operand and its result."""
    assert hlo.hbm_bytes(program(*GIVEN, *lines)) == expected


def test_what_runs_asynchronously_is_counted_once():
    """A negation of 4,096 bytes that is only started reads and writes them, and its start and end nothing."""
    called = computation("negation", "%p = f32[1024]{0} parameter(0)", "=> %n = f32[1024]{0} negate(%p)")
    lines = (
        "%s = ((f32[1024]{0}), f32[1024]{0}, u32[]{:S(2)}) async-start(%x), calls=%negation",
        "%d = f32[1024]{0} async-done(%s)",
    )
    assert hlo.hbm_bytes(program(*GIVEN, *lines, called=[called])) == 8192


def test_branches_are_refused():
    """Which of two is taken only the program's run tells."""
    called = [computation(name, REDUCE.replace("%x", "=> %x", 1)) for name in ("yes", "no")]
    line = "%y = f32[8]{0} conditional(%p, %x, %x), true_computation=%yes, false_computation=%no"
    for count in (hlo.collectives, hlo.hbm_bytes, hlo.cycles):
        with pytest.raises(ValueError, match="branch y"):
            count(program(*GIVEN, line, called=called))


def test_a_loop_moves_its_bytes_in_each_turn():
    """Seven turns that negate 4 KiB, in and out."""
    called, line = loop(7, "%old = f32[1024]{0} get-tuple-element(%s), index=1", "%new = f32[1024]{0} negate(%old)")
    assert hlo.hbm_bytes(program(line, called=called)) == 7 * 2 * 4096


def estimated(cycles):
    return f'backend_config={{"flag_configs":[],"estimated_cycles":"{cycles}"}}'


def test_cycles_are_summed_over_what_runs():
    """Those of a loop's instructions as often as it turns, those inside a fusion not: it has its own."""
    called, line = loop(
        5, f"%a = f32[8]{{0}} negate(%x), {estimated(100)}", f"%b = f32[8]{{0}} negate(%a), {estimated(7)}"
    )
    fused = computation("fused", f"=> %c = f32[8]{{0}} negate(%p), {estimated(999)}")
    last = f"%d = f32[8]{{0}} fusion(%x), kind=kLoop, calls=%fused, {estimated(11)}"
    assert hlo.cycles(program(line, last, "%e = f32[8]{0} copy(%x)", called=[*called, fused])) == 5 * 107 + 11
    assert hlo.cycles(program("%e = f32[8]{0} copy(%x)")) == 0
    overflow = f"%e = f32[8]{{0}} copy(%x), {estimated(2**63 - 1)}"
    assert hlo.cycles(program(line, overflow, called=called)) == 0


PRINTED = """HloModule jit_step, is_scheduled=true, entry_computation_layout={(f32[8]{0})->f32[8]{0}}

FileNames
1 "/somewhere/step.py"

FunctionNames
1 "turn"
2 "layer"

FileLocations
1 {file_name_id=1 function_name_id=1 line=69 end_line=69 column=15 end_column=15}

StackFrames
1 {file_location_id=1 parent_frame_id=1}


ENTRY %main (x: f32[8]) -> f32[8] {
  %x = f32[8]{0} parameter(0), metadata={op_name="x"}
  ROOT %y = f32[8]{0} negate(%x), metadata={op_name="f/neg" stack_frame_id=1}, backend_config={"a":"b","body":"TUzv="}
}
"""


def test_a_digest_is_that_of_the_program_alone():
    """Names and lines may change; an operation, a shape, an attribute or the body of a kernel not."""
    digest = hlo.digest(PRINTED)
    assert re.fullmatch("[0-9a-f]{16}", digest)
    for old, new in [
        ("jit_step", "jit_other.2"),
        ("/somewhere/step.py", "/elsewhere/of/another.py"),
        ("line=69 end_line=69", "line=70 end_line=71"),
        ('2 "layer"\n', '2 "layer"\n3 "norm"\n'),
        (', metadata={op_name="x"}', ""),
        ("f/neg", "jit(other)/while/body/neg"),
        ("stack_frame_id=1", 'source_file="step.py" source_line=3'),
    ]:
        assert old in PRINTED and hlo.digest(PRINTED.replace(old, new)) == digest, old
    for old, new in [
        ("negate", "sine"),
        ("f32[8]", "f32[9]"),
        ("f32[8]{0} negate", "f32[8]{0:S(1)} negate"),
        ("is_scheduled=true", "is_scheduled=false"),
        ('{"a":"b"', '{"a":"c"'),
        ("TUzv=", "TUzvUg+/=="),
    ]:
        assert old in PRINTED and hlo.digest(PRINTED.replace(old, new)) != digest, old
