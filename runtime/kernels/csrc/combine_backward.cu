// Backward of the weighted combine, for both arguments in one pass: a warp takes one (token, expert) pair.
//
//   grad         [rows, packs * N]     gradient of the combined rows
//   y            [any, packs * N]      the rows that were combined
//   slot         [rows, top_k] int32
//   weights      [rows, top_k]
//   grad_y       as y                  weight * grad at each pair's row; padding rows are set to zero
//   grad_weights [rows, top_k]         <grad, y>, summed in float (double for double); 0 for a pair without a row
#include "rows.cuh"

template <class T, int N>
__device__ __forceinline__ void combine_backward(const T* __restrict__ grad, const T* __restrict__ y, const i32* __restrict__ slot,
                                                 const T* __restrict__ weights, const i32* __restrict__ counts,
                                                 const i32* __restrict__ offsets, T* __restrict__ grad_y,
                                                 T* __restrict__ grad_weights, u32 rows, u32 top_k, u32 packs, u32 groups,
                                                 u32 multiple) {
  using A = typename Accumulator<T>::type;
  using P = Pack<T, N>;
  constexpr u32 BATCH = 4;  // 2 * BATCH loads in flight per thread
  u32 lane = threadIdx.x % 32;
  u32 pairs = rows * top_k, units = pairs + groups * (multiple - 1);
  for (u32 unit = blockIdx.x * WARPS + threadIdx.x / 32; unit < units; unit += gridDim.x * WARPS) {
    if (unit >= pairs) {
      i64 to = padding_row(counts, offsets, unit - pairs, multiple);
      if (to < 0) continue;
      for (u32 at = lane; at < packs; at += 32) reinterpret_cast<P*>(grad_y)[u64(to) * packs + at] = P{};
      continue;
    }
    i32 own = slot[unit];
    if (own < 0) {  // the same for the whole warp
      if (lane == 0) narrow(A(0), grad_weights[unit]);
      continue;
    }
    A weight = widen(weights[unit]), dot = 0;
    const P* from = reinterpret_cast<const P*>(grad) + u64(unit / top_k) * packs;
    const P* with = reinterpret_cast<const P*>(y) + u64(own) * packs;
    P* to = reinterpret_cast<P*>(grad_y) + u64(own) * packs;
    for (u32 first = lane; first < packs; first += 32 * BATCH) {
      P g[BATCH], v[BATCH];
#pragma unroll
      for (u32 b = 0; b < BATCH; ++b) {
        bool inside = first + b * 32 < packs;
        g[b] = inside ? from[first + b * 32] : P{};
        v[b] = inside ? with[first + b * 32] : P{};
      }
#pragma unroll
      for (u32 b = 0; b < BATCH; ++b) {
        P scaled;
#pragma unroll
        for (u32 e = 0; e < N; ++e) {
          A wide = widen(g[b].at[e]);
          dot += wide * A(widen(v[b].at[e]));
          narrow(weight * wide, scaled.at[e]);
        }
        if (first + b * 32 < packs) to[first + b * 32] = scaled;
      }
    }
    dot = warp_sum(dot);
    if (lane == 0) narrow(dot, grad_weights[unit]);
  }
}

#define KERNEL(name, T, N)                                                                                                    \
  extern "C" __global__ void __launch_bounds__(32 * WARPS)                                                                    \
      name(const T* __restrict__ grad, const T* __restrict__ y, const i32* __restrict__ slot, const T* __restrict__ weights,  \
           const i32* __restrict__ counts, const i32* __restrict__ offsets, T* __restrict__ grad_y,                           \
           T* __restrict__ grad_weights, u32 rows, u32 top_k, u32 packs, u32 groups, u32 multiple) {                          \
    combine_backward<T, N>(grad, y, slot, weights, counts, offsets, grad_y, grad_weights, rows, top_k, packs, groups,         \
                           multiple);                                                                                         \
  }

KERNEL(combine_backward_bf16, bf16, 8)
KERNEL(combine_backward_f16, f16, 8)
KERNEL(combine_backward_f32, float, 4)
KERNEL(combine_backward_f64, double, 2)
KERNEL(combine_backward_bf16_single, bf16, 1)
KERNEL(combine_backward_f16_single, f16, 1)
KERNEL(combine_backward_f32_single, float, 1)
KERNEL(combine_backward_f64_single, double, 1)
