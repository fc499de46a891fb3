// Where each tensor lies in a bucket: plain structs, shared by host and device.
#pragma once

#include <cstdint>

namespace localsgd {

// `numel` elements at `data`, found at element `offset` of the bucket. Segments of a bucket follow each other without gaps.
struct Segment {
  char* data;
  int64_t offset;
  int64_t numel;
};

// What travels in one collective. The first `drift_numel` elements are parameters and count in the drift.
struct Bucket {
  const Segment* segments;
  int64_t count;
  int64_t numel;
  int64_t drift_numel;
};

// ||local - mean||^2 and ||mean||^2 over the parameters of a bucket.
struct Sums {
  double distance_sq = 0.0;
  double mean_sq = 0.0;
};

}  // namespace localsgd
