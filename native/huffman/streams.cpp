#include "huffman/streams.hpp"

#include <algorithm>
#include <cstring>
#include <string>
#include <vector>

#include "bits/bit_io.hpp"
#include "errors.hpp"

namespace gradwire {
namespace {

const StreamKernels& kernels() {
  return at_current_level<2>([](auto level) -> const StreamKernels& { return stream_kernels_at(level); });
}

// The parts of a segment, checked against its length.
struct Segment {
  std::array<std::span<const std::uint8_t>, kStreams> streams;
  std::span<const std::uint8_t> escapes;
};

Segment parse_segment(std::span<const std::uint8_t> bytes, std::size_t n_values) {
  if (bytes.size() < kSegmentHeaderBytes) throw CorruptMessage("exponent segment: shorter than its own header");
  Segment segment;
  std::size_t position = kSegmentHeaderBytes;
  for (std::size_t j = 0; j < kStreams; ++j) {
    const std::size_t n_bytes = load<std::uint16_t>(bytes.data() + 2 * j);
    const ValueRange range = stream_range(n_values, j);
    if (n_bytes > bytes.size() - position || n_bytes > bytes_of_bits((range.end - range.begin) * kCodeLengthLimit))
      throw CorruptMessage("exponent segment: stream " + std::to_string(j) + " of " + std::to_string(n_bytes) +
                           " bytes is longer than what holds it");
    segment.streams[j] = bytes.subspan(position, n_bytes);
    position += n_bytes;
  }
  const std::size_t n_escapes = load<std::uint16_t>(bytes.data() + 2 * kStreams);
  if (n_escapes != bytes.size() - position)
    throw CorruptMessage("exponent segment: " + std::to_string(n_escapes) + " escapes announced, " +
                         std::to_string(bytes.size() - position) + " bytes left for them");
  segment.escapes = bytes.subspan(position);
  return segment;
}

void check_stream_end(const Segment& segment, std::size_t stream, std::uint64_t n_bits_used) {
  if (bytes_of_bits(n_bits_used) != segment.streams[stream].size())
    throw CorruptMessage("exponent segment: stream " + std::to_string(stream) + " ends at bit " +
                         std::to_string(n_bits_used) + " of " + std::to_string(8 * segment.streams[stream].size()));
}

// Puts the raw exponents where the placeholder stands.
void resolve_escapes(const HuffmanTable& table, std::span<const std::uint8_t> escapes,
                     std::span<std::uint8_t> exponents) {
  std::size_t n_resolved = 0;
  if (table.has_escape()) {
    std::uint8_t* const end = exponents.data() + exponents.size();
    for (std::uint8_t* at = exponents.data(); at != end; ++at) {
      at = static_cast<std::uint8_t*>(std::memchr(at, table.placeholder(), static_cast<std::size_t>(end - at)));
      if (at == nullptr) break;
      if (n_resolved == escapes.size()) throw CorruptMessage("exponent segment: more escape codes than escapes");
      const std::uint8_t raw = escapes[n_resolved++];
      if (raw >= table.n_symbols() || !table.is_escaped(raw))
        throw CorruptMessage("exponent segment: exponent " + std::to_string(raw) + " was escaped, but has a code");
      *at = raw;
    }
  }
  if (n_resolved != escapes.size()) throw CorruptMessage("exponent segment: fewer escape codes than escapes");
}

}  // namespace

std::size_t encode_exponents(const HuffmanTable& table, std::span<const std::uint8_t> exponents, std::uint8_t* out) {
  std::uint8_t* end = out + kSegmentHeaderBytes;
  static thread_local std::array<std::uint8_t, kMaxSegmentValues> escapes;
  std::uint8_t* escapes_end = escapes.data();
  std::array<std::uint16_t, kStreams + 1> header{};
  for (std::size_t j = 0; j < kStreams; ++j) {
    const ValueRange range = stream_range(exponents.size(), j);
    std::uint8_t* const begin = end;
    end = kernels().encode(exponents.data() + range.begin, range.end - range.begin, table, begin, escapes_end);
    header[j] = static_cast<std::uint16_t>(end - begin);
  }
  const auto n_escapes = static_cast<std::size_t>(escapes_end - escapes.data());
  const std::size_t n_bytes = static_cast<std::size_t>(end - out) + n_escapes;
  if (n_bytes >= exponents.size()) return 0;
  header[kStreams] = static_cast<std::uint16_t>(n_escapes);
  std::memcpy(end, escapes.data(), n_escapes);
  std::memcpy(out, header.data(), kSegmentHeaderBytes);
  return n_bytes;
}

void decode_exponents(const HuffmanTable& table, std::span<const std::uint8_t> bytes, const std::uint8_t* readable_end,
                      std::span<std::uint8_t> exponents) {
  const Segment segment = parse_segment(bytes, exponents.size());
  StreamSpans spans;
  const std::uint8_t* base = bytes.data();
  // Whatever the bits say, the loops stay within 11 bits a value and a word from where a stream begins. Where the
  // buffer ends sooner, a copy with that much room is decoded instead.
  static thread_local std::array<std::uint8_t, 2 * kMaxSegmentValues> copy;
  const std::size_t reach = bytes_of_bits(stream_range(exponents.size(), 0).end * kCodeLengthLimit) + kBitSlackBytes;
  const auto streams_bytes = static_cast<std::size_t>(segment.escapes.data() - bytes.data());
  static_assert(2 * kMaxSegmentValues >= max_segment_bytes(kMaxSegmentValues) + kMaxSegmentValues / 4 * 11 / 8 + 16);
  if (static_cast<std::size_t>(readable_end - bytes.data()) < streams_bytes + reach) {
    std::memcpy(copy.data(), bytes.data(), streams_bytes);
    base = copy.data();
  }
  for (std::size_t j = 0; j < kStreams; ++j) {
    const ValueRange range = stream_range(exponents.size(), j);
    spans.in[j] = base + (segment.streams[j].data() - bytes.data());
    spans.out[j] = exponents.data() + range.begin;
    spans.out_end[j] = exponents.data() + range.end;
  }
  std::array<std::uint64_t, kStreams> n_bits_used;
  kernels().decode(table, spans, n_bits_used);
  for (std::size_t j = 0; j < kStreams; ++j) check_stream_end(segment, j, n_bits_used[j]);
  resolve_escapes(table, segment.escapes, exponents);
}

void decode_exponents_by_tree(const HuffmanTable& table, std::span<const std::uint8_t> bytes,
                              std::span<std::uint8_t> exponents) {
  struct Node {
    int child[2] = {-1, -1};
    std::uint8_t symbol = 0;
  };
  std::vector<Node> tree(1);
  for (std::size_t index = 0; index < kLookupEntries; ++index) {
    const std::uint16_t entry = table.lookup_single()[index];
    int node = 0;
    for (int bit = 0; bit < (entry & 0xFF); ++bit) {
      const int side = (index >> bit) & 1;
      if (tree[node].child[side] < 0) {
        tree[node].child[side] = static_cast<int>(tree.size());
        tree.emplace_back();
      }
      node = tree[node].child[side];
    }
    tree[node].symbol = static_cast<std::uint8_t>(entry >> 8);
  }
  const Segment segment = parse_segment(bytes, exponents.size());
  for (std::size_t j = 0; j < kStreams; ++j) {
    const ValueRange range = stream_range(exponents.size(), j);
    const std::uint64_t n_bits = 8 * segment.streams[j].size();
    std::uint64_t position = 0;
    for (std::size_t i = range.begin; i < range.end; ++i) {
      int node = 0;
      while (tree[node].child[0] >= 0) {
        if (position == n_bits) throw CorruptMessage("exponent segment: a stream ends within a code");
        const int bit = (segment.streams[j][position >> 3] >> (position & 7)) & 1;
        node = tree[node].child[bit];
        ++position;
      }
      exponents[i] = tree[node].symbol;
    }
    check_stream_end(segment, j, position);
  }
  resolve_escapes(table, segment.escapes, exponents);
}

}  // namespace gradwire
