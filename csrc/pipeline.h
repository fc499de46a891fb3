// One averaging: buckets packed, sent and copied back in a pipeline of asynchronous collectives.
#pragma once

#include <vector>

#include "exchange.h"

namespace localsgd {

// Averages all buckets over the group, each in its own time in its staging buffer, which others share. Gives the sums of `finish`
// over all of them. Throws what a collective or `watch` throws; every element then holds its local or its averaged value, but the
// staging buffers may still be written to. All ranks start the same collectives in the same order.
at::Tensor average(const std::vector<Exchange*>& buckets, const GroupPtr& group, const Terms& terms);

}  // namespace localsgd
