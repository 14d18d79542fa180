// Drives fuzz_conversation without libFuzzer, and makes its seeds: messages that come in portions, most of them right.
#include <cstdint>
#include <random>
#include <vector>

#include "drive.hpp"

namespace {

std::vector<std::uint8_t> make_script(std::mt19937_64& random, bool is_exchange) {
  std::vector<std::uint8_t> out;
  const auto put = [&](std::uint64_t value) { out.push_back(static_cast<std::uint8_t>(value)); };
  if (is_exchange) put(random());
  for (std::uint64_t n = 1 + random() % 12; n > 0; --n) {
    const std::uint64_t what = is_exchange ? random() % 128 : random() % 250 / 10 * 10 + random() % 9,
                        n_body = random() % 60;
    put(what);
    if (!is_exchange) put(random());
    if (is_exchange || what % 10 <= 2) {
      put(n_body);
      for (std::uint64_t i = 0; i < (what >= 200 ? 10 : 1) * n_body; ++i) put(random() % 4 == 0 ? random() : 0);
    }
    if (!is_exchange && what % 10 == 4) put(64 + random() % 192);
    if (!is_exchange && what % 10 == 5) put(20 + random() % 100);
  }
  return out;
}

}  // namespace

int main(int n_arguments, char** arguments) {
  const auto make = [](std::mt19937_64& random, std::uint8_t first, std::uint8_t) {
    return make_script(random, first % 2 != 0);
  };
  return gradwire::fuzz::drive(n_arguments, arguments, 40, make);
}
