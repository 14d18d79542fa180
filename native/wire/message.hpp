// What travels on a connection: a header, and behind it so many bytes as it says. docs/format.md#message-header
#pragma once

#include <array>
#include <memory>
#include <mutex>
#include <vector>

#include "spans.hpp"

namespace gradwire::wire {

// What both ends of a stream must agree on; carried by every message, compared on receipt.
struct Facts {
  std::uint32_t configuration, layout, step, bucket;
};

struct Header {
  std::uint32_t stream;   // which exchange a message belongs to; ranks number them in the same order
  std::uint32_t number;   // of the message within its stream from this sender
  std::uint64_t n_bytes;  // behind the header
  Facts facts;
  bool is_sealed;          // the message has a checksum of its own
  std::uint32_t checksum;  // CRC32C of the message if it has none, else 0
};

inline constexpr std::uint8_t kVersion = 4;
inline constexpr std::size_t kHeaderBytes = 44;
using RawHeader = std::array<std::uint8_t, kHeaderBytes>;

RawHeader pack_header(const Header& header);
// `peer`: who sent it, for the error. Throws CorruptMessage, IncompatibleVersion.
Header unpack_header(const RawHeader& raw, int peer);
// Throws RankMismatch, which names the first field in which they differ.
void compare_facts(const Facts& mine, const Facts& theirs, int rank, int peer);

// The memory of one message, aligned to 64 bytes; not initialised.
class Block {
 public:
  explicit Block(std::size_t capacity);
  std::uint8_t* data() { return memory_.get(); }
  std::size_t capacity() const { return capacity_; }

 private:
  struct Free {
    void operator()(std::uint8_t* memory) const;
  };
  std::unique_ptr<std::uint8_t[], Free> memory_;
  std::size_t capacity_;
};

// A message that is being written, waits to be sent, or has come; copies share its bytes.
struct Message {
  std::shared_ptr<Block> block;
  std::size_t n_bytes = 0;
  bool is_sealed = false;  // its decoder checks a checksum within it; others travel with one in the header
  ConstBytes bytes() const { return {block ? block->data() : nullptr, n_bytes}; }
  Bytes room() { return {block->data(), block->capacity()}; }
  Floats floats(std::size_t n) const { return {reinterpret_cast<float*>(block->data()), n}; }  // of its room
};

// Blocks that are used again: nothing is allocated once every size has been asked for. Thread-safe.
class Pool {
 public:
  // A message of n_bytes; its block may be larger. Throws std::bad_alloc.
  Message take(std::size_t n_bytes);
  std::size_t bytes_held() const;
  // Lets go of all blocks that nobody uses.
  void clear();

 private:
  mutable std::mutex mutex_;
  std::vector<std::shared_ptr<Block>> blocks_;
};

}  // namespace gradwire::wire
