"""The TPU compiler as referee: programs that it compiled for machines that are not here, and what it said of each.

`recorded` reads lib/data/referee.csv, one row a compilation, and needs neither JAX nor the compiler. With libtpu, which
`make referee` installs in an environment of its own, rows are compiled again and compared: `lib.demos.cases` has the list.
"""

import csv
import os
import re
import time
from collections import Counter
from dataclasses import dataclass, fields, replace
from importlib import metadata, util
from math import prod

import lib
from lib.demos.hlo import Collective
from lib.facts import DATA, known, table

PROGRAMS = ("matmul", "weights", "decode attention", "prefill attention", "experts", "ragged", "step")
# Sizes of the small programs: LLaMA-3-70B's width, FFN and heads, and a rounder width for the knee.
D, F, WIDE = 8192, 28_672, 32_768
HEADS, KV_HEADS, D_HEAD = 64, 8, 128
SMALLEST = {"v4": "v4:2x2x1", "v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2", "ironwood": "tpu7x:2x2x1"}   # slices
# libtpu looks for the machine that it is on, and is told; settings of whoever calls would change programs.
HOST = {"JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1", "TPU_ACCELERATOR_TYPE": "v5litepod-8", "TPU_WORKER_ID": "0",
        "TPU_WORKER_HOSTNAMES": "localhost", "TF_CPP_MIN_LOG_LEVEL": "3", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
SETTINGS = ("LIBTPU_INIT_ARGS", "XLA_FLAGS", "JAX_ENABLE_X64", "JAX_DEFAULT_MATMUL_PRECISION")


@dataclass(frozen=True)
class Case:
    """One program for one slice: `chip` as in lib, `slice` "1" (a device) or the chips along each axis ("2x4").

    `model`, with another number of KV heads if `kv_heads`; `layout` and `cache` as the program reads them; formats by name; batch
    sequences of context tokens. What a program does not use is empty or 0. KeyError for an unknown program or chip.
    """

    program: str
    chip: str
    slice: str = "1"
    model: str = ""
    kv_heads: int = 0
    layout: str = ""
    cache: str = ""
    weights: str = ""
    kv: str = ""
    activations: str = "bf16"
    batch: int = 1
    context: int = 0

    def __post_init__(self):
        known("program", self.program, PROGRAMS)
        known("chip", self.chip, SMALLEST)

    @property
    def name(self):
        """What tells the case from all others: "step/v5e/2x4/llama-2-13b/heads/LSKBH/bf16/bf16/bf16/16/8192"."""
        return "/".join(str(value) for value in vars(self).values() if value)

    @property
    def what(self):
        """Model, formats and slice, for people: "llama-2-13b, 8 KV heads, bf16, v5e 2x4"."""
        heads = f", {self.kv_heads} KV heads" if self.kv_heads else ""
        cache = "" if self.kv in ("", self.weights) else f", {self.kv} cache"
        return f"{self.model}{heads}, {self.weights}{cache}, {self.chip} {self.slice}"

    @property
    def architecture(self):
        """The model as lib describes it."""
        model = lib.model(self.model)
        if not self.kv_heads:
            return model
        blocks = [replace(block, mixer=replace(block.mixer, n_kv_heads=self.kv_heads)) for block in model.blocks]
        return replace(model, blocks=blocks)

    @property
    def devices(self):
        """Devices that the program runs on."""
        return 1 if self.slice == "1" else lib.chip(self.chip).devices * prod(map(int, self.slice.split("x")))

    @property
    def shared(self):
        """How a plan of lib cuts the cache beyond the KV heads."""
        return {"batch": "batch", "automatic": "batch", "sequence": "sequence"}.get(self.layout, "heads")

    @property
    def precision(self):
        """Formats as stored, arithmetic in that of the activations."""
        return lib.Precision(self.weights, self.kv or "bf16", self.activations, self.activations)

    @property
    def server(self):
        """A step's model on its chips as lib describes it."""
        chips = self.devices // lib.chip(self.chip).devices
        return lib.Server(self.architecture, lib.chip(self.chip), lib.Plan(chips, kv=self.shared), self.precision)


@dataclass(frozen=True)
class Row:
    """What the compiler said of a case: whether the program was `accepted`, and counts for one device.

    FLOPs and bytes `accessed` are the compiler's count, in which a loop's body runs once; `hbm` the bytes by ours
    (`hlo.hbm_bytes`); then argument, temporary and peak bytes, `collectives` as "80 all-reduce of 8: 163840 B", estimated cycles,
    and a digest of the text. Of a refused program two numbers are known: `temporary`, the bytes that it asked for, and `room`,
    those that there are. `seconds` is how long compiling took.
    """

    case: Case
    jax: str
    libtpu: str
    accepted: bool
    flops: int = 0
    accessed: int = 0
    hbm: int = 0
    argument: int = 0
    temporary: int = 0
    room: int = 0
    peak: int = 0
    collectives: str = ""
    cycles: int = 0
    text: str = ""
    seconds: float = 0.0

    def sent(self, least=1):
        """{kind: (times, bytes that a device sends in all)} of the collectives that run `least` times or more."""
        found = {}
        for times, kind, group, size in re.findall(r"(\d+) ([a-z-]+) of (\d+): (\d+) B", self.collectives):
            before, wire, times = found.get(kind, (0, 0)), Collective(kind, int(group), int(size)).wire, int(times)
            if times >= least:
                found[kind] = before[0] + times, before[1] + times * wire
        return found


CASE, RESULT = [field.name for field in fields(Case)], [field.name for field in fields(Row)][1:]


def recorded(**wanted):
    """The `Row`s of the record whose case has the wanted fields: recorded(chip="v5e", batch=(16, 17)).

    KeyError for what is no field of a case.
    """
    for name in wanted:
        known("field of a case", name, CASE)
    kinds, found = {field.name: field.type for field in (*fields(Case), *fields(Row)[1:])}, []
    for line in table("referee"):
        values = {name: line[name] == "yes" if kind is bool else kind(line[name] or 0) if kind is not str else line[name]
                  for name, kind in kinds.items()}
        case = Case(**{name: values[name] for name in CASE})
        if all(getattr(case, name) in (value if isinstance(value, tuple) else (value,)) for name, value in wanted.items()):
            found.append(Row(case, **{name: values[name] for name in RESULT}))
    return found


def present():
    """Whether libtpu is installed here, so that `compiled` can work."""
    return util.find_spec("libtpu") is not None


def compiled(case):
    """(`Row`, text of the compiled program) of a case, compiled now.

    RuntimeError without libtpu; errors of the compiler other than a lack of memory pass through.
    """
    if not present():
        raise RuntimeError("libtpu is not installed here; `make referee` installs it in an environment of its own")
    os.environ.update(HOST)
    for name in SETTINGS:
        os.environ.pop(name, None)
    import jax

    jax.config.update("jax_hlo_source_file_canonicalization_regex", ".*/")     # kernels carry the names of their files
    from lib.demos import hlo, programs, step  # which import JAX

    row = Row(case, jax.__version__, metadata.version("libtpu"), accepted=False)
    build = step.build if case.program == "step" else getattr(programs, case.program.replace(" ", "_"))
    function, arguments, overwritten = build(case)
    start = time.perf_counter()
    try:
        done = jax.jit(function, donate_argnums=overwritten).lower(*arguments).compile()
    except jax.errors.JaxRuntimeError as error:
        refusal = re.search(r"RESOURCE_EXHAUSTED.*\((\S+)([KMGT])\) exceeds available HBM \((\S+)([KMGT])\)", str(error))
        if not refusal:
            raise
        asked, room = (round(float(refusal[i]) * 1024 ** (" KMGT".index(refusal[i + 1]))) for i in (1, 3))
        return replace(row, temporary=asked, room=room, seconds=round(time.perf_counter() - start, 1)), ""
    seconds, text, cost, memory = time.perf_counter() - start, done.as_text(), done.cost_analysis(), done.memory_analysis()
    sent = Counter(hlo.collectives(text)).items()
    return replace(
        row, accepted=True, flops=round(cost["flops"]), accessed=round(cost["bytes accessed"]), hbm=round(hlo.hbm_bytes(text)),
        argument=memory.argument_size_in_bytes, temporary=memory.temp_size_in_bytes, peak=memory.peak_memory_in_bytes,
        collectives="; ".join(f"{times} {each.kind} of {each.group}: {each.bytes} B" for each, times in sent),
        cycles=hlo.cycles(text), text=hlo.digest(text), seconds=round(seconds, 1)), text


def record(cases):
    """Compile the cases that the record lacks, add a row each as it comes, and put the rows in the order of the cases.

    Stopping and starting again goes on where it was. Cases that are no longer asked for leave the record.
    """
    table.cache_clear()
    path = DATA / "referee.csv"
    rows = {row.case: row for row in recorded()} if path.exists() else {}
    for case in cases:
        if case not in rows:
            rows[case], _ = compiled(case)
            print(f"{rows[case].seconds:5.1f} s  {'accepted' if rows[case].accepted else 'refused '}  {case.name}", flush=True)
            _write(path, rows.values())
    _write(path, [rows[case] for case in cases])


def _write(path, rows):
    header, whole = [*CASE, *RESULT, "source"], path.with_suffix(".new")       # never half of a record
    with open(whole, "w", newline="", encoding="utf-8") as file:
        lines = csv.writer(file, lineterminator="\n")
        lines.writerow(header)
        for row in rows:
            values = {**vars(row.case), **vars(row), "accepted": "yes" if row.accepted else "no", "source": "AOT"}
            lines.writerow([values[name] or "" for name in header])
    whole.replace(path)


def differences(old, new):
    """What a new compilation of a case says otherwise: [(field, recorded, now), ...], times and versions aside."""
    return [(name, getattr(old, name), getattr(new, name)) for name in RESULT
            if name not in ("jax", "libtpu", "seconds") and getattr(old, name) != getattr(new, name)]
