"""How long do codecs take, and below which bandwidth do they pay? One core, or a GPU where there is one.

A codec pays on links slower than (bytes saved) / (seconds to code and decode): a transfer of exact bytes and a coded one
then take the same time.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import yaml

from hybridep.codecs import Codecs
from hybridep.commands.tables import write_provenance, write_rows
from hybridep.config import build
from hybridep.units import format_bandwidth
from runtime.codecs.messages import tensor_of
from runtime.probe_codecs import expert_pair, gradient_pair, row_pair

HERE = Path(__file__).resolve().parent
COLUMNS = [
    "device",
    "dtype",
    "payload",
    "codec",
    "elements",
    "ratio",
    "encode_ms",
    "decode_ms",
    "min_ms",
    "max_ms",
    "pays_below_gbps",
]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=HERE / "results")
    parser.add_argument("--smoke", action="store_true", help="one small size: does it run?")
    given = parser.parse_args()
    config = yaml.safe_load((HERE / "config.yaml").read_text())
    config |= config["smoke"] if given.smoke else {}
    folder = given.results / "smoke" if given.smoke else given.results
    torch.set_num_threads(1)
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    rows = [
        measured(config, payload, name, options, dtype, length, device)
        for payload, codecs in config["codecs"].items()
        for name, options in codecs.items()
        # Other codecs' messages are as long and as fast.
        for dtype in (DTYPES if name == "lossless" else ("fp32",))
        for length in config["elements"]
    ]
    write_rows(folder / "rows.csv", rows, COLUMNS)
    write_provenance(folder)
    for row in rows:
        limit = format_bandwidth(row["pays_below_gbps"] * 1e9 / 8)
        print(
            f"{row['payload']:9} {row['codec']:11} {row['dtype']} {row['elements']:9,} elements: "
            f"{row['ratio']:5.2f} times fewer bytes, "
            f"{row['encode_ms']:8.3f} + {row['decode_ms']:8.3f} ms, pays below {limit}"
        )
    return 0


def measured(
    config: dict[str, Any], payload: str, name: str, options: dict[str, float], dtype: str, length: int, device: str
) -> dict[str, Any]:
    codecs = build(Codecs, {payload: name, **options}, "config.yaml")
    x = torch.randn(length, device=device).to(DTYPES[dtype])
    if payload == "tokens":
        pair = row_pair(codecs.tokens, x.view(-1, config["hidden_size"]))
    else:
        pair = (expert_pair if payload == "experts" else gradient_pair)(codecs, x)
    assert pair is not None
    encode, decode = pair
    message = encode()
    coded_bytes = tensor_of(message).nbytes
    encode_s, decode_s = timed(encode, config["repeats"], device), timed(lambda: decode(message), config["repeats"], device)
    both_s = statistics.median(encode_s) + statistics.median(decode_s)
    return {
        "device": device,
        "dtype": dtype,
        "payload": payload,
        "codec": name,
        "elements": length,
        "ratio": round(x.nbytes / coded_bytes, 2),
        "encode_ms": round(statistics.median(encode_s) * 1e3, 4),
        "decode_ms": round(statistics.median(decode_s) * 1e3, 4),
        "min_ms": round((min(encode_s) + min(decode_s)) * 1e3, 4),
        "max_ms": round((max(encode_s) + max(decode_s)) * 1e3, 4),
        "pays_below_gbps": round((x.nbytes - coded_bytes) * 8 / both_s / 1e9, 3),
    }


def timed(work: Callable[[], object], repeats: int, device: str) -> list[float]:
    """Seconds of each, the first left out."""
    taken = []
    for _ in range(repeats + 1):
        start_s = time.perf_counter()
        work()
        if device == "cuda":
            torch.cuda.synchronize()
        taken.append(time.perf_counter() - start_s)
    return taken[1:]


if __name__ == "__main__":
    sys.exit(main())
