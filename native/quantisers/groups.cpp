#include <algorithm>
#include <atomic>
#include <bit>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "bits/bit_io.hpp"
#include "quantisers/codec.hpp"
#include "quantisers/sweep.hpp"

namespace gradwire::quantisers {
namespace {

constexpr std::size_t kCutBytes = 4, kScaleBytes = 2;

// Of the four levels of two bits, in units of the mean magnitude: those of the least squared error for a normal
// distribution (Max 1960, Lloyd 1982: 0.4528 and 1.5104 standard deviations), which leave 0.1175 of its square.
constexpr double kInnerLevel = 0.5675, kOuterLevel = 1.8930;

std::size_t values_a_word(Kind kind) { return kind == Kind::one_bit ? 32 : 16; }

std::uint64_t quotient_up(std::uint64_t n, std::uint64_t by) { return (n + by - 1) / by; }

// ---- scales are the upper halves of float32

std::uint16_t rounded(double value) {
  const auto bits = std::bit_cast<std::uint32_t>(narrowed(value));
  const std::uint32_t nearest = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;  // ties to even
  return static_cast<std::uint16_t>(std::min<std::uint32_t>(nearest, 0x7F7F));
}

float widened(std::uint16_t scale) { return std::bit_cast<float>(std::uint32_t{scale} << 16); }

// ---- where everything of a message lies

// Up to kBlock values of one tensor, which begin with a group and with a word.
struct Block {
  std::size_t begin, n, first_group, first_word;
};

struct Layout {
  std::vector<Block> blocks;
  std::uint64_t n_groups = 0, n_words = 0;
  std::size_t cuts_at = 0, scales_at = 0, codes_at = 0, end = 0;
};

std::uint64_t scale_bytes(std::uint64_t n_groups, int per_group) {
  return 4 * quotient_up(n_groups * static_cast<std::uint64_t>(per_group) * kScaleBytes, 4);
}

// `cuts`: ascending, all of them within the values.
Layout lay_out(const Header& header, ConstWords cuts) {
  Layout layout;
  const std::size_t n = header.n_elements, group = header.block, per_word = values_a_word(header.kind);
  layout.blocks.reserve(n / kBlock + cuts.size() + 1);
  for (std::size_t piece = 0, begin = 0; piece <= cuts.size() && n > 0; ++piece) {
    const std::size_t end = piece < cuts.size() ? cuts[piece] : n;
    for (; begin < end; begin = std::min(end, begin + kBlock)) {
      const std::size_t count = std::min(kBlock, end - begin);
      layout.blocks.push_back({begin, count, layout.n_groups, layout.n_words});
      layout.n_groups += quotient_up(count, group);
      layout.n_words += quotient_up(count, per_word);
    }
  }
  layout.cuts_at = kHeaderBytes + kCutBytes;
  layout.scales_at = layout.cuts_at + kCutBytes * cuts.size();
  layout.codes_at = layout.scales_at + scale_bytes(layout.n_groups, header.levels);
  layout.end = layout.codes_at + 4 * layout.n_words;
  return layout;
}

template <typename Body>
void for_laid_out(const Layout& layout, const Body& body) {
  parallel_for_runs(layout.blocks.size(), kTaskBlocks, [&](std::size_t begin, std::size_t n) {
    for (const Block& block : std::span(layout.blocks).subspan(begin, n)) body(block);
  });
}

// One block: its scales and its codes, each group while it lies in L1. False if a value is not finite.
bool pack(const Options& options, const Header& header, const Terms& terms, const Block& block, const LeftOut& left_out,
          std::uint8_t* scales, std::uint8_t* codes) {
  const Kernels& on = kernels();
  Codes packed;
  const std::size_t per_word = values_a_word(header.kind);
  for (std::size_t begin = 0; begin < block.n; begin += header.block) {
    const std::size_t n = std::min<std::size_t>(header.block, block.n - begin);
    const Terms mine = terms.from(begin);
    const Magnitudes found = on.magnitudes(mine, n);
    if (found.largest >= kInfinity) return false;
    std::uint16_t kept[2];
    const double magnitude = mean_of(found.positive + found.negative, n);
    if (header.levels == 1) {
      kept[0] = kept[1] = rounded((header.kind == Kind::two_bit ? double{options.parameter} : 1.0) * magnitude);
    } else if (header.kind == Kind::one_bit) {
      kept[0] = rounded(mean_of(found.positive, n - found.n_negative));
      kept[1] = rounded(mean_of(found.negative, found.n_negative));
    } else {
      kept[0] = rounded(kInnerLevel * magnitude);
      kept[1] = rounded(kOuterLevel * magnitude);
    }
    std::uint32_t* const words = packed.words() + begin / per_word;
    if (header.kind == Kind::one_bit)
      on.pack_signs(mine, n, widened(kept[0]), -widened(kept[1]), left_out.from(begin), words);
    else if (header.levels == 1)
      on.pack_beyond(mine, n, widened(kept[0]), left_out.from(begin), words);
    else
      on.pack_nearest(mine, n, widened(kept[0]), widened(kept[1]), left_out.from(begin), words);
    const std::size_t bytes = kScaleBytes * static_cast<std::size_t>(header.levels);
    std::memcpy(scales + bytes * (begin / header.block), kept, bytes);
  }
  std::memcpy(codes, packed.words(), 4 * quotient_up(block.n, per_word));
  return true;
}

// False if there is a scale or a code that no encoder writes.
bool unpack(const Header& header, const Block& block, const std::uint8_t* scales, const std::uint8_t* codes,
            float divisor, float* out) {
  const Kernels& on = kernels();
  Codes packed;
  const std::size_t per_word = values_a_word(header.kind);
  std::memcpy(packed.words(), codes, 4 * quotient_up(block.n, per_word));
  bool valid = true;
  for (std::size_t begin = 0; begin < block.n; begin += header.block) {
    const std::size_t n = std::min<std::size_t>(header.block, block.n - begin);
    const std::size_t bytes = kScaleBytes * static_cast<std::size_t>(header.levels);
    std::uint16_t kept[2];
    std::memcpy(kept, scales + bytes * (begin / header.block), bytes);
    if (header.levels == 1) kept[1] = kept[0];
    if (kept[0] >= kInfinity >> 16 || kept[1] >= kInfinity >> 16) return false;
    const float first = widened(kept[0]) / divisor, second = widened(kept[1]) / divisor;
    const std::uint32_t* const words = packed.words() + begin / per_word;
    if (header.kind == Kind::one_bit)
      on.unpack_signs(words, n, first, -second, out + begin);
    else if (header.levels == 1)
      valid &= on.unpack_ternary(words, n, first, out + begin);
    else
      on.unpack_nearest(words, n, first, second, out + begin);
  }
  return valid;
}

Header header_for(const Options& options, std::uint64_t n_elements) {
  if (n_elements > std::numeric_limits<std::uint32_t>::max())
    throw InvalidArgument(name_of(options.kind), ": a message with groups holds up to 2^32 - 1 values");
  const std::uint8_t per_group = options.rule == Options::Rule::two_means ? 2 : 1;
  return {{}, kGroupedVersion, options.kind, 0, per_group, n_elements, options.block};
}

// The first cut that does not lie behind the one before it and within the values; the end if there is none.
ConstWords::iterator find_wrong_cut(ConstWords cuts, std::uint64_t n_elements) {
  auto cut = cuts.begin();
  for (std::uint64_t last = 0; cut != cuts.end() && *cut > last && *cut < n_elements; ++cut) last = *cut;
  return cut;
}

}  // namespace

bool has_groups(const Options& options) {
  return options.block != 0 && (options.kind == Kind::one_bit || options.kind == Kind::two_bit);
}

std::uint64_t max_grouped_bytes(const Options& options, std::uint64_t n_elements, std::uint64_t n_cuts) {
  const Header header = header_for(options, n_elements);
  const std::uint64_t cuts = n_elements == 0 ? 0 : std::min(n_cuts, n_elements - 1);
  const std::uint64_t n_groups = quotient_up(n_elements, header.block) + cuts;
  const std::uint64_t n_words = quotient_up(n_elements, values_a_word(header.kind)) + cuts;
  // Two scales a group: whoever reads the bound need not say the rule.
  return kHeaderBytes + kCutBytes * (1 + cuts) + scale_bytes(n_groups, 2) + 4 * n_words;
}

std::uint64_t encode_groups(const Options& options, const Source& source, Floats new_residual, Bytes out) {
  Header header = header_for(options, source.n_elements());
  if (const auto cut = find_wrong_cut(options.cuts, header.n_elements); cut != options.cuts.end())
    throw InvalidArgument("cuts ascend and lie within the values, not at ", *cut);
  const Layout layout = lay_out(header, options.cuts);
  check_room(name_of(options.kind), out, layout.end);
  std::uint8_t* const to = out.data();
  store(to + kHeaderBytes, static_cast<std::uint32_t>(options.cuts.size()));
  for (std::size_t i = 0; i < options.cuts.size(); ++i) store(to + layout.cuts_at + kCutBytes * i, options.cuts[i]);
  std::memset(to + layout.scales_at, 0, layout.codes_at - layout.scales_at);
  std::atomic<bool> is_finite{true};
  // What is written over the residual itself cannot be taken back: then all values are looked at beforehand.
  if (!new_residual.empty() && new_residual.data() == source.residual.data())
    for_laid_out(layout, [&](const Block& block) {
      alignas(32) float scratch[kBlock];
      if (kernels().magnitudes(terms_of(source, block.begin, block.n, scratch), block.n).largest >= kInfinity)
        is_finite.store(false, std::memory_order_relaxed);
    });
  if (is_finite)
    for_laid_out(layout, [&](const Block& block) {
      alignas(32) float scratch[kBlock];
      float* const left = new_residual.empty() ? nullptr : new_residual.data() + block.begin;
      const std::size_t scale_at = kScaleBytes * static_cast<std::size_t>(header.levels) * block.first_group;
      if (!pack(options, header, terms_of(source, block.begin, block.n, scratch), block,
                {left, 1 / source.residual_scale}, to + layout.scales_at + scale_at,
                to + layout.codes_at + 4 * block.first_word))
        is_finite.store(false, std::memory_order_relaxed);
    });
  if (!is_finite) {
    header.flags = kFlagNonfinite;
    keep_residual(source, new_residual);
  }
  const std::uint64_t message_bytes = header.is_finite() ? layout.end : kHeaderBytes;
  write_message(header, out.first(message_bytes));
  return message_bytes;
}

void decode_groups(const Header& header, ConstBytes message, Dtype dtype, Bytes out, const Use& use) {
  const char* const name = name_of(header.kind);
  std::vector<std::uint32_t> cuts;
  if (header.is_finite()) {
    if (message.size() < kHeaderBytes + kCutBytes) fail_message(name, "it ends before its cuts");
    const ConstBytes from = message.subspan(kHeaderBytes + kCutBytes);
    const std::size_t n_cuts = load<std::uint32_t>(message.data() + kHeaderBytes);
    if (n_cuts > from.size() / kCutBytes) fail_message(name, "it ends before its cuts");
    cuts.resize(n_cuts);
    if (n_cuts > 0) std::memcpy(cuts.data(), from.data(), kCutBytes * n_cuts);
    if (ConstWords all = cuts; find_wrong_cut(all, header.n_elements) != all.end())
      fail_message(name, "its cuts do not ascend within its values");
  }
  const Layout layout = lay_out(header, cuts);
  expect(name, "length in bytes", header.is_finite() ? layout.end : kHeaderBytes, message.size());
  std::atomic<bool> valid{true};
  for_laid_out(layout, [&](const Block& block) {
    const std::size_t scale_at = kScaleBytes * static_cast<std::size_t>(header.levels) * block.first_group;
    write_values(dtype, out, block.begin, block.n, use.adds, [&](float* values) {
      if (!header.is_finite())
        std::fill_n(values, block.n, std::numeric_limits<float>::quiet_NaN());
      else if (!unpack(header, block, message.data() + layout.scales_at + scale_at,
                       message.data() + layout.codes_at + 4 * block.first_word, use.divisor, values))
        valid.store(false, std::memory_order_relaxed);
    });
  });
  if (!valid) fail_message(name, "it holds a scale or a code that no encoder writes");
}

}  // namespace gradwire::quantisers
