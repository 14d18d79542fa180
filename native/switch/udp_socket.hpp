// What travels between ranks and the switch: a header of 40 bytes, and 256 values in packets that carry any. Layout and
// checks: docs/format.md#switch-packets. Little-endian, as all of gradwire's formats.
#pragma once

#include <netinet/in.h>
#include <sys/socket.h>

#include <bit>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include "checksum/crc32c.hpp"

namespace gradwire::innet {

static_assert(std::endian::native == std::endian::little, "headers are copied as they lie in memory");

// Values in a packet. A pipeline's stages do one 32-bit register operation each in four stateful ALUs; SwitchML's
// largest packet, too, is 256 values, through four pipelines in a row.
constexpr std::size_t kLanes = 256;
constexpr std::size_t kPayloadBytes = 4 * kLanes;
constexpr std::size_t kMaxWorkers = 32;  // a slot's bitmap is one 32-bit register

constexpr std::uint32_t kMagic = 0x57535747;  // "GWSW"
constexpr std::uint8_t kVersion = 1;

enum class Kind : std::uint8_t {
  join = 1,      // a worker asks for its job's slots
  welcome = 2,   // and gets them
  refusal = 3,   // `word` says why
  values = 4,    // a worker's values for one slot
  result = 5,    // all workers' together
  pending = 6,   // values that came before are kept; `word` is whose
  leave = 7,     // a worker needs nothing more
  farewell = 8,  // and is let go
};
enum class Operation : std::uint8_t { none = 0, add = 1, bit_or = 2, maximum = 3 };
enum class Reason : std::uint32_t { unknown_job = 1, no_slots = 2, bad_join = 3, mismatch = 4, peer_left = 5 };

struct Header {
  std::uint32_t magic = kMagic;
  std::uint8_t version = kVersion;
  Kind kind = Kind::join;
  Operation operation = Operation::none;
  std::uint8_t worker = 0;
  std::uint64_t job = 0;         // drawn at random by the job's first rank: whoever does not know it stays outside
  std::uint32_t epoch = 0;       // drawn at random when the switch starts
  std::uint32_t sequence = 0;    // counts a job's packets; the slot is `sequence` modulo the job's slots
  std::uint16_t handle = 0;      // the job's row in the switch's table
  std::uint16_t collective = 0;  // which call of the ranks, so that two calls cannot mix
  std::uint32_t word = 0;        // by kind
  std::uint32_t reserved = 0;
  std::uint32_t checksum = 0;  // CRC32C of the 36 bytes before and of the payload
};
constexpr std::size_t kHeaderBytes = 40;
constexpr std::size_t kPacketBytes = kHeaderBytes + kPayloadBytes;
static_assert(sizeof(Header) == kHeaderBytes);

inline bool carries_values(Kind kind) { return kind == Kind::values || kind == Kind::result; }

// `payload`: kPayloadBytes, or null for kinds without.
inline std::uint32_t checksum_of(const Header& header, const void* payload) {
  const auto* bytes = reinterpret_cast<const std::uint8_t*>(&header);
  const std::uint32_t checksum = crc32c({bytes, offsetof(Header, checksum)});
  return payload ? crc32c({static_cast<const std::uint8_t*>(payload), kPayloadBytes}, checksum) : checksum;
}

enum class Check { good, foreign, other_version };

// Copies the header of a datagram that is a packet of ours; its payload, if its kind has one, follows at kHeaderBytes.
inline Check read_header(ConstBytes datagram, Header& header) {
  if (datagram.size() < kHeaderBytes) return Check::foreign;
  std::memcpy(&header, datagram.data(), kHeaderBytes);
  if (header.magic != kMagic) return Check::foreign;
  if (header.version != kVersion) return Check::other_version;
  const bool has_values = carries_values(header.kind);
  if (header.kind < Kind::join || header.kind > Kind::farewell || header.operation > Operation::maximum ||
      header.reserved != 0 || datagram.size() != (has_values ? kPacketBytes : kHeaderBytes))
    return Check::foreign;
  return checksum_of(header, has_values ? datagram.data() + kHeaderBytes : nullptr) == header.checksum ? Check::good
                                                                                                       : Check::foreign;
}

// A UDP socket (IPv4) that sends and receives many packets a system call: the kernel cuts one large buffer into equal
// datagrams (UDP_SEGMENT) and joins them again (UDP_GRO); where it cannot, sendmmsg and recvmmsg do.
struct Endpoint {
  std::uint32_t address = 0;  // network byte order, as is the port
  std::uint16_t port = 0;
  bool operator==(const Endpoint&) const = default;
};

// A packet to send; both must live until it is sent.
struct Outgoing {
  const Header* header;
  const void* payload;  // kPayloadBytes, or null
};

// 61 packets are 64,904 bytes: the most that fits a datagram's 65,507. Kernels cut into at most 64.
constexpr std::size_t kMaxBurst = 61;

class UdpSocket {
 public:
  UdpSocket();
  ~UdpSocket();
  UdpSocket(const UdpSocket&) = delete;
  UdpSocket& operator=(const UdpSocket&) = delete;

  // Throw InvalidArgument: not an IPv4 address, a port that is taken, an address that is not this host's.
  void bind(const std::string& address, std::uint16_t port);
  void connect(const std::string& address, std::uint16_t port);

  std::uint16_t port() const;
  // Asks for buffers of this size; returns what the kernel grants for receiving.
  std::size_t grow_buffers(std::size_t n_bytes);

  // Sends packets of one size, to `to` or, where that is null, to the peer that it is connected to. Returns how many
  // left; the others found the queue full (or nobody there: `was_refused`).
  std::size_t send(const Endpoint* to, std::span<const Outgoing> packets);

  // Waits up to `timeout_ms` for something to arrive, then hands over all that is there, a datagram at a time, in at
  // most `kBatch` calls' worth. Returns the number of datagrams.
  using Handler = std::function<void(ConstBytes, const Endpoint&)>;
  std::size_t receive(int timeout_ms, const Handler& handle);

  // Whether the peer's host said since the last call that nobody listens there.
  bool was_refused();

 private:
  std::size_t send_joined(sockaddr_in* to, std::span<const Outgoing> packets);
  std::size_t send_singly(sockaddr_in* to, std::span<const Outgoing> packets);
  bool note_error(int error);

  static constexpr std::size_t kBatch = 16;
  static constexpr std::size_t kBufferBytes = 1 << 16;

  int descriptor_;
  bool joins_ = true;
  bool was_refused_ = false;
  std::vector<std::uint8_t> buffers_;
  std::vector<iovec> pieces_;
};

}  // namespace gradwire::innet
