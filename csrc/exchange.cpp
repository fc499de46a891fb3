#include "exchange.h"

#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>

#include <utility>

namespace localsgd {

Exchange::Exchange(const std::vector<at::Tensor>& flats, const SegmentList& segments, at::Tensor staging, int64_t numel,
                   int64_t drift_numel)
    : staging_(std::move(staging)), dtype_(staging_.scalar_type()), numel_(numel), drift_numel_(drift_numel) {
  segments_.reserve(segments.size());
  int64_t offset = 0;
  for (const auto& [index, start, length] : segments) {
    const at::Tensor& flat = flats.at(index);
    // An empty segment would have no place of its own: `segment_at` finds segments by where they begin.
    TORCH_CHECK(flat.is_contiguous() && start >= 0 && length > 0 && start + length <= flat.numel(),
                "localsgd_ext: segment outside its tensor");
    TORCH_CHECK(flat.device() == staging_.device() && (segments_.empty() || flat.scalar_type() == dtype_),
                "localsgd_ext: the tensors of a bucket differ in device or dtype");
    dtype_ = flat.scalar_type();
    segments_.push_back({static_cast<char*>(flat.data_ptr()) + start * flat.element_size(), offset, length});
    flats_.push_back(flat);
    offset += length;
  }
  TORCH_CHECK(offset == numel && staging_.is_contiguous(), "localsgd_ext: segments do not fill their bucket");
#ifdef LOCALSGD_CUDA
  TORCH_CHECK(staging_.is_cpu() || staging_.is_cuda(), "localsgd_ext: no kernels for ", staging_.device());
#else
  TORCH_CHECK(staging_.is_cpu(), "localsgd_ext: this build has no kernels for ", staging_.device());
#endif
}

at::Tensor Exchange::new_sums() const { return at::zeros({2}, staging_.options().dtype(at::kDouble)); }

}  // namespace localsgd
