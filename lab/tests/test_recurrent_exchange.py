"""The benchmark of the two ways in which ranks share the experts of a MoE-LSTM."""

import json

from moe_lab.benchmarks import recurrent_exchange


def test_bytes(tmp_path):
    """With k = E, a row of each rank goes to the other one, with the expert of each rank."""
    arguments = ["--batch", "1", "32", "--steps", "3", "--width", "4", "--experts", "2", "--k", "2"]
    arguments += ["--rounds", "2", "--json", str(tmp_path / "results.json")]
    assert recurrent_exchange.main(arguments) == 0
    rows = json.loads((tmp_path / "results.json").read_text())["rows"]
    assert [(row["batch"], row["way"]) for row in rows] == [
        (1, "rows"), (1, "gathered"), (32, "rows"), (32, "gathered")
    ]  # fmt: skip
    weights = 2 * 2 * 8 * 16 * 4  # two passes, two experts [8, 16]
    for row in rows:
        state = 2 * row["batch"] * 3 * (8 + 16) * 4  # of two ranks; an input and an output
        assert row["predicted"] == (2 * state if row["way"] == "rows" else weights)
        # Rows also have counts: each of two ranks sends one expert's and one chunk's each step.
        counts = 2 * 3 * 2 * 8 if row["way"] == "rows" else 0
        assert row["sent"] == row["predicted"] + counts
    assert [row["chosen"] for row in rows] == [True, False, False, True]
