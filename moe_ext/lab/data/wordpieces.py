"""Wordpieces: the vocabulary that all languages of a translation model share (App. E)."""

import hashlib
import io
import random
import re
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, Self

from moe_ext.checks import require, require_at_least
from moe_ext.lab.files import atomic_file
from moe_ext.lab.packages import require_package

_SPACE = "\u2581"  # how a piece spells the space before a word
_UNKNOWN = "\u2047"  # how decoded text spells what no piece spells


class Wordpieces:
    """Pieces of words, found in a text by sentencepiece, so that few of them spell everything.

    Frequent words are a piece each, rare ones several; a piece that begins a word begins with "▁".
    `decode(encode(text))` is `normalise(text)`: white space becomes single spaces, characters are
    composed (Unicode NFC), nothing else changes. Only a character that the training text did not
    hold, or hardly, is lost: it is `<unk>`, and decoded as "⁇".

    `<unk>` and `</s>` (the end of a sentence, and the symbol before its first piece) are entries as
    in `Vocabulary`; padding is none. Neither they nor the target tokens `<2xx>` come from a text
    that spells them, which is made of pieces as any other.

    Args:
        model: the bytes of a sentencepiece model, from `train` or from a file; its padding and
            start of a sentence, if it has any, are not used.

    Attributes:
        unk_id, eos_id: the ids of `<unk>` and `</s>`.

    Raises:
        ImportError: sentencepiece is not installed.
        ValueError: that is not a model, or it has no `</s>`.
    """

    def __init__(self, model: bytes) -> None:
        sentencepiece = _sentencepiece()
        self._model = model
        self._processor = sentencepiece.SentencePieceProcessor()
        try:
            self._processor.LoadFromSerializedProto(model)
        except RuntimeError as error:
            raise ValueError(
                f"Wordpieces: model must be one of sentencepiece, got {len(model)} bytes that are "
                "none"
            ) from error
        self.unk_id: int = self._processor.unk_id()
        self.eos_id: int = self._processor.eos_id()
        if self.eos_id < 0:
            raise ValueError("Wordpieces: model must have a piece </s>, which is missing")

    @classmethod
    def train(
        cls,
        sentences: Iterable[str],
        vocab_size: int,
        *,
        kind: str = "bpe",
        target_tokens: Sequence[str] = (),
        character_coverage: float = 0.9999,
        max_sentences: int | None = None,
    ) -> Self:
        """The pieces of a text of all languages; the same text gives the same bytes.

        Args:
            sentences: read once. Those of more than 4,192 bytes are left out.
            vocab_size: the number of entries, `<unk>`, `</s>` and the target tokens included.
            kind: "bpe" (pairs of pieces merged by frequency) or "unigram" (a language model of
                pieces, pruned; some ten times slower).
            target_tokens: languages, "fr" for the entry `<2fr>` that asks for French.
            character_coverage: the share of the text whose characters become pieces, 0.98 to 1.
            max_sentences: from a longer text only so many are taken, all parts of it alike, to
                bound memory and time.

        Raises:
            ImportError: sentencepiece is not installed.
            ValueError: an argument is out of range, or the text is too short for that many pieces
                or has too many characters.
        """
        require(kind in ("bpe", "unigram"), "Wordpieces.train: kind", 'be "bpe" or "unigram"', kind)
        name = "Wordpieces.train"
        require_at_least(1, name, vocab_size=vocab_size, max_sentences=max_sentences)
        require(
            0.98 <= character_coverage <= 1,
            "Wordpieces.train: character_coverage",
            "be in [0.98, 1]",
            character_coverage,
        )
        require(
            len(set(target_tokens)) == len(target_tokens),
            "Wordpieces.train: target_tokens",
            "be distinct",
            list(target_tokens),
        )
        sentencepiece = _sentencepiece()
        texts: Iterable[str] = filter(None, map(cls.normalise, sentences))
        if max_sentences is not None:
            texts = _sample(texts, max_sentences)
        model = io.BytesIO()
        failed: list[Exception] = []

        def read() -> Iterator[str]:
            try:
                yield from texts
            except Exception as error:
                failed.append(error)
                raise

        try:
            sentencepiece.SentencePieceTrainer.Train(
                sentence_iterator=read(),
                model_writer=model,
                vocab_size=vocab_size,
                model_type=kind,
                character_coverage=character_coverage,
                control_symbols=[f"<2{language}>" for language in target_tokens],
                unk_id=0,
                eos_id=1,
                bos_id=-1,
                pad_id=-1,
                unk_surface=_UNKNOWN,
                normalization_rule_name="identity",  # `normalise` does it
                remove_extra_whitespaces=False,
                num_threads=1,  # the sums of "unigram" depend on it
                minloglevel=2,
            )
        except RuntimeError as error:
            if failed:  # the text's own error, of which sentencepiece makes one of its own
                raise failed[0] from None
            raise ValueError(
                f"Wordpieces.train: vocab_size must {_rule_of_size(str(error))}, got {vocab_size}"
            ) from error
        return cls(model.getvalue())

    @staticmethod
    def normalise(text: str) -> str:
        """The text with single spaces between words and none around, in composed characters."""
        return unicodedata.normalize("NFC", " ".join(text.replace(_SPACE, " ").split()))

    def encode(self, text: str) -> list[int]:
        """The ids of the pieces of a sentence, without `</s>`."""
        ids: list[int] = self._processor.EncodeAsIds(self.normalise(text))
        return ids

    def decode(self, ids: Iterable[int]) -> str:
        """The text of some pieces; `</s>` and target tokens have none.

        Raises:
            IndexError: an id is outside [0, len).
        """
        text: str = self._processor.DecodeIds(self._checked(ids, "decode"))
        return text

    def pieces(self, ids: Iterable[int]) -> list[str]:
        """What each id stands for, `</s>` and `<2fr>` too.

        Raises:
            IndexError: an id is outside [0, len).
        """
        return [self._processor.IdToPiece(index) for index in self._checked(ids, "pieces")]

    def target_token_id(self, language: str) -> int:
        """The id of `<2xx>`, which before a source sentence asks for the language xx.

        Raises:
            ValueError: there is no such entry.
        """
        token = f"<2{language}>"
        index: int = self._processor.PieceToId(token)
        if not self._processor.IsControl(index):
            raise ValueError(
                f"Wordpieces.target_token_id: language must be one of {self.target_tokens}, got "
                f"{language!r}; train the wordpieces with it among their target_tokens"
            )
        return index

    @property
    def words(self) -> tuple[str, ...]:
        """The pieces by id, as `Vocabulary` has words."""
        return tuple(self.pieces(range(len(self))))

    @property
    def target_tokens(self) -> list[str]:
        """The languages that have an entry `<2xx>`."""
        controls = filter(self._processor.IsControl, range(len(self)))
        tokens = [self._processor.IdToPiece(index) for index in controls]
        return [token[2:-1] for token in tokens if token.startswith("<2")]

    def save(self, path: str | Path) -> None:
        """Write the model as one file, which sentencepiece reads too."""
        with atomic_file(Path(path)) as file:
            file.write(self._model)

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read what `save` has written, or a model that sentencepiece has made.

        Raises:
            ImportError: sentencepiece is not installed.
            FileNotFoundError: there is no such file.
            ValueError: it is not a model, or it has no `</s>`.
        """
        path = Path(path)
        if not path.is_file():
            raise FileNotFoundError(
                f"Wordpieces.load: {path} must be a sentencepiece model, none there"
            )
        try:
            return cls(path.read_bytes())
        except ValueError as error:
            raise ValueError(f"Wordpieces.load: {path}: {error}") from error

    def fingerprint(self) -> str:
        """SHA-256 (hex) of the model: equal for equal pieces, on every machine."""
        return hashlib.sha256(self._model).hexdigest()

    def __reduce__(self) -> Any:
        return type(self), (self._model,)

    def __len__(self) -> int:
        return int(self._processor.GetPieceSize())

    def __repr__(self) -> str:
        return f"Wordpieces({len(self)} pieces, {self.fingerprint()[:12]})"

    def _checked(self, ids: Iterable[int], method: str) -> list[int]:
        ids, size = list(ids), len(self)
        for index in ids:
            if not 0 <= index < size:
                raise IndexError(f"Wordpieces.{method}: id must be in [0, {size}), got {index}")
        return ids


def _rule_of_size(message: str) -> str:
    """What sentencepiece, which could not train, says that the number of pieces must."""
    if most := re.search(r"too high .* a value <= (\d+)", message):
        return f"be at most {most[1]} for this text"
    if least := re.search(r"smaller than required_chars. \d+ vs (\d+)", message):
        return f"be at least {least[1]} for this text"
    return f"suit the text, of which sentencepiece says: {message}"


def _sentencepiece() -> ModuleType:
    return require_package("Wordpieces", "sentencepiece", "translation")


def _sample(items: Iterable[str], number: int) -> Iterator[str]:
    """So many of the items, each as likely as any other; all if there are fewer."""
    draw = random.Random(0)
    sample: list[str] = []
    for index, item in enumerate(items):
        if index < number:
            sample.append(item)
        elif (place := draw.randrange(index + 1)) < number:
            sample[place] = item
    return iter(sample)
