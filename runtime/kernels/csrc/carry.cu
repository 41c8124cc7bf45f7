// What travels beside a deduplicated row: its expert ids and gate weights, those of other destinations masked out; and the
// way back of the weights' gradients. One thread per value. Weights are moved as words of 2, 4 or 8 bytes.
//
//   ids [rows, top_k] int32, weights [rows, top_k], group_of [experts], slot [rows, top_k]: as the route has them
//   out_ids [any, top_k] (-1 where masked), out_weights [any, top_k] (0 where masked), or their peers' buffers
#include "rows.cuh"

__device__ __forceinline__ i32 group_at(const i32* __restrict__ ids, const i32* __restrict__ group_of, u32 experts, u64 pair) {
  i32 expert = ids[pair];
  return u32(expert) < experts ? group_of[expert] : -1;
}

template <class W>
__device__ __forceinline__ void carry(const i32* __restrict__ ids, const W* __restrict__ weights, const i32* __restrict__ group_of,
                                      const i32* __restrict__ slot, i32* __restrict__ out_ids, W* __restrict__ out_weights,
                                      const u64* __restrict__ id_buffers, const u64* __restrict__ weight_buffers, u32 buffer_rows,
                                      u32 rows, u32 top_k, u32 experts) {
  u64 values = u64(rows) * top_k * top_k;
  for (u64 at = u64(blockIdx.x) * blockDim.x + threadIdx.x; at < values; at += u64(gridDim.x) * blockDim.x) {
    u64 pair = at / top_k, other = pair / top_k * top_k + at % top_k;
    i32 to = slot[pair];
    if (to < 0) continue;
    bool same = group_at(ids, group_of, experts, other) == group_at(ids, group_of, experts, pair);
    row_at(out_ids, id_buffers, buffer_rows, to, top_k)[at % top_k] = same ? ids[other] : -1;
    row_at(out_weights, weight_buffers, buffer_rows, to, top_k)[at % top_k] = same ? weights[other] : W(0);
  }
}

// grad_weights[row, j] = the gradient that came back with the copy of the row that carried weight j; 0 where none did.
template <class W>
__device__ __forceinline__ void carry_back(const W* __restrict__ grads, const u64* __restrict__ grad_buffers, u32 buffer_rows,
                                           const i32* __restrict__ ids, const i32* __restrict__ group_of,
                                           const i32* __restrict__ slot, W* __restrict__ grad_weights, u32 rows, u32 top_k,
                                           u32 experts) {
  u64 pairs = u64(rows) * top_k;
  for (u64 pair = u64(blockIdx.x) * blockDim.x + threadIdx.x; pair < pairs; pair += u64(gridDim.x) * blockDim.x) {
    i32 own = group_at(ids, group_of, experts, pair), from = -1;
    u64 first = pair / top_k * top_k;
    for (u64 k = first; own >= 0 && from < 0 && k <= pair; ++k) {
      if (group_at(ids, group_of, experts, k) == own) from = slot[k];
    }
    grad_weights[pair] = from < 0 ? W(0) : row_at(grads, grad_buffers, buffer_rows, from, top_k)[pair - first];
  }
}

#define KERNELS(bytes, W)                                                                                                     \
  extern "C" __global__ void __launch_bounds__(256)                                                                           \
      carry_##bytes(const i32* __restrict__ ids, const W* __restrict__ weights, const i32* __restrict__ group_of,             \
                    const i32* __restrict__ slot, i32* __restrict__ out_ids, W* __restrict__ out_weights,                     \
                    const u64* __restrict__ id_buffers, const u64* __restrict__ weight_buffers, u32 buffer_rows, u32 rows,    \
                    u32 top_k, u32 experts) {                                                                                 \
    carry(ids, weights, group_of, slot, out_ids, out_weights, id_buffers, weight_buffers, buffer_rows, rows, top_k, experts); \
  }                                                                                                                           \
  extern "C" __global__ void __launch_bounds__(256)                                                                           \
      carry_back_##bytes(const W* __restrict__ grads, const u64* __restrict__ grad_buffers, u32 buffer_rows,                  \
                         const i32* __restrict__ ids, const i32* __restrict__ group_of, const i32* __restrict__ slot,         \
                         W* __restrict__ grad_weights, u32 rows, u32 top_k, u32 experts) {                                    \
    carry_back(grads, grad_buffers, buffer_rows, ids, group_of, slot, grad_weights, rows, top_k, experts);                    \
  }

KERNELS(2, u16)
KERNELS(4, u32)
KERNELS(8, u64)
