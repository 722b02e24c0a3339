"""What a stored value weighs, scales included."""

import pytest

from lib.formats import Format, Precision, format

BITS = [
    ("f32", 32),
    ("bf16", 16),
    ("f16", 16),
    ("int8", 8),
    ("fp8", 8),
    ("int4", 4),
    ("fp4", 4),
    ("int4g128", 4.125),
    ("mxfp4", 4.25),
    ("nvfp4", 4.5),
    ("mxfp8", 8.25),
    ("int4g32", 4.5),
    ("fp8b128", 8 + 32 / 128**2),
]


@pytest.mark.parametrize(("name", "bits"), BITS)
def test_bits_with_their_share_of_the_scales(name, bits):
    """4 bits and a 16-bit scale per 128 are 4.125; MXFP4 4.25; NVFP4 4.5 (formulas.md, trap 8)."""
    assert bits / 8 == format(name).bytes


def test_a_format_passes_as_it_is():
    """One of your own needs no name in the table."""
    mine, equal = (Format("ternary", 1.6 / 8, "bf16") for _ in range(2))
    assert mine is format(mine) and mine is Precision(weights=mine).weights
    assert equal is format(equal)


@pytest.mark.parametrize("name", ["bf17", "", 8, None, "BF16 "])
def test_an_unknown_format_lists_the_known(name):
    """KeyError with the names there are."""
    with pytest.raises(KeyError, match="unknown format.*known: bf16.*nvfp4"):
        format(name)


@pytest.mark.parametrize("field", ["weights", "kv", "activations", "attention", "ffn", "embedding", "head"])
def test_every_field_of_a_precision_is_checked(field):
    """An unknown name is refused at the door, wherever it stands."""
    with pytest.raises(KeyError, match="unknown format"):
        Precision(**{field: "int5"})


@pytest.mark.parametrize("field", ["weights", "kv", "activations"])
def test_a_precision_needs_its_three_formats(field):
    """None is no format for weights, KV or activations: it would fail later, in other words."""
    with pytest.raises((KeyError, ValueError), match="format"):
        Precision(**{field: None})


@pytest.mark.parametrize("math", ["mxfp4", "nvfp4", "int3", None, ""])
def test_math_runs_in_hardware_formats_only(math):
    """Scaled formats are stored, not multiplied as such: the message lists what hardware multiplies."""
    with pytest.raises(KeyError, match="unknown math format.*known: bf16, f32, fp4, fp8, int4, int8"):
        Precision(math=math)


def test_modules_default_to_the_weights():
    """Embeddings, head, attention and FFN weigh like the rest unless told otherwise."""
    mixed = Precision("mxfp4", head="bf16")
    assert ("mxfp4", "mxfp4", "bf16") == tuple(mixed.of(m).name for m in ("ffn", "embedding", "head"))


def test_precision_is_bf16_by_default():
    """The book's default for weights, KV, activations and math."""
    assert ("bf16", "bf16", "bf16", "bf16") == (
        Precision().weights.name,
        Precision().kv.name,
        Precision().activations.name,
        Precision().math,
    )


def test_formats_may_be_arrays():
    """A sweep over bytes per weight is a format with an array in it."""
    import numpy as np

    assert [1.0, 2.0] == Precision(weights=Format("swept", np.array([1.0, 2.0]), "bf16")).weights.bytes.tolist()
