#include "checksum/crc32c.hpp"

#include <array>

#include "bits/bit_io.hpp"
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

// a b modulo the polynomial, bits reversed: bit 31 is x^0.
constexpr std::uint32_t product(std::uint32_t a, std::uint32_t b) {
  std::uint32_t sum = 0;
  for (int bit = 31; bit >= 0; --bit) {
    if (a >> bit & 1) sum ^= b;
    b = (b >> 1) ^ (kPolynomial & (0u - (b & 1)));
  }
  return sum;
}

constexpr auto kLaneShift = [] {
  std::uint32_t past_lane = 0x00800000;  // x^8, squared to x^(8 kLaneBytes)
  for (std::size_t n_bytes = 1; n_bytes < kLaneBytes; n_bytes *= 2) past_lane = product(past_lane, past_lane);
  std::array<std::array<std::uint32_t, 256>, 4> table{};
  for (int byte = 0; byte < 4; ++byte)
    for (std::uint32_t value = 0; value < 256; ++value) table[byte][value] = product(value << (8 * byte), past_lane);
  return table;
}();

std::uint32_t append_lane_of_zeros(std::uint32_t state) {
  return kLaneShift[0][state & 0xFF] ^ kLaneShift[1][state >> 8 & 0xFF] ^ kLaneShift[2][state >> 16 & 0xFF] ^
         kLaneShift[3][state >> 24];
}

__attribute__((target("sse4.2"))) std::uint32_t update_sse42(std::uint32_t state, const std::uint8_t* data,
                                                             std::size_t n_bytes) {
  while (n_bytes >= 3 * kLaneBytes) {
    std::uint64_t a = state, b = 0, c = 0;
    for (std::size_t i = 0; i < kLaneBytes; i += 8) {
      a = _mm_crc32_u64(a, load<std::uint64_t>(data + i));
      b = _mm_crc32_u64(b, load<std::uint64_t>(data + kLaneBytes + i));
      c = _mm_crc32_u64(c, load<std::uint64_t>(data + 2 * kLaneBytes + i));
    }
    state = append_lane_of_zeros(static_cast<std::uint32_t>(a)) ^ static_cast<std::uint32_t>(b);
    state = append_lane_of_zeros(state) ^ static_cast<std::uint32_t>(c);
    data += 3 * kLaneBytes;
    n_bytes -= 3 * kLaneBytes;
  }
  std::uint64_t wide = state;
  for (; n_bytes >= 8; data += 8, n_bytes -= 8) wide = _mm_crc32_u64(wide, load<std::uint64_t>(data));
  state = static_cast<std::uint32_t>(wide);
  for (; n_bytes > 0; ++data, --n_bytes) state = _mm_crc32_u8(state, *data);
  return state;
}

// Folding (Gopal et al., Intel 2009): a message's first 128 bits may be replaced by a product that is congruent to
// them, T bits further on. The factors are x^(T+32) and x^(T-32) modulo the polynomial, one for each half; a product of
// reversed polynomials is one bit short.
constexpr std::uint64_t fold_factor(int exponent) {
  std::uint32_t power = 0x80000000;  // x^0, reversed
  for (int i = 0; i < exponent; ++i) power = (power >> 1) ^ (kPolynomial & (0u - (power & 1)));
  return std::uint64_t{power} << 1;
}

#define GRADWIRE_FOLDING __attribute__((target("sse4.2,pclmul,avx512f,avx512bw,avx512vl,avx512dq,vpclmulqdq")))

template <int kBits>
GRADWIRE_FOLDING inline __m512i fold_onto(__m512i early, __m512i later) {
  constexpr auto kFirst = static_cast<long long>(fold_factor(kBits + 32)),
                 kSecond = static_cast<long long>(fold_factor(kBits - 32));
  const __m512i factors = _mm512_set_epi64(kSecond, kFirst, kSecond, kFirst, kSecond, kFirst, kSecond, kFirst);
  return _mm512_ternarylogic_epi64(_mm512_clmulepi64_epi128(early, factors, 0x00),
                                   _mm512_clmulepi64_epi128(early, factors, 0x11), later, 0x96);  // a ^ b ^ c
}

constexpr std::size_t kFoldBytes = 256;  // four registers side by side

GRADWIRE_FOLDING std::uint32_t update_folding(std::uint32_t state, const std::uint8_t* data, std::size_t n_bytes) {
  if (n_bytes < 2 * kFoldBytes) return update_sse42(state, data, n_bytes);
  __m512i a = _mm512_xor_si512(_mm512_loadu_si512(data), _mm512_maskz_set1_epi32(1, static_cast<int>(state)));
  __m512i b = _mm512_loadu_si512(data + 64), c = _mm512_loadu_si512(data + 128), d = _mm512_loadu_si512(data + 192);
  for (data += kFoldBytes, n_bytes -= kFoldBytes; n_bytes >= kFoldBytes; data += kFoldBytes, n_bytes -= kFoldBytes) {
    a = fold_onto<2048>(a, _mm512_loadu_si512(data));
    b = fold_onto<2048>(b, _mm512_loadu_si512(data + 64));
    c = fold_onto<2048>(c, _mm512_loadu_si512(data + 128));
    d = fold_onto<2048>(d, _mm512_loadu_si512(data + 192));
  }
  d = fold_onto<512>(fold_onto<512>(fold_onto<512>(a, b), c), d);
  alignas(64) std::array<std::uint8_t, 64> last;
  _mm512_store_si512(last.data(), d);
  return update_sse42(update_sse42(0, last.data(), last.size()), data, n_bytes);
}

#endif

}  // namespace

std::uint32_t crc32c(ConstBytes data, std::uint32_t crc) {
  const std::uint32_t state = ~crc;
#if defined(__x86_64__)
  static const bool has_sse42 = __builtin_cpu_supports("sse4.2");
  static const bool folds = has_sse42 && __builtin_cpu_supports("vpclmulqdq") && __builtin_cpu_supports("avx512bw") &&
                            __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  // A level that was lowered rules these out too.
  static const bool has_avx2 = __builtin_cpu_supports("avx2");
  const SimdLevel level = simd_level();
  if (folds && level == SimdLevel::avx512) return ~update_folding(state, data.data(), data.size());
  if (has_sse42 && (level != SimdLevel::portable || !has_avx2)) return ~update_sse42(state, data.data(), data.size());
#endif
  return ~update_portable(state, data.data(), data.size());
}

}  // namespace gradwire
