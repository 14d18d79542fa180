#include "quantisers/format.hpp"

#include <bit>
#include <cmath>
#include <string>

#include "bits/bit_io.hpp"
#include "messages/front.hpp"
#include "quantisers/kernels.hpp"

namespace gradwire::quantisers {
namespace {

constexpr Front kFront{"quantised", "GWQT", kGroupedVersion, kHeaderBytes, 0};
constexpr std::uint8_t kFlagNonfinite = 1;

[[noreturn]] void fail(const std::string& what) { fail_message(kFront.name, what); }

}  // namespace

const char* name_of(Kind kind) {
  constexpr const char* names[kKinds] = {"one-bit", "two-bit", "ternary", "qsgd", "thc"};
  return names[static_cast<int>(kind)];
}

void write_header(const Header& header, std::span<std::uint8_t> message) {
  std::uint8_t* const at = message.data();
  write_front(kFront, header.version, static_cast<int>(header.kind), header.is_finite ? 0 : kFlagNonfinite,
              header.levels, at);
  store(at + 8, header.n_elements);
  store(at + 16, header.block);
  store(at + 20, header.first);
  store(at + 24, header.second);
  write_checksum(kFront, at, 0, message.subspan(kHeaderBytes));
}

Header read_header(std::span<const std::uint8_t> message) {
  check_front(kFront, message);
  const std::uint8_t* const at = message.data();
  check_checksum(kFront, at, 0, message.subspan(kHeaderBytes));
  if (at[5] >= kKinds) fail("unknown quantiser " + std::to_string(at[5]));
  if ((at[6] & ~kFlagNonfinite) != 0) fail("unknown flags");
  const Header header{static_cast<Kind>(at[5]),     (at[6] & kFlagNonfinite) == 0, at[7],
                      load<std::uint32_t>(at + 16), load<std::uint64_t>(at + 8),   load<float>(at + 20),
                      load<float>(at + 24)};
  for (const float scale : {header.first, header.second})
    if (std::bit_cast<std::uint32_t>(scale) >= kInfinity) fail("a scale is negative or not finite");
  if (at[4] == kGroupedVersion) {
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
