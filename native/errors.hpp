// What the core throws; bindings.cpp turns each into the Python error of the same name.
#pragma once

#include <algorithm>
#include <stdexcept>
#include <string>
#include <type_traits>

namespace gradwire {

// Words and numbers, one after the other.
template <class... Parts>
[[gnu::cold]] std::string text(const Parts&... parts) {
  std::string all;
  const auto append = [&all](const auto& part) {
    if constexpr (std::is_arithmetic_v<std::remove_cvref_t<decltype(part)>>)
      all += std::to_string(part);
    else
      all += part;
  };
  (append(parts), ...);
  return all;
}

struct Error : std::runtime_error {
  Error(const char* python_name, const std::string& what) : std::runtime_error(what), name(python_name) {}
  const char* name;
};

template <std::size_t n>
struct ErrorName {
  char letters[n];
  consteval ErrorName(const char (&name)[n]) { std::copy_n(name, n, letters); }
};
template <ErrorName python_name>
struct Named : Error {
  template <class... Parts>
  explicit Named(const Parts&... parts) : Error(python_name.letters, text(parts...)) {}
};

using InvalidArgument = Named<"InvalidArgument">;
using BufferTooSmall = Named<"BufferTooSmall">;
using CorruptMessage = Named<"CorruptMessage">;
using IncompatibleVersion = Named<"IncompatibleVersion">;
using PeerLost = Named<"PeerLost">;
using RankMismatch = Named<"RankMismatch">;
using Unsupported = Named<"Unsupported">;

}  // namespace gradwire
