#include <algorithm>
#include <bit>
#include <cmath>

#include "quantisers/rotation.hpp"

namespace gradwire::quantisers {
namespace {

void draw_signs(const random::Stream& stream, std::uint64_t block, Signs& signs) {
  for (std::size_t lane = 0; lane < 8; ++lane) {
    const random::Words words = random::words_at(stream, 8 * block + lane);
    for (std::size_t word = 0; word < 4; ++word) signs[8 * word + lane] = words[word];
  }
}

void flip(float* values, std::size_t size, const Signs& signs) {
  for (std::size_t i = 0; i < size; ++i) {
    const std::uint32_t sign = (signs[i / 32] >> i % 32 & 1) << 31;
    values[i] = std::bit_cast<float>(std::bit_cast<std::uint32_t>(values[i]) ^ sign);
  }
}

void transform(float* values, std::size_t size) {
  for (std::size_t half = 1; half < size; half *= 2)
    for (std::size_t begin = 0; begin < size; begin += 2 * half)
      for (std::size_t i = begin; i < begin + half; ++i) {
        const float a = values[i], b = values[i + half];
        values[i] = a + b;
        values[i + half] = a - b;
      }
  const float factor = 1.0f / std::sqrt(static_cast<float>(size));
  for (std::size_t i = 0; i < size; ++i) values[i] *= factor;
}

void rotate(float* values, std::size_t size, const Signs& signs) {
  flip(values, size, signs);
  transform(values, size);
}

void unrotate(float* values, std::size_t size, const Signs& signs) {
  transform(values, size);
  flip(values, size, signs);
}

void quantise(const float* values, std::size_t size, float per_unit, const random::Stream& stream, std::uint64_t group,
              Fields fields, std::uint8_t* codes) {
  for (std::size_t begin = 0; begin < size; begin += kGroup, ++group) {
    std::uint32_t numbers[kGroup];
    random::draw(stream, group, numbers);
    std::uint8_t own[kGroup];
    for (std::size_t i = 0; i < kGroup; ++i) {
      const float place = values[begin + i] * per_unit + static_cast<float>(kTableMiddle);
      const float clamped = std::min(std::max(place, 0.0f), static_cast<float>(kTableLargest));
      const Interval interval = kIntervals[static_cast<std::size_t>(clamped)];
      const float fraction = static_cast<float>(static_cast<std::int32_t>(numbers[i] >> 8)) * 0x1p-24f;
      const bool up = fraction * static_cast<float>(interval.gap) < clamped - static_cast<float>(interval.low);
      own[i] = static_cast<std::uint8_t>(fields == Fields::bytes ? interval.low + (up ? interval.gap : 0)
                                                                 : interval.index + up);
    }
    if (fields == Fields::bytes)
      std::copy_n(own, kGroup, codes);
    else
      for (std::size_t i = 0; i < kGroup / 2; ++i)
        codes[i] = static_cast<std::uint8_t>(own[i] | own[kGroup / 2 + i] << 4);
    codes += bytes_for(kGroup, fields);
  }
}

float expanded(int sum, int n_ranks, float step) { return static_cast<float>(sum - kTableMiddle * n_ranks) * step; }

void expand(const std::uint8_t* codes, std::size_t size, Fields fields, float step, float* values) {
  for (std::size_t begin = 0; begin < size; begin += kGroup, codes += bytes_for(kGroup, fields))
    for (std::size_t i = 0; i < kGroup; ++i) {
      const int value = fields == Fields::bytes ? codes[i] : kTable[i < 32 ? codes[i] & 15 : codes[i - 32] >> 4];
      values[begin + i] = expanded(value, 1, step);
    }
}

template <typename Sum>
void expand_any_sums(const Sum* sums, std::size_t size, int n_ranks, float step, float* values) {
  for (std::size_t i = 0; i < size; ++i) values[i] = expanded(sums[i], n_ranks, step);
}

}  // namespace

const RotationKernels kRotationPortable = {
    draw_signs, rotate, unrotate, quantise, expand, expand_any_sums<std::uint8_t>, expand_any_sums<std::uint16_t>};

}  // namespace gradwire::quantisers
