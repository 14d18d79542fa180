#include "huffman/table.hpp"

#include <algorithm>
#include <cstring>
#include <limits>
#include <numeric>
#include <queue>
#include <tuple>

#include "bits/bit_io.hpp"
#include "checksum/crc32c.hpp"
#include "errors.hpp"

namespace gradwire {
namespace {

constexpr std::uint64_t kRawBits = 8;  // what follows an escape code

// Positions of the positive weights, lightest first, ties by position.
std::vector<int> sorted_by_weight(std::span<const std::uint64_t> weights) {
  std::vector<int> order;
  for (std::size_t i = 0; i < weights.size(); ++i)
    if (weights[i] > 0) order.push_back(static_cast<int>(i));
  std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return weights[a] < weights[b]; });
  return order;
}

// Optimal code lengths under a limit (package-merge: Larmore and Hirschberg, JACM 1990). `weights` are all positive, at
// least two and at most 2^limit of them, with a sum below 2^57. Ties are broken by position: the same weights give the
// same lengths everywhere. The code is complete: the sum of 2^-length is 1.
std::vector<int> limited_code_lengths(std::span<const std::uint64_t> weights, int limit) {
  const std::vector<int> order = sorted_by_weight(weights);
  const std::size_t n_leaves = order.size();
  // One list a level: leaves and packages (pairs of the list before) merged by weight, a leaf before an equal package.
  std::vector<std::vector<bool>> is_leaf(limit);
  std::vector<std::uint64_t> list;
  for (int level = 0; level < limit; ++level) {
    std::vector<std::uint64_t> merged;
    std::size_t leaf = 0, pair = 0;
    const std::size_t n_pairs = list.size() / 2;
    while (leaf < n_leaves || pair < n_pairs) {
      const std::uint64_t package =
          pair < n_pairs ? list[2 * pair] + list[2 * pair + 1] : std::numeric_limits<std::uint64_t>::max();
      const bool takes_leaf = leaf < n_leaves && weights[order[leaf]] <= package;
      is_leaf[level].push_back(takes_leaf);
      if (takes_leaf) {
        merged.push_back(weights[order[leaf++]]);
      } else {
        merged.push_back(package);
        ++pair;
      }
    }
    list = std::move(merged);
  }
  // The 2n-2 lightest of the last list; a leaf taken on a level adds one bit to its code, and the leaves taken are
  // always the lightest ones.
  std::vector<int> lengths(weights.size(), 0);
  std::size_t n_taken = 2 * n_leaves - 2;
  for (int level = limit - 1; level >= 0; --level) {
    const auto n_taken_leaves =
        static_cast<std::size_t>(std::count(is_leaf[level].begin(), is_leaf[level].begin() + n_taken, true));
    for (std::size_t leaf = 0; leaf < n_taken_leaves; ++leaf) ++lengths[order[leaf]];
    n_taken = 2 * (n_taken - n_taken_leaves);
  }
  return lengths;
}

// Code lengths of every symbol of `histogram`, with the escape's appended as the last entry; 0: no code, escape it.
// Which of the rare symbols are escaped (escape code + 8 raw bits) is chosen so that the coded histogram is shortest.
// The escape has a code if and only if some symbol has none. The histogram's sum is in [1, 2^56).
std::vector<int> escaped_code_lengths(std::span<const std::uint64_t> histogram, int limit) {
  const std::size_t escape = histogram.size();
  const std::vector<int> order = sorted_by_weight(histogram);
  const std::uint64_t total = std::accumulate(histogram.begin(), histogram.end(), std::uint64_t{0});
  std::vector<int> best;
  std::uint64_t best_bits = std::numeric_limits<std::uint64_t>::max();
  std::uint64_t n_escaped = 0;  // values, in the histogram, of the symbols escaped so far
  std::vector<std::uint64_t> weights(histogram.begin(), histogram.end());
  weights.push_back(0);
  for (std::size_t n_symbols_escaped = 0; n_symbols_escaped < order.size(); ++n_symbols_escaped) {
    if (n_symbols_escaped > 0) {
      const int rarest = order[n_symbols_escaped - 1];
      n_escaped += histogram[rarest];
      weights[rarest] = 0;
      if (n_escaped > total / 8) break;  // an escape costs at least 9 bits: it cannot pay for common symbols
    }
    const bool has_escape = order.size() - n_symbols_escaped < histogram.size();
    weights[escape] = has_escape ? std::max<std::uint64_t>(1, n_escaped) : 0;
    std::vector<int> lengths = limited_code_lengths(weights, limit);
    std::uint64_t bits = n_escaped * (lengths[escape] + kRawBits);
    for (std::size_t symbol = 0; symbol < histogram.size(); ++symbol)
      if (weights[symbol] > 0) bits += histogram[symbol] * lengths[symbol];
    if (bits < best_bits) {
      best_bits = bits;
      best = std::move(lengths);
    }
  }
  return best;
}

constexpr std::array<std::uint8_t, 4> kMagic = {'G', 'W', 'H', 'T'};
constexpr std::uint8_t kVersion = 1;
constexpr std::size_t kHeaderBytes = 8;
constexpr std::size_t kChecksumBytes = 4;

std::uint64_t fnv1a(ConstBytes bytes) {
  std::uint64_t hash = 0xCBF29CE484222325;
  for (const std::uint8_t byte : bytes) hash = (hash ^ byte) * 0x100000001B3;
  return hash;
}

std::uint32_t reverse_bits(std::uint32_t code, int n_bits) {
  std::uint32_t reversed = 0;
  for (int bit = 0; bit < n_bits; ++bit) reversed |= ((code >> bit) & 1) << (n_bits - 1 - bit);
  return reversed;
}

// What is wrong with these lengths, or nothing.
const char* find_flaw(ConstBytes lengths) {
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

std::vector<int> native_code_lengths(std::span<const std::uint64_t> weights) {
  std::vector<int> lengths(weights.size(), 0);
  const std::vector<int> order = sorted_by_weight(weights);
  if (order.size() == 1) lengths[order[0]] = 1;
  using Tree = std::tuple<std::uint64_t, std::size_t, std::vector<int>>;  // weight, order of creation, symbols
  std::priority_queue<Tree, std::vector<Tree>, std::greater<>> queue;
  for (const int symbol : order) queue.emplace(weights[symbol], queue.size(), std::vector{symbol});
  for (std::size_t age = order.size(); queue.size() > 1; ++age) {
    auto [weight, own_age, symbols] = queue.top();
    queue.pop();
    const auto& [more_weight, more_age, more] = queue.top();
    symbols.insert(symbols.end(), more.begin(), more.end());
    for (const int symbol : symbols) ++lengths[symbol];
    weight += more_weight;
    queue.pop();
    queue.emplace(weight, age, std::move(symbols));
  }
  return lengths;
}

HuffmanTable::HuffmanTable(ConstBytes lengths, int exponent_bits)
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
  return {std::vector<std::uint8_t>(lengths.begin(), lengths.end()), exponent_bits};
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

HuffmanTable HuffmanTable::from_bytes(ConstBytes bytes) {
  if (bytes.size() < kHeaderBytes || !std::equal(kMagic.begin(), kMagic.end(), bytes.begin()))
    throw CorruptMessage("this is no serialised Huffman table: it does not begin with GWHT");
  if (bytes[4] != kVersion)
    throw IncompatibleVersion("Huffman table of version ", bytes[4], "; this build reads version 1");
  const int exponent_bits = bytes[5];
  if ((exponent_bits != 8 && exponent_bits != 5) || bytes[6] != 0 || bytes[7] != 0)
    throw CorruptMessage("Huffman table: impossible header");
  const std::size_t n_lengths = (std::size_t{1} << exponent_bits) + 1;
  const std::size_t n_bytes = kHeaderBytes + (n_lengths + 1) / 2 + kChecksumBytes;
  if (bytes.size() != n_bytes) throw CorruptMessage("Huffman table of ", bytes.size(), " bytes; expected ", n_bytes);
  if (crc32c(bytes.first(n_bytes - kChecksumBytes)) != load<std::uint32_t>(bytes.data() + n_bytes - kChecksumBytes))
    throw CorruptMessage("Huffman table: the checksum does not match");
  std::vector<std::uint8_t> lengths;
  for (std::size_t i = 0; i < n_lengths; ++i) lengths.push_back((bytes[kHeaderBytes + i / 2] >> (4 * (i % 2))) & 0xF);
  if (const char* flaw = find_flaw(lengths)) throw CorruptMessage("Huffman table: ", flaw);
  return HuffmanTable(lengths, exponent_bits);
}

// ---- segments

namespace {

// The parts of a segment, checked against its length.
struct Segment {
  std::array<ConstBytes, kStreams> streams;
  ConstBytes escapes;
};

Segment parse_segment(ConstBytes bytes, std::size_t n_values) {
  if (bytes.size() < kSegmentHeaderBytes) throw CorruptMessage("exponent segment: shorter than its own header");
  Segment segment;
  std::size_t position = kSegmentHeaderBytes;
  for (std::size_t j = 0; j < kStreams; ++j) {
    const std::size_t n_bytes = load<std::uint16_t>(bytes.data() + 2 * j);
    const ValueRange range = stream_range(n_values, j);
    if (n_bytes > bytes.size() - position || n_bytes > bytes_of_bits((range.end - range.begin) * kCodeLengthLimit))
      throw CorruptMessage("exponent segment: stream ", j, " of ", n_bytes, " bytes is longer than what holds it");
    segment.streams[j] = bytes.subspan(position, n_bytes);
    position += n_bytes;
  }
  const std::size_t n_escapes = load<std::uint16_t>(bytes.data() + 2 * kStreams);
  if (n_escapes != bytes.size() - position)
    throw CorruptMessage("exponent segment: ", n_escapes, " escapes announced, ", bytes.size() - position,
                         " bytes left for them");
  segment.escapes = bytes.subspan(position);
  return segment;
}

void check_stream_end(const Segment& segment, std::size_t stream, std::uint64_t n_bits_used) {
  if (bytes_of_bits(n_bits_used) != segment.streams[stream].size())
    throw CorruptMessage("exponent segment: stream ", stream, " ends at bit ", n_bits_used, " of ",
                         8 * segment.streams[stream].size());
}

// Puts the raw exponents where the placeholder stands.
void resolve_escapes(const HuffmanTable& table, ConstBytes escapes, Bytes exponents) {
  std::size_t n_resolved = 0;
  if (table.has_escape()) {
    std::uint8_t* const end = exponents.data() + exponents.size();
    for (std::uint8_t* at = exponents.data(); at != end; ++at) {
      at = static_cast<std::uint8_t*>(std::memchr(at, table.placeholder(), static_cast<std::size_t>(end - at)));
      if (at == nullptr) break;
      if (n_resolved == escapes.size()) throw CorruptMessage("exponent segment: more escape codes than escapes");
      const std::uint8_t raw = escapes[n_resolved++];
      if (raw >= table.n_symbols() || !table.is_escaped(raw))
        throw CorruptMessage("exponent segment: exponent ", raw, " was escaped, but has a code");
      *at = raw;
    }
  }
  if (n_resolved != escapes.size()) throw CorruptMessage("exponent segment: fewer escape codes than escapes");
}

}  // namespace

std::size_t encode_exponents(const HuffmanTable& table, ConstBytes exponents, std::uint8_t* out) {
  std::uint8_t* end = out + kSegmentHeaderBytes;
  static thread_local std::array<std::uint8_t, kMaxSegmentValues> escapes;
  std::uint8_t* escapes_end = escapes.data();
  std::array<std::uint16_t, kStreams + 1> header{};
  for (std::size_t j = 0; j < kStreams; ++j) {
    const ValueRange range = stream_range(exponents.size(), j);
    std::uint8_t* const begin = end;
    end = stream_kernels().encode(exponents.data() + range.begin, range.end - range.begin, table, begin, escapes_end);
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

void decode_exponents(const HuffmanTable& table, ConstBytes bytes, const std::uint8_t* readable_end, Bytes exponents) {
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
  stream_kernels().decode(table, spans, n_bits_used);
  for (std::size_t j = 0; j < kStreams; ++j) check_stream_end(segment, j, n_bits_used[j]);
  resolve_escapes(table, segment.escapes, exponents);
}

void decode_exponents_by_tree(const HuffmanTable& table, ConstBytes bytes, Bytes exponents) {
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
