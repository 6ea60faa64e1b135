"""Compares the guarantees of README.md with the marked tests and the measured speed."""

import json
import re
from pathlib import Path

from marked import marked

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
GUARANTEES = README.split("## What it guarantees")[1].split("\n## ")[0]
SPEED = README.split("## Speed")[1].split("\n## ")[0]


def test_every_guarantee_has_its_tests():
    titles = set(re.findall(r"^- \*\*(.*)\.\*\*", GUARANTEES, re.M))
    assert len(titles) == len(re.findall("^- ", GUARANTEES, re.M))
    assert {name for _, name in marked("guarantee")} == titles


def test_the_experts_are_faster_than_all_peers():
    """In every shape and direction of docs/results/experts.json that README speaks of."""
    stored = json.loads((ROOT / "docs" / "results" / "experts.json").read_text())
    results = [
        result
        for result in stored["results"]
        if result["dtype"] == "float32" and result["threads"] == 1
    ]
    assert f"for {len(results)} of {len(results)} shapes" in " ".join(SPEED.split())
    for result in results:
        figures = result["figures"]
        for direction in ("forward", "forward+backward"):
            peers = {
                name: figures[name][direction]["ratio_to_ours"][1]
                for name in figures.keys() - {"ours", "experts", "dense"}
                if direction in figures[name]
            }
            assert 1 <= len(peers) <= 4 and min(peers.values()) > 1, (result["name"], direction)
