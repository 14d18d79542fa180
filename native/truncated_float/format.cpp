#include "truncated_float/format.hpp"

#include <bit>
#include <string>

#include "bits/bit_io.hpp"
#include "checksum/crc32c.hpp"
#include "errors.hpp"

namespace gradwire::truncated_float {
namespace {

constexpr std::size_t kChecksumOffset = 36;

// FP8 as in Micikevicius et al., "FP8 formats for deep learning"; FP4 and FP6 as in the OCP microscaling specification.
constexpr Layout kNative[floats::kDtypes] = {
    {32, 8, 23, 127, 0x7F7FFFFF}, {16, 8, 7, 127, 0x7F7F}, {16, 5, 10, 15, 0x7BFF}};
constexpr Layout kCompact[kFormats - 1] = {
    {16, 5, 10, 15, 0x7BFF}, {8, 4, 3, 7, 0x7E}, {8, 5, 2, 15, 0x7B}, {4, 2, 1, 1, 0x7}, {6, 3, 2, 3, 0x1F}};

std::uint32_t checksum_of(const std::uint8_t* message, std::uint64_t n_chunks, std::uint64_t marks_offset,
                          std::uint64_t n_marks_bytes) {
  std::uint32_t crc = crc32c({message, kChecksumOffset});
  crc = crc32c({message + kHeaderBytes, n_chunks * kChunkEntryBytes}, crc);
  return crc32c({message + marks_offset, n_marks_bytes}, crc);
}

[[noreturn]] void fail(const std::string& what) { throw CorruptMessage("truncated-float message: " + what); }

}  // namespace

const char* name_of(Format format) {
  constexpr const char* names[kFormats] = {"native", "fp16", "fp8-e4m3", "fp8-e5m2", "fp4-e2m1", "fp6-e3m2"};
  return names[static_cast<int>(format)];
}

const Layout& layout_of(Format format, Dtype dtype) {
  return format == Format::native ? kNative[static_cast<int>(dtype)] : kCompact[static_cast<int>(format) - 1];
}

void check_settings(const Settings& settings) {
  if (settings.n_bits < 2 || settings.n_bits > settings.layout().width)
    throw InvalidArgument("bits=" + std::to_string(settings.n_bits) + ": format " + name_of(settings.format) + " of " +
                          floats::name_of(settings.dtype) + " keeps 2 to " + std::to_string(settings.layout().width));
  if (!std::has_single_bit(settings.partition) || settings.partition < kMinPartition ||
      settings.partition > kMaxPartition)
    throw InvalidArgument("partition is a power of two from 32 to 1024, not " + std::to_string(settings.partition));
}

std::uint64_t payload_bytes(std::uint64_t n_values, const Settings& settings) {
  const std::uint64_t scales = settings.has_scales() ? kScaleBytes * partitions_of(n_values, settings.partition) : 0;
  return scales + word_packing::packed_bytes(n_values, settings.n_bits);
}

std::uint64_t payload_end(std::uint64_t n_elements, const Settings& settings) {
  const std::uint64_t n_full = n_elements / kChunkValues;
  return table_end(chunks_of(n_elements)) + n_full * payload_bytes(kChunkValues, settings) +
         payload_bytes(n_elements - n_full * kChunkValues, settings);
}

std::uint64_t max_message_bytes(std::uint64_t n_elements, const Settings& settings) {
  return payload_end(n_elements, settings) + (settings.is_exact() ? 0 : marks_bytes(n_elements, settings.partition));
}

std::uint64_t write_header(const Header& header, std::uint8_t* message) {
  const Settings& settings = header.settings;
  const std::uint64_t end = payload_end(header.n_elements, settings);
  const std::uint64_t n_marks = header.holds_nonfinite() ? marks_bytes(header.n_elements, settings.partition) : 0;
  store(message, kMagic);
  message[4] = kVersion;
  message[5] = static_cast<std::uint8_t>(settings.dtype);
  message[6] = static_cast<std::uint8_t>(settings.format);
  message[7] = static_cast<std::uint8_t>(settings.n_bits);
  store(message + 8, header.n_elements);
  store(message + 16, static_cast<std::uint16_t>(settings.partition));
  store(message + 18, header.flags);
  store(message + 20, std::uint32_t{0});
  store(message + 24, end + n_marks);
  store(message + 32, std::uint32_t{0});
  store(message + kChecksumOffset, checksum_of(message, chunks_of(header.n_elements), end, n_marks));
  return end + n_marks;
}

Header read_header(std::span<const std::uint8_t> message) {
  const std::uint8_t* const at = message.data();
  if (message.size() < kHeaderBytes)
    fail("truncated: " + std::to_string(message.size()) + " bytes, a header alone has 40");
  if (load<std::uint32_t>(at) != kMagic)
    fail("it does not begin with GWTF: no truncated-float message, or bytes were lost");
  if (at[4] != kVersion)
    throw IncompatibleVersion("truncated-float message of format version " + std::to_string(at[4]) +
                              "; this build reads version 1: use the same gradwire release on every rank");
  const auto message_bytes = load<std::uint64_t>(at + 24);
  if (message_bytes != message.size())
    fail("length in bytes: expected " + std::to_string(message_bytes) + ", got " + std::to_string(message.size()));
  if (at[5] >= floats::kDtypes) fail("unknown dtype code " + std::to_string(at[5]));
  if (at[6] >= kFormats) fail("unknown format code " + std::to_string(at[6]));
  const Header header{{static_cast<Dtype>(at[5]), static_cast<Format>(at[6]), at[7], load<std::uint16_t>(at + 16)},
                      load<std::uint16_t>(at + 18),
                      load<std::uint64_t>(at + 8)};
  const Settings& settings = header.settings;
  if (settings.n_bits < 2 || settings.n_bits > settings.layout().width)
    fail(std::to_string(settings.n_bits) + " bits of format " + name_of(settings.format));
  if (!std::has_single_bit(settings.partition) || settings.partition < kMinPartition ||
      settings.partition > kMaxPartition)
    fail("partitions of " + std::to_string(settings.partition) + " values");
  if ((header.flags & ~kFlagNonfinite) != 0 || (header.holds_nonfinite() && settings.is_exact()) ||
      load<std::uint32_t>(at + 20) != 0 || load<std::uint32_t>(at + 32) != 0)
    fail("unknown flags");
  // The first test keeps sums from overflowing: a value takes two bits or more.
  if (header.n_elements > 4 * std::uint64_t{message.size()} ||
      payload_end(header.n_elements, settings) +
              (header.holds_nonfinite() ? marks_bytes(header.n_elements, settings.partition) : 0) !=
          message.size())
    fail(std::to_string(header.n_elements) + " values in " + std::to_string(message.size()) + " bytes");
  const std::uint64_t end = payload_end(header.n_elements, settings);
  if (load<std::uint32_t>(at + kChecksumOffset) !=
      checksum_of(at, chunks_of(header.n_elements), end, message.size() - end))
    fail("the header's checksum does not match: bytes were changed on the way");
  return header;
}

}  // namespace gradwire::truncated_float
