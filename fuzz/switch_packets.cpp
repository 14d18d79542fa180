// libFuzzer harness of the switch: the input is a run of packets, each led by a byte that says how much of its header
// is made right, so that what lies behind the checks is reached. Whatever they are, a reply points into the registers
// and is a packet itself. Run: fuzz/run SECONDS switch_packets
#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <span>
#include <vector>

#include "switch/server.hpp"

namespace innet = gradwire::innet;

namespace {

constexpr std::size_t kSlots = 16;
constexpr std::uint32_t kEpoch = 7;

void require(bool holds) {
  if (!holds) std::abort();
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  innet::Pipeline pipeline(kSlots, kEpoch, std::chrono::seconds(1));
  auto now = innet::Clock::now();
  for (std::size_t at = 0; at < size;) {
    const std::uint8_t how = data[at++];
    std::vector<std::uint8_t> datagram(std::min<std::size_t>(innet::kHeaderBytes, size - at));
    std::copy_n(data + at, datagram.size(), datagram.begin());
    at += datagram.size();
    innet::Header header;
    if (how >= 32 && datagram.size() == innet::kHeaderBytes) {
      std::memcpy(&header, datagram.data(), innet::kHeaderBytes);
      header.magic = innet::kMagic;
      header.version = innet::kVersion;
      header.kind = static_cast<innet::Kind>(1 + static_cast<unsigned>(header.kind) % 8);
      header.operation = static_cast<innet::Operation>(static_cast<unsigned>(header.operation) % 4);
      header.worker %= 4;
      header.job %= 3;
      header.reserved = 0;
      if (how >= 64) header.epoch = kEpoch;
      if (how >= 96) header.handle %= 3;
      if (how >= 128) header.sequence %= 4 * kSlots;
      if (how >= 128) header.collective = 1;
      if (header.kind == innet::Kind::join && how >= 64)
        header.word = (1 + header.word % 4) | (header.word >> 8 & 7) << 8;
      std::vector<std::uint8_t> payload(innet::carries_values(header.kind) ? innet::kPayloadBytes : 0, how);
      header.checksum = innet::checksum_of(header, payload.empty() ? nullptr : payload.data());
      std::memcpy(datagram.data(), &header, innet::kHeaderBytes);
      datagram.insert(datagram.end(), payload.begin(), payload.end());
    }
    if (innet::read_header(datagram, header) != innet::Check::good) continue;
    now += std::chrono::milliseconds(how);
    const innet::Endpoint sender{1, static_cast<std::uint16_t>(how % 2)};
    const innet::Reply reply = pipeline.process(header, datagram.data() + innet::kHeaderBytes, sender, now);
    require((reply.values != nullptr) ==
            (reply.header.kind == innet::Kind::result && reply.to != innet::Reply::To::nobody));
    if (reply.to == innet::Reply::To::nobody) continue;
    innet::Header answer = reply.header;
    answer.checksum = innet::checksum_of(answer, reply.values);  // reads all of the values
    require(pipeline.n_free_slots() <= kSlots);
    if (reply.to == innet::Reply::To::everyone) require(pipeline.workers_of(answer.handle).joined != 0);
  }
  return 0;
}
