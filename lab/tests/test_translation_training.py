"""Training of translation models on parallel text (App. E): differences from language models."""

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from moe_lab.analysis.costs import cost
from moe_lab.commands import evaluate as evaluate_command
from moe_lab.commands import inspect_experts
from moe_lab.data import PairBatches, Wordpieces
from moe_lab.decoding.beam_search import BeamSearch
from moe_lab.errors import ConfigError
from moe_lab.experiments.comparison import dense_counterpart
from moe_lab.models import TranslationModel
from moe_lab.training import translation as translation_module
from moe_lab.training.checkpoint import load_run
from moe_lab.training.config import Config, TranslationConfig, read_config, to_toml
from moe_lab.training.logging import read_metrics
from moe_lab.training.metrics import by_language_pair, evaluate
from moe_lab.training.model import make_model
from moe_lab.training.optimizers import make_optimizers
from moe_lab.training.text import load_part, load_text, parallel_text, training_batches
from moe_lab.training.translation import bleu_of_test, translated_test, translations_of
from tiny import cases
from trained import QUIET, assert_same_curve, curve, merged, train, train_on_rank

pytestmark = pytest.mark.usefixtures("one_thread")

ROOT = Path(__file__).parents[2]
SIZES = {"train": 120, "dev": 12, "test": 15}


@pytest.fixture
def table(parallel_corpus, tmp_path):
    """A configuration as nested dicts: balanced gates, dropout, two language pairs."""
    pairs = {"pairs": ["en-fr", "en-de"], "vocab_size": 50, "tokens_per_batch": 600}
    moe = {"gate": "balanced", "num_experts": 4, "k": 2, "hidden_sizes": [16], "w_load": 0.0}
    return {
        "task": "translation",
        "output": str(tmp_path / "run"),
        "steps": 12,
        "num_threads": 1,
        "data": {"corpus": str(parallel_corpus), **pairs},
        "model": {"d_model": 16, "lstm_units": 24, "dropout": 0.2, "moe": moe},
        "optimizer": {"learning_rate": 0.02, "warmup_steps": 4, "hold_steps": 3},
        "log": {"log_every": 2, "eval_every": 4, "save_every": 5} | QUIET,
    }


def same_pairs(a, b):
    return a.names == b.names and [*a] == [*b]


# Configuration


def test_the_task_decides_what_the_tables_hold(table, tmp_path):
    config = merged(table)
    assert isinstance(config, TranslationConfig) and config.data.pairs == ["en-fr", "en-de"]
    path = tmp_path / "config.toml"
    path.write_text(to_toml(config))
    assert read_config(path) == config == read_config(path, [], TranslationConfig)
    with pytest.raises(ConfigError, match='task must .*got "translation"'):
        read_config(path, [], Config)
    with pytest.raises(ConfigError, match="task must"):
        read_config(path, ["task=translate"])
    with pytest.raises(ConfigError, match="unknown option model.layers; did you mean"):
        read_config(path, ["model.layers=['lstm']"])
    path.write_text("steps = 3\n")
    assert isinstance(read_config(path), Config)


DATA_ERRORS = {
    "pairs": ([], "en-fr", "en-fr,en-de", 3, ["en"], ["en-en"], ["en-fr", "en-fr"]),
    "kind": ("words",),
    "max_ratio": (0.5,),
    "max_length": (-1,),
    "vocab_size": (2,),
    "tokens_per_batch": (0,),
}


@pytest.mark.parametrize(("option", "value"), cases(DATA_ERRORS))
def test_errors_of_the_data_options(table, option, value):
    with pytest.raises(ConfigError, match=f"^option data.{option} must .*got"):
        merged(table, data={option: value})


def test_only_a_model_of_several_pairs_may_skip_the_language_token(table):
    assert not merged(table, model={"attend_language": False}).model.attend_language
    message = "^option model.attend_language must be true if .* one language pair, got False"
    with pytest.raises(ConfigError, match=message):
        merged(table, data={"pairs": ["en-fr"]}, model={"attend_language": False})


# Text


def test_all_language_pairs_share_the_wordpieces(table):
    text = load_text(merged(table).data)
    pieces = text.vocabulary
    assert isinstance(pieces, Wordpieces) and pieces.target_tokens == ["de", "fr"]
    for part, number in SIZES.items():
        pairs = getattr(text, part)
        assert pairs.names == ("en-fr", "en-de")
        assert pairs.pair.bincount().tolist() == [number, number // 2]
        for (source, target), pair in zip(pairs, pairs.pair.tolist(), strict=True):
            language = ("fr", "de")[pair]
            assert source[0] == pieces.target_token_id(language)
            words = pieces.decode(source).replace("n", language).split()
            assert pieces.decode(target).split() == (words if pair == 0 else words[::-1])
    assert text.train.report().splitlines() == [
        "en-fr: 120 of 121 lines kept, 1 skipped (1 empty side)",
        "en-de: 60 of 60 lines kept",
    ]
    even = load_text(merged(table, data={"max_ratio": 1.0}).data)
    assert 0 < len(even.train) < len(text.train) and len(even.dev) == len(text.dev)
    one = load_text(merged(table, data={"pairs": ["en-fr"]}).data)
    assert one.vocabulary.target_tokens == []
    assert one.vocabulary.decode(one.train[0][0]).startswith("n")


def test_both_directions_of_a_language_pair(table):
    text = load_text(merged(table, data={"pairs": ["en-fr", "fr-en"]}).data)
    pieces = text.vocabulary
    number = SIZES["train"]
    for index in (0, 50, number - 1):
        forth, back = text.train[index], text.train[number + index]
        assert forth[0] == [pieces.target_token_id("fr"), *back[1]]
        assert back[0] == [pieces.target_token_id("en"), *forth[1]]


def test_wordpieces_and_ids_are_made_once(table, tmp_path, monkeypatch):
    fresh = load_text(merged(table).data)
    data = merged(table, data={"encoded": str(tmp_path / "ids"), "num_workers": 1}).data
    kept = load_text(data)
    monkeypatch.setattr(Wordpieces, "train", None)
    again = load_text(data)
    for text in (kept, again):
        assert text.vocabulary.fingerprint() == fresh.vocabulary.fingerprint()
        for part in SIZES:
            assert same_pairs(getattr(text, part), getattr(fresh, part))
    fresh.vocabulary.save(tmp_path / "pieces.model")
    given = load_text(replace(data, encoded="", wordpieces=str(tmp_path / "pieces.model")))
    assert same_pairs(given.train, fresh.train)


def test_a_text_without_one_of_the_language_pairs_is_refused(table, tmp_path):
    data = merged(table).data
    wordpieces = load_text(data).vocabulary
    (tmp_path / "news.en-fr.tsv").write_text("nba\tfrba\n")
    with pytest.raises(ConfigError, match="^data.corpus: .* must"):
        load_part(replace(data, corpus=str(tmp_path)), wordpieces, "all")


def test_a_table_is_of_the_language_pairs_in_its_name(table, tmp_path):
    data = merged(table).data
    whole = load_text(data)
    corpus = f"{data.corpus}/test.en-de.tsv"
    test = load_part(replace(data, corpus=corpus), whole.vocabulary, "all")
    assert test.names == ("en-de",)
    assert [*test] == [pair for pair, de in zip(whole.test, whole.test.pair, strict=True) if de]
    with pytest.raises(ConfigError, match="^data.corpus: .* must .*got en-de in"):
        load_part(replace(data, corpus=corpus, pairs=["en-fr"]), whole.vocabulary, "all")
    for name in ("test.tsv", "test.en-ko.tsv"):
        (tmp_path / name).write_text("nba\tfrba\n")
        message = f"^data.corpus: .*{name} must"
        with pytest.raises(ConfigError, match=message):
            load_part(replace(data, corpus=str(tmp_path / name)), whole.vocabulary, "all")


def test_corpora_and_wordpieces_that_cannot_be_used(table, tmp_path, parallel_corpus):
    def load(**changes):
        return load_text(merged(table, data=changes).data)

    for option, value, message in (
        ("corpus", "", "data.corpus must .*got ''"),
        ("corpus", str(tmp_path / "nowhere"), "data.corpus: there is no parallel corpus at "),
        ("pairs", ["en-ko"], "data.corpus: the train part of .* en and ko, got no file"),
        ("wordpieces", "nowhere", "data.wordpieces: Wordpieces.load: path must .*nowhere"),
        ("vocab_size", 9_000, "data.vocab_size must .*got 9000$"),
    ):
        with pytest.raises(ConfigError, match=f"^{message}"):
            load(**{option: value})
    for language, lines in (("en", 1), ("ko", 2)):
        (tmp_path / f"train.{language}").write_text("nba\n" * lines)
        for part in ("dev", "test"):
            (tmp_path / f"{part}.{language}").write_text("nba\n")
    with pytest.raises(ConfigError, match="^data.corpus: .*train.en and .*train.ko must"):
        load(corpus=str(tmp_path), pairs=["en-ko"])
    single = Wordpieces.train(["nba nda frba deda"], 15)
    single.save(tmp_path / "single.model")
    with pytest.raises(ConfigError, match="^data: .*language must .*got 'fr'"):
        load(wordpieces=str(tmp_path / "single.model"))
    with pytest.raises(ConfigError, match="^data: PairBatches: pairs must"):
        train(merged(table, data={"max_length": 1}))


# Training


def test_training_learns_and_logs_each_language_pair(table):
    trainer = train(merged(table, steps=40, data={"oversample": True}, model={"dropout": 0.0}))
    assert isinstance(trainer.model, TranslationModel)
    assert isinstance(trainer.batches, PairBatches) and trainer.batches.num_pairs == 240
    records = read_metrics(trainer.folder, "train")
    assert records[-1]["nll"] < records[0]["nll"] - 1
    assert records[-1]["max_over_mean_load"] == pytest.approx([1, 1], abs=0.01)
    assert [len(load) for load in records[-1]["load"]] == [4, 4]
    # Warm-up to step 4, then 3 more steps at the peak.
    rates = {record["step"]: record["learning_rate"] for record in records}
    assert rates[2] == pytest.approx(0.02 * 2 / 4)
    assert rates[4] == rates[6] == 0.02 and rates[8] == pytest.approx(0.02 * math.sqrt(7 / 8))

    dev = read_metrics(trainer.folder, "dev")[-1]
    result = evaluate(trainer.model, trainer.text.dev, tokens_per_batch=40, title=None)
    assert dev["perplexity"] == pytest.approx(result.perplexity, rel=1e-5)
    parts = by_language_pair(result.sentence_nll, trainer.text.dev)
    assert [*parts] == ["en-fr", "en-de"]
    for name, part in parts.items():
        assert dev[f"perplexity/{name}"] == pytest.approx(part.perplexity, rel=1e-5)
    assert sum(part.num_tokens for part in parts.values()) == result.num_tokens
    assert result.num_tokens == trainer.text.dev.num_tokens


def test_the_curve_of_one_process(workers, table, tmp_path):
    """Ranks share the rows of a batch and the experts; nothing is random."""
    config = merged(table, steps=4, model={"dropout": 0.0}, log={"log_every": 1, "eval_every": 2})
    train(config)
    for world in (2, 3):
        run_config = replace(config, output=str(tmp_path / f"run-{world}"))
        assert workers.run(world, train_on_rank, run_config) == [True] * world
        assert_same_curve(curve(run_config), curve(config))


def test_overlong_pairs_are_left_out_by_default(table, tmp_path):
    for part, length in (("train", 99), ("train", 100), ("dev", 1), ("test", 1)):
        with (tmp_path / f"{part}.en-fr.tsv").open("a") as file:
            file.write(f"{'n ' * length}\t{'f ' * length}\n")
    data = {"corpus": str(tmp_path), "pairs": ["en-fr"], "vocab_size": 7}
    for options, number in (({}, 1), ({"max_length": 0}, 2)):
        config = merged(table, data=data | options).data
        batches = training_batches(load_text(config), config, seed=1)
        assert (batches.num_pairs, batches.num_left_out) == (number, 2 - number)


def test_few_dev_sentences_are_of_every_language_pair(table):
    trainer = train(merged(table, steps=1, log={"eval_sentences": 5}))
    assert trainer.dev.pair.bincount().tolist() == [5, 5]
    assert [*trainer.dev][5:] == [*trainer.text.dev][12:17]


def test_factored_averages_of_embedding_and_softmax(table):
    for shared, number in ((True, 3), (False, 4)):  # the softmax has a bias
        model = make_model(merged(table, model={"shared_embedding": shared}).model, 50)
        options = merged(table, optimizer={"embedding": "factored_adam"}).optimizer
        _, factored = make_optimizers(model, options)
        sizes = [len(p) for group in factored.param_groups for p in group["params"]]
        assert sizes == [50] * number


# Runs


def test_a_run_is_loaded_with_its_wordpieces(table):
    trainer = train(merged(table))
    folder = trainer.folder
    trained = load_run(folder)
    assert isinstance(trained.model, TranslationModel) and trained.step == 12
    assert trained.vocabulary.fingerprint() == trainer.text.vocabulary.fingerprint()
    assert torch.equal(
        evaluate(trained.model, trainer.text.test, title=None).sentence_nll,
        evaluate(trainer.model, trainer.text.test, title=None).sentence_nll,
    )
    path = folder / "wordpieces.model"
    Wordpieces.train(["nba nda frba deda"], 15).save(path)
    with pytest.raises(ConfigError, match="the vocabulary of .*wordpieces.model must .*got 15"):
        load_run(folder)
    path.unlink()
    with pytest.raises(ConfigError, match="restore wordpieces.model in the run's folder"):
        load_run(folder)


def test_translations_are_of_the_newest_model(table, monkeypatch):
    def translations(trained, text):
        return [f"{trained.step} {text.target}"]

    monkeypatch.setattr(translation_module, "translations_of", translations)
    folder = train(merged(table, steps=1)).folder
    assert translated_test(folder) == {"en-fr": ["1 fr"], "en-de": ["1 de"]}
    train(merged(table, steps=2, resume=True))
    (folder / "test-2.en-fr.txt").write_text("not made again\n")
    assert translated_test(folder) == {"en-fr": ["not made again"], "en-de": ["2 de"]}


def test_translations_are_found_by_beam_search(table, monkeypatch):
    """Translates into the target language of the text with the default beam search."""

    def make_translator(trained, search, into):
        return lambda sources, title: [[SimpleNamespace(text=(search, into))] for _ in sources]

    monkeypatch.setattr(translation_module, "make_translator", make_translator)
    trained = SimpleNamespace(config=merged(table))
    _, german = parallel_text(trained.config.data, "test")
    assert translations_of(trained, german) == [(BeamSearch(), "de")] * 7


def test_evaluation_of_a_run(table, tmp_path, capsys):
    folder = train(merged(table, steps=2)).folder
    result = evaluate_command.main([str(folder), "--bleu"])
    lines = capsys.readouterr().out.splitlines()
    parts = by_language_pair(result.sentence_nll, load_text(merged(table).data).test)
    assert lines[0].startswith(f"test perplexity {result.perplexity:.3f}")
    assert [line.split()[:2] for line in lines[1:3]] == [
        [name, f"{part.perplexity:.3f}"] for name, part in parts.items()
    ]
    assert lines[3:5] == ["  en-fr: 15 of 15 lines kept", "  en-de: 7 of 7 lines kept"]
    for line, (name, bleu) in zip(lines[5:], bleu_of_test(folder).items(), strict=True):
        assert line == f"  {name}  BLEU {bleu.score:.2f}  ({bleu.signature})"


def test_what_the_experts_of_a_run_see(table, capsys):
    folder = train(merged(table, steps=2)).folder
    words = []
    for layer, mark in ((0, "<2fr>"), (1, "▁fr")):  # of sources, of targets
        inspect_experts.main([str(folder), "--layer", str(layer), "--part", "all"])
        text, page = ((folder / f"experts.{kind}").read_text() for kind in ("txt", "html"))
        assert text in capsys.readouterr().out and text.count("expert ") == 4
        used = 4 - text.count(" 0.00% of the tokens")  # as the thresholds are, not all may be
        assert mark in text and text.count("language pairs (of all tokens), ") == used > 0
        (data,) = re.findall('id="data">(.*)</script>', page)
        data = json.loads(data)
        (shown,) = data["layers"]
        names = [[pair[0] for pair in expert["pairs"]] for expert in shown["experts"]]
        assert names.count(["en-fr", "en-de"]) == used and names.count([]) == 4 - used
        assert {sentence["pair"] for sentence in shown["sentences"]} == {"en-fr", "en-de"}
        assert data["pieces"] and data["pairs"]
        words.append(data["words"])
    assert "<2fr>" in words[0] and "<2fr>" not in words[1]


def test_the_dense_counterpart_has_the_same_operations(table):
    config = merged(table)
    dense = dense_counterpart(config)
    assert dense.model.between == "ffn" and dense.model.ffn.hidden_sizes == [32]
    moe, dense_cost = (cost(make_model(c.model, 70)) for c in (config, dense))
    gates = 2 * 16 * 4
    assert moe.ops_per_timestep - dense_cost.ops_per_timestep == gates
    with pytest.raises(ConfigError, match="model must"):
        dense_counterpart(dense)


# The paper's models


FILES = {  # App. E: experts, groups, k
    "wmt14-en-fr-none": (),
    "wmt14-en-fr-32": (32, 0, 4),
    "wmt14-en-fr-512-h": (512, 16, 2),
    "wmt14-en-fr-2048-h": (2048, 64, 2),
    "wmt14-en-de-2048-h": (2048, 64, 2),
    "multilingual": (512, 0, 2),
}


def test_every_full_size_file_is_known():
    names = {path.stem for path in (ROOT / "configs" / "mt").glob("*.toml")}
    assert {name for name in names if not name.startswith("small-")} == FILES.keys()


@pytest.mark.parametrize("name", FILES)
def test_files_are_as_the_paper_says(name):
    """test_paper_tables.py compares operations and sizes with those of Tables 2 to 5."""
    config = read_config(f"mt/{name}", [], TranslationConfig)
    model, data, optimizer, moe = config.model, config.data, config.optimizer, config.model.moe
    assert (model.d_model, model.lstm_units, model.shared_embedding) == (512, 2048, True)
    assert (model.attention, model.attention_units, model.encoder) == ("product", 0, "parallel")
    assert (data.vocab_size, data.tokens_per_batch * optimizer.accumulate) == (32_000, 1_024_000)
    assert (optimizer.warmup_steps, optimizer.hold_steps) == (2_000, 8_000)
    constants = optimizer.beta1, optimizer.beta2, optimizer.eps, optimizer.clip_norm
    assert (optimizer.learning_rate, *constants) == (1e-3, 0.9, 0.98, 1e-9, 0)
    several = name == "multilingual"
    assert (model.dropout, data.oversample) == ((0, True) if several else (0.4, False))
    languages = ("fr", "de", "ja", "ko", "pt", "es")
    both_ways = {pair for language in languages for pair in (f"en-{language}", f"{language}-en")}
    assert set(data.pairs) == (both_ways if several else {name[6:11]})
    assert model.between == ("moe" if FILES[name] else "none")
    if FILES[name]:
        assert (moe.num_experts, moe.num_groups, moe.k) == FILES[name]
        rest = (moe.gate, moe.hidden_sizes, moe.w_importance, moe.w_load)
        noisy, balanced = ("noisy_topk", [8192], 0.01, 0.01), ("balanced", [2048], 0.01, 0)
        assert rest == (noisy if several else balanced)
        # Departures from the paper: less memory (App. D), and thresholds well below the scores.
        assert moe.recompute and optimizer.experts == "factored_adam"
        scores = 1 / max(moe.num_groups, moe.num_experts // max(1, moe.num_groups))
        assert optimizer.threshold_learning_rate == (0 if several else 1e-4) < 0.01 * scores


def test_beams_are_those_of_gnmt():
    """Wu et al. (2016), Sec. 7: a = b = 0.2, windows of 3."""
    gnmt = {"length_penalty": 0.2, "coverage_penalty": 0.2, "window": 3.0}
    assert BeamSearch() == BeamSearch(beam=8, max_length_ratio=2.0, **gnmt)
