// Importance bytes: how many low mantissa bits of each gradient cannot matter to the optimizer.
#pragma once

#include <map>
#include <optional>
#include <vector>

#include "simd/dispatch.hpp"
#include "spans.hpp"

namespace gradwire::gcomp {

// For each element S = |parameter (a sqrt(second_moment) + b) + c first_moment| in float32, every operation rounded on
// its own; out = clamp(code(S) - 348, 0, 255) with code(S) = bits(S) >> 21: exponent and two top mantissa bits, quarter
// octaves from 2^-40 to 2^24. NaN and S < 2^-40 give 0 (level 0, lossless), and so does second_moment <= 0: a step size
// that the history does not know yet.
//
// Without second_moment the factor is b alone, without first_moment the term c m is left out; all others are as long as
// `parameter`. Memory-bound: 4 to 12 bytes read and one written per element.
// Throws InvalidArgument if lengths differ.
void write_importance(ConstFloats parameter, std::optional<ConstFloats> second_moment,
                      std::optional<ConstFloats> first_moment, float a, float b, float c, Bytes out);

// ---- one tile of them: importance_loops.cpp

// code(2^-40), the largest value that still gives byte 0: 4 quarter octaves x (127 - 40).
inline constexpr int kImportanceOffset = 348;

// Null where the optimizer has no such state.
struct ImportanceTile {
  const float* parameter;
  const float* second_moment;
  const float* first_moment;
  std::uint8_t* out;
  std::size_t n_elements;
};

struct ImportanceTerms {
  float a, b, c;
};

using WriteTile = void(const ImportanceTile& tile, const ImportanceTerms& terms);
WriteTile &write_tile_at(Level<0>), &write_tile_at(Level<1>);

// The importance bytes of a whole bucket: where each parameter's terms lie, gathered once, and written for any range.

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
  // In ascending order, and apart. `mean_room`: how many quarter octaves more a mean may be off than a partial sum.
  explicit BucketImportance(std::vector<Window> windows, std::uint8_t mean_room = 0);
  std::uint8_t mean_room() const { return mean_room_; }
  // The bytes of elements [first, first + out.size()); those of no parameter are left alone.
  void write(std::size_t first, Bytes out) const;

 private:
  std::vector<Window> windows_;
  const std::uint8_t mean_room_;
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
  // Empty where they are not known. Valid until the range is written with another n. `of_mean`: of the message that
  // every rank reads.
  ConstBytes at(std::size_t first, std::size_t n, bool of_mean = false) const;

 private:
  struct Range {
    std::vector<std::uint8_t> bytes, of_mean;  // the latter only where they are others
  };
  const BucketImportance* const importance_;
  std::map<std::size_t, Range> by_first_;
};

}  // namespace gradwire::gcomp
