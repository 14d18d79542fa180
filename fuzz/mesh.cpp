// Ranks as threads of one process, over loopback: exchanges with messages of random sizes against sums made otherwise,
// strangers at the door, headers that lie, ranks that leave in the middle. For the sanitizers, ThreadSanitizer too.
// Arguments: [N_RUNS [SEED]]
#include "wire/mesh.hpp"

#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "errors.hpp"
#include "exchange/broadcast.hpp"
#include "exchange/codecs.hpp"
#include "exchange/means.hpp"

namespace {

using namespace gradwire;

void require(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "not so: %s\n", what);
  std::abort();
}

// Lossless; trailing zeros are not sent, so that messages vary in length and may be empty.
class Trimmed final : public exchange::Codec {
 public:
  std::size_t max_message_bytes(std::size_t n_values) const override { return 4 * n_values; }
  std::size_t encode(const exchange::Values& values, std::size_t, std::span<std::uint8_t> out) override {
    std::size_t n = 4 * values.n;
    while (n > 0 && values.data[n - 1] == 0) --n;
    if (n > 0) std::memcpy(out.data(), values.data, n);
    return n;
  }
  void decode(std::span<const std::uint8_t> message, std::size_t, const exchange::Values& values) override {
    if (message.size() > 4 * values.n) throw CorruptMessage("too long");
    std::memset(values.data, 0, 4 * values.n);
    if (!message.empty()) std::memcpy(values.data, message.data(), message.size());
  }
};

using Meshes = std::vector<std::unique_ptr<wire::Mesh>>;

Meshes make_meshes(int world, double timeout_s, std::size_t n_connections = 0) {
  Meshes meshes;
  std::vector<wire::Endpoints> endpoints;
  for (int rank = 0; rank < world; ++rank) {
    meshes.push_back(std::make_unique<wire::Mesh>(rank, world,
                                                  std::vector<std::string>{rank % 2 == 0 ? "127.0.0.1" : "127.0.0.2"},
                                                  timeout_s, wire::Lines{n_connections, ""}));
    endpoints.push_back(meshes.back()->endpoints());
  }
  wire::Secret secret;
  wire::fill_random(secret);
  for (auto& mesh : meshes) mesh->join(endpoints, secret);
  return meshes;
}

template <class Body>
void on_all_ranks(Meshes& meshes, Body body) {
  std::vector<std::thread> threads;
  for (auto& mesh : meshes) threads.emplace_back([&mesh, &body] { body(*mesh); });
  for (auto& thread : threads) thread.join();
}

std::vector<float> gradient(unsigned seed, std::size_t n) {
  std::mt19937 random(seed);
  std::vector<float> values(n);
  // Small integers: sums are exact in any order.
  for (auto& value : values)
    value = random() % 4 == 0 ? 0.0f : static_cast<float>(static_cast<int>(random() % 64) - 32);
  for (std::size_t i = n - n / 5; i < n; ++i) values[i] = 0;
  return values;
}

void check_exchange(Meshes& meshes, std::uint32_t stream, bool is_ring, std::size_t n, std::size_t n_chunks,
                    unsigned seed) {
  const std::size_t world = meshes.size();
  on_all_ranks(meshes, [&](wire::Mesh& mesh) {
    std::vector<float> values = gradient(seed + static_cast<unsigned>(mesh.rank()), n), expected(n);
    for (unsigned rank = 0; rank < world; ++rank) {
      const std::vector<float> theirs = gradient(seed + rank, n);
      for (std::size_t i = 0; i < n; ++i) expected[i] += theirs[i];
    }
    for (auto& value : expected) value /= static_cast<float>(world);
    Trimmed codec;
    exchange::Account account;
    const exchange::Values buffer{reinterpret_cast<std::uint8_t*>(values.data()), n, exchange::Dtype::float32};
    const exchange::Values nothing{nullptr, 0, exchange::Dtype::float32};
    const exchange::Ticket ticket{stream, {1, 2, 3, 4}};
    if (is_ring)
      exchange::ring_mean(mesh, ticket, codec, buffer, nothing, n_chunks, 2, account);
    else
      exchange::direct_mean(mesh, ticket, codec, buffer, nothing, n_chunks, account);
    require(values == expected, "the mean is that of all ranks");
    require(n == 0 || account.n_messages > 0, "messages are counted");
  });
}

// Nothing of what ranks bring in is lost: N x mean + what was left out, over the ranks, is the sum of their gradients.
// And all of them hold the same bits.
struct Feedback {
  std::mutex mutex;
  std::vector<double> accounted;
  std::vector<float> mean;

  void add(const std::vector<float>& result, const std::vector<float>& left_out, const std::vector<float>& mine) {
    const std::lock_guard lock(mutex);
    require(mean.empty() || mean == result, "all ranks hold the same bits");
    mean = result;
    accounted.resize(result.size());
    for (std::size_t i = 0; i < result.size(); ++i)
      accounted[i] += static_cast<double>(result[i]) + left_out[i] - mine[i];
  }
  void check() const {
    for (const double rest : accounted) require(std::abs(rest) < 0.05, "what is not sent is left out");
  }
};

void check_quantised(Meshes& meshes, std::uint32_t stream, std::size_t n, std::size_t n_chunks, unsigned seed) {
  const std::size_t world = meshes.size();
  const auto kind = static_cast<quantisers::Kind>(seed % quantisers::kKinds);
  const bool pulls_raw = seed % 3 == 0, is_finite = seed % 4 != 0 || n == 0;
  Feedback feedback;
  on_all_ranks(meshes, [&](wire::Mesh& mesh) {
    const auto rank = static_cast<unsigned>(mesh.rank());
    std::vector<float> mine = gradient(seed + rank, n), residual(n), unsent(n);
    if (!is_finite && rank == 1) mine[n / 2] = std::numeric_limits<float>::infinity();
    std::vector<float> values = mine;
    const exchange::Values buffer{reinterpret_cast<std::uint8_t*>(values.data()), n, exchange::Dtype::float32};
    quantisers::Options options{.kind = kind, .parameter = 1, .levels = 7, .block = 512};
    options.stream.seed = seed;
    exchange::QuantisedBucket bucket{buffer, residual, unsent, 1,         {{0, n}},
                                     {true}, n_chunks, {},     pulls_raw, seed % 2 == 0 ? 7 : 127};
    for (std::size_t i = 0; i < world * n_chunks; ++i) bucket.draws.push_back(1'000 * rank + i);
    exchange::Account account;
    const auto result = exchange::quantised_mean(mesh, {stream, {1, 2, 3, 4}}, options, bucket, account);
    require(result.is_finite == is_finite, "all ranks know whether all was finite");
    if (is_finite)
      feedback.add(values, unsent, mine);
    else
      require(pulls_raw ? !std::isfinite(values[n / 2]) : std::isnan(values[n / 2]),
              "a message that is not finite becomes NaN, and what an owner adds of its own stays as it is");
  });
  feedback.check();
}

void check_pieces(Meshes& meshes, std::uint32_t stream, std::size_t n, unsigned seed) {
  const std::size_t world = meshes.size();
  exchange::Groups groups(world);
  for (std::size_t part = 0; part < world; ++part) {
    const std::size_t begin = n * part / world, end = n * (part + 1) / world;
    for (std::size_t at = begin; at < end;) {
      const std::size_t size = std::min<std::size_t>(end - at, 1 + (seed * (at + 1)) % 9'000);
      const auto first = static_cast<std::int64_t>(size / 3);
      groups[part].push_back({at, at + size, {first, static_cast<std::int64_t>(size) - first}});
      at += size;
    }
  }
  std::vector<std::size_t> n_groups;
  for (const auto& part : groups) n_groups.push_back(part.size());
  Feedback feedback;
  on_all_ranks(meshes, [&](wire::Mesh& mesh) {
    const std::vector<float> mine = gradient(seed + static_cast<unsigned>(mesh.rank()), n);
    std::vector<float> values = mine, left_out(n);
    exchange::QuantiserCodec one_bit({.kind = quantisers::Kind::one_bit});
    Trimmed trimmed;
    exchange::Codec& codec = seed % 2 == 0 ? static_cast<exchange::Codec&>(one_bit) : trimmed;
    exchange::Account account;
    exchange::PieceEnds ends(mesh, codec, codec, groups, {values, {}, left_out, 1, true}, account);
    exchange::OwnersExchange exchange(mesh, {stream, {1, 2, 3, 4}}, ends, n_groups, true, 50'000, account);
    exchange.run();
    exchange.finish();
    feedback.add(values, left_out, mine);
  });
  feedback.check();
}

// All bits at once, or some and then more, of some blocks; sent by one thread of each rank and received by another.
void check_broadcast(Meshes& meshes, std::uint32_t stream, std::size_t n, unsigned seed) {
  constexpr std::size_t kBlocks = 3;
  const bool is_ring = seed % 2 == 0;
  const int first_bits = seed % 5 == 0 ? exchange::kWordBits : 20 + static_cast<int>(seed % 5);
  std::vector<Feedback> feedbacks(2 * kBlocks);
  on_all_ranks(meshes, [&](wire::Mesh& mesh) {
    std::vector<exchange::BlockShape> shapes;
    for (std::size_t block = 0; block < kBlocks; ++block)
      shapes.push_back({"a block", n / (block + 1), exchange::Dtype::float32});
    exchange::Broadcast broadcast(mesh, stream, is_ring ? exchange::Topology::ring : exchange::Topology::fan_out,
                                  shapes, {256, 2}, 1, 2);
    for (std::uint32_t step = 0; step < 2; ++step) {
      std::vector<std::vector<float>> mine, values, left_out;
      for (std::size_t block = 0; block < kBlocks; ++block) {
        mine.push_back(gradient(seed + step + static_cast<unsigned>(mesh.rank()), shapes[block].n));
        left_out.emplace_back(shapes[block].n);
      }
      values = mine;
      broadcast.begin(step);
      std::thread receiver([&] {
        while (const auto heard = broadcast.receive(step)) require(heard->head.ceiling_bits == 9, "a head is read");
      });
      for (std::size_t block = 0; block < kBlocks; ++block) {
        broadcast.encode(block, exchange::values_of(values[block]), first_bits);
        const bool is_over = first_bits == exchange::kWordBits || block == 1;
        broadcast.send(is_over ? std::vector<std::size_t>{block} : std::vector<std::size_t>{}, 9, {}, {});
      }
      for (std::size_t block = 0; first_bits < exchange::kWordBits && block < kBlocks; block += 2) {
        broadcast.encode(block, exchange::values_of(values[block]), exchange::kWordBits - first_bits);
        broadcast.send({}, 9, std::vector<double>(kBlocks, 0.5), {});
      }
      if (first_bits < exchange::kWordBits) broadcast.send({0, 2}, 9, {}, {});  // a head alone
      receiver.join();
      mesh.wait_until_all_sent();
      for (std::size_t block = 0; block < kBlocks; ++block) {
        broadcast.mean(block, exchange::values_of(values[block]), exchange::values_of(left_out[block]));
        feedbacks[step * kBlocks + block].add(values[block], left_out[block], mine[block]);
      }
    }
  });
  for (const Feedback& feedback : feedbacks) feedback.check();
}

// What time limits are multiplied by: how many threads want each core now.
double patience() {
  double load = 0;
  const double cores = std::max(1u, std::thread::hardware_concurrency());
  return getloadavg(&load, 1) == 1 ? std::max(1.0, load / cores) : 1.0;
}

// Connects, says what it likes, and expects to be closed within a second.
void visit(const wire::Endpoint& endpoint, std::span<const std::uint8_t> words, bool reads_challenge) {
  const auto seconds = [factor = patience()](double n) {
    return std::chrono::milliseconds(std::lround(1e3 * n * factor));
  };
  const auto started = wire::Clock::now(), deadline = started + seconds(5);
  const wire::Descriptor connection = wire::connect_to(endpoint, deadline);
  std::uint8_t challenge[24];
  try {
    if (reads_challenge) wire::receive_all(connection, challenge, sizeof challenge, deadline);
    wire::send_all(connection, words.data(), words.size(), deadline);
    for (;;) wire::receive_all(connection, challenge, 1, deadline);
  } catch (const std::system_error& error) {
    require(error.code().value() != ETIMEDOUT, "a stranger is closed");
  }
  require(wire::Clock::now() - started < seconds(1.5), "within a second");
}

void check_strangers(Meshes& meshes, std::mt19937& random) {
  std::vector<std::thread> strangers;
  for (int i = 0; i < 12; ++i) {
    std::vector<std::uint8_t> words(i % 3 == 0 ? 0 : random() % 5'000);
    for (auto& byte : words) byte = static_cast<std::uint8_t>(random());
    if (i % 3 == 1 && words.size() >= 64) std::memcpy(words.data(), "GWH1\3\0\0\0\1\0\0\0\0\0\0\0", 16);
    strangers.emplace_back(
        [&meshes, words, i] { visit(meshes[i % meshes.size()]->endpoints()[0], words, i % 2 == 0); });
  }
  for (auto& stranger : strangers) stranger.join();
}

// Someone with the secret who sends a header with one field wrong: the receiver says so, and its process lives.
void check_lies(std::mt19937& random) {
  for (int lie = 0; lie < 8; ++lie) {
    Meshes meshes = make_meshes(2, 5);
    const wire::Facts facts{1, 2, 3, 4};
    std::atomic<bool> is_refused{false};
    on_all_ranks(meshes, [&](wire::Mesh& mesh) {
      const std::array<int, 1> peers = {1 - mesh.rank()};
      wire::Facts mine = facts;
      std::uint64_t n_bytes = 100;
      if (mesh.rank() == 1) {
        if (lie < 4) reinterpret_cast<std::uint32_t*>(&mine)[lie] = static_cast<std::uint32_t>(random());
        if (lie >= 4) n_bytes = 101 + random() % 100'000;
      }
      try {
        mesh.open(7, mine, mesh.rank() == 0 ? 100 : n_bytes, peers);
        if (mesh.rank() == 1) {
          mesh.send(0, 7, mesh.pool().take(n_bytes));
          mesh.wait_until_all_sent();
        } else {
          mesh.receive(1, 7);
        }
      } catch (const RankMismatch&) {
        is_refused = lie < 4;
      } catch (const CorruptMessage&) {
        is_refused = lie >= 4;
      } catch (const PeerLost&) {
      }
      mesh.break_off();
    });
    require(is_refused, "a header that lies is refused with its error");
  }
}

// One rank leaves after some messages; every other one's wait ends.
void check_leaving(std::size_t world, unsigned seed) {
  Meshes meshes = make_meshes(static_cast<int>(world), 5);
  check_exchange(meshes, 2, true, 1'000, 3, seed);
  std::atomic<int> n_lost{0};
  on_all_ranks(meshes, [&](wire::Mesh& mesh) {
    if (mesh.rank() == 1) {
      if (seed % 2 == 0) mesh.break_off();
      return mesh.shut();
    }
    std::vector<float> values(50'000, 1.0f);
    Trimmed codec;
    exchange::Account account;
    const exchange::Values buffer{reinterpret_cast<std::uint8_t*>(values.data()), values.size(),
                                  exchange::Dtype::float32};
    try {
      exchange::ring_mean(mesh, {4, {}}, codec, buffer, {nullptr, 0, exchange::Dtype::float32}, 4, 2, account);
    } catch (const PeerLost&) {
      ++n_lost;
    }
    mesh.break_off();
  });
  require(n_lost == static_cast<int>(world) - 1, "whoever waits for a rank that left hears of it");
}

}  // namespace

int main(int n_arguments, char** arguments) {
  const long n_runs = n_arguments > 1 ? std::atol(arguments[1]) : 20;
  std::mt19937 random(n_arguments > 2 ? static_cast<unsigned>(std::strtoul(arguments[2], nullptr, 10)) : 1);
  for (long run = 0; run < n_runs; ++run) {
    const int world = 2 + static_cast<int>(random() % 4);
    Meshes meshes = make_meshes(world, 20, random() % 6);
    std::thread strangers([&] {
      std::mt19937 theirs(static_cast<unsigned>(run));
      check_strangers(meshes, theirs);
    });
    std::uint32_t stream = 0;
    for (int i = 0; i < 8; ++i)
      check_exchange(meshes, stream += 2, random() % 2 == 0, random() % 4 == 0 ? random() % 9 : random() % 300'000,
                     1 + random() % 7, static_cast<unsigned>(random()));
    for (int i = 0; i < 4; ++i) {
      check_quantised(meshes, stream += 2, random() % 100'000, 1 + random() % 4,
                      static_cast<unsigned>(random() % 9'999));
      check_pieces(meshes, stream += 2, random() % 60'000, static_cast<unsigned>(random() % 9'999));
      check_broadcast(meshes, stream += 2, random() % 60'000, static_cast<unsigned>(random() % 9'999));
    }
    strangers.join();
    check_leaving(2 + random() % 3, static_cast<unsigned>(random()));
  }
  check_lies(random);
  std::printf("%ld runs, nothing found\n", n_runs);
  return 0;
}
