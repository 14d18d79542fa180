// What the core throws; bindings.cpp turns each into the Python error of the same name.
#pragma once

#include <stdexcept>

namespace gradwire {

struct InvalidArgument : std::runtime_error {
  using std::runtime_error::runtime_error;
};
struct BufferTooSmall : std::runtime_error {
  using std::runtime_error::runtime_error;
};
struct CorruptMessage : std::runtime_error {
  using std::runtime_error::runtime_error;
};
struct IncompatibleVersion : std::runtime_error {
  using std::runtime_error::runtime_error;
};
struct PeerLost : std::runtime_error {
  using std::runtime_error::runtime_error;
};
struct RankMismatch : std::runtime_error {
  using std::runtime_error::runtime_error;
};
struct Unsupported : std::runtime_error {
  using std::runtime_error::runtime_error;
};

}  // namespace gradwire
