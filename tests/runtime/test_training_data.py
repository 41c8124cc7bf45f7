"""Training text: the same sequences on any number of ranks, and errors in one line."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from hybridep.errors import DataError
from hybridep.run import Data
from runtime.data import Batches, read_text

TEXT = np.frombuffer(bytes(range(256)) * 4, dtype=np.uint8)


def test_a_sequence_depends_on_seed_step_and_index_only() -> None:
    batches = Batches(TEXT, length=9, seed=5)
    tokens, targets = batches(3, 0, 8)
    assert tokens.shape == targets.shape == (8, 9)
    assert torch.equal(tokens[:, 1:], targets[:, :-1])
    for index in range(8):
        assert torch.equal(batches(3, index, 1)[0][0], tokens[index])
    assert not torch.equal(batches(4, 0, 8)[0], tokens)
    assert not torch.equal(Batches(TEXT, length=9, seed=6)(3, 0, 8)[0], tokens)


def test_the_last_byte_can_be_a_target() -> None:
    tokens, targets = Batches(TEXT[:10], length=9, seed=0)(1, 0, 2)
    assert targets[:, -1].tolist() == [9, 9]
    assert tokens[:, 0].tolist() == [0, 0]


def test_a_folder_is_read_in_the_order_of_its_paths(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "x.txt").write_text("third")
    (tmp_path / "a.md").write_text("first")
    (tmp_path / "a.py").write_text("second")
    (tmp_path / "a.bin").write_text("never")
    assert read_text(Data(path=tmp_path)).tobytes() == b"firstsecondthird"
    assert read_text(Data(path=tmp_path / "a.bin")).tobytes() == b"never"


def test_there_is_always_some_text() -> None:
    assert len(read_text(Data())) > 10**6


@pytest.mark.parametrize(
    ("path", "message"),
    [("missing.txt", "missing.txt cannot be read"), ("", "holds no file that ends in .py, .txt, .md; set data.suffixes")],
)
def test_nothing_to_read_is_an_error(tmp_path: Path, path: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        read_text(Data(path=tmp_path / path))


def test_too_short_text_is_an_error() -> None:
    with pytest.raises(DataError, match=r"9 bytes of text are too few for training\.sequence_length 9, it needs 10"):
        Batches(TEXT[:9], length=9, seed=0)
