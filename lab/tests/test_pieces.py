"""Language models of wordpieces, and the mixed corpora."""

import io
import math
import re
from collections import Counter
from dataclasses import replace

import pytest
import sentencepiece
from moe_lab.commands import evaluate as evaluate_command
from moe_lab.commands import export
from moe_lab.data import (
    CorpusError,
    Vocabulary,
    Wordpieces,
    encode_sentences,
    load_corpus,
    load_parallel,
)
from moe_lab.data import mixed as mixed_module
from moe_lab.data.mixed import mix_languages, mix_sources
from moe_lab.data.sentences import place_of
from moe_lab.errors import ConfigError
from moe_lab.names import PARTS
from moe_lab.training import metrics as metrics_module
from moe_lab.training.checkpoint import load_run
from moe_lab.training.config import DataConfig, config_from_dict, read_config
from moe_lab.training.loop import make_trainer
from moe_lab.training.metrics import bytes_of, evaluate
from moe_lab.training.text import load_part, load_text
from tiny import CONFIG, TINY, options_of, prepare

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def run(corpus, tmp_path_factory):
    """Trains a tiny model of wordpieces and returns its configuration and text."""
    places = [f"data.corpus={corpus}", f"output={tmp_path_factory.mktemp('runs') / 'run'}"]
    options = ["data.kind=bpe", "data.vocab_size=40", "steps=4", "log.progress=false"]
    config = read_config(CONFIG, [*TINY, *options, *places])
    text = load_text(config.data)
    assert make_trainer(config, text).run()
    return config, text


def test_text_of_wordpieces(corpus, tmp_path):
    config = DataConfig(str(corpus), kind="bpe", vocab_size=40)
    text = load_text(config)
    pieces = text.vocabulary
    assert isinstance(pieces, Wordpieces) and len(pieces) == 40
    lines = (corpus / "test.txt").read_text().splitlines()
    assert [text.test[i] for i in range(len(text.test))] == [pieces.encode(line) for line in lines]
    words = Vocabulary.build(map(str.split, lines), 45)
    assert text.test.num_tokens > encode_sentences(map(str.split, lines), words).num_tokens
    # Files hold the same ids, for any number of workers.
    for workers in (0, 2):
        encoded = str(tmp_path / f"encoded-{workers}")
        stored = load_text(replace(config, encoded=encoded, num_workers=workers))
        assert stored.vocabulary.fingerprint() == pieces.fingerprint()
        for part in PARTS:
            assert getattr(stored, part).fingerprint() == getattr(text, part).fingerprint()
    model = tmp_path / "pieces.model"
    pieces.save(model)
    given = load_text(replace(config, vocabulary=str(model), max_train_sentences=9))
    assert given.vocabulary.fingerprint() == pieces.fingerprint() and len(given.train) == 9
    assert load_part(config, pieces, "dev").fingerprint() == text.dev.fingerprint()


def test_bytes_of_a_text(monkeypatch):
    lines = ["le café", "日本語 の 文", "a", "naïve   words  in a line"]
    pieces = Wordpieces.train(lines * 20, 60, character_coverage=1.0)
    encoded = encode_sentences(map(str.split, lines), pieces)
    expected = sum(len(" ".join(line.split()).encode()) + 1 for line in lines)
    assert bytes_of(encoded, pieces) == expected
    monkeypatch.setattr(metrics_module, "_COUNTED_AT_A_TIME", 3)
    assert bytes_of(encoded, pieces) == expected
    # "é" is two bytes and "unknown" one, the fewest that it can be; a target token is not text.
    few = Wordpieces.train(["ab ba a b"] * 20, 10, target_tokens=["fr"])
    assert bytes_of(encode_sentences([["ab", "é"]], few), few) == 1 + len("ab") + 1 + 1
    sizes = dict(zip(few.words, few.num_bytes, strict=True))
    assert sizes["</s>"] == sizes["<2fr>"] == 0 and sizes["<unk>"] == 1


def test_a_byte_piece_stands_for_one_byte():
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["ab ba a b"] * 20),
        model_writer=model,
        model_type="bpe",
        vocab_size=266,
        byte_fallback=True,
        bos_id=-1,
    )
    pieces = Wordpieces(model.getvalue())
    sizes = dict(zip(pieces.words, pieces.num_bytes, strict=True))
    assert sizes["<0xC3>"] == 1 and sizes["a"] == 1
    assert bytes_of(encode_sentences([["ab", "é"]], pieces), pieces) == len("ab é\n".encode())


def test_perplexity_per_piece_word_and_byte(run, corpus, capsys):
    config, text = run
    result = evaluate_command.main([config.output])
    out = capsys.readouterr().out
    expected = evaluate(load_run(config.output).model, text.test)
    assert result.nll == pytest.approx(expected.nll)
    assert f"nats per piece, {text.test.num_tokens:,} pieces and ends of 70 sentences" in out
    num_words = len((corpus / "test.txt").read_text().split()) + 70
    per_word = re.search(r"perplexity per word ([\d.]+)  \(([\d,]+) words and ends\)", out)
    assert int(per_word[2].replace(",", "")) == num_words
    nats = float(expected.sentence_nll.sum())
    assert float(per_word[1]) == pytest.approx(math.exp(nats / num_words), abs=1e-3)
    num_bytes = len((corpus / "test.txt").read_bytes())  # each line ends with one byte
    per_byte = re.search(r"perplexity per byte ([\d.]+)  \(([\d,]+) bytes\)", out)
    assert int(per_byte[2].replace(",", "")) == num_bytes
    assert float(per_byte[1]) == pytest.approx(math.exp(nats / num_bytes), abs=1e-4)


def test_a_model_of_wordpieces_is_not_exported(run, tmp_path):
    config, _ = run
    with pytest.raises(ConfigError, match="must be a run of a language model of words, got word"):
        export.main([config.output, "--output", str(tmp_path / "lm.pt2")])


@pytest.mark.parametrize(
    "options, message",
    [
        ({"kind": "letters"}, "kind must be one of words, bpe, unigram, got 'letters'"),
        ({"kind": "bpe", "min_count": 2}, 'min_count must be 1 with kind = "bpe", got 2'),
    ],
)
def test_options_are_checked(options, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        config_from_dict({"data": options})


def sides(folder, language, part):
    texts = load_parallel(folder, source="en", target=language)
    return [pair for pair in getattr(texts, part)]


def test_languages_are_mixed(parallel_corpus):
    parts = mix_languages(parallel_corpus, ["fr", "de"], 1000)
    for part in PARTS:
        english = {s for xx in ("fr", "de") for s, _ in sides(parallel_corpus, xx, part)}
        foreign = [{t for _, t in sides(parallel_corpus, xx, part)} for xx in ("fr", "de")]
        held_out = set() if part == "test" else set(parts["test"])
        held_out |= set(parts["dev"]) if part == "train" else set()
        assert len(parts[part]) == len(set(parts[part])) and not held_out & set(parts[part])
        assert set(parts[part]) == english.union(*foreign) - held_out
    few = mix_languages(parallel_corpus, ["fr", "de"], 10)
    kinds = Counter(line[:1] for line in few["train"])  # n, f and d begin the words of a language
    assert kinds == {"n": 10, "f": 10, "d": 10}
    assert few["train"] != sorted(few["train"], key=lambda line: line[0])  # shuffled
    assert few == mix_languages(parallel_corpus, ["fr", "de"], 10)
    assert few["dev"] == parts["dev"]
    with pytest.raises(CorpusError):
        mix_languages(parallel_corpus, ["xx"], 10)


@pytest.fixture
def sources(tmp_path, monkeypatch):
    """Replaces the installed sources by small files and the documentation by the corpus `docs`."""
    folder = tmp_path / "installed" / "torch"
    (folder / "include").mkdir(parents=True)
    files = []
    for number in range(200):
        file = folder / f"module{number}.py"
        file.write_text(f"import a{number}\n\ndef f{number}(x):\n    return  x\n")
        files.append(file)
        header = folder / "include" / f"header{number}.h"
        header.write_text(f"int h{number};\n\n\n" + f"// h{number} long " * 40)
    (folder / "__init__.py").write_text("")
    docs = tmp_path / "docs.txt"
    docs.write_text("".join(f"Sentence {number} .\n" for number in range(300)))
    monkeypatch.setattr(mixed_module, "source_files", lambda: files)
    monkeypatch.setattr(mixed_module, "builtin_corpus", lambda: load_corpus(docs))
    monkeypatch.setattr(mixed_module, "torch_folder", lambda: folder)
    return folder


def test_sources_are_mixed(sources):
    parts = mix_sources(1000)
    first_words = {
        part: Counter(line.split()[0] for line in lines) for part, lines in parts.items()
    }
    assert all(first_words[part].keys() >= {"import", "int", "def", "Sentence"} for part in PARTS)
    assert sum(first_words[part]["import"] for part in PARTS) == 200
    # A file is in one part: its function is where its import is.
    for lines in parts.values():
        numbers = {line.split()[1][1:] for line in lines if line.startswith("import")}
        functions = {line[5:].partition("(")[0] for line in lines if line.startswith("def")}
        assert numbers == functions and all(f"def f{n}(x): return x" in lines for n in numbers)
    longest = max(len(line.split()) for lines in parts.values() for line in lines)
    assert longest == 64
    assert parts == mix_sources(1000)
    few = Counter(line.split()[0] for line in mix_sources(20)["train"])
    assert few["import"] + few["def"] == few["Sentence"] == 20 and few.total() == 60


def test_the_corpus_of_sources_is_mixed_once(sources, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    mixed = mix_sources(60_000)
    for _ in range(2):
        corpus = load_corpus("sources")
        for part in PARTS:
            assert [" ".join(words) for words in getattr(corpus, part)] == mixed[part]
        assert len([*corpus.all]) == sum(map(len, mixed.values()))
        monkeypatch.setattr(mixed_module, "mix_sources", None)  # the second call reads the cache
    (cached,) = (tmp_path / "cache" / "moe_ext").iterdir()
    assert cached.name.startswith("sources-python")
    (sources / "include" / "new.h").write_text("int h;\n")
    with pytest.raises(TypeError, match="not callable"):
        load_corpus("sources")


@pytest.mark.parametrize("part, low, high", [("test", 0, 0.05), ("dev", 0.05, 0.1)])
def test_no_file_dominates_dev_or_test(sources, part, low, high):
    names = (f"generated{number}.h" for number in range(1000))
    name = next(name for name in names if low <= place_of(("include", name)) < high)
    lines = [f"generated line {number}" for number in range(500)]
    (sources / "include" / name).write_text("\n\n".join(lines))
    parts = mix_sources(10_000)
    lines_of_file = {name: set(lines) & set(parts[name]) for name in PARTS}
    assert len(lines_of_file[part]) == 20 and sum(map(len, lines_of_file.values())) == 20
    assert lines_of_file[part] != set(lines[:20])  # drawn from the whole file


def test_sources_need_headers(sources):
    for header in (sources / "include").iterdir():
        header.unlink()
    with pytest.raises(CorpusError, match="torch must be installed with its headers, got none"):
        mix_sources(10)


def test_prepare_a_corpus_of_languages(parallel_corpus, tmp_path, capsys):
    options = ["--vocab-size", 60, "--sentences", 50, "--workers", 0]
    output = tmp_path / "languages"
    languages = ["--from", parallel_corpus, "--languages", "fr", "de", "--output", output]
    text = prepare("languages", *languages, *options)
    printed = capsys.readouterr().out
    assert "60 wordpieces in the vocabulary" in printed
    assert "| part | sentences | wordpieces | predictions |" in printed
    assert isinstance(text.vocabulary, Wordpieces) and len(text.train) == 150
    values = options_of(printed)
    assert values["kind"] == "bpe"
    loaded = load_text(DataConfig(**values))
    assert loaded.train.fingerprint() == text.train.fingerprint()
    made = output / "fr-de-50-sentences" / "train.txt"
    before = made.stat().st_mtime_ns
    prepare("languages", *languages, *options)
    assert made.stat().st_mtime_ns == before  # mixed once
    words = prepare("languages", *languages, *options, "--kind", "words")
    assert isinstance(words.vocabulary, Vocabulary) and len(words.vocabulary) == 47


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["languages"], "--from must be given for the corpus languages"),
        (["wikitext-2", "--kind", "bpe"], "--kind must be omitted: wikitext-2 has a fixed"),
    ],
)
def test_options_of_corpora_are_checked(arguments, message):
    with pytest.raises(ConfigError, match=message):
        prepare(*arguments)


def test_missing_parallel_text(tmp_path):
    with pytest.raises(ConfigError, match="--from: .*en and fr"):
        prepare("languages", "--from", tmp_path, "--output", tmp_path / "out")
