#include <pybind11/functional.h>
#include <torch/csrc/utils/pybind.h>

#include <memory>
#include <optional>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <utility>

#include "coded_bucket.h"
#include "pipeline.h"
#include "value_bucket.h"

namespace py = pybind11;
using namespace localsgd;
using OptionalTensors = std::vector<std::optional<at::Tensor>>;

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  py::class_<Exchange>(module, "Exchange");
  py::class_<ValueBucket, Exchange>(module, "ValueBucket")
      .def(py::init<const std::vector<at::Tensor>&, const SegmentList&, at::Tensor, int64_t, bool>(), py::arg("flats"),
           py::arg("segments"), py::arg("buffer"), py::arg("drift_numel"), py::arg("follow"))
      .def_property_readonly("buffer", &ValueBucket::staging)
      .def_property_readonly("follow", &ValueBucket::follow)
      .def("pack", &ValueBucket::pack, py::call_guard<py::gil_scoped_release>())
      .def(
          "apply",
          [](ValueBucket& self, int64_t divisor) {
            const py::gil_scoped_release release;
            at::Tensor sums = self.new_sums();
            self.apply(divisor, sums);
            return sums;
          },
          py::arg("divisor"));
  py::class_<CodedBucket, Exchange>(module, "CodedBucket")
      .def(py::init([](const std::vector<at::Tensor>& flats, const SegmentList& segments, at::Tensor staging, int64_t drift_numel,
                       int64_t code, int64_t count, int64_t blocks, int64_t nbytes, bool summed, const OptionalTensors& homes,
                       const OptionalTensors& heres, int64_t kind, double lr, double momentum, bool nesterov, int64_t rank,
                       int64_t size) {
             std::vector<StatePart> state;
             for (size_t i = 0; i < homes.size(); ++i) state.emplace_back(homes[i], heres.at(i));
             return std::make_unique<CodedBucket>(flats, segments, staging, drift_numel,
                                                  Chunks{static_cast<Code>(code), blocks, nbytes}, count, summed, std::move(state),
                                                  Outer{static_cast<OuterKind>(kind), lr, momentum, nesterov}, rank, size);
           }),
           py::arg("flats"), py::arg("segments"), py::arg("staging"), py::arg("drift_numel"), py::arg("code"), py::arg("count"),
           py::arg("blocks"), py::arg("nbytes"), py::arg("summed"), py::arg("homes"), py::arg("heres"), py::arg("kind"),
           py::arg("lr"), py::arg("momentum"), py::arg("nesterov"), py::arg("rank"), py::arg("size"));
  module.def(
      "average",
      [](const std::vector<Exchange*>& buckets, const GroupPtr& group, bool contributes, int64_t divisor, int64_t root,
         const std::function<void()>& watch, int64_t poll_ms, int64_t timeout_ms) {
        // `watch` is called, copied and freed without the lock: pybind11's wrapper of it takes the lock each time.
        const py::gil_scoped_release release;
        return average(
            buckets, group,
            {contributes, divisor, root, watch, std::chrono::milliseconds(poll_ms), std::chrono::milliseconds(timeout_ms)});
      },
      py::arg("buckets"), py::arg("group"), py::arg("contributes"), py::arg("divisor"), py::arg("root"), py::arg("watch"),
      py::arg("poll_ms"), py::arg("timeout_ms"));
#ifdef LOCALSGD_CUDA
  module.attr("cuda") = true;
#else
  module.attr("cuda") = false;
#endif
}
