// One chunk of a message, written or read, in either format; what codec.cpp puts together.
#pragma once

#include <cstdint>
#include <span>

#include "gcomp/codec.hpp"
#include "gcomp/format.hpp"
#include "gcomp/lanes.hpp"
#include "gcomp/levels.hpp"
#include "huffman/table.hpp"

namespace gradwire::gcomp {

// What every chunk of one message has in common.
struct MessageCoding {
  Dtype dtype;
  Version version;
  bool rounds;  // to nearest, where bits are dropped
  const HuffmanTable& table;
  const LaneKernels& lanes;
  const Kernels& kernels;  // the rest: format 1 alone
  Packing packing;
  const WordMasks& masks;
  KeepRule rule;  // format 2 alone
};

// Encodes n_values (with as many importance bytes, or null) into `message` from byte `offset` on; sets holds_nonfinite.
// What it decodes to goes to `mean`, in format 2.
using EncodeChunk = ChunkHeader(const MessageCoding& coding, const std::uint8_t* values, const std::uint8_t* importance,
                                std::size_t n_values, std::uint8_t* message, std::uint64_t offset, const Mean& mean,
                                bool& holds_nonfinite);
EncodeChunk encode_levels_chunk, encode_lanes_chunk;

// Decodes a chunk whose header and checksum are right. Throws CorruptMessage, RankMismatch.
using DecodeChunk = void(const MessageCoding& coding, std::span<const std::uint8_t> message, const ChunkHeader& header,
                         std::size_t chunk, const std::uint8_t* importance, const Finish& finish, std::uint8_t* values);
DecodeChunk decode_levels_chunk, decode_lanes_chunk;

// The exponent segment at `begin`, Huffman-coded, or raw where that is not longer; sets the header's fields.
void write_exponents(const HuffmanTable& table, std::span<const std::uint8_t> exponents, std::uint8_t* begin,
                     ChunkHeader& header);
void read_exponents(const HuffmanTable& table, std::span<const std::uint8_t> segment, std::size_t chunk, bool is_raw,
                    const std::uint8_t* readable_end, std::span<std::uint8_t> exponents);

struct Scratch {
  alignas(64) std::uint8_t words[4 * kChunkValues];
  alignas(64) std::uint8_t block[4 * kLaneBlock];
  std::uint8_t exponents[kChunkValues];
  std::uint8_t levels[kChunkValues / 4 + kPackSlackBytes];
};
Scratch& scratch();  // this thread's

}  // namespace gradwire::gcomp
