// A network of long lines in user space: packets of TUN devices are delayed, limited and lost as a table says.
#pragma once

#include <cstdint>
#include <span>

namespace gradwire::netlab {

// One host's line, in memory that others write settings to and read counters from while packets pass; 8 bytes a field.
struct Line {
  double up_bps, down_bps;  // 0: no limit
  double up_loss, down_loss;
  double delay_s, jitter_s;           // one way; half of the way between two hosts each
  double site, site_delay_s;          // added between hosts of different sites, half by each
  double queue_s;                     // what each direction's queue holds, at its rate
  double is_up;                       // 0: nothing passes
  std::int64_t sent[3], received[3];  // bytes, packets, drops
};

// Passes packets between `devices`, one TUN a host at 10.77.(host + 1) / 16, until `stop` can be read. A queue that is
// full drops what comes; packets of a pair of hosts never overtake each other.
void relay(std::span<const int> devices, std::span<Line> lines, int stop);

}  // namespace gradwire::netlab
