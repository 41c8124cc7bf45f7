"""Byte-level training text. Which sequence is read depends on (seed, step, index in the global batch) alone, so any number
of ranks trains on the same data."""

from __future__ import annotations

import os
import sysconfig
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hybridep.errors import DataError
from hybridep.run import Data

ByteArray = NDArray[np.uint8]


def read_text(data: Data) -> ByteArray:
    """All bytes of a file, of a folder's files in the order of their paths, or of the Python standard library's top-level
    sources. Raises DataError when there is nothing to read."""
    # Not recursive below the standard library: installed packages live there on some systems.
    folder = data.path or Path(sysconfig.get_paths()["stdlib"])
    pattern, suffixes = ("*", (".py",)) if data.path is None else ("**/*", data.suffixes)
    try:
        if folder.is_dir():
            # Listing a folder that may not be read finds nothing; asking for its entries says why.
            next(os.scandir(folder), None)
            files = sorted(path for path in folder.glob(pattern) if path.suffix in suffixes and path.is_file())
            if not files:
                raise DataError(f"data.path: {folder} holds no file that ends in {', '.join(suffixes)}; set data.suffixes")
        else:
            files = [folder]
        return np.concatenate([np.frombuffer(path.read_bytes(), dtype=np.uint8) for path in files])
    except OSError as error:
        raise DataError(f"data.path: {error.filename or folder} cannot be read ({error.strerror})") from None


class Batches:
    """Sequences of ``length`` bytes and the bytes that follow each."""

    def __init__(self, text: ByteArray, *, length: int, seed: int) -> None:
        """Raises DataError when the text is shorter than one sequence and its last target."""
        if len(text) < length + 1:
            raise DataError(
                f"data.path: {len(text)} bytes of text are too few for training.sequence_length {length}, it needs {length + 1}"
            )
        self._text, self._length, self._seed = text, length, seed

    def __call__(self, step: int, first: int, number: int) -> tuple[Tensor, Tensor]:
        """(tokens, targets), int64 [number, length]: sequences ``first`` to ``first + number - 1`` of a step's batch."""
        windows = [self._window(step, index) for index in range(first, first + number)]
        both = torch.from_numpy(np.stack(windows).astype(np.int64))
        return both[:, :-1].contiguous(), both[:, 1:].contiguous()

    def _window(self, step: int, index: int) -> ByteArray:
        generator = np.random.Generator(np.random.Philox(np.random.SeedSequence([self._seed, step, index])))
        start = int(generator.integers(len(self._text) - self._length))
        return self._text[start : start + self._length + 1]
