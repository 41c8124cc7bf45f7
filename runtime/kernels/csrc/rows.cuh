// How kernels walk over rows: a warp takes one stretch of one row at a time; units of work are numbered row by row, so
// warps that run together touch neighbouring memory. 8 warps a block.
#pragma once
#include "numbers.cuh"

constexpr u32 ALL = 0xffffffffu;
constexpr u32 WARPS = 8;

// A place among B buffers of the same number of rows (B ranks' memory): row ``slot`` of all of them end to end.
// ``buffers`` holds their addresses; it is null where there is only ``one``.
template <class W>
__device__ __forceinline__ W* row_at(W* one, const u64* __restrict__ buffers, u32 buffer_rows, u32 slot, u32 words) {
  if (buffers == nullptr) return one + u64(slot) * words;
  return reinterpret_cast<W*>(buffers[slot / buffer_rows]) + u64(slot % buffer_rows) * words;
}

// A store past which the cache keeps other data first: what is written is more than the cache holds, and is read once.
template <class W>
__device__ __forceinline__ void store_once(W* to, W value) {
#ifdef __CUDA_ARCH__
  __stcs(to, value);
#else
  *to = value;
#endif
}

// Row of the ``index``-th possible padding row (there are multiple - 1 of them in each group), or -1 where the group has fewer.
__device__ __forceinline__ i64 padding_row(const i32* __restrict__ counts, const i32* __restrict__ offsets, u32 index, u32 multiple) {
  u32 group = index / (multiple - 1);
  i64 row = i64(offsets[group]) + counts[group] + index % (multiple - 1);
  return row < offsets[group + 1] ? row : -1;
}

__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
  for (u32 step = 16; step > 0; step /= 2) x += __shfl_xor_sync(ALL, x, step);
  return x;
}
__device__ __forceinline__ double warp_sum(double x) {
#pragma unroll
  for (u32 step = 16; step > 0; step /= 2) x += __shfl_xor_sync(ALL, x, step);
  return x;
}
