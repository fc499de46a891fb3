#include "coded_bucket.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>

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
                         Chunks chunks, int64_t count, StatePart anchor, StatePart residual, int64_t rank, int64_t size)
    : Exchange(flats, segments, staging, anchor.here().numel(), drift_numel),
      chunks_(chunks),
      count_(count),
      anchor_(std::move(anchor)),
      residual_(std::move(residual)),
      rank_(rank),
      size_(size) {
  const int64_t nbytes = count * chunks.nbytes;
  TORCH_CHECK(staging_.numel() >= 2 * nbytes && residual_.here().numel() == numel_ && count * chunks.blocks * kBlock >= numel_,
              "localsgd_ext: the buffers do not fit their bucket");
  if (count == 1) {
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
  table_.copy_(at::from_blob(table.data(), {bytes}, at::kByte));
#endif
}

WorkPtr CodedBucket::start(const GroupPtr& group, const Terms& terms) {
  if (terms.contributes) {
    const void* anchor = anchor_.fetch();
    void* residual = residual_.fetch();
    cpu::encode(bucket(), dtype_, chunks_, count_, anchor, residual, static_cast<char*>(mine_.data_ptr()));
    residual_.store();
  } else {
    mine_.zero_();  // zeros in every code
  }
  return all_to_all(*group, theirs_, mine_, terms);
}

WorkPtr CodedBucket::advance(const GroupPtr& group, const Terms& terms) {
  if (count_ == 1) return {};
  const int64_t begin = std::min(rank_ * chunks_.blocks * kBlock, numel_);
  auto* residual = static_cast<char*>(residual_.fetch()) + begin * residual_.here().element_size();
  cpu::reduce(dtype_, chunks_, size_, static_cast<const char*>(received_.data_ptr()), terms.divisor, residual,
              std::min(chunks_.blocks * kBlock, numel_ - begin), static_cast<char*>(mine_.data_ptr()));
  residual_.store();
  const at::Tensor chunk = mine_.narrow(0, 0, chunks_.nbytes);
  // NCCL knows which ranks share a machine, and sends a part only once between machines. Gloo is fastest at all-to-alls.
  if (!mine_.is_cpu()) return all_gather(*group, received_, chunk, terms);
  for (int64_t other = 1; other < size_; ++other) mine_.narrow(0, other * chunks_.nbytes, chunks_.nbytes).copy_(chunk);
  return all_to_all(*group, received_, mine_, terms);
}

void CodedBucket::finish(const GroupPtr&, const Terms& terms, const at::Tensor& sums) {
  // Either both ranks' codes, or the sums that each rank has encoded of its chunk.
  const int64_t parts = count_ == 1 ? size_ : 1, divisor = count_ == 1 ? terms.divisor : 1;
  const bool measure = drift_numel_ > 0;
  double* into = sums.data_ptr<double>();
  void* anchor = anchor_.fetch();
  const Sums own =
      cpu::land(bucket(), dtype_, chunks_, count_, parts, static_cast<const char*>(received_.data_ptr()), divisor, anchor, measure);
  into[0] += own.distance_sq;
  into[1] += own.mean_sq;
  anchor_.store();
}

}  // namespace localsgd
