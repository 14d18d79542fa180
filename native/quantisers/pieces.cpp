#include "quantisers/pieces.hpp"

#include <cstring>
#include <string>

#include "errors.hpp"

namespace gradwire::quantisers {

namespace {

constexpr std::size_t kLengthBytes = 4;

std::uint64_t magnitude(std::int64_t size) { return size < 0 ? 0 - static_cast<std::uint64_t>(size) : size; }

void check_sizes(std::span<const std::int64_t> sizes, std::uint64_t n_elements) {
  std::uint64_t n_left = n_elements;
  for (const std::int64_t signed_size : sizes) {
    const std::uint64_t size = magnitude(signed_size);
    if (size > n_left) throw InvalidArgument("the pieces have more values than their buffer");
    n_left -= size;
  }
  if (n_left != 0) throw InvalidArgument("the buffer has " + std::to_string(n_left) + " values more than its pieces");
}

}  // namespace

std::uint64_t encode_pieces(const Options& options, const Source& source, std::span<const std::int64_t> sizes,
                            std::span<float> left_out, std::span<std::uint8_t> out) {
  check_sizes(sizes, source.n_elements());
  if (!source.residual.empty() && source.residual.size() != source.n_elements())
    throw InvalidArgument("the residual has another size than the values");
  if (left_out.size() != source.n_elements()) throw InvalidArgument("left_out has another size than the values");
  const std::size_t element_bytes = bytes_of(source.dtype);
  std::size_t first = 0, at = 0;
  for (const std::int64_t signed_size : sizes) {
    const std::uint64_t size = magnitude(signed_size);
    if (signed_size < 0) {
      first += size;
      continue;
    }
    if (out.size() - at < kLengthBytes) throw BufferTooSmall("out has no room for the length of another piece");
    Options drawing = options;
    drawing.stream.step += first;
    Source piece{
        source.values.subspan(first * element_bytes, size * element_bytes), source.dtype, {}, source.residual_scale};
    if (!source.residual.empty()) piece.residual = source.residual.subspan(first, size);
    const std::uint64_t n_bytes = encode(drawing, piece, left_out.subspan(first, size), out.subspan(at + kLengthBytes));
    const auto length = static_cast<std::uint32_t>(n_bytes);
    if (length != n_bytes) throw InvalidArgument("a piece's message is longer than 2^32 - 1 bytes");
    std::memcpy(out.data() + at, &length, kLengthBytes);
    at += kLengthBytes + n_bytes;
    first += size;
  }
  return at;
}

void decode_pieces(std::span<const std::uint8_t> message, Kind kind, Dtype dtype, std::span<const std::int64_t> sizes,
                   const Use& use, std::span<std::uint8_t> out) {
  const std::size_t element_bytes = bytes_of(dtype);
  check_sizes(sizes, out.size() / element_bytes);
  std::size_t first = 0, at = 0;
  for (const std::int64_t signed_size : sizes) {
    const std::uint64_t size = magnitude(signed_size);
    if (signed_size < 0) {
      first += size;
      continue;
    }
    std::uint32_t length = 0;
    const bool has_length = message.size() - at >= kLengthBytes;
    if (has_length) std::memcpy(&length, message.data() + at, kLengthBytes);
    if (!has_length || length > message.size() - at - kLengthBytes)
      throw CorruptMessage("a group of " + std::to_string(sizes.size()) + " pieces ends after " +
                           std::to_string(message.size()) + " bytes, before the piece of values " +
                           std::to_string(first) + " to " + std::to_string(first + size));
    decode(message.subspan(at + kLengthBytes, length), kind, dtype,
           out.subspan(first * element_bytes, size * element_bytes), use);
    at += kLengthBytes + length;
    first += size;
  }
  if (at != message.size())
    throw CorruptMessage("a group of " + std::to_string(sizes.size()) + " pieces has " +
                         std::to_string(message.size() - at) + " bytes too many");
}

}  // namespace gradwire::quantisers
