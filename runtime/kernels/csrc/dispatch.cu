// Dispatch: each row is read once and written to every place that its pairs were given (permute fused with the copy into
// the destination rank's buffer). Bytes are moved as they are, so the result is bitwise exact for any element type.
// Also the backward of an unweighted combine.
//
//   x       [rows, words]           rows in words of 16 bytes (or 8, 4, 2, 1 where size or alignment forbids)
//   slot    [rows, top_k] int32     destination rows, -1 for none; top_k <= 32
//   out     [any, words]            or ``buffers`` with ``buffer_rows`` rows each (rows.cuh)
//   counts, offsets                 of the route; padding rows of each group are set to zero (multiple 1: none)
#include "rows.cuh"

template <class W>
__device__ __forceinline__ void dispatch(const W* __restrict__ x, const i32* __restrict__ slot, W* __restrict__ out,
                                         const u64* __restrict__ buffers, u32 buffer_rows, const i32* __restrict__ counts,
                                         const i32* __restrict__ offsets, u32 rows, u32 top_k, u32 words, u32 chunks, u32 groups,
                                         u32 multiple) {
  constexpr u32 BATCH = 4;  // loads in flight per thread
  u32 lane = threadIdx.x % 32;
  u32 units = (rows + groups * (multiple - 1)) * chunks;
  for (u32 unit = blockIdx.x * WARPS + threadIdx.x / 32; unit < units; unit += gridDim.x * WARPS) {
    u32 row = unit / chunks, first = unit % chunks * (32 * BATCH) + lane;
    if (row < rows) {
      W held[BATCH];
#pragma unroll
      for (u32 b = 0; b < BATCH; ++b) {
        if (first + b * 32 < words) held[b] = x[u64(row) * words + first + b * 32];
      }
      i32 own = lane < top_k ? slot[u64(row) * top_k + lane] : -1;
      for (u32 k = 0; k < top_k; ++k) {
        i32 to = __shfl_sync(ALL, own, k);
        if (to < 0) continue;  // the same for the whole warp
        W* target = row_at(out, buffers, buffer_rows, to, words);
#pragma unroll
        for (u32 b = 0; b < BATCH; ++b) {
          if (first + b * 32 < words) store_once(target + first + b * 32, held[b]);
        }
      }
    } else {
      i64 to = padding_row(counts, offsets, row - rows, multiple);
      if (to < 0) continue;
#pragma unroll
      for (u32 b = 0; b < BATCH; ++b) {
        if (first + b * 32 < words) out[u64(to) * words + first + b * 32] = W{};
      }
    }
  }
}

#define KERNEL(name, W)                                                                                                       \
  extern "C" __global__ void __launch_bounds__(32 * WARPS)                                                                    \
      name(const W* __restrict__ x, const i32* __restrict__ slot, W* __restrict__ out, const u64* __restrict__ buffers,       \
           u32 buffer_rows, const i32* __restrict__ counts, const i32* __restrict__ offsets, u32 rows, u32 top_k, u32 words,  \
           u32 chunks, u32 groups, u32 multiple) {                                                                            \
    dispatch(x, slot, out, buffers, buffer_rows, counts, offsets, rows, top_k, words, chunks, groups, multiple);              \
  }

KERNEL(dispatch_16, uint4)
KERNEL(dispatch_8, u64)
KERNEL(dispatch_4, u32)
KERNEL(dispatch_2, u16)
KERNEL(dispatch_1, u8)
