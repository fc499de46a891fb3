#include "value_bucket.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>

#include <utility>

#include "kernels.h"
#ifdef LOCALSGD_CUDA
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include "cuda/kernels.cuh"
#endif

namespace localsgd {

ValueBucket::ValueBucket(const std::vector<at::Tensor>& flats, const SegmentList& segments, at::Tensor buffer, int64_t drift_numel,
                         bool follow)
    : Exchange(flats, segments, buffer, buffer.numel(), drift_numel), follow_(follow) {
#ifdef LOCALSGD_CUDA
  if (staging_.is_cpu()) return;
  const c10::cuda::CUDAGuard guard(device());
  std::vector<char> table = cuda::build_table(bucket(), c10::elementSize(dtype_));
  const auto bytes = static_cast<int64_t>(table.size());
  table_ = at::empty({bytes}, staging_.options().dtype(at::kByte));
  // Not in the background: `table` is gone after this.
  table_.copy_(at::from_blob(table.data(), {bytes}, at::kByte));
  partials_ =
      at::empty({cuda::partials_numel(cuda::table_at(table_.data_ptr(), table.size()))}, staging_.options().dtype(at::kDouble));
#endif
}

void ValueBucket::pack() {
#ifdef LOCALSGD_CUDA
  if (staging_.is_cuda()) {
    const c10::cuda::CUDAGuard guard(device());
    return cuda::pack(cuda::table_at(table_.data_ptr(), table_.numel()), dtype_, staging_.scalar_type(), staging_.data_ptr(),
                      c10::cuda::getCurrentCUDAStream());
  }
#endif
  cpu::pack(bucket(), dtype_, staging_.scalar_type(), staging_.data_ptr());
}

void ValueBucket::apply(int64_t divisor, const at::Tensor& sums) {
  const bool measure = drift_numel_ > 0;
  double* into = sums.data_ptr<double>();
#ifdef LOCALSGD_CUDA
  if (staging_.is_cuda()) {
    const c10::cuda::CUDAGuard guard(device());
    return cuda::apply(cuda::table_at(table_.data_ptr(), table_.numel()), dtype_, staging_.scalar_type(), staging_.data_ptr(),
                       divisor, measure ? into : nullptr, partials_.data_ptr<double>(), c10::cuda::getCurrentCUDAStream());
  }
#endif
  const Sums own = cpu::apply(bucket(), dtype_, staging_.scalar_type(), staging_.data_ptr(), divisor, measure);
  into[0] += own.distance_sq;
  into[1] += own.mean_sq;
}

WorkPtr ValueBucket::start(const GroupPtr& group, const Terms& terms) {
  if (terms.contributes || follow_) {
    pack();
  } else {
    staging_.zero_();
  }
  std::vector<at::Tensor> tensors{staging_};
  if (!follow_) return group->allreduce(tensors, terms.options<c10d::AllreduceOptions>());
  auto options = terms.options<c10d::BroadcastOptions>();
  options.rootRank = terms.root;
  return group->broadcast(tensors, options);
}

void ValueBucket::finish(const GroupPtr& group, const Terms& terms, const at::Tensor& sums) {
  if (!follow_) {
    apply(terms.divisor, sums);
  } else if (group->getRank() != terms.root) {
    apply(1, sums);
  }
}

}  // namespace localsgd
