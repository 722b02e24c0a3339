"""The trained models are what their record says, and the text that they are judged by is one that they have not seen."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lib.demos import trained, transformer
from lib.demos.trained import train

SOURCE = '''
"""A module.

    Indented lines
      lose their indentation.
"""
"""Not a docstring: only the first statement is."""

class Thing:
    """A class."""

    size = """nor this"""

    def method(self):
        "A method."

def bare():
    return """nor what is returned"""

async def later():
    """Not read: SymPy has none."""
'''


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package in place of SymPy: two folders, one with tests."""
    for name, text in {
        "b/z.py": '"last"',
        "b/a.py": SOURCE,
        "b/tests/test_a.py": '"a test"',
        "c/only.py": "1 + 1",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(trained, "_package", lambda: tmp_path)


def test_docstrings_are_read_in_the_order_of_files_and_lines(package):
    """Modules, classes and functions, nothing else, without indentation; tests are left out."""
    expected = "A module.\n\nIndented lines\nlose their indentation.\n\nA class.\nA method.\nlast"
    assert trained.read(["b"]).decode() == expected
    assert trained.read(["b", "c"]).decode() == expected + "\n"


def test_training_reads_everything_but_what_is_held_out(package, monkeypatch):
    """Folders that were seen and the one that was not have nothing in common."""
    monkeypatch.setattr(trained, "HELD_OUT", "b")
    assert trained.seen().tolist() == []
    monkeypatch.setattr(trained, "HELD_OUT", "c")
    assert bytes(trained.seen().astype(np.uint8)).endswith(b"A method.\nlast")


def test_another_text_is_refused(package, monkeypatch):
    """A package whose docstrings have changed raises RuntimeError that says what to do."""
    monkeypatch.setattr(trained, "HELD_OUT", "b")
    with pytest.raises(RuntimeError, match="make models"):
        trained.held_out()


def test_the_held_out_text_is_geometry():
    """Bytes of the docstrings of SymPy's geometry, of whose classes they speak."""
    text = bytes(trained.held_out().astype(np.uint8)).decode()
    assert text.startswith("\nA geometry module for the SymPy library.")
    assert 100_000 < len(text) < 200_000
    assert all(text.count(name) > 50 for name in ("Circle", "Polygon", "Point", "Line", "Triangle"))


@pytest.mark.parametrize(("name", "least", "most"), [("target", 600_000, 900_000), ("draft", 20_000, 60_000)])
def test_weights_are_those_of_the_shape(name, least, most):
    """Every matrix has the size that `transformer.init` gives it; stored in two bytes a weight, less what compresses."""
    shape, params = trained.load(name)
    expected = jax.tree.map(lambda each: (each.shape, each.dtype), transformer.init(shape))
    assert jax.tree.map(lambda each: (each.shape, each.dtype), params) == expected
    count = sum(each.size for each in jax.tree.leaves(params))
    assert least < count < most
    assert count < trained._file(name).stat().st_size < 2 * count + 4096


def test_the_target_beats_the_draft_and_the_draft_beats_pairs_of_bytes():
    """Held-out nats per byte, computed through the cache, against the record and the text's own entropy given one byte."""
    text = trained.held_out()
    counts = np.zeros((256, 256))
    np.add.at(counts, (text[:-1], text[1:]), 1)
    joint = counts / counts.sum()
    pairs = -np.sum(
        joint * np.log(np.divide(joint, joint.sum(1, keepdims=True), out=np.ones_like(joint), where=joint > 0))
    )
    windows = jnp.asarray(text[: 32 * 4096].reshape(32, 4096)[:, :257])
    nats = {}
    for name in trained.SHAPES:
        shape, params = trained.load(name)
        logits, _ = transformer.extend(params, shape, transformer.empty_cache(shape, 32, 256), windows[:, :-1], 0)
        nats[name] = -np.take_along_axis(np.asarray(jax.nn.log_softmax(logits)), windows[:, 1:, None], -1).mean()
        assert nats[name] == pytest.approx(trained.record(name)["nats"], rel=0.05)
        assert nats[name] == pytest.approx(float(train.loss(params, shape, windows)), rel=1e-3)
    assert nats["target"] < 0.9 * nats["draft"]
    assert nats["draft"] < 0.75 * pairs


def test_training_learns_and_is_stored(tmp_path, monkeypatch):
    """A few steps on text of one letter make it certain; what is saved is loaded, to half precision."""
    params = train.train("draft", np.full(300, 97, np.int32), 20)
    shape = trained.SHAPES["draft"]
    assert train.held_out_nats(params, shape, np.full(33 * 256 + 1, 97)) < 0.1
    monkeypatch.setattr(trained, "_file", lambda name: tmp_path / f"{name}.npz")
    trained.save("draft", params, 20, 0.125)
    assert trained.record("draft") == {"steps": 20, "nats": 0.125}
    _, loaded = trained.load("draft")
    for one, other in zip(jax.tree.leaves(loaded), jax.tree.leaves(params), strict=True):
        np.testing.assert_allclose(one, other, rtol=2**-11, atol=2**-24)


def test_an_unknown_model_is_refused():
    """The message names those that there are."""
    for function in (trained.load, trained.record):
        with pytest.raises(ValueError, match="target, draft"):
            function("judge")
