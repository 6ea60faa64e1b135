"""The studies of translation models: runs, files, BLEU, claims and pages."""

import json
import re
import sys
from functools import partial
from types import SimpleNamespace

import pytest
from test_scripts import ROOT
from test_study import result

from moe_ext.lab.studies import multilingual, translation
from moe_ext.lab.training.config import ConfigError, ParallelDataConfig
from moe_ext.lab.training.text import load_text
from moe_ext.lab.training.translation import bleu_of_test, translated_test

pytestmark = pytest.mark.usefixtures("one_thread")

TINY = [
    "steps=2", "model.d_model=8", "model.lstm_units=8", "log.tensorboard=false",
    "log.progress=false", "log.eval_every=1", "data.tokens_per_batch=500", "data.vocab_size=70",
]  # fmt: skip


def test_near_duplicates_share_most_trigrams_with_one_sentence():
    sentences = ["a b c d e f g h", "a b c x e f g h", "A b c d e f g", "short", "a b c d"]
    text = ["a b c d e f g h", "e f g h", "short"]
    near = translation.near_duplicates(sentences, text)
    # The first line of the text has 5 of 8 trigrams of the second sentence, and 3 of 4 of the last.
    assert near == [True, False, True, True, False]


def test_source_words_are_those_of_the_pairs_that_were_kept(tmp_path):
    lines = ["one two\tun deux", "three\ttrois", "\u2603 four five\tquatre cinq"]
    left_out = ["one two\t" + "un deux trois " * 20]
    for part in ("train", "dev", "test"):
        (tmp_path / f"{part}.en-fr.tsv").write_text("\n".join([*lines, *left_out]) + "\n")
    text = load_text(ParallelDataConfig(str(tmp_path), vocab_size=42, max_ratio=6.0))
    assert len(text.train) == 3 and translation.source_words(text) == 2 + 1 + 3


@pytest.mark.parametrize(
    ("claim", "other", "gaps"),
    [
        ("mixtures lower the perplexity of a model without them", "none", (-0.7, -0.6)),
        (
            "mixtures have a lower perplexity than dense layers with equal operations",
            "dense",
            (-0.3, -0.2),
        ),
    ],
)
def test_claims_compare_the_models_they_name(claim, other, gaps):
    """The differences for en-de are twice those for en-fr."""
    nll = {"moe-32": 1.0, "moe-32-balanced": 1.1, "dense": 1.3, "none": 1.7}
    parts = {"en-fr": 1, "en-de": 2, "all": 1.5}
    studies = {
        languages: SimpleNamespace(
            results={a: dict.fromkeys((1, 2), result(parts[languages] * nll[a])) for a in nll}
        )
        for languages in ("en-fr", "en-de")
    }
    found = {
        each.compared: each.difference.mean
        for each in translation.claims(studies)
        if each.claim == claim
    }
    assert found == pytest.approx(
        {
            f"{arm} against {other}, {part}": factor * gap
            for arm, gap in zip(("moe-32", "moe-32-balanced"), gaps, strict=True)
            for part, factor in parts.items()
        }
    )


def test_models_of_a_language_pair(parallel_corpus, tmp_path):
    main = partial(translation.main, root=ROOT)
    places = ["--runs", str(tmp_path / "runs"), "--output", str(tmp_path / "docs")]
    command = [*TINY, f"data.corpus={parallel_corpus}", *places, "--seeds", "1"]
    main([*command, "--pairs", "en-fr", "--arms", "none", "moe-32"])
    runs = tmp_path / "runs" / "en-fr"
    assert not (runs / "dense-seed1" / "result.json").exists()
    file = runs / "none-seed1" / "test-2.en-fr.txt"
    assert len(file.read_text().splitlines()) == 15
    file.write_text("frba\n" * 15)  # the study must not overwrite it

    main([*command, "--pairs", "en-fr", "en-de"])
    data = json.loads((tmp_path / "docs" / "translation.json").read_text())
    assert data["languages"].keys() == {"en-fr", "en-de"}
    french = data["languages"]["en-fr"]
    assert french["test_pairs"] == 15 and data["languages"]["en-de"]["train_pairs"] == 60
    assert french["models"].keys() == {"moe-32", "moe-32-balanced", "dense", "none"}
    scores = {name: runs[0]["score"] for name, runs in french["bleu"].items()}
    assert scores["none"] == bleu_of_test(runs / "none-seed1")["en-fr"].score
    assert translated_test(runs / "none-seed1") == {"en-fr": ["frba"] * 15}
    page = (tmp_path / "docs" / "translation.md").read_text()
    quoted = page.splitlines()[3]
    assert quoted.startswith("python scripts/studies/translation.py steps=2 model.d_model=8 ")
    assert quoted.endswith(" --seeds 1")
    assert page.count("    source           n") == 20 and "    none             frba" in page
    assert re.search(
        r"moe-32 against dense, en-fr \| \S+% \(one seed, not decided\) \| not decided \|", page
    )
    pooled = next(row for row in data["claims"] if row["compared"] == "moe-32 against dense, all")
    gaps = [
        each["models"]["moe-32"]["runs"][0]["test_nll"]
        - each["models"]["dense"]["runs"][0]["test_nll"]
        for each in data["languages"].values()
    ]
    assert pooled["difference"]["mean"] == pytest.approx(sum(gaps) / 2, abs=1e-12)
    assert (tmp_path / "docs" / "translation.png").stat().st_size > 0


def test_page_without_strict_gates_and_without_other_sentences(parallel_corpus, tmp_path):
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    train = (parallel_corpus / "train.en-fr.tsv").read_text()
    for part in ("train", "dev", "test"):
        (corpus / f"{part}.en-fr.tsv").write_text(train)
    places = ["--runs", str(tmp_path / "runs"), "--output", str(tmp_path / "docs")]
    studies = translation.main(
        [*TINY, f"data.corpus={corpus}", *places]
        + ["--seeds", "1", "--pairs", "en-fr", "--arms", "moe-32"],
        root=ROOT,
    )
    assert all(studies["en-fr"].near) and studies["en-fr"].distinct_bleu == {}
    page = (tmp_path / "docs" / "translation.md").read_text()
    assert "strictly balanced" not in page


def test_bleu_of_some_of_the_sentences(parallel_corpus, tmp_path):
    main = partial(translation.main, root=ROOT)
    places = ["--runs", str(tmp_path / "runs"), "--output", str(tmp_path / "docs")]
    overrides = [*TINY, f"data.corpus={parallel_corpus}"]
    main([*overrides, *places, "--seeds", "1", "--pairs", "en-fr", "--arms", "none"])
    run = tmp_path / "runs" / "en-fr" / "none-seed1"
    lines = (parallel_corpus / "test.en-fr.tsv").read_text().splitlines()
    references = [line.split("\t")[2] for line in lines]
    right = [number % 2 == 0 for number in range(15)]
    (run / "test-2.en-fr.txt").write_text(
        "".join(f"{text if keep else ''}\n" for text, keep in zip(references, right, strict=True))
    )
    assert bleu_of_test(run, right)["en-fr"].score == pytest.approx(100)
    assert bleu_of_test(run)["en-fr"].score < 90


def test_one_model_for_several_language_pairs(parallel_corpus, tmp_path):
    main = partial(multilingual.main, root=ROOT)
    places = ["--runs", str(tmp_path / "runs"), "--output", str(tmp_path / "docs")]
    overrides = [*TINY, f"data.corpus={parallel_corpus}", 'data.pairs=["en-fr","en-de"]']
    main([*overrides, *places, "--seeds", "1"])
    data = json.loads((tmp_path / "docs" / "multilingual.json").read_text())
    assert data["models"].keys() == {"moe", "dense", "moe-oversampled"}
    assert data["single"].keys() == {"en-fr", "en-de"}
    several = {"en-fr", "en-de"}
    assert {run: {*bleu} for run, bleu in data["bleu"].items()} == {
        "moe-seed1": several,
        "dense-seed1": several,
        "moe-oversampled-seed1": several,
        "single/en-fr-seed1": {"en-fr"},
        "single/en-de-seed1": {"en-de"},
    }
    page = (tmp_path / "docs" / "multilingual.md").read_text()
    figures, compared = data["figures"], data["comparisons"]["moe against single"]
    french, german = (
        figures["moe"][pair]["nll"] - figures["single"][pair]["nll"] for pair in ("en-fr", "en-de")
    )
    assert compared["difference"]["mean"] == pytest.approx((french + german) / 2, abs=1e-12)
    assert compared["num_pairs"] == 2
    assert compared["lower_perplexity"] == (french < 0) + (german < 0)
    assert page.count("| moe against ") == 2 and "| moe-oversampled against moe |" in page
    assert "| en-de | 60 |" in page and page.index("![en-de and en-fr]") > 0
    with pytest.raises(ConfigError, match="steps must"):
        main([*overrides, "steps=3", *places, "--seeds", "1"])


def test_the_better_model_has_less_perplexity_and_more_bleu():
    """Only language pairs of both models count; equal values count for neither model."""
    ours, theirs = (
        {name: multilingual.Figures(*each, num_seeds=1) for name, each in figures.items()}
        for figures in (
            {"a": (1.0, 20.0), "b": (1.0, 20.0), "c": (1.0, 20.0), "d": (3.0, 20.0), "e": (9, 9)},
            {"d": (2.0, 20.0), "c": (2.0, 21.0), "b": (2.0, 21.0), "a": (2.0, 19.0)},
        )
    )
    gap, *counts = multilingual.comparison(ours, theirs)
    assert gap.mean == -0.5 and counts == [4, 3, 1]
    assert f"{gap:.1f}" == "-0.5 (one seed, not decided)"


@pytest.mark.parametrize("script", [translation, multilingual])
def test_missing_sacrebleu_is_reported_first(monkeypatch, parallel_corpus, tmp_path, script):
    monkeypatch.setitem(sys.modules, "sacrebleu.metrics", None)
    with pytest.raises(ConfigError, match="sacrebleu must"):
        script.main([f"data.corpus={parallel_corpus}", "--runs", str(tmp_path / "runs")], ROOT)
    assert not (tmp_path / "runs").exists()
