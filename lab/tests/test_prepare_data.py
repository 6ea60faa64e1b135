"""moe-lab prepare-data, with a local HTTP server."""

import hashlib
import http.server
import io
import re
import tarfile
import threading
import zipfile
from dataclasses import replace

import pytest
from moe_lab.cli import exit_status
from moe_lab.commands import prepare_data
from moe_lab.data import CorpusError, downloads
from moe_lab.errors import ConfigError
from moe_lab.training.config import DataConfig
from moe_lab.training.text import load_text
from tiny import options_of, prepare

LM1B = "1-billion-word-language-modeling-benchmark-r13output"
PARTS = ("training", "heldout")


class Handler(http.server.BaseHTTPRequestHandler):
    """Serves `files`. `cut` truncates the next response to that size; `ranges` allows ranges."""

    def do_GET(self):
        server = self.server
        server.requests.append((self.path, self.headers["Range"]))
        content = server.files.get(self.path)
        if content is None:
            return self.send_error(404)
        begin = 0
        if server.ranges and (asked := re.fullmatch(r"bytes=(\d+)-", self.headers["Range"] or "")):
            begin = int(asked[1])
            if begin >= len(content):
                return self.send_error(416)
            self.send_response(206)
        else:
            self.send_response(200)
        self.send_header("Content-Length", str(len(content) - begin))
        self.end_headers()
        end, server.cut = server.cut, None
        self.wfile.write(content[begin:][:end])

    def log_message(self, *arguments):
        pass


@pytest.fixture
def server():
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.files, server.requests, server.ranges, server.cut = {}, [], True, None
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def tar_of(files):
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as tar:
        for name, text in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(text.encode())
            tar.addfile(member, io.BytesIO(text.encode()))
    return packed.getvalue()


def zip_of(files):
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as zipped:
        for name, text in files.items():
            zipped.writestr(name, text)
    return packed.getvalue()


@pytest.fixture
def lm1b(server, monkeypatch):
    """Serves a small benchmark: 99 shards with one sentence each."""
    train, heldout = (f"{LM1B}/{part}-monolingual.tokenized.shuffled/news.en" for part in PARTS)
    files = {f"{train}-{i:05d}-of-00100": f"the w{i} .\n" for i in range(100)}
    for i, text in enumerate(("the w1 , .\nthe .\n", "w2\n", "the w1\n")):
        files[f"{heldout}.heldout-{i:05d}-of-00050"] = text
    archive = tar_of(files)
    words = "</S>\n<S>\n<UNK>\nthe\n.\nw1\n"
    server.files = {f"/{LM1B}.tar.gz": archive, "/words.txt": words.encode()}
    address = f"http://127.0.0.1:{server.server_port}"
    checksum = hashlib.sha256(archive).hexdigest()
    known = replace(
        downloads.SETS["lm1b"],
        archive=downloads.Download((f"{address}/{LM1B}.tar.gz",), checksum),
        vocabulary=downloads.Download((f"{address}/words.txt", f"{address}/elsewhere/words.txt")),
        vocab_size=6,
        expected={"train": {"sentences": 99}, "test": {"sentences": 2, "predictions": 8}},
    )
    monkeypatch.setitem(downloads.SETS, "lm1b", known)
    return known


def test_the_command_knows_the_public_corpora():
    assert tuple(downloads.SETS) == prepare_data.PUBLIC


def test_the_benchmark_is_downloaded_once_and_can_be_loaded(server, lm1b, tmp_path, capsys):
    output = tmp_path / "out"
    arguments = ("lm1b", "--output", output, "--workers", 1)
    text = prepare(*arguments)
    printed = capsys.readouterr().out
    assert "6 words in the vocabulary" in printed
    assert "| train | 99 | 297 | 396 |" in printed and "| test | 2 | 6 | 8 |" in printed
    again = load_text(DataConfig(**options_of(printed)))
    assert again.vocabulary.words == ("</s>", "<S>", "<unk>", "the", ".", "w1")
    for part in ("train", "dev", "test"):
        assert list(getattr(again, part)) == list(getattr(text, part))
    assert list(again.test) == [[3, 5, 2, 4], [3, 4]]
    # A second call requests and writes nothing.
    number, before = len(server.requests), sorted(output.rglob("*"))
    prepare(*arguments)
    assert len(server.requests) == number == 2 and sorted(output.rglob("*")) == before


@pytest.mark.parametrize("ranges", [True, False])
def test_an_interrupted_download_continues(server, lm1b, tmp_path, ranges):
    server.ranges, server.cut = ranges, 100
    arguments = ("lm1b", "--output", tmp_path, "--workers", 0)
    with pytest.raises(
        ConfigError, match="ended after 100 of .* run the command again to continue"
    ):
        prepare(*arguments)
    assert (tmp_path / f"{LM1B}.tar.gz.part").stat().st_size == 100
    prepare(*arguments)
    path = f"/{LM1B}.tar.gz"
    assert server.requests[:2] == [(path, None), (path, "bytes=100-")]
    assert not list(tmp_path.glob("*.part")) and not list(tmp_path.glob(".unpacking*"))
    # The .part file is complete, so the server has no more bytes.
    (tmp_path / f"{LM1B}.tar.gz").rename(tmp_path / f"{LM1B}.tar.gz.part")
    (tmp_path / LM1B).rename(tmp_path / "aside")
    prepare(*arguments)


def test_a_corrupted_download_is_not_used(server, lm1b, tmp_path):
    path = f"/{LM1B}.tar.gz"
    whole = server.files[path]
    server.files[path] = whole[:50] + b"x" + whole[51:]
    with pytest.raises(ConfigError, match="must .*SHA-256 .*got"):
        prepare("lm1b", "--output", tmp_path)
    assert not list(tmp_path.iterdir())
    (tmp_path / f"{LM1B}.tar.gz").write_bytes(b"something else")
    with pytest.raises(ConfigError, match="must .*SHA-256"):
        prepare("lm1b", "--output", tmp_path)


def test_a_second_address_is_tried_and_a_failure_is_reported(
    server, lm1b, tmp_path, capsys, monkeypatch
):
    server.files["/elsewhere/words.txt"] = server.files.pop("/words.txt")
    prepare("lm1b", "--output", tmp_path / "a", "--workers", 0)
    gone = downloads.Download(("http://127.0.0.1:9/corpus.tar.gz",))
    monkeypatch.setitem(downloads.SETS, "lm1b", replace(lm1b, archive=gone))
    assert exit_status(lambda: prepare("lm1b", "--output", tmp_path / "b")) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: corpus.tar.gz cannot be downloaded (http://127.0.0.1:9/corpus")
    assert "refused" in error and error.rstrip().endswith("give its folder as --from")


def test_local_files_in_place_of_the_network(server, lm1b, tmp_path):
    local = tmp_path / "local"
    local.mkdir()
    (local / f"{LM1B}.tar.gz").write_bytes(server.files[f"/{LM1B}.tar.gz"])
    (local / "words.txt").write_bytes(server.files["/words.txt"])
    texts = [prepare("lm1b", "--from", local, "--output", tmp_path / "a", "--workers", 0)]
    options = ("--vocabulary", local / "words.txt", "--workers", 0)
    archive, unpacked = local / f"{LM1B}.tar.gz", tmp_path / "a" / LM1B
    for number, source in enumerate((archive, unpacked, unpacked.parent)):
        output = tmp_path / f"b{number}"
        texts.append(prepare("lm1b", "--from", source, "--output", output, *options))
        assert (output / LM1B).exists() == (source == archive)
    for text in texts[1:]:
        assert list(text.train) == list(texts[0].train)
    assert not server.requests
    (local / f"{LM1B}.tar.gz").unlink()  # only the archive is downloaded
    texts.append(prepare("lm1b", "--from", local, "--output", tmp_path / "d", "--workers", 0))
    assert list(texts[-1].train) == list(texts[0].train) and len(server.requests) == 1
    with pytest.raises(ConfigError, match=f"--from must .*{LM1B}"):
        prepare("lm1b", "--from", tmp_path / "b2" / "encoded", "--output", tmp_path / "c")
    with pytest.raises(ConfigError, match="--from must"):
        prepare("lm1b", "--from", tmp_path / "nowhere", "--output", tmp_path / "c")


def test_a_text_with_other_sizes_than_published_is_refused(lm1b, tmp_path, monkeypatch):
    changed = replace(lm1b, vocab_size=7, expected={"test": {"predictions": 9}})
    monkeypatch.setitem(downloads.SETS, "lm1b", changed)
    message = (
        "the vocabulary size must be 7, got 6; the number of predictions in test must be 9, got 8"
    )
    with pytest.raises(ConfigError, match=message):
        prepare("lm1b", "--output", tmp_path, "--workers", 0)


def test_wikitext_counts_its_words(server, tmp_path, monkeypatch):
    text = " = Head = \n \n The cat @-@ <unk> . \n"
    files = {f"wikitext-2/wiki.{part}.tokens": text for part in ("train", "valid", "test")}
    archive = zip_of(files)
    server.files = {"/wikitext-2-v1.zip": archive}
    small = replace(
        downloads.SETS["wikitext-2"],
        archive=downloads.Download((f"http://127.0.0.1:{server.server_port}/wikitext-2-v1.zip",)),
        vocab_size=8,
        expected={"test": {"words": 8}},
    )
    monkeypatch.setitem(downloads.SETS, "wikitext-2", small)
    prepared = prepare("wikitext-2", "--output", tmp_path, "--workers", 0)
    words = (tmp_path / "vocabulary.txt").read_text().split()
    assert sorted(words) == sorted(["=", "Head", "The", "cat", "@-@", "<unk>", ".", "</s>"])
    assert prepared.test.num_tokens == 10


def test_any_text(tmp_path, capsys):
    file = tmp_path / "text.txt"
    file.write_text("".join(f"sentence {i} of many\n" for i in range(1000)))
    arguments = ("text", "--from", file, "--output", tmp_path / "out", "--vocab-size", 100)
    text = prepare(*arguments, "--workers", 0)
    assert len(text.vocabulary) == 100 and len(text.train) > 900
    again = load_text(DataConfig(**options_of(capsys.readouterr().out)))
    assert again.vocabulary.words == text.vocabulary.words
    with pytest.raises(ConfigError, match="data.corpus: there is no corpus at .*nowhere") as error:
        prepare("text", "--from", tmp_path / "nowhere", "--output", tmp_path / "out")
    assert isinstance(error.value.__cause__, CorpusError)
    with pytest.raises(ConfigError, match="--from must be given for the corpus text"):
        prepare("text")


def test_archives_stay_in_their_folder(tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    evil = tmp_path / "evil.tar.gz"
    evil.write_bytes(tar_of({"../outside.txt": "x"}))
    with pytest.raises(ConfigError, match="evil.tar.gz cannot be unpacked: .*outside"):
        downloads.unpack(evil, folder)
    evil.write_bytes(zip_of({"../outside.txt": "x"}))
    downloads.unpack(evil, folder)  # zipfile removes the ".."
    assert not (tmp_path / "outside.txt").exists()
    evil.write_bytes(tar_of({"a.txt": "x" * 10_000})[:-20])
    with pytest.raises(ConfigError, match="evil.tar.gz cannot be unpacked"):
        downloads.unpack(evil, folder)
