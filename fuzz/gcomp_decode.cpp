// libFuzzer harness of GComp's decoder. The first two bytes choose dtype, instruction set and whether checksums are
// made right, so that what lies behind them is reached; the rest is the message. Run: fuzz/run SECONDS gcomp_decode
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <span>
#include <vector>

#include "checksum/crc32c.hpp"
#include "errors.hpp"
#include "gcomp/codec.hpp"
#include "gcomp_importance.hpp"
#include "simd/dispatch.hpp"

namespace gcomp = gradwire::gcomp;

namespace {

constexpr std::uint64_t kMaxValues = 70'000;

template <class Word>
Word read(const std::vector<std::uint8_t>& bytes, std::size_t offset) {
  Word word;
  std::memcpy(&word, bytes.data() + offset, sizeof word);
  return word;
}

template <class Word>
void write(std::vector<std::uint8_t>& bytes, std::size_t offset, Word word) {
  std::memcpy(bytes.data() + offset, &word, sizeof word);
}

void seal(std::vector<std::uint8_t>& message, std::uint64_t table_id) {
  if (message.size() < gcomp::kBlockHeaderBytes) return;
  const auto version = message[4] % 2 == 0 ? gcomp::Version::derived : gcomp::Version::levels;
  std::memcpy(message.data(), gcomp::kFront.letters, 4);
  message[4] = static_cast<std::uint8_t>(version);
  write(message, 8, table_id);
  write(message, 24, std::uint64_t{message.size()});
  const std::size_t room = (message.size() - gcomp::kBlockHeaderBytes) / gcomp::kChunkHeaderBytes;
  const std::size_t n_chunks = std::min<std::size_t>(read<std::uint32_t>(message, 32), room);
  for (std::size_t chunk = 0; chunk < n_chunks; ++chunk) {
    const gcomp::ChunkHeader header = gcomp::load_chunk_header(message.data(), chunk);
    const std::uint64_t end = header.end_offset(version);
    if (header.offset > message.size() || end > message.size() || end < header.offset) continue;
    if (version == gcomp::Version::derived && message[6] == static_cast<std::uint8_t>(gcomp::Mode::paper)) {
      static const auto importance = gradwire::fuzz::importance_bytes(kMaxValues);
      const std::size_t first = std::min<std::size_t>(chunk * gcomp::kChunkValues, kMaxValues);
      const std::size_t n = std::min<std::size_t>(header.n_values, kMaxValues - first);
      write(message, gcomp::kBlockHeaderBytes + chunk * gcomp::kChunkHeaderBytes + 12,
            gradwire::crc32c({importance.data() + first, n}));
    }
    const std::uint32_t crc = gradwire::crc32c({message.data() + header.offset, message.data() + end});
    write(message, gcomp::kBlockHeaderBytes + chunk * gcomp::kChunkHeaderBytes + 28, crc);
  }
  const std::uint32_t crc = gradwire::crc32c({message.data(), 44});
  write(message, 44,
        gradwire::crc32c({message.data() + gcomp::kBlockHeaderBytes, n_chunks * gcomp::kChunkHeaderBytes}, crc));
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  static const gradwire::HuffmanTable priors[] = {gradwire::HuffmanTable::prior(8), gradwire::HuffmanTable::prior(5)};
  if (size < 2) return 0;
  const auto dtype = static_cast<gcomp::Dtype>(data[0] % gcomp::kDtypes);
  const bool is_narrow = dtype == gcomp::Dtype::float16 && size > 6 && data[6] % 2 == 1;  // of format 1
  const gradwire::HuffmanTable& table = priors[is_narrow];
  gradwire::limit_simd_level(static_cast<gradwire::SimdLevel>(data[1] % 3));
  std::vector<std::uint8_t> message(data + 2, data + size);  // exactly as long as it is: overreads show
  if (data[1] >= 64) seal(message, table.id());
  std::uint64_t n_values = message.size() >= 24 ? read<std::uint64_t>(message, 16) : 0;
  if (n_values > kMaxValues) n_values = 1000;
  std::vector<std::uint8_t> values(n_values * gcomp::bytes_of(dtype));
  const std::vector<std::uint8_t> importance = gradwire::fuzz::importance_bytes(n_values);
  const bool adds = data[1] % 5 == 0, divides = data[1] % 5 == 1;
  try {
    gcomp::decode(message, dtype, table, importance, {adds ? values.data() : nullptr, divides ? 3.0f : 1.0f}, values);
  } catch (const gradwire::CorruptMessage&) {
  } catch (const gradwire::RankMismatch&) {
  } catch (const gradwire::IncompatibleVersion&) {
  }
  try {
    gradwire::HuffmanTable::from_bytes(message);
  } catch (const gradwire::CorruptMessage&) {
  } catch (const gradwire::IncompatibleVersion&) {
  }
  return 0;
}
