// The importance bytes of a whole bucket: where each parameter's terms lie, gathered once, and written for any range.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace gradwire::gcomp {

// One parameter, at `offset` of the bucket: S = |parameter (a sqrt(second_moment) + b) + c first_moment|, where either
// moment may be null; or, where `ready` is not null, bytes that somebody else has written.
struct Window {
  std::size_t offset, n;
  const float *parameter, *second_moment, *first_moment;
  float a, b, c;
  const std::uint8_t* ready;
};

class BucketImportance {
 public:
  // In ascending order, and apart. Throws InvalidArgument.
  explicit BucketImportance(std::vector<Window> windows);
  // The bytes of elements [first, first + out.size()); those of no parameter are left alone.
  void write(std::size_t first, std::span<std::uint8_t> out) const;

 private:
  std::vector<Window> windows_;
};

}  // namespace gradwire::gcomp
