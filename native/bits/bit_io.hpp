// Bit streams of the gradwire formats: least significant bit first, so that bit i of a stream is bit i % 8 of byte i
// / 8. Everything here has internal linkage: files compiled for different instruction sets include it.
#pragma once

#include <bit>
#include <cstring>

#include "spans.hpp"

namespace gradwire {

static_assert(std::endian::native == std::endian::little,
              "the bit streams are read and written as little-endian words");

// How far past the last byte of a stream readers may load and writers may store: one word.
inline constexpr std::size_t kBitSlackBytes = 8;

template <class Word>
[[maybe_unused]] static inline Word load(const void* data) {
  Word word;
  std::memcpy(&word, data, sizeof word);
  return word;
}

template <class Word>
[[maybe_unused]] static inline void store(void* data, Word word) {
  std::memcpy(data, &word, sizeof word);
}

// Appends up to 56 bits (with 7 pending ones, 63) at a time without a branch: a whole word is stored, the pointer moves
// by the full bytes in it.
struct BitWriter {
  std::uint8_t* data;
  std::uint64_t pending = 0;  // the n_pending (< 8) bits that do not fill a byte yet
  std::uint64_t n_pending = 0;
};

inline constexpr std::uint64_t kMaxWriteBits = 56;

// `bits` has no ones at or above n_bits <= kMaxWriteBits. Stores 8 bytes at writer.data, whatever n_bits is.
[[maybe_unused]] static inline void write_bits(BitWriter& writer, std::uint64_t bits, std::uint64_t n_bits) {
  const std::uint64_t word = writer.pending | bits << writer.n_pending;
  store(writer.data, word);
  const std::uint64_t n_full = writer.n_pending + n_bits;
  writer.data += n_full >> 3;
  writer.pending = word >> (n_full & 56);
  writer.n_pending = n_full & 7;
}

// Ends the stream on a byte boundary, padded with zeros; returns the byte after it.
[[maybe_unused]] static inline std::uint8_t* finish(const BitWriter& writer) {
  if (writer.n_pending == 0) return writer.data;
  *writer.data = static_cast<std::uint8_t>(writer.pending);
  return writer.data + 1;
}

// A position in a stream. Loads 8 bytes at the current byte: at least 57 valid bits.
struct BitReader {
  const std::uint8_t* data;
  std::uint64_t position = 0;  // in bits
};

[[maybe_unused]] static inline std::uint64_t peek_bits(const BitReader& reader) {
  return load<std::uint64_t>(reader.data + (reader.position >> 3)) >> (reader.position & 7);
}

constexpr std::uint64_t bytes_of_bits(std::uint64_t n_bits) { return (n_bits + 7) / 8; }

}  // namespace gradwire
