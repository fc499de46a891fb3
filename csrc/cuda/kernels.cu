// Each warp moves one piece of one segment, whatever the segment's size: a bucket of thousands of tiny tensors and one of a single
// huge tensor both take one launch, and neither leaves a warp walking over many segments.
#include <c10/util/Exception.h>

#include <algorithm>
#include <type_traits>

#include "../elementwise.h"
#include "block.cuh"
#include "kernels.cuh"
#include "launch.h"
#include "move.cuh"

namespace localsgd::cuda {
namespace {

template <typename T, typename Wire>
struct Encode {
  static constexpr bool kReadsTarget = false;
  __device__ __forceinline__ Wire operator()(T value, const Wire&) const { return encode<Wire>(value); }
};

// Bytes, so that one kernel serves every type and NaNs keep their payload.
struct Copy {
  static constexpr bool kReadsTarget = false;
  __device__ __forceinline__ unsigned char operator()(unsigned char value, const unsigned char&) const { return value; }
};

template <typename T, typename Wire>
struct Apply {
  using W = typename Wide<Wire>::type;
  static constexpr bool kReadsTarget = false;
  W divisor;
  __device__ __forceinline__ T operator()(Wire sum, const T&) const { return decode<T>(mean(sum, divisor)); }
};

// As Apply; adds to the lane's own sums. A lane sees few enough elements of a piece for float to hold them.
template <typename T, typename Wire>
struct ApplyMeasured {
  using W = typename Wide<Wire>::type;
  static constexpr bool kReadsTarget = true;
  W divisor, distance = 0, norm = 0;
  __device__ __forceinline__ T operator()(Wire sum, const T& local) {
    const Wire average = mean(sum, divisor);
    distance += distance_sq(local, average);
    norm += square(average);
    return decode<T>(average);
  }
};

template <typename T, typename Wire>
__global__ void __launch_bounds__(kThreads, kResident) pack_kernel(DeviceTable table, Wire* staging) {
  const int64_t index = piece_of_this_warp();
  if (index >= table.count) return;
  const Piece piece = table.pieces[index];
  Encode<T, Wire> op;
  move(in_global(reinterpret_cast<const T*>(piece.data)), staging + piece.at, piece.numel, threadIdx.x % kLanes, op);
}

__global__ void __launch_bounds__(kThreads, kResident) copy_in_kernel(DeviceTable table, int itemsize, unsigned char* staging) {
  const int64_t index = piece_of_this_warp();
  if (index >= table.count) return;
  const Piece piece = table.pieces[index];
  Copy op;
  move(in_global(reinterpret_cast<const unsigned char*>(piece.data)), staging + piece.at * itemsize, piece.numel * itemsize,
       threadIdx.x % kLanes, op);
}

__global__ void __launch_bounds__(kThreads, kResident)
    copy_out_kernel(DeviceTable table, int itemsize, const unsigned char* staging) {
  const int64_t index = piece_of_this_warp();
  if (index >= table.count) return;
  const Piece piece = table.pieces[index];
  Copy op;
  move(staging + piece.at * itemsize, in_global(reinterpret_cast<unsigned char*>(piece.data)), piece.numel * itemsize,
       threadIdx.x % kLanes, op);
}

template <typename T, typename Wire>
__global__ void __launch_bounds__(kThreads, kResident)
    apply_kernel(DeviceTable table, const Wire* staging, typename Wide<Wire>::type divisor) {
  const int64_t index = piece_of_this_warp();
  if (index >= table.count) return;
  const Piece piece = table.pieces[index];
  Apply<T, Wire> op{divisor};
  move(staging + piece.at, in_global(reinterpret_cast<T*>(piece.data)), piece.numel, threadIdx.x % kLanes, op);
}

// Also leaves the block's two sums in `partials`.
template <typename T, typename Wire>
__global__ void __launch_bounds__(kThreads, kResident)
    apply_measured_kernel(DeviceTable table, const Wire* staging, typename Wide<Wire>::type divisor, double* partials) {
  const int64_t index = piece_of_this_warp();
  double distance = 0, norm = 0;
  if (index < table.count) {
    const Piece piece = table.pieces[index];
    ApplyMeasured<T, Wire> op{divisor};
    move(staging + piece.at, in_global(reinterpret_cast<T*>(piece.data)), piece.numel, threadIdx.x % kLanes, op);
    if (piece.measured) {
      distance = static_cast<double>(op.distance);
      norm = static_cast<double>(op.norm);
    }
  }
  leave_sums(distance, norm, partials);
}

// Calls f with values of the tensors' and the wire's types: equal, or float on the wire for 16-bit tensors.
template <typename F>
void with_types(c10::ScalarType dtype, c10::ScalarType wire, const F& f) {
  using c10::ScalarType;
  const bool equal = dtype == wire, widened = wire == ScalarType::Float;
  if (dtype == ScalarType::Float && equal) return f(float{}, float{});
  if (dtype == ScalarType::Double && equal) return f(double{}, double{});
  if (dtype == ScalarType::Half && equal) return f(c10::Half{}, c10::Half{});
  if (dtype == ScalarType::BFloat16 && equal) return f(c10::BFloat16{}, c10::BFloat16{});
  if (dtype == ScalarType::Half && widened) return f(c10::Half{}, float{});
  if (dtype == ScalarType::BFloat16 && widened) return f(c10::BFloat16{}, float{});
  TORCH_CHECK(false, "localsgd_ext: no averaging kernel for ", c10::toString(dtype), " tensors on a ", c10::toString(wire),
              " wire");
}

}  // namespace

std::vector<char> build_table(const Bucket& bucket, size_t itemsize) {
  std::vector<Piece> pieces;
  const auto size = static_cast<int64_t>(itemsize);
  for (const Segment* segment = bucket.segments; segment != bucket.segments + bucket.count; ++segment) {
    for (int64_t done = 0; done < segment->numel;) {
      char* data = segment->data + done * size;
      // All but the first piece of a segment begin at a cache line.
      const auto past_line = static_cast<int64_t>(reinterpret_cast<uintptr_t>(data) % 128);
      const int64_t numel = std::min(segment->numel - done, (kPieceBytes - past_line) / size);
      // Parameters come first in a bucket, and a segment is all parameter or all buffer.
      const bool measured = segment->offset < bucket.drift_numel;
      pieces.push_back({data, segment->offset + done, static_cast<int32_t>(numel), measured});
      done += numel;
    }
  }
  const char* bytes = reinterpret_cast<const char*>(pieces.data());
  return {bytes, bytes + pieces.size() * sizeof(Piece)};
}

void pack(const DeviceTable& table, c10::ScalarType dtype, c10::ScalarType wire, void* staging, cudaStream_t stream) {
  if (table.count == 0) return;
  if (dtype == wire) {
    const auto itemsize = static_cast<int>(c10::elementSize(dtype));
    return launch(copy_in_kernel, blocks_for(table.count), kThreads, stream, table, itemsize, static_cast<unsigned char*>(staging));
  }
  with_types(dtype, wire, [&](auto value, auto travelling) {
    using T = decltype(value);
    using Wire = decltype(travelling);
    // Equal types were copied above: there is nothing to instantiate for them.
    if constexpr (!std::is_same_v<T, Wire>) {
      launch(pack_kernel<T, Wire>, blocks_for(table.count), kThreads, stream, table, static_cast<Wire*>(staging));
    }
  });
}

void apply(const DeviceTable& table, c10::ScalarType dtype, c10::ScalarType wire, const void* staging, int64_t divisor,
           double* sums, double* partials, cudaStream_t stream) {
  if (table.count == 0) return;
  const int64_t blocks = blocks_for(table.count);
  if (dtype == wire && divisor == 1 && sums == nullptr) {
    const auto itemsize = static_cast<int>(c10::elementSize(dtype));
    return launch(copy_out_kernel, blocks, kThreads, stream, table, itemsize, static_cast<const unsigned char*>(staging));
  }
  with_types(dtype, wire, [&](auto value, auto travelling) {
    using T = decltype(value);
    using Wire = decltype(travelling);
    const auto by = static_cast<typename Wide<Wire>::type>(divisor);
    const auto* from = static_cast<const Wire*>(staging);
    if (sums == nullptr) return launch(apply_kernel<T, Wire>, blocks, kThreads, stream, table, from, by);
    launch(apply_measured_kernel<T, Wire>, blocks, kThreads, stream, table, from, by, partials);
    launch(fold_kernel, int64_t{1}, kThreads, stream, static_cast<const double*>(partials), blocks, sums);
  });
}

}  // namespace localsgd::cuda
