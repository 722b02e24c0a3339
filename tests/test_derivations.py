"""SymPy derives the textbook results from the code: the formulas of the chapter are what the functions return."""

from dataclasses import replace

import pytest
from sympy import Min, Rational, Symbol, ceiling, expand, limit, nsimplify, oo, simplify, solve, symbols

from lib.bounds import (
    arithmetic_limit,
    attention_intensity,
    attention_parity,
    critical_batch,
    dequantization_limit,
    evicted_tokens,
    exact_critical_batch,
    fsdp_penalty,
    half_throughput_batch,
    latency_bound_bytes,
    latency_limit,
    prefill_time,
    saturation_throughput,
    server_ratio,
    step_floor,
    step_time,
    tensor_parallel_limit,
)
from lib.breakdown import symbolic
from lib.chips import chip
from lib.formats import Format
from lib.forward import decode_step, forward
from lib.mixers import GQA, MLA, pairs
from lib.network import Slice, Torus, all_gather, all_reduce
from lib.queueing import wait, wait_chance
from lib.routing import experts_touched
from lib.server import Server, footprint
from lib.speculation import expected_tokens, free_drafts, speculate, speculative_speedup

B, C, W, P, KV, X, S, T, G, D, F, b = symbols("B C W P KV X S T G D F b", positive=True)
LINK, HOP, d = symbols("W_1 alpha d", positive=True)
CHIP = replace(chip("v5e"), bf16=C, hbm_bandwidth=W, network=Torus(LINK, HOP, 1, 2, 1024))
STORED = Format("any", b, "bf16")


def equal(left, right):
    """Whether two formulas are the same for every number in them."""
    return simplify(nsimplify(left - right)) == 0


def test_critical_batch_makes_arithmetic_and_reading_equal():
    """Equating the two terms of 7.2's matmuls gives (b/2) C/W, whatever the parameters and chips (formula 1.4)."""
    matmuls = step_time(CHIP, X, P, KV, B, STORED)["matmuls"]
    (crossing,) = solve(matmuls["compute"].value - matmuls["memory"].value, B)
    assert equal(crossing, b / 2 * C / W)
    assert equal(crossing, critical_batch(CHIP, STORED).value)


def test_critical_batch_in_bf16_is_the_ridge():
    """C/W: 2 bytes a weight meet 2 FLOPs."""
    assert equal(critical_batch(CHIP).value, C / W)


def test_exact_critical_batch_solves_the_finite_matmul():
    """2 B D F / C = (b D F + 2 B (D + F)) / W, and C/W again for wide matrices."""
    found = exact_critical_batch(CHIP, D, F, STORED).value
    (crossing,) = solve(2 * B * D * F / C - (b * D * F + 2 * B * (D + F)) / W, B)
    assert equal(found, crossing)
    assert equal(limit(limit(found, F, oo), D, oo), b / 2 * C / W)


def test_decode_attention_intensity_tends_to_the_group():
    """S G / (S + G) at 16 bits, G for long contexts, 2 G T / b in general."""
    assert equal(attention_intensity(G, S).value, S * G / (S + G))
    assert equal(limit(attention_intensity(G, S).value, S, oo), G)
    assert equal(limit(attention_intensity(G, S, T, STORED).value, S, oo), 2 * G * T / b)


def test_intensity_of_the_pass_is_that_of_the_closed_form():
    """FLOPs over bytes of GQA decode attention with N = G K heads tend to G: the cache is read, the new token written,
    queries come in and outputs go out."""
    K, H = symbols("K H", positive=True)
    layer = GQA(G * K, K, H)
    moved = layer.read(1, S, 2) + layer.write(1, 2) + 2 * layer.width()
    assert equal(limit(layer.flops(1, S) / moved, S, oo), G)


def test_prefill_attention_intensity_is_half_the_prompt():
    """T/2 for MHA, T G/(G+1) for groups; half of it where causal blocks are skipped, as here (formulas.md, 7.3)."""
    K, H = symbols("K H", positive=True)
    mha, gqa = GQA(K, K, H), GQA(G * K, K, H)

    def intensity(layer):
        moved = layer.write(T, 2) + 2 * T * layer.width()  # keys, values, queries and outputs, each once
        return layer.flops(T, 0) / moved

    # The code skips causal blocks: (T + 1)/2 tokens seen on average, so the limits are half of the textbook's.
    assert equal(limit(intensity(mha) / T, T, oo), Rational(1, 2) / 2)
    assert equal(limit(intensity(gqa) / T, T, oo), G / (G + 1) / 2)


def test_causal_attention_is_half():
    """T (T + 1) / 2 pairs; T tokens after S see S each and the triangle."""
    assert equal(pairs(T, 0), T * (T + 1) / 2)
    assert equal(pairs(T, S), T * S + pairs(T, 0))
    assert equal(pairs(T, 0) + pairs(T, T), pairs(2 * T, 0))


def test_absorbed_latent_attention_is_near_the_ridge():
    """2 N (2 r + H_r) / (b (r + H_r)): DeepSeek's 128 heads on 512 + 64 values make 242 FLOP/B (trap 11)."""
    latent = MLA(128, None, 512, 64, 128, 128)
    flops = latent.flops(1, S)  # the cheaper of absorbed and expanded: a Min
    assert isinstance(flops, Min)
    intensity = min(limit(way / latent.read(1, S, 2), S, oo) for way in flops.args)
    assert equal(intensity, Rational(2 * 128 * (576 + 512), 2 * 576))


def test_throughput_saturates():
    """lim B/T(B) of the floor = X W / KV; of 7.2, which adds arithmetic, 1/(KV/(X W) + 2 P/(X C))."""
    floor = step_floor(CHIP, X, P, KV, B, STORED).value
    assert equal(limit(B / floor, B, oo), saturation_throughput(CHIP, X, KV).value)
    assert equal(limit(B / floor, B, oo), X * W / KV)
    attention, compute = step_time(CHIP, X, P, KV, B)["attention"], step_time(CHIP, X, P, KV, B)["matmuls/compute"]
    assert equal(limit(B / (attention.value + compute.value), B, oo), 1 / (KV / (X * W) + 2 * P / (X * C)))


def test_half_of_saturation_where_caches_weigh_as_much_as_weights():
    """Solving B/T = (X W/KV)/2 for B gives b P / KV: no chip in it."""
    floor = step_floor(CHIP, X, P, KV, B, STORED).value
    (half,) = solve(B / floor - saturation_throughput(CHIP, X, KV).value / 2, B)
    assert equal(half, half_throughput_batch(P, KV, STORED).value)
    assert half.free_symbols == {b, P, KV}


def test_step_time_is_formula_7_2():
    """B KV/(X W) + max(2 B P/(X C), b P/(X W))."""
    step = step_time(CHIP, X, P, KV, B, STORED)
    assert equal(step["attention"].value, B * KV / (X * W))
    assert equal(step["matmuls/compute"].value, 2 * B * P / (X * C))
    assert equal(step["matmuls/memory"].value, b * P / (X * W))
    assert step.value.has(B, KV, P)


def letters(name="llama-3-70b"):
    """A server of one dense block in symbols."""
    from strategies import server

    return symbolic(server(name, "ironwood", 8), ("server",), {})


def test_a_symbolic_pass_keeps_its_letters():
    """Query heads N, KV heads K, min(K, X) ways: the formula says how the cache is cut."""
    step = decode_step(letters(), Symbol("B", positive=True), Symbol("S", positive=True))
    assert {"B", "S", "K", "X", "H", "L"} <= set(map(str, step["layers/attention/memory"].value.free_symbols))
    assert step["layers/attention/memory"].value.has(Min)


def test_step_is_linear_in_the_context():
    """A token more costs the same at any context: the average context of a growing batch is its middle (trap 20)."""
    s = Symbol("s", positive=True)
    memory = decode_step(letters(), B, s)["layers/attention/memory"].value
    assert memory.diff(s, 2) == 0 and memory.diff(s) != 0


def test_verification_reads_the_cache_once():
    """k + 1 tokens a sequence: arithmetic of k + 1, the cache read of one (trap 6)."""
    k, s = symbols("k s", positive=True)
    step = forward(letters(), B, k + 1, s)["layers/attention"]
    per_token = limit(step["compute"].value / s, s, oo) / (k + 1)
    assert not per_token.has(k)
    assert not limit(step["memory"].value / s, s, oo).has(k)


def test_an_all_reduce_is_two_all_gathers_in_letters():
    """Latency and bandwidth: 2 h alpha and 2 V (1 - 1/n) / W."""
    V, n, h, w, alpha = symbols("V n h w alpha", positive=True)
    on = Slice(n, h, w, w, alpha)
    assert equal(all_gather(V, n, on)["bandwidth"].value, V * (1 - 1 / n) / w)
    assert all_reduce(V, n, on).value == 2 * all_gather(V, n, on).value
    assert equal(all_gather(V, n, on)["latency"].value, h * alpha)


def test_one_shot_all_reduce_wins_while_hops_are_longer():
    """One phase of hops instead of two against n/2 times the bytes: h alpha = (n - 1) V / W is where both ways of sending all
    partial sums meet, and below it one shot takes half."""
    V, n, h, w = symbols("V n h w", positive=True)
    shot, ring = (all_reduce(V, n, Slice(n, h, w, w, HOP), way) for way in ("one-shot", "ring"))
    assert equal(shot["bandwidth"].value, (n - 1) * V / w)
    assert equal(shot["latency"].value * 2, 2 * ring["all-gather/latency"].value)
    (crossing,) = solve(shot["bandwidth"].value - shot["latency"].value, V)
    assert equal(crossing, h * HOP * w / (n - 1))


def test_prefill_is_formula_7_3():
    """2 P T / (X C MFU), and attention takes as long where 2 L N H T^2 = 2 P T."""
    L, N, H, m = symbols("L N H MFU", positive=True)
    assert equal(prefill_time(CHIP, X, P, T, m).value, 2 * P * T / (X * C * m))
    attention = (
        2 * N * H * limit(GQA(N, N, H).flops(T, 0) / (2 * N * H * T**2), T, oo) * T**2
    )  # causal: half of 4 N H T^2
    (parity,) = [found for found in solve(L * attention - 2 * P * T, T) if found != 0]
    assert equal(attention_parity(P, L, N, H).value, parity)


def phase(V, wrapped=True):
    """All-gather of V bytes on a long ring or line: each phase of tensor parallelism."""
    on = Slice(X, X / 2 if wrapped else X - 1, (2 if wrapped else 1) * LINK, LINK, HOP)
    return all_gather(V, X, on)


@pytest.mark.parametrize("wrapped", [True, False])
def test_tensor_parallel_limit_is_where_sending_takes_as_long_as_reading(wrapped):
    """b D F / (X W) = 2 B D / W_ici: formula 7.4, in which D drops out; (n - 1)/n is 1 for large n."""
    sent = limit(phase(2 * B * D, wrapped)["bandwidth"].value, X, oo)
    (crossing,) = solve(b * D * F / (X * W) - sent, X)
    assert equal(tensor_parallel_limit(CHIP, F, B, 1, wrapped, STORED).value, crossing)
    beta = W / (2 * LINK if wrapped else LINK)
    assert equal(tensor_parallel_limit(CHIP, F, B, d, wrapped).value, d * F / (B * beta))


def test_arithmetic_limit_is_where_sending_takes_as_long_as_multiplying():
    """2 B D F / (X C) = 2 B D / W_ici at any batch."""
    (crossing,) = solve(2 * B * D * F / (X * C) - limit(phase(2 * B * D)["bandwidth"].value, X, oo), X)
    assert equal(arithmetic_limit(CHIP, F).value, crossing)


def test_latency_limit_is_where_hops_take_as_long_as_reading():
    """b D F / (X W) = alpha d X^(1/d) / 2, on a ring and on any number of axes."""
    (ring,) = solve(b * D * F / (X * W) - phase(1)["latency"].value, X)
    found = latency_limit(CHIP, D, F, d, weights=STORED).value
    assert equal(found.subs(d, 1), ring)
    assert equal(b * D * F / (found * W) / (HOP * d * found ** (1 / d) / 2), 1)


@pytest.mark.parametrize("wrapped", [True, False])
def test_latency_bound_bytes_meet_the_hops_of_a_long_ring_or_line(wrapped):
    """V / W_ici = alpha X / 2 on a ring, V / W_1 = alpha (X - 1) on a line: X W_1 alpha both."""
    V = Symbol("V", positive=True)
    on = phase(V, wrapped)
    (crossing,) = solve(on["bandwidth"].value - on["latency"].value, V)
    assert limit(crossing / latency_bound_bytes(CHIP, X).value, X, oo) == 1


def test_fsdp_penalty_is_gathering_over_reading():
    """(V / W_ici) / (V / (X W)) for large X."""
    V = Symbol("V", positive=True)
    ratio = phase(V)["bandwidth"].value / (V / (X * W))
    assert limit(ratio / fsdp_penalty(CHIP, X).value, X, oo) == 1


def test_capacity_in_letters():
    """K and V of K heads of width H in L layers, cut min(K, X) ways: b_kv 2 K H L S B / min(K, X)."""
    seen = {}
    from strategies import server

    one = symbolic(server("llama-3-70b", "ironwood", 16), ("server",), seen)
    held = footprint(one, B, S)["KV cache"].value
    named = {letter: entry[0] for letter, entry in seen.items()}
    K, H, L, ways = named["K"], named["H"], named["L"], Min(named["K"], named["X"])
    kv = next(named[letter] for letter in ("b_kv", "b") if letter in named and named[letter] in held.free_symbols)
    assert equal(held.subs(ceiling(S), S), kv * 2 * K * H * L * S * B / ways)
    assert isinstance(one, Server)


# Speculation

a, c, v = symbols("a c v", positive=True)
k = Symbol("k", positive=True, integer=True)


@pytest.mark.parametrize("proposals", range(8))
def test_tokens_of_a_round_are_the_geometric_sum(proposals):
    """1 + a + ... + a^k, which is (1 - a^(k+1)) / (1 - a)."""
    assert equal(expected_tokens(a, proposals).value, sum(a**i for i in range(proposals + 1)))
    assert equal(expected_tokens(a, k).value, (1 - a ** (k + 1)) / (1 - a))


def test_tokens_of_a_round_of_certain_proposals():
    """k + 1 as a goes to 1, one as it goes to 0; one more proposal adds a^(k+1), all of them 1 / (1 - a)."""
    tokens = expected_tokens(a, k).value
    assert equal(limit(tokens, a, 1), k + 1)
    assert [1, 1] == [limit(tokens.subs(k, n), a, 0) for n in (1, 5)]
    assert equal(expected_tokens(a, k + 1).value - tokens, a ** (k + 1))
    assert equal(limit(expected_tokens(Rational(3, 4), k).value, k, oo), 4)


def test_one_proposal_gains_where_it_is_accepted_more_often_than_it_costs():
    """(1 + a) / (1 + c) > 1 exactly where a > c, if a verification costs a step; in general where a > c + v - 1."""
    gain = speculative_speedup(a, 1, c).value
    assert equal(gain, (1 + a) / (1 + c))
    assert [c] == solve(gain - 1, a) and simplify(gain).diff(a).subs(a, c).is_positive
    dear = speculative_speedup(a, 1, c, v).value
    assert equal(dear.subs(a, c + v - 1), 1) and equal(dear, (1 + a) / (c + v))


def test_the_speedup_is_leviathans():
    """(1 - a^(k+1)) / ((1 - a) (k c + 1)), theorem 3.8; tokens over cost with a dear verification."""
    assert equal(speculative_speedup(a, k, c).value, (1 - a ** (k + 1)) / ((1 - a) * (k * c + 1)))
    assert equal(speculative_speedup(a, k, c, v).value * (k * c + v), expected_tokens(a, k).value)


def test_free_drafts_make_arithmetic_and_reading_equal():
    """Equating the terms of 7.2's matmuls for B (k + 1) tokens gives the proposals that cost nothing: (b/2) C / (W B) - 1."""
    matmuls = step_time(CHIP, X, P, KV, B * (d + 1), STORED)["matmuls"]
    (crossing,) = solve(matmuls["compute"].value - matmuls["memory"].value, d)
    assert equal(crossing, free_drafts(CHIP, B, STORED).value)


def test_a_round_reads_every_cache_and_weight_of_the_target_once():
    """Of k + 1 tokens: its memory beside activations does not know k, its arithmetic is k + 1 times that of a step."""
    one, s = letters(), Symbol("s", positive=True)
    verify, step = (speculate(one, None, n, B, s)["verify/layers/ffn"] for n in (k, 0))
    assert equal(verify["compute"].value, (k + 1) * step["compute"].value)
    attention = speculate(one, None, k, B, s)["verify/layers/attention/memory"].value
    assert not limit(attention / s, s, oo).has(k)


def test_unpacking_takes_as_long_as_the_read_at_its_limit():
    """o P / C_v = b P / W."""
    C_v, o = symbols("C_v o", positive=True)
    (crossing,) = solve(o * P / C_v - b * P / W, o)
    assert equal(crossing, dequantization_limit(replace(CHIP, vector=C_v), STORED).value)


def test_experts_touched_in_letters():
    """k for one token; all for many; for few of many, nearly as many as are drawn: B k - (B choose 2) k^2 / E."""
    E, q = symbols("E q", positive=True)
    assert equal(experts_touched(E, q, 1), q)
    assert equal(limit(experts_touched(8, 2, B), B, oo), 8)
    assert equal(expand(experts_touched(E, q, 2)), 2 * q - q**2 / E)
    assert equal(limit(experts_touched(E, q, 5), E, oo), 5 * q)


# Serving

r, n_p, t_p, t_d, v_s = symbols("r n_p t_p t_d v_s", positive=True)


def test_server_ratio_balances_the_rates():
    """n / t_p requests are read and B / (t_d G) end a second: equal at n = t_p B / (t_d G)."""
    (crossing,) = solve(n_p / t_p - B / (t_d * G), n_p)
    assert equal(crossing, server_ratio(t_p, t_d, B, G).value)


def test_server_ratio_with_the_step_of_its_batch():
    """t_d = T(B): it does not grow without end with the batch, but to t_p X W / (KV G), where decode saturates."""
    ratio = server_ratio(t_p, step_floor(CHIP, X, P, KV, B, STORED).value, B, G).value
    assert equal(limit(ratio, B, oo), t_p * saturation_throughput(CHIP, X, KV).value / G)
    assert simplify(ratio.diff(B)).is_positive


def test_evicted_tokens_balance_those_that_come():
    """A full server takes in a token a sequence and step, and the prompt of each that replaces one: B + (B/G) P."""
    assert equal(evicted_tokens(B, T, G).value, B + B / G * T)


def test_little_and_the_batch_of_a_rate():
    """B = r G T(B): b P / (X W) r G / (1 - r G KV / (X W)), which has no finite batch from the rate at which decode saturates."""
    step = step_floor(CHIP, X, P, KV, B, STORED).value
    (batch,) = solve(B - r * G * step, B)
    assert equal(batch, r * G * b * P / (X * W - r * G * KV))
    (pole,) = solve(1 / batch, r)
    assert equal(pole * G, saturation_throughput(CHIP, X, KV).value)
    assert equal(limit(batch / r, r, 0), G * step.subs(B, 0))


def test_one_exponential_server_in_letters():
    """Chance rho, wait rho s / (1 - rho): the recursion over servers ends in the textbook's M/M/1 and M/M/2."""
    load = r * t_p
    assert equal(wait_chance(r, t_p), load)
    assert equal(wait(r, t_p).value, load * t_p / (1 - load))
    half = load / 2
    assert equal(wait_chance(r, t_p, 2), 2 * half**2 / (1 + half))
    assert equal(wait(r, t_p, 2).value, half**2 * t_p / (1 - half**2))


def test_pollaczek_khinchine_and_its_limits():
    """r E[s^2] / (2 (1 - rho)) with E[s^2] = s^2 (1 + v^2): half the exponential wait for equal times; r s^2 (1 + v^2) / 2
    where hardly anybody comes; and near rho = 1 the wait times (1 - rho) is s (1 + v^2) / 2, without limit."""
    found, load = wait(r, t_p, 1, v_s).value, r * t_p
    assert equal(found, r * t_p**2 * (1 + v_s**2) / (2 * (1 - load)))
    assert equal(wait(r, t_p, 1, 0).value, wait(r, t_p).value / 2)
    assert equal(limit(found / r, r, 0), t_p**2 * (1 + v_s**2) / 2)
    assert equal(limit(simplify(found * (1 - load)), r, 1 / t_p), t_p * (1 + v_s**2) / 2)
    assert limit(found.subs({t_p: 1, v_s: 0}), r, 1, "-") == oo


def test_units_of_the_textbook():
    """240 sequences: v5e's numbers put into the derived formula (claim S-001 with W = 8.2e11)."""
    assert 240.24 == pytest.approx(float(critical_batch(CHIP).value.subs({C: 1.97e14, W: 8.2e11})), abs=0.005)
