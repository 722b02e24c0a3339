"""The serving engine: tokens against plain decoding, times against a pencil and the simulator, bytes, two processes."""

import sys
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import psutil
import pytest

import lib
from lib.demos import handover, replica, sharded, trained, transformer
from lib.demos.engine import Passes, Request, Slots, clock, one_mesh, two_meshes

PROMPTS, NEW = (28, 33, 25, 31, 25, 14, 28, 25), (6, 1, 9, 3, 9, 20, 6, 9)  # 34 in all: few shapes to compile
PASSES, BURSTS = Passes(read=2.37, decode=1.0, send=0.29), [0.0, 0.13, 0.29, 0.31, 21.17, 21.19, 21.37, 21.59]
PATTERNS = {
    "steady": ([4.01 * i for i in range(8)], PASSES),
    "bursts": (BURSTS, PASSES),
    "at random": ([1.71, 1.93, 6.11, 7.01, 7.43, 12.57, 25.87, 26.03], PASSES),
    "a slow link": ([0.0, 0.03, 0.05, 0.07, 0.11, 0.13, 0.17, 0.19], Passes(read=0.37, decode=1.0, send=0.61)),
}
SECONDS = "start", "prefilled", "moved", "first", "end"

pytestmark = pytest.mark.skipif(
    jax.default_backend() != "cpu", reason="exact tokens need f32, meshes eight host devices"
)


def requests(arrivals=BURSTS, prompts=PROMPTS, new=NEW):
    """Passages of a text that the model has not seen."""
    text = trained.held_out().tolist()
    starts = range(0, 12_000 * len(prompts), 12_000)
    cut = [tuple(text[start : start + length]) for start, length in zip(starts, prompts, strict=True)]
    return [Request(*each) for each in zip(arrivals, cut, new, strict=True)]


def left():
    """Processes of a handover that still run."""
    ours = ("lib.demos.handover", "time.sleep(300)")
    return [each for each in psutil.Process().children() if any(word in " ".join(each.cmdline()) for word in ours)]


@pytest.fixture(scope="module")
def one():
    """All slots on one device."""
    return replica.place(*trained.load("target"), sharded.devices()[:1])


@pytest.fixture(scope="module")
def two():
    """A replica that reads prompts on two devices, and one that decodes on four others, two rows of two."""
    devices = sharded.devices()
    return tuple(replica.place(*trained.load("target"), *each) for each in ((devices[:2],), (devices[4:], 2)))


@pytest.fixture(scope="module")
def runs(one, two):
    """Every pattern of arrivals, served both ways."""
    asked = {name: (requests(arrivals), passes) for name, (arrivals, passes) in PATTERNS.items()}
    return {name: (one_mesh(one, *each), two_meshes(*two, *each)) for name, each in asked.items()}


@pytest.fixture(scope="module")
def alone():
    """Each request decoded by itself, by the functions of the decode chapter."""
    shape, params = trained.load("target")
    made = [transformer.generate(params, shape, jnp.asarray([each.prompt], jnp.int32), each.new) for each in requests()]
    return [tuple(each[0].tolist()) for each in made]


def test_no_token_depends_on_company_or_mesh(runs, alone):
    """Whenever requests arrive, on one mesh or two, their tokens are those of a request served alone."""
    assert len({*sum(alone, ())}) > 15, "a model that repeats itself would pass any test of tokens"
    for pattern in runs.values():
        for run in pattern:
            assert [each.tokens for each in run.served] == alone


def test_no_token_hangs_on_a_rounding_error(alone):
    """Each token leads the second by far more than two programs differ: 0.01, against 0.00005."""
    shape, params = trained.load("target")
    for request, tokens in zip(requests(), alone, strict=True):
        text = jnp.asarray([[*request.prompt, *tokens]], jnp.int32)
        exact = np.asarray(transformer.full_forward(params, shape, text))[0]
        cached, _ = transformer.extend(params, shape, transformer.empty_cache(shape, 1, text.size), text, 0)
        assert abs(cached[0] - exact).max() < 5e-5
        second, first = np.sort(exact[len(request.prompt) - 1 : -1])[:, -2:].T
        assert (first - second).min() > 0.01


def test_every_request_is_served_once_and_no_slot_twice(runs):
    """One prompt and as many steps as tokens each; a step serves exactly those who are there, never more than four."""
    for run in sum(runs.values(), ()):
        assert [len(each.tokens) for each in run.served] == list(NEW)
        assert sum(each.decoding == 0 for each in run.steps) == len(NEW)
        assert sum(run.decoding) == sum(NEW)
        assert max(run.decoding) <= 4
        for each in run.steps:
            there = sum(served.moved <= each.start and each.end <= served.end for served in run.served)
            assert each.decoding in (0, there)
        for server in {each.server for each in run.steps}:
            passes = [each for each in run.steps if each.server == server]
            assert all(before.end <= after.start for before, after in pairwise(passes))


# Three requests on two slots, or on one. Reading takes 3, a step 1.75, sending 0.5: drawn with a pencil.
BY_HAND = {
    ("one mesh", 2): ([(0, 3, 3, 7.75, 12.5), (3, 6, 6, 7.75, 7.75), (7.75, 10.75, 10.75, 12.5, 16)], [2, 2, 1, 1]),
    ("one mesh", 1): ([(0, 3, 3, 4.75, 6.5), (6.5, 9.5, 9.5, 11.25, 11.25), (11.25, 14.25, 14.25, 16, 19.5)], [1] * 6),
    ("two meshes", 2): ([(0, 3, 3.5, 5.25, 7), (3, 6, 6.5, 8.75, 8.75), (6, 9, 9.5, 11.25, 14.75)], [1] * 6),
    ("two meshes", 1): ([(0, 3, 3.5, 5.25, 7), (3, 6, 7.5, 9.25, 9.25), (6, 9, 9.75, 11.5, 15)], [1] * 6),
}


@pytest.mark.parametrize(("how", "slots"), BY_HAND)
def test_a_schedule_drawn_with_a_pencil(how, slots):
    """When each request starts, is read, has moved, gets its first and its last token, and how many each step serves."""
    shape, params = trained.load("draft")
    each = replica.place(shape, params, sharded.devices()[:1], slots=slots)
    asked = requests([0.0, 0.2, 0.4], (5, 4, 3), (2, 1, 3))
    passes = Passes(3, 1.75, 0.5)
    run = one_mesh(each, asked, passes) if how == "one mesh" else two_meshes(each, each, asked, passes)
    times, decoding = BY_HAND[how, slots]
    assert [tuple(getattr(served, name) for name in SECONDS) for served in run.served] == times
    assert run.decoding == decoding


@pytest.mark.parametrize("pattern", PATTERNS)
def test_the_simulator_plays_the_engine(runs, pattern):
    """The same passes at the same times with as many sequences in them, and every request at the same times."""
    wire = lib.Switch(1e9, 0.0, 8)
    chip = lib.Chip("any", hbm_bytes=1e12, hbm_bandwidth=1e11, network=wire, dcn=wire, f32=1e12)
    shape, _ = trained.load("target")
    server = lib.Server(shape.model(), chip, precision=lib.Precision("f32", "f32", "f32", "f32"))
    workload = lib.Workload(max(PROMPTS), max(NEW), rate=1.0)
    services = lib.colocated(server, workload, slots=4), lib.disaggregated(server, server, workload, slots=4)
    for run, service in zip(runs[pattern], services, strict=True):
        arrivals, passes = PATTERNS[pattern]
        played = lib.simulate(service, lib.Requests(arrivals, PROMPTS, NEW), passes=passes)
        for name in SECONDS:
            np.testing.assert_allclose(played.rows[name], [getattr(each, name) for each in run.served], rtol=1e-12)
        steps = sorted(zip(*(played.steps[name].tolist() for name in ("start", "end", "decoding")), strict=True))
        found = sorted((each.start, each.end, each.decoding) for each in run.steps)
        np.testing.assert_allclose(steps, found, rtol=1e-12)


@pytest.mark.parametrize("pattern", PATTERNS)
def test_no_two_events_coincide(runs, pattern):
    """Where order would be a matter of taste, nothing is to be compared: what joins or arrives is never just in time."""
    for run in runs[pattern]:
        ends = [each.end for each in run.steps if each.decoding]
        boundaries = [each.end for each in run.steps]
        assert min(abs(served.moved - end) for served in run.served for end in ends) > 0.005
        assert min(abs(served.arrival - end) for served in run.served for end in boundaries) > 0.005


def test_the_bytes_that_move_are_those_of_the_padded_prompts(runs, two):
    """Keys and values of 32 tokens in 4 layers, 2 heads of 32, 4 bytes: 65,536 a request, whatever its prompt."""
    shape, _ = trained.load("target")
    padded = 2 * 4 * 2 * 32 * 4 * 32
    assert padded == lib.kv_bytes(shape.model(), 32, "f32")
    for alone, apart in runs.values():
        assert alone.sent == 0
        assert apart.sent == len(PROMPTS) * padded


@pytest.mark.parametrize("slot", [1, 2])
def test_a_cache_goes_to_the_devices_of_its_slot_and_nowhere_else(two, slot):
    """Four slots in two rows: the first row has slots 0 and 1. The other slots keep what they have, zeros."""
    reader, decoder = two
    made = replica.prefill(reader, requests()[0].prompt)
    sent = replica.send(decoder, made, slot)
    assert sent[0][0].devices() == {*decoder.mesh.devices[slot // 2]}
    cache = replica.insert(decoder.empty(), sent, slot)
    for (keys, values), (new_keys, new_values) in zip(cache, made, strict=True):
        np.testing.assert_array_equal(keys[slot, :, :, :32], new_keys[0])
        np.testing.assert_array_equal(values[slot, :, :32], new_values[0])
        for other in {*range(4)} - {slot}:
            assert not keys[other].any() and not values[other].any()


def test_a_prefill_is_the_cache_of_all_tokens_but_the_last(two):
    """On two devices, padded, it holds what a plain pass over the prompt without its last token writes."""
    shape, params = trained.load("target")
    prompt = requests()[0].prompt
    tokens, read = jnp.asarray([prompt[:-1]], jnp.int32), len(prompt) - 1
    _, expected = transformer.extend(params, shape, transformer.empty_cache(shape, 1, read), tokens, 0)
    for (keys, values), (plain_keys, plain_values) in zip(replica.prefill(two[0], prompt), expected, strict=True):
        np.testing.assert_allclose(keys[..., :read], plain_keys, atol=1e-5)
        np.testing.assert_allclose(values[:, :, :read], plain_values, atol=1e-5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(prompt=(1,)), "2 to 33 tokens"),
        (dict(prompt=(1,) * 34), "2 to 33 tokens"),
        (dict(prompt=(1, 256)), "0 to 255"),
        (dict(prompt=(-1, 2)), "0 to 255"),
        (dict(new=0), "1 to 62"),
        (dict(new=63), "1 to 62"),
        (dict(arrival=-1.0), "arrival"),
        (dict(arrival=float("nan")), "arrival"),
        (dict(arrival=2.0), "order"),
    ],
)
def test_requests_that_do_not_fit_are_refused(one, two, change, message):
    """Too short, too long, of tokens that are none, or out of order: ValueError names what is allowed."""
    asked = [Request(**dict(arrival=0.5, prompt=(1, 2, 3), new=2) | change), Request(1.0, (1, 2, 3), 62)]
    for serve in (lambda: one_mesh(one, asked, PASSES), lambda: two_meshes(*two, asked, PASSES)):
        with pytest.raises(ValueError, match=message):
            serve()


@pytest.mark.parametrize(("prompt", "new"), [(2, 1), (33, 32)])
def test_the_smallest_and_the_largest_request(one, prompt, new):
    """Two tokens of which one is cached; and 32 cached ones, padded to no more, with as many as the slot of 64 has room for."""
    asked = requests([0.0], (prompt,), (new,))
    (served,) = one_mesh(one, asked, PASSES).served
    plain = transformer.generate(*reversed(trained.load("target")), jnp.asarray([asked[0].prompt], jnp.int32), new)
    assert served.tokens == tuple(plain[0].tolist())


@pytest.mark.parametrize("sizes", [dict(rows=3), dict(slots=3, rows=2), dict(padded=64), dict(padded=0), dict(rows=8)])
def test_meshes_that_do_not_fit_are_refused(sizes):
    """Rows that do not divide devices or slots, and prompts that fill a slot, raise ValueError."""
    with pytest.raises(ValueError):
        replica.place(*trained.load("target"), sharded.devices()[:4], **sizes)


def test_more_devices_than_heads_are_refused(two):
    """Two KV heads are not cut four ways; and two replicas that pad prompts differently do not work together."""
    with pytest.raises(ValueError, match="KV"):
        replica.place(*trained.load("target"), sharded.devices()[:4])
    other = replica.place(*trained.load("target"), sharded.devices()[:1], padded=16)
    with pytest.raises(ValueError, match="16 and 32"):
        two_meshes(other, two[1], requests(), PASSES)


@pytest.mark.parametrize("numbers", [(0, 1, 1), (1, 0, 1), (1, 1, -1), (float("inf"), 1, 1)])
def test_passes_that_take_no_time_are_refused(numbers):
    """Only a transfer may be free."""
    with pytest.raises(ValueError):
        Passes(*numbers)
    assert Passes(1, 1).transfer(100) == 0


def test_the_clock_times_passes_and_runs(one):
    """Structure only: no time decides a test. One more run than rounds, the first of which compiles."""
    calls = []
    passes, seconds = clock(lambda: calls.append(1), one, one, rounds=2)
    assert len(calls) == 3
    assert seconds >= 0 and passes.read > 0 and passes.decode > 0 and passes.send > 0


def test_two_processes_hand_over(runs, alone):
    """A process that reads and one that decodes make the tokens of one process; each prompt's cache moves once, padded."""
    found = handover.two_processes("target", requests())
    assert list(found.tokens) == alone
    assert found.bytes == runs["bursts"][1].sent
    assert len(found.seconds) == len(PROMPTS) and min(found.seconds) > 0
    assert not left()


def test_processes_that_hang_or_fail_are_ended():
    """Who waits for ever is ended when the time is over; who fails takes the other along and is quoted."""
    hang, fail = (
        [sys.executable, "-c", f"import sys, time; {what}"] for what in ("time.sleep(300)", "sys.exit('no cache')")
    )
    with pytest.raises(TimeoutError, match="0.2 s"):
        handover._together([hang, hang], 0.2)
    for commands in ([hang, fail], [fail, hang]):
        with pytest.raises(RuntimeError, match="no cache"):
            handover._together(commands, 60.0)
    assert not left()


def test_a_handover_of_nothing_is_refused():
    """No requests, a limit of no time, and a request that fits no slot are refused before a process starts."""
    for arguments in (([],), (requests(), 0.0), ([Request(0.0, (1,), 1)],)):
        with pytest.raises(ValueError):
            handover.two_processes("target", *arguments)


def test_slots_are_given_in_turn(one):
    """The slot that has been free longest is taken first."""
    slots = Slots(one, requests())
    slots.freed |= {0: 3.0, 1: 2.0, 2: 1.0, 3: 4.0}
    for i in range(4):
        slots.read("both", one, i, 0.0, 1.0)
        slots.seat(1.0)
    assert slots.holders == {2: 0, 1: 1, 0: 2, 3: 3}
    assert not slots.freed
