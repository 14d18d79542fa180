// The mean of quantised parts with error feedback, through owners. Unlike in direct_mean, sums are float32 whatever the
// bucket's dtype; what the owner's message leaves out of a sum goes into the owner's own residual, where it weighs
// exactly what it lacks: a rank's residual is a part of the sum; and all ranks learn whether everything was finite. A
// message that was not becomes NaN.
//
// Each stream begins with an opening (which parameters the sender used) and ends with a closing (whether all that it
// pushed, was pushed and answered was finite).
#pragma once

#include <span>
#include <utility>
#include <vector>

#include "exchange/owners.hpp"
#include "quantisers/codec.hpp"

namespace gradwire::exchange {

// What one rank brings to the reduction of one bucket.
struct QuantisedBucket {
  Values gradient;                  // the mean is written over it
  std::span<const float> residual;  // empty for none
  std::span<float> unsent;          // the new residual; another place than the old one, which stays; empty for none
  float residual_scale;             // what the gradient is multiplied by and the residuals are not
  std::vector<std::pair<std::size_t, std::size_t>> spans;  // where each parameter lies; those of all ranks are alike
  // For each parameter, whether this rank has a gradient of it. What is not used counts as zero, exactly.
  std::vector<bool> is_used;
  std::size_t n_chunks;              // of a part; each is a message
  std::vector<std::uint64_t> draws;  // by part, then chunk: what this rank's message of it draws by
  bool pulls_raw;                    // the owners' sums travel in the gradient's dtype instead of through the codec
};

// The same on all ranks.
struct QuantisedResult {
  std::vector<bool> is_used_by_any;  // for each parameter; where none did, the mean is zero
  bool is_finite;                    // all values of all ranks, and their sums
};

// Replaces the gradient by the mean over at least two ranks.
QuantisedResult quantised_mean(wire::Mesh& mesh, const Ticket& ticket, const quantisers::Options& options,
                               const QuantisedBucket& bucket, Account& account);

}  // namespace gradwire::exchange
