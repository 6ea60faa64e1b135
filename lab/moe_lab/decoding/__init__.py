"""Beam search, translation of text, and BLEU."""

from moe_lab.decoding.beam_search import BeamSearch, Hypothesis, StepModel, StepState
from moe_lab.decoding.bleu import Bleu, corpus_bleu
from moe_lab.decoding.translator import Translation, Translator

__all__ = [
    "BeamSearch",
    "Bleu",
    "Hypothesis",
    "StepModel",
    "StepState",
    "Translation",
    "Translator",
    "corpus_bleu",
]
