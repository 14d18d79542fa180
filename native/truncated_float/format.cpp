#include "truncated_float/format.hpp"

#include <string>

#include "errors.hpp"

namespace gradwire::truncated_float {
namespace {

// FP8 as in Micikevicius et al., "FP8 formats for deep learning"; FP4 and FP6 as in the OCP microscaling specification.
constexpr Layout kNative[floats::kDtypes] = {
    {32, 8, 23, 127, 0x7F7FFFFF}, {16, 8, 7, 127, 0x7F7F}, {16, 5, 10, 15, 0x7BFF}};
constexpr Layout kCompact[kFormats - 1] = {
    {16, 5, 10, 15, 0x7BFF}, {8, 4, 3, 7, 0x7E}, {8, 5, 2, 15, 0x7B}, {4, 2, 1, 1, 0x7}, {6, 3, 2, 3, 0x1F}};

[[noreturn]] void fail(const std::string& what) { fail_message(kFront.name, what); }

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
  floats::check_partition(settings.partition);
}

std::uint64_t payload_bytes(std::uint64_t n_values, const Settings& settings) {
  const std::uint64_t scales = settings.has_scales() ? kScaleBytes * partitions_of(n_values, settings.partition) : 0;
  return scales + word_packing::packed_bytes(n_values, settings.n_bits);
}

std::uint64_t payload_end(std::uint64_t n_elements, const Settings& settings) {
  const std::uint64_t n_full = n_elements / kChunkValues;
  return kFront.table_end(chunks_of(n_elements)) + n_full * payload_bytes(kChunkValues, settings) +
         payload_bytes(n_elements - n_full * kChunkValues, settings);
}

std::uint64_t max_message_bytes(std::uint64_t n_elements, const Settings& settings) {
  return payload_end(n_elements, settings) + (settings.is_exact() ? 0 : marks_bytes(n_elements, settings.partition));
}

std::uint64_t write_header(const Header& header, std::uint8_t* message) {
  const Settings& settings = header.settings;
  const std::uint64_t end = payload_end(header.n_elements, settings);
  const std::uint64_t n_marks = header.holds_nonfinite() ? marks_bytes(header.n_elements, settings.partition) : 0;
  floats::write_head(kFront,
                     {settings.dtype, static_cast<int>(settings.format), settings.n_bits, header.flags,
                      settings.partition, header.n_elements, end + n_marks},
                     message);
  write_checksum(kFront, message, chunks_of(header.n_elements), {message + end, n_marks});
  return end + n_marks;
}

Header read_header(std::span<const std::uint8_t> message) {
  const floats::Head head = floats::read_head(kFront, message);
  if (head.first_code >= kFormats) fail("unknown format code " + std::to_string(head.first_code));
  const Header header{{head.dtype, static_cast<Format>(head.first_code), head.second_code, head.partition},
                      head.flags,
                      head.n_elements};
  const Settings& settings = header.settings;
  if (settings.n_bits < 2 || settings.n_bits > settings.layout().width)
    fail(std::to_string(settings.n_bits) + " bits of format " + name_of(settings.format));
  if (header.holds_nonfinite() && settings.is_exact()) fail("unknown flags");
  // The first test keeps sums from overflowing: a value takes two bits or more.
  const bool is_short = header.n_elements > 4 * std::uint64_t{message.size()};
  const std::uint64_t end = is_short ? 0 : payload_end(header.n_elements, settings);
  const std::uint64_t n_marks = header.holds_nonfinite() ? marks_bytes(header.n_elements, settings.partition) : 0;
  if (is_short || end + n_marks != message.size())
    fail(std::to_string(header.n_elements) + " values in " + std::to_string(message.size()) + " bytes");
  check_checksum(kFront, message.data(), chunks_of(header.n_elements), message.subspan(end));
  return header;
}

}  // namespace gradwire::truncated_float
