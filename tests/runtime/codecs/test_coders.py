"""Every codec in one table: bytes as counted, error within bounds, both ends alike, nothing lost that is kept for later."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hybridep.codecs import Codecs, ExpertCodec, GradientCodec, TokenCodec, kept, row_bytes
from runtime.codecs import expert_coder, gradient_coder, row_coder
from runtime.codecs.experts import ChangeCoder
from runtime.codecs.gradients import TopKCoder
from runtime.codecs.messages import agreed_bytes, pack, tensor_of, unpack
from runtime.codecs.sparse import decode_largest, encode_largest

DTYPES = [torch.float32, torch.bfloat16, torch.float64]
LENGTHS = [1, 31, 4096, 9001]


def normal(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def error(found: Tensor, wanted: Tensor) -> float:
    return float((found.double() - wanted.double()).norm() / wanted.double().norm())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("hidden", [1, 30, 128, 300])
@pytest.mark.parametrize(("codec", "bound"), [("exact", 0.0), ("lossless", 0.0), ("bf16", 0.004), ("fp8", 0.04), ("int8", 0.015)])
def test_rows(codec: str, bound: float, hidden: int, dtype: torch.dtype) -> None:
    coder, x, ids = row_coder(TokenCodec(codec)), normal(7, hidden, dtype=dtype), torch.arange(14, dtype=torch.int32).view(7, 2)
    rows = coder.encode(x)
    assert [(block.dtype, block.shape[1]) for block in rows.blocks] == coder.blocks(hidden, dtype)

    def there(which: list[int]) -> list[Tensor]:
        # Rows are coded one by one: some of them, in another order, say the same.
        taken = torch.tensor(which)
        message = coder.message(rows.take(taken), [ids[taken]], x)
        place = coder.room(len(which), [(ids.dtype, 2)], x)
        size_bytes = len(which) * (row_bytes(TokenCodec(codec), hidden, dtype.itemsize) + 8)
        assert agreed_bytes(message) == agreed_bytes(place) == size_bytes
        sent, room = tensor_of(message).view(-1).view(torch.uint8), tensor_of(place)
        assert size_bytes <= len(sent) <= len(room)
        room.fill_(0xAA)[: len(sent)] = sent
        return coder.rows_of(place, len(which), [(ids.dtype, 2)], x)

    decoded, beside = there(list(range(7)))
    assert decoded.dtype is dtype and torch.equal(beside, ids)
    assert error(decoded, x) <= bound + (1e-9 if bound else 0.0)
    some, beside = there([5, 0, 5])
    assert torch.equal(some, decoded[[5, 0, 5]]) and torch.equal(beside, ids[[5, 0, 5]])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize(
    ("codec", "bound"),
    [("bf16", 0.004), ("sr", 0.8), ("change-int8", 0.015), ("change-int4", 0.15)],
    ids=lambda value: str(value),
)
def test_experts(codec: str, bound: float, length: int, dtype: torch.dtype) -> None:
    shared, row = normal(length, dtype=dtype, seed=1), normal(length, dtype=dtype)
    codecs = Codecs(experts=ExpertCodec(codec), experts_keep=0.3)
    sender, receivers = (expert_coder(codecs, length, dtype, lambda: shared) for _ in range(2))
    assert sender is not None and receivers is not None
    copies = [torch.zeros_like(row), torch.zeros_like(row)]
    if isinstance(sender, ChangeCoder):
        sender.sent[3] = copies[0].clone()
    message = sender.encode(3, row)
    assert (message.dtype, message.numel()) == (torch.uint8, sender.message_bytes)
    for copy in copies:
        receivers.decode(message, copy)
    assert torch.equal(*copies)
    assert error(copies[0], row) <= bound
    if isinstance(sender, ChangeCoder):
        assert torch.equal(sender.sent[3], copies[0])


@pytest.mark.parametrize("codec", ["change-int8", "change-int4"])
def test_the_error_of_a_coded_change_does_not_add_up(codec: str) -> None:
    """An expert that moves: its copy is as far off after 50 steps as after two, and meets it when it rests."""
    row, length = normal(1000), 1000
    coder = expert_coder(Codecs(experts=ExpertCodec(codec)), length, row.dtype, lambda: row)
    assert isinstance(coder, ChangeCoder)
    copy = row.clone()
    coder.sent[0] = row.clone()
    errors = []
    for step in range(60):
        if step < 50:
            row = row + 0.01 * normal(length, seed=step + 1)
        coder.decode(coder.encode(0, row), copy)
        errors.append(error(copy, row))
    assert max(errors[:50]) < 1.5 * errors[1]
    assert errors[-1] < 1e-6


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize(("codec", "bound"), [("bf16", 0.004), ("int8", 0.015), ("top-k", 0.6)])
def test_gradients(codec: str, bound: float, length: int, dtype: torch.dtype) -> None:
    coder = gradient_coder(Codecs(gradients=GradientCodec(codec), gradients_keep=0.3), dtype)
    gradient = normal(length, dtype=dtype)
    assert coder is not None
    message = coder.encode("g", gradient)
    assert (message.dtype, message.numel()) == (torch.uint8, coder.message_bytes(length, dtype))
    decoded = coder.decode(message, length, dtype)
    assert decoded.dtype is dtype
    assert error(decoded, gradient) <= bound


def test_what_top_k_leaves_out_is_sent_later() -> None:
    """All that was sent and all that waits are all that there was, and everything goes out in the end."""
    coder = gradient_coder(Codecs(gradients=GradientCodec.TOP_K, gradients_keep=0.1), torch.float64)
    assert isinstance(coder, TopKCoder)
    sent, total = torch.zeros(1000, dtype=torch.float64), torch.zeros(1000, dtype=torch.float64)
    for step in range(30):
        gradient = normal(1000, dtype=torch.float64, seed=step) if step < 5 else torch.zeros(1000, dtype=torch.float64)
        total += gradient
        sent += coder.decode(coder.encode("g", gradient), 1000, torch.float64)
        torch.testing.assert_close(sent + coder.unsent["g"], total, rtol=0, atol=1e-12)
    torch.testing.assert_close(sent, total, rtol=0, atol=1e-6)
    coder.encode("other", torch.ones(1000, dtype=torch.float64))
    assert coder.unsent["other"].abs().sum() == 900


@pytest.mark.parametrize("length", [5, 5000, 100_000])
@pytest.mark.parametrize("keep", [0.01, 0.3, 1.0])
def test_the_sampled_threshold_finds_exactly_the_largest(length: int, keep: float) -> None:
    """Also where the sample says little: one element in eight is large, and the sample's stride meets those alone."""
    for value in (normal(length), torch.where(torch.arange(length) % 8 == 0, 100.0, 1.0) * normal(length)):
        number = kept(length, keep)
        decoded = decode_largest(encode_largest(value, torch.zeros(length), keep), torch.zeros(length), keep)
        expected = torch.zeros(length)
        at = value.abs().topk(number).indices
        expected[at] = value[at]
        assert torch.equal(decoded, expected)


def test_ties_fill_a_message_and_no_more() -> None:
    decoded = decode_largest(encode_largest(torch.ones(100), torch.zeros(100), 0.1), torch.zeros(100), 0.1)
    assert decoded.sum() == 10


def test_messages_align_what_they_must() -> None:
    parts = [torch.arange(3, dtype=torch.uint8), torch.arange(4, dtype=torch.int32), torch.arange(2, dtype=torch.float64)]
    found = unpack(pack(parts), [(part.dtype, len(part)) for part in parts])
    assert all(torch.equal(mine, part) for mine, part in zip(found, parts, strict=True))
