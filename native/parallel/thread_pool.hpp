// One pool of threads for every codec of the process.
#pragma once

#include <algorithm>
#include <functional>

#include "spans.hpp"

namespace gradwire {

// Sets how many threads `parallel_for` may use, the calling one included. Takes effect at the next call.
void set_thread_count(std::size_t n_threads);
std::size_t thread_count();

// Calls body(i) once for every i in [0, n_tasks), on the calling thread and on idle threads of the pool; returns when
// all are done. The first exception of a body is rethrown here, after the others have ended. Tasks must not depend on
// which thread runs them: results have to be the same for every thread count. Callers may be concurrent; a call from
// inside a body runs its tasks on its own thread.
void parallel_for(std::size_t n_tasks, const std::function<void(std::size_t)>& body);

// The same with body(begin, n) for every run of `run` of the elements; the last one may be shorter.
template <class Body>
void parallel_for_runs(std::size_t n_elements, std::size_t run, const Body& body) {
  parallel_for((n_elements + run - 1) / run, [&](std::size_t task) {
    const std::size_t begin = task * run;
    body(begin, std::min(run, n_elements - begin));
  });
}

}  // namespace gradwire
