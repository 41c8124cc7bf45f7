"""Training text: the same sequences on any number of ranks, and errors in one line."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from hybridep.config import build
from hybridep.errors import DataError
from hybridep.run import Data, Run
from hybridep.workload import Workload
from runtime.data import Batches, training_batches

TEXT = np.frombuffer(bytes(range(256)) * 4, dtype=np.uint8)


def batches(data: Data, *, length: int = 4, vocab_size: int = 256) -> Batches:
    run = Run(name="data", cluster="none", workload="none", output=Path("none"), steps=1, data=data)
    model = {
        "num_layers": 1,
        "hidden_size": 8,
        "num_heads": 1,
        "vocab_size": vocab_size,
        "num_experts": 2,
        "top_k": 1,
        "expert_ffn_size": 8,
    }
    training = {"sequence_length": length, "micro_batch_size": 1, "micro_batches": 1, "dtype": "fp32"}
    return training_batches(run, build(Workload, {"name": "words", "model": model, "training": training}, "words"))


def everything(data: Data, length: int) -> bytes:
    """The whole text, which must be so long that there is one sequence only."""
    tokens, targets = batches(data, length=length - 1)(1, 0, 1)
    return bytes([*tokens[0].tolist(), int(targets[0, -1])])


def test_a_sequence_depends_on_seed_step_and_index_only() -> None:
    read = Batches(TEXT, length=9, seed=5)
    tokens, targets = read(3, 0, 8)
    assert tokens.shape == targets.shape == (8, 9)
    assert torch.equal(tokens[:, 1:], targets[:, :-1])
    for index in range(8):
        assert torch.equal(read(3, index, 1)[0][0], tokens[index])
    assert not torch.equal(read(4, 0, 8)[0], tokens)
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
    assert everything(Data(path=tmp_path), 16) == b"firstsecondthird"
    assert everything(Data(path=tmp_path / "a.bin"), 5) == b"never"


def test_there_is_always_some_text() -> None:
    assert batches(Data(), length=10**6)(1, 0, 1)[0].shape == (1, 10**6)


@pytest.mark.parametrize(
    ("path", "message"),
    [("missing.txt", "missing.txt cannot be read"), ("", "holds no file that ends in .py, .txt, .md; set data.suffixes")],
)
def test_nothing_to_read_is_an_error(tmp_path: Path, path: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        batches(Data(path=tmp_path / path))


@pytest.mark.parametrize("name", ["tokens.bin", "tokens.npz"])
def test_token_ids_of_other_kinds_are_not_read_as_text(tmp_path: Path, name: str) -> None:
    ids = np.arange(1000, dtype=np.uint16)
    ids.tofile(tmp_path / name) if name.endswith("bin") else np.savez(tmp_path / name, ids=ids)
    with pytest.raises(DataError, match=rf"{name} is no text \(it holds null bytes\); token ids are in a file that ends in .npy"):
        batches(Data(path=tmp_path / name))
    # Nor in a folder beside texts.
    (tmp_path / "a.txt").write_text("text" * 100)
    with pytest.raises(DataError, match=rf"{name} is no text .* and data\.path is that file"):
        batches(Data(path=tmp_path, suffixes=(".txt", Path(name).suffix)))


def test_too_short_text_is_an_error() -> None:
    with pytest.raises(DataError, match=r"9 tokens are too few for training\.sequence_length 9, it needs 10"):
        Batches(TEXT[:9], length=9, seed=0)


def test_token_ids_are_read_from_disk(tmp_path: Path) -> None:
    path, ids = tmp_path / "tokens.npy", np.arange(40_000, 40_006, dtype=np.uint16)
    np.save(path, ids)
    tokens, targets = batches(Data(path=path), length=5, vocab_size=50_000)(1, 0, 1)
    assert tokens[0].tolist() == ids[:-1].tolist() and targets[0].tolist() == ids[1:].tolist()
    # A small vocabulary is enough for what it is of.
    np.save(path, ids % 40_000)
    assert batches(Data(path=path), length=5, vocab_size=6)(1, 0, 1)[1][0].tolist() == [1, 2, 3, 4, 5]


def test_tokens_that_do_not_suit_the_model_are_errors(tmp_path: Path) -> None:
    path = tmp_path / "tokens.npy"
    for bad, message in (
        (np.array([0, 1, 6, 1, 0, 1]), r"tokens\.npy: token 6 is not below model\.vocab_size 6"),
        (np.array([0, 1, -1, 1, 0, 1]), r"tokens\.npy: token -1 is negative"),
        (np.array([0, 1, 2**64 - 1, 1, 0, 1], dtype=np.uint64), r"tokens\.npy: token 18446744073709551615 is not below"),
    ):
        np.save(path, bad)
        with pytest.raises(DataError, match=message):
            batches(Data(path=path), length=5, vocab_size=6)(1, 0, 1)
    with pytest.raises(DataError, match=r"words: model\.vocab_size: 255 must be at least 256, text is read as bytes"):
        batches(Data(), vocab_size=255)


def test_files_that_hold_no_tokens_are_errors(tmp_path: Path) -> None:
    path = tmp_path / "tokens.npy"
    for bad, message in (
        (np.zeros(8), r"tokens\.npy holds float64 of shape \[8\]; token ids are integers"),
        (np.zeros((2, 8), dtype=np.int32), r"holds int32 of shape \[2, 8\]"),
        (np.array([None, 1]), "cannot be read .*objects"),
    ):
        np.save(path, bad)
        with pytest.raises(DataError, match=message):
            batches(Data(path=path))
    with path.open("wb") as stream:
        np.savez(stream, tokens=np.zeros(8, dtype=np.int32))
    archive = path.read_bytes()
    for content in (archive, archive[:20], b"no array", b""):
        path.write_bytes(content)
        with pytest.raises(DataError, match=r"tokens\.npy cannot be read"):
            batches(Data(path=path))
    with pytest.raises(DataError, match=r"missing\.npy cannot be read"):
        batches(Data(path=tmp_path / "missing.npy"))
