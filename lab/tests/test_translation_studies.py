"""The studies of translation models: runs, files, BLEU, claims and pages."""

import json
import re

import pytest
import torch
from moe_lab.data import batches_of
from moe_lab.errors import ConfigError
from moe_lab.experiments.arms import Arm
from moe_lab.experiments.store import Runs, Stored
from moe_lab.studies import multilingual as multilingual_page
from moe_lab.studies import translation as report
from moe_lab.studies.table import run as run_study
from moe_lab.training.checkpoint import load_run
from moe_lab.training.config import ParallelDataConfig, read_config
from moe_lab.training.metrics import perplexity
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


def test_claims_compare_the_models_they_name():
    values = {"moe-32": (1.0, 30), "moe-32-balanced": (1.1, 28), "dense": (1.3, 29), "none": (2, 9)}
    runs = Runs(
        {
            # BLEU varies so much over the seeds that no difference of 1 is significant.
            Arm(arm): {
                seed: {"test_nll": nll, "bleu": bleu + seed * (arm == "moe-32")}
                for seed in (-1, 0, 1)
            }
            for arm, (nll, bleu) in values.items()
        }
    )
    runs[Arm("moe-32")][9] = {"test_nll": 5.0, "bleu": 0}  # no other model has the seed
    found = report.comparisons(runs)
    without = "mixtures translate better than a model without them"
    equal = "mixtures translate better than dense layers with equal operations"
    assert [(each.claim, each.compared) for each in found] == [
        (without, "moe-32 against none"), (without, "moe-32-balanced against none"),
        (equal, "moe-32 against dense"), (equal, "moe-32-balanced against dense"),
    ]  # fmt: skip
    assert [each.difference.mean for each in found] == pytest.approx([-1.0, -0.9, -0.3, -0.2])
    assert [each.bleu.mean for each in found] == [21, 19, 1, -1]
    text, table = report.claims(runs)
    assert text == report.DECIDED
    assert [each["bleu"]["mean"] for each in table.data] == [21, 19, 1, -1]
    lines = table.table.splitlines()[2:]
    assert [line.split(" | ")[3:] for line in lines] == [
        ["supported", "+21.00 [+18.52, +23.48]", "supported |"],
        ["supported", "+19.00 [+19.00, +19.00]", "supported |"],
        ["supported", "+1.00 [-1.48, +3.48]", "not decided |"],
        ["supported", "-1.00 [-1.00, -1.00]", "contradicted |"],
    ]
    del runs[Arm("none")]
    missing = [each.difference is None for each in report.comparisons(runs)]
    assert missing == [True, True, False, False]
    assert "moe-32 against none" not in report.claims(runs)[1].table
    text, table = report.claims(Runs())
    assert text == table.table == "" and len(table.data) == 4


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


def test_convergence_is_measured_from_an_evaluation_before_the_last_tenth():
    dev = [[step, 3 - step / 1000] for step in (*range(200, 2500, 200), 2500)]
    runs = Runs({Arm("none"): {1: {"dev": dev}, 2: {"dev": dev}}})
    text = report.convergence(runs, report.MODELS)
    assert text.endswith("in the last 12% of the training: none -25.9%.")  # 2,200 of 2,500
    # Steps of 90% may have slightly more of the tokens.
    dev = [[1000, 3.0], [1801, 2.0], [2000, 1.9]]
    text = report.convergence(Runs({Arm("none"): {1: {"dev": dev}}}), report.MODELS)
    assert text.endswith("in the last 10% of the training: none -9.5%.")
    assert report.convergence(Runs({Arm("none"): {1: {"dev": dev[-1:]}}}), report.MODELS) == ""


def test_crossover_is_the_first_evaluation_after_which_the_mixture_stays_ahead():
    def of(*nll):
        return {"dev": [[100 * (n + 1), v] for n, v in enumerate(nll)]}

    def crossover(**runs):
        by_arm = {Arm(name.replace("_", "-")): seeds for name, seeds in runs.items()}
        return report.crossover({"train_tokens": 200}, Runs(by_arm))

    dense = {1: of(5, 4, 3, 2), 2: of(5, 4, 3, 2)}
    # The third seed of the mixture has no counterpart.
    mixture = {1: of(4, 4.5, 2.9, 2.1), 2: of(6, 4, 3, 1.7), 3: of(9, 9, 9, 9)}
    text = crossover(dense=dense, moe_32=mixture)
    assert text == "From epoch 1.5 on, moe-32 has a lower dev perplexity than dense."
    text = crossover(dense=dense, moe_32=mixture, moe_32_balanced={2: of(4, 3, 2, 1)})
    assert text.endswith(
        "From epoch 0.5 on, moe-32-balanced has a lower dev perplexity than dense."
    )
    text = crossover(dense=dense, moe_32={1: of(1, 1, 1, 3)})
    assert text == "At the end, moe-32 does not have a lower dev perplexity than dense."
    assert crossover(moe_32=mixture) == ""


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
    run("multilingual", parallel_corpus, tmp_path, *options, "--arms", "moe")
    page = files[0].read_text()
    assert "claim" not in page and "`single`" not in page
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
    nll = {arm: {p: each["nll"] for p, each in run["pairs"].items()} for arm, run in stored.items()}
    assert nll["single en-fr"]["en-fr"] == pytest.approx(stored["single en-fr"]["test_nll"])
    french, german = (nll["moe"][p] - nll[f"single {p}"][p] for p in several)
    compared = {each["compared"]: each for each in data["claims"]}["moe against single"]
    assert compared["difference"]["mean"] == pytest.approx((french + german) / 2, abs=1e-12)
    assert compared["num_pairs"] == 2
    assert compared["lower_perplexity"] == (french < 0) + (german < 0)
    page = files[0].read_text()
    assert page.count("| moe against ") == 3
    assert "| the same, for as much text of each language pair | moe against single-short |" in page
    assert "| en-de | 60 |" in page and page.count("--arms single-short\n") == 1
    settings = data["settings"]
    assert settings["model.dropout"] == 0.2 and settings["optimizer.learning_rate"] == 4e-3
    warmup = [
        read_config(moe.with_name(name) / "config.toml").optimizer.warmup_steps
        for name in ("moe-seed1", "single-en-fr-seed1", "single-short-en-fr-seed1")
    ]
    assert warmup == [300, 150, 75]
    assert '\'data.pairs=["en-fr", "en-de"]\'' in page
    steps = [step for step, _ in stored["dense"]["perplexity"]["en-de"]]
    assert steps == [1, 2]
    with pytest.raises(ConfigError, match="steps"):
        run("multilingual", parallel_corpus, tmp_path, *options, "steps=3")

    assert rebuilds("multilingual", "multilingual_captions", tmp_path / "docs")


def test_language_pairs_of_the_captions(parallel_corpus, tmp_path):
    settings = run("multilingual", parallel_corpus, tmp_path, "--arms", "dense", "moe").settings
    assert [*settings["train_pairs"]] == ["en-de", "de-en", "en-fr", "fr-en"]
    assert settings["model.dropout"] == 0.2
    page = (tmp_path / "docs" / "multilingual_captions.md").read_text()
    assert "single: ppl" not in page and "| moe against dense |" in page
    assert "learning rates" not in page

    run("multilingual", parallel_corpus, tmp_path, "--arms", "dense rate 0.002")
    with_trial = (tmp_path / "docs" / "multilingual_captions.md").read_text()
    assert "| model | seeds | rate 0.004, dropout 0.2 | rate 0.002 |" in with_trial
    assert with_trial.count("--seeds 1 --arms 'dense rate 0.002'") == 1
    file = tmp_path / "runs" / "captions" / "dense-rate-0.002-seed1" / "config.toml"
    assert read_config(file).optimizer.learning_rate == 0.002
    assert "attends language" not in with_trial

    attending = ["--seeds", "1", "2", "--arms", "dense attends language", "moe attends language"]
    runs = run("multilingual", parallel_corpus, tmp_path, *attending).runs
    page = (tmp_path / "docs" / "multilingual_captions.md").read_text()
    assert "| moe against dense |" in page
    assert "No claim is made about these runs" in page
    found = {(each["arm"], each["seed"]): each for each in runs}
    assert found["moe", 1]["weight_of_language"] == 0
    for arm in ("moe", "dense"):
        shown = []
        for seed in (1, 2):
            stored = found[f"{arm} attends language", seed]
            weight = stored["weight_of_language"]
            assert 0 < weight < 1
            shown.append(f"{perplexity(stored['dev'][-1][1]):.2f} ({weight:.2f})")
        assert f"| {arm} attends language | {' | '.join(shown)} |" in page
    assert f"| moe | {perplexity(found['moe', 1]['dev'][-1][1]):.2f} (0.00) |  |" in page
    assert page.count("--seeds 1 --arms 'dense rate 0.002'\n") == 1
    assert page.count("--seeds 1 2 --arms 'moe attends language' 'dense attends language'\n") == 1
    tables = [
        re.findall(r"^\| (?:moe|dense|en-de) \|.*M.*$", text, re.M) for text in (page, with_trial)
    ]
    assert tables[0] == tables[1] and len(tables[0]) == 2


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


def test_the_better_model_has_less_perplexity_and_more_bleu():
    """Only language pairs of both models count; equal values count for neither model."""
    ours, theirs = (
        {name: {1: multilingual_page.Figures(*each)} for name, each in figures.items()}
        for figures in (
            {"a": (1.0, 20.0), "b": (1.0, 20.0), "c": (1.0, 20.0), "d": (3.0, 20.0), "e": (9, 9)},
            {"d": (2.0, 20.0), "c": (2.0, 21.0), "b": (2.0, 21.0), "a": (2.0, 19.0)},
        )
    )
    found = {"moe": ours, "dense": theirs, "single": {}}
    _, compared, gap, bleu, *counts = multilingual_page.comparison(found, "moe", "dense", "")
    assert compared == "moe against dense"
    assert gap.mean == -0.5 and bleu.mean == -0.25 and counts == [4, 3, 1]
    assert multilingual_page.comparison(found, "moe", "single", "") is None
    assert f"{gap:.1f}" == "-0.5 (one seed, not decided)"


def test_the_interval_is_over_the_seeds():
    """The mean over the language pairs differs between the seeds that both models have."""
    ours = {p: {s: multilingual_page.Figures(1.0, 9.0) for s in (1, 2, 3, 4)} for p in "ab"}
    nll = {"a": (1.5, 1.6, 1.7), "b": (1.1, 1.2, 1.3)}
    bleu = {"a": (8.0, 7.9, 7.8), "b": (9.0, 8.9, 8.8)}
    theirs = {
        p: {
            s: multilingual_page.Figures(*each)
            for s, each in enumerate(zip(nll[p], bleu[p], strict=True), 1)
        }
        for p in "ab"
    }
    found = {"moe": ours, "dense": theirs}
    compared = multilingual_page.comparison(found, "moe", "dense", "claim")
    gap = compared.difference
    assert gap.num_seeds == 3 and gap.mean == pytest.approx(-0.4)
    assert gap.high - gap.mean == pytest.approx(4.3027 * 0.1 / 3**0.5, rel=1e-4)  # t of 2 degrees
    row = multilingual_page.claims([compared])[1].table.strip().splitlines()[-1]
    assert re.fullmatch(
        r"\| claim \| moe against dense \| -3.+ \| supported \| \+0.60 .+ \| supported "
        r"\| 2 of 2 \| 2 of 2 \|",
        row,
    )
    del theirs["b"][3]
    assert multilingual_page.comparison(found, "moe", "dense", "").difference.num_seeds == 2
    del theirs["b"][1], theirs["a"][2]
    without = multilingual_page.comparison(found, "moe", "dense", "")
    assert without.difference is without.bleu is None and without.num_pairs == 2
    assert "| not decided |  | not decided |" in multilingual_page.claims([without])[1].table
