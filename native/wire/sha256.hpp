// SHA-256 (FIPS 180-4) and HMAC-SHA256 (RFC 2104), for the handshake of two ranks. Not constant-time in the length of
// its input; nothing secret has a length of its own here.
#pragma once

#include <array>
#include <cstdint>
#include <span>

namespace gradwire::wire {

using Digest = std::array<std::uint8_t, 32>;

Digest sha256(std::span<const std::uint8_t> data);
Digest hmac_sha256(std::span<const std::uint8_t> key, std::span<const std::uint8_t> data);

// Whether both are the same, in a time that does not tell where they differ.
bool equal_digests(std::span<const std::uint8_t> a, std::span<const std::uint8_t> b);

}  // namespace gradwire::wire
