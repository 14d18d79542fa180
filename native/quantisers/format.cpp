#include "quantisers/format.hpp"

#include <bit>
#include <cmath>
#include <string>

#include "bits/bit_io.hpp"
#include "checksum/crc32c.hpp"
#include "errors.hpp"
#include "quantisers/kernels.hpp"

namespace gradwire::quantisers {
namespace {

constexpr std::uint32_t kMagic = 0x54515747;  // "GWQT"
constexpr std::size_t kChecksumOffset = 28;
constexpr std::uint8_t kFlagNonfinite = 1;

std::uint32_t checksum(std::span<const std::uint8_t> message) {
  return crc32c(message.subspan(kHeaderBytes), crc32c(message.first(kChecksumOffset)));
}

[[noreturn]] void fail(const std::string& what) { throw CorruptMessage("quantised message: " + what); }

}  // namespace

const char* name_of(Kind kind) {
  constexpr const char* names[kKinds] = {"one-bit", "two-bit", "ternary", "qsgd", "thc"};
  return names[static_cast<int>(kind)];
}

void write_header(const Header& header, std::span<std::uint8_t> message) {
  std::uint8_t* const at = message.data();
  store(at, kMagic);
  at[4] = static_cast<std::uint8_t>(header.version);
  at[5] = static_cast<std::uint8_t>(header.kind);
  at[6] = header.is_finite ? 0 : kFlagNonfinite;
  at[7] = static_cast<std::uint8_t>(header.levels);
  store(at + 8, header.n_elements);
  store(at + 16, header.block);
  store(at + 20, header.first);
  store(at + 24, header.second);
  store(at + kChecksumOffset, checksum(message));
}

Header read_header(std::span<const std::uint8_t> message) {
  const std::uint8_t* const at = message.data();
  if (message.size() < kHeaderBytes)
    fail("truncated: " + std::to_string(message.size()) + " bytes, a header alone has 32");
  if (load<std::uint32_t>(at) != kMagic)
    fail("it does not begin with GWQT: another kind of message, or bytes were lost");
  const bool is_grouped = at[4] == kGroupedVersion;
  if (at[4] != kVersion && !is_grouped)
    throw IncompatibleVersion("quantised message of format version " + std::to_string(at[4]) +
                              "; this build reads versions 1 and 2: use the same gradwire release on every rank");
  if (load<std::uint32_t>(at + kChecksumOffset) != checksum(message))
    fail("the checksum does not match: bytes were changed on the way");
  if (at[5] >= kKinds) fail("unknown quantiser " + std::to_string(at[5]));
  if ((at[6] & ~kFlagNonfinite) != 0) fail("unknown flags");
  const Header header{static_cast<Kind>(at[5]),     (at[6] & kFlagNonfinite) == 0, at[7],
                      load<std::uint32_t>(at + 16), load<std::uint64_t>(at + 8),   load<float>(at + 20),
                      load<float>(at + 24)};
  for (const float scale : {header.first, header.second})
    if (std::bit_cast<std::uint32_t>(scale) >= kInfinity) fail("a scale is negative or not finite");
  if (is_grouped) {
    if (header.kind != Kind::one_bit && header.kind != Kind::two_bit) fail("groups where there are none");
    if (header.levels < 1 || header.levels > 2) fail("wrong number of scales");
    if (header.block < kGroup || header.block > kBlock || !std::has_single_bit(header.block))
      fail("groups of " + std::to_string(header.block) + " values; 64, 128, ..., 4096 are possible");
  } else if (header.kind == Kind::qsgd) {
    if (header.levels < 1 || header.levels > 127)
      fail(std::to_string(header.levels) + " levels; 1 to 127 are possible");
    if (header.block < 128 || header.block > kBlock || !std::has_single_bit(header.block))
      fail("blocks of " + std::to_string(header.block) + " values; 128, 256, ..., 4096 are possible");
  } else if (header.levels != 0 || header.block != 0) {
    fail("levels or blocks where there are none");
  }
  return header;
}

}  // namespace gradwire::quantisers
