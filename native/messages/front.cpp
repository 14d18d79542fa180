#include "messages/front.hpp"

#include <bit>
#include <cstring>

#include "bits/bit_io.hpp"
#include "checksum/crc32c.hpp"

namespace gradwire {
namespace {

std::uint32_t checksum(const Front& front, const std::uint8_t* message, std::uint64_t n_chunks, ConstBytes more) {
  const std::uint32_t crc = crc32c({message, front.header_bytes - 4});
  return crc32c(more, crc32c({message + front.header_bytes, n_chunks * front.entry_bytes}, crc));
}

bool is_possible(std::size_t partition) {
  return std::has_single_bit(partition) && partition >= floats::kMinPartition && partition <= floats::kMaxPartition;
}

}  // namespace

void expect(const char* name, const char* what, std::uint64_t expected, std::uint64_t got) {
  if (got != expected) fail_message(name, what, ": expected ", expected, ", got ", got);
}

void expect_values(const char* name, floats::Dtype dtype, std::uint64_t n_elements, floats::Dtype got_dtype,
                   std::uint64_t got_elements) {
  if (got_dtype != dtype)
    fail_message(name, "dtype: expected ", floats::name_of(dtype), ", got ", floats::name_of(got_dtype));
  expect(name, "number of values", n_elements, got_elements);
}

void write_front(const Front& front, int version, int first, int second, int third, std::uint8_t* message) {
  std::memcpy(message, front.letters, 4);
  const int codes[4] = {version, first, second, third};
  for (int i = 0; i < 4; ++i) message[4 + i] = static_cast<std::uint8_t>(codes[i]);
}

void check_front(const Front& front, ConstBytes message) {
  if (message.size() < front.header_bytes)
    fail_message(front.name, "truncated: ", message.size(), " bytes, a header alone has ", front.header_bytes);
  if (std::memcmp(message.data(), front.letters, 4) != 0)
    fail_message(front.name, "it does not begin with ", front.letters, ": another kind of message, or bytes were lost");
  if (message[4] < 1 || message[4] > front.last_version)
    throw IncompatibleVersion(front.name, " message of format version ", message[4], "; this build reads version",
                              front.last_version == 1 ? " 1" : "s 1 and 2",
                              ": use the same gradwire release on every rank");
}

void write_checksum(const Front& front, std::uint8_t* message, std::uint64_t n_chunks, ConstBytes more) {
  store(message + front.header_bytes - 4, checksum(front, message, n_chunks, more));
}

void check_checksum(const Front& front, const std::uint8_t* message, std::uint64_t n_chunks, ConstBytes more) {
  if (load<std::uint32_t>(message + front.header_bytes - 4) != checksum(front, message, n_chunks, more))
    fail_message(front.name, "the header's checksum does not match: bytes were changed on the way");
}

std::uint64_t elements_of(ConstBytes values, floats::Dtype dtype) {
  if (values.size() % floats::bytes_of(dtype) != 0) throw InvalidArgument("the gradient's bytes are no whole values");
  return values.size() / floats::bytes_of(dtype);
}

void check_room(const char* name, ConstBytes out, std::uint64_t n_needed) {
  if (out.size() < n_needed)
    throw BufferTooSmall(name, ": out has ", out.size(), " bytes; a message may need ", n_needed);
}

namespace floats {

void check_partition(std::size_t partition) {
  if (!is_possible(partition)) throw InvalidArgument("partition is a power of two from 32 to 1024, not ", partition);
}

void write_head(const Front& front, const Head& head, std::uint8_t* message) {
  write_front(front, head.version, static_cast<int>(head.dtype), head.first_code, head.second_code, message);
  store(message + 8, head.n_elements);
  store(message + 16, static_cast<std::uint16_t>(head.partition));
  store(message + 18, head.flags);
  store(message + 20, std::uint32_t{0});
  store(message + 24, head.message_bytes);
  store(message + 32, std::uint32_t{0});
}

Head read_head(const Front& front, ConstBytes message) {
  check_front(front, message);
  const std::uint8_t* const at = message.data();
  const Head head{at[4],
                  static_cast<Dtype>(at[5]),
                  at[6],
                  at[7],
                  load<std::uint16_t>(at + 18),
                  load<std::uint16_t>(at + 16),
                  load<std::uint64_t>(at + 8),
                  load<std::uint64_t>(at + 24)};
  expect(front.name, "length in bytes", head.message_bytes, message.size());
  if (at[5] >= kDtypes) fail_message(front.name, "unknown dtype code ", at[5]);
  if (!is_possible(head.partition)) fail_message(front.name, "partitions of ", head.partition, " values");
  if ((head.flags & ~kFlagNonfinite) != 0 || load<std::uint32_t>(at + 20) != 0 || load<std::uint32_t>(at + 32) != 0)
    fail_message(front.name, "unknown flags");
  return head;
}

}  // namespace floats
}  // namespace gradwire
