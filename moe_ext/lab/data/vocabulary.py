"""The words a language model knows, numbered by decreasing frequency."""

import codecs
import hashlib
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Self

from moe_ext.checks import require_at_least
from moe_ext.lab.files import atomic_file

# How vocabulary files spell the two special entries, ours first. Of the two files in use for the
# 1-billion-word benchmark one has <S> and </S>, the other marks both ends of a sentence by <S>.
_UNK_SPELLINGS = ("<unk>", "<UNK>")
_EOS_SPELLINGS = ("</s>", "</S>", "<S>")


class Vocabulary:
    """A numbered list of words; id 0 is the most frequent entry of the training text.

    `<unk>` (every word outside the list) and `</s>` (the end of a sentence, and the symbol before
    its first word) are ordinary entries: they are predicted, counted in the perplexity, and have
    their place in the order of frequency, which a log-uniform sampler of classes relies on. Padding
    is no entry: padded positions are masked, so that no probability is spent on them.

    Args:
        words: in the order of their ids.

    Attributes:
        words: the entries by id.
        unk_id, eos_id: the ids of `<unk>` and `</s>`.

    Raises:
        ValueError: the words are not distinct, lack `<unk>` or `</s>`, or hold white space.
    """

    UNK = "<unk>"
    EOS = "</s>"

    def __init__(self, words: Iterable[str]) -> None:
        self.words = tuple(words)
        self._id_of = {word: index for index, word in enumerate(self.words)}
        if len(self._id_of) < len(self.words):
            repeated = next(w for i, w in enumerate(self.words) if self._id_of[w] != i)
            raise ValueError(f"Vocabulary: words must be distinct, got {repeated!r} twice")
        for special in (self.UNK, self.EOS):
            if special not in self._id_of:
                raise ValueError(f"Vocabulary: words must include {special}, which is missing")
        for word in self.words:
            if word.split() != [word]:
                raise ValueError(f"Vocabulary: a word must be free of white space, got {word!r}")
        self.unk_id = self._id_of[self.UNK]
        self.eos_id = self._id_of[self.EOS]

    @classmethod
    def build(cls, sentences: Iterable[Sequence[str]], max_size: int, min_count: int = 1) -> Self:
        """The most frequent words, ordered by decreasing count, ties by spelling.

        `</s>` counts once a sentence, `<unk>` once for each word left out.

        Args:
            sentences: the training text; read once.
            max_size: the largest number of entries, `<unk>` and `</s>` included.
            min_count: how often a word must occur.

        Raises:
            ValueError: there is no word, a sentence holds `</s>`, or a number is out of range.
        """
        return cls.of_counts(cls.count(sentences), max_size, min_count)

    @classmethod
    def count(cls, sentences: Iterable[Sequence[str]]) -> Counter[str]:
        """How often each word occurs, and `</s>` once a sentence; counts of parts of a text add up.

        Raises:
            ValueError: a sentence holds `</s>`.
        """
        counts: Counter[str] = Counter()
        num_sentences = 0
        for words in sentences:
            num_sentences += 1
            counts.update(words)
        if cls.EOS in counts:
            raise ValueError(
                f"Vocabulary.count: sentences must not contain {cls.EOS}, which marks their end; "
                "remove it from the text"
            )
        counts[cls.EOS] = num_sentences
        return counts

    @classmethod
    def of_counts(cls, counts: Counter[str], max_size: int, min_count: int = 1) -> Self:
        """`build` from what `count` gave.

        Raises:
            ValueError: there is no word, or a number is out of range.
        """
        require_at_least(3, "Vocabulary.of_counts", max_size=max_size)  # the two marks and a word
        require_at_least(1, "Vocabulary.of_counts", min_count=min_count)
        words = counts.copy()
        num_sentences, num_unknown = words.pop(cls.EOS, 0), words.pop(cls.UNK, 0)
        if not words:
            raise ValueError(
                f"Vocabulary.of_counts: counts must have at least one word, "
                f"got {num_sentences} sentences and no word"
            )

        def by_frequency(entry: tuple[str, int]) -> tuple[int, str]:
            return -entry[1], entry[0]

        ranked = sorted(words.items(), key=by_frequency)
        kept = [(word, count) for word, count in ranked[: max_size - 2] if count >= min_count]
        num_unknown += words.total() - sum(count for _, count in kept)
        kept += [(cls.UNK, num_unknown), (cls.EOS, num_sentences)]
        return cls(word for word, _ in sorted(kept, key=by_frequency))

    def encode(self, words: Iterable[str]) -> list[int]:
        """The id of each word; `unk_id` for a word outside the vocabulary."""
        id_of, unk_id = self._id_of.get, self.unk_id
        return [id_of(word, unk_id) for word in words]

    def decode(self, ids: Iterable[int]) -> list[str]:
        """The word of each id.

        Raises:
            IndexError: an id is outside [0, len).
        """
        size = len(self.words)
        words = []
        for index in ids:
            if not 0 <= index < size:
                raise IndexError(f"Vocabulary.decode: id must be in [0, {size}), got {index}")
            words.append(self.words[index])
        return words

    def save(self, path: str | Path) -> None:
        """Write one word a line, in the order of the ids, as UTF-8."""
        with atomic_file(Path(path)) as file:
            file.writelines(f"{word}\n".encode() for word in self.words)

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read a file of one word a line; the first line is id 0.

        The files of the 1-billion-word benchmark are read too: a count after the word is ignored,
        `<UNK>` is `<unk>`, and `</S>`, or `<S>` where that is the only mark, is `</s>`. Beside
        `</S>`, `<S>` stays an entry that never occurs: ids and size (793,471) stand.

        Raises:
            FileNotFoundError: there is no such file.
            ValueError: a line, which is named, is not one word, or a special entry is missing.
        """
        path = Path(path)
        if not path.is_file():
            raise FileNotFoundError(
                f"Vocabulary.load: {path} must be a vocabulary file, none there"
            )
        words: dict[str, int] = {}
        content = path.read_bytes().removeprefix(codecs.BOM_UTF8)
        for number, line in enumerate(content.rstrip(b"\r\n").split(b"\n"), start=1):
            try:
                fields = line.decode("utf-8").split()
            except UnicodeDecodeError as error:
                raise ValueError(
                    f"Vocabulary.load: {path}, line {number} must be UTF-8, got {line!r}"
                ) from error
            if not (len(fields) == 1 or (len(fields) == 2 and fields[1].isdecimal())):
                raise ValueError(
                    f"Vocabulary.load: {path}, line {number} must hold one word "
                    f"(a count may follow), got {line.decode('utf-8')!r}"
                )
            word = fields[0]
            if word in words:
                raise ValueError(
                    f"Vocabulary.load: {path}, line {number} must hold a new word, "
                    f"got {word!r} of line {words[word]} again"
                )
            words[word] = number
        renamed = {}
        for spellings in (_UNK_SPELLINGS, _EOS_SPELLINGS):
            found = next((spelling for spelling in spellings if spelling in words), None)
            if found is None:
                raise ValueError(
                    f"Vocabulary.load: {path} must have a line {spellings[0]}, it has none"
                )
            renamed[found] = spellings[0]
        return cls(renamed.get(word, word) for word in words)

    def fingerprint(self) -> str:
        """SHA-256 (hex) of the words in order: equal for equal vocabularies, on every machine."""
        return hashlib.sha256("\n".join(self.words).encode("utf-8")).hexdigest()

    def __len__(self) -> int:
        return len(self.words)

    def __contains__(self, word: object) -> bool:
        return word in self._id_of

    def __repr__(self) -> str:
        return f"Vocabulary({len(self)} words, {self.fingerprint()[:12]})"
