#include <torch/csrc/utils/pybind.h>

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "pipeline.h"

namespace py = pybind11;
using localsgd::BoundBucket;
using localsgd::Sums;

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  py::class_<BoundBucket>(module, "BoundBucket")
      .def(py::init<const std::vector<at::Tensor>&, const std::vector<std::tuple<int64_t, int64_t, int64_t>>&, at::Tensor, int64_t,
                    bool>(),
           py::arg("flats"), py::arg("segments"), py::arg("buffer"), py::arg("drift_numel"), py::arg("follow"))
      .def_property_readonly("buffer", &BoundBucket::buffer)
      .def("pack", &BoundBucket::pack, py::call_guard<py::gil_scoped_release>())
      .def(
          "apply",
          [](BoundBucket& self, int64_t divisor) {
            Sums sums;
            {
              py::gil_scoped_release release;
              self.apply(divisor, sums);
            }
            return std::make_pair(sums.distance_sq, sums.mean_sq);
          },
          py::arg("divisor"));
  module.def(
      "average",
      [](const std::vector<BoundBucket*>& buckets, int64_t slots, const c10::intrusive_ptr<c10d::ProcessGroup>& group) {
        Sums sums;
        {
          py::gil_scoped_release release;
          sums = localsgd::average(buckets, slots, group);
        }
        return std::make_pair(sums.distance_sq, sums.mean_sq);
      },
      py::arg("buckets"), py::arg("slots"), py::arg("group"));
}
