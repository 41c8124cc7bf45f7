"""Ranks whose machines do not have what the first rank's has: other data end a run before its first step, on all ranks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from rank_pool import RankPool
from training_cases import Case, training_run

from hybridep.errors import DataError
from hybridep.run import Data, Validation
from runtime.data import Batches
from runtime.mesh import Mesh
from runtime.trainer import RankTrainer

pytestmark = pytest.mark.timeout(90)

CASE = Case(sizes=(2, 1), domains=(1, 1))


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(2) as pool:
        yield pool


def what_is_said(rank: int, paths: list[Path], held_out: list[Path], device: str) -> tuple[str, list[str]]:
    """(The error, remarks) of a rank that reads its own of these, and says that it computes on such a device."""
    run = training_run(data=Data(path=paths[rank]))
    if held_out:
        run = run.model_copy(update={"validation": Validation(data=Data(path=held_out[rank]), every_steps=1)})
    trainer = RankTrainer(run, Mesh(plan=CASE.plan(), rank=rank))
    if rank:
        trainer.mesh.__dict__["device"] = torch.device(device)
    try:
        trainer.require_alike()
        return "", trainer._remarks
    except DataError as error:
        return str(error), trainer._remarks
    finally:
        trainer.close()


def written(folder: Path, name: str, tokens: np.ndarray) -> Path:
    np.save(folder / name, tokens)
    return folder / name


def test_all_ranks_read_the_same(pool: RankPool, tmp_path: Path) -> None:
    tokens = np.arange(400_000) % 250
    here, there = (written(tmp_path, name, tokens.astype(kind)) for name, kind in (("a.npy", np.uint16), ("b.npy", np.int64)))
    assert pool.run(what_is_said, [here, there], [], "cpu") == [("", [])] * 2
    longer = written(tmp_path, "c.npy", np.append(tokens, 3))
    other = written(tmp_path, "d.npy", np.where(np.arange(len(tokens)) < 5000, tokens, tokens // 2))
    for wrong, length in ((longer, 400_001), (other, 400_000)):
        for paths, held_out, key in (([here, wrong], [], "data"), ([here, here], [here, wrong], "validation.data")):
            said = pool.run(what_is_said, paths, held_out, "cpu")
            assert said[0] == said[1]
            assert said[0][0].startswith(f"{key}.path: rank 1 in dc1 does not read what rank 0 in dc0 does ({length} and 400000 ")


def test_other_devices_are_remarked(pool: RankPool, tmp_path: Path) -> None:
    here = written(tmp_path, "a.npy", np.arange(1000) % 250)
    [first, second] = pool.run(what_is_said, [here, here], [], "meta")
    assert first == ("", ["rank 1 in dc1 computes on meta, rank 0 in dc0 on cpu (run.device)"]) and second == ("", [])


@pytest.mark.parametrize("at", [0, 4095, 250_000, 499_999])
def test_fingerprints_look_everywhere(at: int) -> None:
    """Not at every token: a file that was made anew differs all over."""
    tokens = np.zeros(500_000, dtype=np.uint8)
    changed = tokens.copy()
    changed[max(at - 4000, 0) : at + 4000] = 1
    assert Batches(tokens, length=9, seed=0).fingerprint() != Batches(changed, length=9, seed=0).fingerprint()
    assert Batches(tokens[:9000], length=9, seed=0).fingerprint()[0] == 9000
