"""`make models`: trains the two models on a CPU, a quarter of an hour on two busy cores, and stores them beside this file.

Another processor rounds otherwise and so arrives at other weights; those in the repository are the ones that the book shows.
"""

import sys
import time

import jax
import numpy as np
import optax

from lib.demos import trained, transformer

LENGTH, BATCH = 256, 8
STEPS = {"target": 1800, "draft": 3000}
RATE = {"target": 5e-3, "draft": 1e-2}


def loss(params, shape, text):
    """Mean nats a byte of the next-byte prediction. text: [batch, length + 1]."""
    logits = transformer.full_forward(params, shape, text[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, text[:, 1:]).mean()


def train(name, text, steps):
    """Train a model of `trained.SHAPES` for some steps on random windows of a text [length]: its weights."""
    shape = trained.SHAPES[name]
    rng, params = np.random.default_rng(0), transformer.init(shape)
    schedule = optax.warmup_cosine_decay_schedule(0, RATE[name], steps // 20, steps, RATE[name] / 50)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, b2=0.98, weight_decay=0.05))

    @jax.jit
    def step(params, state, windows):
        value, gradient = jax.value_and_grad(loss)(params, shape, windows)
        updates, state = optimizer.update(gradient, state, params)
        return optax.apply_updates(params, updates), state, value

    state, start = optimizer.init(params), time.time()
    for done in range(1, steps + 1):
        begins = rng.integers(0, len(text) - LENGTH, BATCH)
        params, state, value = step(params, state, text[begins[:, None] + np.arange(LENGTH + 1)])
        if done % 50 == 0:
            print(f"{name} {done} of {steps}: {value:.2f} nats a byte, {time.time() - start:.0f} s", flush=True)
    return params


def held_out_nats(params, shape, text):
    """Mean nats a byte over a text [length], in windows of LENGTH."""
    count = (len(text) - 1) // LENGTH
    windows = text[np.arange(count)[:, None] * LENGTH + np.arange(LENGTH + 1)]
    return float(np.mean([loss(params, shape, each) for each in np.array_split(windows, -(-count // 32))]))


def main(names):
    """Train and store the models that are named, all by default."""
    text, unseen = trained.seen(), trained.held_out()
    for name in names or trained.SHAPES:
        params = train(name, text, STEPS[name])
        trained.save(name, params, STEPS[name], held_out_nats(params, trained.SHAPES[name], unseen))
        print(f"{name}: {trained.record(name)}")


if __name__ == "__main__":
    main(sys.argv[1:])
