// Each warp takes one block of 256 values from the tensors to codes or back; the codes' side of that is in codes.cuh.
#include <c10/util/Exception.h>

#include <algorithm>
#include <limits>
#include <type_traits>

#include "../elementwise.h"
#include "block.cuh"
#include "coded.cuh"
#include "codes.cuh"
#include "launch.h"
#include "move.cuh"

namespace localsgd::cuda {
namespace {

template <typename T>
using WideOf = typename Wide<T>::type;

// Codes that hold no more than a difference does; nobody asks for others.
template <typename T, Code kCode>
constexpr bool kTravels = sizeof(typename Coding<kCode>::Stored) <= sizeof(WideOf<T>);

// Calls f(i, element, its number in the bucket) for each value i of this lane that lies in the bucket.
template <typename T, typename F>
__device__ __forceinline__ void for_each_element(const CodedTable& table, int64_t block, int lane, const F& f) {
  const int64_t begin = block * kBlock;
  const Segment* segment = table.segments + table.first[block];
  if (begin + kBlock <= segment->offset + segment->numel) {
    T* data = in_global(reinterpret_cast<T*>(segment->data)) + (begin - segment->offset);
#pragma unroll
    for (int i = 0; i < kEach; ++i) f(i, data[lane + i * kLanes], begin + lane + i * kLanes);
    return;
  }
  // Over several segments, or past the end of the bucket.
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const int64_t at = begin + lane + i * kLanes;
    if (at < table.numel) {
      while (at >= segment->offset + segment->numel) ++segment;
      f(i, in_global(reinterpret_cast<T*>(segment->data))[at - segment->offset], at);
    }
  }
}

template <typename T, Code kCode>
__global__ void __launch_bounds__(kThreads, kResident)
    encode_kernel(CodedTable table, Chunks chunks, int64_t count, bool contributes, WideOf<T> divisor, WideOf<T> share,
                  const WideOf<T>* anchor, WideOf<T>* residual, char* codes) {
  using W = WideOf<T>;
  const int64_t block = piece_of_this_warp();
  const int lane = threadIdx.x % kLanes;
  if (block >= count * chunks.blocks) return;
  const int64_t begin = block * kBlock;
  W values[kEach] = {};
  if (begin < table.numel && contributes) {
    for_each_element<const T>(table, block, lane, [&](int i, const T& element, int64_t at) {
      values[i] = static_cast<W>(element) - (anchor == nullptr ? W(0) : begun<T>(anchor[at]));
    });
  }
  if (residual != nullptr) {
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int64_t at = begin + lane + i * kLanes;
      if (at < table.numel) values[i] += divisor * residual[at];
    }
  }
  encode_block<kCode>(values, codes + block / chunks.blocks * chunks.nbytes, chunks, block % chunks.blocks, lane);
  if (residual == nullptr) return;
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const int64_t at = begin + lane + i * kLanes;
    if (at < table.numel) residual[at] = share * values[i];
  }
}

template <typename W, Code kCode>
__global__ void __launch_bounds__(kThreads, kResident)
    reduce_kernel(Chunks chunks, int64_t parts, const char* received, W divisor, W* residual, int64_t numel, char* codes) {
  const int64_t block = piece_of_this_warp();
  const int lane = threadIdx.x % kLanes;
  if (block >= chunks.blocks) return;
  W mean[kEach];
  mean_block<kCode>(mean, received, chunks.nbytes, parts, divisor, chunks, block, lane);
  encode_block<kCode>(mean, codes, chunks, block, lane);
  if (residual == nullptr) return;
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const int64_t at = block * kBlock + lane + i * kLanes;
    if (at < numel) residual[at] += mean[i];
  }
}

// See momentum_step; the momentum of one element, if there is one.
template <typename W>
struct OuterStep {
  OuterKind kind;
  W lr, momentum;
  bool nesterov;
  __device__ __forceinline__ W operator()(W anchor, W d, W* m) const {
    if (kind == OuterKind::kMean) return anchor + d;
    if (kind == OuterKind::kGradient) {
      *m = -d;
      return anchor;
    }
    return anchor + lr * (m == nullptr ? d : momentum_step(d, momentum, nesterov, *m));
  }
};

// With kMeasure also leaves the block's two sums in `partials`.
template <typename T, Code kCode, bool kMeasure>
__global__ void __launch_bounds__(kThreads, kResident)
    land_kernel(CodedTable table, Chunks chunks, Received received, OuterStep<WideOf<T>> outer, WideOf<T>* anchor,
                WideOf<T>* momentum, double* partials) {
  using W = WideOf<T>;
  const int64_t block = piece_of_this_warp(), begin = block * kBlock;
  const int lane = threadIdx.x % kLanes;
  W distance = 0, norm = 0;
  if (begin < table.numel) {
    // All is read before the first is written, to keep loads in flight.
    W before[kEach] = {}, mean[kEach], d[kEach];
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int64_t at = begin + lane + i * kLanes;
      if (at < table.numel) before[i] = anchor[at];
    }
    mean_block<kCode>(d, received.codes + block / chunks.blocks * chunks.nbytes, received.count * chunks.nbytes, received.parts,
                      static_cast<W>(received.divisor), chunks, block % chunks.blocks, lane);
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const W from = begun<T>(before[i]);
      mean[i] = received.values ? d[i] : from + d[i];
      if (received.values) d[i] -= from;
    }
    if constexpr (kMeasure) {
      for_each_element<const T>(table, block, lane, [&](int i, const T& element, int64_t at) {
        if (at >= table.drift_numel) return;
        distance += distance_sq(element, mean[i]);
        norm += square(mean[i]);
      });
    }
    for_each_element<T>(table, block, lane, [&](int i, T& element, int64_t at) {
      const W after = outer(before[i], d[i], momentum == nullptr ? nullptr : momentum + at);
      if (outer.kind == OuterKind::kGradient) return;
      anchor[at] = after;
      element = static_cast<T>(after);
    });
  }
  if constexpr (kMeasure) leave_sums(static_cast<double>(distance), static_cast<double>(norm), partials);
}

// Calls f with a value of the tensors' type and one of a type that holds the code.
template <typename F>
void with_code(c10::ScalarType dtype, Code code, const F& f) {
  bool known = false;
  const auto try_one = [&](auto value, auto constant) {
    if constexpr (kTravels<decltype(value), decltype(constant)::value>) {
      if (dtype != c10::CppTypeToScalarType<decltype(value)>::value || code != constant) return;
      known = true;
      f(value, constant);
    }
  };
  const auto try_all = [&](auto value) {
    try_one(value, std::integral_constant<Code, Code::kFloat64>{});
    try_one(value, std::integral_constant<Code, Code::kFloat32>{});
    try_one(value, std::integral_constant<Code, Code::kBFloat16>{});
    try_one(value, std::integral_constant<Code, Code::kFloat16>{});
    try_one(value, std::integral_constant<Code, Code::kInt8>{});
    try_one(value, std::integral_constant<Code, Code::kInt4>{});
  };
  try_all(float{});
  try_all(double{});
  try_all(c10::Half{});
  try_all(c10::BFloat16{});
  TORCH_CHECK(known, "localsgd_ext: ", c10::toString(dtype), " tensors do not travel in code ", static_cast<int>(code));
}

}  // namespace

std::vector<char> build_coded_table(const Bucket& bucket) {
  TORCH_CHECK(bucket.count <= std::numeric_limits<int32_t>::max(), "localsgd_ext: too many tensors in a bucket");
  std::vector<int32_t> first;
  int32_t segment = 0;
  for (int64_t begin = 0; begin < bucket.numel; begin += kBlock) {
    while (bucket.segments[segment].offset + bucket.segments[segment].numel <= begin) ++segment;
    first.push_back(segment);
  }
  std::vector<char> bytes(bucket.count * sizeof(Segment) + first.size() * sizeof(int32_t));
  const auto* segments = reinterpret_cast<const char*>(bucket.segments);
  const auto* numbers = reinterpret_cast<const char*>(first.data());
  std::copy_n(numbers, first.size() * sizeof(int32_t), std::copy_n(segments, bucket.count * sizeof(Segment), bytes.data()));
  return bytes;
}

void encode(const CodedTable& table, c10::ScalarType dtype, const Chunks& chunks, int64_t count, bool contributes, int64_t divisor,
            const void* anchor, void* residual, char* codes, cudaStream_t stream) {
  const int64_t blocks = count * chunks.blocks;
  if (blocks == 0) return;
  with_code(dtype, chunks.code, [&](auto value, auto code) {
    using T = decltype(value);
    using W = WideOf<T>;
    launch(encode_kernel<T, decltype(code)::value>, blocks_for(blocks), kThreads, stream, table, chunks, count, contributes,
           static_cast<W>(divisor), W(1) / static_cast<W>(divisor), static_cast<const W*>(anchor), static_cast<W*>(residual),
           codes);
  });
}

void reduce(c10::ScalarType dtype, const Chunks& chunks, int64_t parts, const char* received, int64_t divisor, void* residual,
            int64_t numel, char* codes, cudaStream_t stream) {
  if (chunks.blocks == 0) return;
  // No tensor is touched, so all that are not double are alike.
  const auto wide = dtype == c10::ScalarType::Double ? dtype : c10::ScalarType::Float;
  with_code(wide, chunks.code, [&](auto value, auto code) {
    using W = decltype(value);
    if constexpr (std::is_same_v<W, WideOf<W>>) {
      launch(reduce_kernel<W, decltype(code)::value>, blocks_for(chunks.blocks), kThreads, stream, chunks, parts, received,
             static_cast<W>(divisor), static_cast<W*>(residual), numel, codes);
    }
  });
}

void land(const CodedTable& table, c10::ScalarType dtype, const Chunks& chunks, const Received& received, const Outer& outer,
          void* anchor, void* momentum, double* sums, double* partials, cudaStream_t stream) {
  if (table.numel == 0) return;
  const int64_t blocks = blocks_for((table.numel + kBlock - 1) / kBlock);
  with_code(dtype, chunks.code, [&](auto value, auto code) {
    using T = decltype(value);
    using W = WideOf<T>;
    constexpr Code kCode = decltype(code)::value;
    const OuterStep<W> step{outer.kind, static_cast<W>(outer.lr), static_cast<W>(outer.momentum), outer.nesterov};
    auto *to = static_cast<W*>(anchor), *m = static_cast<W*>(momentum);
    if (sums == nullptr) {
      return launch(land_kernel<T, kCode, false>, blocks, kThreads, stream, table, chunks, received, step, to, m, partials);
    }
    launch(land_kernel<T, kCode, true>, blocks, kThreads, stream, table, chunks, received, step, to, m, partials);
    launch(fold_kernel, int64_t{1}, kThreads, stream, static_cast<const double*>(partials), blocks, sums);
  });
}

}  // namespace localsgd::cuda
