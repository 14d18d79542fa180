#include "quantisers/codec.hpp"

#include <algorithm>
#include <atomic>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "bits/bit_io.hpp"
#include "quantisers/sweep.hpp"

namespace gradwire::quantisers {

const char* name_of(Kind kind) {
  constexpr const char* names[kKinds] = {"one-bit", "two-bit", "ternary", "qsgd", "thc"};
  return names[static_cast<int>(kind)];
}

Header read_header(ConstBytes message) {
  const auto header = load_header<Header>(kFront, message);
  check_checksum(kFront, message.data(), 0, message.subspan(kHeaderBytes));
  const int kind = static_cast<int>(header.kind);
  if (kind >= kKinds) fail_message(kFront.name, "unknown quantiser ", kind);
  if ((header.flags & ~kFlagNonfinite) != 0) fail_message(kFront.name, "unknown flags");
  for (const float scale : {header.first, header.second})
    if (std::bit_cast<std::uint32_t>(scale) >= kInfinity)
      fail_message(kFront.name, "a scale is negative or not finite");
  if (header.version == kGroupedVersion) {
    if (header.kind != Kind::one_bit && header.kind != Kind::two_bit)
      fail_message(kFront.name, "groups where there are none");
    if (header.levels < 1 || header.levels > 2) fail_message(kFront.name, "wrong number of scales");
    if (header.block < kGroup || header.block > kBlock || !std::has_single_bit(header.block))
      fail_message(kFront.name, "groups of ", header.block, " values; 64, 128, ..., 4096 are possible");
  } else if (header.kind == Kind::qsgd) {
    if (header.levels < 1 || header.levels > 127)
      fail_message(kFront.name, header.levels, " levels; 1 to 127 are possible");
    if (header.block < 128 || header.block > kBlock || !std::has_single_bit(header.block))
      fail_message(kFront.name, "blocks of ", header.block, " values; 128, 256, ..., 4096 are possible");
  } else if (header.levels != 0 || header.block != 0) {
    fail_message(kFront.name, "levels or blocks where there are none");
  }
  return header;
}

namespace {

Fields fields_of(int levels) { return levels <= 7 ? Fields::nibbles : Fields::bytes; }

// Payload bytes of up to kBlock values, norms apart.
std::size_t code_bytes(Kind kind, std::size_t n, int levels) {
  switch (kind) {
    case Kind::one_bit:
      return 4 * ((n + 31) / 32);
    case Kind::two_bit:
    case Kind::ternary:
      return 4 * ((n + 15) / 16);
    default:
      return bytes_for(n, fields_of(levels));
  }
}

std::uint64_t norm_bytes(const Header& header) {
  return header.kind == Kind::qsgd ? 4 * ((header.n_elements + header.block - 1) / header.block) : 0;
}

std::uint64_t payload_bytes(const Header& header) {
  const std::uint64_t n_full = header.n_elements / kBlock, rest = header.n_elements % kBlock;
  return norm_bytes(header) + n_full * code_bytes(header.kind, kBlock, header.levels) +
         code_bytes(header.kind, rest, header.levels);
}

// 2^24 / scale: below 2^-100 it would overflow, and the values count as zeros.
float draws_per_unit(float scale) { return scale >= 0x1p-100f ? 0x1p24f / scale : 0.0f; }

// ---- between one block and its part of the payload

void pack_block(const Header& header, const random::Stream& stream, const float* values, std::size_t block,
                std::size_t n, std::uint8_t* payload, std::atomic<bool>& is_finite) {
  const Kernels& on = kernels();
  Codes codes;
  const std::uint64_t first_group = block * (kBlock / kGroup);
  switch (header.kind) {
    case Kind::ternary:
      on.pack_drawn(values, n, draws_per_unit(header.first), stream, first_group, codes.words());
      break;
    default:
      for (std::size_t begin = 0; begin < n; begin += header.block) {
        const std::size_t count = std::min<std::size_t>(header.block, n - begin);
        const Squares sums = on.squares(values + begin, count);
        const double wide = std::sqrt(sums.squares);
        if (sums.largest >= kInfinity || wide > kLargestFloat) is_finite.store(false, std::memory_order_relaxed);
        float norm = narrowed(wide), per_unit = static_cast<float>(header.levels / wide);
        if (norm < 0x1p-100f) norm = per_unit = 0;
        std::memcpy(payload + 4 * ((block * kBlock + begin) / header.block), &norm, sizeof norm);
        if (!is_finite.load(std::memory_order_relaxed)) return;  // conversions of what is not finite are undefined
        on.pack_levels(values + begin, count, per_unit, header.levels, stream, first_group + begin / kGroup,
                       fields_of(header.levels), codes.bytes.data() + bytes_for(begin, fields_of(header.levels)));
      }
  }
  std::memcpy(payload + norm_bytes(header) + block * code_bytes(header.kind, kBlock, header.levels), codes.bytes.data(),
              code_bytes(header.kind, n, header.levels));
}

// One or two bits, which draw nothing: what is left out is known as the codes are.
bool packs_terms(Kind kind) { return kind == Kind::one_bit || kind == Kind::two_bit; }

void pack_terms(const Header& header, const Terms& terms, std::size_t block, std::size_t n, const LeftOut& left_out,
                std::uint8_t* payload) {
  Codes codes;
  if (header.kind == Kind::one_bit)
    kernels().pack_signs(terms, n, header.first, -header.second, left_out, codes.words());
  else
    kernels().pack_beyond(terms, n, header.first, left_out, codes.words());
  std::memcpy(payload + block * code_bytes(header.kind, kBlock, 0), codes.bytes.data(), code_bytes(header.kind, n, 0));
}

// Returns false if the payload holds what no encoder writes.
bool unpack_block(const Header& header, const std::uint8_t* payload, std::size_t block, std::size_t n, float* out) {
  const Kernels& on = kernels();
  Codes codes;
  std::memcpy(codes.bytes.data(), payload + norm_bytes(header) + block * code_bytes(header.kind, kBlock, header.levels),
              code_bytes(header.kind, n, header.levels));
  bool valid = true;
  switch (header.kind) {
    case Kind::one_bit:
      on.unpack_signs(codes.words(), n, header.first, -header.second, out);
      return true;
    case Kind::two_bit:
    case Kind::ternary:
      return on.unpack_ternary(codes.words(), n, header.first, out);
    default:
      for (std::size_t begin = 0; begin < n; begin += header.block) {
        const std::size_t count = std::min<std::size_t>(header.block, n - begin);
        float norm;
        std::memcpy(&norm, payload + 4 * ((block * kBlock + begin) / header.block), sizeof norm);
        if (std::bit_cast<std::uint32_t>(norm) >= kInfinity) return false;
        valid &= on.unpack_levels(codes.bytes.data() + bytes_for(begin, fields_of(header.levels)), count,
                                  norm / static_cast<float>(header.levels), header.levels, fields_of(header.levels),
                                  out + begin);
      }
      return valid;
  }
}

// ---- what the whole message is quantised by

struct Sums {
  double positive = 0, negative = 0, squares = 0;
  std::uint64_t n_negative = 0;
  std::uint32_t largest = 0;
};

// In the blocks' order, whatever the threads did.
Sums measure(const Source& source, bool wants_squares) {
  static thread_local std::vector<Sums> kept;
  std::vector<Sums>& parts = kept;
  parts.assign((source.n_elements() + kBlock - 1) / kBlock, {});
  if (wants_squares)
    for_blocks(source, [&](std::size_t block, const float* values, std::size_t n) {
      const Squares found = kernels().squares(values, n);
      parts[block] = {.squares = found.squares, .largest = found.largest};
    });
  else
    for_terms(source, [&](std::size_t block, const Terms& terms, std::size_t n) {
      const Magnitudes found = kernels().magnitudes(terms, n);
      parts[block] = {.positive = found.positive,
                      .negative = found.negative,
                      .n_negative = found.n_negative,
                      .largest = found.largest};
    });
  const auto add = [](Sums& all, const Sums& part) {
    all.positive += part.positive, all.negative += part.negative, all.squares += part.squares;
    all.n_negative += part.n_negative;
    all.largest = std::max(all.largest, part.largest);
  };
  Sums all;
  for (std::size_t first = 0; first < parts.size(); first += kRunBlocks) {
    Sums run;
    for (std::size_t i = first; i < std::min(parts.size(), first + kRunBlocks); ++i) add(run, parts[i]);
    add(all, run);
  }
  return all;
}

// The deviation is taken from zero, not from the mean: values that are all alike are not clipped to nothing.
float clipped_scale(const Sums& sums, std::size_t n, float clip) {
  const float largest = std::bit_cast<float>(sums.largest);
  if (n == 0 || !(largest >= 0x1p-100f)) return 0.0f;
  return std::min(largest, narrowed(clip * std::sqrt(sums.squares / static_cast<double>(n))));
}

void choose_scales(const Options& options, const Source& source, Header& header) {
  const std::size_t n = source.n_elements();
  if (options.kind == Kind::qsgd) return;  // block by block, as they are packed
  const Sums sums = measure(source, options.kind == Kind::ternary);
  if (sums.largest >= kInfinity) header.flags = kFlagNonfinite;
  if (!header.is_finite()) return;
  const float mean = narrowed(mean_of(sums.positive + sums.negative, n));
  using Rule = Options::Rule;
  if (options.kind == Kind::one_bit) {
    const bool two = options.rule == Rule::two_means, fixed = options.rule == Rule::fixed;
    header.first = fixed ? options.parameter : two ? narrowed(mean_of(sums.positive, n - sums.n_negative)) : mean;
    header.second = two ? narrowed(mean_of(sums.negative, sums.n_negative)) : header.first;
  } else if (options.kind == Kind::two_bit) {
    header.first = options.rule == Rule::fixed ? options.parameter : narrowed(double{options.parameter} * mean);
  } else {
    header.first = options.rule == Rule::fixed ? options.parameter : clipped_scale(sums, n, options.parameter);
    if (header.first < 0x1p-100f) header.first = 0;
  }
}

Header header_for(const Options& options, std::uint64_t n_elements) {
  Header header{.kind = options.kind, .n_elements = n_elements};
  if (options.kind == Kind::qsgd)
    header.levels = static_cast<std::uint8_t>(options.levels), header.block = options.block;
  return header;
}

}  // namespace

std::uint64_t max_message_bytes(const Options& options, std::uint64_t n_elements, std::uint64_t n_cuts) {
  if (options.kind == Kind::thc) return max_thc_bytes(n_elements);
  if (has_groups(options)) return max_grouped_bytes(options, n_elements, n_cuts);
  return kHeaderBytes + payload_bytes(header_for(options, n_elements));
}

std::uint64_t encode(const Options& options, const Source& source, Floats new_residual, Bytes out) {
  if (options.kind == Kind::thc) {
    const random::Stream signs{options.stream.seed ^ kSignSeed, options.stream.step};
    return encode_thc(source, {signs, options.stream, options.parameter}, new_residual, out);
  }
  const std::size_t n_elements = source.n_elements();
  if (has_groups(options)) return encode_groups(options, source, new_residual, out);
  Header header = header_for(options, n_elements);
  std::uint64_t message_bytes = kHeaderBytes + payload_bytes(header);
  check_room(name_of(options.kind), out, message_bytes);
  choose_scales(options, source, header);
  std::atomic<bool> is_finite{header.is_finite()};
  std::uint8_t* const payload = out.data() + kHeaderBytes;
  if (header.is_finite() && packs_terms(options.kind)) {
    for_terms(source, [&](std::size_t block, const Terms& terms, std::size_t n) {
      float* const left = new_residual.empty() ? nullptr : new_residual.data() + block * kBlock;
      pack_terms(header, terms, block, n, {left, 1 / source.residual_scale}, payload);
    });
  } else if (header.is_finite()) {
    // QSGD learns only here whether values are finite; then the residual is put back below, so it must not be lost.
    const bool writes_along = !new_residual.empty() && options.kind != Kind::qsgd;
    const auto subtract_decoded = [&](std::size_t block, const float* values, std::size_t n) {
      alignas(32) float decoded[kBlock];
      unpack_block(header, payload, block, n, decoded);
      kernels().subtract(values, decoded, 1 / source.residual_scale, n, new_residual.data() + block * kBlock);
    };
    for_blocks(source, [&](std::size_t block, const float* values, std::size_t n) {
      pack_block(header, options.stream, values, block, n, payload, is_finite);
      if (writes_along) subtract_decoded(block, values, n);
    });
    if (!new_residual.empty() && !writes_along && is_finite.load()) for_blocks(source, subtract_decoded);
  }
  if (!is_finite) {
    header.flags = kFlagNonfinite;
    message_bytes = kHeaderBytes;
    header.first = header.second = 0;
    keep_residual(source, new_residual);
  }
  write_message(header, out.first(message_bytes));
  return message_bytes;
}

void decode(ConstBytes message, Kind kind, Dtype dtype, Bytes out, const Use& use) {
  Header header = read_header(message);
  const char* const name = name_of(kind);
  if (header.kind != kind) fail_message(name, "it is one of ", name_of(header.kind));
  expect(name, "number of values", out.size() / bytes_of(dtype), header.n_elements);
  if (kind == Kind::thc) return decode_thc(header, message, dtype, out, use);
  if (header.version == kGroupedVersion) return decode_groups(header, message, dtype, out, use);
  expect(name, "length in bytes", kHeaderBytes + (header.is_finite() ? payload_bytes(header) : 0), message.size());
  // What stands for a value is +-scale or zero, so to divide the scales is to divide the values; but QSGD has levels.
  const bool divides_values = kind == Kind::qsgd && use.divisor != 1;
  if (!divides_values) header.first /= use.divisor, header.second /= use.divisor;
  std::atomic<bool> valid{true};
  write_blocks(dtype, out, use.adds, [&](std::size_t block, float* values, std::size_t n) {
    if (!header.is_finite())
      std::fill_n(values, n, std::numeric_limits<float>::quiet_NaN());
    else if (!unpack_block(header, message.data() + kHeaderBytes, block, n, values))
      valid.store(false, std::memory_order_relaxed);
    else if (divides_values)
      kernels().divide(values, use.divisor, n);
  });
  if (!valid) fail_message(name, "it holds a code that no encoder writes");
}

float ternary_scale(const Source& source, float clip) {
  const Sums sums = measure(source, true);
  if (sums.largest >= kInfinity) return std::numeric_limits<float>::infinity();
  const float scale = clipped_scale(sums, source.n_elements(), clip);
  return scale >= 0x1p-100f ? scale : 0.0f;
}

void write_ternary_counts(const Source& source, float scale, const random::Stream& stream, Fields fields, Bytes codes) {
  if (codes.size() != bytes_for(source.n_elements(), fields))
    throw InvalidArgument("ternary counts: codes have to hold whole groups of 64 fields");
  for_blocks(source, [&](std::size_t block, const float* values, std::size_t n) {
    kernels().count_drawn(values, n, draws_per_unit(scale), stream, block * (kBlock / kGroup), fields,
                          codes.data() + block * bytes_for(kBlock, fields));
  });
}

void read_ternary_counts(ConstBytes codes, Fields fields, int n_ranks, float scale, Dtype dtype, Bytes out) {
  if (codes.size() != bytes_for(out.size() / bytes_of(dtype), fields))
    throw InvalidArgument("ternary counts: codes have to hold whole groups of 64 fields");
  const float step = scale / static_cast<float>(n_ranks);
  write_blocks(dtype, out, false, [&](std::size_t block, float* values, std::size_t n) {
    kernels().unpack_counts(codes.data() + block * bytes_for(kBlock, fields), n, fields, n_ranks, step, values);
  });
}

}  // namespace gradwire::quantisers
