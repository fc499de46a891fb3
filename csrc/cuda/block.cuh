// What all kernels share: blocks of one size, whose warps each take one piece of the work, and sums over them.
#pragma once

#include <cstdint>

#include "kernels.cuh"
#include "launch.h"
#include "move.cuh"

namespace localsgd::cuda {

constexpr int kThreads = kWarps * kLanes;
// Blocks to a multiprocessor at the least: leaves the compiler room to keep all loads of a batch in registers.
constexpr int kResident = 2;

// Blocks that give each of `pieces` a warp.
inline int64_t blocks_for(int64_t pieces) { return (pieces + kWarps - 1) / kWarps; }

__device__ __forceinline__ int64_t piece_of_this_warp() { return static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / kLanes; }

// Sums over the block, in a fixed order; the first thread gets them. Every thread of the block must come here.
static __device__ void block_sum(double& distance, double& norm) {
  __shared__ double sums[kWarps][2];
  const int lane = threadIdx.x % kLanes, warp = threadIdx.x / kLanes;
#pragma unroll
  for (int step = kLanes / 2; step > 0; step /= 2) {
    distance += __shfl_xor_sync(0xffffffffu, distance, step);
    norm += __shfl_xor_sync(0xffffffffu, norm, step);
  }
  if (lane == 0) {
    sums[warp][0] = distance;
    sums[warp][1] = norm;
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    for (int other = 1; other < kWarps; ++other) {
      distance += sums[other][0];
      norm += sums[other][1];
    }
  }
}

// Leaves the block's two sums in `partials`. Every thread of the block must come here.
__device__ __forceinline__ void leave_sums(double distance, double norm, double* partials) {
  block_sum(distance, norm);
  if (threadIdx.x == 0) {
    partials[2 * static_cast<int64_t>(blockIdx.x)] = distance;
    partials[2 * static_cast<int64_t>(blockIdx.x) + 1] = norm;
  }
}

// Adds all blocks' sums to `sums`. One block, no atomics: the order is always the same.
static __global__ void __launch_bounds__(kThreads, kResident) fold_kernel(const double* partials, int64_t count, double* sums) {
  double distance = 0, norm = 0;
  for (int64_t i = threadIdx.x; i < count; i += kThreads) {
    distance += partials[2 * i];
    norm += partials[2 * i + 1];
  }
  block_sum(distance, norm);
  if (threadIdx.x == 0) {
    sums[0] += distance;
    sums[1] += norm;
  }
}

}  // namespace localsgd::cuda
