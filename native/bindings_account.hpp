// What an exchange did, as telemetry takes it: bytes sent and received, messages, and (kind, start, end) of its work.
#pragma once

#include <nanobind/nanobind.h>

#include "exchange/account.hpp"

namespace gradwire {

inline nanobind::tuple account_of(const exchange::Account& account) {
  nanobind::list spans;
  for (const exchange::Span& span : account.spans)
    spans.append(nanobind::make_tuple(static_cast<int>(span.kind), span.start_ns, span.end_ns));
  return nanobind::make_tuple(account.bytes_sent, account.bytes_received, account.n_messages, spans);
}

}  // namespace gradwire
