// Four neighbouring elements per thread, and scaled rounding of groups of them to int8, int4 or fp8.
#pragma once
#include "rows.cuh"

// Elements ``at`` .. ``at + 3`` of ``length`` as float, 0 past the end; one access where ``whole`` (length and address allow it).
template <class T>
__device__ __forceinline__ void load_quad(const T* __restrict__ from, u64 at, u64 length, bool whole, float* __restrict__ to) {
  if (whole) {
    Pack<T, 4> held = at < length ? *reinterpret_cast<const Pack<T, 4>*>(from + at) : Pack<T, 4>{};
#pragma unroll
    for (u32 e = 0; e < 4; ++e) to[e] = widen(held.at[e]);
  } else {
#pragma unroll
    for (u32 e = 0; e < 4; ++e) to[e] = at + e < length ? widen(from[at + e]) : 0.0f;
  }
}

template <class T>
__device__ __forceinline__ void store_quad(const float* __restrict__ from, T* __restrict__ to, u64 at, u64 length, bool whole) {
  Pack<T, 4> held;
#pragma unroll
  for (u32 e = 0; e < 4; ++e) narrow(from[e], held.at[e]);
  if (whole) {
    if (at < length) *reinterpret_cast<Pack<T, 4>*>(to + at) = held;
  } else {
#pragma unroll
    for (u32 e = 0; e < 4; ++e) {
      if (at + e < length) to[at + e] = held.at[e];
    }
  }
}

// Largest |x| over the LANES threads that share a group. A NaN stays one, so that it shows in the scale.
template <u32 LANES>
__device__ __forceinline__ float group_max(const float* x) {
  float largest = 0.0f;
#pragma unroll
  for (u32 e = 0; e < 4; ++e) {
    float size = fabsf(x[e]);
    largest = size > largest || size != size ? size : largest;
  }
#pragma unroll
  for (u32 step = LANES / 2; step > 0; step /= 2) {
    float other = __shfl_xor_sync(ALL, largest, step);
    largest = other > largest || other != other ? other : largest;
  }
  return largest < 1e-30f ? 1e-30f : largest;  // the reciprocal stays finite
}

struct Int8 {
  static constexpr float LARGEST = 127.0f;
  using Quad = u32;
  __device__ __forceinline__ static u32 encode(float x) { return u32(max(-127, min(127, __float2int_rn(x)))) & 0xff; }
  __device__ __forceinline__ static float decode(Quad quad, u32 e) { return float(i8(quad >> (8 * e))); }
};

struct Fp8 {
  static constexpr float LARGEST = 448.0f;
  using Quad = u32;
  __device__ __forceinline__ static u32 encode(float x) { return to_e4m3(fmaxf(-448.0f, fminf(448.0f, x))); }
  __device__ __forceinline__ static float decode(Quad quad, u32 e) { return from_e4m3(u8(quad >> (8 * e))); }
};

struct Int4 {
  static constexpr float LARGEST = 7.0f;
  using Quad = u16;
  __device__ __forceinline__ static u32 encode(float x) { return u32(max(-7, min(7, __float2int_rn(x)))) & 0xf; }
  __device__ __forceinline__ static float decode(Quad quad, u32 e) { return float(i32(u32(quad) << (28 - 4 * e)) >> 28); }
};

template <class C>
__device__ __forceinline__ typename C::Quad encode_quad(const float* x, float reciprocal) {
  u32 quad = 0;
#pragma unroll
  for (u32 e = 0; e < 4; ++e) quad |= C::encode(__fmul_rn(x[e], reciprocal)) << (e * sizeof(typename C::Quad) * 2);
  return typename C::Quad(quad);
}
