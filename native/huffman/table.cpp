#include "huffman/table.hpp"

#include <algorithm>
#include <numeric>
#include <string>

#include "checksum/crc32c.hpp"
#include "errors.hpp"
#include "huffman/code_lengths.hpp"

namespace gradwire {
namespace {

constexpr std::array<std::uint8_t, 4> kMagic = {'G', 'W', 'H', 'T'};
constexpr std::uint8_t kVersion = 1;
constexpr std::size_t kHeaderBytes = 8;
constexpr std::size_t kChecksumBytes = 4;

std::uint64_t fnv1a(std::span<const std::uint8_t> bytes) {
  std::uint64_t hash = 0xCBF29CE484222325;
  for (const std::uint8_t byte : bytes) hash = (hash ^ byte) * 0x100000001B3;
  return hash;
}

std::uint32_t reverse_bits(std::uint32_t code, int n_bits) {
  std::uint32_t reversed = 0;
  for (int bit = 0; bit < n_bits; ++bit) reversed |= ((code >> bit) & 1) << (n_bits - 1 - bit);
  return reversed;
}

std::uint32_t little_endian_32(const std::uint8_t* bytes) {
  return bytes[0] | bytes[1] << 8 | bytes[2] << 16 | std::uint32_t{bytes[3]} << 24;
}

// What is wrong with these lengths, or nothing.
const char* find_flaw(std::span<const std::uint8_t> lengths) {
  std::size_t kraft = 0, n_codes = 0;
  bool all_coded = true;
  for (std::size_t symbol = 0; symbol < lengths.size(); ++symbol) {
    const int length = lengths[symbol];
    if (length > kCodeLengthLimit) return "a code is longer than 11 bits";
    if (length == 0) {
      all_coded = all_coded && symbol + 1 == lengths.size();
      continue;
    }
    kraft += kLookupEntries >> length;
    ++n_codes;
  }
  if (kraft != kLookupEntries || n_codes < 2) return "the code lengths do not form a complete prefix code";
  if (all_coded != (lengths.back() == 0)) return "there has to be an escape exactly when some exponent has no code";
  return nullptr;
}

}  // namespace

HuffmanTable::HuffmanTable(std::span<const std::uint8_t> lengths, int exponent_bits)
    : exponent_bits_(exponent_bits), lengths_(lengths.begin(), lengths.end()) {
  const std::size_t escape = n_symbols();
  if (has_escape())
    placeholder_ = static_cast<std::uint8_t>(std::find(lengths_.begin(), lengths_.end(), 0) - lengths_.begin());

  // Canonical: codes count up in the order of (length, symbol), the escape last among equals.
  std::vector<std::uint32_t> code_of(lengths_.size(), 0);
  std::uint32_t next = 0;
  for (int length = 1; length <= kCodeLengthLimit; ++length) {
    next <<= 1;
    for (std::size_t symbol = 0; symbol <= escape; ++symbol)
      if (lengths_[symbol] == length) code_of[symbol] = reverse_bits(next++, length);
  }
  for (std::size_t symbol = 0; symbol < escape; ++symbol) {
    const bool escaped = lengths_[symbol] == 0;
    const std::size_t coded_as = escaped ? escape : symbol;
    const std::uint64_t length = lengths_[coded_as];
    codes_[symbol] = std::uint64_t{code_of[coded_as]} << (64 - length) | length | (escaped ? kEscapeFlag : 0);
    code_planes_[symbol] = static_cast<std::uint8_t>(code_of[coded_as]);
    code_planes_[256 + symbol] = static_cast<std::uint8_t>(code_of[coded_as] >> 8);
    code_planes_[512 + symbol] = static_cast<std::uint8_t>(length | (escaped ? 128 : 0));
  }

  for (std::size_t symbol = 0; symbol <= escape; ++symbol) {
    if (lengths_[symbol] == 0) continue;
    const std::size_t decoded = symbol == escape ? placeholder_ : symbol;
    const auto entry = static_cast<std::uint16_t>(lengths_[symbol] | decoded << 8);
    for (std::size_t index = code_of[symbol]; index < kLookupEntries; index += std::size_t{1} << lengths_[symbol])
      lookup_single_[index] = entry;
  }
  constexpr std::uint64_t kMaxSymbols = 6;
  for (std::size_t index = 0; index < kLookupEntries; ++index) {
    std::uint64_t symbols = 0, n_symbols = 0, n_bits = 0;
    while (n_symbols < kMaxSymbols) {
      const std::uint64_t single = lookup_single_[index >> n_bits];
      if (n_bits + (single & 0xFF) > kCodeLengthLimit) break;  // the index's higher bits are not the stream's
      symbols |= (single >> 8) << (8 * n_symbols++);
      n_bits += single & 0xFF;
    }
    lookup_[index] = n_bits | n_symbols << 8 | symbols << 16;
  }
  const std::vector<std::uint8_t> bytes = to_bytes();
  id_ = fnv1a(bytes);
}

HuffmanTable HuffmanTable::from_histogram(std::span<const std::int64_t> histogram, int exponent_bits) {
  std::uint64_t total = 0;
  std::vector<std::uint64_t> counts;
  for (const std::int64_t count : histogram) {
    if (count < 0) throw InvalidArgument("a histogram has no negative counts");
    counts.push_back(static_cast<std::uint64_t>(count));
    total += counts.back();
    if (total >= std::uint64_t{1} << 52) throw InvalidArgument("the histogram counts more than 2^52 values");
  }
  if (total == 0) throw InvalidArgument("the histogram is empty: count at least one value, or keep the table in use");
  const std::vector<int> lengths = escaped_code_lengths(counts, kCodeLengthLimit);
  return from_lengths(std::vector<std::uint8_t>(lengths.begin(), lengths.end()), exponent_bits);
}

HuffmanTable HuffmanTable::prior(int exponent_bits) {
  // Gradients are small and cluster: a two-sided geometric distribution, here over exponents 2^-67 to 2^9 around 2^-18
  // with ratio 4/5 (float16 gradients are scaled towards the middle of their range: around 2^-4, all of them coded),
  // and one value in 16 zero. Integers only, so that every machine builds the same table.
  std::vector<std::int64_t> weights(std::size_t{1} << exponent_bits, 0);
  const int centre = exponent_bits == 8 ? 109 : 11;
  const int first = exponent_bits == 8 ? 60 : 1, last = exponent_bits == 8 ? 136 : 31;
  for (int exponent = first; exponent <= last; ++exponent) {
    std::int64_t weight = std::int64_t{1} << 24;
    for (int step = 0; step < std::abs(exponent - centre); ++step) weight = weight * 4 / 5;
    weights[exponent] = weight;
  }
  weights[0] = std::accumulate(weights.begin(), weights.end(), std::int64_t{0}) / 16;
  return from_histogram(weights, exponent_bits);
}

HuffmanTable HuffmanTable::from_lengths(std::span<const std::uint8_t> lengths, int exponent_bits) {
  if (const char* flaw = find_flaw(lengths)) throw InvalidArgument(std::string("Huffman table: ") + flaw);
  return HuffmanTable(lengths, exponent_bits);
}

std::vector<std::uint8_t> HuffmanTable::to_bytes() const {
  std::vector<std::uint8_t> bytes(kHeaderBytes, 0);
  std::copy(kMagic.begin(), kMagic.end(), bytes.begin());
  bytes[4] = kVersion;
  bytes[5] = static_cast<std::uint8_t>(exponent_bits_);
  for (std::size_t i = 0; i < lengths_.size(); i += 2) {
    const int high = i + 1 < lengths_.size() ? lengths_[i + 1] : 0;
    bytes.push_back(static_cast<std::uint8_t>(lengths_[i] | high << 4));
  }
  const std::uint32_t checksum = crc32c(bytes);
  for (int byte = 0; byte < 4; ++byte) bytes.push_back(static_cast<std::uint8_t>(checksum >> (8 * byte)));
  return bytes;
}

HuffmanTable HuffmanTable::from_bytes(std::span<const std::uint8_t> bytes) {
  if (bytes.size() < kHeaderBytes || !std::equal(kMagic.begin(), kMagic.end(), bytes.begin()))
    throw CorruptMessage("this is no serialised Huffman table: it does not begin with GWHT");
  if (bytes[4] != kVersion)
    throw IncompatibleVersion("Huffman table of version " + std::to_string(bytes[4]) + "; this build reads version 1");
  const int exponent_bits = bytes[5];
  if ((exponent_bits != 8 && exponent_bits != 5) || bytes[6] != 0 || bytes[7] != 0)
    throw CorruptMessage("Huffman table: impossible header");
  const std::size_t n_lengths = (std::size_t{1} << exponent_bits) + 1;
  const std::size_t n_bytes = kHeaderBytes + (n_lengths + 1) / 2 + kChecksumBytes;
  if (bytes.size() != n_bytes)
    throw CorruptMessage("Huffman table of " + std::to_string(bytes.size()) + " bytes; expected " +
                         std::to_string(n_bytes));
  if (crc32c(bytes.first(n_bytes - kChecksumBytes)) != little_endian_32(bytes.data() + n_bytes - kChecksumBytes))
    throw CorruptMessage("Huffman table: the checksum does not match");
  std::vector<std::uint8_t> lengths;
  for (std::size_t i = 0; i < n_lengths; ++i) lengths.push_back((bytes[kHeaderBytes + i / 2] >> (4 * (i % 2))) & 0xF);
  if (const char* flaw = find_flaw(lengths)) throw CorruptMessage(std::string("Huffman table: ") + flaw);
  return HuffmanTable(lengths, exponent_bits);
}

}  // namespace gradwire
