#include <pybind11/functional.h>
#include <torch/csrc/utils/pybind.h>

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "pipeline.h"

namespace py = pybind11;
using localsgd::BoundBucket;

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  py::class_<BoundBucket>(module, "BoundBucket")
      .def(py::init<const std::vector<at::Tensor>&, const std::vector<std::tuple<int64_t, int64_t, int64_t>>&, at::Tensor, int64_t,
                    bool>(),
           py::arg("flats"), py::arg("segments"), py::arg("buffer"), py::arg("drift_numel"), py::arg("follow"))
      .def_property_readonly("buffer", &BoundBucket::buffer)
      .def_property_readonly("follow", &BoundBucket::follow)
      .def("pack", &BoundBucket::pack, py::call_guard<py::gil_scoped_release>())
      .def(
          "apply",
          [](BoundBucket& self, int64_t divisor) {
            const py::gil_scoped_release release;
            at::Tensor sums = self.new_sums();
            self.apply(divisor, sums);
            return sums;
          },
          py::arg("divisor"));
  module.def(
      "average",
      [](const std::vector<BoundBucket*>& buckets, int64_t slots, const c10::intrusive_ptr<c10d::ProcessGroup>& group,
         bool contributes, int64_t divisor, int64_t root, const std::function<void()>& watch, int64_t poll_ms, int64_t timeout_ms) {
        const py::gil_scoped_release release;
        return localsgd::average(
            buckets, slots, group,
            {contributes, divisor, root, watch, std::chrono::milliseconds(poll_ms), std::chrono::milliseconds(timeout_ms)});
      },
      py::arg("buckets"), py::arg("slots"), py::arg("group"), py::arg("contributes"), py::arg("divisor"), py::arg("root"),
      py::arg("watch"), py::arg("poll_ms"), py::arg("timeout_ms"));
#ifdef LOCALSGD_CUDA
  module.attr("cuda") = true;
#else
  module.attr("cuda") = false;
#endif
}
