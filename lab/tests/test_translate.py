"""moe-lab translate as a user runs it, with models that moe-lab train trains."""

import io
import json
import lzma
import random
import re
import warnings

import pytest
import torch
from moe_lab.benchmarks import cases
from moe_lab.benchmarks.harness import environment
from moe_lab.commands import train, translate
from moe_lab.decoding.attention_plot import attention_file, attention_plot
from moe_lab.decoding.beam_search import BeamSearch
from moe_lab.decoding.bleu import corpus_bleu
from moe_lab.decoding.translator import Translation
from moe_lab.errors import ConfigError
from moe_lab.training.checkpoint import load_run
from moe_lab.training.translation import make_translator
from tiny import status_and_error

pytestmark = pytest.mark.usefixtures("one_thread")

CONFIG = """
task = "translation"
steps = 40
num_threads = 1
data = {{ corpus = "{corpus}", vocab_size = 40, tokens_per_batch = 300, pairs = {pairs} }}
model = {{ d_model = 16, lstm_units = 0, dropout = 0.0, between = "none" }}
optimizer = {{ learning_rate = 0.03, warmup_steps = 1 }}
log = {{ tensorboard = false, progress = false }}
"""
TEXT = ["one two three", "", "two $x^$ two one three one", " \t", "four", "three three three"]


@pytest.fixture(scope="module")
def make_run(tmp_path_factory):
    """Returns a function that trains a run on language pairs and returns its folder."""
    folder = tmp_path_factory.mktemp("translate")
    draw = random.Random(8)
    for part, number in (("train", 60), ("dev", 5), ("test", 5)):
        for language in ("fr", "de"):
            lines = []
            for _ in range(number):
                words = draw.choices(["one", "two", "three", "four"], k=draw.randint(1, 5))
                translated = " ".join(language + word for word in words)
                lines.append(f"{' '.join(words)}\t{translated}\n")
            (folder / f"{part}.en-{language}.tsv").write_text("".join(lines))

    def make(*pairs):
        run = folder / "".join(pairs)
        config = folder / "config.toml"
        config.write_text(CONFIG.format(corpus=folder, pairs=list(pairs)))
        train.main([str(config), f"output={run}"])
        return run

    return make


@pytest.fixture(scope="module")
def bilingual(make_run):
    return make_run("en-fr")


@pytest.fixture(scope="module")
def multilingual(make_run):
    return make_run("en-fr", "en-de")


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "text.en.xz"
    path.write_bytes(lzma.compress("\r\n".join(["\ufeff" + TEXT[0], *TEXT[1:]]).encode()))
    return path


def translated(run, search=None, into=None):
    return list(make_translator(load_run(run), search or BeamSearch(), into)(TEXT))


def best_of(run, **options):
    return [best.text for best, *_ in translated(run, **options)]


def main(capsys, *arguments):
    """Runs translate.py; returns its stdout and stderr."""
    capsys.readouterr()
    translate.main([str(argument) for argument in arguments])
    return capsys.readouterr()


def test_from_stdin_to_stdout(multilingual, monkeypatch, capsys):
    """Prints one line per input line, also for invalid UTF-8 and a last line without newline."""
    text = "\n".join([*TEXT, "\x00 two"]).encode() + b" \xff\xfe four"
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(text)))
    printed = main(capsys, multilingual, "--into=fr")
    assert re.fullmatch(r"7 sentences in [\d.]+ s, [\d.]+ per second\n", printed.err)
    *lines, bytes_line = printed.out.removesuffix("\n").split("\n")
    assert lines == best_of(multilingual, into="fr")
    assert lines[1] == lines[3] == "" and lines[0] and bytes_line


def test_files_and_options_of_the_search(bilingual, file, capsys):
    expected = best_of(bilingual)
    assert main(capsys, bilingual, file).out.splitlines() == expected
    twice = main(capsys, bilingual, "--tokens-per-batch", 1, file, file).out.splitlines()
    assert twice == expected * 2
    for options, search in (
        (["--greedy"], BeamSearch.greedy()),
        (["--beam=2", "--length-penalty=1", "--coverage-penalty=0"], BeamSearch(2, 1.0, 0.0)),
    ):
        lines = main(capsys, bilingual, file, *options).out.splitlines()
        assert lines == best_of(bilingual, search=search)


def test_several_translations_of_each_line(bilingual, file, capsys):
    expected = [
        [str(number), best.text, f"logP= {best.log_prob:.4f}", f"{best.score:.4f}"]
        for number, hypotheses in enumerate(translated(bilingual, BeamSearch(num_best=3)))
        for best in hypotheses
    ]
    lines = main(capsys, bilingual, file, "--n-best=3").out.splitlines()
    assert [line.split(" ||| ") for line in lines] == expected
    assert len(lines) > len(TEXT)


def test_output_and_references(bilingual, file, tmp_path, capsys):
    best = best_of(bilingual)
    output, references = tmp_path / "text.fr", tmp_path / "reference.fr"
    references.write_text("".join(f"{text} frone\n" for text in best))
    printed = main(capsys, bilingual, file, "--output", output, "--reference", references)
    assert output.read_text().split("\n") == [*best, ""]
    bleu = corpus_bleu(best, references.read_text().splitlines())
    line = f"BLEU {bleu.score:.2f} ({bleu.signature})\n"
    assert printed.err.startswith("6 sentences in ") and printed.err.endswith(" per second\n")
    assert printed.out == line
    printed = main(capsys, bilingual, file, "--reference", references)
    assert printed.out.splitlines() == best and line in printed.err


def test_attention_plots(bilingual, file, tmp_path, capsys):
    for name, begins in (("a.png", b"\x89PNG"), ("a.pdf", b"%PDF")):
        main(capsys, bilingual, file, "--attention", tmp_path / name)
        assert (tmp_path / name).read_bytes().startswith(begins)
    main(capsys, bilingual, file, "--attention", tmp_path / "b.PDF")
    assert (tmp_path / "b.PDF").read_bytes().count(b"/Type /Page ") == 4  # nonblank lines
    translation = translated(bilingual)[2][0]
    figure = attention_plot(translation)
    assert figure.get_size_inches().max() < 10
    (axes,) = figure.axes
    assert axes.images[0].get_array().shape == (len(translation.pieces), len(translation.source))
    assert [label.get_text() for label in axes.get_xticklabels()] == translation.source
    assert [label.get_text() for label in axes.get_yticklabels()] == translation.pieces


def test_attention_of_a_long_line_fits_a_page():
    translation = Translation("", 0.0, 0.0, ["a"] * 200, ["b"] * 400, torch.zeros(400, 200))
    figure = attention_plot(translation)
    assert max(figure.get_size_inches()) <= 40
    assert len(figure.axes[0].get_yticklabels()) == 400


@pytest.mark.filterwarnings("error")
def test_attention_reports_missing_glyphs(tmp_path, capsys):
    """No font has these two noncharacters; two plots in a file give one message."""
    translation = Translation("", 0.0, 0.0, ["\ufdd0"], ["\ufdd1", "a"], torch.ones(2, 1))
    for name in ("a.png", "a.pdf"):
        with warnings.catch_warnings(), attention_file(tmp_path / name) as plot:
            warnings.simplefilter("default")
            plot(translation)
            plot(translation)
        error = capsys.readouterr().err
        assert error == f"{tmp_path / name} shows boxes for characters that no installed font has\n"


def test_attention_needs_text(bilingual, tmp_path, capsys):
    (tmp_path / "empty.en").write_text("\n \n")
    output = tmp_path / "empty.fr"
    options = ["--attention", tmp_path / "a.pdf", "--output", output]
    status, error = status_and_error(capsys, translate, bilingual, tmp_path / "empty.en", *options)
    assert status == 2 and "error: --attention must" in error
    assert output.read_text() == "\n\n"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty.en", "empty.fr"]


def test_output_may_be_the_input_file(bilingual, tmp_path, monkeypatch, capsys):
    same = tmp_path / "same.en"
    same.write_text("\n".join(TEXT))
    (tmp_path / "link").symlink_to(same)
    with same.open() as stdin:
        monkeypatch.setattr("sys.stdin", stdin)
        main(capsys, bilingual, "--output", tmp_path / "link")
    assert same.read_text().splitlines() == best_of(bilingual)
    assert (tmp_path / "link").is_symlink()


def test_closed_stdin(bilingual, monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", None)
    status, error = status_and_error(capsys, translate, bilingual)
    assert status == 2
    assert error == "error: stdin must be open if no files are given, got a closed stdin\n"


def test_long_lines_are_cut_and_counted(bilingual, file, tmp_path, capsys):
    (tmp_path / "long.en").write_text("one two " * 3000 + "\none\n")
    printed = main(capsys, bilingual, tmp_path / "long.en", "--greedy", "--max-pieces=5")
    assert len(printed.out.splitlines()) == 2
    assert "1 lines cut after 5 wordpieces" in printed.err


def test_errors_have_one_line_and_status_2(bilingual, multilingual, file, tmp_path, capsys):
    def error(*arguments):
        status, error = status_and_error(capsys, translate, *arguments)
        assert status == 2 and error.startswith("error: ") and error.count("\n") == 1
        return error

    assert "there is no checkpoint in" in error(tmp_path / "none", file)
    assert "into must" in error(multilingual, file)
    assert "into must" in error(multilingual, file, "--into=en")
    assert "--into must be left out" in error(bilingual, file, "--into=fr")
    assert f"{tmp_path / 'no.en'} cannot be read: No such file" in error(
        bilingual, tmp_path / "no.en"
    )
    (tmp_path / "bad.en.xz").write_bytes(file.read_bytes()[:-20])
    assert "bad.en.xz cannot be read: " in error(bilingual, tmp_path / "bad.en.xz")
    (tmp_path / "one.fr").write_text("frone\n")
    message = error(bilingual, file, "--reference", tmp_path / "one.fr")
    assert "one.fr must" in message
    assert "error: --n-best must be at most " in error(bilingual, file, "--n-best=9")
    assert "error: --length-penalty must" in error(bilingual, file, "--length-penalty=1e300")
    assert "--n-best must" in error(bilingual, file, "--n-best=2", "--greedy")
    assert "device must" in error(bilingual, file, "--device=meta")
    assert "none/text.fr must" in error(bilingual, file, "--output", tmp_path / "none/text.fr")


def test_only_translation_models(run, capsys):
    status, error = status_and_error(capsys, translate, run)
    assert status == 2 and "task must" in error


def test_benchmark(bilingual, tmp_path, capsys):
    """Benchmarks a run with a text."""
    (tmp_path / "text.en").write_text("\n".join(TEXT))
    options = ["--rounds=2", "--alone=3", "--beam=2", "--threads=1"]
    figures = tmp_path / "figures.json"
    options.append(f"--json={figures}")
    cases.run("translation", [str(bilingual), str(tmp_path / "text.en"), *options])
    printed = capsys.readouterr().out
    assert "| batches | 1 | 4 |" in printed and "| one by one | 1 | 3 |" in printed
    assert "3 of the 3 lines have the same translation" in printed
    record = json.loads(figures.read_text())
    assert record["environment"] == environment()
    assert [row["sentences"] for row in record["rows"]] == [4, 3]
    assert record["ratios"]["seconds"]["median"] > 0
    (tmp_path / "empty").touch()
    with pytest.raises(ConfigError, match="must hold at least one sentence"):
        cases.run("translation", [str(bilingual), str(tmp_path / "empty")])
