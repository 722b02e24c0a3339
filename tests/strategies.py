"""What the laws range over: every chip, model, format and plan that go together, and sizes."""

from functools import cache

from hypothesis import strategies as st

from lib.chips import chip, chip_names
from lib.facts import table
from lib.formats import HARDWARE, Precision
from lib.models import model, model_names
from lib.network import ALGORITHMS
from lib.server import Plan, Server

CHIPS = {name: chip(name) for name in chip_names()}
MODELS = {name: model(name) for name in model_names()}
FORMATS = tuple(row["format"] for row in table("formats"))
MATH = {name: tuple(f for f in HARDWARE if getattr(one, f) is not None) for name, one in CHIPS.items()}
TENSOR = (1, 2, 4, 8, 16, 32, 64)
# One plain feed-forward network a layer and attention over every token: what the closed forms describe.
DENSE = (
    "llama-2-7b",
    "llama-2-13b",
    "llama-2-70b",
    "llama-3.1-8b",
    "llama-3.1-70b",
    "llama-3.1-405b",
    "qwen2.5-72b",
    "qwen3-32b",
    "chinchilla-70b",
)
# Heads that split: neither latents nor recurrent states.
GROUPED = (
    *DENSE,
    "mistral-7b-v0.1",
    "gemma-2-27b",
    "gemma-3-27b",
    "mixtral-8x7b",
    "mixtral-8x22b",
    "gpt-oss-20b",
    "gpt-oss-120b",
    "llama-4-scout",
    "llama-4-maverick",
    "glm-4.6",
    "minimax-m2.5",
)

batches = st.integers(1, 4096)
contexts = st.integers(1, 200_000)


@cache
def ways(model_name, chip_name):
    """The tensor plans that the model's heads and widths and the chip's network can take."""
    found = []
    for tensor in TENSOR:
        try:
            Server(MODELS[model_name], CHIPS[chip_name], Plan(tensor))
        except ValueError:
            continue
        found.append(tensor)
    return tuple(found)


def server(model_name="llama-3-70b", chip_name="ironwood", tensor=1, cut="heads", page=1, **formats):
    """A server by names: `server("llama-3-70b", "ironwood", 8, weights="fp8")`; `cut` is how the cache is cut."""
    return Server(model(model_name), chip(chip_name), Plan(tensor, kv=cut, page=page), Precision(**formats))


def precisions(chip_name, fields=("weights", "kv", "activations")):
    """Any stored formats, and a math format that the chip multiplies."""
    return st.builds(Precision, math=st.sampled_from(MATH[chip_name]), **{f: st.sampled_from(FORMATS) for f in fields})


@st.composite
def servers(draw, models=tuple(MODELS), kv=("heads", "batch", "sequence"), chips=tuple(CHIPS)):
    """Every chip x model x plan x format that is valid, plans in all their axes."""
    model_name, chip_name = draw(st.sampled_from(models)), draw(st.sampled_from(chips))
    tensor, chip = draw(st.sampled_from(ways(model_name, chip_name))), CHIPS[chip_name]
    experts = {b.ffn.n_experts for b in MODELS[model_name].blocks} - {1}
    expert = draw(st.sampled_from([x for x in (1, 1, 2, 4, 8) if not any(e % x for e in experts)]))
    pipeline = draw(st.sampled_from((1, 1, 1, 2, 3, 8)))
    if tensor * expert * pipeline > chip.interconnect.domain:
        expert = pipeline = 1
    plan = Plan(
        tensor,
        expert,
        pipeline,
        draw(st.sampled_from((1, 1, 2, 5))),
        draw(st.sampled_from(kv)),
        draw(st.sampled_from((1, 16, 128))),
        draw(st.sampled_from(ALGORITHMS)),
    )
    return Server(MODELS[model_name], chip, plan, draw(precisions(chip_name)))


def nodes(tree):
    """Every node of a breakdown, the tree itself first."""
    yield tree
    for part in tree.parts:
        yield from nodes(part)


def leaves(tree, path=""):
    """{path: value} of the leaves of a breakdown."""
    if not tree.parts:
        return {path.strip("/"): tree.value}
    return {key: value for part in tree.parts for key, value in leaves(part, f"{path}/{part.name}").items()}
