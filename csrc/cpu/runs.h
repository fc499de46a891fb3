// What the passes over a bucket share: the instruction sets they are compiled for, the pieces that threads take, the types.
#pragma once

#include <ATen/Parallel.h>
#include <c10/core/ScalarType.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Exception.h>
#include <c10/util/Half.h>

#include <algorithm>
#include <cstdint>
#include <vector>

#include "../layout.h"

// Loops are compiled twice (kernels.cpp, coded.cpp), in namespaces `baseline` and `avx2`; LOCALSGD_LOOP calls the one that this
// processor has, so that one binary is fast on new ones and runs on all.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#include <immintrin.h>
#define LOCALSGD_AVX2 1
#define LOCALSGD_LOOP(name, ...) (has_avx2 ? avx2::name(__VA_ARGS__) : baseline::name(__VA_ARGS__))
#else
#define LOCALSGD_LOOP(name, ...) baseline::name(__VA_ARGS__)
#endif

namespace localsgd::cpu {

#ifdef LOCALSGD_AVX2
inline const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c");
#endif

// Work is handed to threads in pieces of this many elements; sums are folded piece by piece, in their order, whoever computed them.
constexpr int64_t kPiece = 1 << 16;

inline int64_t pieces_of(int64_t numel) { return (numel + kPiece - 1) / kPiece; }

// Those of all pieces together.
inline Sums folded(const std::vector<Sums>& pieces) {
  Sums sums;
  for (const Sums& each : pieces) {
    sums.distance_sq += each.distance_sq;
    sums.mean_sq += each.mean_sq;
  }
  return sums;
}

// The segment in which element `position` of the bucket lies.
inline const Segment* segment_at(const Bucket& bucket, int64_t position) {
  return std::upper_bound(bucket.segments, bucket.segments + bucket.count, position,
                          [](int64_t at, const Segment& s) { return at < s.offset; }) -
         1;
}

// Calls body(segment pointer, offset in bucket, elements) for each run of elements in [position, stop), none of them across a
// multiple of `stride`. `segment` is the one of `position`, and afterwards that of `stop`.
template <typename Body>
void for_each_run(const Segment*& segment, size_t itemsize, int64_t position, int64_t stop, int64_t stride, const Body& body) {
  while (position < stop) {
    const int64_t inside = position - segment->offset;
    const int64_t n = std::min({segment->numel - inside, (position / stride + 1) * stride - position, stop - position});
    body(segment->data + inside * itemsize, position, n);
    position += n;
    if (position == segment->offset + segment->numel) ++segment;
  }
}

// Calls f with a value of the C++ type of `type`.
template <typename F>
void with_type(c10::ScalarType type, const F& f) {
  switch (type) {
    case c10::ScalarType::Float:
      return f(float{});
    case c10::ScalarType::Double:
      return f(double{});
    case c10::ScalarType::Half:
      return f(c10::Half{});
    case c10::ScalarType::BFloat16:
      return f(c10::BFloat16{});
    default:
      TORCH_CHECK(false, "localsgd_ext: no averaging kernel for ", c10::toString(type));
  }
}

}  // namespace localsgd::cpu
