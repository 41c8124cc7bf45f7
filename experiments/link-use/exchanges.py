"""One rank of the exchanges: times each kind in turn and prints begin and end (one clock for the whole machine)."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from runtime.mesh import join_store, open_process_group
from runtime.transport import Transport


def main() -> None:
    settings: dict[str, Any] = json.loads(Path(sys.argv[1]).read_text())
    rank, sites, places = int(sys.argv[2]), settings["sites"], settings["places"]
    torch.set_num_threads(1)
    store = join_store(settings["host"], settings["port"], timeout_s=60.0)
    open_process_group(store, rank=rank, world_size=settings["num_ranks"], timeout_s=60.0)
    groups = [dist.new_group([site * places + place for site in range(sites)]) for place in range(places)]
    transport = Transport(timeout_s=60.0)
    site, place = divmod(rank, places)
    others = [other for other in range(sites) if other != site]
    even = np.full((sites, places, sites), settings["message_bytes"], dtype=np.int64)
    uneven = np.array(settings["uneven_bytes"], dtype=np.int64)

    def buffers(sizes: np.ndarray) -> tuple[dict[int, Tensor], dict[int, Tensor]]:
        peer = {other: other * places + place for other in others}
        sends = {peer[o]: torch.full((int(sizes[site, place, o]),), rank, dtype=torch.uint8) for o in others}
        return sends, {peer[o]: torch.zeros(int(sizes[o, place, site]), dtype=torch.uint8) for o in others}

    sends, receives = buffers(even)
    copy = torch.full((settings["message_bytes"],), rank, dtype=torch.uint8)
    uneven_sends, uneven_receives = buffers(uneven)
    splits = [0 if other == site else settings["message_bytes"] for other in range(sites)]
    whole, arrived = torch.zeros(sum(splits), dtype=torch.uint8), torch.zeros(sum(splits), dtype=torch.uint8)
    kinds = {
        "all-to-all": lambda: transport.exchange(sends, receives, "tokens@dc"),
        "all-to-all uneven": lambda: transport.exchange(uneven_sends, uneven_receives, "uneven@dc"),
        "gather": lambda: transport.exchange(dict.fromkeys(sends, copy), receives, "copies@dc"),
        "gather in background": lambda: transport.exchange_in_background(dict.fromkeys(sends, copy), receives, "ahead@dc"),
        "all_to_all_single": lambda: dist.all_to_all_single(arrived, whole, splits, splits, group=groups[place]),
    }
    order = np.random.default_rng(0)
    for _ in range(settings["repeats"] + 1):
        # What ran before leaves its mark on connections and shapers.
        for kind in order.permutation([*kinds]):
            dist.barrier()
            begin = time.monotonic()
            kinds[kind]()
            print("took", json.dumps([str(kind), begin, time.monotonic()]), flush=True)
            dist.barrier()
    os._exit(0)


if __name__ == "__main__":
    main()
