// Values combined over the ranks, element by element and as they are: round a ring, in place.
#pragma once

#include <cstdint>
#include <exception>
#include <span>
#include <thread>

#include "exchange/ring.hpp"

namespace gradwire::exchange {

enum class Element : std::uint8_t { float32, bfloat16, float16, int32, int64 };
enum class Operation : std::uint8_t { sum, bit_or, maximum };  // floats: sum alone; int32 wraps around
inline constexpr int kElements = 5, kOperations = 3;

std::size_t bytes_of(Element element);

// Replaces `values` by their combination over all ranks, which is that of rank p's, p+1's, and so on for part p: equal
// bits on all ranks. Floats are added in float32 and rounded to their type hop by hop. The 2 (N-1)/N of the bytes are
// sent that a ring sends. Throws InvalidArgument, PeerLost, and what a mesh throws.
void ring_combine(wire::Mesh& mesh, const Ticket& ticket, std::span<std::uint8_t> values, Element element,
                  Operation operation, std::size_t n_chunks, Account& account);

// The same on a thread of its own, while its caller does something else.
class RunningSum {
 public:
  // `values` are not touched by others until it is over.
  RunningSum(wire::Mesh& mesh, const Ticket& ticket, std::span<std::uint8_t> values, Element element,
             Operation operation, std::size_t n_chunks);
  ~RunningSum();
  RunningSum(const RunningSum&) = delete;
  RunningSum& operator=(const RunningSum&) = delete;
  // Returns when it is over. Throws what it threw.
  const Account& wait();

 private:
  Account account_;
  std::exception_ptr error_;
  std::thread thread_;
};

}  // namespace gradwire::exchange
