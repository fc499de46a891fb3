#include <algorithm>
#include <cstring>
#include <type_traits>
#include <utility>
#include <vector>

#include "../elementwise.h"
#include "../kernels.h"
#include "runs.h"

namespace localsgd::cpu {
namespace {

namespace baseline {
#include "coded_loops.h"
}
#ifdef LOCALSGD_AVX2
#pragma GCC push_options
#pragma GCC target("avx2,f16c")
namespace avx2 {
#include "coded_loops.h"
}
#pragma GCC pop_options
#endif

constexpr int64_t kPieceBlocks = kPiece / kBlock;

template <Code kCode>
using CodeConstant = std::integral_constant<Code, kCode>;

// Calls f with a value of the tensors' type and the code, as a constant.
template <typename F>
void with_types(c10::ScalarType dtype, Code code, const F& f) {
  with_type(dtype, [&](auto value) {
    using T = decltype(value);
    switch (code) {
      case Code::kFloat64:
        if constexpr (std::is_same_v<T, double>) return f(T{}, CodeConstant<Code::kFloat64>{});
        break;
      case Code::kFloat32:
        return f(T{}, CodeConstant<Code::kFloat32>{});
      case Code::kBFloat16:
        return f(T{}, CodeConstant<Code::kBFloat16>{});
      case Code::kFloat16:
        return f(T{}, CodeConstant<Code::kFloat16>{});
      case Code::kInt8:
        return f(T{}, CodeConstant<Code::kInt8>{});
      case Code::kInt4:
        return f(T{}, CodeConstant<Code::kInt4>{});
    }
    TORCH_CHECK(false, "localsgd_ext: ", c10::toString(dtype), " tensors do not travel in code ", static_cast<int>(code));
  });
}

// Calls body(first, last block, piece number) for runs of blocks, by several threads.
template <typename Body>
void for_each_piece(int64_t blocks, const Body& body) {
  at::parallel_for(0, (blocks + kPieceBlocks - 1) / kPieceBlocks, 1, [&](int64_t first, int64_t last) {
    for (int64_t piece = first; piece < last; ++piece) {
      body(piece * kPieceBlocks, std::min((piece + 1) * kPieceBlocks, blocks), piece);
    }
  });
}

// Block number `block` of chunks that begin at `base`: its codes and its scale.
template <Code kCode, typename Char>
std::pair<Char*, Char*> parts_of(Char* base, const Chunks& chunks, int64_t block) {
  Char* chunk = base + block / chunks.blocks * chunks.nbytes;
  return {chunk + codes_at<kCode>(block % chunks.blocks), chunk + scale_at<kCode>(block % chunks.blocks, chunks.blocks)};
}

// The mean over `parts`, each `stride` bytes behind the one before; a single one is taken as it is, a -0 included.
template <Code kCode, typename W>
void mean_block(const char* codes, const char* scale, int64_t parts, int64_t stride, W divisor, W* mean) {
  std::fill_n(mean, kBlock, parts == 1 ? W(-0.0) : W(0));
  for (int64_t part = 0; part < parts; ++part) {
    LOCALSGD_LOOP(add_block<kCode>, codes + part * stride, scale + part * stride, mean);
  }
  if (divisor != W(1)) LOCALSGD_LOOP(divide_block, mean, divisor);
}

}  // namespace

void encode(const Bucket& bucket, c10::ScalarType dtype, const Chunks& chunks, int64_t count, bool contributes, int64_t divisor,
            const void* anchor, void* residual, char* codes) {
  if (anchor == nullptr) return pack(bucket, dtype, dtype == at::kDouble ? dtype : at::kFloat, codes);
  with_types(dtype, chunks.code, [&](auto value, auto code) {
    using T = decltype(value);
    using W = typename Wide<T>::type;
    constexpr Code kCode = decltype(code)::value;
    const auto* a = static_cast<const W*>(anchor);
    auto* e = static_cast<W*>(residual);
    const auto by = static_cast<W>(divisor);
    const W share = W(1) / by;
    for_each_piece(count * chunks.blocks, [&](int64_t first, int64_t last, int64_t) {
      // Blocks behind the end of the bucket have no segment, and look at none.
      const Segment* segment = segment_at(bucket, std::min(first * kBlock, bucket.numel - 1));
      for (int64_t block = first; block < last; ++block) {
        const int64_t begin = block * kBlock, n = std::min(kBlock, bucket.numel - begin);
        const auto [to, scale] = parts_of<kCode>(codes, chunks, block);
        alignas(32) W v[kBlock];
        if (n < kBlock || !contributes) std::fill_n(v, kBlock, W(0));
        if (contributes) {
          for_each_run(segment, sizeof(T), begin, begin + std::max(n, int64_t{0}), kBlock,
                       [&](const char* data, int64_t at, int64_t m) {
                         LOCALSGD_LOOP(difference_run, reinterpret_cast<const T*>(data), a + at, v + (at - begin), m);
                       });
        }
        if (n > 0 && e != nullptr) LOCALSGD_LOOP(add_times_run, e + begin, by, v, n);
        LOCALSGD_LOOP(encode_block<kCode>, v, to, scale);
        if (n > 0 && e != nullptr) LOCALSGD_LOOP(times_run, v, share, e + begin, n);
      }
    });
  });
}

void reduce(c10::ScalarType dtype, const Chunks& chunks, int64_t parts, const char* received, int64_t divisor, void* residual,
            int64_t numel, char* codes) {
  with_types(dtype, chunks.code, [&](auto value, auto code) {
    using W = typename Wide<decltype(value)>::type;
    constexpr Code kCode = decltype(code)::value;
    const auto by = static_cast<W>(divisor);
    auto* e = static_cast<W*>(residual);
    for_each_piece(chunks.blocks, [&](int64_t first, int64_t last, int64_t) {
      for (int64_t block = first; block < last; ++block) {
        const int64_t begin = block * kBlock, end = std::min(begin + kBlock, numel);
        const auto [from, scale_from] = parts_of<kCode>(received, chunks, block);
        const auto [to, scale_to] = parts_of<kCode>(codes, chunks, block);
        alignas(32) W mean[kBlock];
        mean_block<kCode>(from, scale_from, parts, chunks.nbytes, by, mean);
        LOCALSGD_LOOP(encode_block<kCode>, mean, to, scale_to);
        if (begin < end && e != nullptr) LOCALSGD_LOOP(add_times_run, mean, W(1), e + begin, end - begin);
      }
    });
  });
}

Sums land(const Bucket& bucket, c10::ScalarType dtype, const Chunks& chunks, const Received& received, const Outer& outer,
          void* anchor, void* momentum, bool measure) {
  const int64_t blocks = (bucket.numel + kBlock - 1) / kBlock;
  std::vector<Sums> partial(measure ? (blocks + kPieceBlocks - 1) / kPieceBlocks : 0);
  with_types(dtype, chunks.code, [&](auto value, auto code) {
    using T = decltype(value);
    using W = typename Wide<T>::type;
    constexpr Code kCode = decltype(code)::value;
    auto* a = static_cast<W*>(anchor);
    auto* m = static_cast<W*>(momentum);
    const auto divisor = static_cast<W>(received.divisor);
    for_each_piece(blocks, [&](int64_t first, int64_t last, int64_t piece) {
      const Segment* segment = segment_at(bucket, first * kBlock);
      if constexpr (std::is_same_v<T, W>) {
        if (received.values && outer.kind == OuterKind::kSGD) {
          const auto* sum = reinterpret_cast<const W*>(received.codes);
          const int64_t end = std::min(last * kBlock, bucket.numel);
          for_each_run(segment, sizeof(T), first * kBlock, end, kPiece, [&](char* data, int64_t at, int64_t n) {
            Sums unwanted;
            LOCALSGD_LOOP(land_sum_run, sum + at, divisor, outer, a + at, m == nullptr ? m : m + at, reinterpret_cast<T*>(data), n,
                          measure && at < bucket.drift_numel ? partial[piece] : unwanted);
          });
          return;
        }
      }
      for (int64_t block = first; block < last; ++block) {
        const int64_t begin = block * kBlock, end = std::min(begin + kBlock, bucket.numel);
        const auto [from, scale] = parts_of<kCode>(received.codes, chunks, block);
        alignas(32) W progress[kBlock];
        if (!received.values) {
          mean_block<kCode>(from, scale, received.parts, received.count * chunks.nbytes, divisor, progress);
        }
        for_each_run(segment, sizeof(T), begin, end, kBlock, [&](char* data, int64_t at, int64_t n) {
          auto* x = reinterpret_cast<T*>(data);
          W *d = progress + (at - begin), mean[kBlock];
          if (received.values) {
            LOCALSGD_LOOP(progress_run<T>, reinterpret_cast<const W*>(from) + (at - begin), divisor, a + at, mean, d, n);
          } else if (measure) {
            LOCALSGD_LOOP(mean_run<T>, d, a + at, mean, n);
          }
          // Parameters come first in a bucket, and a segment is all parameter or all buffer.
          if (measure && at < bucket.drift_numel) LOCALSGD_LOOP(measure_run, x, mean, n, partial[piece]);
          LOCALSGD_LOOP(land_run, d, outer, a + at, m == nullptr ? m : m + at, x, n);
        });
      }
    });
  });
  return folded(partial);
}

}  // namespace localsgd::cpu
