"""Numbers that travel in fewer bytes are the same to the bit, whatever they are, and messages as long as counted."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from hybridep.codecs import LOSSLESS, expert_bytes, gradient_bytes, lossless_bytes
from runtime.codecs import expert_coder, gradient_coder, lossless
from runtime.codecs.lossless import restore, shorten

BITS = {torch.bfloat16: torch.int16, torch.float32: torch.int32}
DTYPES = list(BITS)


def drawn(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def any_bits(*shape: int, dtype: torch.dtype) -> Tensor:
    """Each exponent, and NaNs of all kinds, as often as any other."""
    generator, top = torch.Generator().manual_seed(1), 1 << (8 * dtype.itemsize - 1)
    return torch.randint(-top, top, shape, generator=generator).to(BITS[dtype]).view(dtype)


def with_extremes(*shape: int, dtype: torch.dtype) -> Tensor:
    x = drawn(*shape, dtype=dtype)
    odd = torch.tensor([0.0, -0.0, float("inf"), float("-inf"), float("nan"), 1e-40, -1e38]).to(dtype)
    x.view(-1)[: len(odd)] = odd[: x.numel()]
    return x


def same(found: Tensor, wanted: Tensor) -> bool:
    return found.dtype is wanted.dtype and torch.equal(found.view(BITS[found.dtype]), wanted.view(BITS[wanted.dtype]))


@pytest.fixture(params=[lossless._PIECE, 128], ids=["at-once", "in-pieces"], autouse=True)
def _pieces(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lossless, "_PIECE", request.param)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 63, 64, 65, 200])
@pytest.mark.parametrize("made", [drawn, any_bits, with_extremes])
def test_all_bits_come_back(made: Callable[..., Tensor], width: int, dtype: torch.dtype) -> None:
    x = made(9, width, dtype=dtype)
    shortened = shorten(x)
    followed = torch.cat([shortened.written_out, torch.full((5,), 0xAA, dtype=torch.uint8)])
    assert same(restore(shortened.fixed_NB, followed, width, dtype), x)
    rows = torch.tensor([8, 0, 0, 3])
    some = shortened.take(rows)
    assert same(restore(some.fixed_NB, some.written_out, width, dtype), x[rows])
    assert some.counts_N.sum() == len(some.written_out)
    none = shortened.take(rows[:0])
    assert restore(none.fixed_NB, none.written_out, width, dtype).shape == (0, width)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["experts", "gradients"])
@pytest.mark.parametrize("made", [drawn, any_bits])
def test_messages_are_as_long_as_agreed_or_longer_and_never_longer_than_their_room(
    made: Callable[..., Tensor], kind: str, dtype: torch.dtype
) -> None:
    """Several as one, which may have different lengths."""
    length = 5000
    rows = [drawn(length, dtype=dtype), made(length, dtype=dtype), drawn(length, dtype=dtype, seed=7)]
    if kind == "experts":
        experts = expert_coder(LOSSLESS, length, dtype, lambda: rows[0])
        assert experts is not None
        agreed, most = experts.message_bytes, experts.most_bytes
        assert agreed == expert_bytes(LOSSLESS, length, dtype.itemsize)
        sent = torch.cat([experts.encode(0, row) for row in rows])
        found = [torch.zeros_like(row) for row in rows]
        for message, row in zip(experts.apart(sent, 3), found, strict=True):
            experts.decode(message, row)
    else:
        gradients = gradient_coder(LOSSLESS, dtype)
        assert gradients is not None
        agreed, most = gradients.message_bytes(length, dtype), gradients.most_bytes(length, dtype)
        assert agreed == gradient_bytes(LOSSLESS, length, dtype.itemsize)
        sent = torch.cat([gradients.encode(0, row) for row in rows])
        found = [gradients.decode(message, length, dtype) for message in gradients.apart(sent, 3, length, dtype)]
    assert all(same(mine, row) for mine, row in zip(found, rows, strict=True))
    assert 3 * agreed <= len(sent) <= 3 * most
    assert (len(sent) == 3 * agreed) == (made is drawn)


def test_what_numbers_of_one_scale_take() -> None:
    """11.4 of 16 bits, 27.4 of 32; gradients have room for more exponents that differ."""
    shares = [lossless_bytes(kind, 1 << 20, size) / (size << 20) for size in (2, 4) for kind in ("rows", "experts", "gradients")]
    assert shares == pytest.approx([0.711, 0.711, 0.742, 0.855, 0.855, 0.871], abs=0.001)
    x = drawn(64, 4096, dtype=torch.bfloat16)
    assert 0.02 < len(shorten(x).written_out) / x.numel() < 0.03
    # However large rows are beside each other.
    scales = torch.logspace(-30, 30, 64)[:, None]
    assert len(shorten((x.float() * scales).to(x)).written_out) / x.numel() < 0.03


def test_what_has_no_format_travels_as_it_is() -> None:
    x = torch.randn(100, dtype=torch.float64)
    assert expert_coder(LOSSLESS, 100, x.dtype, lambda: x) is None and gradient_coder(LOSSLESS, x.dtype) is None
    assert expert_bytes(LOSSLESS, 100, 8) == gradient_bytes(LOSSLESS, 100, 8) == 800
