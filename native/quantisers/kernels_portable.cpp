#include <algorithm>

#include "quantisers/kernels.hpp"
#include "quantisers/value_loops.hpp"
#include "simd/dispatch.hpp"

namespace gradwire::quantisers {
namespace {

Magnitudes magnitudes(const Terms& terms, std::size_t n) {
  MagnitudeLanes lanes;
  lanes.add(terms, n);
  return lanes.result();
}

Squares squares(const float* values, std::size_t n) {
  SquareLanes lanes;
  lanes.add(values, n);
  return lanes.result();
}

void keep(const LeftOut& left_out, std::size_t i, float term, float decoded) {
  if (left_out.out != nullptr) left_out.out[i] = (term - decoded) * left_out.inverse_scale;
}

void pack_signs(const Terms& terms, std::size_t n, float positive, float negative, const LeftOut& left_out,
                std::uint32_t* words) {
  for (std::size_t begin = 0; begin < n; begin += 32) {
    const std::size_t count = std::min<std::size_t>(32, n - begin);
    std::uint32_t word = 0;
    for (std::size_t i = 0; i < count; ++i) {
      const float term = terms[begin + i];
      word |= std::uint32_t{term < 0} << i;
      keep(left_out, begin + i, term, term < 0 ? negative : positive);
    }
    *words++ = word;
  }
}

void unpack_signs(const std::uint32_t* words, std::size_t n, float positive, float negative, float* out) {
  for (std::size_t i = 0; i < n; ++i) out[i] = words[i / 32] >> i % 32 & 1 ? negative : positive;
}

void pack_beyond(const Terms& terms, std::size_t n, float threshold, const LeftOut& left_out, std::uint32_t* words) {
  for (std::size_t begin = 0; begin < n; begin += 16) {
    const std::size_t count = std::min<std::size_t>(16, n - begin);
    std::uint32_t word = 0;
    for (std::size_t i = 0; i < count; ++i) {
      const float value = terms[begin + i];
      // A threshold of zero belongs to values that are all zero; those are sent as zeros.
      const std::uint32_t code = value >= threshold && value > 0 ? 1 : value <= -threshold && value < 0 ? 2 : 0;
      word |= code << 2 * i;
      keep(left_out, begin + i, value, code == 1 ? threshold : code == 2 ? -threshold : 0.0f);
    }
    *words++ = word;
  }
}

void pack_nearest(const Terms& terms, std::size_t n, float inner, float outer, const LeftOut& left_out,
                  std::uint32_t* words) {
  const float decoded[4] = {inner, outer, -inner, -outer}, limit = boundary(inner, outer);
  for (std::size_t begin = 0; begin < n; begin += 16) {
    const std::size_t count = std::min<std::size_t>(16, n - begin);
    std::uint32_t word = 0;
    for (std::size_t i = 0; i < count; ++i) {
      const float value = terms[begin + i], magnitude = std::bit_cast<float>(bits_of(value) & kMagnitude);
      const std::uint32_t code = std::uint32_t{magnitude >= limit} | std::uint32_t{value < 0} << 1;
      word |= code << 2 * i;
      keep(left_out, begin + i, value, decoded[code]);
    }
    *words++ = word;
  }
}

void unpack_nearest(const std::uint32_t* words, std::size_t n, float inner, float outer, float* out) {
  const float values[4] = {inner, outer, -inner, -outer};
  for (std::size_t i = 0; i < n; ++i) out[i] = values[words[i / 16] >> 2 * (i % 16) & 3];
}

// The upper 24 bits of a drawn number as float: exact.
float upper_bits(std::uint32_t number) { return static_cast<float>(static_cast<std::int32_t>(number >> 8)); }

// 0, 1 or -1, for up to 64 values.
void draw_ternary(const float* values, std::size_t n, float per_unit, const random::Stream& stream, std::uint64_t group,
                  std::int8_t* drawn) {
  std::uint32_t numbers[kGroup];
  random::draw(stream, group, numbers);
  for (std::size_t i = 0; i < n; ++i) {
    const float magnitude = std::bit_cast<float>(bits_of(values[i]) & kMagnitude);
    drawn[i] = upper_bits(numbers[i]) < magnitude * per_unit ? (values[i] < 0 ? -1 : 1) : 0;
  }
}

void pack_drawn(const float* values, std::size_t n, float per_unit, const random::Stream& stream, std::uint64_t group,
                std::uint32_t* words) {
  for (std::size_t begin = 0; begin < n; begin += kGroup, ++group) {
    const std::size_t count = std::min(kGroup, n - begin);
    std::int8_t drawn[kGroup];
    draw_ternary(values + begin, count, per_unit, stream, group, drawn);
    for (std::size_t i = 0; i < count; i += 16) {
      std::uint32_t word = 0;
      for (std::size_t j = i; j < std::min(i + 16, count); ++j)
        word |= (drawn[j] == 0 ? 0u : drawn[j] > 0 ? 1u : 2u) << 2 * (j - i);
      *words++ = word;
    }
  }
}

bool unpack_ternary(const std::uint32_t* words, std::size_t n, float scale, float* out) {
  const float values[4] = {0.0f, scale, -scale, 0.0f};
  bool valid = true;
  for (std::size_t i = 0; i < n; ++i) {
    const std::uint32_t code = words[i / 16] >> 2 * (i % 16) & 3;
    valid &= code != 3;
    out[i] = values[code];
  }
  return valid;
}

// Codes of one group, some of them past the end and zero, to their place.
void write_group(const std::uint8_t* codes, Fields fields, std::uint8_t* to) {
  if (fields == Fields::bytes)
    std::memcpy(to, codes, kGroup);
  else
    for (std::size_t i = 0; i < kGroup / 2; ++i)
      to[i] = static_cast<std::uint8_t>(codes[i] | codes[kGroup / 2 + i] << 4);
}

void read_group(const std::uint8_t* from, Fields fields, std::uint8_t* codes) {
  if (fields == Fields::bytes)
    std::memcpy(codes, from, kGroup);
  else
    for (std::size_t i = 0; i < kGroup / 2; ++i) {
      codes[i] = from[i] & 15;
      codes[kGroup / 2 + i] = from[i] >> 4;
    }
}

void count_drawn(const float* values, std::size_t n, float per_unit, const random::Stream& stream, std::uint64_t group,
                 Fields fields, std::uint8_t* codes) {
  for (std::size_t begin = 0; begin < n; begin += kGroup, ++group) {
    const std::size_t count = std::min(kGroup, n - begin);
    std::int8_t drawn[kGroup];
    draw_ternary(values + begin, count, per_unit, stream, group, drawn);
    std::uint8_t biased[kGroup] = {};
    for (std::size_t i = 0; i < count; ++i) biased[i] = static_cast<std::uint8_t>(1 + drawn[i]);
    write_group(biased, fields, codes);
    codes += bytes_for(kGroup, fields);
  }
}

void unpack_counts(const std::uint8_t* codes, std::size_t n, Fields fields, int n_ranks, float step, float* out) {
  for (std::size_t begin = 0; begin < n; begin += kGroup) {
    std::uint8_t counts[kGroup];
    read_group(codes, fields, counts);
    codes += bytes_for(kGroup, fields);
    for (std::size_t i = 0; i < std::min(kGroup, n - begin); ++i)
      out[begin + i] = static_cast<float>(int{counts[i]} - n_ranks) * step;
  }
}

void pack_levels(const float* values, std::size_t n, float per_unit, int levels, const random::Stream& stream,
                 std::uint64_t group, Fields fields, std::uint8_t* codes) {
  const int sign = fields == Fields::nibbles ? 8 : 128;
  for (std::size_t begin = 0; begin < n; begin += kGroup, ++group) {
    std::uint32_t numbers[kGroup];
    random::draw(stream, group, numbers);
    std::uint8_t own[kGroup] = {};
    for (std::size_t i = 0; i < std::min(kGroup, n - begin); ++i) {
      const float value = values[begin + i], magnitude = std::bit_cast<float>(bits_of(value) & kMagnitude);
      const float raised = magnitude * per_unit + upper_bits(numbers[i]) * 0x1p-24f;
      own[i] = static_cast<std::uint8_t>(std::min(static_cast<int>(raised), levels) | (value < 0 ? sign : 0));
    }
    write_group(own, fields, codes);
    codes += bytes_for(kGroup, fields);
  }
}

bool unpack_levels(const std::uint8_t* codes, std::size_t n, float step, int levels, Fields fields, float* out) {
  const int mask = fields == Fields::nibbles ? 7 : 127;
  bool valid = true;
  for (std::size_t begin = 0; begin < n; begin += kGroup) {
    std::uint8_t own[kGroup];
    read_group(codes, fields, own);
    codes += bytes_for(kGroup, fields);
    for (std::size_t i = 0; i < std::min(kGroup, n - begin); ++i) {
      const int level = own[i] & mask;
      valid &= level <= levels;
      out[begin + i] = static_cast<float>(own[i] > mask ? -level : level) * step;
    }
  }
  return valid;
}

}  // namespace

const Kernels kPortable = {widen,      narrow,         add,          subtract,      divide,       magnitudes,
                           squares,    pack_signs,     unpack_signs, pack_beyond,   pack_nearest, unpack_nearest,
                           pack_drawn, unpack_ternary, count_drawn,  unpack_counts, pack_levels,  unpack_levels};

const Kernels& kernels() {
#if defined(__x86_64__)
  if (simd_level() >= SimdLevel::avx2) return kAvx2;
#endif
  return kPortable;
}

}  // namespace gradwire::quantisers
