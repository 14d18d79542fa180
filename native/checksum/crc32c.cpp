#include "checksum/crc32c.hpp"

#include <array>
#include <cstring>

#include "simd/dispatch.hpp"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace gradwire {
namespace {

constexpr std::uint32_t kPolynomial = 0x82F63B78;  // 0x1EDC6F41, bits reversed

constexpr std::uint32_t advance_one_byte(std::uint32_t state) {
  for (int bit = 0; bit < 8; ++bit) state = (state >> 1) ^ (kPolynomial & (0u - (state & 1)));
  return state;
}

constexpr auto kByteTable = [] {
  std::array<std::uint32_t, 256> table{};
  for (std::uint32_t byte = 0; byte < 256; ++byte) table[byte] = advance_one_byte(byte);
  return table;
}();

std::uint32_t update_portable(std::uint32_t state, const std::uint8_t* data, std::size_t n_bytes) {
  for (std::size_t i = 0; i < n_bytes; ++i) state = (state >> 8) ^ kByteTable[(state ^ data[i]) & 0xFF];
  return state;
}

#if defined(__x86_64__)

// The instruction takes 8 bytes in 3 cycles but starts one every cycle: three lanes of 1 KiB keep it busy. Joining
// lanes needs "append 1 KiB of zeros", a linear map of the state, tabulated per byte of the state.
constexpr std::size_t kLaneBytes = 1024;

using ShiftTable = std::array<std::array<std::uint32_t, 256>, 4>;

constexpr std::uint32_t apply(const std::array<std::uint32_t, 32>& matrix, std::uint32_t vector) {
  std::uint32_t sum = 0;
  for (int bit = 0; bit < 32; ++bit)
    if ((vector >> bit) & 1) sum ^= matrix[bit];
  return sum;
}

ShiftTable make_lane_shift() {
  std::array<std::uint32_t, 32> matrix{};
  for (int bit = 0; bit < 32; ++bit) matrix[bit] = advance_one_byte(1u << bit);  // append one zero byte
  for (std::size_t n_bytes = 1; n_bytes < kLaneBytes; n_bytes *= 2) {
    std::array<std::uint32_t, 32> squared{};
    for (int bit = 0; bit < 32; ++bit) squared[bit] = apply(matrix, matrix[bit]);
    matrix = squared;
  }
  ShiftTable table{};
  for (int byte = 0; byte < 4; ++byte)
    for (std::uint32_t value = 0; value < 256; ++value) table[byte][value] = apply(matrix, value << (8 * byte));
  return table;
}

const ShiftTable& lane_shift() {
  static const ShiftTable table = make_lane_shift();
  return table;
}

std::uint32_t append_lane_of_zeros(std::uint32_t state) {
  const auto& table = lane_shift();
  return table[0][state & 0xFF] ^ table[1][(state >> 8) & 0xFF] ^ table[2][(state >> 16) & 0xFF] ^
         table[3][state >> 24];
}

std::uint64_t load_word(const std::uint8_t* data) {
  std::uint64_t word;
  std::memcpy(&word, data, sizeof word);
  return word;
}

__attribute__((target("sse4.2"))) std::uint32_t update_sse42(std::uint32_t state, const std::uint8_t* data,
                                                             std::size_t n_bytes) {
  while (n_bytes >= 3 * kLaneBytes) {
    std::uint64_t a = state, b = 0, c = 0;
    for (std::size_t i = 0; i < kLaneBytes; i += 8) {
      a = _mm_crc32_u64(a, load_word(data + i));
      b = _mm_crc32_u64(b, load_word(data + kLaneBytes + i));
      c = _mm_crc32_u64(c, load_word(data + 2 * kLaneBytes + i));
    }
    state = append_lane_of_zeros(static_cast<std::uint32_t>(a)) ^ static_cast<std::uint32_t>(b);
    state = append_lane_of_zeros(state) ^ static_cast<std::uint32_t>(c);
    data += 3 * kLaneBytes;
    n_bytes -= 3 * kLaneBytes;
  }
  std::uint64_t wide = state;
  for (; n_bytes >= 8; data += 8, n_bytes -= 8) wide = _mm_crc32_u64(wide, load_word(data));
  state = static_cast<std::uint32_t>(wide);
  for (; n_bytes > 0; ++data, --n_bytes) state = _mm_crc32_u8(state, *data);
  return state;
}

#endif

}  // namespace

std::uint32_t crc32c(ConstBytes data, std::uint32_t crc) {
  const std::uint32_t state = ~crc;
#if defined(__x86_64__)
  static const bool has_sse42 = __builtin_cpu_supports("sse4.2");
  // A level that was lowered rules it out too.
  static const bool has_avx2 = __builtin_cpu_supports("avx2");
  if (has_sse42 && (simd_level() != SimdLevel::portable || !has_avx2))
    return ~update_sse42(state, data.data(), data.size());
#endif
  return ~update_portable(state, data.data(), data.size());
}

}  // namespace gradwire
