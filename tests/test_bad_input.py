"""Bad input is refused at the door, in the words of the domain, with nothing half done (issue 2, section 6)."""

from dataclasses import replace

import numpy as np
import pytest
from strategies import server

import lib.chips
import lib.models
from lib import facts
from lib.bounds import critical_batch, step_time
from lib.chips import chip, chip_names
from lib.formats import Precision
from lib.forward import decode_step, forward, prefill
from lib.models import kv_bytes, model, model_names
from lib.network import all_reduce
from lib.server import Plan, Server, fits, footprint, max_batch

ONE = server("llama-3-70b", "ironwood", 8)
BAD = {
    "zero": 0,
    "negative": -1,
    "NaN": float("nan"),
    "infinite": float("inf"),
    "minus infinity": -float("inf"),
    "text": "64",
    "None": None,
    "a truth value": True,
    "bytes": b"64",
    "one zero of three": np.array([1, 0, 2]),
    "one NaN of three": np.array([1.0, float("nan"), 2.0]),
    "one infinite of three": [1.0, float("inf"), 2.0],
    "one negative of three": (1, -1, 2),
    "an empty array": np.array([]),
    "an empty list": [],
    "a zero in 0-d": np.array(0),
    "an array of text": np.array(["64"]),
    "an array of objects": np.array([1, None]),
    "an array of truths": np.array([True]),
    "complex": 1j,
    "a dict": {},
    "a set": {64},
    "an object": object(),
    "a ragged list": [[1], [1, 2]],
    "beyond floats": 10**400,
}
bad = pytest.mark.parametrize("x", BAD.values(), ids=BAD)
TAKES_BATCH = {
    "decode_step": lambda x: decode_step(ONE, x, 8192),
    "prefill": lambda x: prefill(ONE, x, 8192),
    "forward": lambda x: forward(ONE, x, 5, 8192),
    "footprint": lambda x: footprint(ONE, x, 8192),
    "fits": lambda x: fits(ONE, x, 8192),
    "step_time": lambda x: step_time(ONE.chip, 8, 70e9, 1e9, x),
}
TAKES_CONTEXT = {
    "decode_step": lambda x: decode_step(ONE, 64, x),
    "footprint": lambda x: footprint(ONE, 64, x),
    "fits": lambda x: fits(ONE, 64, x),
    "max_batch": lambda x: max_batch(ONE, x),
    "kv_bytes": lambda x: kv_bytes(ONE.model, x),
}


@bad
@pytest.mark.parametrize("name", TAKES_BATCH)
def test_a_batch_that_is_none(name, x):
    """ValueError that names the batch, from every function that takes one."""
    with pytest.raises(ValueError, match="batch"):
        TAKES_BATCH[name](x)


@bad
@pytest.mark.parametrize("name", TAKES_CONTEXT)
def test_a_context_that_is_none(name, x):
    """ValueError that names the context, from every function that takes one."""
    with pytest.raises(ValueError, match="context"):
        TAKES_CONTEXT[name](x)


@bad
def test_new_tokens_and_prompts_that_are_none(x):
    """ValueError; a prompt is named as one or as new tokens."""
    with pytest.raises(ValueError, match="new"):
        forward(ONE, 1, x, 100)
    with pytest.raises(ValueError, match="prompt|new"):
        prefill(ONE, 1, x)


@bad
@pytest.mark.parametrize("field", ["tensor", "expert", "pipeline", "data", "page"])
def test_a_count_of_chips_that_is_none(field, x):
    """ValueError that names the field, for numbers, text, arrays and objects."""
    with pytest.raises(ValueError, match=field):
        Plan(**{field: x})


@pytest.mark.parametrize("x", [1.5, 0.5, np.array([8, 16]), [8], np.float64(2.5)], ids=repr)
@pytest.mark.parametrize("field", ["expert", "pipeline", "data", "page"])
def test_chips_are_whole_and_one_plan_is_one_number(field, x):
    """Half a chip, or several plans in one, is ValueError."""
    with pytest.raises(ValueError, match=field):
        Plan(**{field: x})


@pytest.mark.parametrize(
    "x", [1.5, np.array([8, 1.5]), np.array([0, 8]), np.array([8, -2]), np.array([np.nan]), np.array([])]
)
def test_tensor_ways_are_whole_everywhere(x):
    """The one axis that takes an array, for sweeps: each entry is looked at."""
    with pytest.raises(ValueError, match="tensor"):
        Plan(tensor=x)


@bad
def test_chips_of_a_closed_form_that_are_none(x):
    """Also where a plan is only a number."""
    with pytest.raises(ValueError, match="n "):
        step_time(ONE.chip, x, 70e9, 1e9, 64)


@pytest.mark.parametrize("x", [0, -1, 2.5, float("nan"), float("inf"), "8", None, True, 10**6, [8]], ids=repr)
def test_chips_of_a_collective_that_are_none(x):
    """A collective takes a whole number that its network has."""
    with pytest.raises(ValueError, match="chips"):
        all_reduce(1e6, x, ONE.chip.network)


@pytest.mark.parametrize("kind", [np.int8, np.int32, np.int64, np.uint16])
def test_whole_numbers_of_numpy_are_whole_numbers(kind):
    """For batch, context and tensor: the same answer as Python's."""
    taken = Server(ONE.model, ONE.chip, Plan(kind(8)), ONE.precision)
    assert decode_step(ONE, 64, 100).value == float(decode_step(taken, kind(64), kind(100)).value)
    assert max_batch(ONE, 100) == max_batch(taken, kind(100))
    assert type(taken.plan.tensor) is int and taken == ONE


@pytest.mark.parametrize("name", ["v9", "", None, "v5e ", 5])
def test_an_unknown_chip(name):
    """KeyError lists every known one."""
    with pytest.raises(KeyError, match="unknown chip") as error:
        chip(name)
    assert all(known in str(error.value) for known in chip_names())


@pytest.mark.parametrize("name", ["gpt-5", "", None, "llama", 70])
def test_an_unknown_model(name):
    """KeyError lists every known one, aliases too."""
    with pytest.raises(KeyError, match="unknown model.*llama-3-70b") as error:
        model(name)
    assert all(known in str(error.value) for known in model_names())


@pytest.mark.parametrize("name", [["v5e"], {"v5e": 1}], ids=repr)
def test_a_name_that_is_no_text(name):
    """A list of names is no name: KeyError or ValueError that says so, not a complaint about hashing."""
    for f in (chip, model):
        with pytest.raises((KeyError, ValueError), match="unknown|name"):
            f(name)
    with pytest.raises((KeyError, ValueError), match="format"):
        Precision(weights=name)


def test_an_unknown_format():
    """KeyError lists the formats, wherever one is named."""
    for f in (
        lambda: Precision("int5"),
        lambda: Precision(kv="int5"),
        lambda: kv_bytes(ONE.model, 1, "int5"),
        lambda: critical_batch(ONE.chip, "int5"),
        lambda: step_time(ONE.chip, 8, 1e9, 1e9, 1, "int5"),
    ):
        with pytest.raises(KeyError, match="unknown format 'int5'; known: bf16.*mxfp4"):
            f()


@pytest.mark.parametrize("name", ["v5e", "h100", "ironwood", "mi300x"])
@pytest.mark.parametrize("math", ["fp4", "int4", "int8", "fp8"])
def test_math_that_the_chip_does_not_multiply(name, math):
    """ValueError at the door of the server, naming what the chip multiplies; native formats pass."""
    if getattr(chip(name), math) is None:
        with pytest.raises(ValueError, match=f"{name} does not multiply {math}, only: bf16"):
            server("llama-3-8b", name, math=math)
    else:
        assert math == server("llama-3-8b", name, math=math).precision.math


@pytest.mark.parametrize(
    ("name", "tensor", "why"),
    [
        ("llama-3-70b", 3, "64 query heads"),
        ("llama-3-70b", 128, "64 query heads"),
        ("llama-2-13b", 16, "40 query heads"),
        ("gpt-oss-120b", 128, "64 query heads"),
        ("mixtral-8x7b", 64, "32 query heads"),
    ],
)
def test_a_tensor_plan_that_the_heads_cannot_take(name, tensor, why):
    """ValueError with the heads there are."""
    with pytest.raises(ValueError, match=f"{name} cannot be cut {tensor} ways.*{why}"):
        server(name, "ironwood", tensor)


def test_a_tensor_plan_that_the_ffn_width_cannot_take():
    """Llama-2-7B: 32 heads can be cut 32 ways, 11,008 = 2^8 x 43 too; gpt-oss: 2,880 = 2^6 x 45 cannot be cut 128 ways;
    a width of 100 cannot be cut 8 ways."""
    from dataclasses import replace

    one = model("llama-3-8b")
    narrow = replace(one, blocks=(replace(one.blocks[0], ffn=replace(one.blocks[0].ffn, d_ff=100)),))
    with pytest.raises(ValueError, match="cannot be cut 8 ways.*width 100"):
        Server(narrow, ONE.chip, Plan(8))
    assert server("llama-2-7b", "ironwood", 32).plan.tensor == 32


def test_shared_experts_are_cut_too():
    """A shared expert of width 100 cannot be cut 8 ways even if the routed ones can: the message shows a width."""
    from dataclasses import replace

    one = model("deepseek-v3")
    moe = one.blocks[1]
    odd = replace(one, blocks=(one.blocks[0], replace(moe, ffn=replace(moe.ffn, d_shared=100))))
    with pytest.raises(ValueError, match="cannot be cut 8 ways.*'moe'.*width.*100"):
        Server(odd, ONE.chip, Plan(8))


@pytest.mark.parametrize("kv", ["none", "", None, 1, "HEADS"])
def test_a_cut_of_the_cache_that_does_not_exist(kv):
    """The message lists the three."""
    with pytest.raises(ValueError, match="kv must be one of heads, batch, sequence"):
        Plan(kv=kv)


def test_a_network_too_small_for_the_plan():
    """64 ways on eight cards that only share a host."""
    with pytest.raises(ValueError, match="are 64 chips, and l40s's network joins 8"):
        server("llama-3-70b", "l40s", 64)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A copy-less data folder: facts read from a temporary place, caches forgotten before and after."""
    monkeypatch.setattr(facts, "DATA", tmp_path)
    for cached in (facts.table, facts.nested, lib.chips._read, lib.models._read):
        cached.cache_clear()
    yield tmp_path
    for cached in (facts.table, facts.nested, lib.chips._read, lib.models._read):
        cached.cache_clear()


def test_a_chip_row_without_source(folder):
    """The chip does not load; the message names file and line."""
    (folder / "chips.csv").write_text(
        "chip,field,value,unit,role,source,confidence,note\nx1,bf16,100,TFLOP/s,primary,,high,\n"
    )
    with pytest.raises(ValueError, match="chips.csv line 2 has no source"):
        chip("x1")


def test_a_model_entry_without_source(folder):
    """The model does not load; the message names the entry."""
    (folder / "models.toml").write_text('["m"]\nd_model = 8\nvocab = 8\ntied = false\nblocks = []\n')
    with pytest.raises(ValueError, match=r"models.toml \[m\] has no source"):
        model("m")


def test_a_chip_with_a_field_missing(folder):
    """ValueError names the field."""
    (folder / "chips.csv").write_text(
        "chip,field,value,unit,role,source,confidence,note\n"
        "x1,bf16,100,TFLOP/s,primary,me,high,\nx1,network,switch,,primary,me,high,\n"
    )
    with pytest.raises(ValueError, match="'x1' lacks hbm_bytes, hbm_bandwidth"):
        chip("x1")


@pytest.mark.parametrize("kept", [-1, 2**34, float("nan"), float("inf"), "1", None])
def test_a_chip_cannot_keep_what_it_has_not(kept):
    """What system and compiler keep of a v5e is less than its 16 GiB and not negative."""
    with pytest.raises(ValueError, match="hbm_reserved of v5e|hbm_reserved leaves of the HBM of v5e"):
        replace(chip("v5e"), hbm_reserved=kept)


def test_nothing_half_done():
    """A refused input leaves no trace: the next call gives what it gave before."""
    before = decode_step(ONE, 64, 8192).value
    for x in BAD.values():
        with pytest.raises(ValueError):
            decode_step(ONE, x, 8192)
    assert before == decode_step(ONE, 64, 8192).value


def test_an_overflow_is_no_answer():
    """Batches that make the time infinite are refused or give a finite time; nothing returns infinity or NaN."""
    with pytest.raises(ValueError, match="batch|context"):
        decode_step(ONE, 1e308, 1e308)


@pytest.mark.parametrize("logits", [0, -1, 6, float("nan"), "1"])
def test_logits_of_tokens_that_are_not_there(logits):
    """Logits are computed for one to all of the new tokens."""
    with pytest.raises((ValueError, TypeError), match="logits"):
        forward(server("llama-3-8b", "v5e", 1), 1, 5, 100, logits=logits)
