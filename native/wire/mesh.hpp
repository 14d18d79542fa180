// One rank's connections to the other ranks of its group, and the loop that serves them all.
//
// There is no thread for messages: whoever waits, for a message or until its own are gone, serves every connection
// meanwhile, asleep in epoll while nothing can be done. Sending and receiving never wait for each other, so two ranks
// that both send megabytes do not block. Connections are made when two ranks first need one.
//
// A link to a peer is one TCP connection on a LAN and several over a long line, which one does
// not fill. Whichever connection has room takes the next message; the receiver puts a stream's messages in order by
// their numbers. A connection that breaks while others live hands them what the peer's kernel had not acknowledged.
#pragma once

#include <condition_variable>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "wire/handshake.hpp"
#include "wire/message.hpp"
#include "wire/socket.hpp"

namespace gradwire::wire {

// How a rank uses the lines to its peers. By itself: one connection and the system's congestion control where a round
// trip takes less than kLongTrip, else "bbr" and one for each kTripOfOne, but two at least, or, where the kernel has no
// "bbr", kConnections of them.
struct Lines {
  std::size_t n_connections = 0;  // connections to a peer; 0: by its round trip
  std::string congestion;         // the kernel's name of a congestion control; empty: by the round trip
};
inline constexpr std::chrono::milliseconds kLongTrip{3}, kTripOfOne{20};
inline constexpr std::size_t kConnections = 8, kMostConnections = 64;

// What has come: the message, from whom, and how long its bytes took once the first of them could be on their way.
struct Arrival {
  int peer;
  Message message;
  std::int64_t duration_ns;
};

// Thread-safe. Every wait ends with PeerLost when the peer that is waited for closes its connection, or moves less
// than 16 KiB of a message within `timeout_s`, and when this rank breaks off.
class Mesh {
 public:
  // Listens on `hosts`, numeric addresses of its network interfaces, from now on. Throws InvalidArgument.
  Mesh(int rank, int world_size, const std::vector<std::string>& hosts, double timeout_s, const Lines& lines);
  ~Mesh();
  Mesh(const Mesh&) = delete;
  Mesh& operator=(const Mesh&) = delete;

  // What to tell the other ranks.
  const Endpoints& endpoints() const { return own_; }
  // What they have told, by rank; connections are taken from now on.
  void join(std::vector<Endpoints> endpoints, const Secret& secret);

  int rank() const { return rank_; }
  int world_size() const { return world_size_; }
  // Of the link that has most.
  std::size_t n_connections();
  // All other ranks; each begins with its right neighbour, so that not all send to the same one at once.
  std::vector<int> others() const {
    std::vector<int> ranks;
    for (int distance = 1; distance < world_size_; ++distance) ranks.push_back((rank_ + distance) % world_size_);
    return ranks;
  }
  Pool& pool() { return pool_; }

  // Begins a stream with `peers`: connects to them if need be, and reads messages of up to max_bytes that carry these
  // facts. Messages of streams that are not open wait in the kernel, and whatever their sender sends after them: so an
  // exchange opens its streams before it sends, and has sent all of them before the next one opens its own. Throws
  // PeerLost, IncompatibleVersion.
  void open(std::uint32_t stream, const Facts& facts, std::uint64_t max_bytes, std::span<const int> peers);
  // Ends it; what has come and nobody took is dropped. What this rank has sent still travels.
  void close(std::uint32_t stream);

  // Queues a message, whose bytes must not change any more, and sends what the kernel takes. Throws PeerLost.
  void send(int peer, std::uint32_t stream, Message message);
  // The next message of `peer`. Throws PeerLost; CorruptMessage, IncompatibleVersion, RankMismatch for what any peer
  // sent.
  Message receive(int peer, std::uint32_t stream);
  // The next message of one of `peers`. Throws as `receive`, where any of them is lost.
  Arrival receive_any(std::uint32_t stream, std::span<const int> peers);
  // Waits until at most so many messages to `peer` (or to each) are not in the kernel's hands.
  void wait_until_sent(int peer, std::size_t n_left);
  void wait_until_all_sent();

  // Ends every connection; all waits on both sides end with PeerLost. Safe from any thread, at any time.
  void break_off();
  // Ends everything; nothing may wait any more.
  void shut();

  struct Forked;  // what a forked child does with the meshes of its parent

 private:
  struct Outgoing {
    RawHeader header;
    Message message;
    std::size_t n_sent = 0;
  };
  // When a connection last got on: by a whole header or message, or so many bytes of one that one now and then is not
  // taken for life.
  struct Progress {
    static constexpr std::size_t kStride = 1 << 14;
    Clock::time_point last{};
    std::size_t n_bytes = 0;  // since then
    void add(std::size_t n, bool is_whole) {
      n_bytes += n;
      if (!is_whole && n_bytes < kStride) return;
      last = Clock::now();
      n_bytes = 0;
    }
  };
  struct Link;
  struct Connection {
    Link* link;
    std::size_t index;
    Descriptor socket;
    std::deque<Outgoing> queue;           // what it sends, the first one begun
    std::deque<Outgoing> unacknowledged;  // in the kernel's hands; kept where another connection could send them again
    RawHeader raw_header{};
    std::size_t n_header = 0;  // bytes of it that are there
    Header header{};
    bool is_parked = false;          // its header is there, its stream not yet open
    std::optional<Message> message;  // whose body is being read
    std::size_t n_body = 0;
    bool is_repeated = false;  // the message has come by another connection
    bool has_stopped = false;  // nothing can be sent any more
    bool has_ended = false;    // nothing comes any more either
    bool is_hung = false;      // over, but for what has come and is not read yet
    bool is_watched = false;
    std::uint32_t watched_for = 0;
  };
  struct Link {
    int peer;
    std::vector<std::unique_ptr<Connection>> connections;
    std::deque<Outgoing> queue;  // which no connection has taken yet
    std::string end;             // why it is over, if it is
    bool has_ended = false;
    std::size_t next_connection = 0, n_wanted = 1;
    Progress in{}, out{};
    Clock::time_point free_since{};  // when what came before the present message was there
    Clock::time_point tried{};       // when a lost connection was last made anew
    std::size_t n_unsent() const;
    std::size_t n_alive() const;
    bool has_one_connection() const { return connections.size() == 1 && n_wanted == 1; }
  };
  struct Stream {
    Facts facts;
    std::uint64_t max_bytes;
    std::vector<std::uint32_t> n_sent, n_arrived;
    std::vector<std::deque<Arrival>> inboxes;
    std::vector<std::map<std::uint32_t, Arrival>> early;  // here before those that are due
    bool has(int peer, std::uint32_t number) const { return number < n_arrived[peer] || early[peer].contains(number); }
    std::vector<Clock::time_point> waiting_since;  // by peer, of receive_any
  };
  using Lock = std::unique_lock<std::mutex>;
  static constexpr std::uint64_t kWakeUp =
      UINT64_MAX;  // what epoll says of wake_; of a connection its peer and its number

  void add(int peer, Descriptor socket);
  std::size_t n_connections_for(const Descriptor& socket) const;
  void meet(Lock& lock, int peer);
  void add_connections(Lock& lock, int peer, std::size_t n);
  // A connection whose two ends are sure of each other; the index-th pair of interfaces has it.
  Descriptor reach(int peer, const Endpoints& endpoints, std::size_t index, Clock::duration patience);
  Stream& stream_of(std::uint32_t number);
  void begin_message(Connection& connection);
  void begin_body(Connection& connection, Stream& stream);
  void deliver(Connection& connection, Stream& stream);
  void read(Connection& connection);
  void send_queued(Link& link);
  void write(Connection& connection);
  void forget_acknowledged(Connection& connection);
  void end(Connection& connection, const std::string& why, bool may_have_more = false);
  void watch(Connection& connection);
  void wake();
  void throw_if_broken() const;
  [[noreturn]] void lose(int peer, const std::string& what, Clock::time_point started) const;
  void serve_once(Lock& lock, Clock::time_point deadline);
  // Serves all connections until is_done(). `peers` are waited for, each since waiting_since(peer).
  template <class Since, class Predicate>
  void serve_until(Lock& lock, std::span<const int> peers, Since waiting_since, Predicate is_done);
  template <class Predicate>
  void serve_until(Lock& lock, int peer, Predicate is_done);

  const int rank_, world_size_;
  const double timeout_s_;
  const Lines lines_;
  Endpoints own_;
  std::vector<Endpoints> endpoints_;
  Secret secret_{};
  Pool pool_;

  std::mutex mutex_;
  std::unique_ptr<std::condition_variable> changed_;  // left behind in a forked child: it may have waiters there
  int n_waiting_ = 0;                                 // threads that wait for another one to serve
  bool is_serving_ = false, is_broken_ = false;
  std::vector<Descriptor> listeners_;
  Descriptor epoll_, wake_;
  std::vector<std::unique_ptr<Link>> links_;  // by peer
  std::map<std::uint32_t, Stream> streams_;
  std::uint32_t newest_stream_ = 0;
  std::uint64_t most_bytes_ = 0;  // of a message of any stream so far
  std::unique_ptr<Doorkeeper> doorkeeper_;
};

}  // namespace gradwire::wire
