// Routing: where each chosen (token, expert) pair goes. Stable (pairs of a group keep the order of their tokens), so the
// result never changes between runs; no host synchronisation.
//
//   ids      [rows, top_k] int32   expert of each pair, -1 for none
//   group_of [experts]     int32   group (expert's place here, or destination rank) of an expert, -1 where it is not here
//   counts   [groups]      int32   kept pairs of a group
//   offsets  [groups + 1]  int32   first row of a group
//   slot     [rows, top_k] int32   row of the pair, -1 for none, for dropped ones, and for repeats when deduplicating
//   status   [2]           int32   pairs dropped for want of room; pairs found before dropping
//
// Packed (stride 0): groups follow each other, each padded to a multiple, all within ``capacity`` rows.
// Strided: group g owns rows first + g * stride ..., at most ``capacity`` of them (a region in another rank's buffer).
//
// Three launches: each warp counts the pairs of one tile; one block turns tile counts into starts; each warp assigns.
#include "rows.cuh"

struct Pairs {
  const i32* ids;
  const i32* group_of;
  const i32* source_counts;  // null, or [rows / source_rows]: valid leading rows of each source's region of ``source_rows``
  u32 source_rows, num_pairs, top_k, num_experts, deduplicate;

  __device__ __forceinline__ i32 group(u32 pair) const {
    i32 expert = ids[pair];
    return u32(expert) < num_experts ? group_of[expert] : -1;
  }

  // Group of a pair that needs a row of its own, else -1.
  __device__ __forceinline__ i32 wanted(u32 pair) const {
    if (pair >= num_pairs) return -1;
    u32 row = pair / top_k;
    if (source_counts != nullptr && i32(row % source_rows) >= source_counts[row / source_rows]) return -1;
    i32 own = group(pair);
    if (own >= 0 && deduplicate) {
      for (u32 earlier = row * top_k; earlier < pair; ++earlier) {
        if (group(earlier) == own) return -1;
      }
    }
    return own;
  }
};

// [tiles] blocks of one warp; dynamic shared memory: [groups] int32.
extern "C" __global__ void __launch_bounds__(32)
route_count(const i32* __restrict__ ids, const i32* __restrict__ group_of, const i32* __restrict__ source_counts, u32 source_rows,
            u32 num_pairs, u32 top_k, u32 num_experts, u32 deduplicate, u32 groups, u32 tile_pairs, i32* __restrict__ tile_counts) {
  DYNAMIC_SHARED(i32, seen);
  Pairs pairs{ids, group_of, source_counts, source_rows, num_pairs, top_k, num_experts, deduplicate};
  u32 lane = threadIdx.x;
  for (u32 g = lane; g < groups; g += 32) seen[g] = 0;
  __syncwarp();
  for (u32 done = 0; done < tile_pairs; done += 32) {
    i32 own = pairs.wanted(blockIdx.x * tile_pairs + done + lane);
    u32 same = __match_any_sync(ALL, own);
    if (own >= 0 && lane == u32(__ffs(same)) - 1) seen[own] += __popc(same);
    __syncwarp();
  }
  for (u32 g = lane; g < groups; g += 32) tile_counts[u64(blockIdx.x) * groups + g] = seen[g];
}

constexpr u32 SCAN_THREADS = 512;

// Sum of the values of the threads before this one; ``total`` gets the sum of all. Two barriers.
__device__ __forceinline__ i64 block_scan(i64 value, i64* warp_totals, i64& total) {
  u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  i64 sum = value;
#pragma unroll
  for (u32 step = 1; step < 32; step *= 2) {
    i64 before = __shfl_up_sync(ALL, sum, step);
    if (lane >= step) sum += before;
  }
  if (lane == 31) warp_totals[warp] = sum;
  __syncthreads();
  i64 earlier = 0;
  total = 0;
  for (u32 w = 0; w < SCAN_THREADS / 32; ++w) {
    if (w < warp) earlier += warp_totals[w];
    total += warp_totals[w];
  }
  __syncthreads();  // the next round writes warp_totals again
  return earlier + sum - value;
}

// One block of SCAN_THREADS. tile_counts [tiles, groups] becomes, in place, the pairs of the group in earlier tiles.
extern "C" __global__ void __launch_bounds__(SCAN_THREADS)
route_scan(i32* __restrict__ tile_counts, u32 tiles, u32 groups, u32 multiple, i64 capacity, i64 stride, i64 first,
           i32* __restrict__ counts, i32* __restrict__ offsets, i32* __restrict__ status) {
  __shared__ i64 warp_totals[SCAN_THREADS / 32];
  i64 begin = 0, dropped = 0, found = 0;
  for (u32 base = 0; base < groups; base += SCAN_THREADS) {
    u32 g = base + threadIdx.x;
    i64 count = 0;
    if (g < groups) {
      constexpr u32 BATCH = 8;  // independent loads in flight
      for (u32 tile = 0; tile < tiles; tile += BATCH) {
        i32 part[BATCH];
#pragma unroll
        for (u32 b = 0; b < BATCH; ++b) part[b] = tile + b < tiles ? tile_counts[u64(tile + b) * groups + g] : 0;
#pragma unroll
        for (u32 b = 0; b < BATCH; ++b) {
          if (tile + b < tiles) tile_counts[u64(tile + b) * groups + g] = i32(count);
          count += part[b];
        }
      }
    }
    i64 padded = (count + multiple - 1) / multiple * multiple, total;
    i64 before = begin + block_scan(padded, warp_totals, total);
    if (g < groups) {
      i64 at = stride ? first + g * stride : min(before, capacity);
      i64 room = stride ? capacity : min(before + padded, capacity) - at;
      i64 kept = min(count, room);
      counts[g] = i32(kept);
      offsets[g] = i32(at);
      dropped += count - kept;
      found += count;
    }
    begin += total;
  }
  i64 all_dropped, all_found;
  block_scan(dropped, warp_totals, all_dropped);
  block_scan(found, warp_totals, all_found);
  if (threadIdx.x == 0) {
    offsets[groups] = i32(stride ? first + groups * stride : min(begin, capacity));
    status[0] = i32(all_dropped);
    status[1] = i32(all_found);
  }
}

// [tiles] blocks of one warp; dynamic shared memory: [groups] int32.
extern "C" __global__ void __launch_bounds__(32)
route_assign(const i32* __restrict__ ids, const i32* __restrict__ group_of, const i32* __restrict__ source_counts, u32 source_rows,
             u32 num_pairs, u32 top_k, u32 num_experts, u32 deduplicate, u32 groups, u32 tile_pairs,
             const i32* __restrict__ tile_starts, const i32* __restrict__ counts, const i32* __restrict__ offsets,
             i32* __restrict__ slot) {
  DYNAMIC_SHARED(i32, seen);
  Pairs pairs{ids, group_of, source_counts, source_rows, num_pairs, top_k, num_experts, deduplicate};
  u32 lane = threadIdx.x;
  for (u32 g = lane; g < groups; g += 32) seen[g] = tile_starts[u64(blockIdx.x) * groups + g];
  __syncwarp();
  for (u32 done = 0; done < tile_pairs; done += 32) {
    u32 pair = blockIdx.x * tile_pairs + done + lane;
    i32 own = pairs.wanted(pair);
    u32 same = __match_any_sync(ALL, own);
    i32 before = own >= 0 ? seen[own] : 0;
    i32 rank = before + __popc(same & ((1u << lane) - 1));
    __syncwarp();  // all have read before the first of a group adds
    if (own >= 0 && lane == u32(__ffs(same)) - 1) seen[own] = before + __popc(same);
    __syncwarp();
    if (pair < num_pairs) slot[pair] = own >= 0 && rank < counts[own] ? offsets[own] + rank : -1;
  }
}
