"""The vocabulary of a language model, numbered by decreasing frequency."""

import codecs
import hashlib
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Self

from moe_ext.checks import require, require_sizes
from moe_lab.files import atomic_file, existing_file, plain_lines

# Spellings of the two special entries in vocabulary files, ours first. One vocabulary file of the
# 1-billion-word benchmark has <S> and </S>; another marks both ends of a sentence with <S>.
_UNK_SPELLINGS = ("<unk>", "<UNK>")
_EOS_SPELLINGS = ("</s>", "</S>", "<S>")


def checked_ids(ids: Iterable[int], size: int, owner: str) -> list[int]:
    """Returns a list of ids; raises IndexError if one is outside [0, size)."""
    ids = list(ids)
    for index in ids:
        if not 0 <= index < size:
            raise IndexError(f"{owner}: id must be in [0, {size}), got {index}")
    return ids


class Vocabulary:
    """Maps words to ids; id 0 is the most frequent entry of the training text.

    ``<unk>`` stands for every word outside the vocabulary. ``</s>`` is the end of a sentence and
    the input before its first word. Both entries are predicted and counted in the perplexity like
    words. Both entries are ordered by frequency like words, as `LogUniformSampler` needs. Padding
    has no entry and no probability, because padding is masked.
    """

    UNK = "<unk>"
    EOS = "</s>"

    def __init__(self, words: Iterable[str]) -> None:
        self.words = tuple(words)
        self._id_of = {word: index for index, word in enumerate(self.words)}
        for index, word in enumerate(self.words):
            if self._id_of[word] != index:
                raise ValueError(f"Vocabulary: words must be distinct, got {word!r} twice")
            if word.split() != [word]:
                raise ValueError(f"Vocabulary: words must not contain white space, got {word!r}")
        for special in (self.UNK, self.EOS):
            if special not in self._id_of:
                raise ValueError(f"Vocabulary: words must include {special}, got none")
        self.unk_id = self._id_of[self.UNK]
        self.eos_id = self._id_of[self.EOS]

    @classmethod
    def build(cls, sentences: Iterable[Sequence[str]], max_size: int, min_count: int = 1) -> Self:
        """Builds a vocabulary of the most frequent words; ties are ordered by spelling.

        ``</s>`` counts once per sentence, ``<unk>`` once per occurrence of an excluded word.
        """
        return cls.from_counts(cls.count(sentences), max_size, min_count)

    @classmethod
    def count(cls, sentences: Iterable[Sequence[str]]) -> Counter[str]:
        """Counts each word, and ``</s>`` once per sentence; counts of parts can be added."""
        counts: Counter[str] = Counter()
        num_sentences = 0
        for words in sentences:
            num_sentences += 1
            counts.update(words)
        if cls.EOS in counts:
            raise ValueError(
                f"Vocabulary.count: sentences must not contain {cls.EOS}, which marks the end of a "
                f"sentence; remove {cls.EOS} from the text"
            )
        counts[cls.EOS] = num_sentences
        return counts

    @classmethod
    def from_counts(cls, counts: Counter[str], max_size: int, min_count: int = 1) -> Self:
        """Builds a vocabulary from the counts that `count` returns; see `build`."""
        name = "Vocabulary.from_counts"
        require_sizes(name, 3, max_size=max_size)  # <unk>, </s> and a word
        require_sizes(name, min_count=min_count)
        words = counts.copy()
        num_sentences, num_unknown = words.pop(cls.EOS, 0), words.pop(cls.UNK, 0)
        if not words:
            got = f"got {num_sentences} sentences and no word"
            raise ValueError(f"{name}: counts must have at least one word, {got}")

        def by_frequency(entry: tuple[str, int]) -> tuple[int, str]:
            return -entry[1], entry[0]

        ranked = sorted(words.items(), key=by_frequency)
        kept = [(word, count) for word, count in ranked[: max_size - 2] if count >= min_count]
        rule = f"be at most {ranked[0][1]}, the count of the most frequent word"
        require(bool(kept), f"{name}: min_count", rule, min_count)
        num_unknown += words.total() - sum(count for _, count in kept)
        kept += [(cls.UNK, num_unknown), (cls.EOS, num_sentences)]
        return cls(word for word, _ in sorted(kept, key=by_frequency))

    def encode(self, words: Iterable[str]) -> list[int]:
        """Returns the id of each word, or `unk_id` for a word outside the vocabulary."""
        id_of, unk_id = self._id_of.get, self.unk_id
        return [id_of(word, unk_id) for word in words]

    def decode(self, ids: Iterable[int]) -> list[str]:
        """Returns the word of each id."""
        return [self.words[index] for index in checked_ids(ids, len(self), "Vocabulary.decode")]

    def save(self, path: str | Path) -> None:
        """Writes the words to a UTF-8 file, one word per line, in the order of the ids."""
        with atomic_file(Path(path)) as file:
            if self.words[0].startswith("\ufeff"):
                file.write(codecs.BOM_UTF8)  # `load` removes one byte order mark
            file.writelines(f"{word}\n".encode() for word in self.words)

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Reads a file of one word per line; the first line is id 0.

        Vocabulary files of the 1-billion-word benchmark are also accepted. A count after the word
        is ignored. ``<UNK>`` becomes ``<unk>``, and ``</S>`` becomes ``</s>``. Without ``</S>``,
        ``<S>`` becomes ``</s>``; otherwise ``<S>`` stays an entry that never occurs, so that ids
        and size (793,471) do not change.
        """
        path = existing_file(path, "Vocabulary.load: path must be a vocabulary file")
        words: dict[str, int] = {}
        blank = 0  # the first of the blank lines before the current line
        with path.open("rb") as file:
            for number, line in enumerate(plain_lines(file), start=1):
                place = f"Vocabulary.load: {path}, line {blank or number}"
                try:
                    fields = line.decode("utf-8").split()
                except UnicodeDecodeError as error:
                    raise ValueError(f"{place} must be UTF-8, got {line!r:.100}") from error
                if not line:  # blank lines may only follow the last word
                    blank = blank or number
                    continue
                if blank or len(fields) not in (1, 2) or not all(map(str.isdecimal, fields[1:])):
                    text = "" if blank else line.decode("utf-8")
                    raise ValueError(
                        f"{place} must hold one word (a count may follow), got {text!r:.100}"
                    )
                word = fields[0]
                if word in words:
                    raise ValueError(
                        f"{place} must hold a word that no earlier line holds, "
                        f"got {word!r:.100} as in line {words[word]}"
                    )
                words[word] = number
        renamed = {}
        for entry, *variants in (_UNK_SPELLINGS, _EOS_SPELLINGS):
            spelling = next((word for word in (entry, *variants) if word in words), None)
            if spelling is None:
                raise ValueError(f"Vocabulary.load: {path} must have a line {entry}, got none")
            renamed[spelling] = entry
        if len(words) == len(renamed):
            raise ValueError(f"Vocabulary.load: {path} must have at least one word, got none")
        return cls(renamed.get(word, word) for word in words)

    def fingerprint(self) -> str:
        """Returns the SHA-256 (hex) of the words in order; equal vocabularies have equal hashes."""
        return hashlib.sha256("\n".join(self.words).encode("utf-8")).hexdigest()

    def __len__(self) -> int:
        return len(self.words)
