#include "embedded_float/codec.hpp"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <vector>

#include "bits/bit_io.hpp"
#include "checksum/crc32c.hpp"
#include "errors.hpp"
#include "parallel/thread_pool.hpp"

namespace gradwire::embedded_float {
namespace {

constexpr std::size_t padded(std::size_t n) { return (n + planes::kGroup - 1) / planes::kGroup * planes::kGroup; }

// Counted from the chunk's begin.
struct Partition {
  std::size_t index, first, n, plane_bytes;
};
template <class Body>
void for_partitions(const Chunk& chunk, std::size_t partition, const Body& body) {
  for (std::size_t index = 0; index < chunk.n_partitions; ++index) {
    const std::size_t first = index * partition, n = std::min(partition, chunk.n - first);
    body(Partition{index, first, n, (n + 7) / 8});
  }
}

template <class Body>
void for_chunks(std::uint64_t n_elements, std::size_t partition, planes::Range range, const Body& body) {
  const std::size_t n_chunks = chunks_of(n_elements);
  parallel_for(n_chunks, [&](std::size_t index) {
    body(floats::chunk_at(index, n_elements, partition, kFront.table_end(n_chunks),
                          [&](std::size_t n) { return payload_bytes(n, partition, range); }));
  });
}

// The planes of one partition; a last, short one goes through a buffer of whole groups.
void pack(const std::uint32_t* codes, std::size_t n, planes::Range range, std::uint8_t* out) {
  const std::size_t plane_bytes = (n + 7) / 8, n_groups = padded(n) / planes::kGroup;
  if (plane_bytes == 4 * n_groups) {
    planes::kernels().pack(codes, n_groups, range, out, plane_bytes);
    return;
  }
  std::uint8_t buffer[kPlanes * kMaxPartition / 8];
  planes::kernels().pack(codes, n_groups, range, buffer, 4 * n_groups);
  for (std::size_t plane = 0; plane < static_cast<std::size_t>(range.n); ++plane)
    std::memcpy(out + plane * plane_bytes, buffer + plane * 4 * n_groups, plane_bytes);
}

// Whole groups are written to `codes`: up to 31 words past n.
void unpack(const std::uint8_t* from, std::size_t n, planes::Range range, std::uint32_t keep, std::uint32_t* codes) {
  const std::size_t plane_bytes = (n + 7) / 8, n_groups = padded(n) / planes::kGroup;
  if (plane_bytes == 4 * n_groups) {
    planes::kernels().unpack(from, plane_bytes, n_groups, range, keep, codes);
    return;
  }
  std::uint8_t buffer[kPlanes * kMaxPartition / 8] = {};
  for (std::size_t plane = 0; plane < static_cast<std::size_t>(range.n); ++plane)
    std::memcpy(buffer + plane * 4 * n_groups, from + plane * plane_bytes, plane_bytes);
  planes::kernels().unpack(buffer, 4 * n_groups, n_groups, range, keep, codes);
}

// visit(i, word) of values that all 32 planes do not hold: finite ones too small beside the largest of their partition.
template <class Visit>
void for_escapes(const Kernels& kernels, const void* values, const std::uint32_t* codes, std::size_t n,
                 std::uint32_t exponent, const Visit& visit) {
  std::uint32_t exact[kMaxPartition], from_codes[kMaxPartition];
  kernels.load(values, n, exact);
  kernels.to_words(codes, n, exponent, kPlanes, from_codes);
  for (std::size_t i = 0; i < n; ++i)
    if (exact[i] != from_codes[i]) visit(i, exact[i]);
}

[[noreturn]] void fail_at(std::size_t chunk, const char* what) { fail_in_chunk(kFront.name, chunk, what); }

struct Escapes {
  const std::uint8_t* begin;
  std::size_t n;

  std::size_t index(std::size_t i) const { return load<std::uint16_t>(begin + 2 * i); }
  std::uint32_t word(std::size_t i) const { return load<std::uint32_t>(begin + 2 * n + 4 * i); }
};

// Where every chunk's escapes begin: after all payloads, in order.
std::vector<std::uint64_t> escape_offsets(const std::uint8_t* message, std::uint64_t n_elements, std::size_t partition,
                                          planes::Range range) {
  const std::uint64_t n_chunks = chunks_of(n_elements);
  std::vector<std::uint64_t> offsets(n_chunks + 1);
  offsets[0] = kFront.table_end(n_chunks) + payload_bytes(n_elements, partition, range);
  for (std::size_t chunk = 0; chunk < n_chunks; ++chunk)
    offsets[chunk + 1] = offsets[chunk] + load_entry(message, chunk).n_escapes * kEscapeBytes;
  return offsets;
}

// A message whose header is right, for a receiver of `dtype` and `n_elements`.
class Reader {
 public:
  Reader(ConstBytes message, Dtype dtype, std::uint64_t n_elements)
      : header(read_header(message)), message_(message.data()) {
    expect_values(kFront.name, dtype, n_elements, header.dtype, header.n_elements);
    if (header.is_last()) offsets_ = escape_offsets(message_, n_elements, header.settings.partition, header.range);
  }

  const std::uint8_t* payload(const Chunk& chunk) const { return message_ + chunk.begin; }
  const std::uint8_t* planes(const Chunk& chunk) const {
    return payload(chunk) + (header.holds_exponents() ? chunk.n_partitions : 0);
  }
  Escapes escapes(const Chunk& chunk) const {
    if (!header.is_last()) return {nullptr, 0};
    return {message_ + offsets_[chunk.index], load_entry(message_, chunk.index).n_escapes};
  }

  // Checksum, exponents, order of escapes. Exponents come from the message or, later, from `known`.
  void check(const Chunk& chunk, const std::uint8_t* exponents) const {
    const Escapes extra = escapes(chunk);
    const std::uint32_t crc = crc32c({payload(chunk), chunk.end - chunk.begin});
    if (crc32c({extra.begin, extra.n * kEscapeBytes}, crc) != load_entry(message_, chunk.index).checksum)
      fail_at(chunk.index, "the checksum does not match: bytes were changed on the way");
    bool is_raw = false;
    for (std::size_t i = 0; i < chunk.n_partitions; ++i) {
      if (exponents[i] < kMinExponent) fail_at(chunk.index, "a shared exponent is below 31");
      is_raw |= exponents[i] == kRawExponent;
    }
    if (is_raw && (header.flags & kFlagNonfinite) == 0)
      fail_at(chunk.index, "a non-finite partition that the header denies");
    for (std::size_t i = 0; i < extra.n; ++i) {
      const std::size_t index = extra.index(i);
      if (index >= chunk.n || (i > 0 && index <= extra.index(i - 1))) fail_at(chunk.index, "escapes out of order");
      if (exponents[index / header.settings.partition] == kRawExponent)
        fail_at(chunk.index, "an escape in a raw partition");
      if ((extra.word(i) & 0x7F800000) == 0x7F800000) fail_at(chunk.index, "an escape that is not finite");
    }
  }

  const Header header;

 private:
  const std::uint8_t* const message_;
  std::vector<std::uint64_t> offsets_;
};

void write_partition(const Kernels& kernels, const std::uint32_t* codes, std::size_t n, std::uint32_t exponent,
                     int n_known, void* values) {
  if (exponent == kRawExponent && n_known < kPlanes) {
    kernels.fill_nan(n, values);  // which value is not finite, the first planes do not tell
  } else if (n_known == kPlanes) {
    kernels.store(codes, n, exponent == kRawExponent, values);
  } else {
    std::uint32_t words[kMaxPartition];
    kernels.to_words(codes, n, exponent, n_known, words);
    kernels.store(words, n, false, values);
  }
}

// Codes of which all 32 bits are known to words, but for escapes.
void finish(const Kernels& kernels, std::uint32_t* codes, std::size_t n, std::uint32_t exponent) {
  if (exponent == kRawExponent) return;
  std::uint32_t words[kMaxPartition];
  kernels.to_words(codes, n, exponent, kPlanes, words);
  std::memcpy(codes, words, 4 * n);
}

// body(first value, n, exponent, codes) of each partition.
template <class Body>
void for_known(const Known& known, const Body& body) {
  for_chunks(known.codes.size(), known.settings.partition, {0, 1}, [&](const Chunk& chunk) {
    for_partitions(chunk, known.settings.partition, [&](const Partition& part) {
      const std::size_t at = chunk.first + part.first;
      body(at, part.n, std::uint32_t{known.exponents[at / known.settings.partition]}, known.codes.data() + at);
    });
  });
}

}  // namespace

void check_range(planes::Range range) {
  if (range.first < 0 || range.n < 1 || range.first > kPlanes || range.n > kPlanes - range.first)
    throw InvalidArgument("planes ", range.first, " to ", range.first + range.n - 1,
                          ": there are 32, 0 to 31, and a message holds at least one");
}

std::uint64_t payload_bytes(std::uint64_t n_values, std::size_t partition, planes::Range range) {
  const std::uint64_t n_full = n_values / partition * partition, n_rest = n_values - n_full;
  const std::uint64_t plane_bytes = n_full / 8 + (n_rest + 7) / 8;
  return (range.first == 0 ? partitions_of(n_values, partition) : 0) +
         plane_bytes * static_cast<std::uint64_t>(range.n);
}

std::uint64_t max_message_bytes(std::uint64_t n_elements, std::size_t partition, planes::Range range) {
  const std::uint64_t escapes = range.first + range.n == kPlanes ? n_elements * kEscapeBytes : 0;
  return kFront.table_end(chunks_of(n_elements)) + payload_bytes(n_elements, partition, range) + escapes;
}

ChunkEntry load_entry(const std::uint8_t* message, std::size_t chunk) {
  return load<ChunkEntry>(message + kFront.table_end(chunk));
}

Header read_header(ConstBytes message) {
  const Head head = read_head(kFront, message);
  const Settings settings{head.partition, head.version};
  const planes::Range range{head.first_code, head.second_code};
  const Header header{settings, head.dtype, range, head.flags, head.n_elements};
  // The first test keeps sums from overflowing: each table entry stands for at most 16,384 values.
  const std::uint64_t n_entries = (message.size() - kFront.header_bytes) / kChunkEntryBytes;
  const std::uint64_t n_elements = header.n_elements, n_chunks = chunks_of(n_elements);
  if (n_elements > n_entries * kChunkValues || n_chunks > n_entries)
    fail_message(kFront.name, n_elements, " values in ", message.size(), " bytes");
  const std::uint8_t* const at = message.data();
  check_checksum(kFront, at, n_chunks);
  if (range.n < 1 || range.first + range.n > kPlanes)
    fail_message(kFront.name, "planes ", range.first, " and ", range.n, " more of 32");
  std::uint64_t n_escapes = 0;
  for (std::uint64_t chunk = 0; chunk < n_chunks; ++chunk) {
    const std::uint32_t n = load_entry(at, chunk).n_escapes;
    if (n > (header.is_last() ? std::min<std::uint64_t>(kChunkValues, n_elements - chunk * kChunkValues) : 0))
      fail_message(kFront.name, "chunk ", chunk, ": ", n, " escapes");
    n_escapes += n;
  }
  const std::uint64_t expected =
      kFront.table_end(n_chunks) + payload_bytes(n_elements, settings.partition, range) + n_escapes * kEscapeBytes;
  if (expected != message.size())
    fail_message(kFront.name, "its content takes ", expected, " bytes, not ", message.size());
  return header;
}

std::uint64_t encode(ConstBytes values, Dtype dtype, const Settings& settings, planes::Range range, Bytes out) {
  check_range(range);
  const std::size_t partition = settings.partition;
  const std::size_t value_bytes = bytes_of(dtype);
  const std::uint64_t n_elements = values.size() / bytes_of(dtype);
  std::uint64_t message_bytes = max_message_bytes(n_elements, partition, range);
  check_room(kFront.name, out, message_bytes);
  const Header header{settings, dtype, range, 0, n_elements};
  const Kernels& kernels = kernels_for(dtype, settings.format);
  std::uint8_t* const message = out.data();
  std::atomic<bool> holds_nonfinite{false};
  for_chunks(n_elements, partition, range, [&](const Chunk& chunk) {
    std::uint8_t* exponents = header.holds_exponents() ? message + chunk.begin : nullptr;
    std::uint8_t* planes_out = message + chunk.begin + (exponents != nullptr ? chunk.n_partitions : 0);
    ChunkEntry entry{0, 0};
    for_partitions(chunk, partition, [&](const Partition& part) {
      const auto& [index, first, n, plane_bytes] = part;
      std::uint32_t codes[kMaxPartition];
      const void* const from = values.data() + (chunk.first + first) * value_bytes;
      const std::uint32_t exponent = kernels.to_codes(from, n, padded(n), codes);
      if (exponent == kRawExponent)
        holds_nonfinite.store(true, std::memory_order_relaxed);
      else if (header.is_last())
        for_escapes(kernels, from, codes, n, exponent, [&](std::size_t, std::uint32_t) { ++entry.n_escapes; });
      if (exponents != nullptr) exponents[index] = static_cast<std::uint8_t>(exponent);
      pack(codes, n, range, planes_out);
      planes_out += plane_bytes * static_cast<std::size_t>(range.n);
    });
    entry.checksum = crc32c({message + chunk.begin, chunk.end - chunk.begin});
    store(message + kFront.table_end(chunk.index), entry);
  });
  if (header.is_last()) {
    // Their number had to be known before any could be put in place.
    const std::vector<std::uint64_t> offsets = escape_offsets(message, n_elements, partition, range);
    for_chunks(n_elements, partition, range, [&](const Chunk& chunk) {
      ChunkEntry entry = load_entry(message, chunk.index);
      std::uint8_t* const begin = message + offsets[chunk.index];
      std::uint8_t* indices = begin;
      std::uint8_t* words = begin + 2 * std::size_t{entry.n_escapes};
      if (entry.n_escapes == 0) return;
      for_partitions(chunk, partition, [&](const Partition& part) {
        std::uint32_t codes[kMaxPartition];
        const void* const from = values.data() + (chunk.first + part.first) * value_bytes;
        const std::uint32_t exponent = kernels.to_codes(from, part.n, padded(part.n), codes);
        if (exponent == kRawExponent) return;
        for_escapes(kernels, from, codes, part.n, exponent, [&](std::size_t i, std::uint32_t word) {
          store(indices, static_cast<std::uint16_t>(part.first + i));
          store(words, word);
          indices += 2, words += 4;
        });
      });
      entry.checksum = crc32c({begin, entry.n_escapes * kEscapeBytes}, entry.checksum);
      store(message + kFront.table_end(chunk.index), entry);
    });
    message_bytes = offsets.back();
  }
  const Head head{.version = static_cast<std::uint8_t>(settings.format),
                  .dtype = dtype,
                  .first_code = static_cast<std::uint8_t>(range.first),
                  .second_code = static_cast<std::uint8_t>(range.n),
                  .n_elements = n_elements,
                  .partition = static_cast<std::uint16_t>(partition),
                  .flags = holds_nonfinite ? kFlagNonfinite : std::uint16_t{0},
                  .message_bytes = message_bytes};
  write_header(kFront, head, message, chunks_of(n_elements));
  return message_bytes;
}

void decode(ConstBytes message, Dtype dtype, Bytes values) {
  const std::size_t value_bytes = bytes_of(dtype);
  const Reader reader(message, dtype, values.size() / value_bytes);
  const Header& header = reader.header;
  if (!header.holds_exponents())
    fail_message(kFront.name, "it begins with plane ", header.range.first,
                 ": it refines what came before, and is nothing by itself");
  const Kernels& kernels = kernels_for(dtype, header.settings.format);
  for_chunks(header.n_elements, header.settings.partition, header.range, [&](const Chunk& chunk) {
    const std::uint8_t* const exponents = reader.payload(chunk);
    reader.check(chunk, exponents);
    const Escapes escapes = reader.escapes(chunk);
    std::size_t escape = 0;
    const std::uint8_t* from = reader.planes(chunk);
    for_partitions(chunk, header.settings.partition, [&](const Partition& part) {
      const auto& [index, first, n, plane_bytes] = part;
      std::uint32_t codes[kMaxPartition];
      unpack(from, n, header.range, 0, codes);
      from += plane_bytes * static_cast<std::size_t>(header.range.n);
      if (header.is_last()) {
        finish(kernels, codes, n, exponents[index]);
        for (; escape < escapes.n && escapes.index(escape) < first + n; ++escape)
          codes[escapes.index(escape) - first] = escapes.word(escape);
      }
      write_partition(kernels, codes, n, exponents[index], header.range.n,
                      values.data() + (chunk.first + first) * value_bytes);
    });
  });
}

int refine(ConstBytes message, const Known& known) {
  const Reader reader(message, known.dtype, known.codes.size());
  const Header& header = reader.header;
  expect(kFront.name, "values in a partition", known.settings.partition, header.settings.partition);
  expect(kFront.name, "format", static_cast<std::uint64_t>(known.settings.format),
         static_cast<std::uint64_t>(header.settings.format));
  if (header.range.first != known.n_known)
    fail_message(kFront.name, "it begins with plane ", header.range.first, "; the next one to come is ", known.n_known);
  const std::size_t partitions_a_chunk = kChunkValues / header.settings.partition;
  const auto exponents_of = [&](const Chunk& chunk) -> const std::uint8_t* {
    return header.holds_exponents() ? reader.payload(chunk) : known.exponents.data() + chunk.index * partitions_a_chunk;
  };
  for_chunks(header.n_elements, header.settings.partition, header.range,
             [&](const Chunk& chunk) { reader.check(chunk, exponents_of(chunk)); });
  const Kernels& kernels = kernels_for(known.dtype, known.settings.format);
  for_chunks(header.n_elements, header.settings.partition, header.range, [&](const Chunk& chunk) {
    const std::uint8_t* const exponents = exponents_of(chunk);
    const std::uint8_t* from = reader.planes(chunk);
    std::uint32_t* const codes = known.codes.data() + chunk.first;
    const std::uint32_t keep = header.holds_exponents() ? 0 : ~std::uint32_t{0};
    for_partitions(chunk, header.settings.partition, [&](const Partition& part) {
      const auto& [index, first, n, plane_bytes] = part;
      if (n == padded(n)) {
        unpack(from, n, header.range, keep, codes + first);
      } else {  // the last values of all: no room for a whole group
        std::uint32_t buffer[kMaxPartition] = {};
        std::memcpy(buffer, codes + first, 4 * n);
        unpack(from, n, header.range, keep, buffer);
        std::memcpy(codes + first, buffer, 4 * n);
      }
      from += plane_bytes * static_cast<std::size_t>(header.range.n);
      if (header.is_last()) finish(kernels, codes + first, n, exponents[index]);
    });
    const Escapes escapes = reader.escapes(chunk);
    for (std::size_t i = 0; i < escapes.n; ++i) codes[escapes.index(i)] = escapes.word(i);
    if (header.holds_exponents())
      std::memcpy(known.exponents.data() + chunk.index * partitions_a_chunk, exponents, chunk.n_partitions);
  });
  return header.range.first + header.range.n;
}

void write(const Known& known, Bytes values) {
  const Kernels& kernels = kernels_for(known.dtype, known.settings.format);
  for_known(known, [&](std::size_t at, std::size_t n, std::uint32_t exponent, const std::uint32_t* codes) {
    write_partition(kernels, codes, n, exponent, known.n_known, values.data() + at * bytes_of(known.dtype));
  });
}

void add(const Known& known, Floats sums) {
  const Kernels& kernels = kernels_for(known.dtype, known.settings.format);
  for_known(known, [&](std::size_t at, std::size_t n, std::uint32_t exponent, const std::uint32_t* codes) {
    float* const to = sums.data() + at;
    std::uint32_t words[kMaxPartition];
    if (exponent == kRawExponent) {
      kernels_for(Dtype::float32, known.settings.format).fill_nan(n, to);
    } else if (known.n_known == kPlanes) {
      kernels.add(codes, n, to);
    } else {
      kernels.to_words(codes, n, exponent, known.n_known, words);
      kernels.add(words, n, to);
    }
  });
}

void quantise(ConstBytes values, Dtype dtype, const Settings& settings, int n_known, Bytes out) {
  check_range({0, n_known});
  const std::size_t partition = settings.partition;
  if (out.size() != values.size()) throw InvalidArgument("embedded-float: quantise: out has another size");
  if (n_known == kPlanes) {
    if (out.data() != values.data()) std::memcpy(out.data(), values.data(), values.size());
    return;
  }
  const Kernels& kernels = kernels_for(dtype, settings.format);
  const std::size_t value_bytes = bytes_of(dtype);
  const std::uint32_t mask = ~std::uint32_t{0} << (32 - n_known);
  for_chunks(values.size() / value_bytes, partition, {0, n_known}, [&](const Chunk& chunk) {
    for_partitions(chunk, partition, [&](const Partition& part) {
      const std::size_t n = part.n, at = (chunk.first + part.first) * value_bytes;
      std::uint32_t codes[kMaxPartition];
      const std::uint32_t exponent = kernels.to_codes(values.data() + at, n, n, codes);
      for (std::size_t i = 0; i < n; ++i) codes[i] &= mask;
      write_partition(kernels, codes, n, exponent, n_known, out.data() + at);
    });
  });
}

}  // namespace gradwire::embedded_float
