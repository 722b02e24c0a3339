"""Explanations to review: `GOLDEN=1 pytest tests/test_golden.py` rewrites them, and their diff is the review."""

import os
from pathlib import Path

import pytest
from strategies import server

from lib.breakdown import explain
from lib.chips import chip
from lib.forward import decode_step
from lib.models import model
from lib.server import Plan, Server
from lib.speculation import speculate

CASES = {
    "llama-3-70b_on_8_ironwood": dict(server=server("llama-3-70b", "ironwood", 8), batch=64, context=32768),
    "mixtral-8x7b_on_1_ironwood": dict(server=server("mixtral-8x7b", "ironwood"), batch=8, context=4096),
    "deepseek-v3_on_8_ironwood_cut_by_batch": dict(
        server=server(
            "deepseek-v3", "ironwood", 8, "batch", weights="fp8b128", kv="fp8", embedding="bf16", head="bf16"
        ),
        batch=256,
        context=8192,
    ),
    "deepseek-v3_on_64_h200_in_every_axis": dict(
        server=Server(model("deepseek-v3"), chip("h200"), Plan(4, 4, 2, 2, "sequence"), model("deepseek-v3").native),
        batch=512,
        context=8192,
    ),
    "gpt-oss-120b_on_4_h100": dict(server=server("gpt-oss-120b", "h100", 4, ffn="mxfp4"), batch=32, context=8192),
    "llama-3-70b_with_a_draft_of_8b_on_8_ironwood": dict(
        target=server("llama-3-70b", "ironwood", 8),
        draft=server("llama-3-8b", "ironwood", 8, weights="int4"),
        k=4,
        batch=64,
        context=8192,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_golden(name):
    """Value, formula and legend of every term of a decode step, or of a round with a draft, letter by letter."""
    path = Path(__file__).parent / "golden" / f"{name}.txt"
    text = str(explain(speculate if "draft" in CASES[name] else decode_step, **CASES[name])) + "\n"
    if os.environ.get("GOLDEN"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8")


def test_no_golden_text_is_left_over():
    """Every file has its case."""
    assert set(CASES) == {path.stem for path in (Path(__file__).parent / "golden").glob("*.txt")}
