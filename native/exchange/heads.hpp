// The head that goes before every block's bits, or alone to say that blocks are complete. docs/format.md#broadcast
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

namespace gradwire::exchange {

inline constexpr std::uint8_t kHeadVersion = 3;
inline constexpr std::uint16_t kNoBlock = 0xFFFF;  // a head without a body
inline constexpr int kWordBits = 32;

// What a rank says with each body.
struct Head {
  std::uint16_t origin;   // the rank whose gradient the body holds
  std::uint16_t block;    // its block, or kNoBlock
  int first_bit, n_bits;  // which bits of each value the body holds; 0 and 32 also for a body of plain words
  bool is_plain;          // the body holds the words themselves, not a codec's message
  std::uint32_t body_bytes;
  std::uint32_t sequence;   // heads of this origin and step before this one
  int ceiling_bits;         // of a value, that this origin's processors have time for
  std::vector<bool> ended;  // by block: whether this origin sends no more of it in this step
  // By block: from the head's arrival until this origin's next forward pass needs it; empty if it cannot tell yet.
  std::vector<double> remaining_s;
  // By rank: what this origin has received of its bodies since it was attached, and how long those transfers took.
  std::vector<std::uint64_t> received_bytes, receiving_us;
};

// Heads of one run: their size follows from the numbers of blocks and ranks.
class HeadFormat {
 public:
  // `configuration`, `blocks`: hashes that all ranks must share.
  HeadFormat(std::size_t n_blocks, std::size_t world_size, std::uint32_t configuration, std::uint32_t blocks);
  std::size_t n_bytes() const { return n_bytes_; }
  void pack(const Head& head, std::uint32_t step, std::span<std::uint8_t> out) const;
  // Reads and checks a head that `peer` sent. Throws CorruptMessage, IncompatibleVersion, RankMismatch.
  Head unpack(std::span<const std::uint8_t> raw, std::uint32_t step, int peer) const;

 private:
  const std::size_t n_blocks_, world_size_;
  const std::uint32_t configuration_, blocks_;
  const std::size_t n_bytes_;
};

}  // namespace gradwire::exchange
