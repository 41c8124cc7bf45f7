// Combine: each token's sum over the rows that its pairs were given, weighted where weights are given, in float (double for
// double), in the order of its pairs; fused with the un-permute. Reads peers' buffers where ``buffers`` is given.
// Also the backward of dispatch (unweighted: the gradient of a row is the sum over its copies).
//
//   y       [any, packs * N]     or ``buffers`` with ``buffer_rows`` rows each (rows.cuh)
//   slot    [rows, top_k] int32  -1 adds nothing; top_k <= 32
//   weights [rows, top_k]        of y's type; null: 1
//   out     [rows, packs * N]
#include "rows.cuh"

// PAIRS * BATCH loads are in flight per thread.
template <class T, int N, u32 PAIRS>
__device__ __forceinline__ void combine(const T* __restrict__ y, const u64* __restrict__ buffers, u32 buffer_rows,
                                        const i32* __restrict__ slot, const T* __restrict__ weights, T* __restrict__ out, u32 rows,
                                        u32 top_k, u32 packs, u32 chunks) {
  using A = typename Accumulator<T>::type;
  using P = Pack<T, N>;
  constexpr u32 BATCH = 2;
  u32 lane = threadIdx.x % 32;
  u32 units = rows * chunks;
  for (u32 unit = blockIdx.x * WARPS + threadIdx.x / 32; unit < units; unit += gridDim.x * WARPS) {
    u32 row = unit / chunks, first = unit % chunks * (32 * BATCH) + lane;
    i32 own = lane < top_k ? slot[u64(row) * top_k + lane] : -1;
    A own_weight = own < 0 ? A(0) : weights == nullptr ? A(1) : A(widen(weights[u64(row) * top_k + lane]));
    A sum[BATCH][N] = {};
    for (u32 k = 0; k < top_k; k += PAIRS) {
      P held[PAIRS][BATCH];
#pragma unroll
      for (u32 p = 0; p < PAIRS; ++p) {
        i32 from = __shfl_sync(ALL, own, k + p);  // lanes past top_k hold -1, and k + p stays below 32
        const P* source = from < 0 ? nullptr : reinterpret_cast<const P*>(row_at(y, buffers, buffer_rows, from, packs * N));
#pragma unroll
        for (u32 b = 0; b < BATCH; ++b) {
          held[p][b] = from >= 0 && first + b * 32 < packs ? source[first + b * 32] : P{};
        }
      }
#pragma unroll
      for (u32 p = 0; p < PAIRS; ++p) {
        A weight = __shfl_sync(ALL, own_weight, k + p);
#pragma unroll
        for (u32 b = 0; b < BATCH; ++b) {
#pragma unroll
          for (u32 e = 0; e < N; ++e) sum[b][e] += weight * A(widen(held[p][b].at[e]));
        }
      }
    }
#pragma unroll
    for (u32 b = 0; b < BATCH; ++b) {
      P packed;
#pragma unroll
      for (u32 e = 0; e < N; ++e) narrow(sum[b][e], packed.at[e]);
      if (first + b * 32 < packs) reinterpret_cast<P*>(out)[u64(row) * packs + first + b * 32] = packed;
    }
  }
}

#define KERNEL(name, T, N, PAIRS, BLOCKS)                                                                                     \
  extern "C" __global__ void __launch_bounds__(32 * WARPS, BLOCKS)                                                            \
      name(const T* __restrict__ y, const u64* __restrict__ buffers, u32 buffer_rows, const i32* __restrict__ slot,           \
           const T* __restrict__ weights, T* __restrict__ out, u32 rows, u32 top_k, u32 packs, u32 chunks) {                  \
    combine<T, N, PAIRS>(y, buffers, buffer_rows, slot, weights, out, rows, top_k, packs, chunks);                            \
  }

KERNEL(combine_bf16, bf16, 8, 4, 3)
KERNEL(combine_f16, f16, 8, 4, 3)
KERNEL(combine_f32, float, 4, 4, 3)
KERNEL(combine_f64, double, 2, 4, 3)
// Of at most two pairs: more blocks at a time instead of more loads per thread.
KERNEL(combine_two_bf16, bf16, 8, 2, 4)
KERNEL(combine_two_f16, f16, 8, 2, 4)
KERNEL(combine_two_f32, float, 4, 2, 4)
KERNEL(combine_two_f64, double, 2, 2, 4)
// Rows whose size or address is no multiple of 16 bytes.
KERNEL(combine_bf16_single, bf16, 1, 4, 3)
KERNEL(combine_f16_single, f16, 1, 4, 3)
KERNEL(combine_f32_single, float, 1, 4, 3)
KERNEL(combine_f64_single, double, 1, 4, 3)
