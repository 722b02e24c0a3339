"""Bad input is refused at the door, in the words of the domain, with nothing half done (issue 2, section 6)."""

from dataclasses import replace

import numpy as np
import pytest
from strategies import server

import lib.chips
import lib.models
from lib import facts
from lib.bounds import critical_batch, dequantization_limit, evicted_tokens, server_ratio, step_time
from lib.chips import chip, chip_names
from lib.formats import Precision
from lib.forward import decode_step, forward, mixed, prefill
from lib.goodput import at_rate, break_even_price, cost, goodput
from lib.models import FFN, kv_bytes, model, model_names
from lib.network import Switch, all_reduce
from lib.queueing import crowd, wait, wait_chance, wait_quantile
from lib.routing import expected_max, experts_touched, imbalance, popularity
from lib.server import Plan, Server, fits, footprint, max_batch, pool
from lib.serving import Service, colocated, disaggregated, transfer
from lib.speculation import (
    best_k,
    break_even_batch,
    expected_tokens,
    free_drafts,
    implied_acceptance,
    speculate,
    speculative_speedup,
    speedup,
)
from lib.steady import tpot, ttft
from lib.workload import Lengths, Requests, Workload, backlog, bursty, lognormal, poisson, trace

ONE, DRAFT = server("llama-3-70b", "ironwood", 8), server("llama-3-8b", "ironwood", 8)
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
    "free_drafts": lambda x: free_drafts(ONE.chip, x),
    "mixed": lambda x: mixed(ONE, x, 8192, 512, 0),
    "server_ratio": lambda x: server_ratio(0.9, 0.02, x, 512),
    "evicted_tokens": lambda x: evicted_tokens(x, 8192, 512),
    "speculate": lambda x: speculate(ONE, DRAFT, 4, x, 8192),
    "speedup": lambda x: speedup(ONE, None, 0.8, 4, x, 8192),
    "best_k": lambda x: best_k(ONE, DRAFT, 0.8, x, 8192),
}
TAKES_CONTEXT = {
    "decode_step": lambda x: decode_step(ONE, 64, x),
    "footprint": lambda x: footprint(ONE, 64, x),
    "fits": lambda x: fits(ONE, 64, x),
    "max_batch": lambda x: max_batch(ONE, x),
    "kv_bytes": lambda x: kv_bytes(ONE.model, x),
    "mixed": lambda x: mixed(ONE, 64, x, 512, 0),
    "speculate": lambda x: speculate(ONE, DRAFT, 4, 64, x),
    "speedup": lambda x: speedup(ONE, None, 0.8, 4, 64, x),
    "best_k": lambda x: best_k(ONE, DRAFT, 0.8, 1, x),
    "break_even_batch": lambda x: break_even_batch(ONE, DRAFT, 0.8, 4, x, most=2),
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


# Routing and speculation

POSITIVE = {  # input: what takes it, and may not be zero
    "experts of experts_touched": lambda x: experts_touched(x, 1, 4),
    "top_k of experts_touched": lambda x: experts_touched(8, x, 4),
    "experts of popularity": lambda x: popularity(x, 1, 0.5),
    "top_k of popularity": lambda x: popularity(8, x, 0.5),
    "tokens of implied_acceptance": lambda x: implied_acceptance(x, 4),
    "k of implied_acceptance": lambda x: implied_acceptance(1.5, x),
    "verify of speculative_speedup": lambda x: speculative_speedup(0.5, 4, 0.1, x),
}
NOT_NEGATIVE = {
    "tokens of experts_touched": lambda x: experts_touched(8, 2, x),
    "tokens of FFN.touched": lambda x: FFN(8, 8, 2).touched(x),
    "tokens of FFN.touched with chances": lambda x: FFN(8, 4, 2, chances=(0.5,) * 4).touched(x),
    "skew of popularity": lambda x: popularity(8, 2, x),
    "acceptance of expected_tokens": lambda x: expected_tokens(x, 4),
    "acceptance of speculative_speedup": lambda x: speculative_speedup(x, 4, 0.1),
    "acceptance of speedup": lambda x: speedup(ONE, None, x, 4, 64, 8192),
    "acceptance of best_k": lambda x: best_k(ONE, None, x, 1, 8192, most=2),
    "acceptance of break_even_batch": lambda x: break_even_batch(ONE, None, x, 4, 8192, most=2),
    "k of expected_tokens": lambda x: expected_tokens(0.5, x),
    "k of speculative_speedup": lambda x: speculative_speedup(0.5, x, 0.1),
    "k of speculate": lambda x: speculate(ONE, DRAFT, x, 64, 8192),
    "k of speedup": lambda x: speedup(ONE, DRAFT, 0.8, x, 64, 8192),
    "k of break_even_batch": lambda x: break_even_batch(ONE, DRAFT, 0.8, x, 8192, most=2),
    "draft of speculative_speedup": lambda x: speculative_speedup(0.5, 4, x),
}


@bad
@pytest.mark.parametrize("what", POSITIVE)
def test_an_input_of_routing_or_speculation_that_is_none(what, x):
    """ValueError that names the input, for zero too."""
    with pytest.raises(ValueError, match=rf"\b{what.split()[0]}\b"):
        POSITIVE[what](x)


@pytest.mark.parametrize("name", [name for name in BAD if "zero" not in name])
@pytest.mark.parametrize("what", NOT_NEGATIVE)
def test_an_input_of_routing_or_speculation_that_may_be_zero(what, name):
    """ValueError that names the input, for everything but zero."""
    with pytest.raises(ValueError, match={"k": "k |proposals"}.get(what.split()[0], what.split()[0])):
        NOT_NEGATIVE[what](BAD[name])


@pytest.mark.parametrize("acceptance", [1.2, 1 + 1e-9, [0.5, 1.2], np.array([[2.0]]), 80])
def test_more_is_accepted_than_proposed(acceptance):
    """A chance is one at most, and 80 is no percentage."""
    for f in (
        lambda a: expected_tokens(a, 4),
        lambda a: speculative_speedup(a, 4, 0.1),
        lambda a: speedup(ONE, DRAFT, a, 4, 64, 8192),
    ):
        with pytest.raises(ValueError, match="acceptance .* at most 1"):
            f(acceptance)


@pytest.mark.parametrize(("tokens", "k"), [(5, 4), (5.5, 4), (0.99, 4), (2, 1), (1e30, 1e29)])
def test_tokens_that_a_round_cannot_yield(tokens, k):
    """Between 1 and fewer than k + 1; the message says so."""
    with pytest.raises(ValueError, match="yields 1 token at least and fewer than"):
        implied_acceptance(tokens, k)


@pytest.mark.parametrize("x", [[1.5], [1.5, 2.0], np.array([1.5, 2.0])], ids=repr)
def test_one_acceptance_is_no_answer_for_a_sweep(x):
    """Bisection takes numbers: ValueError that names the input, not a complaint about truth values or lists."""
    with pytest.raises(ValueError, match="tokens"):
        implied_acceptance(x, 4)
    with pytest.raises(ValueError, match="k "):
        implied_acceptance(1.2, x)


@pytest.mark.parametrize("k", [1.5, [4], np.array([4, 5]), (2, 3)], ids=repr)
def test_a_round_of_several_sizes(k):
    """k is one whole number."""
    for f in (
        lambda: speculate(ONE, DRAFT, k, 64, 8192),
        lambda: speculate(ONE, None, k, 64, 8192),
        lambda: speedup(ONE, DRAFT, 0.8, k, 64, 8192),
        lambda: break_even_batch(ONE, DRAFT, 0.8, k, 8192, most=2),
    ):
        with pytest.raises(ValueError, match="whole number of proposals"):
            f()


DRAFTS = {
    "another chip": server("llama-3-8b", "h100", 8),
    "a derated chip": Server(DRAFT.model, DRAFT.chip.derate(memory=0.9), Plan(8)),
    "more chips": server("llama-3-8b", "ironwood", 16),
    "more chips by replicas": Server(DRAFT.model, DRAFT.chip, Plan(8, data=2)),
    "a model": DRAFT.model,
    "a name": "llama-3-8b",
    "a list": [DRAFT],
    "False": False,
    "zero": 0,
}


@pytest.mark.parametrize("draft", DRAFTS.values(), ids=DRAFTS)
def test_a_draft_that_its_target_cannot_have(draft):
    """The two take turns on the same chips."""
    for f in (
        lambda: speculate(ONE, draft, 4, 64, 8192),
        lambda: speedup(ONE, draft, 0.8, 4, 64, 8192),
        lambda: best_k(ONE, draft, 0.8, 64, 8192),
        lambda: break_even_batch(ONE, draft, 0.8, 4, 8192, most=2),
    ):
        with pytest.raises(ValueError, match="a Server on at most the 8 ironwood chips of its target"):
            f()


@pytest.mark.parametrize("target", [None, "llama-3-70b", ONE.model, 0], ids=str)
def test_a_target_that_is_no_server(target):
    """As for `forward`."""
    for draft in (None, DRAFT):
        with pytest.raises(ValueError, match="takes a Server"):
            speculate(target, draft, 4, 64, 8192)


@pytest.mark.parametrize("most", [-1, 1.5, float("nan"), "16", None, True, [4]], ids=repr)
def test_a_limit_that_is_no_whole_number(most):
    """ValueError that names it, from both searches."""
    for f in (
        lambda: best_k(ONE, DRAFT, 0.8, 1, 8192, most=most),
        lambda: break_even_batch(ONE, DRAFT, 0.8, 4, 8192, most=most),
    ):
        with pytest.raises(ValueError, match="most"):
            f()


def test_no_batch_to_try():
    """A search among none: ValueError."""
    with pytest.raises(ValueError, match="most|batch"):
        break_even_batch(ONE, DRAFT, 0.8, 4, 8192, most=0)


@bad
def test_an_imbalance_that_is_none(x):
    """ValueError that names it."""
    with pytest.raises(ValueError, match="imbalance"):
        Plan(expert=4, imbalance=x)


@pytest.mark.parametrize("x", [0.5, 1 - 1e-9, [1.5], np.array([1.5, 2.0])], ids=repr)
def test_an_imbalance_below_the_mean_or_several(x):
    """The busiest group has the mean load at least; one plan has one."""
    with pytest.raises(ValueError, match="imbalance is a number from 1"):
        Plan(expert=4, imbalance=x)


@pytest.mark.parametrize(
    "plan", [dict(expert=4, imbalance=4.5), dict(expert=2, imbalance=100), dict(tensor=8, imbalance=2)], ids=str
)
def test_a_group_cannot_have_more_than_everything(plan):
    """Of 4 groups the busiest has 4 times the mean at most; a single one has the mean."""
    with pytest.raises(ValueError, match="imbalance"):
        Server(model("mixtral-8x7b"), chip("ironwood"), Plan(**plan))


@pytest.mark.parametrize("kind", [np.float32, np.float64, np.int64])
def test_an_imbalance_of_numpy_is_a_number(kind):
    """As for the counts of a plan."""
    assert Plan(expert=4, imbalance=2) == Plan(expert=4, imbalance=kind(2))


CHANCES = {
    "too few": (0.5,) * 3,
    "too many": (0.4,) * 5,
    "none": (),
    "more than top_k": (0.6,) * 4,
    "less than top_k": (0.4,) * 4,
    "nearly": (0.5, 0.5, 0.5, 0.50001),
    "above one": (1.2, 0.8, 0.0, 0.0),
    "below zero": (-0.2, 1.0, 1.0, 0.2),
    "NaN": (float("nan"),) * 4,
    "one NaN": (float("nan"), 0.5, 0.5, 0.5),
    "infinite": (float("inf"), 0.0, 0.0, 0.0),
    "text": ("0.5",) * 4,
    "a text": "abcd",
    "nothing": (None,) * 4,
    "a number": 0.5,
    "zero": 0,
    "True": True,
    "complex": (1j, 1, 1, 0),
    "an array in two dimensions": np.full((4, 4), 0.5),
    "a set": {0.5, 0.4, 0.6, 0.3},
}


@pytest.mark.parametrize("chances", CHANCES.values(), ids=CHANCES)
def test_chances_that_are_none(chances):
    """One for each of four experts, from 0 to 1, that add up to the two of a token: ValueError that says so."""
    with pytest.raises(ValueError, match="chances are 4 numbers from 0 to 1 that add up to 2"):
        FFN(8, 4, 2, chances=chances)


WRONG = "above one|below zero|NaN|one NaN|infinite|text|a text|nothing|a number|zero|True|complex".split("|")


@pytest.mark.parametrize("name", WRONG)
def test_chances_of_an_imbalance_that_are_none(name):
    """The same of the function that places them, which has no top_k to compare with: numbers from 0 to 1."""
    with pytest.raises(ValueError, match="chance|from 0 to 1"):
        imbalance(CHANCES[name], 2, 10)


@pytest.mark.parametrize("chances", [[], [0.0] * 4, [0.1] * 4], ids=str)
def test_an_imbalance_of_experts_that_no_token_uses(chances):
    """They add up to less than one expert a token: ValueError, not a division by zero."""
    with pytest.raises(ValueError, match="chance|experts"):
        imbalance(chances, 2, 10)


@pytest.mark.parametrize("groups", [0, -1, 3, 5, 16, 2.5, float("nan"), "2", None, [2]], ids=repr)
def test_groups_that_do_not_divide_the_experts(groups):
    """ValueError that says what must hold."""
    with pytest.raises(ValueError, match="groups"):
        imbalance([0.25] * 8, groups, 10)


@pytest.mark.parametrize("tokens", [0, -1, 2.5, float("nan"), "10", None, [10]], ids=repr)
def test_tokens_of_an_imbalance_that_are_none(tokens):
    """A whole number of them, one at least."""
    with pytest.raises(ValueError, match="token"):
        imbalance([0.25] * 8, 2, tokens)


@pytest.mark.parametrize("count", [-1, 2.5, 8.0, float("nan"), float("inf"), "8", None, True, [8]], ids=repr)
def test_counts_of_things_that_are_none(count):
    """ValueError with both rules."""
    with pytest.raises(ValueError, match="count must be a whole number"):
        expected_max(count, [0.5, 0.5])


@pytest.mark.parametrize(
    "shares", [[], [1.2], [-0.1], [float("nan")], ["a"], "ab", None, [None], 5, np.full((2, 2), 0.5)], ids=repr
)
def test_shares_that_are_none(shares):
    """ValueError with both rules, for what is no list of numbers too."""
    with pytest.raises(ValueError, match="shares are .* numbers from 0 to 1"):
        expected_max(4, shares)


def test_counts_of_numpy_are_counts():
    """A whole number is one, whatever its width."""
    assert expected_max(4, [0.5, 0.5]) == expected_max(np.int64(4), [0.5, 0.5])


@pytest.mark.parametrize("experts", [8.0, 2.5, [8], np.array([8])], ids=repr)
def test_experts_of_a_popularity_are_counted(experts):
    """One whole number: ValueError that names them."""
    with pytest.raises(ValueError, match="experts"):
        popularity(experts, 2, 0.5)


@pytest.mark.parametrize("what", ["top_k", "skew"])
def test_a_popularity_is_of_one_router(what):
    """An array of skews or of top_k is ValueError that names it."""
    with pytest.raises(ValueError, match=what):
        popularity(**{**dict(experts=8, top_k=2, skew=0.5), what: np.array([1, 2])})


@pytest.mark.parametrize("f", [lambda: experts_touched(8, 9, 4), lambda: popularity(8, 9, 0.5), lambda: FFN(8, 8, 9)])
def test_a_token_uses_more_experts_than_there_are(f):
    """ValueError with the number there is."""
    with pytest.raises(ValueError, match="8"):
        f()


@pytest.mark.parametrize("rate", [0, -1, float("nan"), float("inf"), "6e12", True, []], ids=repr)
def test_a_rate_of_vector_units_that_is_none(rate):
    """ValueError names chip and field."""
    with pytest.raises(ValueError, match="vector of v5e"):
        replace(chip("v5e"), vector=rate)


def test_weights_that_nobody_unpacks():
    """KeyError lists the formats; the rate of H100's vector units is not known."""
    with pytest.raises(KeyError, match="unknown format 'int5'; known: bf16"):
        dequantization_limit(chip("v5e"), "int5")
    with pytest.raises(ValueError, match="how fast the vector units of h100 are is not known"):
        dequantization_limit(chip("h100"))


# Serving

LOAD = Workload(8192, 512, 1.0)
TOGETHER, APART = colocated(ONE, LOAD), disaggregated(ONE, ONE, LOAD)
NUMBER = {  # one number, positive; what takes it
    "prefill of server_ratio": lambda x: server_ratio(x, 0.02, 32, 512),
    "step of server_ratio": lambda x: server_ratio(0.9, x, 32, 512),
    "output of server_ratio": lambda x: server_ratio(0.9, 0.02, 32, x),
    "prompt of evicted_tokens": lambda x: evicted_tokens(32, x, 512),
    "output of evicted_tokens": lambda x: evicted_tokens(32, 8192, x),
    "new of mixed": lambda x: mixed(ONE, 64, 8192, x, 0),
    "rate of wait": lambda x: wait(x, 0.1),
    "service of wait": lambda x: wait(0.1, x),
    "rate of wait_chance": lambda x: wait_chance(x, 0.1),
    "servers of wait": lambda x: wait(0.1, 0.1, x),
    "share of wait_quantile": lambda x: wait_quantile(x, 0.1, 0.1),
    "rate of crowd": lambda x: crowd(x, [2.0, 3.0]),
    "rate of Workload": lambda x: Workload(8192, 512, x),
    "prompt|length of Workload": lambda x: Workload(x, 512, 1.0),
    "output|length of Workload": lambda x: Workload(8192, x, 1.0),
    "length of Lengths": lambda x: Lengths((100, x)),
    "mean of lognormal": lambda x: lognormal(x, 1.0),
    "variation of lognormal": lambda x: lognormal(100, x),
    "points of lognormal": lambda x: lognormal(100, 1.0, x),
    "count of poisson": lambda x: poisson(LOAD, x),
    "count of bursty": lambda x: bursty(LOAD, x),
    "count of backlog": lambda x: backlog(LOAD, x),
    "servers of colocated": lambda x: colocated(ONE, LOAD, x),
    "servers of disaggregated": lambda x: disaggregated(ONE, ONE, LOAD, (1, x)),
    "slots of colocated": lambda x: colocated(ONE, LOAD, slots=x),
    "slots of disaggregated": lambda x: disaggregated(ONE, ONE, LOAD, slots=x),
    "context|prompt of transfer": lambda x: transfer(APART, x),
    "rate of at_rate": lambda x: at_rate(APART, x),
    "first of goodput": lambda x: goodput(APART, x, 0.1),
    "each of goodput": lambda x: goodput(APART, 1.0, x),
    "share of goodput": lambda x: goodput(APART, 1.0, 0.1, x),
    "share of ttft": lambda x: ttft(APART, x),
    "each of break_even_price": lambda x: break_even_price(APART, x),
}
DEFAULTS = ("slots of colocated", "slots of disaggregated", "share of ttft")  # None stands for one
SINGLE = (
    "rate of Workload",
    "prompt|length of Workload",
    "output|length of Workload",
    "length of Lengths",
    "mean of lognormal",
    "variation of lognormal",
    "points of lognormal",
    "count of poisson",
    "servers of colocated",
    "servers of disaggregated",
    "slots of colocated",
    "rate of at_rate",
)


@pytest.mark.parametrize(
    ("what", "name"), [(what, name) for what in NUMBER for name in BAD if name != "None" or what not in DEFAULTS]
)
def test_an_input_of_serving_that_is_none(what, name):
    """ValueError that names the input: zero, negative, text, truth values, NaN, arrays with a bad entry, beyond floats."""
    with pytest.raises(ValueError, match=rf"\b({what.split()[0]})"):
        NUMBER[what](BAD[name])


@pytest.mark.parametrize("x", [np.array([1, 2]), [1, 2], np.array([1])], ids=repr)
@pytest.mark.parametrize("what", SINGLE)
def test_an_input_of_serving_that_is_several(what, x):
    """One service has one of each: ValueError for an array of good numbers, of one too."""
    with pytest.raises(ValueError):
        NUMBER[what](x)


@pytest.mark.parametrize("shares", [[0.5, 0.9], np.array([0.5, 0.9])], ids=repr)
@pytest.mark.parametrize(
    "f",
    [lambda x: wait_quantile(x, 0.1, 0.1), lambda x: ttft(APART, x), lambda x: goodput(APART, 1.0, 0.1, x)],
    ids=["wait_quantile", "ttft", "goodput"],
)
def test_a_share_is_one_number(f, shares):
    """ValueError for several, since what waits is looked at one share at a time."""
    with pytest.raises(ValueError):
        f(shares)


@pytest.mark.parametrize("name", [name for name in BAD if "zero" not in name])
@pytest.mark.parametrize(
    ("what", "f"),
    [
        ("cached", lambda x: Workload(8192, 512, 1.0, x)),
        ("cached", lambda x: mixed(ONE, 64, 8192, 512, x)),
        ("variation", lambda x: wait(0.1, 0.1, 1, x)),
        ("arrival", lambda x: Requests(x, 5, 5)),
        ("seed", lambda x: poisson(LOAD, 5, x)),
    ],
)
def test_an_input_of_serving_that_may_be_zero(what, f, name):
    """ValueError that names the input, for everything but zero; NumPy says what a ragged list is."""
    with pytest.raises(ValueError, match=f"{what}|inhomogeneous"):
        f(BAD[name])


@pytest.mark.parametrize("cached", [1, 1.0, 1.5, 50])
def test_a_prompt_cannot_be_there_whole(cached):
    """The last token is always read: a share below 1, not per cent."""
    with pytest.raises(ValueError, match=f"cached is the share .* below 1; got {cached}"):
        Workload(100, 10, 1.0, cached)


@pytest.mark.parametrize("tokens", [1.0, 512.5, np.float64(512), "512", 2**31, 10**30], ids=repr)
@pytest.mark.parametrize("f", [lambda n: Workload(n, 10, 1.0), lambda n: Workload(10, n, 1.0), lambda n: Lengths((n,))])
def test_tokens_are_counted(f, tokens):
    """Whole numbers up to 2^30; half a token, and more than any memory holds, is ValueError."""
    with pytest.raises(ValueError, match="whole"):
        f(tokens)


HISTOGRAMS = {
    "nothing": ((), ()),
    "a number": (5, ()),
    "None": (None, ()),
    "a text": ("12", ()),
    "too few chances": ((1, 2), (1.0,)),
    "too many chances": ((1,), (0.5, 0.5)),
    "a sum above 1": ((1, 2), (0.5, 0.6)),
    "a sum below 1": ((1, 2), (0.5, 0.4999)),
    "a negative chance": ((1, 2), (-0.5, 1.5)),
    "a NaN": ((1, 2), (float("nan"), 1.0)),
    "an infinite chance": ((1, 2), (float("inf"), 0.0)),
    "chances in text": ((1, 2), ("0.5", "0.5")),
    "no chances at all": ((1, 2), None),
    "a chance that is a list": ((1, 2), ([0.5], [0.5])),
    "a chance that is an array": ((1, 2), (np.array([0.5]), np.array([0.5]))),
    "a truth": ((1, 2), (True, 0.0)),
    "a length of 0": ((0, 2), ()),
    "half a token": ((1.5, 2), ()),
}


@pytest.mark.parametrize("name", HISTOGRAMS)
def test_lengths_that_are_none(name):
    """ValueError, and never a histogram that cannot be hashed."""
    with pytest.raises(ValueError, match="length|chance"):
        Lengths(*HISTOGRAMS[name])


REQUESTS = {
    "no requests": ([], 5, 5, 0),
    "out of order": ([1.0, 0.5], 5, 5, 0),
    "in two dimensions": ([[0.0, 1.0]], 5, 5, 0),
    "before time 0": ([-1.0], 5, 5, 0),
    "a NaN": ([float("nan")], 5, 5, 0),
    "an infinite arrival": ([float("inf")], 5, 5, 0),
    "half a token": ([0.0], 5.5, 5, 0),
    "an empty prompt": ([0.0], 0, 5, 0),
    "an empty answer": ([0.0], 5, 0, 0),
    "a negative answer": ([0.0], 5, -1, 0),
    "all of it cached": ([0.0], 5, 5, 5),
    "more than it cached": ([0.0, 1.0], [5, 9], 5, [0, 10]),
    "text": (["0"], 5, 5, 0),
    "prompts in text": ([0.0], ["5"], 5, 0),
    "None": (None, 5, 5, 0),
    "no prompt": ([0.0], None, 5, 0),
    "truths": ([0.0], True, 5, 0),
    "fewer prompts than arrivals": ([0.0, 1.0, 2.0], [5, 5], 5, 0),
    "more tokens than there are integers": ([0.0], 1e20, 5, 0),
}


@pytest.mark.parametrize("name", REQUESTS)
def test_requests_that_are_none(name):
    """ValueError, and no warning before it."""
    with pytest.raises(ValueError):
        Requests(*REQUESTS[name])


@pytest.mark.parametrize("variation", [1e-200, 1e-160, 1e200])
def test_a_variation_beyond_floats(variation):
    """Its inverse square is no float: ValueError, or the even gaps that it stands for; no OverflowError, no NaN."""
    try:
        arrivals = bursty(LOAD, 10, 0, variation).arrival
    except ValueError:
        return
    assert np.isfinite(arrivals).all() and len(arrivals) == 10


HEAD = "arrival,prompt,output,cached\n"
TRACES = {  # text of a trace, and what the message says
    "nothing": ("", "line 1: the columns of a trace are arrival, prompt, output, cached .*got nothing"),
    "another head": ("a,b,c\n0,5,5\n", "line 1: .*got a, b, c"),
    "another order": ("prompt,arrival,output\n5,0,5\n", "line 1: .*got prompt, arrival, output"),
    "semicolons": ("arrival;prompt;output\n0;5;5\n", "line 1: "),
    "no requests": (HEAD, "line 2: a trace has at least one request"),
    "a value too few": (HEAD + "0,5,5,0\n1,5,5\n", "line 3: 3 values under 4 columns"),
    "a value too many": ("arrival,prompt,output\n0,5,5,0\n", "line 2: 4 values under 3 columns"),
    "an empty value": (HEAD + "0,5,,0\n", "line 2: output is a whole number of tokens from 1 to 2.30; got ''"),
    "text": (HEAD + "0,five,5,0\n", "line 2: prompt is a whole number of tokens from 1 to 2.30; got 'five'"),
    "half a token": (HEAD + "0,5.5,5,0\n", "line 2: prompt is a whole number"),
    "an empty prompt": (HEAD + "0,0,5,0\n", "line 2: prompt is a whole number of tokens from 1 to 2.30; got '0'"),
    "an empty answer": (HEAD + "0,5,0,0\n", "line 2: output is a whole number of tokens from 1 to 2.30; got '0'"),
    "a negative prompt": (HEAD + "0,-5,5,0\n", "line 2: prompt is"),
    "negative cached": (HEAD + "0,5,5,-1\n", "line 2: cached is a whole number of tokens from 0 to 2.30; got '-1'"),
    "all cached": (HEAD + "0,5,5,0\n1,5,5,5\n", "line 3: .*cached < prompt"),
    "before time 0": (HEAD + "-1,5,5,0\n", "line 2: arrival is a time in seconds, not negative; got '-1'"),
    "a time in text": (HEAD + "noon,5,5,0\n", "line 2: arrival is a time"),
    "NaN": (HEAD + "nan,5,5,0\n", "line 2: arrival is a time in seconds, not negative; got 'nan'"),
    "infinity": (HEAD + "0,5,5,0\n\ninf,5,5,0\n", "line 4: arrival is a time in seconds"),
    "a time beyond all": (HEAD + "1e300,5,5,0\n", "line 2: arrival"),
    "out of order": (HEAD + "1,5,5,0\n0.5,5,5,0\n", "line 3: 0.5, 5, 5, 0: an arrival is not before the last one"),
    "a huge prompt": (HEAD + "0," + "9" * 30 + ",5,0\n", "line 2: prompt"),
    "a prompt beyond floats": (HEAD + "0," + "9" * 400 + ",5,0\n", "line 2: prompt"),
    "a prompt beyond text": (HEAD + "0," + "9" * 5000 + ",5,0\n", "line 2: prompt"),
    "a truth": (HEAD + "0,True,5,0\n", "line 2: prompt is a whole number"),
}


@pytest.mark.parametrize("name", TRACES)
def test_a_malformed_trace_is_named_with_its_line(name, tmp_path):
    """ValueError with file and line, whatever is wrong with it."""
    text, why = TRACES[name]
    (tmp_path / "requests.csv").write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=rf"requests\.csv {why}"):
        trace(tmp_path / "requests.csv")


# Services

SERVICES = {  # what is asked for, and what the message says
    "no server": (lambda: colocated(None, LOAD), "prefill of a service is a Server, got None"),
    "no decode server": (lambda: disaggregated(ONE, "v5e", LOAD), "decode of a service is a Server, got 'v5e'"),
    "no workload": (lambda: colocated(ONE, (8192, 512)), "workload of a service is a Workload, got"),
    "a sweep": (lambda: colocated(server("llama-3-8b", "v5e", np.array([1, 8])), LOAD), "neither an array nor a letter"),
    "models that differ": (lambda: disaggregated(ONE, DRAFT, LOAD), "one model, got llama-3-70b and llama-3-8b"),
    "an unknown policy": (
        lambda: colocated(ONE, LOAD, 1, "fifo"),
        "policy must be one of prefill first, decode first, chunked, got 'fifo'",
    ),
    "no policy": (lambda: colocated(ONE, LOAD, 1, None), "policy must be one of"),
    "apart on the same chips": (lambda: colocated(ONE, LOAD, 1, "apart"), "policy must be one of"),
    "a budget without chunks": (lambda: colocated(ONE, LOAD, 1, "prefill first", 512), "other policies none; got 512"),
    "chunks without a budget": (lambda: colocated(ONE, LOAD, 1, "chunked", None, 64), "more tokens than its 64 slots"),
    "a budget of the slots": (lambda: colocated(ONE, LOAD, 1, "chunked", 64, 64), "more tokens than .* slots.*got 64"),
    "half a budget": (lambda: colocated(ONE, LOAD, 1, "chunked", 512.5, 64), "budget must be a whole number"),
    "a budget in text": (lambda: colocated(ONE, LOAD, 1, "chunked", "512", 64), "budget must be a whole number"),
    "a true budget": (lambda: colocated(ONE, LOAD, 1, "chunked", True, 64), "budget must be a whole number"),
    "a negative budget": (lambda: colocated(ONE, LOAD, 1, "chunked", -512, 64), "budget must be a whole number"),
    "too many slots": (lambda: colocated(ONE, LOAD, slots=10**6), "does not fit: 1000000 sequences .* at most 5"),
    "half a slot": (lambda: colocated(ONE, LOAD, slots=64.0), "slots must be a whole number"),
    "two pools in one": (lambda: colocated(ONE, LOAD, (3, 1)), "servers must be a whole number"),
    "one pool of two": (lambda: disaggregated(ONE, ONE, LOAD, 3), "servers are two counts"),
    "a pool too many": (lambda: disaggregated(ONE, ONE, LOAD, (1, 1, 1)), "servers are two counts"),
    "pools in text": (lambda: disaggregated(ONE, ONE, LOAD, "31"), "servers must be a whole number"),
    "an empty pool": (lambda: disaggregated(ONE, ONE, LOAD, (3, 0)), "servers must be finite and positive"),
    "an unknown link": (
        lambda: disaggregated(ONE, ONE, LOAD, link="ici"),
        "link must be dcn, network or a Switch, got 'ici'",
    ),
    "no link": (lambda: disaggregated(ONE, ONE, LOAD, link=None), "link must be dcn, network or a Switch, got None"),
    "a number of bytes": (lambda: disaggregated(ONE, ONE, LOAD, link=1e9), "link must be dcn, network or a Switch"),
    "an unknown network": (
        lambda: disaggregated(*[server("llama-3-70b", "tpu8i", 8)] * 2, LOAD),
        "no network between domains of tpu8i is known",
    ),
    "a domain too small": (
        lambda: disaggregated(*[server("llama-3-70b", "h100", 8)] * 2, LOAD, link="network"),
        "h100 and h100 share no network of 16 chips",
    ),
    "chips that differ": (
        lambda: disaggregated(ONE, server("llama-3-70b", "v6e", 8), LOAD, link="network"),
        "ironwood and v6e share no network of 16 chips",
    ),
    "perhaps streamed": (lambda: disaggregated(ONE, ONE, LOAD, streamed="yes"), "streamed is True or False.*'yes'"),
    "a link of one chip": (lambda: disaggregated(ONE, ONE, LOAD, link=Switch(1e9, 1e-5, 1)), "chips"),
    "weights that do not fit": (lambda: colocated(server("llama-3-70b", "v5e", 8), LOAD), "does not fit"),
}


@pytest.mark.parametrize("name", SERVICES)
def test_a_service_that_is_none(name):
    """ValueError in the words of the domain."""
    make, why = SERVICES[name]
    with pytest.raises(ValueError, match=why):
        make()


@pytest.mark.parametrize("kind", [np.int8, np.int64, np.uint16])
def test_counts_of_numpy_make_services(kind):
    """The same ones: servers, slots, budget."""
    assert colocated(ONE, LOAD, 3, "chunked", 99, 64) == colocated(ONE, LOAD, kind(3), "chunked", kind(99), kind(64))
    assert APART == disaggregated(ONE, ONE, LOAD, (kind(1), kind(1)))
    assert isinstance(hash(disaggregated(ONE, ONE, LOAD, [kind(1), 1])), int)


@pytest.mark.parametrize("load", [1.3, 13])
def test_a_rate_above_the_capacity_is_refused_at_once(load):
    """Instead of a wait that grows without end: "unstable: load 1.3 of capacity"."""
    from lib.steady import capacity

    for one in (TOGETHER, APART):
        loaded = at_rate(one, load * capacity(one).value)
        for f in (tpot, ttft, lambda s: ttft(s, 0.9)):
            with pytest.raises(ValueError, match=f"unstable: load {load} of capacity"):
                f(loaded)
        assert goodput(loaded, 60, 1).value < capacity(one).value  # the rate of the workload is not asked


def test_prices_that_nobody_knows():
    """Ironwood has none: ValueError that says how to give one."""
    with pytest.raises(ValueError, match="no price is known of ironwood: give prices="):
        cost(TOGETHER)


def test_a_pool_of_several_plans():
    """A pool is about one server: ValueError for a sweep."""
    with pytest.raises(ValueError, match="a pool is that of one plan"):
        pool(Server(ONE.model, ONE.chip, Plan(np.array([4, 8]))))


def test_a_service_leaves_nothing_half_done():
    """What is refused changes nothing: the same service answers as before."""
    before = ttft(APART).value
    for make, _ in SERVICES.values():
        with pytest.raises(ValueError):
            make()
    assert before == ttft(APART).value and isinstance(APART, Service)
