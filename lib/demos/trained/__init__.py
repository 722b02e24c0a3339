"""Two trained byte-level models of the demo transformer, a target and a draft, and the text that they have not seen.

They have read the docstrings of SymPy 1.14.0 (BSD licence, copyright SymPy Development Team) except those of
`sympy.geometry`. Only the weights are stored here, in float16, as `train` made them; the text is read from the installed
package.
"""

import ast
import hashlib
from importlib.util import find_spec
from pathlib import Path

import jax.numpy as jnp
import numpy as np

from lib.demos import transformer

SHAPES = {
    "target": transformer.Shape(layers=4, d_model=128, n_heads=4, n_kv_heads=2, d_head=32, d_ff=384, vocab=256),
    "draft": transformer.Shape(layers=1, d_model=64, n_heads=2, n_kv_heads=1, d_head=32, d_ff=128, vocab=256),
}
MATRICES = ("qkv", "out", "gate_up", "down")
HELD_OUT, SHA256 = "geometry", "9e650c3d403113ff26a76b5965da7870964323d92e79ea9ac40b92831e4f4373"


def load(name):
    """A trained model: (Shape, weights as `transformer.init` lays them out).

    name: "target" or "draft". Raises ValueError for another name.
    """
    stored, shape = _stored(name), SHAPES[name]
    weights = {key: jnp.asarray(np.float32(each), transformer.dtype()) for key, each in stored.items() if each.ndim}
    layers = [{matrix: weights[f"{layer}.{matrix}"] for matrix in MATRICES} for layer in range(shape.layers)]
    return shape, {"embedding": weights["embedding"], "layers": layers}


def record(name):
    """What training left: {"steps": how many, "nats": held-out nats per byte}. Raises ValueError as `load` does."""
    return {key: each.item() for key, each in _stored(name).items() if not each.ndim}


def save(name, params, steps, nats):
    """Store a model that `load` finds, and what `record` says of it. Raises ValueError as `load` does."""
    layers = {f"{i}.{key}": matrix for i, layer in enumerate(params["layers"]) for key, matrix in layer.items()}
    half = {key: np.asarray(each, np.float16) for key, each in {"embedding": params["embedding"], **layers}.items()}
    np.savez_compressed(_file(name), **half, steps=steps, nats=nats)


def held_out():
    """The text that no model has seen, as bytes: an int32 array [length].

    Raises RuntimeError when it is not the text that the figures of the book belong to.
    """
    text = read([HELD_OUT])
    if hashlib.sha256(text).hexdigest() != SHA256:
        raise RuntimeError("the docstrings of sympy.geometry are not those of SymPy 1.14.0: install the version of "
                           "requirements.lock, or set SHA256 anew and train again (make models)")
    return tokens(text)


def seen():
    """The text that the models were trained on, as `held_out`: ten seconds of parsing."""
    folders = sorted(path.name for path in _package().iterdir() if path.is_dir())
    return tokens(read(folder for folder in folders if folder not in (HELD_OUT, "tests", "__pycache__")))


def read(folders):
    """The docstrings of folders of SymPy, tests apart, in the order of files and lines, without indentation: bytes."""
    files = (path for folder in folders for path in sorted((_package() / folder).rglob("*.py"), key=str))
    return b"\n".join(_docstrings(path) for path in files if "tests" not in path.parts)


def tokens(text):
    """Bytes as tokens: int32 [length]."""
    return np.frombuffer(text, np.uint8).astype(np.int32)


def _stored(name):
    with np.load(_file(name)) as stored:
        return dict(stored)


def _package():
    return Path(*find_spec("sympy").submodule_search_locations)


def _docstrings(path):
    nodes = ast.walk(ast.parse(path.read_bytes()))
    documented = [node.body[0].value for node in nodes if isinstance(getattr(node, "body", None), list) and node.body
                  and isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and isinstance(node.body[0], ast.Expr)]
    texts = [(each.lineno, each.value) for each in documented if isinstance(each, ast.Constant) and isinstance(each.value, str)]
    return "\n".join(line.strip() for _, text in sorted(texts) for line in text.split("\n")).encode()


def _file(name):
    if name not in SHAPES:
        raise ValueError(f"trained models are {', '.join(SHAPES)}, not {name!r}")
    return Path(__file__).with_name(f"{name}.npz")
