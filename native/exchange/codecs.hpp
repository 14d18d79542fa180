// The codecs of the core, as exchanges call them.
#pragma once

#include <vector>

#include "exchange/codec.hpp"
#include "gcomp/bucket_importance.hpp"
#include "gcomp/codec.hpp"
#include "quantisers/codec.hpp"
#include "truncated_float/codec.hpp"

namespace gradwire::exchange {

class GCompCodec final : public Codec {
 public:
  // `table`: to encode with. `known`: what messages may have been written with. `importance`: in mode paper. `counts`:
  // if not empty, the exponents of all that is encoded are counted into it.
  GCompCodec(const gcomp::EncodeOptions& options, const HuffmanTable& table, std::vector<const HuffmanTable*> known,
             const gcomp::BucketImportance* importance, std::span<std::int64_t> counts);
  std::size_t max_message_bytes(std::size_t n_values) const override;
  bool weigh(std::size_t first, std::size_t n) override;
  std::size_t encode(const Values& values, std::size_t first, std::span<std::uint8_t> out) override;
  std::size_t encode_mean(const Values& values, std::size_t first, std::size_t divisor, const Values& mean,
                          std::span<std::uint8_t> out) override;
  void decode(std::span<const std::uint8_t> message, std::size_t first, const Values& values) override;
  void decode_sum(std::span<const std::uint8_t> message, std::size_t first, const Values& addend,
                  const Values& values) override;
  void decode_mean(std::span<const std::uint8_t> message, std::size_t first, std::size_t divisor,
                   const Values& values) override;

 private:
  std::size_t encode(const Values& values, std::size_t first, const gcomp::Mean& mean, std::span<std::uint8_t> out);
  void decode(std::span<const std::uint8_t> message, std::size_t first, const gcomp::Finish& finish,
              const Values& values);

  const gcomp::EncodeOptions options_;
  const HuffmanTable& table_;
  const std::vector<const HuffmanTable*> known_;
  const std::span<std::int64_t> counts_;
  gcomp::Weights weights_;
};

// One-bit, two-bit, ternary, QSGD, THC: error feedback, sums and means in the pass that encodes or decodes.
class QuantiserCodec final : public Codec {
 public:
  // Without error feedback, the n-th message draws by step `options.stream.step` + n.
  explicit QuantiserCodec(const quantisers::Options& options) : options_(options) {}
  std::size_t max_message_bytes(std::size_t n_values) const override;
  std::size_t encode(const Values& values, std::size_t first, std::span<std::uint8_t> out) override;
  std::size_t encode_with_feedback(const Values& values, std::size_t first, const Feedback& feedback,
                                   std::span<std::uint8_t> out) override;
  void decode(std::span<const std::uint8_t> message, std::size_t first, const Values& values) override;
  void decode_mean(std::span<const std::uint8_t> message, std::size_t first, std::size_t divisor,
                   const Values& values) override;
  void decode_add(std::span<const std::uint8_t> message, std::size_t first, std::span<float> total,
                  std::span<float> scratch) override;

 private:
  quantisers::Options options_;
};

class TruncatedFloatCodec final : public Codec {
 public:
  // Stochastic rounding draws the n-th message's numbers by step `stream.step` + n.
  TruncatedFloatCodec(const truncated_float::Settings& settings, truncated_float::Rounding rounding,
                      const random::Stream& stream)
      : settings_(settings), rounding_(rounding), stream_(stream) {}
  std::size_t max_message_bytes(std::size_t n_values) const override;
  std::size_t encode(const Values& values, std::size_t first, std::span<std::uint8_t> out) override;
  void decode(std::span<const std::uint8_t> message, std::size_t first, const Values& values) override;

 private:
  const truncated_float::Settings settings_;
  const truncated_float::Rounding rounding_;
  random::Stream stream_;
};

class EmbeddedFloatCodec final : public Codec {
 public:
  EmbeddedFloatCodec(std::size_t partition, std::size_t n_bits, Dtype dtype)
      : partition_(partition), n_bits_(n_bits), dtype_(dtype) {}
  std::size_t max_message_bytes(std::size_t n_values) const override;
  std::size_t encode(const Values& values, std::size_t first, std::span<std::uint8_t> out) override;
  void decode(std::span<const std::uint8_t> message, std::size_t first, const Values& values) override;

 private:
  const std::size_t partition_, n_bits_;
  const Dtype dtype_;
};

}  // namespace gradwire::exchange
