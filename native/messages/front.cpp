#include "messages/front.hpp"

#include <bit>
#include <cstring>

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

void seal_header(const Front& front, std::uint8_t* message, std::uint64_t n_chunks, ConstBytes more) {
  std::memcpy(message, front.letters, 4);
  store(message + front.header_bytes - 4, checksum(front, message, n_chunks, more));
}

void check_checksum(const Front& front, const std::uint8_t* message, std::uint64_t n_chunks, ConstBytes more) {
  if (load<std::uint32_t>(message + front.header_bytes - 4) != checksum(front, message, n_chunks, more))
    fail_message(front.name, "the header's checksum does not match: bytes were changed on the way");
}

void check_room(const char* name, ConstBytes out, std::uint64_t n_needed) {
  if (out.size() < n_needed)
    throw BufferTooSmall(name, ": out has ", out.size(), " bytes; a message may need ", n_needed);
}

namespace floats {

Head read_head(const Front& front, ConstBytes message) {
  const auto head = load_header<Head>(front, message);
  expect(front.name, "length in bytes", head.message_bytes, message.size());
  check_dtype(front.name, head.dtype);
  if (!is_possible(head.partition)) fail_message(front.name, "partitions of ", head.partition, " values");
  if ((head.flags & ~kFlagNonfinite) != 0 || head.first_zero != 0 || head.second_zero != 0)
    fail_message(front.name, "unknown flags");
  return head;
}

}  // namespace floats
}  // namespace gradwire
