// What the core throws; bindings.cpp turns each into the Python error of the same name.
#pragma once

#include <stdexcept>
#include <string>

namespace gradwire {

struct Error : std::runtime_error {
  Error(const char* python_name, const std::string& what) : std::runtime_error(what), name(python_name) {}
  const char* name;
};

struct InvalidArgument : Error {
  explicit InvalidArgument(const std::string& what) : Error("InvalidArgument", what) {}
};
struct BufferTooSmall : Error {
  explicit BufferTooSmall(const std::string& what) : Error("BufferTooSmall", what) {}
};
struct CorruptMessage : Error {
  explicit CorruptMessage(const std::string& what) : Error("CorruptMessage", what) {}
};
struct IncompatibleVersion : Error {
  explicit IncompatibleVersion(const std::string& what) : Error("IncompatibleVersion", what) {}
};
struct PeerLost : Error {
  explicit PeerLost(const std::string& what) : Error("PeerLost", what) {}
};
struct RankMismatch : Error {
  explicit RankMismatch(const std::string& what) : Error("RankMismatch", what) {}
};
struct Unsupported : Error {
  explicit Unsupported(const std::string& what) : Error("Unsupported", what) {}
};

}  // namespace gradwire
