#include "wire/message.hpp"

#include <algorithm>
#include <bit>
#include <cstdlib>
#include <new>

#include "bits/bit_io.hpp"
#include "checksum/crc32c.hpp"
#include "errors.hpp"

namespace gradwire::wire {
namespace {

constexpr std::uint16_t kMagic = 0x4757;  // "WG"
constexpr std::size_t kChecksumAt = kHeaderBytes - 4;
constexpr std::uint8_t kSealed = 1;

}  // namespace

RawHeader pack_header(const Header& header) {
  RawHeader raw;
  store(raw.data(), kMagic);
  store(raw.data() + 2, kVersion);
  store(raw.data() + 3, header.is_sealed ? kSealed : std::uint8_t{0});
  store(raw.data() + 4, header.stream);
  store(raw.data() + 8, header.n_bytes);
  store(raw.data() + 16, header.number);
  store(raw.data() + 20, header.facts);
  store(raw.data() + 36, header.checksum);
  store(raw.data() + kChecksumAt, crc32c(std::span(raw).first(kChecksumAt)));
  return raw;
}

Header unpack_header(const RawHeader& raw, int peer) {
  const auto magic = load<std::uint16_t>(raw.data());
  const auto version = load<std::uint8_t>(raw.data() + 2), flags = load<std::uint8_t>(raw.data() + 3);
  if (magic == kMagic && version != kVersion)
    throw IncompatibleVersion("rank ", peer, " sends messages of version ", version, ", this build reads ", kVersion,
                              "; install the same gradwire on every host");
  if (magic != kMagic || flags > kSealed ||
      load<std::uint32_t>(raw.data() + kChecksumAt) != crc32c(std::span(raw).first(kChecksumAt)))
    throw CorruptMessage("rank ", peer,
                         " sent a message header that gradwire did not write; check that all ranks run the same "
                         "gradwire, and the host's memory and network");
  return {load<std::uint32_t>(raw.data() + 4),
          load<std::uint32_t>(raw.data() + 16),
          load<std::uint64_t>(raw.data() + 8),
          load<Facts>(raw.data() + 20),
          flags == kSealed,
          load<std::uint32_t>(raw.data() + 36)};
}

void compare_facts(const Facts& mine, const Facts& theirs, int rank, int peer) {
  struct Field {
    const char* name;
    std::uint32_t Facts::* value;
    const char* advice;
  };
  constexpr Field kFields[] = {
      {"configuration", &Facts::configuration, "pass the same scheme and options on every rank"},
      {"layout", &Facts::layout, "every rank must hold the same model"},
      {"step", &Facts::step,
       "resume every rank from the same checkpoint and call backward equally often on all of them"},
      {"bucket", &Facts::bucket, "every rank must run the same backward pass"},
  };
  for (const Field& field : kFields)
    if (mine.*field.value != theirs.*field.value)
      throw RankMismatch("ranks ", rank, " and ", peer, " disagree on ", field.name, ": ", mine.*field.value, " here, ",
                         theirs.*field.value, " there (bucket ", mine.bucket, ", step ", mine.step,
                         "). What to do: ", field.advice, ".");
}

Block::Block(std::size_t capacity) : capacity_(capacity) {
  if (capacity > SIZE_MAX - 63) throw std::bad_alloc();
  memory_.reset(
      static_cast<std::uint8_t*>(std::aligned_alloc(64, std::max<std::size_t>(64, (capacity + 63) / 64 * 64))));
  if (!memory_) throw std::bad_alloc();
}

void Block::Free::operator()(std::uint8_t* memory) const { std::free(memory); }

Message Pool::take(std::size_t n_bytes) {
  const std::lock_guard lock(mutex_);
  // The smallest that is free and large enough; of those that are too small, any may go.
  std::shared_ptr<Block>*best = nullptr, *unused = nullptr;
  for (auto& block : blocks_) {
    if (block.use_count() > 1) continue;
    std::shared_ptr<Block>(block).reset();  // orders what others did before they let go before what comes next
    if (!block || block->capacity() < n_bytes)
      unused = &block;
    else if (best == nullptr || block->capacity() < (*best)->capacity())
      best = &block;
  }
  if (best != nullptr) return {*best, n_bytes};
  // The one that is too small goes before the new one comes.
  if (unused == nullptr) unused = &blocks_.emplace_back();
  unused->reset();
  // In steps of an eighth at most, since messages of one stream vary by a few bytes.
  const std::size_t step = std::max<std::size_t>(4096, std::bit_floor(n_bytes) / 8);
  *unused = std::make_shared<Block>(n_bytes > SIZE_MAX - step ? n_bytes : (n_bytes + step - 1) / step * step);
  return {*unused, n_bytes};
}

std::size_t Pool::bytes_held() const {
  const std::lock_guard lock(mutex_);
  std::size_t n_bytes = 0;
  for (const auto& block : blocks_) n_bytes += block ? block->capacity() : 0;
  return n_bytes;
}

void Pool::clear() {
  const std::lock_guard lock(mutex_);
  std::erase_if(blocks_, [](const auto& block) { return block.use_count() <= 1; });
}

}  // namespace gradwire::wire
