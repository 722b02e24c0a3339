"""Speculative decoding as a program: a draft proposes tokens one by one, and the target checks them all in one pass.

Target and draft are language models as in `lib.demos.language_models`. Sequences are processed one at a time.
"""

from dataclasses import dataclass

import jax
import numpy as np

from lib.demos import machine

ROOM = 256  # caches are multiples of this, so that few lengths are compiled
LEAST = 5  # expected counts below this are joined: the usual rule of the chi-square test
PASSES = 2  # single passes timed after each prompt


@dataclass(frozen=True)
class Generated:
    """A continuation, and how many tokens each round brought, all of the last round counted."""

    tokens: list
    rounds: list


def generate(target, draft, prompt, new, k, seed=0):
    """The target's continuation of a prompt in rounds of k proposals: `new` tokens. k = 0 is plain decoding.

    prompt: two tokens or more. Whatever the draft, the tokens are the target's greedy ones at temperature 0, and have its
    distribution at others. Returns `Generated`. Raises ValueError for a shorter prompt, no new tokens, a negative k, and
    models of different vocabularies.
    """
    return _finish(target, draft, _begin(target, draft, prompt, new, k), prompt, new, k, np.random.default_rng(seed))


def samples(target, draft, prompt, new, k, times, seed=0):
    """`generate` many times after one prompt, which is read once: tokens [times, new]. Raises ValueError as it does."""
    caches, rng = _begin(target, draft, prompt, new, k), np.random.default_rng(seed)
    return np.array([_finish(target, draft, caches, prompt, new, k, rng).tokens for _ in range(times)])


def accept(proposed, q, p, rng):
    """The rule that turns proposals into tokens of the target (Leviathan et al. 2023, Chen et al. 2023).

    proposed: k tokens, each drawn from its row of q [k, vocab]; p: the target's distributions [k + 1, vocab]. A proposal
    stays with probability min(1, p / q). The first that does not is replaced by a draw from the excess of p over q, and
    ends the round; if all stay, the target adds a token. Returns 1 to k + 1 tokens.
    """
    for i, token in enumerate(proposed):
        if rng.random() * q[i][token] >= p[i][token]:
            return [*proposed[:i], _draw(np.maximum(p[i] - q[i], 0), rng)]
    return [*proposed, _draw(p[len(proposed)], rng)]


def acceptance(target, draft, text):
    """How likely proposals are to be accepted along a text [length]: two arrays [length - 1], from distributions alone.

    First for the draft's next token, whatever it is: the sum over tokens of min(p, q), 1 minus the total variation distance.
    Then given that the target's token is the one in the text, where a round comes by: min(1, q / p) of that token.
    """
    (p, _), (q, _) = (model.read(model.start(len(text)), text[:-1], 0) for model in (target, draft))
    ours, drafts = (each[np.arange(len(each)), text[1:]] for each in (p, q))
    return np.minimum(p, q).sum(-1), np.minimum(drafts, ours) / np.where(ours > 0, ours, 1)


def tokens_per_round(kept, k):
    """The mean number of tokens of the rounds that go over texts, from each token's own chance to be a proposal that stays.

    kept: [texts, length], the second array of `acceptance`. With one chance everywhere this is `expected_tokens`. Rounds
    start where the one before ended, so more often before tokens that are hard to guess. Raises ValueError unless length
    exceeds k.
    """
    texts, length = np.shape(kept)
    if not 0 <= k < length:
        raise ValueError(f"a text of {length} tokens cannot show rounds of {k} proposals")
    begun, brought = length - k, 0.0
    starts = np.eye(1, length + 1).repeat(texts, 0)  # the chance that a round starts before a token: before the first, one does
    for at in range(begun):
        through = starts[:, at].copy()
        brought += through.sum()
        for ahead in range(at, at + k):
            starts[:, ahead + 1] += through * (1 - kept[:, ahead])
            through *= kept[:, ahead]
            brought += through.sum()
        starts[:, at + k + 1] += through
    return float(brought / starts[:, :begun].sum())


def chi_square(counts, probabilities):
    """How often chance alone strays further from probabilities than these counts: the p-value of the chi-square test.

    counts, probabilities: [rows, tokens], a sample in each row. Tokens expected fewer than LEAST times are joined.
    ValueError where no row has two tokens, or joined ones, to compare.
    """
    counts, statistic, degrees = np.asarray(counts), 0.0, 0
    for seen, expected in zip(counts, counts.sum(-1, keepdims=True) * probabilities, strict=True):
        often = expected >= LEAST
        if often.any() and expected[~often].sum() < LEAST:
            often[np.where(often, expected, np.inf).argmin()] = False
        if often.any():
            seen, expected = (np.append(each[often], each[~often].sum()) for each in (seen, expected))
            statistic, degrees = statistic + ((seen - expected) ** 2 / expected).sum(), degrees + often.sum()
    if not degrees:
        raise ValueError(f"no row has two tokens that are expected {LEAST} times: there is nothing to compare")
    return float(jax.scipy.special.gammaincc(degrees / 2, statistic / 2))


@dataclass(frozen=True)
class Race:
    """Medians of one interleaved run, in s: a token of plain decoding, a round, and passes by themselves: a step and a
    verification of the target, and one of the draft's k steps in a row. `tokens` is how many a round brought on average."""

    plain: float
    round: float
    step: float
    verify: float
    draft: float
    tokens: float

    @property
    def speedup(self):
        """Tokens a second in rounds over those of plain decoding."""
        return self.plain * self.tokens / self.round


def race(target, draft, prompts, new, k):
    """Continue each prompt by plain decoding and in rounds, and time single passes between: a `Race`.

    prompts: token lists of one length, read before the clock starts. Raises ValueError as `generate`, and for k = 0.
    """
    if k < 1:
        raise ValueError(f"a race needs proposals, not k = {k}")
    times, rounds = {name: [] for name in ("plain", "round", "step", "verify", "draft")}, []

    def reads(model, cache, fresh, times):
        for _ in range(times):
            model.read(cache, fresh, len(prompts[0]) - 1)

    for proposals in (0, k):
        generate(target, draft, prompts[0], 1, proposals)  # compiles what is timed
    for prompt in prompts:
        caches, rng, last = _begin(target, draft, prompt, new, k), np.random.default_rng(0), prompt[-1:]
        for name, proposals in ("plain", 0), ("round", k):
            seconds, made = machine.timed(_finish, target, draft, caches, prompt, new, proposals, rng)
            times[name].append(seconds / len(made.rounds))
        rounds += made.rounds
        passes = {"step": (target, caches[0], last, 1), "verify": (target, caches[0], [*last] * (k + 1), 1),
                  "draft": (draft, caches[1], last, k)}
        for _ in range(PASSES):
            for name, each in passes.items():
                times[name].append(machine.timed(reads, *each)[0] / each[-1])
    return Race(**{name: float(np.median(each)) for name, each in times.items()}, tokens=float(np.mean(rounds)))


def _begin(target, draft, prompt, new, k):
    """Both caches, the prompt read except for its last token."""
    if len(prompt) < 2 or new < 1 or k < 0:
        raise ValueError(f"a prompt of at least 2 tokens, 1 new one and 0 proposals, not {len(prompt)}, {new} and {k}")
    length = -(-(len(prompt) + new + k) // ROOM) * ROOM
    (p, ours), (q, drafts) = (model.read(model.start(length), prompt[:-1], 0) for model in (target, draft))
    if p.shape != q.shape:
        raise ValueError(f"a draft proposes tokens of the target's vocabulary of {p.shape[-1]}, not of {q.shape[-1]}")
    return ours, drafts


def _finish(target, draft, caches, prompt, new, k, rng):
    tokens, rounds = list(prompt), []
    while len(tokens) < len(prompt) + new:
        more, caches = _round(target, draft, caches, tokens, k, rng)
        tokens += more
        rounds.append(len(more))
    return Generated(tokens[len(prompt) : len(prompt) + new], rounds)


def _round(target, draft, caches, tokens, k, rng):
    """More tokens, 1 to k + 1. The draft reads two at first: when all proposals stay, it has not read the last of them."""
    ours, drafts = caches
    proposed, q, fresh = [], [], tokens[-2:]
    for i in range(k):
        rows, drafts = draft.read(drafts, fresh, len(tokens) + i - len(fresh))
        proposed.append(_draw(rows[-1], rng))
        q.append(rows[-1])
        fresh = proposed[-1:]
    p, ours = target.read(ours, [tokens[-1], *proposed], len(tokens) - 1)
    return accept(proposed, q, p, rng), (ours, drafts)


def _draw(weights, rng):
    """A token, each as likely as its weight."""
    summed = np.cumsum(weights)
    return int(np.searchsorted(summed, rng.random() * summed[-1], side="right"))
