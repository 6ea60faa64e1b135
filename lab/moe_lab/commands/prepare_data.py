"""Prepares a corpus for training: downloads, verifies, unpacks, mixes and encodes it.

    moe-lab prepare-data lm1b            # the 1-billion-word benchmark: 1.8 GB download,
                                         # 10 GB of disk, 10 minutes to encode
    moe-lab prepare-data wikitext-103    # 190 MB download; wikitext-2: 4 MB
    moe-lab prepare-data lm1b --from FOLDER     # downloads only files missing in FOLDER
    moe-lab prepare-data text --from PATH --vocab-size 100000      # any other corpus
    moe-lab prepare-data languages --from FOLDER    # the languages of parallel text

Give the command again to continue an interrupted download; no finished work is repeated. --from is
an archive, a folder with the archive or the vocabulary file, or the unpacked corpus. With the name
"text", --from is a corpus as in lab/moe_lab/data/corpora.py. The command verifies the SHA-256 of
archives, the 793,471 entries of the benchmark's vocabulary, and the published numbers of sentences
and words. It writes the encoded text to OUTPUT/encoded and, unless a vocabulary is given or
downloaded, OUTPUT/vocabulary.txt or, for wordpieces, OUTPUT/wordpieces.model. At the end, it prints
the options for moe-lab train.

"languages" has both sides of the parallel text in FOLDER, from English into each of --languages,
each side as a text of its own, in wordpieces. --sentences limits the training sentences of each
language. Wordpieces of the kind "bpe", the default here, train in 20 seconds; "unigram", which a
sampled softmax needs, trains in 6 minutes.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from moe_lab.cli import Option, at_least, one, parse, several
from moe_lab.errors import ConfigError
from moe_lab.names import PIECE_KINDS

PUBLIC = ("lm1b", "wikitext-103", "wikitext-2")  # have published sizes, and a given vocabulary
_PATH_CORPORA = ("text", "languages")


OPTIONS: dict[str, Option] = {
    "name": {"choices": [*PUBLIC, *_PATH_CORPORA], "help": "the corpus"},
    "--from": one(Path, None, "local files to use instead of downloads") | {"dest": "source"},
    "--output": one(Path, None, "folder of the results (default: data/NAME)"),
    "--vocabulary": one(Path, None, "vocabulary file to use"),
    "--vocab-size": one(at_least(3), None, "maximum vocabulary size, for text and languages only "
                        "(default: 10000)"),
    "--kind": {"choices": ["words", *PIECE_KINDS],
               "help": "words, or wordpieces (default: bpe for languages, else words)"},
    "--languages": several(str, ["fr", "de", "es", "pt", "ja", "ko"],
                           "languages in addition to English, for languages only"),
    "--sentences": one(at_least(1), 60_000, "maximum number of training sentences of each "
                       "language"),
    "--workers": one(at_least(0), os.cpu_count() or 1, "number of encoding processes"),
}  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> Any:
    """Runs the command and returns the encoded text."""
    options = parse(__doc__, OPTIONS, arguments)
    if options.name in _PATH_CORPORA and options.source is None:
        raise ConfigError(f"--from must be given for the corpus {options.name}")
    if options.name not in _PATH_CORPORA:
        for option, value in (("vocab-size", options.vocab_size), ("kind", options.kind)):
            if value is not None:
                rule = f"must be omitted: {options.name} has a fixed vocabulary"
                raise ConfigError(f"--{option} {rule}")
    if options.source and not options.source.exists() and options.name != "text":
        raise ConfigError(
            f"--from must be a file or folder, got {options.source}, which does not exist"
        )

    from moe_lab.commands._prepare_data import prepare

    return prepare(options)
