// libFuzzer harness of the quantisers' decoders. The first two bytes choose quantiser, dtype, instruction set and
// whether the checksum is made right, so that what lies behind it is reached; the rest is the message. Build:
//   cmake -S . -B build/fuzz -DGRADWIRE_SANITIZE=ON && cmake --build build/fuzz --target fuzz_quantised_decode
#include <cstdint>
#include <cstring>
#include <vector>

#include "checksum/crc32c.hpp"
#include "errors.hpp"
#include "quantisers/codec.hpp"
#include "quantisers/thc.hpp"
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
  try {
    if (kind == quantisers::Kind::thc)
      quantisers::decode_thc(message, dtype, values);
    else
      quantisers::decode(message, kind, dtype, values);
  } catch (const gradwire::CorruptMessage&) {
  } catch (const gradwire::IncompatibleVersion&) {
  }
  return 0;
}
