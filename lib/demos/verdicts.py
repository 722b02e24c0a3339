"""What the TPU compiler counted beside what the cost model says, and the reason where they differ by more than 5 %.

`verdicts(row)` is the comparison that the referee's page shows and the tests assert. Rows are recorded: no compiler is needed.
"""

from collections import Counter
from dataclasses import dataclass, replace

import lib
from lib.demos import referee
from lib.demos.hlo import KINDS
from lib.demos.referee import D_HEAD, HEADS, KV_HEADS, WIDE, D, F
from lib.formats import format
from lib.server import weights

TRUSTED = ("v5e", "v6e")    # chips for whose larger programs our count of HBM bytes was checked (lib.demos.hlo)

VECTOR = "one row is multiplied by the vector unit, whose count includes the conversion of each weight"
UNPACKED = "the count charges 4-bit and narrower values as they are unpacked, though temporary memory is 0"
MOVED = "the activations are charged five times: their way onto the chip and into another tiling counts too"
SQUARE = "all pairs of tokens are multiplied; the model counts the causal half"
AGAIN = "all pairs of tokens, and the scores twice"
PART = "a part of the cache is copied through HBM, which temporary memory confirms"
WRITTEN = "scores are written to HBM and read back"
COPIED = "a layer's keys or values are written to HBM once more, and read again, before grouped queries attend"
EVERY = "every expert computes every token, and most results weigh nothing"
BORDER = "a kernel is charged with all experts, of which it reads those that the router names"
STATIC = "shapes are fixed before the routing is known: room for every token from every device to every other"


@dataclass(frozen=True)
class Verdict:
    """One quantity of a compilation: the compiler's number, the model's, and `why` they may differ.

    A reason says what it makes of the model's number: from `least` to `most`, which are equal where it says so exactly.
    """

    row: referee.Row
    quantity: str
    compiler: float
    model: float
    why: str = ""
    least: float = 0.0
    most: float = 0.0

    @property
    def ratio(self):
        """Compiler over model; 1 is agreement."""
        return self.compiler / self.model

    @property
    def agrees(self):
        """Whether they are within 5 %."""
        return abs(self.ratio - 1) <= 0.05

    @property
    def explained(self):
        """Whether the reason, where one is needed, gives the compiler's number within 5 %."""
        return self.agrees or bool(self.why) and 0.95 * self.least <= self.compiler <= 1.05 * self.most


def verdicts(row):
    """The `Verdict`s on a row that was accepted: a list, empty for one that was refused."""
    kinds = {"matmul": _product, "weights": _product, "decode attention": _decode, "prefill attention": _prefill,
             "experts": _experts, "ragged": _ragged, "step": _step}
    return list(kinds[row.case.program](row)) if row.accepted else []


def by_device(case):
    """A step's server with each device as a chip of its own: the compiler knows no others."""
    chip, n = lib.chip(case.chip), lib.chip(case.chip).devices
    peaks = {name: getattr(chip, name) / n for name in lib.formats.HARDWARE if getattr(chip, name)}
    part = replace(chip, devices=1, hbm_bytes=chip.hbm_bytes / n, hbm_reserved=chip.hbm_reserved / n, dcn=None,
                   hbm_bandwidth=chip.hbm_bandwidth / n, network=lib.network.Switch(1, 0, case.devices), **peaks)
    plan = lib.Plan(expert=case.devices) if case.program == "experts" else lib.Plan(case.devices, kv=case.shared)
    return lib.Server(case.architecture, part, plan, case.precision)


def held(case):
    """Bytes of weights and caches that the model puts on one device in a step."""
    return lib.footprint(by_device(case), case.batch, case.context).value


def sent(server, batch):
    """{kind: bytes that a chip sends in a decode step} in the model: its seconds on a network of 1 B/s without latency."""
    network = lib.network.Switch(1, 0, server.plan.chips)
    found, nodes = Counter(), [lib.decode_step(replace(server, chip=replace(server.chip, network=network, dcn=None)), batch, 1)]
    for node in nodes:
        kind = node.name.rpartition(" ")[2]
        if kind in KINDS:                   # and none of its parts: an all-reduce has two more inside
            found[kind] += node.value
        else:
            nodes += node.parts
    return dict(+found)


def _product(row):
    case = row.case
    rows, columns = case.batch, WIDE if case.program == "matmul" else F
    stored, given = format(case.weights).bytes, format(case.activations).bytes
    x, matrix, product = rows * D * given, D * columns * stored, 2 * rows * columns
    flops, moved = 2 * rows * D * columns, x + matrix + product
    yield Verdict(row, "FLOPs", row.flops, flops, *(VECTOR, 1.5 * flops, 1.5 * flops) if rows == 1 else ())
    yield Verdict(row, "argument bytes", row.argument, x + matrix)
    yield Verdict(row, "HBM bytes", row.hbm, moved)
    why, counted = (UNPACKED, moved + 4 * matrix) if stored < 1 else (MOVED, moved + 4 * x)
    yield Verdict(row, "bytes accessed", row.accessed, moved, why, counted, counted)


def _decode(row):
    case = row.case
    query = 2 * case.batch * HEADS * D_HEAD
    cache = 2 * case.batch * KV_HEADS * D_HEAD * case.context * format(case.kv).bytes
    yield Verdict(row, "argument bytes", row.argument, query + cache)
    if case.chip in TRUSTED:
        moved = 2 * query + cache
        yield Verdict(row, "HBM bytes", row.hbm, moved, PART, moved, moved + 2 * cache * (row.temporary > 0))


def _prefill(row):
    case = row.case
    attention = lib.GQA(8, 8, D_HEAD)
    causal = case.batch * attention.flops(case.context, 0)
    yield Verdict(row, "FLOPs", row.flops, causal, *(AGAIN, 3 * causal, 3 * causal) if row.flops > 2.5 * causal
                  else (SQUARE, 2 * causal, 2 * causal))
    if case.layout == "naive" and case.chip in TRUSTED:     # what a kernel reads, nobody but its author knows
        once = 4 * case.batch * 8 * case.context * D_HEAD * format(case.activations).bytes
        scores = 4 * case.batch * 8 * case.context**2           # of which there may be four arrays, besides sums
        yield Verdict(row, "HBM bytes", row.hbm, once, *(WRITTEN, once + 2 * scores, once + 9 * scores) if row.temporary else ())


def _experts(row):
    case, server = row.case, by_device(row.case)
    ffn, width, n = server.model.blocks[-1].ffn, server.model.d_model, case.devices
    stored = 2 * width * (ffn.n_experts * ffn.matrices * ffn.d_ff / n + ffn.n_experts + case.batch / n)
    yield Verdict(row, "argument bytes", row.argument, stored)
    layers = sum(block.layers for block in server.model.blocks if block.ffn.n_experts > 1)
    room = 2 * (n - 1) * case.batch / n * 2 * width             # of a device, for all of its tokens to go to each other, and back
    yield Verdict(row, "all-to-all bytes", row.sent()["all-to-all"][1], sent(server, case.batch)["all-to-all"] / layers,
                  STATIC, room, room)


def _ragged(row):
    case, model = row.case, row.case.architecture
    ffn, width, tokens = model.blocks[-1].ffn, model.d_model, case.batch
    router, expert = width * ffn.n_experts, ffn.expert(width)
    stored = format(case.weights).bytes * (ffn.n_experts * expert + router) + 2 * tokens * width
    yield Verdict(row, "argument bytes", row.argument, stored)
    every = 2 * tokens * (ffn.n_experts * expert + router)
    yield Verdict(row, "FLOPs", row.flops, 2 * tokens * (ffn.top_k * expert + router),
                  *(EVERY, every, every) if case.layout == "dense" else ())
    if case.chip in TRUSTED:
        idle = 0 if case.layout == "dense" else format(case.weights).bytes * (ffn.n_experts - ffn.touched(tokens)) * expert
        moved = stored + 2 * tokens * width
        yield Verdict(row, "HBM bytes", row.hbm, moved - idle, *(() if case.layout == "dense" else (BORDER, moved, moved)))


def _step(row):
    case, server = row.case, by_device(row.case)
    stored = held(case)
    yield Verdict(row, "argument bytes", row.argument, stored)
    if case.layout == "fsdp":
        [block], width = server.model.blocks, server.model.d_model
        matrices = format(case.weights).bytes * block.layers * (block.mixer.params(width) + block.ffn.params(width))
        yield Verdict(row, "all-gather bytes", row.sent(block.layers)["all-gather"][1], matrices * (1 - 1 / case.devices))
    if case.layout in ("heads", "batch", "sequence"):
        if case.chip in TRUSTED:
            table = format(case.weights).bytes * server.model.vocab * server.model.d_model / case.devices
            moved, keys = stored - table, (stored - weights(server).value) / 2
            whole = row.hbm > moved + keys
            yield Verdict(row, "HBM bytes", row.hbm, moved, *(COPIED, moved + 2 * keys, moved + 4 * keys) if whole
                          else (PART, moved, moved + keys))
        for kind, size in sent(server, case.batch).items():
            yield Verdict(row, f"{kind} bytes", row.sent(server.model.layers)[kind][1], size)
