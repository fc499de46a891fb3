#include "../kernels.h"

#include <cstring>
#include <vector>

#include "../elementwise.h"
#include "runs.h"

namespace localsgd::cpu {
namespace {

namespace baseline {
#include "loops.h"
}
#ifdef LOCALSGD_AVX2
#pragma GCC push_options
#pragma GCC target("avx2,f16c")
namespace avx2 {
#include "loops.h"
}
#pragma GCC pop_options
#endif

// Calls body(segment pointer, offset in bucket, elements, piece number) for each run of elements of the bucket.
template <typename Body>
void for_each_run(const Bucket& bucket, size_t itemsize, const Body& body) {
  at::parallel_for(0, pieces_of(bucket.numel), 1, [&](int64_t first, int64_t last) {
    const Segment* segment = segment_at(bucket, first * kPiece);
    cpu::for_each_run(segment, itemsize, first * kPiece, std::min(last * kPiece, bucket.numel), kPiece,
                      [&](char* data, int64_t at, int64_t n) { body(data, at, n, at / kPiece); });
  });
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
  std::vector<Sums> partial(measure ? pieces_of(bucket.numel) : 0);
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
  return folded(partial);
}

}  // namespace localsgd::cpu
