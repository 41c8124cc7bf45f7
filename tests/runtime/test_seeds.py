"""Backward passes that begin with given gradients: to the bit what autograd does with them, without what it imports for that."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from runtime.seeds import seeded


def test_as_autograd_to_the_bit() -> None:
    torch.manual_seed(0)
    x, weights = torch.randn(5, 7, requires_grad=True), torch.randn(7, 3, requires_grad=True)
    first = torch.tanh(x @ weights)
    outputs, gradients = [first, first.square().sum()], [torch.randn(5, 3), torch.tensor(0.25)]
    expected = torch.autograd.grad(outputs, [x, weights], gradients, retain_graph=True)
    with torch.no_grad():  # as inside another backward
        found = torch.autograd.grad(seeded(outputs, gradients), [x, weights], retain_graph=True)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    seeded(outputs, gradients).backward()  # type: ignore[no-untyped-call]
    assert x.grad is not None and torch.equal(x.grad, expected[0])


def test_gradients_of_another_shape_are_an_error() -> None:
    output = torch.ones(3, requires_grad=True) * 2
    with pytest.raises(RuntimeError, match="shape"):
        seeded([output], [torch.ones(4)]).backward()  # type: ignore[no-untyped-call]


def test_sympy_is_not_imported() -> None:
    script = (
        "import sys, torch\n"
        "from runtime.seeds import seeded\n"
        "y = torch.ones(2, requires_grad=True) * 2\n"
        "seeded([y], [torch.ones(2)]).backward()\n"
        "print('sympy' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == "False"
