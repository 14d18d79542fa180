// libFuzzer harness of the quantisers' decoders. The first two bytes choose quantiser, dtype, instruction set and
// whether the checksum is made right, so that what lies behind it is reached; the rest is the message. Run: fuzz/run
// SECONDS quantised_decode
#include <cstdint>
#include <cstring>
#include <vector>

#include "checksum/crc32c.hpp"
#include "errors.hpp"
#include "exchange/codecs.hpp"
#include "exchange/means.hpp"
#include "simd/dispatch.hpp"

namespace quantisers = gradwire::quantisers;

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  constexpr std::uint64_t kMaxValues = 70'000;
  constexpr std::size_t kChecksumOffset = 28;
  if (size < 2) return 0;
  const auto kind = static_cast<quantisers::Kind>(data[0] % quantisers::kKinds);
  const auto dtype = static_cast<quantisers::Dtype>(data[0] / 8 % quantisers::kDtypes);
  gradwire::limit_simd_level(static_cast<gradwire::SimdLevel>(data[1] % 3));
  std::vector<std::uint8_t> message(data + 2, data + size);  // exactly as long as it is: overreads show
  std::uint64_t n_values = 0;
  if (message.size() >= quantisers::kHeaderBytes) {
    std::memcpy(&n_values, message.data() + 8, sizeof n_values);
    if (data[1] >= 64) {
      const std::span<const std::uint8_t> all = message;
      const std::uint32_t crc =
          gradwire::crc32c(all.subspan(quantisers::kHeaderBytes), gradwire::crc32c(all.first(kChecksumOffset)));
      std::memcpy(message.data() + kChecksumOffset, &crc, sizeof crc);
    }
  }
  if (n_values > kMaxValues) n_values = 1000;
  std::vector<std::uint8_t> values(n_values * quantisers::bytes_of(dtype));
  if (data[1] % 8 == 5) {
    // The message twice as a group, the first length true or a lie.
    std::uint32_t length = static_cast<std::uint32_t>(message.size()) ^ (data[1] % 16 == 5 ? 0u : 1u << data[1] / 16);
    std::vector<std::uint8_t> group(sizeof length);
    std::memcpy(group.data(), &length, sizeof length);
    group.insert(group.end(), message.begin(), message.end());
    const std::vector<std::uint8_t> first = group;
    group.insert(group.end(), first.begin(), first.end());
    const auto size = static_cast<std::int64_t>(n_values);
    const std::int64_t sizes[] = {size, -size, size};
    gradwire::exchange::QuantiserCodec codec({.kind = kind});
    std::vector<float> floats(3 * n_values), scratch(3 * n_values);
    try {
      if (data[0] / 8 % 2 == 0)
        gradwire::exchange::add_group(codec, group, 0, sizes, floats, scratch);
      else
        gradwire::exchange::decode_group(codec, group, 0, sizes, 3, floats);
    } catch (const gradwire::CorruptMessage&) {
    } catch (const gradwire::IncompatibleVersion&) {
    }
    return 0;
  }
  try {
    quantisers::decode(message, kind, dtype, values);
  } catch (const gradwire::CorruptMessage&) {
  } catch (const gradwire::IncompatibleVersion&) {
  }
  return 0;
}
