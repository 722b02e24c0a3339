"""Speculative decoding says what its target says: token for token when greedy, and in distribution when drawn."""

import math
from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest

from lib import expected_tokens
from lib.demos import drafts, trained, transformer
from lib.demos.language_models import Chain, Model, NGram, widened

P = np.array([[4, 3, 2, 1], [1, 4, 3, 2], [2, 1, 4, 3], [3, 2, 1, 4]]) / 10
Q = np.array([[1, 2, 3, 4], [1, 1, 1, 7], [4, 4, 1, 1], [0, 5, 0, 5]]) / 10
NEW = 48


def pair(temperature):
    return [Model(*trained.load(name), temperature) for name in ("target", "draft")]


@pytest.fixture(scope="module")
def greedy():
    """The trained target and draft at temperature 0, prompts, and what the target says after each, without this program."""
    target, draft = pair(0.0)
    prompts = trained.held_out()[: 4 * 36_000].reshape(4, 36_000)[:, :64].tolist()
    return (
        target,
        draft,
        prompts,
        transformer.generate(target.params, target.shape, jnp.asarray(prompts), NEW + 8).tolist(),
    )


class Scripted:
    """A generator of uniform numbers that are given."""

    def __init__(self, *numbers):
        self.numbers = list(numbers)

    def random(self):
        return self.numbers.pop(0)


@pytest.mark.parametrize("k", [0, 1, 3, 7])
@pytest.mark.parametrize("of", ["model", "n-grams"])
def test_greedy_tokens_are_the_targets_own(greedy, k, of):
    """Whatever is proposed, and however much of it stays, the tokens are those of a prefill and decode steps."""
    target, draft, prompts, expected = greedy
    draft = draft if of == "model" else NGram()
    made = [drafts.generate(target, draft, prompt, NEW, k) for prompt in prompts]
    assert [each.tokens for each in made] == [each[:NEW] for each in expected]
    rounds = [tokens for each in made for tokens in each.rounds]
    assert set(rounds) >= {1, k + 1} and set(rounds) <= set(range(1, k + 2))


@pytest.mark.parametrize("k", [1, 4, 8])
def test_rounds_are_as_long_as_the_distributions_say(greedy, k):
    """Greedy: which proposals stay follows from one pass of each model over the finished text, and so does every round."""
    target, model, prompts, expected = greedy
    for draft in (model, NGram()):
        rounds = [drafts.generate(target, draft, prompt, NEW, k).rounds for prompt in prompts]
        texts = [prompt + text[: NEW + k] for prompt, text in zip(prompts, expected, strict=True)]
        kept = np.array([drafts.acceptance(target, draft, text)[1][63:] for text in texts])
        assert set(kept.flat) == {0, 1}
        assert drafts.tokens_per_round(kept, k) == pytest.approx(np.mean(sum(rounds, [])), rel=1e-12)


@pytest.mark.parametrize("k", [1, 2, 3])
def test_drawn_tokens_have_the_targets_distribution(k):
    """Two tokens over a vocabulary of four: 16 pairs, their probabilities enumerated, and 4,000 draws of the program.

    The same draws are told from the draft's pairs, and from those of a rule that draws again from p, not from its excess.
    """
    start = 2
    drawn = drafts.samples(Chain(P), Chain(Q), [0, start], 2, k, 4000)
    counts = np.zeros((1, 16))
    for first, second in drawn:
        counts[0, 4 * first + second] += 1

    def pairs(table):
        return [[table[start][first] * table[first][second] for first in range(4) for second in range(4)]]

    overlap = np.minimum(P, Q)
    wrong = overlap + (1 - overlap.sum(1, keepdims=True)) * P
    assert drafts.chi_square(counts, np.array(pairs(P))) > 0.01
    assert drafts.chi_square(counts, np.array(pairs(Q))) < 1e-9
    assert drafts.chi_square(counts, np.array(pairs(wrong))) < 1e-9


def test_drawn_tokens_of_the_trained_pair():
    """The first token and the second given the first, against the target's probabilities and, for power, the draft's."""
    target, draft = pair(1.0)
    prompt = list(b"If ")
    drawn = drafts.samples(target, draft, prompt, 2, 2, 800)
    first, second = np.zeros((1, 256)), np.zeros((256, 256))
    np.add.at(first[0], drawn[:, 0], 1)
    np.add.at(second, tuple(drawn.T), 1)
    for model, least, most in ((target, 0.01, 1), (draft, 0, 1e-5)):
        logits = transformer.full_forward(
            model.params, model.shape, np.array([[*prompt, token] for token in range(256)])
        )
        p = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
        assert least <= drafts.chi_square(first, p[:1, 2]) < most
        assert least <= drafts.chi_square(second, p[:, 3]) < most


def test_a_proposal_stays_with_probability_p_over_q():
    """By hand: a token of q 0.5 and p 0.2 stays up to 0.4; then what p has more than q is 0.3 of token 0, so that is drawn."""
    q, p = [[0.2, 0.3, 0.5]], [[0.5, 0.3, 0.2], [0.1, 0.6, 0.3]]
    assert drafts.accept([2], q, np.array(p), Scripted(0.39, 0.05)) == [2, 0]
    assert drafts.accept([2], q, np.array(p), Scripted(0.39, 0.65)) == [2, 1]
    assert drafts.accept([2], q, np.array(p), Scripted(0.39, 0.75)) == [2, 2]
    for chance in (0.0, 0.5, 0.999):
        assert drafts.accept([2], np.array(q), np.array(p), Scripted(0.41, chance)) == [0]
    assert drafts.accept([0], q, np.array(p), Scripted(0.999, 0.05)) == [0, 0]


def test_a_draft_that_is_the_target_is_always_believed_and_one_that_excludes_it_never():
    """Rounds of k + 1 tokens, or of one."""
    rounds = drafts.generate(Chain(P), Chain(P), [0, 1], 40, 4).rounds
    assert rounds == [5] * 8
    known, never = np.array([[0.5, 0.5, 0, 0]] * 4), np.array([[0, 0, 0.5, 0.5]] * 4)
    assert drafts.generate(Chain(known), Chain(never), [0, 1], 40, 4).rounds == [1] * 40


def test_acceptance_is_one_minus_the_distance():
    """By hand on a chain, and its law: over the target's tokens, the chances given the token average to the chance before."""
    chance, kept = drafts.acceptance(Chain(P), Chain(Q), [0, 1, 3, 2])
    np.testing.assert_allclose(chance, [0.1 + 0.2 + 0.2 + 0.1, 0.1 + 0.1 + 0.1 + 0.2, 0 + 0.2 + 0 + 0.4], rtol=1e-12)
    np.testing.assert_allclose(kept, [2 / 3, 1, 0], rtol=1e-12)
    for last in range(4):
        both = [drafts.acceptance(Chain(P), Chain(Q), [last, token]) for token in range(4)]
        mean = sum(p * stays[0] for p, (_, stays) in zip(P[last], both, strict=True))
        assert mean == pytest.approx(both[0][0][0], rel=1e-12)


@pytest.mark.parametrize("k", [1, 3, 8])
def test_where_every_context_is_alike_the_formula_holds(k):
    """The cost model's geometric sum: of one chance everywhere exactly, of drawn rounds within four standard errors."""
    p, q = np.tile(P[0], (4, 1)), np.tile(Q[0], (4, 1))
    overlap = 0.1 + 0.2 + 0.2 + 0.1
    expected = expected_tokens(overlap, k).value
    assert drafts.tokens_per_round(np.full((2, 30), overlap), k) == pytest.approx(expected, rel=1e-12)
    rounds = drafts.generate(Chain(p), Chain(q), [0, 0], 6000, k).rounds
    assert abs(np.mean(rounds) - expected) < 4 * np.std(rounds) / len(rounds) ** 0.5


def test_rounds_begin_where_the_one_before_ended():
    """By hand, k = 1: proposals miss and stay in turn. The first round brings one token; later ones begin where one stays."""
    missed_first = np.array([[0, 1, 0, 1, 0, 1, 0]])
    assert drafts.tokens_per_round(missed_first, 1) == pytest.approx((1 + 2 + 2 + 2) / 4)
    assert drafts.tokens_per_round(1 - missed_first, 1) == pytest.approx(2)
    assert drafts.tokens_per_round(np.concatenate([missed_first, 1 - missed_first]), 1) == pytest.approx(
        (1 + 6 + 6) / 7
    )
    assert drafts.tokens_per_round(missed_first, 0) == 1


def test_chi_square_by_hand():
    """Two degrees of freedom have a p-value of exp(-x/2), one of erfc(sqrt(x/2)); rows add up; what is rare is joined."""
    thirds = np.full(3, 1 / 3)
    assert drafts.chi_square([[10, 20, 30]], [thirds]) == pytest.approx(math.exp(-10 / 2), rel=1e-4)
    four = math.exp(-20 / 2) * (1 + 20 / 2)  # four degrees of freedom
    assert drafts.chi_square([[10, 20, 30], [30, 20, 10], [0, 0, 0]], [thirds] * 3) == pytest.approx(four, rel=1e-4)
    one = math.erfc(((10 - 12) ** 2 / 12 + (10 - 8) ** 2 / 8) ** 0.5 / 2**0.5)
    assert drafts.chi_square([[10, 4, 3, 3]], np.array([[0.6, 0.2, 0.1, 0.1]])) == pytest.approx(one, rel=1e-4)
    assert drafts.chi_square([[10, 9, 1]], np.array([[0.6, 0.36, 0.04]])) == pytest.approx(one, rel=1e-4)


def test_temperature_is_a_power_and_its_limit_is_greedy():
    """Half the temperature squares the probabilities; at 0 all of it is at the likeliest token."""
    target, _ = pair(1.0)
    text = list(b"Two circles intersect")
    at = {}
    for temperature in (1.0, 0.5, 0.0):
        model = replace(target, temperature=temperature)
        at[temperature], _ = model.read(model.start(64), text, 0)
    squares = at[1.0] ** 2 / (at[1.0] ** 2).sum(-1, keepdims=True)
    np.testing.assert_allclose(at[0.5], squares, rtol=1e-9, atol=1e-12)
    np.testing.assert_array_equal(at[0.0].argmax(-1), at[1.0].argmax(-1))
    np.testing.assert_array_equal(np.sort(at[0.0], -1)[:, -2:], [[0, 1]] * len(text))


@pytest.mark.parametrize("of", ["model", "n-grams"])
def test_tokens_can_be_taken_back(of):
    """After reading on and going back, the distributions are those of a cache that never saw the tokens taken back."""
    model = pair(1.0)[1] if of == "model" else NGram()
    _, cache = model.read(model.start(64), list(b"circle and cir"), 0)
    _, strayed = model.read(cache, list(b"xyzzy"), 14)
    back, _ = model.read(strayed, list(b"cle"), 14)
    straight, _ = model.read(model.start(64), list(b"circle and circle"), 0)
    np.testing.assert_allclose(back, straight[14:], rtol=1e-4, atol=1e-6)


def test_n_grams_continue_the_longest_and_latest_match():
    """By hand; where nothing matches, the last byte again."""
    assert chr(NGram().next(b"abcabdab")) == "d"
    assert chr(NGram().next(b"xab1yab2zab3xab")) == "1"
    assert chr(NGram(longest=2).next(b"xab1yab2zab3xab")) == "3"
    assert chr(NGram().next(b"acbcc")) == "c"
    assert chr(NGram().next(b"abc")) == "c"
    rows, _ = NGram().read(b"", b"abab", 0)
    assert [chr(each) for each in rows.argmax(-1)] == ["a", "b", "b", "a"]
    np.testing.assert_array_equal(rows.sum(-1), 1)


def test_a_widened_model_computes_the_same_from_more_bytes():
    """Its logits are the narrow one's, and the new neurons are live: they cost what real ones do."""
    draft = pair(1.0)[1]
    wide = widened(draft, 1000)
    tokens = np.array([list(b"The angle between")])
    expected = transformer.full_forward(draft.params, draft.shape, tokens)
    np.testing.assert_allclose(transformer.full_forward(wide.params, wide.shape, tokens), expected, atol=1e-4)
    (layer,) = wide.params["layers"]
    assert layer["gate_up"].shape == (2000, 64) and layer["down"].shape == (64, 1000)
    assert (abs(layer["gate_up"]).max(1) > 0).all()
    with pytest.raises(ValueError, match="128 neurons"):
        widened(draft, 127)


def test_a_race_measures_everything():
    """Structure only, no time decides a test: rounds are those of `generate`, and the speed-up is made of the parts."""
    target, draft = pair(0.0)
    prompts = trained.held_out()[:200].reshape(2, 100).tolist()
    race = drafts.race(target, draft, prompts, 12, 3)
    assert min(vars(race).values()) > 0
    rounds = [drafts.generate(target, draft, prompt, 12, 3).rounds for prompt in prompts]
    assert race.tokens == pytest.approx(np.mean(sum(rounds, [])))
    assert replace(race, plain=3.0, tokens=2.0, round=4.0).speedup == 1.5


def test_what_cannot_be_decoded_is_refused():
    """Prompts of one token, nothing to make, negative drafts, other vocabularies, texts shorter than a round, full caches."""
    for prompt, new, k in (([0], 1, 1), ([0, 1], 0, 1), ([0, 1], 1, -1)):
        with pytest.raises(ValueError, match="at least 2 tokens"):
            drafts.generate(Chain(P), Chain(Q), prompt, new, k)
    with pytest.raises(ValueError, match="k = 0"):
        drafts.race(Chain(P), Chain(Q), [[0, 1]], 1, 0)
    with pytest.raises(ValueError, match="vocabulary of 4, not of 256"):
        drafts.samples(Chain(P), NGram(), [0, 1], 1, 1, 1)
    for k in (-1, 3):
        with pytest.raises(ValueError, match="text of 3 tokens"):
            drafts.tokens_per_round(np.ones((1, 3)), k)
    draft = pair(1.0)[1]
    with pytest.raises(ValueError, match="cache of 4"):
        draft.read(draft.start(4), list(b"four?"), 0)
