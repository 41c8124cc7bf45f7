// Dispatch in one byte per element: quantised while it is copied, with one fp32 scale per 128 neighbouring elements of a row;
// and the way back to full width, which may at the same time copy rows to their experts' places.
//
//   x      [rows, hidden]                     slot [rows, top_k] int32 (-1 for none; top_k <= 32)
//   codes  [any, quads * 4] int8 or e4m3      quads = ceil(hidden / 4)
//   scales [any, ceil(hidden / 128)] fp32
// code = round(x * (LARGEST / max|x|)), x' = code * (max|x| / LARGEST). Padding rows of each group get 0 and 0.
#include "quads.cuh"

constexpr u32 BATCH = 4;  // groups of 128 per warp and unit

template <class T, class C>
__device__ __forceinline__ void quantize(const T* __restrict__ x, const i32* __restrict__ slot, u32* __restrict__ codes,
                                         float* __restrict__ scales, const i32* __restrict__ counts,
                                         const i32* __restrict__ offsets, u32 rows, u32 top_k, u32 hidden, u32 whole, u32 chunks,
                                         u32 groups, u32 multiple) {
  u32 lane = threadIdx.x % 32, quads = (hidden + 3) / 4, spans = (hidden + 127) / 128;
  u32 units = (rows + groups * (multiple - 1)) * chunks;
  for (u32 unit = blockIdx.x * WARPS + threadIdx.x / 32; unit < units; unit += gridDim.x * WARPS) {
    u32 row = unit / chunks, first = unit % chunks * BATCH;  // in spans of 128 elements
    u32 quad[BATCH] = {};
    float scale[BATCH] = {};
    i32 own = -1;
    if (row < rows) {
      float held[BATCH][4];
#pragma unroll
      for (u32 b = 0; b < BATCH; ++b) {
        load_quad(x + u64(row) * hidden, (first + b) * 128 + lane * 4, hidden, whole, held[b]);
      }
      own = lane < top_k ? slot[u64(row) * top_k + lane] : -1;
#pragma unroll
      for (u32 b = 0; b < BATCH; ++b) {
        float largest = group_max<32>(held[b]);
        scale[b] = largest / C::LARGEST;
        quad[b] = encode_quad<C>(held[b], C::LARGEST / largest);
      }
    } else if (lane == 0) {
      own = i32(padding_row(counts, offsets, row - rows, multiple));
    }
    u32 targets = row < rows ? top_k : 1;
    for (u32 k = 0; k < targets; ++k) {
      i32 to = __shfl_sync(ALL, own, k);
      if (to < 0) continue;
      u32* code_row = codes + u64(to) * quads;
      float* scale_row = scales + u64(to) * spans;
#pragma unroll
      for (u32 b = 0; b < BATCH; ++b) {
        if ((first + b) * 32 + lane < quads) store_once(code_row + (first + b) * 32 + lane, quad[b]);
        if (lane == 0 && first + b < spans) scale_row[first + b] = scale[b];
      }
    }
  }
}

template <class T, class C>
__device__ __forceinline__ void dequantize(const u32* __restrict__ codes, const float* __restrict__ scales,
                                           const i32* __restrict__ slot, T* __restrict__ out, const i32* __restrict__ counts,
                                           const i32* __restrict__ offsets, u32 rows, u32 top_k, u32 hidden, u32 whole, u32 chunks,
                                           u32 groups, u32 multiple) {
  u32 lane = threadIdx.x % 32, quads = (hidden + 3) / 4, spans = (hidden + 127) / 128;
  u32 units = (rows + groups * (multiple - 1)) * chunks;
  for (u32 unit = blockIdx.x * WARPS + threadIdx.x / 32; unit < units; unit += gridDim.x * WARPS) {
    u32 row = unit / chunks, first = unit % chunks * BATCH;
    float wide[BATCH][4] = {};
    i32 own = -1;
    if (row < rows) {
      u32 quad[BATCH];
      float scale[BATCH];
#pragma unroll
      for (u32 b = 0; b < BATCH; ++b) {
        bool inside = (first + b) * 32 + lane < quads;
        quad[b] = inside ? codes[u64(row) * quads + (first + b) * 32 + lane] : 0;
        scale[b] = inside ? scales[u64(row) * spans + first + b] : 0.0f;
      }
      own = lane < top_k ? slot[u64(row) * top_k + lane] : -1;
#pragma unroll
      for (u32 b = 0; b < BATCH; ++b) {
#pragma unroll
        for (u32 e = 0; e < 4; ++e) wide[b][e] = __fmul_rn(C::decode(quad[b], e), scale[b]);
      }
    } else if (lane == 0) {
      own = i32(padding_row(counts, offsets, row - rows, multiple));
    }
    u32 targets = row < rows ? top_k : 1;
    for (u32 k = 0; k < targets; ++k) {
      i32 to = __shfl_sync(ALL, own, k);
      if (to < 0) continue;
#pragma unroll
      for (u32 b = 0; b < BATCH; ++b) store_quad(wide[b], out + u64(to) * hidden, (first + b) * 128 + lane * 4, hidden, whole);
    }
  }
}

#define KERNELS(element, T, code, C)                                                                                          \
  extern "C" __global__ void __launch_bounds__(32 * WARPS) quantize_##element##_##code(                                       \
      const T* __restrict__ x, const i32* __restrict__ slot, u32* __restrict__ codes, float* __restrict__ scales,             \
      const i32* __restrict__ counts, const i32* __restrict__ offsets, u32 rows, u32 top_k, u32 hidden, u32 whole,            \
      u32 chunks, u32 groups, u32 multiple) {                                                                                 \
    quantize<T, C>(x, slot, codes, scales, counts, offsets, rows, top_k, hidden, whole, chunks, groups, multiple);            \
  }                                                                                                                           \
  extern "C" __global__ void __launch_bounds__(32 * WARPS) dequantize_##element##_##code(                                     \
      const u32* __restrict__ codes, const float* __restrict__ scales, const i32* __restrict__ slot, T* __restrict__ out,     \
      const i32* __restrict__ counts, const i32* __restrict__ offsets, u32 rows, u32 top_k, u32 hidden, u32 whole,            \
      u32 chunks, u32 groups, u32 multiple) {                                                                                 \
    dequantize<T, C>(codes, scales, slot, out, counts, offsets, rows, top_k, hidden, whole, chunks, groups, multiple);        \
  }

KERNELS(bf16, bf16, int8, Int8)
KERNELS(bf16, bf16, fp8, Fp8)
KERNELS(f16, f16, int8, Int8)
KERNELS(f16, f16, fp8, Fp8)
KERNELS(f32, float, int8, Int8)
KERNELS(f32, float, fp8, Fp8)
