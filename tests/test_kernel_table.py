"""The table that selects the kernels of a GEMM, also for processors that are not here."""

import itertools
import re

import pytest
from machine import instruction_sets

from moe_ext import _build, info

DTYPES, LAYOUTS = ("float64", "float32", "bfloat16", "float16"), ("along_n", "along_k")
FEW, MANY = (1, 4, 10), (11, 64, 640)
IN_PLACE = {"along_n": "axpyf", "along_k": "dotxf"}

# The vendor and the highest instruction set of processors; the instruction set that is used; and
# the kernels for bfloat16 with few rows and with many, for float16, and for float32 and float64.
# None: few rows are packed too.
AMX_FEW = "AVX-512, widened numbers, sums in the order of AMX"
AVX_512, AVX2 = ["AVX-512"] * 4, ["AVX2"] * 4
PROCESSORS = {
    "AMD Zen 3": ("amd", "avx2", "avx2", AVX2),
    "AMD Zen 4": ("amd", "avx512_bf16", "avx512_bf16", ["AVX512-BF16"] * 2 + ["AVX-512"] * 2),
    "AMD Zen 5": ("amd", "avx512_bf16", "avx512_bf16", ["AVX512-BF16"] * 2 + ["AVX-512"] * 2),
    "Intel Skylake": ("intel", "avx512", "avx512", AVX_512),
    "Intel Ice Lake": ("intel", "avx512", "avx512", AVX_512),
    "Intel Cooper Lake": ("intel", "avx512_bf16", "avx512", AVX_512),
    "Intel Sapphire Rapids": ("intel", "amx", "amx", [AMX_FEW, "AMX", "AVX-512", "AVX-512"]),
    "Intel Granite Rapids": ("intel", "amx", "amx", [AMX_FEW, "AMX", "AVX-512", "AVX-512"]),
    "Intel Sapphire Rapids without tiles": ("intel", "avx512_bf16", "avx512", AVX_512),
    "Intel Alder Lake": ("intel", "avx2", "avx2", AVX2),
    "other x86-64 with AVX512-BF16": ("any", "avx512_bf16", "avx512", AVX_512),
    "x86-64 without AVX2": ("any", "default", "default", [None, "portable", None, "portable"]),
    "Arm Neoverse N1": ("any", "neon", "neon", [None, "NEON", None, "NEON"]),
    "Arm Neoverse V1": ("any", "neon_bf16", "neon_bf16", ["NEON-BF16"] * 2 + [None, "NEON"]),
}


def rule_of(isa, dtype, rows, layout):
    return _build.gemm_rules()[_build.gemm_rule(isa, dtype, rows, layout)]


@pytest.mark.parametrize("name", PROCESSORS)
def test_kernels_of_a_processor(name):
    vendor, highest, isa, (few_bfloat16, bfloat16, float16, floats) = PROCESSORS[name]
    assert _build.preferred_isa(vendor, highest) == isa
    for dtype, layout in itertools.product(DTYPES, LAYOUTS):
        few = {"bfloat16": few_bfloat16, "float16": float16}.get(dtype, floats)
        many = bfloat16 if dtype == "bfloat16" else floats
        for rows in MANY:
            rule = rule_of(isa, dtype, rows, layout)
            assert (rule.reading, rule.kernels) == ("packs", many)
        for rows in FEW:
            rule = rule_of(isa, dtype, rows, layout)
            in_place = (IN_PLACE[layout], few)
            assert (rule.reading, rule.kernels) == (in_place if few else ("packs", many))


def test_every_rule_is_used():
    """Each row of the table is the first one for its own values."""
    rules = _build.gemm_rules()
    for index, rule in enumerate(rules):
        layouts = LAYOUTS if rule.layout == "any" else [rule.layout]
        assert rule.last_rows >= 1
        for dtype, layout in itertools.product(rule.types, layouts):
            assert _build.gemm_rule(rule.isa, dtype, rule.last_rows, layout) == index
        if rule.vendor != "any":
            assert _build.preferred_isa(rule.vendor, rule.isa) == rule.isa
            assert _build.preferred_isa("any", rule.isa) != rule.isa


@pytest.mark.parametrize("isa", sorted({rule.isa for rule in _build.gemm_rules()}))
def test_a_forced_instruction_set_is_used(isa):
    """MOE_EXT_ISA=avx512_bf16 uses its instructions on Intel processors too."""
    used = {rule_of(isa, dtype, 640, "along_n").isa for dtype in DTYPES}
    assert isa in used


def test_names_of_the_kernels():
    """The table names the micro-kernels that this process uses."""
    for dtype, name in _build.products().items():
        assert rule_of(_build.isa(), dtype, 640, "along_n").kernels == name


def test_unknown_names():
    with pytest.raises(ValueError, match="type must be a known name, got int8"):
        _build.gemm_rule("avx2", "int8", 1, "along_n")
    with pytest.raises(ValueError, match="isa must be a known name, got mmx"):
        _build.preferred_isa("amd", "mmx")


def test_the_table_is_printed(capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["moe_ext.info", "--verbose"])
    assert info.main() == 0
    printed = capsys.readouterr().out
    lines = re.findall(r"^[* ]  (?:float|bfloat).*$", printed, re.M)
    rules = _build.gemm_rules()
    assert len(lines) == len(rules)
    isa = _build.isa()
    for line, rule in zip(lines, rules, strict=True):
        assert all(word in line for word in (*rule.types, rule.isa, rule.kernels))
        if rule.isa == isa:
            assert line.startswith("*") or not set(DTYPES) & set(rule.types)
        if rule.isa not in instruction_sets():
            assert line.startswith(" ")
    monkeypatch.setattr("sys.argv", ["moe_ext.info"])
    assert info.main() == 0
    assert printed.startswith(capsys.readouterr().out[:100])
