// The importance bytes of a whole bucket: where each parameter's terms lie, gathered once, and written for any range.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
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

// The bytes of the ranges that an exchange cuts a bucket into, each written once.
class Weights {
 public:
  // Null: no range has any.
  explicit Weights(const BucketImportance* importance) : importance_(importance) {}
  Weights(const Weights&) = delete;
  Weights& operator=(const Weights&) = delete;
  // Leaves the memory to those of later buckets.
  ~Weights();
  // Makes those of [first, first + n) known; false if there was nothing to do.
  bool write(std::size_t first, std::size_t n);
  // Empty where they are not known. Valid until the range is written with another n.
  std::span<const std::uint8_t> at(std::size_t first, std::size_t n) const;

 private:
  const BucketImportance* const importance_;
  std::map<std::size_t, std::vector<std::uint8_t>> by_first_;
};

}  // namespace gradwire::gcomp
