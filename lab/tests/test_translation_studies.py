"""The studies of translation models: runs, files, BLEU, claims and pages."""

import json
import re

import pytest
import torch
from moe_lab.data import batches_of
from moe_lab.errors import ConfigError
from moe_lab.experiments.store import Stored
from moe_lab.studies import multilingual as multilingual_page
from moe_lab.studies import translation as report
from moe_lab.studies.entries import run as run_study
from moe_lab.training.checkpoint import load_run
from moe_lab.training.config import ParallelDataConfig, read_config
from moe_lab.training.text import load_part, load_text
from moe_lab.training.translation import bleu_of_test, translated_test
from tiny import rebuilds

pytestmark = pytest.mark.usefixtures("one_thread")


def run(study, corpus, tmp_path, *options):
    """Runs a study of tiny models with one seed."""
    places = ["--runs", str(tmp_path / "runs"), "--output", str(tmp_path / "docs")]
    return run_study(study, [*TINY, f"data.corpus={corpus}", "--seeds=1", *places, *options])


TINY = [
    "steps=2", "model.d_model=8", "model.lstm_units=8", "log.tensorboard=false",
    "log.progress=false", "log.eval_every=1", "data.tokens_per_batch=500", "data.vocab_size=70",
]  # fmt: skip
FRENCH = ["--pair", "en-fr"]


def test_near_duplicates_share_most_trigrams_with_one_sentence():
    sentences = ["a b c d e f g h", "a b c x e f g h", "A b c d e f g", "short", "a b c d"]
    text = ["a b c d e f g h", "e f g h", "short"]
    near = report.near_duplicates(sentences, text)
    # The first line of the text has 5 of 8 trigrams of the second sentence, and 3 of 4 of the last.
    assert near == [True, False, True, True, False]


def test_source_words_are_those_of_the_pairs_that_were_kept(tmp_path):
    lines = ["one two\tun deux", "three\ttrois", "\u2603 four five\tquatre cinq"]
    left_out = ["one two\t" + "un deux trois " * 20]
    for part in ("train", "dev", "test"):
        (tmp_path / f"{part}.en-fr.tsv").write_text("\n".join([*lines, *left_out]) + "\n")
    text = load_text(ParallelDataConfig(str(tmp_path), vocab_size=42, max_ratio=6.0))
    assert len(text.train) == 3 and report.source_words(text) == 2 + 1 + 3


def test_models_of_a_language_pair(parallel_corpus, tmp_path):
    places = [*FRENCH, "--runs", str(tmp_path / "runs"), "--output", str(tmp_path / "docs")]
    command = [*TINY, f"data.corpus={parallel_corpus}", *places, "--seeds", "1"]
    runs, name = tmp_path / "runs" / "translation_captions_en-fr", "translation_captions_en-fr"
    run_study("translation", [*command, "--arms", "none"])
    assert not (runs / "dense-seed1").exists()
    assert len((runs / "none-seed1" / "test-2.en-fr.txt").read_text().splitlines()) == 15

    # The study goes on with the file, without the runs that it holds.
    runs.rename(tmp_path / "elsewhere")
    trained = [run["arm"] for run in run_study("translation", command).runs]
    assert trained == [*report.MODELS]
    assert not (runs / "none-seed1").exists() and (runs / "moe-32-seed1").exists()
    files = [tmp_path / "docs" / f"{name}.{end}" for end in ("md", "png", "json")]
    data = json.loads(files[2].read_text())
    assert data["settings"]["train_pairs"] == 120 and data["settings"]["test_pairs"] == 15
    assert data["settings"]["model.d_model"] == 8 and data["settings"]["log.eval_every"] == 1
    stored = {run["arm"]: run for run in data["runs"]}
    translations = translated_test(runs / "dense-seed1")["en-fr"]
    assert stored["dense"]["shown"] == [translations[n] for n in report.numbers_shown(15)]
    assert stored["dense"]["bleu"] == bleu_of_test(runs / "dense-seed1")["en-fr"].score
    assert [arm for arm, run in stored.items() if run["masks"]] == ["moe-32-balanced"]
    gap = stored["moe-32"]["test_nll"] - stored["dense"]["test_nll"]
    assert data["claims"][2]["difference"]["mean"] == pytest.approx(gap, abs=1e-12)
    page = files[0].read_text()
    assert "moe-lab study translation --pair en-fr data.corpus=CORPUS" in page
    assert re.search(
        r"moe-32 against dense \| \S+% \(one seed, not decided\) \| not decided \|", page
    )
    assert page.count("    source           n") == 10 and "    none             " in page
    assert "are strictly balanced" in page and "Transformer-Tiny has BLEU 61.80" in page

    # The report does not need the corpus.
    assert rebuilds("translation", name, tmp_path / "docs", *FRENCH, "--runs", str(tmp_path / "x"))


def test_the_text_determines_settings_and_file(parallel_corpus, tmp_path, capsys):
    run("translation", parallel_corpus, tmp_path, "--report")
    assert "nothing to report yet" in capsys.readouterr().out
    run("translation", parallel_corpus, tmp_path, "--arms", "none")
    file = tmp_path / "docs" / "translation_captions_en-de.json"
    assert json.loads(file.read_text())["settings"]["model.dropout"] == 0.2
    page = file.with_suffix(".md").read_text()
    assert "Multi30k" in page and "Transformer-Tiny has BLEU 41.02" in page
    with pytest.raises(ConfigError, match="must hold runs with {'optimizer.warmup_steps': 1}"):
        run("translation", parallel_corpus, tmp_path, "optimizer.warmup_steps=1")
    with pytest.raises(ConfigError, match="data.pairs must be that of --pair"):
        run("translation", parallel_corpus, tmp_path, 'data.pairs=["en-fr"]')


def test_page_without_strict_gates_and_without_other_sentences(parallel_corpus, tmp_path):
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    train = (parallel_corpus / "train.en-fr.tsv").read_text()
    for part in ("train", "dev", "test"):
        (corpus / f"{part}.en-fr.tsv").write_text(train)
    run("translation", corpus, tmp_path, *FRENCH, "--arms", "moe-32")
    file = tmp_path / "docs" / "translation_captions_en-fr.json"
    data = json.loads(file.read_text())
    assert data["settings"]["near_duplicates"] == [*range(120)]
    assert [run["distinct_bleu"] for run in data["runs"]] == [None]
    page = file.with_suffix(".md").read_text()
    assert "strictly balanced" not in page and "| BLEU without near duplicates |" in page
    few = data["settings"] | {"near_duplicates": [3]}  # of 120
    few = report.table(few, Stored(few, data["runs"]).by_arm())
    assert "BLEU, lowercased |" in few and "near" not in few


def test_bleu_of_some_of_the_sentences(parallel_corpus, tmp_path):
    run("translation", parallel_corpus, tmp_path, *FRENCH, "--arms", "none")
    folder = tmp_path / "runs" / "translation_captions_en-fr" / "none-seed1"
    lines = (parallel_corpus / "test.en-fr.tsv").read_text().splitlines()
    references = [line.split("\t")[2] for line in lines]
    right = [number % 2 == 0 for number in range(15)]
    (folder / "test-2.en-fr.txt").write_text(
        "".join(f"{text if keep else ''}\n" for text, keep in zip(references, right, strict=True))
    )
    assert bleu_of_test(folder, right)["en-fr"].score == pytest.approx(100)
    assert bleu_of_test(folder)["en-fr"].score < 90
    near = [number for number, keep in enumerate(right) if not keep]
    assert report.tested(folder, "en-fr", near)["distinct_bleu"] == pytest.approx(100)
    (folder / "test-2.en-fr.txt").write_text("".join(f"{text.upper()}\n" for text in references))
    scores = report.tested(folder, "en-fr", near)
    assert scores["lowercased_bleu"] == pytest.approx(100) and scores["bleu"] < 50


def test_one_model_for_several_language_pairs(parallel_corpus, tmp_path):
    options = ['data.pairs=["en-fr","en-de"]']
    files = [tmp_path / "docs" / f"multilingual_captions.{end}" for end in ("md", "png", "json")]
    run("multilingual", parallel_corpus, tmp_path, *options)
    page = files[0].read_text()
    assert "moe against single" in page
    more = ["--arms", "single-short"]
    run("multilingual", parallel_corpus, tmp_path, *options, *more)
    data = json.loads(files[2].read_text())
    pairs = {run["arm"]: [*run["pairs"]] for run in data["runs"]}
    several = ["en-fr", "en-de"]
    assert pairs == {
        "moe": several, "dense": several,
        "single en-fr": ["en-fr"], "single en-de": ["en-de"],
        "single-short en-fr": ["en-fr"], "single-short en-de": ["en-de"],
    }  # fmt: skip
    assert data["settings"]["train_pairs"] == {"en-fr": 120, "en-de": 60}
    moe = tmp_path / "runs" / "captions" / "moe-seed1"
    stored = {run["arm"]: run for run in data["runs"]}
    assert stored["moe"]["pairs"]["en-de"]["bleu"] == bleu_of_test(moe)["en-de"].score
    nll = {arm: {p: r["nll"] for p, r in run["pairs"].items()} for arm, run in stored.items()}
    assert nll["single en-fr"]["en-fr"] == pytest.approx(stored["single en-fr"]["test_nll"])
    french, german = (nll["moe"][p] - nll[f"single {p}"][p] for p in several)
    compared = {claim["compared"]: claim for claim in data["claims"]}["moe against single"]
    assert compared["difference"]["mean"] == pytest.approx((french + german) / 2, abs=1e-12)
    assert compared["num_pairs"] == 2
    assert compared["lower_perplexity"] == (french < 0) + (german < 0)
    page = files[0].read_text()
    assert page.count("| moe against ") == 3
    assert "| the same, for as much text of each language pair | moe against single-short |" in page
    assert "| en-de | 60 |" in page and page.count("--arms single-short\n") == 1
    warmup = [
        read_config(moe.with_name(name) / "config.toml").optimizer.warmup_steps
        for name in ("moe-seed1", "single-en-fr-seed1", "single-short-en-fr-seed1")
    ]
    assert warmup == [300, 150, 75]
    with pytest.raises(ConfigError, match="steps"):
        run("multilingual", parallel_corpus, tmp_path, *options, "steps=3")

    assert rebuilds("multilingual", "multilingual_captions", tmp_path / "docs")


def test_attention_on_the_language_token(parallel_corpus, tmp_path):
    run("multilingual", parallel_corpus, tmp_path, "--arms", "dense attends language")
    folder = tmp_path / "runs" / "captions" / "dense-attends-language-seed1"
    trained = load_run(folder)
    dev = load_part(trained.config.data, trained.vocabulary, "dev")
    lstm, weights = trained.model.attention_lstm, []
    lstm.attention.register_forward_hook(
        lambda module, inputs, output: weights.append(float(output[1][0, 0, 0]))
    )
    with torch.no_grad():
        for batch in batches_of(dev, tokens_per_batch=1, shuffle=False).epoch(0):  # one pair each
            lstm(
                trained.model.embedding(batch.inputs),
                trained.model.encode(batch.source, batch.source_mask),
            )
    assert len(weights) == dev.num_tokens
    mean = sum(weights) / len(weights)
    assert multilingual_page.weight_of_language(folder, dev) == pytest.approx(mean, rel=1e-5)
