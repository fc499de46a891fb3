// The entry points of kernels.h for CUDA. Nothing here allocates, synchronises or copies to the device, so all of it can be
// captured in a CUDA graph; the caller owns every byte.
#pragma once

#include <c10/core/ScalarType.h>

#include <cstddef>
#include <cstdint>
#include <vector>

#include "../layout.h"
#if defined(LOCALSGD_CUDA_ON_CPU)
#include "cuda_on_cpu.h"
#else
#include <cuda_runtime_api.h>
#endif

namespace localsgd::cuda {

// What one warp moves: a stretch of one segment. It names the memory itself, so that a kernel waits for one load, not for two,
// before it knows what to do.
struct Piece {
  char* data;        // first element in the tensor
  int64_t at;        // element of the bucket where it lies
  int32_t numel;     // at most kPieceBytes of the tensor
  int32_t measured;  // whether it counts in the drift
};

// The pieces of one bucket, in device memory between syncs.
struct DeviceTable {
  const Piece* pieces;
  int64_t count;
};

// Small enough to give a 4 MiB bucket to all multiprocessors, large enough that its entry (24 bytes) is under 1% of the traffic.
constexpr int64_t kPieceBytes = 4096;

// Warps in a block: a block moves up to 32 KiB.
constexpr int kWarps = 8;

// The table's bytes, made on the host whenever the tensors' memory has changed. The caller copies them to the device, at an address
// aligned as for any allocation, and keeps them there. `itemsize`: bytes of one tensor element.
std::vector<char> build_table(const Bucket& bucket, size_t itemsize);

// The table whose bytes lie at `device`.
inline DeviceTable table_at(const void* device, size_t bytes) {
  return {static_cast<const Piece*>(device), static_cast<int64_t>(bytes / sizeof(Piece))};
}

// Doubles of scratch that a measuring `apply` needs.
inline int64_t partials_numel(const DeviceTable& table) { return (table.count + kWarps - 1) / kWarps * 2; }

// Copies the tensors (of type `dtype`) into `staging` (of type `wire`), rounding once.
void pack(const DeviceTable& table, c10::ScalarType dtype, c10::ScalarType wire, void* staging, cudaStream_t stream);

// Divides `staging` by `divisor`, rounds to `wire`, and copies it back to the tensors, rounding once to `dtype`. With `sums` (two
// doubles on the device) adds ||local - mean||^2 and ||mean||^2 over the bucket's parameters to them, in a fixed order: equal input
// at equal addresses modulo 128 gives equal bits. `partials` (partials_numel doubles on the device) is scratch: its use ends with
// this call on the stream.
void apply(const DeviceTable& table, c10::ScalarType dtype, c10::ScalarType wire, const void* staging, int64_t divisor,
           double* sums, double* partials, cudaStream_t stream);

}  // namespace localsgd::cuda
