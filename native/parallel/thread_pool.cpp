#include "parallel/thread_pool.hpp"

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <deque>
#include <exception>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace gradwire {
namespace {

// One call of parallel_for. Workers and the caller take task numbers from `next` until none is left.
struct Job {
  const std::function<void(std::size_t)>& body;
  const std::size_t n_tasks;
  std::atomic<std::size_t> next{0};
  std::atomic<std::size_t> n_done{0};
  std::mutex mutex;
  std::condition_variable all_done;
  std::exception_ptr error;

  Job(const std::function<void(std::size_t)>& body_of_task, std::size_t n) : body(body_of_task), n_tasks(n) {}

  void work() {
    for (std::size_t i; (i = next.fetch_add(1)) < n_tasks;) {
      try {
        body(i);
      } catch (...) {
        const std::lock_guard lock(mutex);
        if (!error) error = std::current_exception();
      }
      if (n_done.fetch_add(1) + 1 == n_tasks) {
        const std::lock_guard lock(mutex);
        all_done.notify_all();
      }
    }
  }
};

thread_local bool inside_task = false;

class Pool {
 public:
  void resize(std::size_t n_workers) {
    if (workers_.size() == n_workers) return;
    {
      const std::lock_guard lock(mutex_);
      stopping_ = true;
    }
    wake_.notify_all();
    for (auto& worker : workers_) worker.join();
    workers_.clear();
    stopping_ = false;
    for (std::size_t i = 0; i < n_workers; ++i) workers_.emplace_back([this] { serve(); });
  }

  void run(const std::shared_ptr<Job>& job, std::size_t n_helpers) {
    {
      const std::lock_guard lock(mutex_);
      for (std::size_t i = 0; i < n_helpers; ++i) queue_.push_back(job);
    }
    wake_.notify_all();
    job->work();
    std::unique_lock lock(job->mutex);
    job->all_done.wait(lock, [&] { return job->n_done.load() == job->n_tasks; });
  }

 private:
  void serve() {
    inside_task = true;
    for (;;) {
      std::shared_ptr<Job> job;
      {
        std::unique_lock lock(mutex_);
        wake_.wait(lock, [this] { return stopping_ || !queue_.empty(); });
        if (stopping_) return;
        job = std::move(queue_.front());
        queue_.pop_front();
      }
      job->work();
    }
  }

  std::mutex mutex_;
  std::condition_variable wake_;
  std::deque<std::shared_ptr<Job>> queue_;
  std::vector<std::thread> workers_;
  bool stopping_ = false;
};

std::atomic<std::size_t> wanted_threads{1};

std::mutex pool_mutex;  // of what follows
Pool* pool = nullptr;   // never deleted: its threads may outlive every static destructor

// A forked child has none of its parent's threads: it starts a pool of its own at the next call, and leaks the old one,
// whose threads it could not join. Nobody holds the lock when a process forks: none would be left to let go of it.
void forget_pool_after_fork() {
  pool = nullptr;
  inside_task = false;
  pool_mutex.unlock();
}

[[maybe_unused]] const int registered =
    pthread_atfork([] { pool_mutex.lock(); }, [] { pool_mutex.unlock(); }, forget_pool_after_fork);

Pool& pool_with(std::size_t n_workers) {
  const std::lock_guard lock(pool_mutex);
  if (pool == nullptr) pool = new Pool;
  pool->resize(n_workers);
  return *pool;
}

}  // namespace

void set_thread_count(std::size_t n_threads) { wanted_threads.store(std::max<std::size_t>(1, n_threads)); }

std::size_t thread_count() { return wanted_threads.load(); }

void parallel_for(std::size_t n_tasks, const std::function<void(std::size_t)>& body) {
  const std::size_t n_workers = wanted_threads.load() - 1;
  if (n_tasks <= 1 || n_workers == 0 || inside_task) {
    for (std::size_t i = 0; i < n_tasks; ++i) body(i);
    return;
  }
  const auto job = std::make_shared<Job>(body, n_tasks);
  pool_with(n_workers).run(job, std::min(n_workers, n_tasks - 1));
  if (job->error) std::rethrow_exception(job->error);
}

}  // namespace gradwire
