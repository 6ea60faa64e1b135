"""Corpora and a trained model that the tests of the lab share."""

import random

import pytest
import torch
from moe_lab.commands import train

pytest.register_assert_rewrite("tiny", "trained")  # a failing assertion shows its values


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    """Makes a folder with train.txt, dev.txt and test.txt; the words follow a rule."""
    folder = tmp_path_factory.mktemp("corpus")
    draw = random.Random(5)
    for part, count in (("train", 300), ("dev", 40), ("test", 70)):
        lines = []
        for _ in range(count):
            word = draw.randrange(40)
            words = []
            for _ in range(draw.randint(2, 12)):
                words.append(f"w{word}")
                word = (3 * word + draw.randrange(2)) % 40
            lines.append(" ".join(words) + "\n")
        (folder / f"{part}.txt").write_text("".join(lines))
    return folder


@pytest.fixture(scope="session")
def run(corpus, tmp_path_factory):
    """Trains a language model for 8 steps; returns its folder, which no test may change."""
    from tiny import CONFIG, TINY  # after the registration above

    threads, folder = torch.get_num_threads(), tmp_path_factory.mktemp("runs") / "run"
    options = [f"data.corpus={corpus}", f"output={folder}", "steps=8", "log.progress=false"]
    train.main([str(CONFIG), *TINY, *options])
    torch.set_num_threads(threads)
    return folder


@pytest.fixture(scope="session")
def parallel_corpus(tmp_path_factory):
    """Makes a parallel corpus of syllables: English to French, and English to reversed German.

    German has half the lines. One French line has no translation.
    """
    folder = tmp_path_factory.mktemp("parallel")
    draw = random.Random(6)
    syllables = [consonant + vowel for consonant in "bcgkm" for vowel in "aio"]
    for part, number in (("train", 120), ("dev", 12), ("test", 15)):
        for language, share in (("fr", 1), ("de", 2)):
            lines = []
            for _ in range(number // share):
                words = [draw.choice(syllables) for _ in range(draw.randint(1, 7))]
                translated = [f"{language}{word}" for word in words]
                if language == "de":
                    translated.reverse()
                source = " ".join(f"n{word}" for word in words)
                lines.append(f"made\t{source}\t{' '.join(translated)}\n")
            if (part, language) == ("train", "fr"):
                lines.insert(3, "made\tnba nda\t \n")
            (folder / f"{part}.en-{language}.tsv").write_text("".join(lines))
    return folder
