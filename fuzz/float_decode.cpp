// libFuzzer harness of the float codecs' decoders. The first two bytes choose dtype, codec, instruction set, bits that
// a receiver already knows, and whether checksums are made right, so that what lies behind them is reached; the rest is
// the message. Run: fuzz/run SECONDS float_decode
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "checksum/crc32c.hpp"
#include "embedded_float/codec.hpp"
#include "errors.hpp"
#include "simd/dispatch.hpp"
#include "truncated_float/codec.hpp"

namespace embedded_float = gradwire::embedded_float;
namespace floats = gradwire::floats;
namespace planes = gradwire::planes;
namespace truncated_float = gradwire::truncated_float;

namespace {

constexpr std::uint64_t kMaxValues = 70'000;
using Bytes = std::vector<std::uint8_t>;

template <class Word>
Word read(const Bytes& bytes, std::size_t offset) {
  Word word;
  std::memcpy(&word, bytes.data() + offset, sizeof word);
  return word;
}

template <class Word>
void write(Bytes& bytes, std::size_t offset, Word word) {
  std::memcpy(bytes.data() + offset, &word, sizeof word);
}

std::uint32_t crc_of(const Bytes& message, std::uint64_t begin, std::uint64_t end, std::uint32_t crc = 0) {
  if (begin > end || end > message.size()) return crc;
  return gradwire::crc32c({message.data() + begin, message.data() + end}, crc);
}

// Makes magic, version, length and checksums right where the header makes sense. Returns the number of values.
std::uint64_t seal(Bytes& message, bool is_embedded) {
  if (message.size() < 40) return 0;
  const gradwire::Front& front = is_embedded ? embedded_float::kFront : truncated_float::kFront;
  std::memcpy(message.data(), front.letters, 4);
  message[4] = is_embedded ? 1 + message[4] % 2 : 1;
  write(message, 24, std::uint64_t{message.size()});
  const auto n_elements = read<std::uint64_t>(message, 8);
  const std::size_t partition = read<std::uint16_t>(message, 16);
  if (n_elements > kMaxValues || partition < 32 || partition > 1024) return n_elements;
  const std::uint64_t n_chunks = embedded_float::chunks_of(n_elements);
  std::uint64_t table_end = 0, marks = message.size();
  if (is_embedded) {
    table_end = front.table_end(n_chunks);
    const planes::Range range{message[6], message[7]};
    std::uint64_t begin = table_end, escapes = table_end + embedded_float::payload_bytes(n_elements, partition, range);
    for (std::uint64_t chunk = 0; chunk < n_chunks && table_end <= message.size(); ++chunk) {
      const std::uint64_t n =
          std::min<std::uint64_t>(embedded_float::kChunkValues, n_elements - chunk * embedded_float::kChunkValues);
      const std::uint64_t end = begin + embedded_float::payload_bytes(n, partition, range);
      const std::uint64_t n_escapes = embedded_float::load_entry(message.data(), chunk).n_escapes;
      const std::uint64_t escapes_end = escapes + n_escapes * embedded_float::kEscapeBytes;
      write(message, front.table_end(chunk), crc_of(message, escapes, escapes_end, crc_of(message, begin, end)));
      begin = end;
      escapes = escapes_end;
    }
  } else if (message[5] < floats::kDtypes && message[6] < truncated_float::kFormats) {
    const truncated_float::Settings settings{static_cast<floats::Dtype>(message[5]),
                                             static_cast<truncated_float::Format>(message[6]), message[7], partition};
    table_end = front.table_end(n_chunks);
    std::uint64_t begin = table_end;
    for (std::uint64_t chunk = 0; chunk < n_chunks && table_end <= message.size(); ++chunk) {
      const std::uint64_t n =
          std::min<std::uint64_t>(truncated_float::kChunkValues, n_elements - chunk * truncated_float::kChunkValues);
      const std::uint64_t end = begin + truncated_float::payload_bytes(n, settings);
      write(message, front.table_end(chunk), crc_of(message, begin, end));
      begin = end;
    }
    marks = begin;
  }
  std::uint32_t crc = crc_of(message, 0, 36);
  crc = crc_of(message, 40, table_end, crc);
  write(message, 36, crc_of(message, marks, message.size(), crc));
  return n_elements;
}

template <class Body>
void expect_typed_errors(const Body& body) {
  try {
    body();
  } catch (const gradwire::CorruptMessage&) {
  } catch (const gradwire::IncompatibleVersion&) {
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  if (size < 2) return 0;
  const auto dtype = static_cast<floats::Dtype>(data[0] % floats::kDtypes);
  const bool is_embedded = data[0] & 0x80;
  const int n_known = data[1] % 33;
  gradwire::limit_simd_level(static_cast<gradwire::SimdLevel>(data[0] / 8 % 3));
  Bytes message(data + 2, data + size);  // exactly as long as it is: overreads show
  std::uint64_t n_values = message.size() >= 16 ? read<std::uint64_t>(message, 8) : 0;
  if (data[1] >= 64) n_values = seal(message, is_embedded);
  if (n_values > kMaxValues) n_values = 1000;
  Bytes values(n_values * floats::bytes_of(dtype));
  if (!is_embedded) {
    expect_typed_errors([&] { truncated_float::decode(message, dtype, values); });
    return 0;
  }
  expect_typed_errors([&] { embedded_float::decode(message, dtype, values); });
  std::vector<std::uint32_t> codes(n_values, 0x12345678);
  Bytes exponents(embedded_float::partitions_of(n_values, 256), 120);
  expect_typed_errors([&] {
    const embedded_float::Settings settings{256, message.size() > 4 && message[4] == 1 ? 1 : 2};
    const int known = embedded_float::refine(message, {codes, exponents, dtype, settings, n_known});
    embedded_float::write({codes, exponents, dtype, settings, known}, values);
  });
  return 0;
}
