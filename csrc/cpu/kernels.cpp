#include "../kernels.h"

#include <ATen/Parallel.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cstring>
#include <type_traits>
#include <vector>

#include "../elementwise.h"

namespace localsgd::cpu {
namespace {

namespace baseline {
#include "loops.h"
}

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define LOCALSGD_AVX2 1
#pragma GCC push_options
#pragma GCC target("avx2,f16c")
namespace avx2 {
#include "loops.h"
}
#pragma GCC pop_options
const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c");
#define LOCALSGD_LOOP(name, ...) (has_avx2 ? avx2::name(__VA_ARGS__) : baseline::name(__VA_ARGS__))
#else
#define LOCALSGD_LOOP(name, ...) baseline::name(__VA_ARGS__)
#endif

// Work is handed to threads in pieces of this many elements; sums are folded piece by piece, in their order, whoever computed them.
constexpr int64_t kPiece = 1 << 16;

// Calls body(segment pointer, offset in bucket, elements, piece number) for each run of elements of bucket range [0, numel).
template <typename Body>
void for_each_run(const Bucket& bucket, size_t itemsize, const Body& body) {
  const int64_t pieces = (bucket.numel + kPiece - 1) / kPiece;
  at::parallel_for(0, pieces, 1, [&](int64_t first, int64_t last) {
    int64_t position = first * kPiece;
    const int64_t stop = std::min(last * kPiece, bucket.numel);
    const Segment* segment = std::upper_bound(bucket.segments, bucket.segments + bucket.count, position,
                                              [](int64_t at, const Segment& s) { return at < s.offset; }) -
                             1;
    while (position < stop) {
      const int64_t inside = position - segment->offset;
      const int64_t piece = position / kPiece;
      const int64_t n = std::min({segment->numel - inside, (piece + 1) * kPiece - position, stop - position});
      body(segment->data + inside * itemsize, position, n, piece);
      position += n;
      if (position == segment->offset + segment->numel) ++segment;
    }
  });
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

// Calls f with values of the tensors' and the wire's types: equal, or float on the wire for 16-bit tensors.
template <typename F>
void with_types(c10::ScalarType dtype, c10::ScalarType wire, const F& f) {
  with_type(dtype, [&](auto value) {
    using T = decltype(value);
    if (dtype == wire) return f(T{}, T{});
    if constexpr (sizeof(T) == 2) {
      if (wire == c10::ScalarType::Float) return f(T{}, float{});
    }
    TORCH_CHECK(false, "localsgd_ext: no kernel for ", c10::toString(dtype), " tensors on a ", c10::toString(wire), " wire");
  });
}

void copy_in(const Bucket& bucket, size_t itemsize, char* staging) {
  for_each_run(bucket, itemsize,
               [&](const char* data, int64_t at, int64_t n, int64_t) { std::memcpy(staging + at * itemsize, data, n * itemsize); });
}

void copy_out(const Bucket& bucket, size_t itemsize, const char* staging) {
  for_each_run(bucket, itemsize,
               [&](char* data, int64_t at, int64_t n, int64_t) { std::memcpy(data, staging + at * itemsize, n * itemsize); });
}

}  // namespace

void pack(const Bucket& bucket, c10::ScalarType dtype, c10::ScalarType wire, void* staging) {
  if (dtype == wire) return copy_in(bucket, c10::elementSize(dtype), static_cast<char*>(staging));
  with_types(dtype, wire, [&](auto value, auto travelling) {
    using T = decltype(value);
    using Wire = decltype(travelling);
    for_each_run(bucket, sizeof(T), [&](char* data, int64_t at, int64_t n, int64_t) {
      LOCALSGD_LOOP(pack_run, reinterpret_cast<const T*>(data), static_cast<Wire*>(staging) + at, n);
    });
  });
}

Sums apply(const Bucket& bucket, c10::ScalarType dtype, c10::ScalarType wire, const void* staging, int64_t divisor, bool measure) {
  if (dtype == wire && divisor == 1 && !measure) {
    copy_out(bucket, c10::elementSize(dtype), static_cast<const char*>(staging));
    return {};
  }
  std::vector<Sums> partial(measure ? (bucket.numel + kPiece - 1) / kPiece : 0);
  with_types(dtype, wire, [&](auto value, auto travelling) {
    using T = decltype(value);
    using Wire = decltype(travelling);
    const auto by = static_cast<typename Wide<Wire>::type>(divisor);
    for_each_run(bucket, sizeof(T), [&](char* data, int64_t at, int64_t n, int64_t piece) {
      const Wire* from = static_cast<const Wire*>(staging) + at;
      T* to = reinterpret_cast<T*>(data);
      // Parameters come first in a bucket, and a segment is all parameter or all buffer.
      if (measure && at < bucket.drift_numel) {
        LOCALSGD_LOOP(apply_measured_run, from, to, n, by, partial[piece]);
      } else {
        LOCALSGD_LOOP(apply_run, from, to, n, by);
      }
    });
  });
  Sums sums;
  for (const Sums& each : partial) {
    sums.distance_sq += each.distance_sq;
    sums.mean_sq += each.mean_sq;
  }
  return sums;
}

}  // namespace localsgd::cpu
