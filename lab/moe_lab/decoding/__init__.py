"""Beam search, translation of text, and BLEU."""

__all__: list[str] = []
