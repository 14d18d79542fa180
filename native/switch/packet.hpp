// What travels between ranks and the switch: a header of 40 bytes, and 256 values in packets that carry any. Layout and
// checks: docs/format.md#switch-packets. Little-endian, as all of gradwire's formats.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>

#include "checksum/crc32c.hpp"

namespace gradwire::innet {

static_assert(std::endian::native == std::endian::little, "headers are copied as they lie in memory");

// Values in a packet. A pipeline's stages do one 32-bit register operation each in four stateful ALUs; SwitchML's
// largest packet, too, is 256 values, through four pipelines in a row.
constexpr std::size_t kLanes = 256;
constexpr std::size_t kPayloadBytes = 4 * kLanes;
constexpr std::size_t kMaxWorkers = 32;  // a slot's bitmap is one 32-bit register

constexpr std::uint32_t kMagic = 0x57535747;  // "GWSW"
constexpr std::uint8_t kVersion = 1;

enum class Kind : std::uint8_t {
  join = 1,      // a worker asks for its job's slots
  welcome = 2,   // and gets them
  refusal = 3,   // `word` says why
  values = 4,    // a worker's values for one slot
  result = 5,    // all workers' together
  pending = 6,   // values that came before are kept; `word` is whose
  leave = 7,     // a worker needs nothing more
  farewell = 8,  // and is let go
};
enum class Operation : std::uint8_t { none = 0, add = 1, bit_or = 2, maximum = 3 };
enum class Reason : std::uint32_t { unknown_job = 1, no_slots = 2, bad_join = 3, mismatch = 4, peer_left = 5 };

struct Header {
  std::uint32_t magic = kMagic;
  std::uint8_t version = kVersion;
  Kind kind = Kind::join;
  Operation operation = Operation::none;
  std::uint8_t worker = 0;
  std::uint64_t job = 0;         // drawn at random by the job's first rank: whoever does not know it stays outside
  std::uint32_t epoch = 0;       // drawn at random when the switch starts
  std::uint32_t sequence = 0;    // counts a job's packets; the slot is `sequence` modulo the job's slots
  std::uint16_t handle = 0;      // the job's row in the switch's table
  std::uint16_t collective = 0;  // which call of the ranks, so that two calls cannot mix
  std::uint32_t word = 0;        // by kind
  std::uint32_t reserved = 0;
  std::uint32_t checksum = 0;  // CRC32C of the 36 bytes before and of the payload
};
constexpr std::size_t kHeaderBytes = 40;
constexpr std::size_t kPacketBytes = kHeaderBytes + kPayloadBytes;
static_assert(sizeof(Header) == kHeaderBytes);

inline bool carries_values(Kind kind) { return kind == Kind::values || kind == Kind::result; }

// `payload`: kPayloadBytes, or null for kinds without.
inline std::uint32_t checksum_of(const Header& header, const void* payload) {
  const auto* bytes = reinterpret_cast<const std::uint8_t*>(&header);
  const std::uint32_t checksum = crc32c({bytes, offsetof(Header, checksum)});
  return payload ? crc32c({static_cast<const std::uint8_t*>(payload), kPayloadBytes}, checksum) : checksum;
}

enum class Check { good, foreign, other_version };

// Copies the header of a datagram that is a packet of ours; its payload, if its kind has one, follows at kHeaderBytes.
inline Check read_header(std::span<const std::uint8_t> datagram, Header& header) {
  if (datagram.size() < kHeaderBytes) return Check::foreign;
  std::memcpy(&header, datagram.data(), kHeaderBytes);
  if (header.magic != kMagic) return Check::foreign;
  if (header.version != kVersion) return Check::other_version;
  const bool has_values = carries_values(header.kind);
  if (header.kind < Kind::join || header.kind > Kind::farewell || header.operation > Operation::maximum ||
      header.reserved != 0 || datagram.size() != (has_values ? kPacketBytes : kHeaderBytes))
    return Check::foreign;
  return checksum_of(header, has_values ? datagram.data() + kHeaderBytes : nullptr) == header.checksum ? Check::good
                                                                                                       : Check::foreign;
}

}  // namespace gradwire::innet
