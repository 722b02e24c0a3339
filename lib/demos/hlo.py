"""What a compiled program says of itself: its collectives, the HBM bytes it moves, estimated cycles, and whether it changed.

XLA prints one instruction a line, in computations that call each other. A loop's body stands there once; its trips are read from
the loop's condition. The text is that of XLA for CPU or TPU; counts do not depend on the machine that compiled it.
"""

import hashlib
import re
from dataclasses import dataclass
from math import prod

KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
BITS = {"pred": 8, "token": 0, "opaque": 0}     # of those whose name does not tell
# Instructions that name, group or wait, and move nothing; and those whose traffic is counted where it starts or inside them.
FREE = set("parameter constant tuple get-tuple-element bitcast after-all partition-id replica-id iota opt-barrier while call "
           "call-start call-done async-start async-done copy-done slice-done dynamic-slice-done all-gather-done all-reduce-done "
           "reduce-scatter-done all-to-all-done collective-permute-done".split())


@dataclass(frozen=True)
class Instruction:
    """One line of a computation: its result's type, the operation, the names of its operands, and the attributes after them."""

    name: str
    type: str
    op: str
    operands: tuple
    attributes: str
    root: bool


@dataclass(frozen=True)
class Collective:
    """One collective of `group` devices, and the `bytes` of the whole array that they gather, sum or exchange. A permute passes
    an array of that size from each device to one other."""

    kind: str
    group: int
    bytes: int

    @property
    def wire(self):
        """Bytes that a device sends: (n-1)/n of the array, twice that to sum it for all, an n-th of that to exchange it."""
        if self.kind == "collective-permute":
            return self.bytes
        return self.bytes * (1 - 1 / self.group) * {"all-reduce": 2, "all-to-all": 1 / self.group}.get(self.kind, 1)


def computations(text):
    """({name: instructions of the computation}, name of the entry) of a compiled program's text."""
    found, entry, name = {}, None, None
    for line in text.splitlines():
        if head := re.match(r"(ENTRY )?%?([\w.-]+) \(.*\) -> .*\{$", line):
            name = head[2]
            found[name], entry = [], name if head[1] else entry
        elif name and (parts := re.match(r"\s+(ROOT )?%?([\w.-]+) = (.*)", line)):
            found[name].append(_instruction(bool(parts[1]), parts[2], parts[3]))
    return found, entry


def _instruction(root, name, text):
    end = _closing(text) if text.startswith("(") else text.index(" ")
    op, _, rest = text[end:].strip().partition("(")
    close = _closing("(" + rest) - 1
    operands = re.findall(r"%([\w.-]+)", rest[:close]) or [rest[: close - 1]]
    return Instruction(name, text[:end], op, tuple(operands), rest[close:], root)


def _closing(text):
    """Index after the parenthesis that closes the one at the start."""
    depth = 0
    for i, letter in enumerate(text):
        depth += (letter == "(") - (letter == ")")
        if not depth:
            return i + 1
    raise ValueError(f"parentheses that do not close: {text[:80]}")


def executed(program, name, fused=False, times=1):
    """(instruction, how often it runs) in a computation and what it calls: loops as often as they turn, fusions if `fused`."""
    for each in program[name]:
        if each.op == "conditional":
            raise ValueError(f"which branch {each.name} takes is not known, so nothing after it can be counted")
        yield each, times
        called = dict(re.findall(r"(body|condition|to_apply|calls)=%?([\w.-]+)", each.attributes))
        if each.op == "while":
            yield from executed(program, called["body"], fused, times * _trips(program, called["condition"], each))
        elif each.op in ("call", "call-start", "async-start") or fused and each.op == "fusion":
            yield from executed(program, called.get("to_apply") or called["calls"], fused, times)


def _trips(program, condition, loop):
    """Turns of a loop: said by XLA for CPU, for TPU the number that the counter is compared with."""
    if known := re.search(r'"known_trip_count":\{"n":"(\d+)"', loop.attributes):
        return int(known[1])
    limits = [int(each.operands[0]) for each, _ in executed(program, condition, fused=True)
              if each.op == "constant" and each.type[:5] in ("s32[]", "u32[]")]
    if not limits:
        raise ValueError(f"the loop {loop.name} does not say how often it turns")
    return max(limits)


def arrays(type):
    """(bytes, memory space: 0 is HBM) of each array in a result's type, which may be a tuple."""
    found = re.findall(r"\b([a-z]+)(\d*)(\w*)\[([\d,]*)\](?:\{[^}]*?(?:S\((\d+)\))?\})?", type)
    return [(prod(map(int, filter(None, dims.split(",")))) * int(bits or BITS[letters]) / 8, int(space or 0))
            for letters, bits, _, dims, space in found]


def _results(each):
    """(bytes, memory space) of the arrays that an operation makes, or starts to make: (operands, results, contexts)."""
    if not each.op.endswith("-start") or each.op == "all-reduce-start":
        return arrays(each.type)
    found = arrays(re.sub(r"\b[us]32\[\]", "", each.type))     # contexts are scalars
    return found[:1] if each.op == "copy-start" else found[len(found) // 2 :]


def collectives(text):
    """The `Collective`s that a compiled program runs, one for each time. Raises ValueError for kinds and replica groups that it
    cannot read."""
    program, entry = computations(text)
    found, seen = [], []
    for each, times in executed(program, entry, fused=True):
        kind = each.op.removesuffix("-start")
        if not re.fullmatch(r"(all|reduce-scatter|collective|ragged).*", kind) or kind.endswith("-done"):
            continue
        if kind not in KINDS:
            raise ValueError(f"no formula for {kind}, only for: {', '.join(KINDS)}")
        if "chain_id=" in each.attributes:      # one collective that a TPU runs beside several fusions, printed in each
            one = kind, re.findall(r"channel_id=(\d+)", each.attributes)
            if one in seen:
                continue
            seen.append(one)
        n, sizes = _group(each.attributes), [size for size, _ in _results(each)]
        whole = n if kind in ("reduce-scatter", "all-to-all") else 1    # whose result is an n-th
        found += [Collective(kind, n, round(whole * sum(sizes)))] * times
    return [each for each in found if each.group > 1]


def _group(attributes):
    """Devices in a replica group: the first of a list, the last side of a grid, the product of axes of a mesh; or all senders."""
    if found := re.search(r"source_target_pairs=\{(.*?)\}\}", attributes):
        return len(set(re.findall(r"\d+", found[1])))
    if found := re.search(r"replica_groups=\{\{([\d, ]+)\}", attributes):
        return found[1].count(",") + 1
    if found := re.search(r"replica_groups=\[(?:\d+,)*(\d+)\]<=", attributes):
        return int(found[1])
    if found := re.search(r"replica_groups=mesh\[(.*?)\].*?\{(.*?)\}", attributes):
        sizes, named = dict(re.findall(r"('\w+')=(\d+)", found[1])), re.findall(r"('\w+')(?::\(\d+\)(\d+))?", found[2])
        return prod(int(part or sizes[axis]) for axis, part in named)
    raise ValueError(f"replica groups that cannot be read: {attributes[:200]}")


def hbm_bytes(text):
    """Bytes that a compiled program reads from HBM and writes there, from its text.

    A fusion reads its operands and writes its result once; what is kept on the chip is free; of an array of which only a slice
    is used or replaced, the slice counts. A heuristic: checked on single products, and on layers in a loop on v5e and v6e; not on
    unrolled layers, nor on whole steps on v5p and TPU7x, whose programs move data in ways that it may not know.
    """
    program, entry = computations(text)
    types = {each.name: each.type for lines in program.values() for each in lines}
    return sum(times * (_read(program, each, types) + _written(program, each, types))
               for each, times in executed(program, entry) if each.op not in FREE)


def _hbm(type):
    return sum(size for size, space in arrays(type) if space == 0)


def _read(program, each, types):
    if each.op in ("slice", "dynamic-slice", "gather", "slice-start", "dynamic-slice-start"):   # reads what it makes
        return _results(each)[0][0] if _hbm(types[each.operands[0]]) else 0
    if each.op == "dynamic-update-slice":
        return _hbm(types[each.operands[1]])
    read = dict.fromkeys(each.operands, 0)
    for i, name in enumerate(each.operands):
        read[name] += _used(program, _called(each), i) if each.op == "fusion" else float("inf")
    return sum(min(size, _hbm(types.get(name, ""))) for name, size in read.items())


def _written(program, each, types):
    if each.op == "dynamic-update-slice":
        return arrays(types[each.operands[1]])[0][0] if _hbm(each.type) else 0
    made = sum(size for size, space in _results(each) if space == 0)
    return min(made, _replaced(program, program[_called(each)])) if each.op == "fusion" else made


def _called(fusion):
    return re.search(r"calls=%?([\w.-]+)", fusion.attributes)[1]


def _used(program, name, index):
    """Bytes that a fused computation reads of its parameter of that index: all, unless it takes slices or replaces one."""
    lines = program[name]
    same = {each.name for each in lines if each.op == "parameter" and each.operands == (str(index),)}
    used = 0
    for each in lines:
        at = [i for i, operand in enumerate(each.operands) if operand in same]
        tiled = "output_to_operand_aliasing={{}: (0, {})}" in each.attributes       # anew, in place
        if at == [0] and (tiled or each.op == "bitcast") and not each.root:
            same.add(each.name)
        elif at and each.op in ("slice", "dynamic-slice", "gather"):
            used += arrays(each.type)[0][0]
        elif at and each.op == "fusion":
            used += sum(_used(program, _called(each), i) for i in at)
        elif at and not (each.op == "dynamic-update-slice" and at == [0]):
            return float("inf")
    return used


def _replaced(program, lines, name=None):
    """Bytes that a fused computation writes: of its result, or of each part of it, all or the slice that it replaces in place."""
    named = {each.name: each for each in lines}
    last = named[name] if name else next(each for each in lines if each.root)
    if last.op == "tuple":
        return sum(_replaced(program, lines, part) for part in last.operands)
    if last.op == "bitcast" and last.operands[0] in named:
        return _replaced(program, lines, last.operands[0])
    if last.op == "dynamic-update-slice":
        return arrays(named[last.operands[1]].type)[0][0]
    return _replaced(program, program[_called(last)]) if last.op == "fusion" else _hbm(last.type)


def cycles(text):
    """Cycles that the TPU compiler estimates for a program's instructions, one after another: an opinion, never a time.

    0 where it estimates nothing, as for kernels, or its estimates overflow.
    """
    program, entry = computations(text)
    found = [(re.search(r'"estimated_cycles":"(\d+)"', each.attributes), times) for each, times in executed(program, entry)]
    estimates = [(int(estimate[1]), times) for estimate, times in found if estimate]
    return 0 if any(cycles >= 2**62 for cycles, _ in estimates) else sum(cycles * times for cycles, times in estimates)


def digest(text):
    """Sixteen hexadecimal digits of a program's text without its name and source: equal for the same program."""
    text = re.sub(r"^HloModule \S+", "", text)
    text = re.sub(r"\n(FileNames|FunctionNames|FileLocations|StackFrames)\n(.+\n)*", "", text)
    text = re.sub(r", metadata=\{[^}]*\}", "", text)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
