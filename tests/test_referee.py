"""The referee's bookkeeping: cases, the record and its repetition. What the compiler said is asserted elsewhere."""

import csv
import random
import shutil
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import jax
import numpy as np
import pytest

import lib
from lib import facts
from lib.demos import cases, hlo, programs, referee, sharded
from lib.demos.referee import Case, Row

STEP = Case("step", "v5e", "2x4", "llama-2-13b", 8, "heads", "LSKBH scanned", "int8", "fp8", batch=16, context=8192)
SENT = (
    "80 all-reduce of 8: 163840 B; 2 all-gather of 8: 1024 B; 1 all-gather of 2: 64 B; 3 collective-permute of 4: 8 B"
)
SAID = dict(flops=2**60, accessed=3, hbm=5, argument=7, temporary=11, peak=13, cycles=17, text="00e2" * 4)
ACCEPTED = Row(STEP, "0.10.2", "0.0.42.1", True, collectives=SENT, seconds=0.3, **SAID)
REFUSED = Row(
    Case("matmul", "v4", weights="int8", activations="int8"), "0.10.2", "0.0.42.1", False, temporary=123, room=100
)


@pytest.fixture
def data(tmp_path, monkeypatch):
    """A copy of lib/data without a record, in its place; what was read before does not leak in or out."""
    for path in facts.DATA.iterdir():
        if path.name != "referee.csv" and path.is_file():
            shutil.copy(path, tmp_path)
    for module in (facts, referee):
        monkeypatch.setattr(module, "DATA", tmp_path)
    facts.table.cache_clear()
    yield tmp_path
    facts.table.cache_clear()


@pytest.fixture
def compiler(monkeypatch):
    """A compiler that accepts everything; returns the list of cases that it was given."""
    asked = []

    def compiled(case):
        asked.append(case)
        return Row(case, "1.2.3", "4.5.6", accepted=True, argument=1000 * case.batch, seconds=0.5), "text"

    monkeypatch.setattr(referee, "compiled", compiled)
    return asked


def asked_for(*batches):
    return [Case("matmul", "v5e", weights="bf16", batch=batch) for batch in batches]


def written():
    """Rows of the record as they are on disk now."""
    facts.table.cache_clear()
    return referee.recorded()


def test_a_name_says_what_is_not_empty():
    """Fields in their order, as in the command line; no number for a model that keeps its KV heads."""
    assert STEP.name == "step/v5e/2x4/llama-2-13b/8/heads/LSKBH scanned/int8/fp8/bf16/16/8192"
    assert replace(STEP, kv_heads=0, cache="LSKBH").name == "step/v5e/2x4/llama-2-13b/heads/LSKBH/int8/fp8/bf16/16/8192"
    assert Case("matmul", "v4", weights="int8", activations="int8").name == "matmul/v4/1/int8/int8/1"


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        (lambda: Case("matmull", "v5e"), "program 'matmull'.*matmul.*step"),
        (lambda: Case("matmul", "v5x"), "chip 'v5x'.*ironwood.*v5e"),
        (lambda: referee.recorded(chips="v5e"), "field of a case 'chips'.*batch.*chip.*context"),
        (lambda: referee.recorded(flops=1), "field of a case 'flops'.*activations"),
    ],
)
def test_what_is_unknown_is_refused(wrong, told):
    """Programs, chips and fields: KeyError names those that exist."""
    with pytest.raises(KeyError, match=f"unknown {told}"):
        wrong()


def test_a_model_may_be_given_other_kv_heads():
    """All else stays, and without a number so do they: LLaMA-2-13B has forty."""
    whole = replace(STEP, kv_heads=0).architecture
    assert whole == lib.model("llama-2-13b") and whole.blocks[0].mixer.n_kv_heads == 40
    fewer = STEP.architecture
    assert [block.mixer for block in fewer.blocks] == [lib.GQA(40, 8, 128)]
    assert replace(fewer, blocks=whole.blocks) == whole and fewer.blocks[0].ffn == whole.blocks[0].ffn


@pytest.mark.parametrize(
    ("chip", "slice", "devices"),
    [("v5e", "1", 1), ("ironwood", "1", 1), ("v5e", "4x8", 32), ("v5p", "2x2x4", 16), ("ironwood", "2x2x1", 8)],
)
def test_devices_of_a_slice(chip, slice, devices):
    """A program for slice "1" has one device; an Ironwood chip consists of two."""
    assert Case("step", chip, slice).devices == devices


@pytest.mark.parametrize(
    ("chip", "slice", "layout", "tensor", "kv"),
    [
        ("v5e", "2x4", "heads", 8, "heads"),
        ("v5e", "4x4", "batch", 16, "batch"),
        ("v5e", "4x4", "sequence", 16, "sequence"),
        ("v5e", "4x4", "automatic", 16, "batch"),
        ("v5e", "2x4", "fsdp", 8, "heads"),
        ("ironwood", "2x2x2", "batch", 8, "batch"),
    ],
)
def test_the_server_of_a_step(chip, slice, layout, tensor, kv):
    """Chips, not devices, share the model; the cache of copied KV heads is cut as the program cuts it."""
    case = Case("step", chip, slice, "llama-3-70b", layout=layout, cache="LSKBH", weights="int8", kv="fp8")
    server = case.server
    assert (server.model, server.chip) == (lib.model("llama-3-70b"), lib.chip(chip))
    assert server.plan == lib.Plan(tensor, kv=kv)
    assert server.precision == lib.Precision(weights="int8", kv="fp8", activations="bf16", math="bf16")


def test_a_case_in_words():
    """Model, its heads where they are not its own, weights, the cache if in another format, chip and slice."""
    assert STEP.what == "llama-2-13b, 8 KV heads, int8, fp8 cache, v5e 2x4"
    assert replace(STEP, kv_heads=0, kv="int8").what == "llama-2-13b, int8, v5e 2x4"


def test_what_a_row_says_is_sent():
    """Times and wire bytes by kind: 7/8 of an array, twice that to sum it, all of it to pass it on."""
    summed, gathered = (80, 80 * 2 * 7 / 8 * 163840), (3, 2 * 7 / 8 * 1024 + 1 / 2 * 64)
    assert ACCEPTED.sent() == {"all-reduce": summed, "all-gather": gathered, "collective-permute": (3, 3 * 8)}
    assert ACCEPTED.sent(2) == {"all-reduce": summed, "all-gather": (2, 1792), "collective-permute": (3, 24)}
    assert ACCEPTED.sent(least=80) == {"all-reduce": summed}
    assert REFUSED.sent() == {}


def test_rows_are_written_as_a_table_and_read_back(data, monkeypatch):
    """Columns as in the types, empty where a case has nothing, with a source; nothing is lost on the way."""
    rows = [ACCEPTED, REFUSED, replace(ACCEPTED, case=replace(STEP, batch=1), seconds=12.5, flops=0)]
    by_case = {row.case: row for row in rows}
    monkeypatch.setattr(referee, "compiled", lambda case: (by_case[case], ""))
    referee.record(list(by_case))
    assert written() == rows
    lines = list(csv.reader((data / "referee.csv").read_text().splitlines()))
    assert lines[0] == [*referee.CASE, *referee.RESULT, "source"]
    assert lines[0][:4] == ["program", "chip", "slice", "model"]
    assert lines[2] == "matmul,v4,1,,,,,int8,,int8,1,,0.10.2,0.0.42.1,no,,,,,123,100,,,,,,AOT".split(",")


def test_the_record_is_filtered_by_fields_of_its_cases(data, compiler):
    """All wanted fields must be equal, or among several; without any, all rows come in their order."""
    asked = [*asked_for(1, 2), Case("matmul", "v5p", weights="int8", batch=2), replace(STEP, batch=2)]
    referee.record(asked)
    facts.table.cache_clear()

    def found(**wanted):
        return [asked.index(row.case) for row in referee.recorded(**wanted)]

    assert found() == [0, 1, 2, 3]
    assert found(batch=2) == [1, 2, 3]
    assert found(batch=2, program="matmul") == [1, 2]
    assert found(weights="bf16", chip="v5e") == [0, 1]
    assert found(kv_heads=8, cache="LSKBH scanned") == [3]
    assert found(batch=3) == []
    assert found(batch=(1, 2), weights=("int8", "bf16")) == [0, 1, 2, 3]
    assert found(batch=(1, 3)) == [0]


def test_recording_goes_on_where_it_was(data, compiler, capsys):
    """A row that exists is not compiled again; rows come in the order of the cases, and others leave."""
    one, two, three = asked_for(1, 2, 4)
    referee.record([one, two])
    assert compiler == [one, two]
    assert [row.case for row in written()] == [one, two]
    facts.table.cache_clear()
    referee.record([three, two])
    assert compiler == [one, two, three]
    assert [(row.case, row.argument) for row in written()] == [(three, 4000), (two, 2000)]
    assert capsys.readouterr().out.splitlines()[0] == "  0.5 s  accepted  matmul/v5e/1/bf16/bf16/1"


def test_an_interrupted_recording_keeps_what_it_has(data, compiler, monkeypatch):
    """Each row is written as it comes, beside those of earlier runs."""
    one, two, three, four = asked_for(1, 2, 4, 8)
    referee.record([four])
    works = referee.compiled

    def interrupted(case):
        if case == three:
            raise KeyboardInterrupt
        return works(case)

    monkeypatch.setattr(referee, "compiled", interrupted)
    facts.table.cache_clear()
    with pytest.raises(KeyboardInterrupt):
        referee.record([one, two, three, four])
    assert {row.case for row in written()} == {one, two, four}
    monkeypatch.setattr(referee, "compiled", works)
    facts.table.cache_clear()
    referee.record([one, two, three, four])
    assert [row.case for row in written()] == [one, two, three, four]
    assert compiler == [four, one, two, three]


def test_differences_are_those_of_what_was_said():
    """Every count and the text, with both values; neither versions nor times."""
    now = replace(ACCEPTED, jax="9", libtpu="9", seconds=99.0)
    assert referee.differences(ACCEPTED, now) == []
    changed = dict(SAID, flops=1, text="ff")
    assert referee.differences(ACCEPTED, replace(now, **changed)) == [("flops", 2**60, 1), ("text", "00e2" * 4, "ff")]
    for name in (*SAID, "collectives", "accepted"):
        before = getattr(ACCEPTED, name)
        after = {int: 1, str: "none", bool: False}[type(before)]
        assert referee.differences(ACCEPTED, replace(now, **{name: after})) == [(name, before, after)]


def test_a_check_counts_the_rows_that_say_something_else(compiler, capsys):
    """It prints each row, what differs, and other versions where they may be why."""
    same = Row(asked_for(1)[0], "0", "0", accepted=True, argument=1000)
    other = Row(asked_for(2)[0], "0", "0", accepted=True, argument=1999, peak=5)
    again = Row(asked_for(4)[0], "1.2.3", "4.5.6", accepted=True, argument=0)
    assert cases.check([same]) == 0
    assert cases.check([same, other, again]) == 2
    assert compiler == asked_for(1, 1, 2, 4)
    lines = capsys.readouterr().out.splitlines()
    assert lines[2:] == [
        "  0.5 s  DIFFERENT  matmul/v5e/1/bf16/bf16/2",
        "         argument: recorded 1999, now 2000",
        "         peak: recorded 5, now 0",
        "         recorded with jax 0 and libtpu 0, here are 1.2.3 and 4.5.6",
        "  0.5 s  DIFFERENT  matmul/v5e/1/bf16/bf16/4",
        "         argument: recorded 0, now 4000",
    ]


def test_rows_are_chosen_by_chance_and_the_seed():
    """The same for the same seed, others for another, no row twice, and none that takes more than 20 s."""
    rows = [replace(ACCEPTED, cycles=i, seconds=seconds) for i, seconds in enumerate(range(40))]
    for seed in ("0a1b", "", "2c"):
        state = random.getstate()
        found = cases.chosen(rows, 5, seed)
        assert random.getstate() == state, "the choice is its own"
        assert found == cases.chosen(rows, 5, seed)
        assert len({row.cycles for row in found}) == 5
        assert max(row.seconds for row in found) <= 20
    assert len({tuple(row.cycles for row in cases.chosen(rows, 5, seed)) for seed in "abcdefgh"}) == 8
    assert {row.cycles for row in cases.chosen(rows, 99, "a")} == set(range(21))
    assert cases.chosen(rows[21:], 5, "a") == []


def test_the_command_line(data, compiler, monkeypatch, capsys):
    """It fails where a row says something else, takes rows by name, and refuses other names."""

    def main(*words):
        facts.table.cache_clear()
        monkeypatch.setattr(sys, "argv", ["cases", *words])
        return cases.main()

    monkeypatch.setattr(cases, "cases", lambda: asked_for(1, 2, 4))
    assert main("--record") == 0 and len(written()) == 3
    compiler.clear()
    assert main() == 0 and sorted(case.batch for case in compiler) == [1, 2, 4]
    compiler.clear()
    assert main("--rows", "2") == 0 and len(compiler) == 2
    compiler.clear()
    assert main("matmul/v5e/1/bf16/bf16/2") == 0 and compiler == asked_for(2)
    for words, said in {
        ("matmul/v5e/1/bf16/bf16/3",): "no row 'matmul/v5e/1/bf16/bf16/3'; near it: matmul/v5e/1/bf16/bf16/",
        ("nonsense",): "no row 'nonsense'; near it: none",
        ("--rows", "0"): "1 or more",
        ("--rows", "-1"): "1 or more",
        ("--record", "matmul/v5e/1/bf16/bf16/2"): "takes no names",
    }.items():
        with pytest.raises(SystemExit):
            main(*words)
        assert said in capsys.readouterr().err
    monkeypatch.setattr(cases, "which", lambda name: None)
    assert cases.commit() == "" and "no commit to choose by" in capsys.readouterr().out
    path = data / "referee.csv"
    path.write_text(path.read_text().replace(",2000,", ",2001,"))
    assert main() == 1
    told = "3 of 3 rows of lib/data/referee.csv compiled again, 1 of them changed"
    assert capsys.readouterr().out.splitlines()[-1] == told


def test_a_live_compilation_says_plainly_where_there_is_none(monkeypatch, tmp_path):
    """Neither here nor where `make referee` would put it; half made; made, with a compiler that fails; and one that answers."""
    told = f"Recorded with jax 0.10.2 and libtpu 0.0.42.1: {ACCEPTED.case.name}"
    monkeypatch.setattr(cases, "ROOT", tmp_path)
    monkeypatch.setattr(referee, "present", lambda: False)
    missing = "libtpu is not installed here (`make referee` installs it), so nothing was compiled."
    assert cases.live(ACCEPTED).splitlines() == [missing, told]
    python = tmp_path / ".venv-tpu" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text("#!/bin/sh\necho 'it broke' >&2\nexit 1\n")
    python.chmod(0o755)
    assert cases.live(ACCEPTED).splitlines() == [missing, told]
    (tmp_path / ".venv-tpu" / ".ready").touch()
    assert cases.live(ACCEPTED).splitlines() == ["Nothing was compiled: it broke", told]
    python.write_text('#!/bin/sh\necho "  1.0 s  same       $3"\n')
    assert cases.live(ACCEPTED) == f"  1.0 s  same       {ACCEPTED.case.name}\n"


def test_what_is_asked():
    """At least 150 cases for at least four kinds of chip, none twice, also by name."""
    asked = cases.cases()
    assert len(asked) == len(set(asked)) == len({case.name for case in asked}) >= 150
    assert len({case.chip for case in asked}) >= 4
    assert {case.program for case in asked} == set(referee.PROGRAMS)
    for case in asked:
        assert case.devices >= 1 and (case.program != "step" or case.server)
        assert case.slice == "1" or case.program in ("step", "experts")


def test_the_record_needs_neither_jax_nor_the_compiler():
    """What only reads rows starts no JAX, in a process of its own."""
    code = "import sys; from lib.demos import cases, verdicts; print('jax' in sys.modules, 'libtpu' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]


def test_without_the_compiler_nothing_is_compiled(unchecked):
    """RuntimeError says how to get it."""
    if referee.present():
        unchecked("what is said without libtpu", "run the tests in an environment that does not have it")
    with pytest.raises(RuntimeError, match="make referee.*installs"):
        referee.compiled(STEP)


@pytest.fixture
def as_if(request, monkeypatch):
    """XLA for CPU in the place of libtpu, and eight devices of this machine in that of a slice."""
    try:
        devices = np.array(sharded.devices())
    except RuntimeError as error:
        request.getfixturevalue("unchecked")("what the referee reads of a compilation", str(error))
    monkeypatch.setattr(referee, "present", lambda: True)
    monkeypatch.setattr(referee, "HOST", {})
    monkeypatch.setattr(referee, "metadata", SimpleNamespace(version=lambda name: f"{name} 1"))
    monkeypatch.setattr(programs, "devices", lambda case: devices[:1] if case.slice == "1" else devices)


def test_a_compilation_becomes_a_row(as_if):
    """A step of LLaMA-3.1-8B in f32 for eight devices: bytes, collectives and the text's digest, by hand."""
    D, V, L, B, S = 4096, 128_256, 32, 16, 128
    formats = dict(weights="f32", kv="f32", activations="f32")
    case = Case("step", "v5e", "2x4", "llama-3.1-8b", layout="heads", cache="LSKBH", batch=B, context=S, **formats)
    row, text = referee.compiled(case)
    assert (row.case, row.jax, row.libtpu, row.accepted) == (case, jax.__version__, "libtpu 1", True)
    matrices = 2 * L * D * (32 + 8) * 128 + 3 * L * D * 14_336 + 2 * V * D
    assert row.argument == 4 * ((matrices + 2 * L * S * 8 * B * 128) // 8 + B + 1)
    assert set(row.collectives.split("; ")) == {
        f"1 all-gather of 8: {4 * B * D} B",
        f"{2 * L} all-reduce of 8: {4 * B * D} B",
        f"1 all-gather of 8: {4 * B * V} B",
    }
    assert row.sent()["all-reduce"] == (2 * L, 2 * L * 2 * 7 / 8 * 4 * B * D)
    assert row.text == hlo.digest(text) and text.startswith("HloModule jit__step")
    assert row.hbm == round(hlo.hbm_bytes(text)) and row.cycles == 0
    assert min(row.flops, row.accessed, row.seconds) > 0 and row.peak >= row.argument


@pytest.mark.parametrize("program", referee.PROGRAMS[:4])
def test_every_program_of_one_device_can_be_asked_for(program, as_if):
    """Names have spaces, functions have none; the arguments' bytes by hand."""
    case = Case(program, "v5e", layout="naive", weights="int8", kv="int8", batch=2, context=16)
    cache, heads = 16 * 8 * 2 * 128, 2 * 64 * 128
    expected = {
        "matmul": 2 * 2 * 8192 + 8192 * 32_768,
        "weights": 2 * 2 * 8192 + 8192 * 28_672,
        "decode attention": 2 * heads + 2 * cache,
        "prefill attention": 3 * 2 * (2 * 8 * 16 * 128),
    }
    row, _ = referee.compiled(case)
    assert (row.accepted, row.argument, row.collectives) == (True, expected[program], "")


def failing(words):
    def refuse(*arguments):
        raise jax.errors.JaxRuntimeError(words)

    return lambda case: (refuse, (), ())


def test_a_program_that_is_too_large_is_a_row(as_if, monkeypatch):
    """Of a refused program the bytes that it asked for are known: 17.25 GiB; other errors are errors."""
    case = Case("matmul", "v5e", weights="bf16")
    told = "the total memory required for HLO temporaries (17.25G) exceeds available HBM (15.75G)."
    monkeypatch.setattr(programs, "matmul", failing(f"RESOURCE_EXHAUSTED: Ran out of memory on HBM, {told}"))
    row, text = referee.compiled(case)
    assert (replace(row, seconds=0), text) == (
        Row(case, jax.__version__, "libtpu 1", False, temporary=69 * 2**28, room=63 * 2**28),
        "",
    )
    for words in ("INTERNAL: Mosaic failed to compile", "RESOURCE_EXHAUSTED: Ran out of memory in memory space vmem"):
        monkeypatch.setattr(programs, "matmul", failing(words))
        with pytest.raises(jax.errors.JaxRuntimeError, match=words[:8]):
            referee.compiled(case)


@pytest.mark.parametrize(
    ("text", "size"), [("512.50M", 512.5 * 2**20), ("17.25G", 17.25 * 2**30), ("4.69T", 4.69 * 2**40)]
)
def test_a_refusal_of_any_size_is_read(as_if, monkeypatch, text, size):
    """XLA prints the largest unit that fits: a batch of 4,096 asks for terabytes."""
    told = f"the total memory required for HLO temporaries ({text}) exceeds available HBM (256.00M)."
    monkeypatch.setattr(programs, "matmul", failing(f"RESOURCE_EXHAUSTED: Ran out of memory on HBM, {told}"))
    row, _ = referee.compiled(Case("matmul", "v5e", weights="bf16"))
    assert (row.temporary, row.room) == (round(size), 2**28)
