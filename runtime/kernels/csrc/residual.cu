// Sparse residual (HybridEP, SR compression): of ``value - shared`` only what reaches a threshold is sent, as value and place;
// decoding adds it onto the shared values.
//
//   value, shared [length]     threshold [1] fp32
//   values [capacity], places [capacity] uint16 (within a tile of TILE elements), in rising order of the element
//   starts [tiles + 1] int32   first entry of each tile, at most ``capacity``
//   status [2] int32           entries dropped for want of room; entries found before dropping
//   found  [tiles] int32       entries of each tile before dropping
//   kept_values, kept_places [tiles, room]   each tile's first entries, before it is known where they belong
//
// Encoding takes three launches: each block finds the entries of a tile and keeps as many as there is room for; one block
// turns the tiles' numbers of entries into starts; each warp moves what a tile kept to its place. A tile with more entries than
// room is read once more. (One launch that waits for the tiles before, by decoupled look-back, took twice as long on an H200.)
#include "rows.cuh"

constexpr u32 THREADS = 32 * WARPS, TILE = 4096, STARTS_THREADS = 1024;

// N elements at ``at``, 0 past the end; as loaded, since taking them apart at once would wait for each load by itself.
template <class T, int N>
__device__ __forceinline__ uint4 load(const T* __restrict__ from, u64 at, u64 length, bool aligned) {
  static_assert(sizeof(Pack<T, N>) == sizeof(uint4));
  if (aligned && at + N <= length) return *reinterpret_cast<const uint4*>(from + at);
  Pack<T, N> held = {};
#pragma unroll
  for (u32 e = 0; e < N; ++e) {
    if (at + e < length) held.at[e] = from[at + e];
  }
  return reinterpret_cast<const uint4&>(held);
}

template <class T, int N>
__device__ __forceinline__ float change(const uint4& value, const uint4& shared, u32 e) {
  return widen(reinterpret_cast<const Pack<T, N>&>(value).at[e]) - widen(reinterpret_cast<const Pack<T, N>&>(shared).at[e]);
}

// Inclusive sum over the lanes of a warp.
template <class V>
__device__ __forceinline__ V warp_scan(V sum) {
#pragma unroll
  for (u32 step = 1; step < 32; step *= 2) {
    V other = __shfl_up_sync(ALL, sum, step);
    if (threadIdx.x % 32 >= step) sum += other;
  }
  return sum;
}

__device__ __forceinline__ bool reaches(float change, float least) {
  return !(fabsf(change) < least);  // a NaN is sent, not hidden
}

template <class T, int N>
__device__ __forceinline__ void residual_find(const T* __restrict__ value, const T* __restrict__ shared,
                                              const float* __restrict__ threshold, T* __restrict__ kept_values,
                                              u16* __restrict__ kept_places, i32* __restrict__ found, u64 length, u32 room,
                                              u32 aligned) {
  constexpr u32 PACKS = TILE / (THREADS * N);  // per thread: 2 or 4
  __shared__ u32 warp_counts[PACKS][WARPS];
  u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  u64 first = u64(blockIdx.x) * TILE;
  float least = *threshold;
  uint4 held[PACKS], base[PACKS];
#pragma unroll
  for (u32 p = 0; p < PACKS; ++p) {
    u64 at = first + (p * THREADS + threadIdx.x) * N;
    held[p] = load<T, N>(value, at, length, aligned);
    base[p] = load<T, N>(shared, at, length, aligned);
  }
  u32 chosen[PACKS], before[PACKS];  // before: entries of the pack in earlier lanes
#pragma unroll
  for (u32 p = 0; p < PACKS; ++p) {
    chosen[p] = 0;
#pragma unroll
    for (u32 e = 0; e < N; ++e) {
      chosen[p] |= u32(reaches(change<T, N>(held[p], base[p], e), least)) << e;
    }
    u64 at = first + (p * THREADS + threadIdx.x) * N;
    if (first + TILE > length) chosen[p] &= at < length ? (1u << min(u64(N), length - at)) - 1 : 0;
    u32 own = __popc(chosen[p]), sum = warp_scan(own);
    before[p] = sum - own;
    if (lane == 31) warp_counts[p][warp] = sum;
  }
  __syncthreads();
  u32 to = 0;
#pragma unroll
  for (u32 p = 0; p < PACKS; ++p) {
    u32 place = to + before[p];
#pragma unroll
    for (u32 w = 0; w < WARPS; ++w) {
      if (w < warp) place += warp_counts[p][w];
      to += warp_counts[p][w];
    }
    // Few are chosen: what they are is read again, from the cache, instead of being kept for all.
    for (u32 left = chosen[p]; left != 0 && place < room; left &= left - 1, ++place) {
      u32 at = (p * THREADS + threadIdx.x) * N + __ffs(left) - 1;
      narrow(widen(value[first + at]) - widen(shared[first + at]), kept_values[u64(blockIdx.x) * room + place]);
      kept_places[u64(blockIdx.x) * room + place] = u16(at);
    }
  }
  if (threadIdx.x == 0) found[blockIdx.x] = i32(to);
}

// One block of STARTS_THREADS. A warp takes EACH stretches of 32 tiles at a time, so that its accesses are whole lines.
extern "C" __global__ void __launch_bounds__(STARTS_THREADS)
residual_starts(const i32* __restrict__ found, i32* __restrict__ starts, i32* __restrict__ status, u32 tiles, u32 capacity) {
  constexpr u32 EACH = 16;
  __shared__ i64 warp_totals[STARTS_THREADS / 32];
  u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  i64 begin = 0;
  for (u32 base = 0; base < tiles; base += STARTS_THREADS * EACH) {
    u32 first = base + warp * (32 * EACH) + lane;
    i32 part[EACH], before[EACH], own = 0;  // before: in the warp's earlier tiles; at most 512 x TILE
#pragma unroll
    for (u32 e = 0; e < EACH; ++e) part[e] = first + e * 32 < tiles ? found[first + e * 32] : 0;
#pragma unroll
    for (u32 e = 0; e < EACH; ++e) {
      i32 sum = warp_scan(part[e]);
      before[e] = own + sum - part[e];
      own += __shfl_sync(ALL, sum, 31);
    }
    if (lane == 0) warp_totals[warp] = own;
    __syncthreads();
    i64 all = warp_scan(warp_totals[lane]);  // a warp has a lane for each warp
    i64 at = begin + (warp ? __shfl_sync(ALL, all, warp - 1) : 0);
    begin += __shfl_sync(ALL, all, 31);
#pragma unroll
    for (u32 e = 0; e < EACH; ++e) {
      if (first + e * 32 < tiles) starts[first + e * 32] = i32(min(at + before[e], i64(capacity)));
    }
    __syncthreads();  // the next round writes warp_totals again
  }
  if (threadIdx.x == 0) {
    i64 sent = min(begin, i64(capacity));
    starts[tiles] = i32(sent);
    status[0] = i32(begin - sent);
    status[1] = i32(begin);
  }
}

template <class T, int N>
__device__ __forceinline__ void residual_move(const T* __restrict__ value, const T* __restrict__ shared,
                                              const float* __restrict__ threshold, const T* __restrict__ kept_values,
                                              const u16* __restrict__ kept_places, const i32* __restrict__ found,
                                              const i32* __restrict__ starts, T* __restrict__ values, u16* __restrict__ places,
                                              u64 length, u32 tiles, u32 room, u32 aligned) {
  u32 lane = threadIdx.x % 32, tile = blockIdx.x * WARPS + threadIdx.x / 32;
  if (tile >= tiles) return;  // the whole warp
  i32 to = starts[tile], end = starts[tile + 1];
  if (u32(found[tile]) <= room) {
    for (i32 entry = lane; entry < end - to; entry += 32) {
      values[to + entry] = kept_values[u64(tile) * room + entry];
      places[to + entry] = kept_places[u64(tile) * room + entry];
    }
    return;
  }
  float least = *threshold;  // zeros past the end of the values may reach it; they come last, and ``end`` leaves them out
  for (u32 base = 0; base < TILE && to < end; base += 32 * N) {
    u64 at = u64(tile) * TILE + base + lane * N;
    uint4 held = load<T, N>(value, at, length, aligned), other = load<T, N>(shared, at, length, aligned);
    u32 chosen = 0;
#pragma unroll
    for (u32 e = 0; e < N; ++e) chosen |= u32(reaches(change<T, N>(held, other, e), least)) << e;
    i32 sum = warp_scan(i32(__popc(chosen)));
    i32 place = to + sum - i32(__popc(chosen));
#pragma unroll
    for (u32 e = 0; e < N; ++e) {
      if (chosen >> e & 1) {
        if (place < end) {
          narrow(change<T, N>(held, other, e), values[place]);
          places[place] = u16(base + lane * N + e);
        }
        ++place;
      }
    }
    to += __shfl_sync(ALL, sum, 31);
  }
}

template <class T, int N>
__device__ __forceinline__ void residual_decode(const T* __restrict__ shared, const T* __restrict__ values,
                                                const u16* __restrict__ places, const i32* __restrict__ starts, T* __restrict__ out,
                                                u64 length, u32 aligned) {
  constexpr u32 PACKS = TILE / (THREADS * N);
  __shared__ __align__(16) T tile[TILE];
  u64 first = u64(blockIdx.x) * TILE;
  i32 entry = starts[blockIdx.x] + threadIdx.x, end = starts[blockIdx.x + 1];
  uint4 held[PACKS];
#pragma unroll
  for (u32 p = 0; p < PACKS; ++p) held[p] = load<T, N>(shared, first + (p * THREADS + threadIdx.x) * N, length, aligned);
#pragma unroll
  for (u32 p = 0; p < PACKS; ++p) *reinterpret_cast<uint4*>(tile + (p * THREADS + threadIdx.x) * N) = held[p];
  __syncthreads();
  for (; entry < end; entry += THREADS) {
    u32 at = places[entry];  // each place occurs once
    if (at < TILE) narrow(widen(tile[at]) + widen(values[entry]), tile[at]);
  }
  __syncthreads();
#pragma unroll
  for (u32 p = 0; p < PACKS; ++p) {
    u32 at = (p * THREADS + threadIdx.x) * N;
    Pack<T, N> held = *reinterpret_cast<const Pack<T, N>*>(tile + at);
    if (aligned && first + at + N <= length) {
      *reinterpret_cast<Pack<T, N>*>(out + first + at) = held;
    } else {
#pragma unroll
      for (u32 e = 0; e < N; ++e) {
        if (first + at + e < length) out[first + at + e] = held.at[e];
      }
    }
  }
}

// Blocks of THREADS: one for each tile; for moving, a warp for each tile. BLOCKS: as many find registers on a multiprocessor at
// once while they look for entries.
#define KERNELS(element, T, N, BLOCKS)                                                                                        \
  extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) residual_find_##element(                                      \
      const T* __restrict__ value, const T* __restrict__ shared, const float* __restrict__ threshold,                         \
      T* __restrict__ kept_values, u16* __restrict__ kept_places, i32* __restrict__ found, u64 length, u32 room,              \
      u32 aligned) {                                                                                                          \
    residual_find<T, N>(value, shared, threshold, kept_values, kept_places, found, length, room, aligned);                    \
  }                                                                                                                           \
  extern "C" __global__ void __launch_bounds__(THREADS) residual_move_##element(                                              \
      const T* __restrict__ value, const T* __restrict__ shared, const float* __restrict__ threshold,                         \
      const T* __restrict__ kept_values, const u16* __restrict__ kept_places, const i32* __restrict__ found,                  \
      const i32* __restrict__ starts, T* __restrict__ values, u16* __restrict__ places, u64 length, u32 tiles, u32 room,      \
      u32 aligned) {                                                                                                          \
    residual_move<T, N>(value, shared, threshold, kept_values, kept_places, found, starts, values, places, length, tiles,     \
                        room, aligned);                                                                                       \
  }                                                                                                                           \
  extern "C" __global__ void __launch_bounds__(THREADS) residual_decode_##element(                                            \
      const T* __restrict__ shared, const T* __restrict__ values, const u16* __restrict__ places,                             \
      const i32* __restrict__ starts, T* __restrict__ out, u64 length, u32 aligned) {                                         \
    residual_decode<T, N>(shared, values, places, starts, out, length, aligned);                                              \
  }

KERNELS(bf16, bf16, 8, 8)
KERNELS(f16, f16, 8, 8)
KERNELS(f32, float, 4, 4)
