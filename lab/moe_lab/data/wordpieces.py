"""Wordpieces: the vocabulary shared by all languages of a translation model (App. E)."""

import hashlib
import io
import random
import re
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Self

import sentencepiece

from moe_ext.checks import given, require, require_one_of, require_sizes
from moe_lab.data.vocabulary import checked_ids
from moe_lab.files import atomic_file, existing_file, read_file
from moe_lab.names import PIECE_KINDS

_SPACE = "\u2581"  # marks the space before a word in a wordpiece
_UNKNOWN = "\u2047"  # stands for <unk> in decoded text
_MAX_BYTES = 2**28  # of a model; a wordpiece needs about 20


class Wordpieces:
    """Splits text into wordpieces with a sentencepiece model.

    A frequent word is one wordpiece; a rare word is several wordpieces. The first wordpiece of a
    word begins with "▁". ``decode(encode(text))`` equals ``normalise(text)``, which only changes
    white space to single spaces and composes characters (Unicode NFC). A character that is missing
    or very rare in the training text is encoded as ``<unk>`` and decoded as "⁇".

    ``<unk>`` and ``</s>`` (the end of a sentence, and the input before its first wordpiece) are
    entries as in `Vocabulary`. Padding has no entry. Text that spells ``<unk>``, ``</s>`` or a
    target token ``<2xx>`` is encoded as ordinary wordpieces.

    `model` has the bytes of a sentencepiece model. Its symbols for padding and start of sentence,
    if any, are not used.
    """

    def __init__(self, model: bytes) -> None:
        self._model = model
        self._processor = sentencepiece.SentencePieceProcessor()
        try:
            self._processor.LoadFromSerializedProto(model)
        except RuntimeError as error:
            raise ValueError(
                f"Wordpieces: model must be a sentencepiece model, got {len(model)} bytes that "
                "sentencepiece cannot read"
            ) from error
        self.unk_id: int = self._processor.unk_id()
        self.eos_id: int = self._processor.eos_id()
        if self.eos_id < 0:
            raise ValueError("Wordpieces: model must have a wordpiece </s>, got none")
        try:
            _ = self.words
        except UnicodeDecodeError as error:
            raise ValueError(
                f"Wordpieces: model must have wordpieces in UTF-8, got {error.object!r:.100}"
            ) from error

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
        """Trains wordpieces on a text of all languages; the same text gives the same model bytes.

        Args:
            sentences: the training text; read once. Sentences longer than 4,192 bytes are skipped.
            vocab_size: number of entries, with ``<unk>``, ``</s>`` and the target tokens.
            kind: "bpe" (merges frequent pairs of wordpieces) or "unigram" (prunes a unigram
                language model of wordpieces; training takes about ten times as long).
            target_tokens: target languages; "fr" adds the entry ``<2fr>``, which requests French.
            character_coverage: fraction of the text's characters that become wordpieces, from
                0.98 to 1.
            max_sentences: size of a uniform random sample of the sentences, to bound memory and
                time; None uses all sentences.
        """
        name = "Wordpieces.train"
        require_one_of(f"{name}: kind", PIECE_KINDS, kind)
        require_sizes(name, vocab_size=vocab_size, **given(max_sentences=max_sentences))
        coverage, languages = character_coverage, list(target_tokens)
        require(0.98 <= coverage <= 1, f"{name}: character_coverage", "be in [0.98, 1]", coverage)
        distinct = len(set(languages)) == len(languages)
        require(distinct, f"{name}: target_tokens", "be distinct", languages)
        texts: Iterable[str] = filter(None, map(cls.normalise, sentences))
        if max_sentences is not None:
            texts = uniform_sample(texts, max_sentences)
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
                character_coverage=coverage,
                control_symbols=[f"<2{language}>" for language in languages],
                unk_id=0,
                eos_id=1,
                bos_id=-1,
                pad_id=-1,
                unk_surface=_UNKNOWN,
                normalization_rule_name="identity",  # `normalise` has normalised the text
                remove_extra_whitespaces=False,
                num_threads=1,  # the rounding of "unigram" depends on num_threads
                minloglevel=2,
            )
        except RuntimeError as error:
            if failed:  # sentencepiece replaced the exception from reading the text
                raise failed[0] from None
            raise ValueError(
                f"Wordpieces.train: vocab_size must {_rule_of_size(str(error))}, got {vocab_size}"
            ) from error
        return cls(model.getvalue())

    @staticmethod
    def normalise(text: str) -> str:
        """Reduces white space to single spaces between words and composes characters (NFC)."""
        return unicodedata.normalize("NFC", " ".join(text.replace(_SPACE, " ").split()))

    def encode(self, text: str) -> list[int]:
        """Returns the ids of the wordpieces of a text, without ``</s>``."""
        ids: list[int] = self._processor.EncodeAsIds(self.normalise(text))
        return ids

    def decode(self, ids: Iterable[int]) -> str:
        """Returns the text of wordpiece ids, without ``</s>`` and without tokens ``<2xx>``."""
        ids = checked_ids(ids, len(self), "Wordpieces.decode")
        text: str = self._processor.DecodeIds(ids)
        return text

    def pieces(self, ids: Iterable[int]) -> list[str]:
        """Returns the wordpiece of each id, including ``</s>`` and tokens ``<2xx>``."""
        ids = checked_ids(ids, len(self), "Wordpieces.pieces")
        return [self._processor.IdToPiece(index) for index in ids]

    def target_token_id(self, language: str) -> int:
        """Returns the id of ``<2xx>``, which requests language xx in front of a source sentence."""
        token = f"<2{language}>"
        index: int = self._processor.PieceToId(token)
        if not self._processor.IsControl(index):
            raise ValueError(
                f"Wordpieces.target_token_id: language must be one of {self.target_tokens}, got "
                f"{language!r}; train the wordpieces with target_tokens that include this language"
            )
        return index

    @property
    def words(self) -> tuple[str, ...]:
        """The wordpieces in the order of their ids."""
        return tuple(self.pieces(range(len(self))))

    @property
    def target_tokens(self) -> list[str]:
        """The languages with an entry ``<2xx>``."""
        tokens = self.pieces(filter(self._processor.IsControl, range(len(self))))
        return [token[2:-1] for token in tokens if token.startswith("<2")]

    @property
    def num_bytes(self) -> list[int]:
        """The number of UTF-8 bytes that each wordpiece stands for, in the order of the ids.

        The space before a word counts as one byte. The sum over a sentence is therefore the bytes
        of its text plus one, for the end of the line. ``</s>`` and tokens ``<2xx>`` have no bytes.
        ``<unk>`` counts as one byte, the fewest that it can stand for.
        """
        sizes = [len(piece.replace(_SPACE, " ").encode("utf-8")) for piece in self.words]
        for index in range(len(self)):
            if self._processor.IsControl(index):
                sizes[index] = 0
            elif self._processor.IsByte(index):  # such as <0xC3>
                sizes[index] = 1
        sizes[self.unk_id] = 1
        return sizes

    @property
    def begins_word(self) -> list[bool]:
        """Whether each wordpiece begins a word, in the order of the ids."""
        return [piece.startswith(_SPACE) for piece in self.words]

    def save(self, path: str | Path) -> None:
        """Writes the model to a file that sentencepiece can read."""
        with atomic_file(Path(path)) as file:
            file.write(self._model)

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Reads a file written by `save` or by sentencepiece."""
        path = existing_file(path, "Wordpieces.load: path must be a sentencepiece model")
        content = read_file(path, _MAX_BYTES)
        try:
            return cls(content)
        except ValueError as error:
            raise ValueError(f"Wordpieces.load: {path}: {error}") from error

    def fingerprint(self) -> str:
        """Returns the SHA-256 (hex) of the model bytes."""
        return hashlib.sha256(self._model).hexdigest()

    def __reduce__(self) -> Any:
        return type(self), (self._model,)

    def __len__(self) -> int:
        return int(self._processor.GetPieceSize())


def _rule_of_size(message: str) -> str:
    """Turns sentencepiece's error message into the rule for vocab_size."""
    if most := re.search(r"too high .* a value <= (\d+)", message):
        return f"be at most {most[1]} for this text"
    if least := re.search(r"smaller than required_chars. \d+ vs (\d+)", message):
        return f"be at least {least[1]} for this text"
    return f"suit the text (sentencepiece: {message})"


def uniform_sample(items: Iterable[str], number: int) -> Iterator[str]:
    """Samples `number` items uniformly without replacement, or all if there are fewer."""
    draw = random.Random(0)
    sample: list[str] = []
    for index, item in enumerate(items):
        if index < number:
            sample.append(item)
        elif (place := draw.randrange(index + 1)) < number:
            sample[place] = item
    return iter(sample)
