"""What the referee is asked: the cases of lib/data/referee.csv, in its order, and the command line that has them compiled."""

import argparse
import random
import subprocess
import sys
from difflib import get_close_matches
from pathlib import Path
from shutil import which

from lib.demos import referee
from lib.demos.referee import Case

ROOT = Path(__file__).parents[2]
POWERS = tuple(2**n for n in range(13))


def knees():
    """The matrix product at growing batches: where do the chips' critical batches lie, and what does a format buy?"""
    for chip, formats in dict(v4=("bf16", "int8"), v5e=("bf16", "int8", "fp8"), v5p=("bf16", "int8", "fp8"),
                              v6e=("bf16", "int8", "fp8"), ironwood=("bf16", "int8", "fp8")).items():
        for each in formats:
            for batch in POWERS:
                yield Case("matmul", chip, weights=each, activations=each, batch=batch)


def formats():
    """What is stored narrow: weights that are converted to bf16, a cache that is."""
    for chip in ("v5e", "v5p", "v6e", "ironwood"):
        for each in ("bf16", "int8", "fp8", "int4", "fp4", "int2"):
            yield Case("weights", chip, weights=each, batch=16)
        for each in ("bf16", "int8", "fp8", "int4"):
            yield Case("decode attention", chip, kv=each, batch=16, context=8192)


def prompts():
    """Attention of a prompt to itself, with scores written out and in a kernel that keeps them on the chip."""
    for chip in ("v5e", "v5p", "v6e", "ironwood"):
        for layout in ("naive", "flash"):
            for context in (1024, 2048, 4096, 8192):
                yield Case("prefill attention", chip, layout=layout, context=context)


def steps():
    """Whole decode steps: what fits, what is read, what is sent."""
    def step(chip, slice, model, batches, context=8192, layout="heads", cache="LSKBH", weights="bf16", kv=None, kv_heads=0):
        for batch in batches:
            yield Case("step", chip, slice, model, kv_heads, layout, cache, weights, kv or weights, batch=batch, context=context)

    yield from step("v5e", "2x4", "llama-2-13b", (8, 16, 17, 32))
    yield from step("v5e", "2x4", "llama-2-13b", (16, 32, 64, 80, 81, 83, 88, 96), kv_heads=8)
    for cache in ("LKSBH", "LBKSH", "LSKBH scanned", "LBKSH scanned"):
        yield from step("v5e", "2x4", "llama-2-13b", (16,), cache=cache)
    yield from step("v5e", "2x4", "llama-2-13b", (16,), layout="fsdp")
    yield from step("v5e", "2x4", "llama-2-13b", (16,), 2048, layout="fsdp")
    yield from step("v5e", "2x4", "llama-2-13b", (16,), 2048)
    yield from step("v5e", "2x4", "llama-3-70b", (32, 48, 49, 56), weights="int8")
    yield from step("v5e", "4x4", "llama-3-70b", (64, 128, 144, 148, 160), layout="batch", weights="int8")
    yield from step("v5e", "4x4", "llama-3-70b", (128,), layout="sequence", weights="int8")
    yield from step("v5e", "4x4", "llama-3-70b", (128,), layout="automatic", weights="int8")
    for cache in ("LKBSH", "LSKBH"):
        yield from step("v5e", "4x8", "llama-3-70b", (128,), layout="batch", cache=cache)
    yield from step("v5e", "4x8", "llama-3-70b", (128,), layout="sequence")
    yield from step("v5e", "4x8", "llama-3-70b", (128,), layout="automatic")
    yield from step("v5e", "2x2", "llama-3.1-8b", (16, 64))
    yield from step("v5p", "2x2x1", "llama-3-70b", (32, 64))
    yield from step("v5p", "2x2x2", "llama-3-70b", (56, 64), 32_768)
    yield from step("v5p", "2x2x4", "llama-3.1-405b", (64,), layout="batch")
    yield from step("v6e", "2x4", "llama-3-70b", (16, 64), weights="int8")
    yield from step("v6e", "2x4", "llama-2-13b", (16, 32, 36, 37))
    for cache in ("LKBSH", "LSKBH"):
        yield from step("ironwood", "2x2x2", "llama-3-70b", (64,), 32_768, "batch", cache)
    yield from step("ironwood", "2x2x2", "llama-3-70b", (96, 120, 126, 128, 136), 32_768, "batch", "LKBSH")
    for cache in ("LSKBH", "LKBSH"):
        yield from step("ironwood", "2x2x2", "llama-3-70b", (64,), 32_768, "batch", cache, "fp8")
    yield from step("ironwood", "2x2x2", "llama-3-70b", (128, 256, 272, 280, 286, 288, 320), 32_768, "batch", "LSKBH", "fp8")
    for cache in ("LSKBH", "LKBSH"):
        yield from step("ironwood", "2x2x2", "llama-3-70b", (64,), 32_768, "batch", cache, kv="fp8")
    yield from step("ironwood", "2x2x2", "llama-3-70b", (128, 192, 208, 224, 240, 256), 32_768, "batch", "LSKBH", kv="fp8")
    yield from step("ironwood", "2x2x1", "llama-3-70b", (16, 64))
    yield from step("ironwood", "2x2x2", "llama-3.1-405b", (32,), 8192, "batch", "LSKBH", "fp8")
    yield from step("v4", "2x2x1", "llama-2-13b", (8, 16))


def mixtures():
    """A layer whose experts are spread over a slice, and one on a single device."""
    for chip, slice, model, batches in (("v5e", "2x4", "mixtral-8x7b", (8, 64)), ("v5e", "4x4", "qwen3-235b-a22b", (64,)),
                                        ("v5p", "2x2x2", "mixtral-8x7b", (64,)), ("v6e", "2x4", "mixtral-8x7b", (64,)),
                                        ("ironwood", "2x2x2", "deepseek-v3", (64, 256))):
        for batch in batches:
            yield Case("experts", chip, slice, model, weights="bf16", batch=batch)
    for chip, model, layout, batch in (("v5e", "mixtral-8x7b", "ragged", 8), ("v5e", "mixtral-8x7b", "ragged", 64),
                                       ("v5e", "mixtral-8x7b", "dense", 64), ("v5e", "qwen3-30b-a3b", "ragged", 64),
                                       ("ironwood", "mixtral-8x7b", "ragged", 64)):
        yield Case("ragged", chip, model=model, layout=layout, weights="bf16", batch=batch)


def cases():
    """All of them."""
    return [*knees(), *formats(), *prompts(), *steps(), *mixtures()]


def chosen(rows, count, seed):
    """So many of the rows that compile in seconds, by chance: the same for the same seed."""
    quick = [row for row in rows if row.seconds <= 20]
    return random.Random(seed).sample(quick, min(count, len(quick)))


def check(rows):
    """Compile the rows again and print what each says now; the number of those that say something else."""
    changed = 0
    for row in rows:
        now, _ = referee.compiled(row.case)
        found = referee.differences(row, now)
        changed += bool(found)
        print(f"{now.seconds:5.1f} s  {'DIFFERENT' if found else 'same     '}  {row.case.name}", flush=True)
        for name, old, new in found:
            print(f"         {name}: recorded {old}, now {new}")
        if found and (row.jax, row.libtpu) != (now.jax, now.libtpu):
            print(f"         recorded with jax {row.jax} and libtpu {row.libtpu}, here are {now.jax} and {now.libtpu}")
    return changed


def live(row):
    """What the compiler says of a recorded row now, as text: where libtpu is installed here, or where `make referee` put it."""
    own, recorded = ROOT / ".venv-tpu", f"Recorded with jax {row.jax} and libtpu {row.libtpu}: {row.case.name}"
    python = sys.executable if referee.present() else own / "bin" / "python"
    if not (referee.present() or (own / ".ready").exists()):
        return f"libtpu is not installed here (`make referee` installs it), so nothing was compiled.\n{recorded}"
    done = subprocess.run([python, "-m", "lib.demos.cases", row.case.name], cwd=ROOT, capture_output=True, text=True)
    if row.case.name not in done.stdout:
        return f"Nothing was compiled: {(done.stderr.strip() or 'no word').splitlines()[-1]}\n{recorded}"
    return done.stdout


def commit():
    """The commit that is checked out, as hexadecimal digits; none, and a word about it, outside of a checkout."""
    found = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True) if which("git") else None
    if found is None or found.returncode:
        print("no commit to choose by: the same rows as always outside of a checkout")
        return ""
    return found.stdout.strip()


def main():
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m lib.demos.cases", description="Compile recorded rows again and compare.")
    parser.add_argument("names", nargs="*", help="rows to check, by name; by default the commit chooses")
    parser.add_argument("--rows", type=int, default=10, help="how many are chosen (10)")
    parser.add_argument("--record", action="store_true", help="compile what the record lacks instead, and write it down")
    asked = parser.parse_args()
    if asked.rows < 1 or asked.record and asked.names:
        parser.error("--rows is 1 or more, and --record takes no names: delete the rows that are to be recorded anew")
    if asked.record:
        referee.record(cases())
        return 0
    rows = referee.recorded()
    named = {row.case.name: row for row in rows}
    if strange := [name for name in asked.names if name not in named]:
        parser.error(f"no row {strange[0]!r}; near it: {', '.join(get_close_matches(strange[0], named)) or 'none'}")
    rows = [named[name] for name in asked.names] or chosen(rows, asked.rows, commit())
    changed, whole = check(rows), len(referee.recorded())
    print(f"{len(rows)} of {whole} rows of lib/data/referee.csv compiled again, {changed} of them changed")
    return int(changed > 0)


if __name__ == "__main__":
    sys.exit(main())
