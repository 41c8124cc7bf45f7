"""The token kernels on a device: checks arguments, allocates results and launches; the same functions as ``reference``.

Nothing here waits for the device. Sizes that depend on the routing are bounded by what the caller allocates; what did
not fit is counted in ``Route.status``.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from runtime.kernels import launch as lay
from runtime.kernels.driver import Argument, Driver, Launch
from runtime.kernels.launch import Peers, checked, pointer, require, u32
from runtime.kernels.reference import Route

_INT = (torch.int32,)
_SCAN_THREADS = 512
_CARRY_THREADS = 256


class TokenKernels:
    """Launches through ``driver``. All tensors of a call lie on one device and are contiguous."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver

    def route(
        self,
        ids: Tensor,
        group_of: Tensor,
        num_groups: int,
        *,
        multiple: int = 1,
        capacity: int,
        stride: int = 0,
        first: int = 0,
        deduplicate: bool = False,
        source_counts: Tensor | None = None,
        source_rows: int = 1,
    ) -> Route:
        """See ``reference.route``. Three launches, no wait."""
        require("route", "ids", ids, _INT, (None, None), ids.device)
        require("route", "group_of", group_of, _INT, (None,), ids.device)
        num_rows, top_k = ids.shape
        lay.require_top_k("route", top_k)
        checked("route", "num_groups", num_groups, lay.MAX_GROUPS + 1)
        checked("route", "multiple", multiple - 1)
        checked("route", "capacity", capacity)
        checked("route", "first + num_groups * stride", first + num_groups * stride)
        pairs = checked("route", "rows x top_k", num_rows * top_k)
        checked("route", "padded rows", pairs + num_groups * (multiple - 1))
        if source_counts is not None:
            require("route", "source_counts", source_counts, _INT, (lay.ceil_div(num_rows, source_rows),), ids.device)
        tile = tile_pairs(pairs)
        tiles = max(1, lay.ceil_div(pairs, tile))
        new = ids.new_empty
        tile_counts, counts, offsets = new(tiles, num_groups), new(num_groups), new(num_groups + 1)
        status, slot = new(2), torch.empty_like(ids)
        common = (
            *(pointer(ids), pointer(group_of), pointer(source_counts), u32(source_rows), u32(pairs), u32(top_k)),
            *(u32(len(group_of)), u32(deduplicate), u32(num_groups), u32(tile), pointer(tile_counts)),
        )
        scan = (
            *(pointer(tile_counts), u32(tiles), u32(num_groups), u32(multiple)),
            *(ctypes.c_int64(capacity), ctypes.c_int64(stride), ctypes.c_int64(first)),
            *(pointer(counts), pointer(offsets), pointer(status)),
        )
        for kernel, grid, block, shared, arguments in (
            ("route_count", tiles, lay.WARP, 4 * num_groups, common),
            ("route_scan", 1, _SCAN_THREADS, 0, scan),
            ("route_assign", tiles, lay.WARP, 4 * num_groups, (*common, pointer(counts), pointer(offsets), pointer(slot))),
        ):
            self._run(Launch(stem="route", kernel=kernel, grid=grid, block=block, shared_bytes=shared, arguments=arguments), ids)
        return Route(slot, counts, offsets, status)

    def dispatch(
        self, x: Tensor, route: Route, num_rows: int, *, multiple: int = 1, out: Tensor | None = None, peers: Peers | None = None
    ) -> Tensor:
        """See ``reference.dispatch``; any element type. ``multiple`` as in the route: padding rows become zero. Rows that are
        neither in a group nor its padding are not written. With ``peers`` rows go to their buffers, and ``out`` (this rank's
        own buffer, or None) is returned unwritten by this call."""
        rows, hidden = x.shape
        require("dispatch", "x", x, (x.dtype,), (None, None), x.device)
        top_k = self._require_route("dispatch", route, rows, x.device)
        if out is None:
            out = x.new_empty(0 if peers else num_rows, hidden)
        word = lay.word_bytes(hidden * x.element_size(), lay.alignment([x, peers if peers else out]))
        words = hidden * x.element_size() // word
        groups = len(route.counts)
        chunks = max(1, lay.ceil_div(words, 4 * lay.WARP))
        arguments = (
            *(pointer(x), pointer(route.slot), pointer(out), *lay.peers_arguments(peers)),
            *(pointer(route.counts), pointer(route.offsets), u32(rows), u32(top_k), u32(words)),
            *(u32(chunks), u32(groups), u32(multiple)),
        )
        grid = lay.warp_grid("dispatch", (rows + groups * (multiple - 1)) * chunks)
        self._run(Launch(stem="dispatch", kernel=f"dispatch_{word}", grid=grid, block=lay.BLOCK, arguments=arguments), x)
        return out

    def combine(
        self,
        y: Tensor,
        slot: Tensor,
        weights: Tensor | None = None,
        *,
        out: Tensor | None = None,
        peers: Peers | None = None,
    ) -> Tensor:
        """See ``reference.combine``. With ``peers`` rows are read from their buffers, and ``y`` only says type and width.
        ``out``: where the sums go (another rank may read them there)."""
        require("combine", "y", y, tuple(lay.ELEMENTS), (None, None), y.device)
        require("combine", "slot", slot, _INT, (None, None), y.device)
        rows, top_k = slot.shape
        lay.require_top_k("combine", top_k)
        if weights is not None:
            require("combine", "weights", weights, (y.dtype,), (rows, top_k), y.device)
        if out is None:
            out = y.new_empty(rows, y.shape[1])
        require("combine", "out", out, (y.dtype,), (rows, y.shape[1]), y.device)
        kernel, packs = _element_kernel("combine", y, lay.alignment([peers if peers else y, out]))
        if top_k <= 2 and packs < y.shape[1]:
            kernel = kernel.replace("combine", "combine_two")
        chunks = max(1, lay.ceil_div(packs, 2 * lay.WARP))
        arguments = (
            *(pointer(y), *lay.peers_arguments(peers), pointer(slot), pointer(weights), pointer(out)),
            *(u32(rows), u32(top_k), u32(packs), u32(chunks)),
        )
        grid = lay.warp_grid("combine", rows * chunks)
        self._run(Launch(stem="combine", kernel=kernel, grid=grid, block=lay.BLOCK, arguments=arguments), y)
        return out

    def combine_backward(
        self, grad: Tensor, y: Tensor, route: Route, weights: Tensor, *, multiple: int = 1
    ) -> tuple[Tensor, Tensor]:
        """See ``reference.combine_backward``; rows of the first result that are neither in a group nor its padding are not
        written."""
        require("combine_backward", "y", y, tuple(lay.ELEMENTS), (None, None), y.device)
        rows = grad.shape[0]
        require("combine_backward", "grad", grad, (y.dtype,), (rows, y.shape[1]), y.device)
        top_k = self._require_route("combine_backward", route, rows, y.device)
        require("combine_backward", "weights", weights, (y.dtype,), (rows, top_k), y.device)
        grad_y, grad_weights = torch.empty_like(y), torch.empty_like(weights)
        kernel, packs = _element_kernel("combine_backward", y, lay.alignment([grad, y, grad_y]))
        groups = len(route.counts)
        arguments = (
            *(pointer(grad), pointer(y), pointer(route.slot), pointer(weights), pointer(route.counts)),
            *(pointer(route.offsets), pointer(grad_y), pointer(grad_weights)),
            *(u32(rows), u32(top_k), u32(packs), u32(groups), u32(multiple)),
        )
        grid = lay.warp_grid("combine_backward", rows * top_k + groups * (multiple - 1))
        self._run(Launch(stem="combine_backward", kernel=kernel, grid=grid, block=lay.BLOCK, arguments=arguments), y)
        return grad_y, grad_weights

    def carry(
        self,
        ids: Tensor,
        weights: Tensor,
        group_of: Tensor,
        slot: Tensor,
        num_rows: int,
        *,
        peers: tuple[Peers, Peers] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """See ``reference.carry``; rows without a pair are not written. ``peers``: buffers of ids and of weights."""
        rows, top_k = self._require_carry("carry", ids, weights, group_of, slot)
        local = 0 if peers else num_rows
        out_ids, out_weights = ids.new_empty(local, top_k), weights.new_empty(local, top_k)
        id_buffers, buffer_rows = lay.peers_arguments(peers[0] if peers else None)
        weight_buffers, _ = lay.peers_arguments(peers[1] if peers else None)
        arguments = (
            *(pointer(ids), pointer(weights), pointer(group_of), pointer(slot), pointer(out_ids), pointer(out_weights)),
            *(id_buffers, weight_buffers, buffer_rows, u32(rows), u32(top_k), u32(len(group_of))),
        )
        self._run(_per_thread(f"carry_{weights.element_size()}", rows * top_k * top_k, arguments), ids)
        return out_ids, out_weights

    def carry_back(self, grads: Tensor, ids: Tensor, group_of: Tensor, slot: Tensor, *, peers: Peers | None = None) -> Tensor:
        """See ``reference.carry_back``. With ``peers`` gradients are read there, and ``grads`` only says type and width."""
        rows, top_k = self._require_carry("carry_back", ids, None, group_of, slot)
        require("carry_back", "grads", grads, tuple(lay.ELEMENTS), (None, top_k), ids.device)
        out = grads.new_empty(rows, top_k)
        arguments = (
            *(pointer(grads), *lay.peers_arguments(peers), pointer(ids), pointer(group_of), pointer(slot), pointer(out)),
            *(u32(rows), u32(top_k), u32(len(group_of))),
        )
        self._run(_per_thread(f"carry_back_{grads.element_size()}", rows * top_k, arguments), ids)
        return out

    def _require_route(self, where: str, route: Route, rows: int, device: torch.device) -> int:
        """K, after the checks."""
        require(where, "slot", route.slot, _INT, (rows, None), device)
        require(where, "counts", route.counts, _INT, (None,), device)
        require(where, "offsets", route.offsets, _INT, (len(route.counts) + 1,), device)
        lay.require_top_k(where, route.slot.shape[1])
        checked(where, "rows x top_k", route.slot.numel())
        return int(route.slot.shape[1])

    def _require_carry(self, where: str, ids: Tensor, weights: Tensor | None, group_of: Tensor, slot: Tensor) -> tuple[int, int]:
        """(N, K), after the checks."""
        require(where, "ids", ids, _INT, (None, None), ids.device)
        rows, top_k = ids.shape
        lay.require_top_k(where, top_k)
        if weights is not None:
            require(where, "weights", weights, tuple(lay.ELEMENTS), (rows, top_k), ids.device)
        require(where, "group_of", group_of, _INT, (None,), ids.device)
        require(where, "slot", slot, _INT, (rows, top_k), ids.device)
        checked(where, "rows", rows)
        return rows, top_k

    def _run(self, launch: Launch, like: Tensor) -> None:
        self._driver.launch(launch, like.device)


def tile_pairs(pairs: int) -> int:
    """Pairs that one warp of the route handles: a multiple of 32, more for long batches, so that the single block that
    adds the tiles up has at most a few hundred."""
    return lay.WARP * max(8, min(64, lay.ceil_div(pairs, 256 * lay.WARP)))


def _element_kernel(name: str, y: Tensor, aligned_to: int) -> tuple[str, int]:
    """Kernel for the element type and width, and the number of accesses per row."""
    pack = 16 // y.element_size()
    whole = aligned_to == 16 and y.shape[1] % pack == 0
    return f"{name}_{lay.ELEMENTS[y.dtype]}" + ("" if whole else "_single"), y.shape[1] // pack if whole else y.shape[1]


def _per_thread(kernel: str, values: int, arguments: tuple[Argument, ...]) -> Launch:
    """One thread per value; beyond the largest grid the threads walk on."""
    grid = max(1, min(lay.ceil_div(values, _CARRY_THREADS), lay.MAX_BLOCKS))
    return Launch(stem="carry", kernel=kernel, grid=grid, block=_CARRY_THREADS, arguments=arguments)
