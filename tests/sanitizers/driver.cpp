// Test only: the CPU kernels and, emulated, the CUDA kernels on random buckets, against a plain loop. Every tensor and every
// staging buffer is a heap allocation of just its size, so that AddressSanitizer sees the first byte beyond it.
//
//   driver cpu|cuda|cpu-coded|cuda-coded SEED COUNT [short|odd]
//
// `short` and `odd` do something wrong: tensors one element shorter than the bucket says, or at an odd address.
#include <ATen/Parallel.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <iterator>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <vector>

#include "../../csrc/cuda/kernels.cuh"
#include "../../csrc/kernels.h"
#include "coded.h"
#include "random.h"

// Fibers and fake stacks do not mix. Leaks are not looked for: that needs ptrace, which containers may forbid.
extern "C" const char* __asan_default_options() { return "detect_stack_use_after_return=0:detect_leaks=0"; }
extern "C" const char* __ubsan_default_options() { return "print_stacktrace=1"; }

namespace {

// One bucket through pack and apply, for tensors of type T on a wire of type Wire.
template <typename T, typename Wire>
void run_bucket() {
  using W = std::conditional_t<std::is_same_v<Wire, double>, double, float>;
  constexpr bool kSame = std::is_same_v<T, Wire>, kCopies = std::is_same_v<T, uint8_t>;
  constexpr auto kType = c10::CppTypeToScalarType<T>::value, kWire = c10::CppTypeToScalarType<Wire>::value;
  constexpr auto kSize = static_cast<int64_t>(sizeof(T));
  const Content content = kCopies ? Content::kBytes : static_cast<Content>(below(kSame ? 4 : 3));
  const int64_t divisors[] = {1, 2, 3, 7};
  const int64_t divisor = content == Content::kBytes ? 1 : divisors[below(4)];
  // Slow on fibers.
  const bool measure = content != Content::kBytes && below(on_cuda ? 6 : 2) == 0;

  const Tensors<T> tensors(content);
  const Bucket bucket = tensors.bucket();
  const int64_t numel = bucket.numel, drift_numel = bucket.drift_numel;
  const std::vector<char>& original = tensors.original;
  const Memory staging(numel * sizeof(Wire), below(32 / sizeof(Wire)) * sizeof(Wire));

  std::vector<char> bytes;
  cuda::DeviceTable table{};
  if (on_cuda) {
    cuda_on_cpu::machine.seed = rng();
    bytes = cuda::build_table(bucket, sizeof(T));
    bytes.shrink_to_fit();
    table = cuda::table_at(bytes.data(), bytes.size());
    cuda_on_cpu::machine.readable = tensors.readable();
    cuda::pack(table, kType, kWire, staging.data(), nullptr);
  } else {
    at::set_num_threads(static_cast<int>(1 + below(3)));
    cpu::pack(bucket, kType, kWire, staging.data());
  }
  std::vector<char> expected(numel * sizeof(Wire));
  for (int64_t i = 0; i < numel; ++i) {
    if constexpr (kSame) put(expected.data(), i, get<T>(original.data(), i));
    if constexpr (!kSame) put(expected.data(), i, static_cast<Wire>(get<T>(original.data(), i)));
  }
  check(std::equal(expected.begin(), expected.end(), staging.data()), "pack differs from the plain loop");

  // What the collective leaves; the means are integers if all else is.
  fill<Wire>(staging.data(), numel, content, divisor);
  std::copy_n(staging.data(), expected.size(), expected.begin());
  Sums sums;
  if (on_cuda) {
    std::vector<double> scratch(cuda::partials_numel(table), NAN), totals{3.0, 5.0};
    cuda_on_cpu::machine.readable = staging.readable();
    cuda::apply(table, kType, kWire, staging.data(), divisor, measure ? totals.data() : nullptr, measure ? scratch.data() : nullptr,
                nullptr);
    sums = {totals[0] - 3.0, totals[1] - 5.0};
  } else {
    at::set_num_threads(static_cast<int>(1 + below(3)));
    sums = cpu::apply(bucket, kType, kWire, staging.data(), divisor, measure);
  }
  check(std::equal(expected.begin(), expected.end(), staging.data()), "apply has changed the staging buffer");
  Sums plain;
  for (const Segment& segment : tensors.segments) {
    std::vector<char> result(segment.numel * kSize);
    for (int64_t i = 0; i < segment.numel; ++i) {
      const int64_t place = segment.offset + i;
      const Wire sum = get<Wire>(expected.data(), place);
      if constexpr (kCopies) {
        put(result.data(), i, sum);
      } else if (content == Content::kBytes) {
        put(result.data(), i, sum);
      } else {
        const W average = static_cast<W>(static_cast<Wire>(static_cast<W>(sum) / static_cast<W>(divisor)));
        const W difference = static_cast<W>(get<T>(original.data(), place)) - average;
        put(result.data(), i, static_cast<T>(average));
        if (!measure || place >= drift_numel) continue;
        plain.distance_sq += static_cast<double>(difference) * static_cast<double>(difference);
        plain.mean_sq += static_cast<double>(average) * static_cast<double>(average);
      }
    }
    check(std::equal(result.begin(), result.end(), segment.data), "apply differs from the plain loop");
  }
  check_sum(sums.distance_sq, plain.distance_sq, content);
  check_sum(sums.mean_sq, plain.mean_sq, content);
  tensors.check_guards();
  staging.check_guard();
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 4) return 2;
  const std::string engine = argv[1];
  on_cuda = engine.starts_with("cuda");
  const std::string wrong = argc > 4 ? argv[4] : "";
  fault = wrong == "short" ? Fault::kShort : wrong == "odd" ? Fault::kOdd : Fault::kNone;
  std::vector<void (*)()> kinds{run_bucket<c10::Half, float>,
                                run_bucket<c10::BFloat16, float>,
                                run_bucket<float, float>,
                                run_bucket<double, double>,
                                run_bucket<c10::Half, c10::Half>,
                                run_bucket<uint8_t, uint8_t>,
                                run_bucket<c10::BFloat16, c10::BFloat16>};
  if (engine.ends_with("-coded")) kinds = coded_kinds();
  const uint64_t seed = std::stoull(argv[2]), count = std::stoull(argv[3]);
  for (uint64_t i = seed; i < seed + count; ++i) {
    try {
      rng.seed(i);
      kinds[i % kinds.size()]();
    } catch (const std::exception& error) {
      std::fprintf(stderr, "%s; run again with: %s %llu 1\n", error.what(), argv[1], static_cast<unsigned long long>(i));
      return 1;
    }
  }
  std::printf("%llu buckets\n", static_cast<unsigned long long>(count));
}
