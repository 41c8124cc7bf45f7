"""Training tokens. Which sequence is read depends on (seed, step, index in the global batch) alone, so any number of ranks trains
on the same data."""

from __future__ import annotations

import os
import sysconfig
import zlib
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from hybridep.errors import DataError
from hybridep.run import Data, Run
from hybridep.workload import Workload

if TYPE_CHECKING:
    from torch import Tensor

TokenArray = NDArray[np.integer[Any]]

BYTE_VALUES = 256
"""Vocabulary of text that is read as bytes."""
TOKEN_FILE = ".npy"
"""Ending of files of token ids."""
_STRETCHES, _STRETCH = 64, 4096
"""Of tokens, by which ranks see that they read the same."""
_LOOKED_AT = 10_000_000
"""Tokens, the first ones, that are compared with the vocabulary at once; all others when they are used."""


def training_batches(run: Run, workload: Workload) -> Batches:
    """What ``run.data`` holds, in sequences of the workload's length. Raises DataError where that cannot be read or does not suit
    the model."""
    return _batches("data", run.data, run.seed, workload)


def validation_batches(run: Run, workload: Workload) -> Batches | None:
    """The same of ``run.validation``; None without."""
    return None if run.validation is None else _batches("validation.data", run.validation.data, run.seed, workload)


def _batches(key: str, data: Data, seed: int, workload: Workload) -> Batches:
    vocab_size, where = workload.model.vocab_size, f"{key}.path"
    if data.path is not None and data.path.suffix == TOKEN_FILE:
        tokens = _token_file(where, data.path)
    elif vocab_size < BYTE_VALUES:
        raise DataError(
            f"workload {workload.name}: model.vocab_size: {vocab_size} must be at least {BYTE_VALUES}, text is read as bytes; "
            f"raise it, or give token ids ({where}: FILE{TOKEN_FILE})"
        )
    else:
        tokens = _text(key, data.path, data.suffixes)
    if data.path is not None:
        where = f"{where}: {data.path}"
    return Batches(tokens, length=workload.training.sequence_length, seed=seed, vocab_size=vocab_size, where=where)


def _text(key: str, path: Path | None, suffixes: tuple[str, ...]) -> TokenArray:
    """All bytes of a file, of a folder's files in the order of their paths, or of the Python standard library's top-level
    sources."""
    # Not recursive below the standard library: installed packages live there on some systems.
    folder = path or Path(sysconfig.get_paths()["stdlib"])
    pattern, suffixes = ("*", (".py",)) if path is None else ("**/*", suffixes)
    try:
        files = files_of(folder, suffixes, pattern)
        if not files:
            raise DataError(f"{key}.path: {folder} holds no file that ends in {', '.join(suffixes)}; set {key}.suffixes")
        texts = [path.read_bytes() for path in files]
    except OSError as error:
        raise DataError(f"{key}.path: {error.filename or folder} cannot be read ({error.strerror})") from None
    for file, text in zip(files, texts, strict=True):
        if b"\0" in text:
            raise DataError(
                f"{key}.path: {file} is no text (it holds null bytes); token ids are in a file that ends in {TOKEN_FILE}, as "
                f"numpy.save writes it, and {key}.path is that file"
            )
    return np.concatenate([np.frombuffer(text, dtype=np.uint8) for text in texts])


def files_of(path: Path, suffixes: Collection[str], pattern: str = "**/*") -> list[Path]:
    """A folder's files that end so, in the order of their paths; what is no folder itself. Raises OSError."""
    if not path.is_dir():
        return [path]
    # Listing a folder that may not be read finds nothing; asking for its entries says why.
    next(os.scandir(path), None)
    return sorted(file for file in path.glob(pattern) if file.suffix in suffixes and file.is_file())


def _token_file(where: str, path: Path) -> TokenArray:
    """Token ids that ``numpy.save`` wrote, left on disk until they are used."""
    try:
        tokens = np.lib.format.open_memmap(path, mode="r")
    except (OSError, ValueError, EOFError) as error:
        raise DataError(f"{where}: {path} cannot be read ({error})") from None
    if tokens.ndim != 1 or not np.issubdtype(tokens.dtype, np.integer):
        raise DataError(
            f"{where}: {path} holds {tokens.dtype} of shape {list(tokens.shape)}; token ids are integers in one dimension, "
            "for example uint16"
        )
    return np.asarray(tokens)


class Batches:
    """Sequences of ``length`` tokens and the tokens that follow each."""

    def __init__(
        self, tokens: TokenArray, *, length: int, seed: int, vocab_size: int = BYTE_VALUES, where: str = "data.path"
    ) -> None:
        """``where`` begins errors. Raises DataError when there are fewer tokens than one sequence and its last target, or one of
        the first is beyond the vocabulary."""
        if len(tokens) < length + 1:
            raise DataError(
                f"{where}: {len(tokens)} tokens are too few for training.sequence_length {length}, it needs {length + 1}"
            )
        self._tokens, self._length, self._seed, self._vocab_size = tokens, length, seed, vocab_size
        self._where = where
        self._require_known(tokens[:_LOOKED_AT])

    def __call__(self, step: int, first: int, number: int) -> tuple[Tensor, Tensor]:
        """(tokens, targets), int64 [number, length]: sequences ``first`` to ``first + number - 1`` of a step's batch. Raises
        DataError where the model does not know a token."""
        import torch  # takes seconds, and is not needed to look at data before ranks start

        windows = np.stack([self._window(step, index) for index in range(first, first + number)])
        self._require_known(windows)
        both = torch.from_numpy(windows.astype(np.int64))
        return both[:, :-1].contiguous(), both[:, 1:].contiguous()

    def fingerprint(self) -> list[int]:
        """How many tokens there are, and a sum of stretches of them from all over: two that differ are of other data."""
        begins = np.unique(np.linspace(0, max(len(self._tokens) - _STRETCH, 0), _STRETCHES, dtype=np.int64))
        found = 0
        for begin in begins.tolist():
            found = zlib.crc32(self._tokens[begin : begin + _STRETCH].astype("<i8").tobytes(), found)
        return [len(self._tokens), found]

    def _require_known(self, tokens: TokenArray) -> None:
        unknown = tokens[(tokens < 0) | (tokens >= self._vocab_size)]
        if unknown.size:
            problem = f"{self._where}: token {unknown[0]}"
            if unknown[0] < 0:
                raise DataError(f"{problem} is negative; token ids count from 0")
            raise DataError(
                f"{problem} is not below model.vocab_size {self._vocab_size}; raise it, or take the model's own tokenizer"
            )

    def _window(self, step: int, index: int) -> TokenArray:
        generator = np.random.Generator(np.random.Philox(np.random.SeedSequence([self._seed, step, index])))
        start = int(generator.integers(len(self._tokens) - self._length))
        return self._tokens[start : start + self._length + 1]
