"""The page on CUDA shows what the kernels read and write now."""

import subprocess
import sys
from pathlib import Path

import cuda_traffic
import pytest
from cuda_traffic import LAYERS, TERMS, formula_of

ROOT = Path(__file__).resolve().parents[1]


def test_a_formula_is_found_from_counts():
    coefficients = (0, 2, 4, 0, 8, 0, -3, 16)
    terms = [[term(sizes) for term in TERMS.values()] for sizes in LAYERS]
    counts = [sum(c * t for c, t in zip(coefficients, row, strict=True)) for row in terms]
    formula = formula_of(counts)
    assert formula.coefficients == coefficients
    assert str(formula) == "2 R·D + 4 R·n"
    with pytest.raises(ValueError, match="no sum of"):
        formula_of([count + (i == 11) for i, count in enumerate(counts)])


def test_names_of_kernels_are_short():
    name = "void moe_ext::cuda::(anonymous namespace)::a_kernel<(moe_ext::B)1, float>(float const*)"
    assert cuda_traffic.short(name) == "a_kernel"
    assert cuda_traffic.short("moe_ext::cuda::(anonymous namespace)::b_kernel(long)") == "b_kernel"


@pytest.mark.long
def test_the_page_has_the_bytes_of_the_kernels():
    """In a process of its own, which compiles the kernels for counting."""
    done = subprocess.run(
        [sys.executable, ROOT / "tests" / "cuda_traffic.py"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout in (ROOT / "docs" / "results" / "cuda.md").read_text()
