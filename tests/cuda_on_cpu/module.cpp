// Test only: the kernels of csrc/cuda, run on the CPU, and kernels with mistakes that the emulation must notice.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <map>
#include <string>
#include <utility>
#include <vector>

#include "../../csrc/cuda/coded.cuh"
#include "../../csrc/cuda/kernels.cuh"
#include "../../csrc/cuda/launch.h"

namespace py = pybind11;
using namespace localsgd;

namespace {

c10::ScalarType type(const std::string& name) {
  if (name == "float32") return c10::ScalarType::Float;
  if (name == "float64") return c10::ScalarType::Double;
  if (name == "float16") return c10::ScalarType::Half;
  if (name == "bfloat16") return c10::ScalarType::BFloat16;
  if (name == "uint8") return c10::ScalarType::Byte;
  throw std::invalid_argument(name);
}

using Placed = std::vector<std::pair<uintptr_t, int64_t>>;  // (address, elements)

std::vector<Segment> segments_of(const Placed& placed) {
  std::vector<Segment> segments;
  int64_t offset = 0;
  for (const auto& [address, numel] : placed) {
    segments.push_back({reinterpret_cast<char*>(address), offset, numel});
    offset += numel;
  }
  return segments;
}

Bucket bucket_of(const std::vector<Segment>& segments, int64_t drift_numel) {
  const int64_t numel = segments.empty() ? 0 : segments.back().offset + segments.back().numel;
  return {segments.data(), static_cast<int64_t>(segments.size()), numel, drift_numel};
}

// A bucket of (address, elements) whose tensors are of `itemsize` bytes, with its table where the device's would be.
class EmulatedBucket {
 public:
  EmulatedBucket(const Placed& placed, int64_t drift_numel, const std::string& dtype, const std::string& wire)
      : dtype_(type(dtype)), wire_(type(wire)) {
    for (const auto& [address, numel] : placed) tensors_[address] = address + numel * c10::elementSize(dtype_);
    const std::vector<Segment> segments = segments_of(placed);
    const Bucket bucket = bucket_of(segments, drift_numel);
    staging_bytes_ = bucket.numel * c10::elementSize(wire_);
    bytes_ = cuda::build_table(bucket, c10::elementSize(dtype_));
  }

  int64_t partials_numel() const { return cuda::partials_numel(table()); }

  void pack(uintptr_t staging) const {
    cuda_on_cpu::machine.readable = tensors_;
    cuda::pack(table(), dtype_, wire_, reinterpret_cast<void*>(staging), nullptr);
  }

  void apply(uintptr_t staging, int64_t divisor, uintptr_t sums, uintptr_t partials) const {
    cuda_on_cpu::machine.readable = {{staging, staging + staging_bytes_}};
    cuda::apply(table(), dtype_, wire_, reinterpret_cast<const void*>(staging), divisor, reinterpret_cast<double*>(sums),
                reinterpret_cast<double*>(partials), nullptr);
  }

 private:
  cuda::DeviceTable table() const { return cuda::table_at(bytes_.data(), bytes_.size()); }

  std::vector<char> bytes_;
  std::map<uintptr_t, uintptr_t> tensors_;
  int64_t staging_bytes_;
  c10::ScalarType dtype_, wire_;
};

// Likewise for a bucket of codes.
class EmulatedCodedBucket {
 public:
  EmulatedCodedBucket(const Placed& placed, int64_t drift_numel, const std::string& dtype, int code, int64_t count, int64_t blocks,
                      int64_t nbytes, bool summed, int kind, double lr, double momentum, bool nesterov)
      : dtype_(type(dtype)),
        chunks_{static_cast<Code>(code), blocks, nbytes},
        count_(count),
        summed_(summed),
        outer_{static_cast<OuterKind>(kind), lr, momentum, nesterov} {
    const std::vector<Segment> segments = segments_of(placed);
    sizes_ = bucket_of(segments, drift_numel);
    bytes_ = cuda::build_coded_table(sizes_);
    sizes_.segments = nullptr;
  }

  int64_t partials_numel() const { return cuda::partials_numel(table()); }

  void encode(bool contributes, int64_t divisor, uintptr_t anchor, uintptr_t residual, uintptr_t codes) const {
    cuda::encode(table(), dtype_, chunks_, count_, contributes, divisor, reinterpret_cast<const void*>(anchor),
                 reinterpret_cast<void*>(residual), reinterpret_cast<char*>(codes), nullptr);
  }

  void reduce(int64_t parts, uintptr_t received, int64_t divisor, uintptr_t residual, int64_t numel, uintptr_t codes) const {
    cuda_on_cpu::machine.readable = {{received, received + parts * chunks_.nbytes}};
    cuda::reduce(dtype_, chunks_, parts, reinterpret_cast<const char*>(received), divisor, reinterpret_cast<void*>(residual), numel,
                 reinterpret_cast<char*>(codes), nullptr);
  }

  void land(int64_t parts, uintptr_t received, int64_t divisor, uintptr_t anchor, uintptr_t momentum, uintptr_t sums,
            uintptr_t partials) const {
    cuda_on_cpu::machine.readable = {{received, received + parts * count_ * chunks_.nbytes}};
    cuda::land(table(), dtype_, chunks_, {reinterpret_cast<const char*>(received), count_, parts, divisor, summed_}, outer_,
               reinterpret_cast<void*>(anchor), reinterpret_cast<void*>(momentum), reinterpret_cast<double*>(sums),
               reinterpret_cast<double*>(partials), nullptr);
  }

 private:
  cuda::CodedTable table() const { return cuda::coded_table_at(bytes_.data(), sizes_); }

  std::vector<char> bytes_;
  c10::ScalarType dtype_;
  Chunks chunks_;
  int64_t count_;
  bool summed_;
  Outer outer_;
  Bucket sizes_;
};

constexpr int kToyThreads = 64;

// Reverses 64 numbers by way of shared memory.
void reverse_kernel(const int* from, int* to) {
  __shared__ int shared[kToyThreads];
  const int i = static_cast<int>(threadIdx.x);
  shared[i] = from[i];
  __syncthreads();
  to[i] = shared[kToyThreads - 1 - i];
}

void reverse_without_barrier_kernel(const int* from, int* to) {
  __shared__ int shared[kToyThreads];
  const int i = static_cast<int>(threadIdx.x);
  shared[i] = from[i];
  to[i] = shared[kToyThreads - 1 - i];
}

// Half of the block exits; the others meet at barriers and shuffles all the same.
void early_exit_kernel(const int* from, int* to) {
  const int i = static_cast<int>(threadIdx.x);
  if (i % 2 == 1) return;
  __syncthreads();
  to[i] = __shfl_down_sync(0x55555555u, from[i], 2);
}

// The two halves of the block wait at different barriers.
void split_barrier_kernel(const int*, int*) {
  if (threadIdx.x < kToyThreads / 2) {
    __syncthreads();
  } else {
    __syncthreads();
  }
}

// Lane 0 stays away from a shuffle that names it, and waits at a barrier.
void absent_lane_kernel(const int* from, int* to) {
  if (threadIdx.x % 32 != 0) to[threadIdx.x] = __shfl_xor_sync(0xffffffffu, from[threadIdx.x], 1);
  __syncthreads();
}

// A vector load one element past an aligned address.
void misaligned_kernel(const int* from, int* to) {
  to[threadIdx.x] = static_cast<int>(__ldg(reinterpret_cast<const uint4*>(from + 1)).x);
}

std::vector<int> run_toy(const std::string& name, const std::vector<int>& values) {
  std::vector<int> result(kToyThreads, -1);
  cuda_on_cpu::machine.readable.clear();
  const auto run = [&](void (*kernel)(const int*, int*)) {
    cuda::launch(kernel, 1, kToyThreads, nullptr, values.data(), result.data());
  };
  if (values.size() != kToyThreads) throw std::invalid_argument("64 values");
  if (name == "reverse") run(reverse_kernel);
  if (name == "reverse without barrier") run(reverse_without_barrier_kernel);
  if (name == "early exit") run(early_exit_kernel);
  if (name == "split barrier") run(split_barrier_kernel);
  if (name == "absent lane") run(absent_lane_kernel);
  if (name == "misaligned") run(misaligned_kernel);
  return result;
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  module.def("seed", [](uint64_t seed) { cuda_on_cpu::machine.seed = seed; });
  module.def("run_toy", &run_toy);
  module.attr("PIECE_BYTES") = cuda::kPieceBytes;
  py::class_<EmulatedBucket>(module, "Bucket")
      .def(py::init<const Placed&, int64_t, const std::string&, const std::string&>(), py::arg("segments"), py::arg("drift_numel"),
           py::arg("dtype"), py::arg("wire"))
      .def_property_readonly("partials_numel", &EmulatedBucket::partials_numel)
      .def("pack", &EmulatedBucket::pack, py::arg("staging"))
      .def("apply", &EmulatedBucket::apply, py::arg("staging"), py::arg("divisor"), py::arg("sums"), py::arg("partials"));
  py::class_<EmulatedCodedBucket>(module, "CodedBucket")
      .def(py::init<const Placed&, int64_t, const std::string&, int, int64_t, int64_t, int64_t, bool, int, double, double, bool>(),
           py::arg("segments"), py::arg("drift_numel"), py::arg("dtype"), py::arg("code"), py::arg("count"), py::arg("blocks"),
           py::arg("nbytes"), py::arg("summed"), py::arg("kind"), py::arg("lr"), py::arg("momentum"), py::arg("nesterov"))
      .def_property_readonly("partials_numel", &EmulatedCodedBucket::partials_numel)
      .def("encode", &EmulatedCodedBucket::encode, py::arg("contributes"), py::arg("divisor"), py::arg("anchor"),
           py::arg("residual"), py::arg("codes"))
      .def("reduce", &EmulatedCodedBucket::reduce, py::arg("parts"), py::arg("received"), py::arg("divisor"), py::arg("residual"),
           py::arg("numel"), py::arg("codes"))
      .def("land", &EmulatedCodedBucket::land, py::arg("parts"), py::arg("received"), py::arg("divisor"), py::arg("anchor"),
           py::arg("momentum"), py::arg("sums"), py::arg("partials"));
}
