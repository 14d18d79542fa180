// One-bit and two-bit messages with scales by group (docs/format.md#scales-by-group) on a device: the bytes of
// native/quantisers/groups.cpp. As in quantised.hpp, but what is launched first is gw_grouped_measure, gw_grouped_head
// and gw_grouped_pack; and to read, gw_grouped_check and gw_grouped_unpack come after gw_quantised_read_pieces.
#pragma once

#include "quantised.hpp"

namespace gradwire::gpu {

inline constexpr double kInnerLevel = 0.5675, kOuterLevel = 1.8930;  // native/quantisers/groups.cpp
inline constexpr u32 kGroupedVersion = 2, kCutBytes = 4, kScaleBytes = 2, kUpperInfinity = kInfinity >> 16;

// Values of one tensor, which begin with a group and with a word of their own.
struct Piece {
  u64 begin, first_group, first_word;
};

struct Grouping {
  const Piece* pieces;  // n_pieces, and one where all of them end
  u64 n_pieces;
  u32 values, per_group;  // values to a group; scales of it
};

struct QuantiseGroups {
  Quantise base;  // `block` and `sums` mean nothing
  Grouping by;
  u32* largest;  // one a group: magnitude, as bits
};

struct DequantiseGroups {
  Dequantise base;
  Grouping by;
};

__device__ __forceinline__ const Piece& end_of(const Grouping& by) { return by.pieces[by.n_pieces]; }
__device__ __forceinline__ u64 cuts_of(const Grouping& by) { return by.n_pieces > 0 ? by.n_pieces - 1 : 0; }
__device__ __forceinline__ u64 scales_at(const Grouping& by) { return kHeaderBytes + kCutBytes * (1 + cuts_of(by)); }
__device__ __forceinline__ u64 codes_at(const Grouping& by) {
  return scales_at(by) + 4 * parts_of(end_of(by).first_group * by.per_group * kScaleBytes, 4);
}

// The piece that number `at` lies in, of the numbers that `first` counts; there is one.
__device__ __forceinline__ u64 piece_with(const Grouping& by, u64 Piece::* first, u64 at) {
  u64 low = 0, high = by.n_pieces;
  while (high - low > 1) {
    const u64 middle = (low + high) / 2;
    if (by.pieces[middle].*first <= at)
      low = middle;
    else
      high = middle;
  }
  return low;
}

// Where field `lane` of code word `word` belongs: the value, if there is one, and its group.
struct Place {
  u64 value, group;
  bool is_there;
};
__device__ __forceinline__ Place place_of(const Grouping& by, u64 word, u32 lane, u32 per_word) {
  if (word >= end_of(by).first_word) return {0, 0, false};
  const u64 number = piece_with(by, &Piece::first_word, word);
  const Piece piece = by.pieces[number];
  const u64 offset = (word - piece.first_word) * per_word + lane;
  return {piece.begin + offset, piece.first_group + offset / by.values,
          piece.begin + offset < by.pieces[number + 1].begin};
}

__device__ __forceinline__ float widened(u16 scale) { return __uint_as_float(static_cast<u32>(scale) << 16); }
__device__ __forceinline__ u16 upper_half(double value) {
  const u32 bits = __float_as_uint(narrowed(value)), nearest = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
  return static_cast<u16>(nearest < kUpperInfinity ? nearest : kUpperInfinity - 1);
}
__device__ __forceinline__ double exact_mean(double sum, u64 count) {
  return count == 0 ? 0.0 : sum / static_cast<double>(count);
}
// Of two bits with four levels: 0 inner, 1 outer, 2 -inner, 3 -outer.
__device__ __forceinline__ u32 nearest_code(float term, float inner, float outer) {
  return (__uint_as_float(magnitude_bits(term)) >= 0.5f * inner + 0.5f * outer) | (term < 0) << 1;
}
__device__ __forceinline__ float level_of(u32 code, float inner, float outer) {
  const float level = code & 1 ? outer : inner;
  return code & 2 ? -level : level;
}
__device__ __forceinline__ u32 values_a_word(u32 kind) { return kind == kOneBit ? 32 : 16; }

// Eight threads a group.
GW_KERNEL(gw_grouped_measure, QuantiseGroups) {
  const u64 group = thread_number() / kLanes;
  u64 begin = 0, end = 0;
  if (group < end_of(p.by).first_group) {
    const u64 number = piece_with(p.by, &Piece::first_group, group);
    begin = p.by.pieces[number].begin + (group - p.by.pieces[number].first_group) * p.by.values;
    end = smaller(begin + p.by.values, p.by.pieces[number + 1].begin);
  }
  const Sums sums = sums_of(p.base, begin, end);
  if (threadIdx.x % kLanes != 0 || begin == end) return;
  p.largest[group] = sums.largest;
  u16* const scales = reinterpret_cast<u16*>(p.base.message + scales_at(p.by)) + group * p.by.per_group;
  const double magnitude = exact_mean(sums.positive + sums.negative, end - begin);
  if (p.by.per_group == 1) {
    const double factor = p.base.kind == kTwoBit ? static_cast<double>(p.base.parameter) : 1.0;
    scales[0] = upper_half(factor * magnitude);
  } else if (p.base.kind == kOneBit) {
    scales[0] = upper_half(exact_mean(sums.positive, end - begin - sums.n_negative));
    scales[1] = upper_half(exact_mean(sums.negative, sums.n_negative));
  } else {
    scales[0] = upper_half(kInnerLevel * magnitude);
    scales[1] = upper_half(kOuterLevel * magnitude);
  }
}

// One block: all but scales, codes and checksum.
GW_KERNEL(gw_grouped_head, QuantiseGroups) {
  struct Shared {
    u32 largest;
  };
  Shared& shared = shared_as<Shared>();
  u8* const message = p.base.message;
  const u64 n_groups = end_of(p.by).first_group;
  if (threadIdx.x == 0) shared.largest = 0;
  __syncthreads();
  u32 largest = 0;
  for (u64 i = threadIdx.x; i < n_groups; i += blockDim.x)
    if (p.largest[i] > largest) largest = p.largest[i];
  atomicMax(&shared.largest, largest);
  for (u64 i = threadIdx.x; i < cuts_of(p.by); i += blockDim.x)
    store32(message + kHeaderBytes + kCutBytes * (1 + i), static_cast<u32>(p.by.pieces[i + 1].begin));
  __syncthreads();
  if (threadIdx.x != 0) return;
  const bool is_finite = shared.largest < kInfinity;
  store32(message, kMagic);
  message[4] = kGroupedVersion;
  message[5] = static_cast<u8>(p.base.kind);
  message[6] = is_finite ? 0 : 1;
  message[7] = static_cast<u8>(p.by.per_group);
  store64(message + 8, p.base.n);
  store32(message + 16, p.by.values);
  store64(message + 20, 0);
  store32(message + kHeaderBytes, static_cast<u32>(cuts_of(p.by)));
  for (u64 at = scales_at(p.by) + n_groups * p.by.per_group * kScaleBytes; at < codes_at(p.by); ++at) message[at] = 0;
  *p.base.n_bytes = is_finite ? codes_at(p.by) + 4 * end_of(p.by).first_word : kHeaderBytes;
}

// A warp makes a word of 32 values, or two of 16.
GW_KERNEL(gw_grouped_pack, QuantiseGroups) {
  const bool is_finite = p.base.message[6] == 0;
  const u32 per_word = values_a_word(p.base.kind);
  const u16* const scales = reinterpret_cast<const u16*>(p.base.message + scales_at(p.by));
  u32* const words = reinterpret_cast<u32*>(p.base.message + codes_at(p.by));
  const u64 n_words = end_of(p.by).first_word;
  for (u64 i = thread_number(); i < parts_of(n_words * per_word, kWarp) * kWarp; i += thread_count()) {
    const u64 number = i / per_word;
    const Place place = place_of(p.by, number, static_cast<u32>(i % per_word), per_word);
    const float term = place.is_there ? term_of(p.base, place.value) : 0.0f;
    const u64 scale = place.is_there ? place.group * p.by.per_group : 0;
    const float first = widened(scales[scale]), second = widened(scales[scale + p.by.per_group - 1]);
    if (p.base.kind == kOneBit) {
      const u32 word = __ballot_sync(kWholeWarp, term < 0);
      if (place.is_there) keep(p.base, place.value, is_finite, term, term < 0 ? -second : first);
      if (is_finite && i % kWarp == 0) words[number] = word;
      continue;
    }
    const bool has_levels = p.by.per_group == 2;
    const u32 code = !place.is_there ? 0 : has_levels ? nearest_code(term, first, second) : code_of(term, first);
    const u32 word = joined(code, i);
    if (place.is_there)
      keep(p.base, place.value, is_finite, term, has_levels ? level_of(code, first, second) : decoded_of(term, first));
    if (is_finite && i % 16 == 0 && number < n_words) words[number] = word;
  }
}

// One block.
GW_KERNEL(gw_grouped_check, DequantiseGroups) {
  ChecksumShared& shared = shared_as<ChecksumShared>();
  fill_checksum_table(shared);
  const u8* const at = p.base.message;
  const bool is_finite = !(at[6] & 1);
  const u32 sum = checksum_of_message(at, kSealedBytes, is_finite ? p.base.payload : 0, p.base.pieces, shared);
  for (u64 i = threadIdx.x; is_finite && i < cuts_of(p.by); i += blockDim.x)
    if (load32(at + kHeaderBytes + kCutBytes * (1 + i)) != p.by.pieces[i + 1].begin) report(p.base.error, kField);
  if (threadIdx.x != 0) return;
  if (load32(at) != kMagic) report(p.base.error, kHeader);
  if (at[4] != kGroupedVersion) report(p.base.error, kVersion);
  if (load64(at + 8) != p.base.n) report(p.base.error, kElements);
  if (load32(at + kSealedBytes) != sum) report(p.base.error, kChecksum);
  if (at[5] != p.base.kind || at[6] > 1 || at[7] != p.by.per_group || load32(at + 16) != p.by.values ||
      load64(at + 20) != 0 || (is_finite && load32(at + kHeaderBytes) != cuts_of(p.by)))
    report(p.base.error, kField);
}

// As gw_quantised_unpack.
GW_KERNEL(gw_grouped_unpack, DequantiseGroups) {
  const Dequantise& to = p.base;
  const bool is_finite = *to.error <= error_word(kCode) && to.message[6] == 0;
  const u32 per_word = values_a_word(to.kind);
  const u16* const scales = reinterpret_cast<const u16*>(to.message + scales_at(p.by));
  const u32* const words = reinterpret_cast<const u32*>(to.message + codes_at(p.by));
  for (u64 i = thread_number(); i < end_of(p.by).first_word * per_word; i += thread_count()) {
    const Place place = place_of(p.by, i / per_word, static_cast<u32>(i % per_word), per_word);
    if (!place.is_there) continue;
    float value = __uint_as_float(kNan);
    if (is_finite) {
      const u16 first = scales[place.group * p.by.per_group];
      const u16 second = scales[(place.group + 1) * p.by.per_group - 1];
      const float above = widened(first) / to.divisor, further = widened(second) / to.divisor, below = -further;
      const u32 word = words[i / per_word], code = word >> 2 * (i % 16) & 3;
      const bool has_levels = to.kind == kTwoBit && p.by.per_group == 2;
      if (first >= kUpperInfinity || second >= kUpperInfinity || (to.kind == kTwoBit && !has_levels && code == 3))
        report(to.error, kCode);
      else if (to.kind == kOneBit)
        value = word >> i % 32 & 1 ? below : above;
      else if (has_levels)
        value = level_of(code, above, further);
      else
        value = code == 1 ? above : code == 2 ? below : 0.0f;
    }
    put_value(to.out, to.dtype, place.value,
              to.adds ? added(static_cast<const float*>(to.out)[place.value], value) : value);
  }
}

}  // namespace gradwire::gpu
