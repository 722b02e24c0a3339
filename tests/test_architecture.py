"""The floors of the building, the size of its rooms, and what its formulas may use."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
LIB = ROOT / "lib"
# A module imports only from the ones before it. Modules of later chapters join their floor when they are written.
FLOORS = (
    "units facts elementwise breakdown formats network routing chips mixers variants models families configs bounds server "
    "forward speculation workload queueing serving steady goodput passes batching runs world simulation tables claims curves "
    "drawing figures"
).split()
SOURCES = {path.stem: path.read_text(encoding="utf-8") for path in sorted(LIB.glob("*.py"))}
TREES = {name: ast.parse(text) for name, text in SOURCES.items()}
MIXER = {"params", "flops", "whole", "cache", "read", "write", "core", "ways", "width", "sent"}
STATEFUL = ("batching", "world")
FORMULAS = ("bounds", "forward", "mixers", "variants")


def own(tree):
    """Modules of lib that a module imports, inside functions too."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level:
            found |= {node.module.partition(".")[0]} if node.module else {alias.name for alias in node.names}
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("lib."):
            found.add(node.module.split(".")[1])
    return found


def outside(tree, everywhere):
    """Top-level names of packages that a module imports: at its head, or everywhere."""
    found = set()
    for node in ast.walk(tree) if everywhere else tree.body:
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        if isinstance(node, ast.ImportFrom) and not node.level:
            found.add(node.module.partition(".")[0])
    return found


def test_every_module_has_its_floor():
    """A module that stands on no floor is not in the plan of the building."""
    assert set(SOURCES) - {"__init__", "__main__"} <= set(FLOORS)


@pytest.mark.parametrize("name", [name for name in FLOORS if name in SOURCES])
def test_a_module_imports_from_floors_below(name):
    """Never from its own floor upwards, not even inside a function."""
    below = set(FLOORS[: FLOORS.index(name)])
    assert own(TREES[name]) <= below, f"{name} reaches up to {sorted(own(TREES[name]) - below)}"


@pytest.mark.parametrize("name", SOURCES)
def test_a_module_is_read_in_one_sitting(name):
    """At most 250 lines."""
    assert len(SOURCES[name].splitlines()) <= 250


@pytest.mark.parametrize("name", SOURCES)
def test_a_function_fits_on_one_screen(name):
    """At most 50 lines."""
    long = {
        node.name: node.end_lineno - node.lineno + 1
        for node in ast.walk(TREES[name])
        if isinstance(node, ast.FunctionDef) and node.end_lineno - node.lineno >= 50
    }
    assert {} == long


def public(tree):
    """Public functions and classes of a module, and public methods of its public classes."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
            yield node
            if isinstance(node, ast.ClassDef):
                yield from (m for m in node.body if isinstance(m, ast.FunctionDef) and not m.name.startswith("_"))


@pytest.mark.parametrize("name", SOURCES)
def test_what_is_public_says_what_it_is(name):
    """Modules, classes and functions have a docstring. Methods of interchangeable nouns share that of their module
    (mixers) or interface (slice)."""
    assert ast.get_docstring(TREES[name])
    shared = {
        "mixers": MIXER,
        "variants": MIXER,
        "network": {"slice"},
        "models": {"params", "layers"},
    }.get(name, set())
    silent = [node.name for node in public(TREES[name]) if not ast.get_docstring(node) and node.name not in shared]
    assert [] == silent


def test_methods_of_the_mixers_are_documented_once():
    """Every shared method of the mixers stands in the docstring of the module."""
    text = ast.get_docstring(TREES["mixers"])
    assert all(re.search(rf"^  (core\.)?{method}\b", text, re.M) for method in MIXER)


CALLS = {  # what formulas may call beside the functions of lib: no library's arithmetic
    "bounds": {"ValueError", "hasattr", "range"},
    "forward": {"ValueError", "isinstance", "replace", "zip", "sum", "type"},
    "mixers": {"dataclass"},
    "variants": {"dataclass"},
}


@pytest.mark.parametrize("name", FORMULAS)
def test_formulas_use_operators_and_three_helpers(name):
    """No math, no numpy, no min, max, abs or float: what is called by bare name comes from lib or its own module."""
    assert outside(TREES[name], everywhere=True) <= {"dataclasses", "functools"}
    imported = {
        alias.asname or alias.name
        for node in ast.walk(TREES[name])
        if isinstance(node, ast.ImportFrom) and node.level
        for alias in node.names
    }
    defined = {node.name for node in ast.walk(TREES[name]) if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    called = {
        node.func.id for node in ast.walk(TREES[name]) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    }
    assert called - imported - defined <= CALLS[name]


@pytest.mark.parametrize("name", FORMULAS)
def test_formulas_do_not_branch_on_their_numbers(name):
    """Degenerate cases are parameters: an `if` asks for a noun, a plan or None, never compares a size."""
    compared = [ast.unparse(node.test) for node in ast.walk(TREES[name]) if isinstance(node, ast.If | ast.IfExp)]
    ordered = [
        test
        for test in compared
        if any(
            isinstance(op, ast.Lt | ast.LtE | ast.Gt | ast.GtE)
            for node in ast.walk(ast.parse(test))
            if isinstance(node, ast.Compare)
            for op in node.ops
        )
    ]
    assert [] == ordered


def test_only_the_demos_import_jax():
    """And lib never imports its demos."""
    assert [] == [name for name, tree in TREES.items() if {"jax", "jaxlib"} & outside(tree, everywhere=True)]
    assert [] == [name for name, tree in TREES.items() if "demos" in own(tree)]


@pytest.mark.parametrize("name", SOURCES)
def test_heavy_libraries_arrive_when_they_are_needed(name):
    """NumPy, SymPy, matplotlib, widgets: inside the functions that need them, not at the head of a module."""
    assert outside(TREES[name], everywhere=False) <= set(sys.stdlib_module_names)


@pytest.mark.parametrize("name", SOURCES)
def test_classes_are_plain(name):
    """Frozen dataclasses without inheritance; only what a simulation is about changes while it runs."""
    for node in ast.walk(TREES[name]):
        if isinstance(node, ast.ClassDef):
            assert [] == node.bases, f"{node.name} inherits"
            frozen = any("frozen=True" in ast.unparse(d) for d in node.decorator_list)
            assert frozen or name in STATEFUL, f"{node.name} is not frozen"


@pytest.mark.parametrize("name", [name for name in FLOORS[1 : FLOORS.index("tables")] if name in SOURCES])
def test_prefixes_are_spelled_in_units_only(name):
    """1e9, 1024 or 3600 in another module of the model would be a conversion in a second place."""
    spelled = {1e3, 1e6, 1e9, 1e12, 1e15, 1e-3, 1e-6, 1e-9, 1024, 1024**2, 1024**3, 3600}
    numbers = [node.value for node in ast.walk(TREES[name]) if isinstance(node, ast.Constant)]
    assert [] == [x for x in numbers if isinstance(x, int | float) and x in spelled]


REFUSE = """
import sys
HEAVY = {"numpy", "sympy", "matplotlib", "jax", "jaxlib", "scipy", "pandas", "xarray", "IPython", "ipywidgets"}
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in HEAVY:
            raise ImportError(f"{name} is refused here")
sys.meta_path.insert(0, Refuse())
"""
SCALAR = (
    REFUSE
    + """
from lib.bounds import critical_batch, exact_critical_batch, step_time
from lib.chips import chip
from lib.forward import decode_step, prefill
from lib.formats import Precision
from lib.models import kv_bytes, model
from lib.server import Plan, Server, fits, footprint, max_batch
for name, kv in (("llama-3-70b", "heads"), ("deepseek-v3", "batch"), ("gpt-oss-120b", "sequence"),
                 ("qwen3.5-397b-a17b", "heads")):
    server = Server(model(name), chip("ironwood"), Plan(8, kv=kv), Precision("fp8"))
    step = decode_step(server, 64, 8192)
    assert step.value > 0 and step.bound and str(step) and step._repr_html_() and step.serial >= step.value
    assert prefill(server, 1, 8192).value > 0 and max_batch(server, 8192) > 0 and fits(server, 1, 8192)
    assert kv_bytes(server.model, 8192) > 0 and str(footprint(server, 1, 8192))
assert round(critical_batch(chip("v5e")).value) == 241
assert exact_critical_batch(chip("v5e"), 8192, 28672).value > 241
assert step_time(chip("v5e"), 8, 13e9, 6.7e9, 16).value > 0
assert not any(name.partition(".")[0] in HEAVY for name in sys.modules)
print("ok")
"""
)


def run(code):
    """What a fresh interpreter prints, without the user's site and in the root of the repository."""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_importing_lib_loads_the_standard_library_only():
    """Every module that `import lib` adds is its own or Python's."""
    loaded = run(
        "import sys; before = set(sys.modules); import lib; "
        "print(*{name.partition('.')[0] for name in set(sys.modules) - before})"
    )
    assert set(loaded.split()) - {"lib"} <= set(sys.stdlib_module_names)


def test_the_scalar_core_runs_without_numpy():
    """Chips, models, steps, batches and text where NumPy, SymPy, matplotlib and JAX cannot be imported: a browser."""
    assert "ok" == run(SCALAR)


def test_bad_input_is_refused_without_numpy():
    """The check at the door needs no array library for numbers, text or None."""
    assert "ValueError ValueError ValueError ValueError KeyError" == run(
        REFUSE
        + """
from lib.chips import chip
from lib.forward import decode_step
from lib.models import model
from lib.server import Plan, Server
server = Server(model("llama-3-70b"), chip("ironwood"), Plan(8))
def error(f, *x):
    try:
        f(*x)
    except Exception as e:
        return type(e).__name__
print(*[error(decode_step, server, b, 8192) for b in (0, float("nan"), "x", None)], error(chip, "nope"))
"""
    )
