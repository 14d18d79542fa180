#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "bits/bit_io.hpp"
#include "quantisers/codec.hpp"
#include "quantisers/sweep.hpp"

namespace gradwire::quantisers {
namespace {

static_assert(kBlock % kTransform == 0);
constexpr std::size_t kKeyBytes = 16;  // seed and step of the signs

// How far apart a block's whole numbers lie, and how many of them go into one.
struct Steps {
  float step, per_unit;
};

Steps steps_for(float norm, float clip, std::size_t size) {
  const double range = static_cast<double>(clip) * norm / std::sqrt(static_cast<double>(size));
  if (!(range >= 0x1p-100) || range > std::numeric_limits<float>::max()) return {0, 0};
  return {static_cast<float>(range / kTableMiddle), static_cast<float>(kTableMiddle / range)};
}

// body(number, begin, n, size) for each transform block of the sweep's block, begin counting from the latter's first.
template <typename Body>
void for_transforms(std::size_t block, std::size_t n, const Body& body) {
  for (std::size_t begin = 0; begin < n; begin += kTransform) {
    const std::size_t count = std::min(kTransform, n - begin);
    body((block * kBlock + begin) / kTransform, begin, count, transform_size(count));
  }
}

std::size_t code_offset(std::size_t number, Fields fields) { return bytes_for(number * kTransform, fields); }

void write_fields(const Source& source, ConstFloats norms, const Rotation& rotation, Fields fields, Floats new_residual,
                  std::uint8_t* codes) {
  const RotationKernels& on = rotation_kernels();
  for_blocks(source, [&](std::size_t block, const float* values, std::size_t n) {
    for_transforms(block, n, [&](std::size_t number, std::size_t begin, std::size_t count, std::size_t size) {
      alignas(32) float rotated[kTransform];
      std::copy_n(values + begin, count, rotated);
      std::fill(rotated + count, rotated + size, 0.0f);
      Signs signs;
      on.draw_signs(rotation.signs, number, signs);
      on.rotate(rotated, size, signs);
      const Steps steps = steps_for(norms[number], rotation.clip, size);
      std::uint8_t* const to = codes + code_offset(number, fields);
      on.quantise(rotated, size, steps.per_unit, rotation.draws, number * (kTransform / kGroup), fields, to);
      if (new_residual.empty()) return;
      on.expand(to, size, fields, steps.step, rotated);
      on.unrotate(rotated, size, signs);
      kernels().subtract(values + begin, rotated, 1 / source.residual_scale, count,
                         new_residual.data() + block * kBlock + begin);
    });
  });
}

void check_sizes(const Source& source, ConstFloats norms, Floats new_residual) {
  const std::size_t n = source.n_elements();
  if ((!source.residual.empty() && source.residual.size() != n) || (!new_residual.empty() && new_residual.size() != n))
    throw InvalidArgument("thc: gradient and residuals have to be of one size");
  if (norms.size() != transform_blocks(n)) throw InvalidArgument("thc: one norm for every 1,024 values");
}

}  // namespace

void write_norms(const Source& source, Floats norms) {
  check_sizes(source, norms, {});
  for_blocks(source, [&](std::size_t block, const float* values, std::size_t n) {
    for_transforms(block, n, [&](std::size_t number, std::size_t begin, std::size_t count, std::size_t) {
      const Squares found = kernels().squares(values + begin, count);
      const bool is_finite = found.largest < kInfinity;
      norms[number] = is_finite ? static_cast<float>(std::sqrt(found.squares)) : std::numeric_limits<float>::infinity();
    });
  });
}

void write_codes(const Source& source, ConstFloats norms, const Rotation& rotation, Floats new_residual, Bytes codes) {
  check_sizes(source, norms, new_residual);
  write_fields(source, norms, rotation, Fields::bytes, new_residual, codes.data());
}

void read_code_sums(ConstBytes sums, bool wide, int n_ranks, ConstFloats norms, const Rotation& rotation, Dtype dtype,
                    Bytes out) {
  const std::size_t n_elements = out.size() / bytes_of(dtype);
  if (norms.size() != transform_blocks(n_elements)) throw InvalidArgument("thc: one norm for every 1,024 values");
  if (sums.size() != padded_elements(n_elements) * (wide ? 2 : 1)) throw InvalidArgument("thc: sums have another size");
  const RotationKernels& on = rotation_kernels();
  write_blocks(dtype, out, false, [&](std::size_t block, float* values, std::size_t n) {
    for_transforms(block, n, [&](std::size_t number, std::size_t begin, std::size_t count, std::size_t size) {
      alignas(32) float rotated[kTransform];
      const float step = steps_for(norms[number], rotation.clip, size).step / static_cast<float>(n_ranks);
      const std::size_t place = number * kTransform;
      if (wide)
        on.expand_wide_sums(reinterpret_cast<const std::uint16_t*>(sums.data()) + place, size, n_ranks, step, rotated);
      else
        on.expand_sums(sums.data() + place, size, n_ranks, step, rotated);
      Signs signs;
      on.draw_signs(rotation.signs, number, signs);
      on.unrotate(rotated, size, signs);
      std::copy_n(rotated, count, values + begin);
    });
  });
}

std::uint64_t max_thc_bytes(std::uint64_t n_elements) {
  return kHeaderBytes + kKeyBytes + 4 * transform_blocks(n_elements) +
         bytes_for(padded_elements(n_elements), Fields::nibbles);
}

std::uint64_t encode_thc(const Source& source, const Rotation& rotation, Floats new_residual, Bytes out) {
  static thread_local std::vector<float> kept;
  std::vector<float>& norms = kept;
  const std::size_t n_elements = source.n_elements();
  norms.resize(transform_blocks(n_elements));
  check_sizes(source, norms, new_residual);
  std::uint64_t message_bytes = max_thc_bytes(n_elements);
  check_room(name_of(Kind::thc), out, message_bytes);
  write_norms(source, norms);
  const bool is_finite = std::all_of(norms.begin(), norms.end(),
                                     [](float norm) { return std::bit_cast<std::uint32_t>(norm) < kInfinity; });
  if (is_finite) {
    std::uint8_t* const payload = out.data() + kHeaderBytes;
    store(payload, rotation.signs.seed);
    store(payload + 8, rotation.signs.step);
    if (!norms.empty()) std::memcpy(payload + kKeyBytes, norms.data(), 4 * norms.size());
    write_fields(source, norms, rotation, Fields::nibbles, new_residual, payload + kKeyBytes + 4 * norms.size());
  } else {
    message_bytes = kHeaderBytes;
    keep_residual(source, new_residual);
  }
  const std::uint8_t flags = is_finite ? 0 : kFlagNonfinite;
  write_message({{}, kVersion, Kind::thc, flags, 0, n_elements, 0, is_finite ? rotation.clip : 0},
                out.first(message_bytes));
  return message_bytes;
}

void decode_thc(const Header& header, ConstBytes message, Dtype dtype, Bytes out, const Use& use) {
  const std::uint64_t n_elements = header.n_elements;
  expect("thc", "length in bytes", header.is_finite() ? max_thc_bytes(n_elements) : kHeaderBytes, message.size());
  const std::uint8_t* const payload = message.data() + kHeaderBytes;
  const std::size_t n_norms = transform_blocks(n_elements);
  if (header.is_finite())
    for (std::size_t number = 0; number < n_norms; ++number)
      if (load<std::uint32_t>(payload + kKeyBytes + 4 * number) >= kInfinity)
        fail_message("thc", "a norm is negative or not finite");
  const RotationKernels& on = rotation_kernels();
  write_blocks(dtype, out, use.adds, [&](std::size_t block, float* values, std::size_t n) {
    if (!header.is_finite()) {
      std::fill_n(values, n, std::numeric_limits<float>::quiet_NaN());
      return;
    }
    const random::Stream stream{load<std::uint64_t>(payload), load<std::uint64_t>(payload + 8)};
    for_transforms(block, n, [&](std::size_t number, std::size_t begin, std::size_t count, std::size_t size) {
      alignas(32) float rotated[kTransform];
      const float norm = load<float>(payload + kKeyBytes + 4 * number);
      const std::uint8_t* const codes = payload + kKeyBytes + 4 * n_norms + code_offset(number, Fields::nibbles);
      on.expand(codes, size, Fields::nibbles, steps_for(norm, header.first, size).step, rotated);
      Signs signs;
      on.draw_signs(stream, number, signs);
      on.unrotate(rotated, size, signs);
      std::copy_n(rotated, count, values + begin);
    });
    if (use.divisor != 1) kernels().divide(values, use.divisor, n);
  });
}

}  // namespace gradwire::quantisers
