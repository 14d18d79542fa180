#include "exchange/heads.hpp"

#include <algorithm>
#include <cstring>
#include <limits>
#include <string>
#include <utility>

#include "checksum/crc32c.hpp"
#include "errors.hpp"

namespace gradwire::exchange {
namespace {

constexpr std::uint16_t kMagic = 0x4257;  // "WB"
constexpr std::size_t kChecksumBytes = 4;
constexpr std::int32_t kUnknownUs = std::numeric_limits<std::int32_t>::min();
constexpr const char* kAdvice = "; check that all ranks run the same gradwire, and the host's memory and network";

#pragma pack(push, 1)
struct Fixed {
  std::uint16_t magic;
  std::uint8_t version, flags;
  std::uint16_t origin, block;
  std::uint8_t first_bit, n_bits;
  std::uint16_t ceiling_bits;
  std::uint32_t body_bytes, sequence, step, configuration, blocks;
};
#pragma pack(pop)
static_assert(sizeof(Fixed) == 32);

// Goes through the bytes behind the fixed fields, number by number.
class Cursor {
 public:
  explicit Cursor(std::size_t at) : at_(at) {}
  template <class Number>
  void put(std::span<std::uint8_t> out, Number number) {
    std::memcpy(out.data() + at_, &number, sizeof number);
    at_ += sizeof number;
  }
  template <class Number>
  Number get(std::span<const std::uint8_t> raw) {
    Number number;
    std::memcpy(&number, raw.data() + at_, sizeof number);
    at_ += sizeof number;
    return number;
  }

 private:
  std::size_t at_;
};

std::int32_t microseconds(double seconds) {
  return static_cast<std::int32_t>(
      std::clamp(1e6 * seconds, kUnknownUs + 1.0, double{std::numeric_limits<std::int32_t>::max()}));
}

std::size_t ended_bytes(std::size_t n_blocks) { return (n_blocks + 7) / 8; }

void compare(const char* name, const char* advice, std::uint32_t mine, std::uint32_t theirs, unsigned origin,
             std::uint32_t step) {
  if (mine != theirs)
    throw RankMismatch(std::string("ranks disagree on ") + name + ": " + std::to_string(mine) + " here, " +
                       std::to_string(theirs) + " on rank " + std::to_string(origin) + " (step " +
                       std::to_string(step) + " here). What to do: " + advice + ".");
}

}  // namespace

HeadFormat::HeadFormat(std::size_t n_blocks, std::size_t world_size, std::uint32_t configuration, std::uint32_t blocks)
    : n_blocks_(n_blocks),
      world_size_(world_size),
      configuration_(configuration),
      blocks_(blocks),
      n_bytes_(sizeof(Fixed) + ended_bytes(n_blocks) + 4 * n_blocks + 16 * world_size + kChecksumBytes) {}

void HeadFormat::pack(const Head& head, std::uint32_t step, std::span<std::uint8_t> out) const {
  const Fixed fixed{kMagic,
                    kHeadVersion,
                    head.is_plain,
                    head.origin,
                    head.block,
                    static_cast<std::uint8_t>(head.first_bit),
                    static_cast<std::uint8_t>(head.n_bits),
                    static_cast<std::uint16_t>(head.ceiling_bits),
                    head.body_bytes,
                    head.sequence,
                    step,
                    configuration_,
                    blocks_};
  std::memcpy(out.data(), &fixed, sizeof fixed);
  std::memset(out.data() + sizeof fixed, 0, ended_bytes(n_blocks_));
  for (std::size_t block = 0; block < n_blocks_; ++block)
    if (head.ended[block]) out[sizeof fixed + block / 8] |= static_cast<std::uint8_t>(1 << block % 8);
  Cursor at(sizeof fixed + ended_bytes(n_blocks_));
  for (std::size_t block = 0; block < n_blocks_; ++block) {
    at.put(out, head.remaining_s.empty() ? kUnknownUs : microseconds(head.remaining_s[block]));
  }
  for (const std::uint64_t n : head.received_bytes) at.put(out, n);
  for (const std::uint64_t us : head.receiving_us) at.put(out, us);
  at.put(out, crc32c(out.first(n_bytes_ - kChecksumBytes)));
}

Head HeadFormat::unpack(std::span<const std::uint8_t> raw, std::uint32_t step, int peer) const {
  const std::string who = "rank " + std::to_string(peer) + " sent";
  if (raw.size() < n_bytes_)
    throw CorruptMessage(who + " " + std::to_string(raw.size()) + " bytes, fewer than a head has");
  raw = raw.first(n_bytes_);
  Fixed fixed;
  std::memcpy(&fixed, raw.data(), sizeof fixed);
  if (fixed.magic == kMagic && fixed.version != kHeadVersion)
    throw IncompatibleVersion("rank " + std::to_string(peer) + " sends broadcast heads of version " +
                              std::to_string(fixed.version) + ", this build reads " + std::to_string(kHeadVersion) +
                              "; install the same gradwire on every host");
  const std::string when = " (step " + std::to_string(step) + ")" + kAdvice;
  Cursor end(n_bytes_ - kChecksumBytes);
  if (fixed.magic != kMagic || end.get<std::uint32_t>(raw) != crc32c(raw.first(n_bytes_ - kChecksumBytes)))
    throw CorruptMessage(who + " a head that gradwire did not write" + when);
  compare("configuration", "pass the same scheme and options, blocks and their order among them, on every rank",
          configuration_, fixed.configuration, fixed.origin, step);
  compare("blocks", "every rank must hold the same model and cut it into the same blocks in the same order", blocks_,
          fixed.blocks, fixed.origin, step);
  compare("step", "resume every rank from the same checkpoint and call backward equally often on all of them", step,
          fixed.step, fixed.origin, step);
  const bool has_bits = fixed.block < n_blocks_ && fixed.n_bits >= 1 && fixed.first_bit + fixed.n_bits <= kWordBits;
  const bool is_alone = fixed.block == kNoBlock && fixed.body_bytes == 0;
  const bool is_sane = fixed.flags <= 1 && fixed.ceiling_bits >= 1 && fixed.ceiling_bits <= kWordBits &&
                       fixed.origin < world_size_ && (has_bits || is_alone);
  Head head{fixed.origin,
            fixed.block,
            fixed.first_bit,
            fixed.n_bits,
            fixed.flags == 1,
            fixed.body_bytes,
            fixed.sequence,
            fixed.ceiling_bits,
            {},
            {},
            {},
            {}};
  const std::span<const std::uint8_t> bits = raw.subspan(sizeof fixed, ended_bytes(n_blocks_));
  for (std::size_t block = 0; block < n_blocks_; ++block) head.ended.push_back(bits[block / 8] >> block % 8 & 1);
  const bool has_more = n_blocks_ % 8 != 0 && bits.back() >> n_blocks_ % 8 != 0;
  if (!is_sane || has_more) throw CorruptMessage(who + " a head out of range" + when);
  Cursor at(sizeof fixed + bits.size());
  bool knows = true;
  for (std::size_t block = 0; block < n_blocks_; ++block) {
    const auto us = at.get<std::int32_t>(raw);
    knows = knows && us != kUnknownUs;
    head.remaining_s.push_back(us / 1e6);
  }
  if (!knows) head.remaining_s.clear();
  for (std::size_t rank = 0; rank < world_size_; ++rank) head.received_bytes.push_back(at.get<std::uint64_t>(raw));
  for (std::size_t rank = 0; rank < world_size_; ++rank) head.receiving_us.push_back(at.get<std::uint64_t>(raw));
  return head;
}

}  // namespace gradwire::exchange
