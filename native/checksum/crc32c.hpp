// CRC32C (Castagnoli), the checksum of every gradwire message.
#pragma once

#include "spans.hpp"

namespace gradwire {

// CRC32C of `data`, continuing from `crc` (0 for a new message). Polynomial 0x1EDC6F41 reflected, initial and final
// complement, as in RFC 3720: crc32c("123456789") == 0xE3069283.
std::uint32_t crc32c(ConstBytes data, std::uint32_t crc = 0);

}  // namespace gradwire
