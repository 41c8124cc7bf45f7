"""Run by test_kernel_memory.py under the address sanitizer: token kernels on the named shapes, or all kernels on all of them;
then one planted mistake."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import test_codecs_emulated as codecs
import test_kernels_emulated as tokens
import torch
from kernel_cases import CASES, make_rows
from kernel_emulator import ADDRESS_CHECKS, EmulatingDriver

from runtime.kernels.codecs import CodecKernels
from runtime.kernels.reference import Route
from runtime.kernels.reference_codecs import TILE, ChangeCode, Code
from runtime.kernels.tokens import TokenKernels

CLEAN = "all kernels stayed inside their tensors"


def main(folder: Path, names: list[str]) -> None:
    # For this process, and not for the compiler, which takes three times as long under it.
    os.environ.pop("LD_PRELOAD", None)
    driver = EmulatingDriver(folder=folder, order=11, flags=ADDRESS_CHECKS)
    for case in CASES:
        if not names or case.name in names:
            tokens.test_dispatch_and_combine(case, driver)
            tokens.test_combine_backward(case, driver)
            tokens.test_deduplicated_hop(case, driver)
    tokens.test_other_placements_of_rows(driver)
    if not names:
        check_codecs(driver)
    print(CLEAN, flush=True)
    one = torch.zeros(1, dtype=torch.int32)
    slot = torch.full((4, 1), 4, dtype=torch.int32)  # the first row past the end
    TokenKernels(driver).dispatch(torch.ones(4, 64), Route(slot, one, torch.zeros(2, dtype=torch.int32), one), 4)


def check_codecs(driver: EmulatingDriver) -> None:
    tokens.test_four_ranks_exchange_through_each_others_memory(driver)
    kernels = CodecKernels(driver)
    for hidden in (3, 130, 1160):
        for code in Code:
            codecs.test_quantised_dispatch(hidden, torch.bfloat16, code, kernels)
    for length in (1, 33, 1027):
        for change in ChangeCode:
            codecs.test_change_coding(length, torch.bfloat16, change, kernels)
    for length in (7, TILE + 1):
        value, shared = make_rows(1, length, torch.bfloat16)[0], torch.zeros(length, dtype=torch.bfloat16)
        kernels.residual_decode(shared, kernels.residual_encode(value, shared, torch.tensor([0.5]), length // 2))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
