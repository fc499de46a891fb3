#include "coded_bucket.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/DeviceGuard.h>

#include <algorithm>
#include <utility>
#ifdef LOCALSGD_CUDA
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include "cuda/coded.cuh"
#endif

namespace localsgd {
namespace {

// Their names before torch 2.13 are given where there are no others.
template <typename Group>
WorkPtr all_to_all(Group& group, at::Tensor output, at::Tensor input, const Terms& terms) {
  std::vector<int64_t> splits;
  // Between two ranks there is only one part, of the other's.
  if (group.getSize() == 2) splits = {group.getRank() == 0 ? 0 : input.numel(), group.getRank() == 0 ? input.numel() : 0};
  std::vector<int64_t> same = splits;
  const auto options = terms.options<c10d::AllToAllOptions>();
  if constexpr (requires { group.all_to_all_single(output, input, splits, same, options); }) {
    return group.all_to_all_single(output, input, splits, same, options);
  } else {
    return group.alltoall_base(output, input, splits, same, options);
  }
}

template <typename Group>
WorkPtr all_gather(Group& group, at::Tensor output, at::Tensor input, const Terms& terms) {
  const auto options = terms.options<c10d::AllgatherOptions>();
  if constexpr (requires { group.all_gather_single(output, input, options); }) {
    return group.all_gather_single(output, input, options);
  } else {
    return group._allgather_base(output, input, options);
  }
}

}  // namespace

CodedBucket::CodedBucket(const std::vector<at::Tensor>& flats, const SegmentList& segments, at::Tensor staging, int64_t drift_numel,
                         Chunks chunks, int64_t count, bool summed, std::vector<StatePart> state, Outer outer, int64_t rank,
                         int64_t size)
    : Exchange(flats, segments, staging, state.at(0).here().value().numel(), drift_numel),
      chunks_(chunks),
      count_(count),
      summed_(summed),
      anchor_(std::move(state.at(0))),
      residual_(std::move(state.at(1))),
      momentum_(std::move(state.at(2))),
      outer_(outer),
      rank_(rank),
      size_(size) {
  const int64_t nbytes = count * chunks.nbytes;
  TORCH_CHECK(summed ? count == 1 : count == (size <= 2 ? 1 : size), "localsgd_ext: ", count, " chunks for ", size, " ranks");
  TORCH_CHECK(staging_.scalar_type() == at::kByte && staging_.numel() >= (summed ? 1 : 2) * nbytes &&
                  count * chunks.blocks * kBlock >= numel_,
              "localsgd_ext: the buffers do not fit their bucket");
  const auto wide = dtype_ == at::kDouble ? at::kDouble : at::kFloat;
  for (const StatePart* part : {&anchor_, &residual_, &momentum_}) {
    if (!part->here()) continue;
    TORCH_CHECK(part->here()->numel() == numel_ && part->here()->scalar_type() == wide && part->here()->is_contiguous(),
                "localsgd_ext: the state does not fit its bucket");
  }
  if (summed) {
    mine_ = theirs_ = received_ = staging_.narrow(0, 0, nbytes);
    sum_ = mine_.view(wide).narrow(0, 0, numel_);
    TORCH_CHECK(chunks.code == (wide == at::kDouble ? Code::kFloat64 : Code::kFloat32),
                "localsgd_ext: only a lossless code can be summed");
  } else if (count == 1) {
    received_ = staging_.narrow(0, 0, 2 * nbytes);  // both ranks' codes, in rank order
    mine_ = received_.narrow(0, rank * nbytes, nbytes);
    theirs_ = received_.narrow(0, (1 - rank) * nbytes, nbytes);
  } else {
    mine_ = staging_.narrow(0, 0, nbytes);
    received_ = theirs_ = staging_.narrow(0, nbytes, nbytes);
  }
#ifdef LOCALSGD_CUDA
  if (staging_.is_cpu()) return;
  const c10::cuda::CUDAGuard guard(device());
  std::vector<char> table = cuda::build_coded_table(bucket());
  const auto bytes = static_cast<int64_t>(table.size());
  table_ = at::empty({bytes}, staging_.options());
  // Not in the background: `table` is gone after this.
  table_.copy_(at::from_blob(table.data(), {bytes}, at::kByte));
  partials_ =
      at::empty({cuda::partials_numel(cuda::coded_table_at(table_.data_ptr(), bucket()))}, staging_.options().dtype(at::kDouble));
#endif
}

void CodedBucket::encode(const Terms& terms) {
  const void* anchor = summed_ ? nullptr : anchor_.fetch();
  void* residual = summed_ ? nullptr : residual_.fetch();
  auto* codes = static_cast<char*>(mine_.data_ptr());
#ifdef LOCALSGD_CUDA
  if (mine_.is_cuda()) {
    cuda::encode(cuda::coded_table_at(table_.data_ptr(), bucket()), dtype_, chunks_, count_, terms.contributes, terms.divisor,
                 anchor, residual, codes, c10::cuda::getCurrentCUDAStream());
  } else
#endif
  {
    cpu::encode(bucket(), dtype_, chunks_, count_, terms.contributes, terms.divisor, anchor, residual, codes);
  }
  if (!summed_) residual_.store();
}

void CodedBucket::reduce(int64_t divisor, void* residual, int64_t numel) {
  const auto* received = static_cast<const char*>(received_.data_ptr());
  auto* codes = static_cast<char*>(mine_.data_ptr());
#ifdef LOCALSGD_CUDA
  if (mine_.is_cuda()) {
    return cuda::reduce(dtype_, chunks_, size_, received, divisor, residual, numel, codes, c10::cuda::getCurrentCUDAStream());
  }
#endif
  cpu::reduce(dtype_, chunks_, size_, received, divisor, residual, numel, codes);
}

void CodedBucket::land(int64_t parts, int64_t divisor, double* sums) {
  const Received received{static_cast<const char*>(received_.data_ptr()), count_, parts, divisor, summed_};
  const bool measure = drift_numel_ > 0;
  void* anchor = anchor_.fetch();
  void* momentum = momentum_.fetch();
#ifdef LOCALSGD_CUDA
  if (mine_.is_cuda()) {
    cuda::land(cuda::coded_table_at(table_.data_ptr(), bucket()), dtype_, chunks_, received, outer_, anchor, momentum,
               measure ? sums : nullptr, partials_.data_ptr<double>(), c10::cuda::getCurrentCUDAStream());
  } else
#endif
  {
    const Sums own = cpu::land(bucket(), dtype_, chunks_, received, outer_, anchor, momentum, measure);
    sums[0] += own.distance_sq;
    sums[1] += own.mean_sq;
  }
  momentum_.store();
  if (outer_.kind != OuterKind::kGradient) anchor_.store();
}

WorkPtr CodedBucket::start(const GroupPtr& group, const Terms& terms) {
  const c10::OptionalDeviceGuard guard(device());
  if (terms.contributes || (residual_.here() && !summed_)) {
    encode(terms);
  } else {
    mine_.zero_();  // zeros in every code
  }
  if (!summed_) return all_to_all(*group, theirs_, mine_, terms);
  std::vector<at::Tensor> tensors{sum_};
  return group->allreduce(tensors, terms.options<c10d::AllreduceOptions>());
}

WorkPtr CodedBucket::advance(const GroupPtr& group, const Terms& terms) {
  if (count_ == 1) return {};
  const c10::OptionalDeviceGuard guard(device());
  const int64_t begin = std::min(rank_ * chunks_.blocks * kBlock, numel_);
  auto* residual = static_cast<char*>(residual_.fetch());
  if (residual != nullptr) residual += begin * residual_.here()->element_size();
  reduce(terms.divisor, residual, std::min(chunks_.blocks * kBlock, numel_ - begin));
  residual_.store();
  const at::Tensor chunk = mine_.narrow(0, 0, chunks_.nbytes);
  // NCCL knows which ranks share a machine, and sends a part only once between machines. Gloo is fastest at all-to-alls.
  if (!mine_.is_cpu()) return all_gather(*group, received_, chunk, terms);
  for (int64_t other = 1; other < size_; ++other) mine_.narrow(0, other * chunks_.nbytes, chunks_.nbytes).copy_(chunk);
  return all_to_all(*group, received_, mine_, terms);
}

void CodedBucket::finish(const GroupPtr&, const Terms& terms, const at::Tensor& sums) {
  const c10::OptionalDeviceGuard guard(device());
  if (summed_) {
    land(1, terms.divisor, sums.data_ptr<double>());
  } else if (count_ == 1) {
    land(size_, terms.divisor, sums.data_ptr<double>());  // both ranks' codes
  } else {
    land(1, 1, sums.data_ptr<double>());  // the means that each rank has encoded of its chunk
  }
}

}  // namespace localsgd
