"""Names that the options of commands and the modules of the lab share; needs no torch."""

PARTS = ("train", "dev", "test")  # of a corpus
PARTS_AND_ALL = (*PARTS, "all")
PIECE_KINDS = ("bpe", "unigram")
