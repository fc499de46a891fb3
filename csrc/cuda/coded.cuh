// The passes of kernels.h over a bucket of codes, for CUDA. As with kernels.cuh, nothing here allocates, synchronises or copies to
// the device, and the caller owns every byte.
#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <vector>

#include "../kernels.h"
#include "kernels.cuh"

namespace localsgd::cuda {

// Where the elements of one bucket lie, in device memory between syncs.
struct CodedTable {
  const Segment* segments;
  const int32_t* first;  // for each block of kBlock elements of the bucket the number of the first segment that it meets
  int64_t numel;
  int64_t drift_numel;
};

// The table's bytes, made on the host whenever the tensors' memory has changed. The caller copies them to the device, at an address
// aligned as for any allocation, and keeps them there.
std::vector<char> build_coded_table(const Bucket& bucket);

// The table whose bytes lie at `device`. Only the numbers in `bucket` are looked at, not its segments.
inline CodedTable coded_table_at(const void* device, const Bucket& bucket) {
  const auto* segments = static_cast<const Segment*>(device);
  return {segments, reinterpret_cast<const int32_t*>(segments + bucket.count), bucket.numel, bucket.drift_numel};
}

// Doubles of scratch that a measuring `land` needs.
inline int64_t partials_numel(const CodedTable& table) {
  const int64_t blocks = (table.numel + kBlock - 1) / kBlock;
  return (blocks + kWarps - 1) / kWarps * 2;
}

// As cpu::encode.
void encode(const CodedTable& table, c10::ScalarType dtype, const Chunks& chunks, int64_t count, bool contributes, int64_t divisor,
            const void* anchor, void* residual, char* codes, cudaStream_t stream);

// As cpu::reduce. `received` and `codes` must not overlap.
void reduce(c10::ScalarType dtype, const Chunks& chunks, int64_t parts, const char* received, int64_t divisor, void* residual,
            int64_t numel, char* codes, cudaStream_t stream);

// As cpu::land. With `sums` (two doubles on the device) adds ||local - mean||^2 and ||mean||^2 over the bucket's parameters to
// them, in a fixed order: equal input gives equal bits. `partials` (partials_numel doubles on the device) is scratch: its use ends
// with this call on the stream.
void land(const CodedTable& table, c10::ScalarType dtype, const Chunks& chunks, const Received& received, const Outer& outer,
          void* anchor, void* momentum, double* sums, double* partials, cudaStream_t stream);

}  // namespace localsgd::cuda
