#include "truncated_float/codec.hpp"

#include <algorithm>
#include <atomic>
#include <bit>
#include <cstring>

#include "bits/bit_io.hpp"
#include "checksum/crc32c.hpp"
#include "parallel/thread_pool.hpp"

namespace gradwire::truncated_float {
namespace {

// FP8 as in Micikevicius et al., "FP8 formats for deep learning"; FP4 and FP6 as in the OCP microscaling specification.
constexpr Layout kNative[kDtypes] = {{32, 8, 23, 127, 0x7F7FFFFF}, {16, 8, 7, 127, 0x7F7F}, {16, 5, 10, 15, 0x7BFF}};
constexpr Layout kCompact[kFormats - 1] = {
    {16, 5, 10, 15, 0x7BFF}, {8, 4, 3, 7, 0x7E}, {8, 5, 2, 15, 0x7B}, {4, 2, 1, 1, 0x7}, {6, 3, 2, 3, 0x1F}};

// Where payloads begin and end; marks follow where there are any.
std::uint64_t payload_end(std::uint64_t n_elements, const Settings& settings) {
  const std::uint64_t n_full = n_elements / kChunkValues;
  return kFront.table_end(chunks_of(n_elements)) + n_full * payload_bytes(kChunkValues, settings) +
         payload_bytes(n_elements - n_full * kChunkValues, settings);
}

constexpr std::size_t kMaxPartitionsAChunk = kChunkValues / kMinPartition;

Chunk chunk_at(std::size_t index, std::uint64_t n_elements, const Settings& settings) {
  return floats::chunk_at(index, n_elements, settings.partition, kFront.table_end(chunks_of(n_elements)),
                          [&](std::size_t n) { return payload_bytes(n, settings); });
}

// Fewer than 256 codes, each below 2^n_bits; they touch packed_bytes(n, n_bits) bytes.
void pack_rest(const std::uint32_t* codes, std::size_t n, int n_bits, std::uint8_t* out) {
  std::uint8_t buffer[4 * word_packing::kBlock + kBitSlackBytes];
  BitWriter writer{buffer};
  for (std::size_t i = 0; i < n; ++i) write_bits(writer, codes[i], static_cast<std::uint64_t>(n_bits));
  finish(writer);
  std::memcpy(out, buffer, word_packing::packed_bytes(n, n_bits));
}

void unpack_rest(const std::uint8_t* data, std::size_t n, int n_bits, std::uint32_t* codes) {
  std::uint8_t buffer[4 * word_packing::kBlock + kBitSlackBytes] = {};
  std::memcpy(buffer, data, word_packing::packed_bytes(n, n_bits));
  const std::uint64_t mask = ~std::uint64_t{0} >> (64 - n_bits);
  BitReader reader{buffer};
  for (std::size_t i = 0; i < n; ++i) {
    codes[i] = static_cast<std::uint32_t>(peek_bits(reader) & mask);
    reader.position += static_cast<std::uint64_t>(n_bits);
  }
}

// Runs of at most 256 values that share a scale, within a block of packed codes: body(partition, first in block, n).
template <class Body>
void for_runs(std::size_t first, std::size_t n_block, std::size_t partition, const Body& body) {
  const std::size_t run = std::min(partition, word_packing::kBlock);
  for (std::size_t at = 0; at < n_block; at += run) body((first + at) / partition, at, std::min(run, n_block - at));
}

// The number that the largest code of these settings stands for, as a float32: the last of a binade of few.
float largest_number(const Settings& settings) {
  const Layout& layout = settings.layout();
  const int cut = layout.width - settings.n_bits;
  const std::uint32_t magnitude = layout.largest >> cut << cut;  // its exponent field is not 0: n_bits is 2 or more
  return std::bit_cast<float>((magnitude << (23 - layout.mantissa_bits)) +
                              (static_cast<std::uint32_t>(127 - layout.bias) << 23));
}

// The scale that takes `largest` to at most the largest number: a power of two, so that it costs no precision, or for
// FP4, of whose 8 magnitudes none may lie idle, the next bfloat16 above the quotient.
std::uint32_t scale_for(std::uint32_t largest, const Settings& settings, float number) {
  if (largest >> 23 == 0) return kMinScale;
  const auto quotient = std::bit_cast<std::uint32_t>(std::bit_cast<float>(largest) / number);
  const std::uint32_t below = settings.format == Format::fp4_e2m1 ? 0xFFFF : 0x7FFFFF;
  return std::max((quotient + below) & ~below, kMinScale);
}

}  // namespace

const char* name_of(Format format) {
  constexpr const char* names[kFormats] = {"native", "fp16", "fp8-e4m3", "fp8-e5m2", "fp4-e2m1", "fp6-e3m2"};
  return names[static_cast<int>(format)];
}

const Layout& layout_of(Format format, Dtype dtype) {
  return format == Format::native ? kNative[static_cast<int>(dtype)] : kCompact[static_cast<int>(format) - 1];
}

std::uint64_t payload_bytes(std::uint64_t n_values, const Settings& settings) {
  const std::uint64_t scales = settings.has_scales() ? kScaleBytes * partitions_of(n_values, settings.partition) : 0;
  return scales + word_packing::packed_bytes(n_values, settings.n_bits);
}

std::uint64_t max_message_bytes(std::uint64_t n_elements, const Settings& settings) {
  return payload_end(n_elements, settings) + (settings.is_exact() ? 0 : marks_bytes(n_elements, settings.partition));
}

Header read_header(ConstBytes message) {
  const Head head = read_head(kFront, message);
  if (head.first_code >= kFormats) fail_message(kFront.name, "unknown format code ", head.first_code);
  const Settings settings{head.dtype, static_cast<Format>(head.first_code), head.second_code, head.partition};
  const Header header{settings, head.flags, head.n_elements};
  if (settings.n_bits < 2 || settings.n_bits > settings.layout().width)
    fail_message(kFront.name, settings.n_bits, " bits of format ", name_of(settings.format));
  if (header.holds_nonfinite() && settings.is_exact()) fail_message(kFront.name, "unknown flags");
  // The first test keeps sums from overflowing: a value takes two bits or more.
  const bool is_short = header.n_elements > 4 * std::uint64_t{message.size()};
  const std::uint64_t end = is_short ? 0 : payload_end(header.n_elements, settings);
  const std::uint64_t n_marks = header.holds_nonfinite() ? marks_bytes(header.n_elements, settings.partition) : 0;
  if (is_short || end + n_marks != message.size())
    fail_message(kFront.name, header.n_elements, " values in ", message.size(), " bytes");
  check_checksum(kFront, message.data(), chunks_of(header.n_elements), message.subspan(end));
  return header;
}

std::uint64_t encode(ConstBytes values, const Settings& settings, Rounding rounding, const random::Stream& stream,
                     Bytes out) {
  const std::size_t value_bytes = bytes_of(settings.dtype);
  const std::uint64_t n_elements = values.size() / bytes_of(settings.dtype);
  check_room(kFront.name, out, max_message_bytes(n_elements, settings));
  const Kernels& kernels = kernels_for(settings.dtype);
  const word_packing::Kernel& packing = word_packing::kernel_for(settings.n_bits);
  const float number = settings.has_scales() ? largest_number(settings) : 1.0F;
  if (settings.is_exact()) rounding = Rounding::truncate;
  std::uint8_t* const message = out.data();
  std::uint8_t* const marks = message + payload_end(n_elements, settings);
  std::atomic<bool> holds_nonfinite{false};
  parallel_for(chunks_of(n_elements), [&](std::size_t index) {
    const Chunk chunk = chunk_at(index, n_elements, settings);
    const std::uint8_t* const from = values.data() + chunk.first * value_bytes;
    std::uint8_t* to = message + chunk.begin;
    std::uint32_t scales[kMaxPartitionsAChunk];
    if (!settings.is_exact()) {
      // Chunks have whole bytes of marks: their partitions are a multiple of 16, but for the last one's.
      std::uint8_t* const chunk_marks = marks + chunk.first / settings.partition / 8;
      std::memset(chunk_marks, 0, (chunk.n_partitions + 7) / 8);
      for (std::size_t i = 0; i < chunk.n_partitions; ++i) {
        const std::size_t first = i * settings.partition, n = std::min(settings.partition, chunk.n - first);
        const std::uint32_t largest = kernels.find_largest(from + first * value_bytes, n);
        if (largest >= kInfinity) {
          scales[i] = 0;
          chunk_marks[i / 8] |= static_cast<std::uint8_t>(1u << i % 8);
          holds_nonfinite.store(true, std::memory_order_relaxed);
        } else {
          scales[i] = settings.has_scales() ? scale_for(largest, settings, number) : kUnitScale;
        }
        if (settings.has_scales()) {
          store(to, static_cast<std::uint16_t>((scales[i] == 0 ? kUnitScale : scales[i]) >> 16));
          to += kScaleBytes;
        }
      }
    } else {
      std::fill_n(scales, chunk.n_partitions, kUnitScale);
    }
    for (std::size_t first = 0; first < chunk.n; first += word_packing::kBlock) {
      const std::size_t n_block = std::min(word_packing::kBlock, chunk.n - first);
      std::uint32_t codes[word_packing::kBlock], numbers[word_packing::kBlock];
      if (rounding == Rounding::stochastic)
        for (std::size_t at = 0; at < n_block; at += random::kGroup)
          kernels.draw(stream, (chunk.first + first + at) / random::kGroup, numbers + at);
      for_runs(first, n_block, settings.partition, [&](std::size_t partition, std::size_t at, std::size_t n) {
        const std::uint8_t* const run = from + (first + at) * value_bytes;
        if (scales[partition] == 0)  // marked: its values decode as NaN
          std::memset(codes + at, 0, 4 * n);
        else
          kernels.to_codes(run, n, settings, rounding, scales[partition], numbers + at, codes + at);
      });
      if (n_block == word_packing::kBlock)
        packing.pack(codes, to);
      else
        pack_rest(codes, n_block, settings.n_bits, to);
      to += word_packing::packed_bytes(n_block, settings.n_bits);
    }
    store(message + kFront.table_end(index), crc32c({message + chunk.begin, chunk.end - chunk.begin}));
  });
  const std::uint64_t n_marks = holds_nonfinite ? marks_bytes(n_elements, settings.partition) : 0;
  const Head head{.version = 1,
                  .dtype = settings.dtype,
                  .first_code = static_cast<std::uint8_t>(settings.format),
                  .second_code = static_cast<std::uint8_t>(settings.n_bits),
                  .n_elements = n_elements,
                  .partition = static_cast<std::uint16_t>(settings.partition),
                  .flags = holds_nonfinite ? kFlagNonfinite : std::uint16_t{0},
                  .message_bytes = payload_end(n_elements, settings) + n_marks};
  write_header(kFront, head, message, chunks_of(n_elements), {marks, n_marks});
  return head.message_bytes;
}

void decode(ConstBytes message, Dtype dtype, Bytes values) {
  const Header header = read_header(message);
  const Settings& settings = header.settings;
  const std::size_t value_bytes = bytes_of(dtype);
  expect_values(kFront.name, dtype, values.size() / value_bytes, settings.dtype, header.n_elements);
  const Kernels& kernels = kernels_for(dtype);
  const word_packing::Kernel& packing = word_packing::kernel_for(settings.n_bits);
  const std::uint8_t* const marks =
      header.holds_nonfinite() ? message.data() + payload_end(header.n_elements, settings) : nullptr;
  parallel_for(chunks_of(header.n_elements), [&](std::size_t index) {
    const Chunk chunk = chunk_at(index, header.n_elements, settings);
    const std::uint8_t* from = message.data() + chunk.begin;
    if (crc32c({from, chunk.end - chunk.begin}) != load<std::uint32_t>(message.data() + kFront.table_end(index)))
      fail_in_chunk(kFront.name, index, "the checksum does not match: bytes were changed on the way");
    std::uint32_t scales[kMaxPartitionsAChunk];
    for (std::size_t i = 0; i < chunk.n_partitions; ++i) {
      scales[i] = kUnitScale;
      if (settings.has_scales()) {
        scales[i] = std::uint32_t{load<std::uint16_t>(from)} << 16;
        from += kScaleBytes;
        if (scales[i] < kMinScale || scales[i] >= kInfinity)
          fail_in_chunk(kFront.name, index, "a scale is out of range");
      }
    }
    std::uint8_t* const to = values.data() + chunk.first * value_bytes;
    for (std::size_t first = 0; first < chunk.n; first += word_packing::kBlock) {
      const std::size_t n_block = std::min(word_packing::kBlock, chunk.n - first);
      std::uint32_t codes[word_packing::kBlock];
      if (n_block == word_packing::kBlock)
        packing.unpack(from, codes);
      else
        unpack_rest(from, n_block, settings.n_bits, codes);
      from += word_packing::packed_bytes(n_block, settings.n_bits);
      for_runs(first, n_block, settings.partition, [&](std::size_t partition, std::size_t at, std::size_t n) {
        std::uint8_t* const run = to + (first + at) * value_bytes;
        const std::size_t mark = chunk.first / settings.partition + partition;
        if (marks != nullptr && (marks[mark / 8] >> mark % 8 & 1) != 0)
          kernels.fill_nan(n, run);
        else
          kernels.to_values(codes + at, n, settings, scales[partition], run);
      });
    }
  });
}

}  // namespace gradwire::truncated_float
