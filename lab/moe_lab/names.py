"""Names that the commands and the modules of the lab share; the module needs no torch."""

from pathlib import Path

from moe_lab.errors import ConfigError

PARTS = ("train", "dev", "test")  # of a corpus
PARTS_AND_ALL = (*PARTS, "all")
PIECE_KINDS = ("bpe", "unigram")
_CONFIGS = Path(__file__).parent / "configs"


def configuration_file(path: str | Path) -> Path:
    """Returns the file at a path, else the configuration of the package with this name."""
    for file in (Path(path), _CONFIGS / f"{path}.toml"):
        if file.is_file():
            return file
    raise ConfigError(
        f"there is no configuration file {path}; give a file, or a name such as small/moe-32 "
        f"(the names are the files of {_CONFIGS})"
    )
